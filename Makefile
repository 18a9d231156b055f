# Targets for people; `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help dev os-packages lock demo clear test test-full lint unit cores molecule e2e test-vm test-cuda docs \
        bench-gpu bench-engine bench-download fault-download fault-host fault-serving build

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(BIN)/python -m tests.lab
DEMO_INVENTORY := inventories/demo
export PATH := $(CURDIR)/$(BIN):$(PATH)
# uv reads the system's certificate store, as apt and pip do.
export UV_SYSTEM_CERTS := 1
UV_VERSION := 0.13.9

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

os-packages: ## install the Debian packages the lab needs (sudo where needed)
	@$(PYTHON) -m tests.lab deps --install

$(VENV)/.ready: pyproject.toml uv.lock | os-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv sync --quiet --frozen --inexact --extra dev
	@touch $@

dev: $(VENV)/.ready ## create the development environment in .venv

lock: dev ## resolve the development environment anew into uv.lock
	$(BIN)/uv lock

demo: dev ## a simulated 4 x V100 machine, from bare to a served model that answers
	@$(BIN)/python -m tests.demo

clear: ## remove everything the lab made: machines, networks, images, caches (not .venv, uv's cache, apt packages)
	@$(PYTHON) -m tests.lab clear --all
	@rm -f $(DEMO_INVENTORY)/lab.yml

test: dev ## everything that must hold: linters, unit, both ends of ansible-core, molecule, end to end
	@$(BIN)/python -m tests.tiers test

test-full: dev ## the tiers of `test` and the heavy ones
	@$(BIN)/python -m tests.tiers full

lint: dev ## ruff, mypy, yamllint, ansible-lint, shellcheck
	@$(BIN)/python -m tests.tiers lint

unit: dev ## unit tests on this Python
	@$(BIN)/python -m pytest -q

cores: dev ## unit tests, syntax and docs on the oldest and the newest ansible-core
	@$(BIN)/python -m tests.tiers cores

molecule: dev ## every molecule scenario
	@$(BIN)/python -m tests.tiers molecule

e2e: dev ## whole runs through ansible-runner, wrong settings included
	@$(BIN)/python -m tests.tiers e2e

test-vm: dev ## a virtual machine with kernels of its own: reboots, initramfs, held kernels, GRUB (see docs/vm.md)
	@$(BIN)/python -m tests.tiers vm

test-cuda: dev ## the whole engine for sm_70 by the roles, with the toolkits of Debian 12 and 13 (kept by fingerprint)
	@$(BIN)/python -m tests.tiers cuda

docs: dev ## regenerate what is generated under docs/
	$(BIN)/python docs/generate_faults.py
	$(BIN)/python docs/generate_compatibility.py
	$(BIN)/python docs/generate_models.py

bench-gpu: dev ## process count and overhead of the GPU modules
	@$(BIN)/python -m tests.bench.gpu

bench-engine: dev ## processor time: sm_70 alone against the source's own list, and a new version with a warm compiler cache
	@$(BIN)/python -m tests.bench.engine

bench-download: dev ## model_download beside curl, aria2c and get_url (same nginx on loopback)
	@$(BIN)/python -m tests.bench.download

fault-download: dev ## kill -9 a download at 50 random moments, count bytes fetched twice and wrong files
	@$(BIN)/python -m tests.fault.download

fault-host: dev ## kill the preparation of a host at 20 random moments, run it again, compare the machine
	@$(BIN)/python -m tests.fault.host

fault-serving: dev ## kill -9 a ready server under load 20 times, count recoveries, lost requests; three deaths before it is ready
	@$(BIN)/python -m tests.fault.serving

build: dev ## the collection as an artifact under build/
	@rm -rf build && mkdir build
	$(BIN)/ansible-galaxy collection build --output-path build .

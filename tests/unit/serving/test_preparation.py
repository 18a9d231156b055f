# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is judged on the machine before a server starts, with an engine that is played by a shell script."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.gguf.saved import render as render_gguf
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings
from ansible_collections.volta.llm.plugins.module_utils.serving.model_file import inspect, stem
from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import (
    Prepared,
    UnitOptions,
    inspect_engine,
    inspect_gpus,
    prepare,
)

HELP = Path(__file__).parents[1] / "fixtures/engine/llama-server-0.5.0-dev-help.txt"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Answers --help as the real one; refuses a threads value of 7 as the real one refuses a bad value."""
    program = tmp_path / "release/bin/llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        f'case "$*" in --help) cat {HELP};;\n'
        '*"--threads 7"*) echo "error while handling argument --threads: stoi" >&2; exit 1;;\n'
        "*--version) echo version: 0.5.0-dev;; *) exit 99;; esac\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(render_gguf({"general.architecture": "qwen4exp", "qwen4exp.context_length": 262144}, []))
    return path


@pytest.fixture
def gpus(tmp_path: Path) -> Machine:
    """Two V100 and a network card, as /sys shows them."""
    rows = {
        "0000:1c:00.0": ("0x10de", "0x030200", "0x1db5"),
        "0000:1a:00.0": ("0x10de", "0x030200", "0x1db5"),
        "0000:02:00.0": ("0x15b3", "0x020000", "0x1017"),
        "0000:1a:00.1": ("0x10de", "0x040300", "0x10f8"),
    }
    for bus_id, values in rows.items():
        folder = tmp_path / "sysroot/sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        for name, value in zip(("vendor", "class", "device"), values, strict=True):
            (folder / name).write_text(value + "\n")
    return Machine(str(tmp_path / "sysroot"))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def prepared(engine: Path, model: Path, gpus: Machine, check: bool = False, **settings: Any) -> Prepared:
    values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": free_port(), **settings}
    return prepare(Settings(**values), UnitOptions(), gpus, check=check)


def codes(found: Prepared) -> list[str]:
    return [fault.code for fault in found.faults]


def test_sound_settings(engine: Path, model: Path, gpus: Machine) -> None:
    found = prepared(engine, model, gpus, api_keys=["demo-key-that-is-no-secret"], api_key_file="/etc/k")
    assert codes(found) == []
    assert found.results["architecture"] == "qwen4exp"
    assert found.results["would_verify"] is False
    assert found.results["model_files"] == [str(model)]
    assert f"ExecStart={engine} --model {model}" in found.results["unit"]
    assert "demo-key" not in json.dumps(found.results)
    asked, parsed = (engine.parent.parent.parent / "calls").read_text().splitlines()
    assert asked == "--help"
    # The key file is not there yet; the engine would read it while parsing.
    assert parsed.endswith("--version")
    assert "--api-key-file" not in parsed


def test_the_account_is_judged(engine: Path, model: Path, gpus: Machine) -> None:
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=free_port())
    found = {user: prepare(settings, UnitOptions(user=user), gpus) for user in ("root", "no-such-account")}
    assert [(codes(each), each.results["account_exists"]) for each in found.values()] == [
        (["account_unusable"], True),
        ([], False),
    ]


def test_the_engine_parses_the_arguments(engine: Path, model: Path, gpus: Machine) -> None:
    found = prepared(engine, model, gpus, threads=7)
    assert codes(found) == ["argument_refused"]
    assert "--threads" in found.faults[0].message


def test_a_release_names_its_capabilities(engine: Path, model: Path) -> None:
    manifest = {"version": "0.5.0-dev", "capabilities": {"flags": ["--model", "-m"]}}
    (engine.parent.parent / "release.json").write_text(json.dumps(manifest))
    found, faults = inspect_engine(str(engine))
    assert (found.flags, found.version, faults) == ({"--model", "-m"}, "0.5.0-dev", [])
    assert not (engine.parent.parent.parent / "calls").exists()


@pytest.mark.parametrize("manifest", ["", "[]", '{"capabilities": {"flags": []}}', '{"capabilities": 3}'])
def test_a_manifest_that_says_nothing_is_no_answer(engine: Path, manifest: str) -> None:
    (engine.parent.parent / "release.json").write_text(manifest)
    found, faults = inspect_engine(str(engine))
    assert ("--no-ui" in found.flags, found.version, faults) == (True, None, [])


def test_an_engine_that_does_not_run(engine: Path, model: Path, gpus: Machine) -> None:
    engine.write_text("#!/bin/sh\necho 'error while loading shared libraries: libcudart.so.12' >&2; exit 127\n")
    found = prepared(engine, model, gpus)
    assert codes(found) == ["engine_missing"]
    assert "libcudart.so.12" in found.faults[0].message


def test_on_a_bare_machine(tmp_path: Path, gpus: Machine) -> None:
    missing = tmp_path / "nothing"
    assert codes(prepared(missing, tmp_path / "no.gguf", gpus)) == ["engine_missing", "gguf_not_found"]
    found = prepared(missing, tmp_path / "no.gguf", gpus, check=True)
    assert (codes(found), found.results["would_verify"]) == ([], True)
    # What needs neither engine nor model is judged in check mode as well.
    assert codes(prepared(missing, tmp_path / "no.gguf", gpus, check=True, port=80)) == ["setting_invalid"]


def test_the_port_is_taken(engine: Path, model: Path, gpus: Machine) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        found = prepared(engine, model, gpus, port=server.getsockname()[1])
    assert codes(found) == ["port_taken"]
    assert "(pid " in found.faults[0].message


@pytest.mark.parametrize(
    "host",
    [
        # Addresses for documentation (RFC 5737, RFC 3849) are no machine's.
        "192.0.2.1",
        "2001:db8::1",
        # Link-local ones exist per interface.
        "fe80::1%lo",
        "fe80::1%no-such-if",
        "fe80::1",
    ],
)
def test_an_address_of_another_machine(engine: Path, model: Path, gpus: Machine, host: str) -> None:
    found = prepared(engine, model, gpus, host=host, api_keys=["demo-key-that-is-no-secret"])
    assert [(fault.code, fault.subject) for fault in found.faults] == [("setting_invalid", "host")]
    assert host in found.faults[0].message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "localhost"])
def test_an_address_of_this_machine(engine: Path, model: Path, gpus: Machine, host: str) -> None:
    assert codes(prepared(engine, model, gpus, host=host, api_keys=["demo-key-that-is-no-secret"])) == []


def test_what_is_no_address_is_said_once(engine: Path, model: Path, gpus: Machine) -> None:
    assert codes(prepared(engine, model, gpus, host="example.org")) == ["setting_invalid"]


def test_the_service_is_not_in_its_own_way(engine: Path, model: Path, gpus: Machine, tmp_path: Path) -> None:
    here = tmp_path / "here/proc"
    (here / "900/fd").mkdir(parents=True)
    (here / "net").mkdir()
    line = " 0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 42 1 x"
    (here / "net/tcp").write_text(f"header\n{line}\n")
    (here / "900/fd/3").symlink_to("socket:[42]")
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=8080)
    for unit, expected in (("llama-server.service", []), ("other.service", ["port_taken"])):
        (here / "900/cgroup").write_text(f"0::/system.slice/{unit}\n")
        found = prepare(settings, UnitOptions(), gpus, here=Machine(str(tmp_path / "here")))
        assert codes(found) == expected


def test_gpus_are_counted_by_bus_in_order(gpus: Machine) -> None:
    assert inspect_gpus(gpus) == (("0000:1a:00.0", "0000:1c:00.0"), "1db5")


def test_the_cards_count_decides_over_tensor_split(engine: Path, model: Path, gpus: Machine) -> None:
    assert codes(prepared(engine, model, gpus, backend="cuda", tensor_split=[1, 1])) == []
    assert codes(prepared(engine, model, gpus, backend="cuda", tensor_split=[1] * 4)) == ["tensor_split_invalid"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("/m/x-00001-of-00004.gguf", "x"), ("/m/x.gguf", "x"), ("/m/x.Q8_0.gguf", "x.Q8_0"), ("/m/odd", "odd")],
)
def test_a_name_for_the_model(path: str, name: str) -> None:
    assert stem(path) == name


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    facts, faults = inspect(str(path))
    assert facts.architecture is None
    assert [fault.code for fault in faults] == ["gguf_wrong_file"]

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is judged on the machine before a server starts, with an engine that is played by a shell script."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.catalogue_models import find_model
from ansible_collections.volta.llm.plugins.module_utils.gguf.saved import render as render_gguf
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine, run
from ansible_collections.volta.llm.plugins.module_utils.serving import preparation
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings
from ansible_collections.volta.llm.plugins.module_utils.serving.clients import networks
from ansible_collections.volta.llm.plugins.module_utils.serving.model_file import inspect, stem
from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import (
    Prepared,
    UnitOptions,
    by_systemd,
    inspect_engine,
    inspect_gpus,
    prepare,
    read_files,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places, Stamp

HELP = Path(__file__).parents[1] / "fixtures/engine/llama-server-0.5.0-dev-help.txt"


@pytest.fixture(autouse=True)
def no_containers_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker may be on the machine that runs the tests; only with_docker is asked for its bridges."""
    usual = preparation.container_networks
    monkeypatch.setattr(
        preparation, "container_networks", lambda runner: usual(runner) if runner is with_docker else {}
    )


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Answers --help as the real one; refuses a threads value of 7 and an option without its value as it does.

    What it takes for the command of a server leaves a file.
    """
    program = tmp_path / "release/bin/llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        f'case "$*" in --help) cat {HELP};;\n'
        '*"--threads 7"*) echo "error while handling argument --threads: stoi" >&2; exit 1;;\n'
        "*--log-file|*--slot-save-path|*--lora|*-md|*--grammar|*--mmproj)\n"
        "for last; do :; done\n"
        'printf "error while handling argument \\"%s\\": expected value for argument\\n" "$last" >&2; exit 1;;\n'
        f'"--help "*) cat {HELP};; *) touch {tmp_path}/served; exit 99;; esac\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(render_gguf({"general.architecture": "qwen4exp", "qwen4exp.context_length": 262144}, []))
    stamp = Places(path).stamp
    stamp.parent.mkdir()
    Stamp.of(path.stat(), "0" * 64, "http://localhost/", "sha256").write(stamp)
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


def prepared(engine: Path, model: Path, machine: Machine, /, check: bool = False, **settings: Any) -> Prepared:
    values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": free_port(), **settings}
    return prepare(Settings(**values), UnitOptions(), machine, check=check)


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
    assert parsed.startswith("--help --model ")
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


@pytest.mark.parametrize("option", ["--log-file", "--slot-save-path", "--mmproj", "--lora", "-md", "--grammar"])
def test_an_option_without_its_value_starts_nothing(
    engine: Path, model: Path, gpus: Machine, tmp_path: Path, option: str
) -> None:
    """It took the word behind it, by which the engine was to end, and a server without a key was open to all."""
    keys = {"api_keys": ["demo-key-that-is-no-secret"], "api_key_file": "/etc/k"}
    found = prepared(engine, model, gpus, host="0.0.0.0", extra_args=["--jinja", option], **keys)
    (fault,) = found.faults
    assert (fault.code, fault.subject, fault.message) == ("argument_refused", "extra_args", f"{option} lacks a value")
    assert not (tmp_path / "served").exists()


def test_what_the_engine_parses_would_serve_nobody(engine: Path, model: Path, gpus: Machine, tmp_path: Path) -> None:
    """Whatever an engine makes of the words: it has no model, and an address that nobody else reaches."""
    keys = {"api_keys": ["demo-key-that-is-no-secret"], "api_key_file": "/etc/k"}
    found = prepared(engine, model, gpus, host="0.0.0.0", alias="--api-key-file", extra_args=["--jinja"], **keys)
    assert codes(found) == []
    words = (tmp_path / "calls").read_text().splitlines()[-1].split()
    assert words[:9] == [
        *("--help", "--model", "/dev/null", "--alias", "--api-key-file", "--host", "127.0.0.1", "--port", "0")
    ]
    assert words[-1] == "--jinja"
    assert "/etc/k" not in words


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


def test_a_library_that_was_removed_since_the_build(engine: Path, model: Path, gpus: Machine) -> None:
    """The manifest still tells the options; no argument is to blame."""
    manifest = {"version": "0.5.0-dev", "capabilities": {"flags": sorted(inspect_engine(str(engine))[0].flags)}}
    (engine.parent.parent / "release.json").write_text(json.dumps(manifest))
    engine.write_text(
        "#!/bin/sh\necho 'error while loading shared libraries: libgomp.so.1: cannot open' >&2; exit 127\n"
    )
    found = prepared(engine, model, gpus)
    assert codes(found) == ["engine_missing"]
    assert "libgomp.so.1" in found.faults[0].message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model", "/srv/x\x00.gguf"),
        ("binary", "/opt/x\n/llama-server"),
        ("tls", {"certificate": "/srv/x\nExecStartPre=+/bin/evil", "key": "/srv/k\x00"}),
    ],
)
def test_no_setting_begins_another_line_of_the_unit(
    engine: Path, model: Path, gpus: Machine, setting: str, value: Any
) -> None:
    found = prepared(engine, model, gpus, check=True, **{setting: value})
    assert {(fault.code, fault.subject) for fault in found.faults} == {("setting_invalid", setting)}
    lines = found.results["unit"].splitlines()
    assert not [line for line in lines if line.startswith(("/", "ExecStartPre=+/bin/evil"))]
    assert "\0" not in found.results["unit"]


def test_the_control_characters_of_an_instance_are_its_own(engine: Path, model: Path, gpus: Machine) -> None:
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=free_port())
    instances = [{"name": "b", "port": free_port(), "alias": "a\nb"}]
    options = UnitOptions(guard="/usr/local/guard\nExecStartPre=+/bin/evil")
    found = prepare(settings, options, gpus, instances=instances)
    assert [(fault.code, fault.subject) for fault in found.faults] == [
        ("setting_invalid", "guard"),
        ("setting_invalid", "instances[b]: alias"),
    ]
    assert "\nExecStartPre=+/bin/evil" not in found.results["unit"]


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
    assert inspect_gpus(gpus) == (("0000:1a:00.0", "0000:1c:00.0"), "1db5", {})


@pytest.fixture
def mixed(gpus: Machine) -> Machine:
    """Beside the two V100 of the driver an old display card without a driver, and a V100 kept for a virtual machine."""
    devices = gpus.path("/sys/bus/pci/devices")
    for bus_id, device in (("0000:03:00.0", "0x128b"), ("0000:1d:00.0", "0x1db5")):
        (devices / bus_id).mkdir()
        for name, value in (("vendor", "0x10de"), ("class", "0x030000"), ("device", device)):
            (devices / bus_id / name).write_text(value + "\n")
    drivers = {"0000:1a:00.0": "nvidia", "0000:1c:00.0": "nvidia", "0000:1d:00.0": "vfio-pci"}
    for bus_id, driver in drivers.items():
        (devices / bus_id / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    for number, bus_id in enumerate(("0000:1a:00.0", "0000:1c:00.0")):
        folder = gpus.path(f"/proc/driver/nvidia/gpus/{bus_id}")
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: GPU-{number}a1b2c3d-0000\nBus Location: {bus_id}\n")
    return gpus


def test_cuda_counts_the_cards_of_the_driver(engine: Path, large: Path, mixed: Machine) -> None:
    for gpu, bus_id, index in (
        ("1a:00.0", "0000:1a:00.0", "0"),
        ("0", "0000:1a:00.0", "0"),
        ("1", "0000:1c:00.0", "1"),
    ):
        found = prepared(engine, large, mixed, backend="cuda", gpus=[gpu])
        assert (codes(found), found.results["gpus"]) == ([], [bus_id])
        assert found.results["environment"]["CUDA_VISIBLE_DEVICES"] == index
        assert "devices --count 2 " in found.results["unit"]
    assert inspect_gpus(mixed)[:2] == (("0000:1a:00.0", "0000:1c:00.0"), "1db5")


@pytest.mark.parametrize(
    ("gpu", "why"), [("1d:00.0", "the kernel driver vfio-pci has it"), ("0000:03:00.0", "no kernel driver has it")]
)
def test_a_card_that_the_driver_does_not_run(engine: Path, large: Path, mixed: Machine, gpu: str, why: str) -> None:
    (fault,) = prepared(engine, large, mixed, backend="cuda", gpus=[gpu]).faults
    assert fault.code == "gpu_unknown"
    assert why in fault.message
    assert "Here: 0000:1a:00.0, 0000:1c:00.0." in fault.remedy


def test_a_card_that_the_driver_leaves_out(mixed: Machine) -> None:
    path = mixed.path("/proc/driver/nvidia/gpus/0000:1a:00.0/information")
    path.write_text(path.read_text() + "GPU Excluded: Yes\n")
    bus_ids, _, others = inspect_gpus(mixed)
    assert bus_ids == ("0000:1c:00.0",)
    assert "told to leave it out" in others["0000:1a:00.0"]


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


# --- a model that nobody verified ------------------------------------------------------------------------------------


def test_a_model_that_no_run_verified(engine: Path, model: Path, gpus: Machine) -> None:
    stamp = Places(model).stamp
    proved = json.loads(stamp.read_text())
    cases = {
        "was taken with nothing to verify it by": {**proved, "proved": ""},
        "changed since it was verified": {**proved, "mtime_ns": proved["mtime_ns"] - 1},
        "was never verified": None,
    }
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=free_port())
    for message, content in cases.items():
        stamp.write_text(json.dumps(content)) if content else stamp.unlink()
        (fault,) = prepare(settings, UnitOptions(), gpus).faults
        assert (fault.code, fault.subject) == ("model_unverified", "model")
        assert message in fault.message
        assert codes(prepare(settings, UnitOptions(allow_unverified_model=True), gpus)) == []


# --- the cards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cards(gpus: Machine) -> Machine:
    """nvidia-smi's answers for the two cards; ollama holds much of the second."""
    commands = gpus.path("commands")
    commands.mkdir()
    (commands / "cards").write_text(
        "00000000:1A:00.0, GPU-a0000000-0, Tesla V100-SXM2-32GB, 32768, 7.0\n"
        "00000000:1C:00.0, GPU-b0000000-0, Tesla V100-SXM2-32GB, 32768, 7.0\n"
    )
    (commands / "apps").write_text("00000000:1C:00.0, 999999, /usr/bin/ollama, 20112\n")
    form = "--format=csv,noheader,nounits"
    records = [
        {"argv": ["nvidia-smi", "--query-gpu=x", form], "rc": 0, "stdout": "cards"},
        {"argv": ["nvidia-smi", "--query-compute-apps=x", form], "rc": 0, "stdout": "apps"},
    ]
    (commands / "index.json").write_text(json.dumps(records))
    return Machine(str(gpus.sysroot))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The header of a 30B model with 48 layers, in a sparse file of its whole size."""
    known = find_model("qwen3-30b-a3b-q4_k_m")
    assert known is not None
    header = known.header()
    path = tmp_path / "large.gguf"
    path.write_bytes(render_gguf(header.metadata, header.tensors))
    os.truncate(path, path.stat().st_size + header.data_bytes + 64)
    stamp = Places(path).stamp
    stamp.parent.mkdir(exist_ok=True)
    Stamp.of(path.stat(), "0" * 64, "http://localhost/", "sha256").write(stamp)
    return path


def test_another_engine_on_a_card_is_refused(engine: Path, large: Path, cards: Machine) -> None:
    found = prepared(engine, large, cards, backend="cuda")
    (fault,) = found.faults
    assert (fault.code, fault.subject) == ("gpu_held", "00000000:1C:00.0")
    assert "ollama (pid 999999)" in fault.message
    # On the other card the server is alone.
    found = prepared(engine, large, cards, backend="cuda", gpus=["1a:00.0"])
    assert codes(found) == []
    (card,) = found.results["memory"]
    assert card["uuid"] == "GPU-a0000000-0"
    assert 17000 < card["counted_mib"] < 32768
    assert found.results["gpus"] == ["0000:1a:00.0"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Conflicts=shutdown.target llama-server.service\nConflictedBy=\n", []),
        ("Conflicts=shutdown.target\nConflictedBy=llama-server.service\n", []),
        ("Conflicts=shutdown.target other-llama-server.service\nConflictedBy=\n", ["gpu_held"]),
    ],
)
def test_a_unit_that_gives_way_is_not_in_the_way(
    engine: Path, large: Path, cards: Machine, tmp_path: Path, said: str, expected: list[str]
) -> None:
    here = tmp_path / "here/proc/999999"
    here.mkdir(parents=True)
    (here / "cgroup").write_text("0::/system.slice/ollama.service\n")

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        if list(argv[:3]) == ["systemctl", "show", "ollama.service"]:
            return Completed(tuple(argv), 0, said, "")
        return run(argv, timeout)

    settings = Settings(model=str(large), binary=str(engine), port=free_port())
    found = prepare(settings, UnitOptions(), cards, here=Machine(str(tmp_path / "here")), runner=runner)
    assert codes(found) == expected


def test_what_does_not_fit_is_refused_before_the_start(engine: Path, large: Path, cards: Machine) -> None:
    (fault,) = prepared(engine, large, cards, backend="cuda", gpus=["0"], context_per_request=40960, parallel=8).faults
    assert fault.code == "plan_does_not_fit"
    assert "Write" in fault.remedy


def test_a_server_at_work_is_not_disturbed_to_count_what_was_counted(
    engine: Path, large: Path, cards: Machine, tmp_path: Path
) -> None:
    """llama-fit-params opens the cards, which takes memory that the server may need."""
    asked = tmp_path / "asked"
    tool = engine.with_name("llama-fit-params")
    tool.write_text(f"#!/bin/sh\necho x >> {asked}\necho CUDA0 17000 800 19000\n")
    tool.chmod(0o755)
    units = tmp_path / "units"
    units.mkdir()
    settings = Settings(model=str(large), binary=str(engine), gpus=["0"], port=free_port())
    options = UnitOptions(unit_folder=units)
    found = prepare(settings, options, cards)
    # What the engine says of itself is the larger figure, and too much.
    assert codes(found) == ["plan_does_not_fit"]
    assert found.results["memory"][0]["engine_mib"] > 32768
    (units / "llama-server.service").write_text(found.results["unit"])
    found = prepare(settings, options, cards)
    assert (codes(found), found.results["memory"][0]["engine_mib"]) == ([], None)
    assert asked.read_text() == "x\n"


def test_the_unit_waits_for_all_cards_of_the_machine(engine: Path, large: Path, cards: Machine) -> None:
    found = prepared(engine, large, cards, backend="cuda", gpus=["0"])
    assert "devices --count 2 " in found.results["unit"]
    assert '"CUDA_VISIBLE_DEVICES=0"' in found.results["unit"]


# --- clients ---------------------------------------------------------------------------------------------------------

OPEN = {"host": "0.0.0.0", "api_keys": ["demo-key-that-is-no-secret"], "allowed_clients": ["192.168.10.0/24"]}


def filtered(engine: Path, model: Path, gpus: Machine, works: bool, how: str = "auto", **settings: Any) -> Prepared:
    """With a systemd whose filter works or does not."""

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] != "systemd-run":
            return run(argv, timeout)
        return Completed(tuple(argv), 1 if works and "--property=IPAddressDeny=any" in argv else 0)

    values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": free_port(), **OPEN, **settings}
    return prepare(Settings(**values), UnitOptions(client_filter=how), gpus, runner=runner)


def test_clients_are_kept_away_by_what_works(engine: Path, model: Path, gpus: Machine) -> None:
    found = filtered(engine, model, gpus, works=True)
    assert (codes(found), found.results["client_filter"], found.results["client_rules"]) == ([], "systemd", "")
    assert "IPAddressAllow=192.168.10.0/24\n" in found.results["unit"]
    assert found.results["files"] == []

    found = filtered(engine, model, gpus, works=False)
    assert (codes(found), found.results["client_filter"]) == ([], "nftables")
    assert "192.168.10.0/24" in found.results["client_rules"]
    (file,) = found.results["files"]
    assert file["content"] == found.results["client_rules"]
    assert f"ExecStartPre=+/usr/sbin/nft -f {file['path']}\n" in found.results["unit"]
    assert "IPAddress" not in found.results["unit"]


def with_docker(argv: Sequence[str], timeout: float) -> Completed:
    """A machine with Docker: `ip -json address show` of Debian 12, shortened."""
    links = [
        {"ifname": "eth0", "addr_info": [{"local": "192.168.10.5", "prefixlen": 24, "scope": "global"}]},
        {"ifname": "docker0", "addr_info": [{"local": "172.17.0.1", "prefixlen": 16, "scope": "global"}]},
        {
            "ifname": "br-0123456789ab",
            "addr_info": [
                {"local": "172.18.0.1", "prefixlen": 16, "scope": "global"},
                {"local": "fe80::1", "prefixlen": 64, "scope": "link"},
            ],
        },
    ]
    if argv[0] == "ip":
        return Completed(tuple(argv), 0, json.dumps(links))
    return run(argv, timeout)


def test_containers_that_the_filter_keeps_away(engine: Path, model: Path, gpus: Machine) -> None:
    """Row E26: Dify runs in containers, often on the machine itself."""

    def told(**changed: Any) -> tuple[list[tuple[str, str]], list[str]]:
        values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": free_port(), **OPEN, **changed}
        options = UnitOptions(client_filter="nftables")
        found = prepare(Settings(**values), options, gpus, runner=with_docker)
        return [(fault.code, fault.remedy) for fault in found.faults], found.results["notes"]

    one, other = told()[0]
    assert (one[0], other[0]) == ("containers_kept_out", "containers_kept_out")
    assert "add 172.17.0.0/16 to `allowed_clients`" in one[1]
    assert "172.18.0.0/16" in other[1]
    # The address of its own that no container has.
    assert "fe80" not in other[1]
    assert told(allowed_clients=["172.16.0.0/12", "192.168.10.0/24"])[0] == []
    # Without a filter they get in.
    assert told(allowed_clients=[]) == ([], [])
    # On loopback it is no mistake, but what a client in a container runs into.
    faults, notes = told(host="127.0.0.1", allowed_clients=[])
    assert faults == []
    assert "docker0, br-0123456789ab" in notes[-1]


def test_a_former_unit_that_comes_back_has_the_rules_it_had(
    engine: Path, model: Path, gpus: Machine, tmp_path: Path
) -> None:
    """With those of the new one its port would be open to all: they concern another."""

    def rules(*ports: int, **settings: Any) -> tuple[dict[str, str], list[str]]:
        values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": ports[0], **OPEN, **settings}
        instances = [{"name": f"i{port}", "port": port} for port in ports[1:]]
        options = UnitOptions(client_filter="nftables", folder=str(tmp_path))
        found = prepare(Settings(**values), options, gpus, instances=instances).results
        return {file["path"]: file["content"] for file in found["files"]}, found["absent_files"]

    one, two = free_port(), free_port()
    before, absent = rules(one)
    assert not [path for path in absent if path.endswith(".nft")]
    for path, content in before.items():
        Path(path).write_text(content)
    for after, unused in (rules(two), rules(one, allowed_clients=["10.9.0.0/16"]), rules(one, allowed_clients=[])):
        assert not after.keys() & before.keys()
        assert before.keys() <= set(unused)
    same, unused = rules(one, two)
    assert before.items() <= same.items()
    assert len(same) == 2
    assert not before.keys() & set(unused)


@pytest.mark.parametrize(
    ("host", "own"),
    [("10.0.0.5", ["10.0.0.5/32"]), ("fe80::1%eth0", ["fe80::1/128"]), ("0.0.0.0", []), ("::", []), ("127.0.0.1", [])],
)
def test_a_server_on_one_address_is_asked_there_by_its_own_machine(host: str, own: list[str]) -> None:
    """Readiness is asked from within the unit, and the filter concerns what goes out, too."""
    admitted, _ = networks(["192.168.10.0/24"])
    assert by_systemd(host, admitted) == ["192.168.10.0/24", *own]


def test_clients_that_cannot_come_are_refused_with_the_address(engine: Path, model: Path, gpus: Machine) -> None:
    found = filtered(engine, model, gpus, works=True, allowed_clients=["fd00::/8"])
    assert [(fault.code, fault.subject) for fault in found.faults] == [("setting_invalid", "allowed_clients")]


def test_what_clients_are_told_is_judged_beforehand(engine: Path, model: Path, gpus: Machine) -> None:
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=free_port())
    (fault,) = prepare(settings, UnitOptions(advertised_host="https://llm.example.org"), gpus).faults
    assert (fault.code, fault.subject) == ("setting_invalid", "advertised_host")


def test_a_filter_that_does_not_work_is_not_relied_upon(engine: Path, model: Path, gpus: Machine) -> None:
    assert codes(filtered(engine, model, gpus, works=False, how="systemd")) == ["clients_not_enforced"]
    assert filtered(engine, model, gpus, works=True, how="nftables").results["client_filter"] == "nftables"


def test_without_clients_or_on_loopback_nothing_is_tried(engine: Path, model: Path, gpus: Machine) -> None:
    found = filtered(engine, model, gpus, works=False, allowed_clients=[])
    assert (found.results["client_filter"], "IPAddress" in found.results["unit"]) == (None, False)
    found = filtered(engine, model, gpus, works=False, host="127.0.0.1")
    assert found.results["client_filter"] is None
    assert "IPAddressDeny=any\nIPAddressAllow=localhost\n" in found.results["unit"]
    assert codes(filtered(engine, model, gpus, works=True, allowed_clients=["0.0.0.0/0"])) == ["setting_invalid"]


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *(
                    "-keyout",
                    f"{folder}/{name}.key",
                    "-out",
                    f"{folder}/{name}.pem",
                    "-subj",
                    f"/CN={name}",
                    "-days",
                    "9",
                ),
            ],
            check=True,
            capture_output=True,
        )
    return folder


def test_tls(engine: Path, model: Path, gpus: Machine, certificates: Path) -> None:
    tls = {"certificate": f"{certificates}/a.pem", "key": f"{certificates}/a.key"}
    found = prepared(engine, model, gpus, tls=tls)
    assert codes(found) == []
    assert found.results["base_url"].startswith("https://127.0.0.1:")
    assert "--ssl-key-file /run/llama-server/tls-key" in found.results["unit"]
    assert f" {certificates}/a.key /run/llama-server/tls-key\n" in found.results["unit"]
    assert "ready --url https://127.0.0.1:" in found.results["unit"]
    assert found.results["tls_files"] == [tls["key"], tls["certificate"]]


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        ({"certificate": "a.pem", "key": "b.key"}, "cannot be used together"),
        ({"certificate": "a.key", "key": "a.key"}, "cannot be used together"),
        ({"certificate": "a.pem", "key": "none.key"}, "none.key is not there"),
        ({"certificate": "a.pem"}, "must have certificate and key"),
        ({"certificate": "a.pem", "key": "a.key", "ca": "a.pem"}, "must have certificate and key"),
    ],
)
def test_tls_that_cannot_work(
    engine: Path, model: Path, gpus: Machine, certificates: Path, tls: dict[str, str], message: str
) -> None:
    (fault,) = prepared(engine, model, gpus, tls={key: f"{certificates}/{name}" for key, name in tls.items()}).faults
    assert fault.code == "tls_unusable"
    assert message in fault.message


def test_a_key_with_a_pass_phrase_is_refused_and_nobody_asked(
    engine: Path, model: Path, gpus: Machine, certificates: Path, tmp_path: Path
) -> None:
    """With a terminal (ansible on the machine itself, ssh -tt) OpenSSL would ask there, and the run would hang."""
    locked = tmp_path / "locked.key"
    words = [
        "openssl",
        "pkcs8",
        "-topk8",
        "-in",
        f"{certificates}/a.key",
        "-out",
        str(locked),
        "-passout",
        "pass:hello",
    ]
    subprocess.run(words, check=True, capture_output=True)
    code = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import *; "
        "settings = Settings('/m.gguf', tls={'certificate': sys.argv[1], 'key': sys.argv[2]}); "
        "print(*(fault.message for fault in check_tls(settings, Engine(missing=True))))"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"{certificates}/a.pem", str(locked)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    said = b""
    with suppress(OSError):
        # Linux ends the reading with EIO when nobody has the terminal open any more.
        while b"pass phrase" not in said and (part := os.read(ours, 1000)):
            said += part
    os.close(ours)
    process.kill()
    process.wait()
    assert b"the key has a pass phrase" in said
    assert b"Enter PEM" not in said


def test_files_of_tls_in_a_closed_folder_are_a_fault(
    engine: Path, model: Path, gpus: Machine, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--check` without rights meets them; root, who runs the tests, has no closed folder."""
    usual = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent == certificates:
            raise PermissionError(13, "Permission denied")
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "is_file", lambda path: bool(path.stat()))
    tls = {"certificate": f"{certificates}/a.pem", "key": f"{certificates}/a.key"}
    (fault,) = prepared(engine, model, gpus, tls=tls).faults
    assert (fault.code, "in a folder that is closed" in fault.message) == ("tls_unusable", True)


def test_an_engine_that_was_built_without_tls(engine: Path, model: Path, gpus: Machine, certificates: Path) -> None:
    tls = {"certificate": f"{certificates}/a.pem", "key": f"{certificates}/a.key"}
    (engine.parent / "libserver.so.0").write_bytes(b"\0the server is built without SSL support\n\0")
    (fault,) = prepared(engine, model, gpus, tls=tls).faults
    assert (fault.code, "without OpenSSL" in fault.message) == ("tls_unusable", True)


# --- several servers, and the night ----------------------------------------------------------------------------------


def test_several_servers_are_judged_together(engine: Path, model: Path, gpus: Machine, tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    for name in ("old", "b"):
        (tmp_path / f"units/llama-server@{name}.service").write_text(
            "# Written by Ansible (volta.llm.llama_server): x\n"
        )
    ports = [free_port(), free_port(), free_port()]
    settings = Settings(
        model=str(model), binary=str(engine), backend="cpu", port=ports[0], api_key_file="/etc/llama-server/api-keys"
    )
    instances = [{"name": "b", "port": ports[1]}, {"name": "c", "port": ports[2], "alias": "tiny-c", "threads": 7}]
    found = prepare(settings, UnitOptions(unit_folder=tmp_path / "units"), gpus, instances=instances)
    (fault,) = found.faults
    assert (fault.code, fault.subject) == ("argument_refused", "instances[c]: llama-server")
    assert [server["name"] for server in found.results["servers"]] == [
        "llama-server",
        "llama-server@b",
        "llama-server@c",
    ]
    assert found.results["leftover_units"] == ["llama-server@old"]
    assert "/etc/llama-server/api-keys-old" in found.results["absent_files"]
    assert found.results["base_url"] == f"http://127.0.0.1:{ports[0]}/v1"
    assert codes(prepare(settings, UnitOptions(), gpus, instances=[{"name": "b", "port": ports[0]}])) == [
        "instances_collide"
    ]


def nightly(engine: Path, model: Path, gpus: Machine, when: str, patience: int = 60, **settings: Any) -> Prepared:
    values = {"model": str(model), "binary": str(engine), "backend": "cpu", "port": free_port(), **settings}
    options = UnitOptions(maintenance_restart=when, maintenance_patience=patience)
    return prepare(Settings(**values), options, gpus)


def test_a_restart_by_night(engine: Path, model: Path, gpus: Machine) -> None:
    found = nightly(engine, model, gpus, "03:00", api_keys=["demo-key-that-is-no-secret"], api_key_file="/etc/k")
    assert codes(found) == []
    files = {Path(item["path"]).name: item["content"] for item in found.results["files"]}
    assert "OnCalendar=*-*-* 03:00:00\n" in files["llama-server-maintenance.timer"]
    assert "Persistent=false" in files["llama-server-maintenance.timer"]
    assert "maintain /etc/llama-server/maintenance.json" in files["llama-server-maintenance.service"]
    told = json.loads(files["maintenance.json"])
    assert told["patience"] == 60
    assert told["servers"][0]["unit"] == "llama-server.service"
    assert told["servers"][0]["key_file"] == "/etc/k"
    assert not told["servers"][0]["url"].endswith("/v1")
    assert "demo-key" not in json.dumps(found.results)


def test_no_restart_by_night_leaves_no_file(engine: Path, model: Path, gpus: Machine) -> None:
    found = nightly(engine, model, gpus, "")
    names = {Path(path).name for path in found.results["absent_files"]}
    assert {"llama-server-maintenance.timer", "llama-server-maintenance.service", "maintenance.json"} <= names


@pytest.mark.parametrize(
    ("when", "patience"),
    [("0\u0663:00", 60), ("180", 60), ("3:00", 60), ("24:00", 60), ("daily", 60), ("03:00", 90000)],
)
def test_what_is_no_time_of_day(engine: Path, model: Path, gpus: Machine, when: str, patience: int) -> None:
    (fault,) = nightly(engine, model, gpus, when, patience).faults
    assert fault.code == "setting_invalid"
    # 03:00 without quotes is 180 for YAML 1.1.
    assert ("quotes as a number" in fault.message) == (when == "180")


def test_without_metrics_nobody_knows_when_a_server_is_idle(engine: Path, model: Path, gpus: Machine) -> None:
    manifest = {"capabilities": {"flags": sorted(set(inspect_engine(str(engine))[0].flags) - {"--metrics"})}}
    (engine.parent.parent / "release.json").write_text(json.dumps(manifest))
    (fault,) = nightly(engine, model, gpus, "03:00").faults
    assert "/metrics" in fault.message


def test_files_behind_links_and_of_further_arguments_are_readable(tmp_path: Path) -> None:
    """A link from /srv into somebody's home leads nowhere in a unit that hides homes."""
    shards = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    shards[0].symlink_to("/home/ai/one.gguf")
    shards[1].symlink_to("/var/lib/models/two.gguf")
    words = ["--chat-template-file", "/root/t.jinja", "--mmproj=/mnt/p.gguf", "--jinja", "--grammar", "root ::= [a-z]"]
    assert read_files(Settings(model=str(shards[0]), extra_args=words, binary="/opt/x/bin/llama-server")) == [
        "/opt/x/bin/llama-server",
        str(shards[0]),
        "/home/ai/one.gguf",
        str(shards[1]),
        "/var/lib/models/two.gguf",
        "/root/t.jinja",
        "/mnt/p.gguf",
    ]


def test_a_way_that_leads_through_a_home_and_out_again(tmp_path: Path) -> None:
    """A unit that hides homes finds no link there, wherever it leads."""
    home = tmp_path / "home"
    data = tmp_path / "data"
    home.mkdir()
    data.mkdir()
    (home / "models").symlink_to(data)
    (tmp_path / "srv").symlink_to("home/models")
    (data / "m.gguf").write_text("x")
    found = read_files(Settings(model=f"{tmp_path}/data/../srv/m.gguf", binary="/home/ops/llama-server"))
    assert found == [
        "/home/ops/llama-server",
        f"{tmp_path}/srv/m.gguf",
        f"{home}/models/m.gguf",
        f"{data}/m.gguf",
    ]


def test_homes_are_shown_to_a_server_whose_program_is_in_one(engine: Path, model: Path, gpus: Machine) -> None:
    found = prepared(Path("/home/ops/llama-server"), model, gpus, check=True)
    assert "ProtectHome=read-only\n" in found.results["unit"]


@pytest.mark.parametrize(
    ("seconds", "wrong"), [(0, []), (1, []), (86400, []), (-1, ["setting_invalid"]), (86401, ["setting_invalid"])]
)
def test_a_time_to_load_that_systemd_would_not_keep(
    engine: Path, model: Path, gpus: Machine, seconds: int, wrong: list[str]
) -> None:
    settings = Settings(model=str(model), binary=str(engine), backend="cpu", port=free_port())
    found = prepare(settings, UnitOptions(load_timeout=seconds, allow_unverified_model=True), gpus)
    assert codes(found) == wrong


def test_files_that_further_arguments_name_are_read_at_the_start(
    engine: Path, model: Path, gpus: Machine, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("x")
    arguments = ["--chat-template-file", str(template), f"--grammar-file={template}", "--slot-save-path", str(tmp_path)]
    found = prepared(engine, model, gpus, backend="cpu", extra_args=arguments)
    assert found.results["argument_files"] == [str(template)] * 2

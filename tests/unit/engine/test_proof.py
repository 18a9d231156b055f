# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a release must show before it is put into use."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import libraries, proof, tiny_model
from ansible_collections.volta.llm.plugins.module_utils.engine.gpus import Cards, loaded_driver, read_cards, uncovered
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.gguf.reader import check_data, read_header
from ansible_collections.volta.llm.plugins.module_utils.gguf.source import BytesSource
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engine"


LDD = """\
\tlinux-vdso.so.1 (0x00007f7ff9419000)
\tlibllama.so.0 => /opt/r/lib/libllama.so.0 (0x00007f7ff8000000)
\tlibcuda.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f7ff8e1e000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f7ff941b000)
"""


@pytest.mark.parametrize(("flags", "says"), [(os.ST_NOEXEC, "mounted with noexec"), (0, "")])
def test_a_program_that_cannot_be_started_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: int, says: str
) -> None:
    """A hardened server mounts /opt with noexec: the build ends well, and the proof must say why it does not."""
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    answer = proof.run_as(None, [str(program), "--version"], {})
    monkeypatch.setattr(proof.os, "statvfs", lambda _path: types.SimpleNamespace(f_flag=flags))
    assert proof.ending(answer).startswith("cannot be started: Permission denied")
    assert says in proof.ending(answer)
    assert ("noexec" in proof.ending(answer)) == bool(flags)


def test_ldd_is_read() -> None:
    assert libraries.parse_ldd(LDD) == {
        "libllama.so.0": "/opt/r/lib/libllama.so.0",
        "libcuda.so.1": None,
        "libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6",
    }
    assert libraries.parse_ldd("\tnot a dynamic executable\n") == {}


@pytest.mark.parametrize(
    ("loaded", "why"),
    [
        ({"libllama.so.0": "/opt/r/lib/libllama.so.0", "libc.so.6": "/lib/libc.so.6"}, None),
        ({"libllama.so.0": "/opt/r/bin/../lib/libllama.so.0"}, None),
        # A build host without a driver.
        ({"libcuda.so.1": None}, None),
        ({"libcudart.so.12": None}, "libcudart.so.12 is not found"),
        ({"libllama.so.0": "/usr/lib/libllama.so.0"}, "not from the release"),
        ({"libcuda.so.1": "/usr/local/cuda/lib64/stubs/libcuda.so.1"}, "stub"),
    ],
)
def test_libraries_come_from_the_release(loaded: dict[str, str | None], why: str | None) -> None:
    faults = libraries.judge_libraries(Path("/opt/r/bin/llama-server"), loaded, {"libllama.so.0"})
    if why is None:
        assert faults == []
    else:
        assert len(faults) == 1
        assert why in faults[0].message


@pytest.mark.parametrize(
    ("text", "version", "commit"),
    [
        ("version: 0.5.0-dev (build 0, commit 0c1e57098)\nbuilt with GNU 12.2.0\n", "0.5.0-dev", "0c1e57098"),
        ("ggml_cuda_init: found 4\nversion: 6123 (79c1160b)\nbuilt with\n", "6123", "79c1160b"),
        ("version: 0.5.0-dev (build 0, commit unknown)\n", "0.5.0-dev", None),
        ("version: 0 (unknown)\n", "0", None),
        ("Segmentation fault\n", None, None),
    ],
)
def test_what_the_server_says_of_itself(text: str, version: str | None, commit: str | None) -> None:
    assert proof.parse_version(text) == (version, commit)


def fake(folder: Path, version_rc: str = "exit 0", says: str = "version: 1.0 (build 0, commit abcdef123)") -> Path:
    """A release whose server is a script; libraries are looked at by ldd as ever."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    server = folder / "bin/llama-server"
    server.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"print({says!r} if '--version' in sys.argv else '-m,    --model FNAME   the model')\n"
        f"{version_rc if version_rc != 'exit 0' else ''}\n"
    )
    server.chmod(0o755)
    return folder


def prove(folder: Path, version: str | None = "1.0", commit: str | None = "abcdef123") -> proof.Proof:
    return proof.prove(folder, proof.Expected(version, commit), None)


def test_a_server_that_names_version_and_commit_is_proven(tmp_path: Path) -> None:
    shown = prove(fake(tmp_path / "r"))
    assert (shown.version, shown.commit) == ("1.0", "abcdef123")
    assert [check["check"] for check in shown.checks] == ["libraries", "run path", "version", "help"]
    assert "--model" in shown.capabilities.flags


@pytest.mark.parametrize(
    ("says", "how", "why"),
    [
        ("version: 2.0 (build 0, commit abcdef123)", "exit 0", "names 2.0, expected 1.0"),
        ("version: 1.0 (build 0, commit 999999999)", "exit 0", "commit 999999999"),
        ("version: 1.0 (build 0, commit unknown)", "exit 0", "commit None"),
        ("", "sys.exit(3)", "exit status 3"),
        ("", "os.kill(os.getpid(), 4)", "another processor"),
        ("", "os.kill(os.getpid(), 11)", "signal 11"),
    ],
)
def test_doubt_is_a_refusal(tmp_path: Path, says: str, how: str, why: str) -> None:
    with pytest.raises(FaultError) as caught:
        prove(fake(tmp_path / "r", how, says))
    assert caught.value.fault.code == "proof_failed"
    assert why in caught.value.fault.message


def test_a_cuda_build_without_a_cuda_library_is_refused(tmp_path: Path) -> None:
    # "Works", and runs on the CPU.
    with pytest.raises(FaultError) as caught:
        proof.prove(fake(tmp_path / "r"), proof.Expected("1.0", cuda_architectures=["70-real"]), None)
    assert caught.value.fault.code == "architecture_missing"
    assert "CPU only" in caught.value.fault.message


def test_an_engine_that_does_not_know_the_model_is_refused(tmp_path: Path) -> None:
    folder = fake(tmp_path / "r")
    (folder / "lib/libllama.so.0").write_bytes(b"\0llama\0qwen4exp\0qwen3next\0")
    asked = proof.Expected("1.0", model_architecture="qwen4exp")
    shown = proof.prove(folder, asked, None)
    assert {"check": "model architecture", "found": "qwen4exp is known"} in shown.checks
    # A name that is only the beginning of a known one is not known.
    for name in ("qwen4", "mamba"):
        with pytest.raises(FaultError) as caught:
            proof.prove(folder, proof.Expected("1.0", model_architecture=name), None)
        assert (caught.value.fault.code, caught.value.fault.subject) == ("model_architecture_unknown", name)


READELF = """
Dynamic section at offset 0x2d60 contains 33 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libcuda.so.1]
 0x000000000000001d (RUNPATH)            Library runpath: [$ORIGIN/../lib:$ORIGIN:{more}]
 0x000000000000000c (INIT)               0x1000
"""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("/usr/local/cuda-12.2/lib64", None),
        ("", None),
        ("/usr/local/cuda-12.2/lib64/stubs", "stubs"),
        ("/var/lib/llama-build/work/3f6d0a9c51be/build/bin", "not the release's"),
    ],
)
def test_the_run_path_leads_to_the_release_and_the_toolkit_alone(more: str, why: str | None) -> None:
    folders = libraries.parse_run_path(READELF.format(more=more))
    faults = libraries.judge_run_path(Path("libggml-cuda.so.0"), folders, ["/usr/local/cuda-12.2/lib64"])
    if why is None:
        assert faults == []
    else:
        assert [fault.code for fault in faults] == ["proof_failed"]
        assert why in faults[0].message
        assert more in faults[0].message


# --- on the cards ---

V100X2 = Cards("535.261.03", ("70", "70"))


def engine(folder: Path, devices: int = 2, bench: str = "") -> Path:
    """A release whose programs are scripts: the server lists ``devices``, llama-bench does what ``bench`` says."""
    folder = fake(folder)
    lines = "".join(f"  CUDA{n}: Tesla V100-SXM2-32GB (32494 MiB, 32100 MiB free)\n" for n in range(devices))
    good = "import json; print(json.dumps([{'devices': name, 'avg_ts': 900.0} for name in sys.argv[6].split(',')]))"
    for name, code in (
        ("llama-server", f"print('Available devices:'); print({lines!r})"),
        ("llama-bench", bench or good),
    ):
        (folder / "bin" / name).write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def refused(folder: Path, cards: Cards = V100X2, architectures: tuple[str, ...] = ("70-real",)) -> tuple[str, str]:
    with pytest.raises(FaultError) as caught:
        proof.prove_on_gpus(folder, cards, architectures, None)
    return caught.value.fault.code, caught.value.fault.message


def test_an_engine_computes_on_every_card(tmp_path: Path) -> None:
    checks = proof.prove_on_gpus(engine(tmp_path / "r"), V100X2, ["70-real"], None)
    assert checks == [
        {"check": "devices", "found": "CUDA0, CUDA1"},
        {"check": "compute", "found": "CUDA0 900 tokens/s, CUDA1 900 tokens/s"},
    ]


def test_a_card_that_the_engine_does_not_see(tmp_path: Path) -> None:
    code, message = refused(engine(tmp_path / "r", devices=1))
    assert code == "gpu_proof_failed"
    assert "shows CUDA0, the driver 2 GPUs" in message
    code, message = refused(engine(tmp_path / "none", devices=0))
    assert "shows none" in message


@pytest.mark.parametrize(
    ("bench", "code", "why"),
    [
        (
            "sys.exit('CUDA error: no kernel image is available for execution on the device')",
            "gpu_proof_failed",
            "no kernel image is available",
        ),
        (
            "sys.exit('ggml_backend_cuda_buffer_type_alloc_buffer: allocating failed: out of memory')",
            "gpu_busy",
            "memory",
        ),
        ("sys.exit('CUDA error: all CUDA-capable devices are busy or unavailable')", "gpu_busy", "busy"),
        ("import os; os.abort()", "gpu_proof_failed", "signal 6"),
        ("print('[]')", "gpu_proof_failed", "does not run on CUDA0, CUDA1"),
        ("print('not JSON')", "gpu_proof_failed", "does not run on CUDA0, CUDA1"),
        ('print(\'[{"devices": "CUDA0", "avg_ts": 9.5}]\')', "gpu_proof_failed", "does not run on CUDA1"),
        ('print(\'[{"devices": "CUDA0", "avg_ts": 0}]\')', "gpu_proof_failed", "does not run on CUDA0, CUDA1"),
        ('print(\'[{"devices": "none", "avg_ts": 5}]\')', "gpu_proof_failed", "does not run on CUDA0, CUDA1"),
    ],
)
def test_an_engine_that_does_not_compute_is_refused(tmp_path: Path, bench: str, code: str, why: str) -> None:
    got, message = refused(engine(tmp_path / "r", bench=bench))
    assert got == code
    assert why in message


def test_code_for_another_card_is_refused_before_it_is_run(tmp_path: Path) -> None:
    code, message = refused(engine(tmp_path / "r"), Cards("580.1", ("90", "90")), ("80-real",))
    assert code == "gpu_proof_failed"
    assert "native code for sm_80 alone, and a card here is sm_90" in message
    # With PTX the driver may compile it: only running tells.
    proof.prove_on_gpus(engine(tmp_path / "ptx"), Cards("580.1", ("90", "90")), ["80"], None)
    # A driver that does not say what its cards are is no reason to refuse.
    proof.prove_on_gpus(engine(tmp_path / "unknown"), Cards("470.1", (None, None)), ["80-real"], None)


@pytest.mark.parametrize(
    ("capability", "have", "runs"),
    [
        ("70", ["sm_70"], True),
        ("70", ["sm_80"], False),
        ("72", ["sm_70"], True),
        ("70", ["sm_72"], False),
        ("86", ["sm_70", "sm_80"], True),
        ("90", ["sm_90a"], True),
        ("103", ["sm_100"], True),
        ("120", ["sm_90"], False),
    ],
)
def test_which_card_runs_which_code(capability: str, have: list[str], runs: bool) -> None:
    assert uncovered(capability, have) is not runs


def test_the_cards_are_read(tmp_path: Path) -> None:
    machine = Machine(str(tmp_path))
    assert loaded_driver(machine) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = tmp_path / "proc/driver/nvidia/version"
    for line, expected in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Wed May 22 2025", "535.261.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", None),
    ):
        version.write_text(line)
        assert loaded_driver(machine) == expected
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '535.261.03, 7.0\\n535.261.03, [N/A]\\n'\n")
    smi.chmod(0o755)
    assert read_cards(machine, str(smi)) == Cards("535.261.03", ("70", None))
    smi.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert read_cards(machine, str(smi)) is None
    assert read_cards(machine, "/no/such/nvidia-smi") is None


def test_the_model_of_the_proof_is_a_whole_gguf(tmp_path: Path) -> None:
    path = tiny_model.write_tiny_model(tmp_path / "proof.gguf", layers=3)
    header = read_header(BytesSource(path.read_bytes()))
    check_data(header, "proof.gguf")
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == 3
    assert len(header.tensors) == 3 + 3 * 9
    # To the last byte: nothing is missing and nothing too many.
    assert header.data_offset + header.data_bytes == path.stat().st_size < 1_000_000

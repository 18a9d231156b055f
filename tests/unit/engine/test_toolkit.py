# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""CUDA toolkits: which one is taken, which compiler goes with it, and what is refused before anything is compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.compat import highest_gcc
from ansible_collections.volta.llm.plugins.module_utils.engine import toolkit
from ansible_collections.volta.llm.plugins.module_utils.engine.toolkit import Cuda, probe_cuda

from .conftest import Bench, script


@pytest.fixture
def system(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder of programs, with a g++ of version 12; nothing else is found in PATH."""
    folder = bench.root / "usr-bin"
    folder.mkdir()
    compiler(folder, "g++", "12.2.0")
    monkeypatch.setattr(toolkit, "PREFERRED", str(bench.root / "cuda"))

    def find(name: str, extra: str | None = None) -> str | None:
        return shutil.which(name, path=f"{extra}:{folder}" if extra else str(folder))

    monkeypatch.setattr(toolkit, "find_program", find)
    return folder


def compiler(folder: Path, name: str, version: str) -> Path:
    return script(folder / name, f"echo 'g++ (Debian {version}-14) {version}'\n")


def probe(root: Path | None, *wanted: str, host: str | None = None) -> tuple[Cuda | None, list[str], str]:
    cuda, faults = probe_cuda(str(root) if root else None, wanted or ("70-real",), host, None)
    return cuda, [fault.code for fault in faults], " ".join(f"{fault.message} {fault.remedy}" for fault in faults)


def test_a_whole_toolkit(bench: Bench, system: Path) -> None:
    root = bench.toolkit()
    cuda, faults, _text = probe(root)
    assert faults == []
    assert cuda == Cuda(
        root=str(root),
        nvcc=f"{root}/bin/nvcc",
        version="12.2.140",
        architectures=("70", "75", "80", "90"),
        host_compiler=None,
        host_compiler_version=None,
        cuobjdump=f"{root}/bin/cuobjdump",
        headers="12.2",
        runtime="12.2.140",
        cublas="12.9.5.8",
        stub=f"{root}/lib64/stubs/libcuda.so",
    )


def test_a_toolkit_below_a_path_with_spaces_is_refused_behind_a_link_too(bench: Bench, system: Path) -> None:
    """The linker's options would come apart; the toolkit is used by its real path, so a link does not help."""
    folder = bench.root / "my toolkits"
    folder.mkdir()
    bench.toolkit().rename(folder / "cuda")
    link = bench.root / "cuda-link"
    link.symlink_to(folder / "cuda")
    for root in (folder / "cuda", link):
        cuda, faults, text = probe(root)
        assert (cuda, faults) == (None, ["build_option_invalid"])
        assert "has ' ' in it" in text


def test_d08_a_toolkit_without_a_compiler(bench: Bench, system: Path) -> None:
    root = bench.toolkit()
    (root / "bin/nvcc").unlink()
    cuda, faults, text = probe(root)
    assert cuda is None
    assert faults == ["nvcc_missing"]
    assert f"not found below {root}/bin" in text
    # Found, and the account that compiles cannot run it.
    script(root / "bin/nvcc", "echo 'nvcc fatal: no permission' >&2; exit 1\n")
    assert probe(root)[1] == ["nvcc_missing"]
    assert "cannot be run as the caller: nvcc fatal: no permission" in probe(root)[2]
    assert probe(None)[1] == ["nvcc_missing"]


def test_d02_a_compiler_that_no_longer_knows_the_card(bench: Bench, system: Path) -> None:
    compiler(system, "g++", "12.2.0")
    _cuda, faults, text = probe(bench.toolkit("13.0"))
    assert faults == ["architecture_unsupported"]
    assert "the oldest it knows is compute_75" in text
    assert "12.9 is the last" in text


def test_the_toolkit_that_knows_the_card_is_taken(bench: Bench, system: Path) -> None:
    newest, old = bench.toolkit("13.0"), bench.toolkit("12.2")
    (bench.root / "cuda").symlink_to(newest.name)
    cuda, faults, _text = probe(None)
    assert faults == []
    assert cuda is not None
    assert cuda.root == str(old)
    # Named or found, by a link or by its own name: one toolkit has one spelling, or it would be built twice.
    (bench.root / "alias").symlink_to(old.name)
    assert probe(bench.root / "alias")[0] == probe(old)[0] == cuda
    # For a card that it knows, the one the machine prefers.
    cuda, _faults, _text = probe(None, "90-real")
    assert cuda is not None
    assert cuda.root == str(newest)
    # None of them: the one that the machine prefers is named.
    _cuda, faults, text = probe(None, "50-real")
    assert faults == ["architecture_unsupported"]
    assert "nvcc 13.0.140" in text
    # A root that is named is the only one.
    assert probe(newest)[1] == ["architecture_unsupported"]


def test_d06_two_toolkits_are_not_mixed(bench: Bench, system: Path) -> None:
    root = bench.toolkit()
    (root / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  12010\n")
    _cuda, faults, text = probe(root)
    assert faults == ["toolkit_mixed"]
    assert "nvcc is 12.2.140, headers 12.1" in text
    (root / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  12020\n")
    (root / "lib64/libcudart.so").unlink()
    (root / "lib64/libcudart.so.12.4.127").write_text("")
    (root / "lib64/libcudart.so").symlink_to("libcudart.so.12.4.127")
    assert probe(root)[1] == ["toolkit_mixed"]
    assert "libcudart 12.4.127" in probe(root)[2]


@pytest.mark.parametrize(
    ("gone", "code", "says"),
    [
        ("include/cuda_runtime_api.h", "toolkit_incomplete", "cuda-cudart-dev-12-2"),
        ("lib64/libcudart.so", "toolkit_incomplete", "no libcudart"),
        ("lib64/libcublas.so", "toolkit_incomplete", "libcublas-dev-12-2"),
        ("bin/cuobjdump", "build_tool_missing", "cuda-cuobjdump-12-2"),
    ],
)
def test_missing_parts_are_named_with_their_package(
    bench: Bench, system: Path, gone: str, code: str, says: str
) -> None:
    root = bench.toolkit()
    (root / gone).unlink()
    _cuda, faults, text = probe(root)
    assert faults == [code]
    assert says in text


def test_without_a_stub_and_without_a_driver_nothing_can_be_linked(bench: Bench, system: Path) -> None:
    root = bench.toolkit()
    cuda, _faults, _text = probe(root)
    assert cuda is not None
    bare = Cuda(**{**cuda.__dict__, "stub": None})
    faults = toolkit.judge_parts(bare)
    assert [fault.code for fault in faults] == ["libcuda_stub_missing"]
    assert "cuda-driver-dev-12-2" in faults[0].remedy


def test_d04_a_compiler_that_the_toolkit_takes_is_chosen_beside(bench: Bench, system: Path) -> None:
    root = bench.toolkit()
    compiler(system, "g++", "14.2.0")
    _cuda, faults, text = probe(root)
    assert faults == ["host_compiler_too_new"]
    assert "is gcc 14; CUDA 12.2 takes gcc up to 12" in text
    assert "apt-get install g++-12" in text
    assert "update-alternatives" not in text
    for number in (13, 11, 12):
        compiler(system, f"g++-{number}", f"{number}.3.0")
    cuda, faults, _text = probe(root)
    assert faults == []
    assert cuda is not None
    assert cuda.host_compiler == str(system / "g++-12")
    assert cuda.host_compiler_version == "g++ (Debian 12.3.0-14) 12.3.0"
    # One that is named and too new is refused before the build finds out.
    assert probe(root, host=str(system / "g++-13"))[1] == ["host_compiler_too_new"]
    assert probe(root, host=str(system / "g++-11"))[1] == []
    assert probe(root, host="/no/such/g++")[1] == ["build_tool_missing"]


@pytest.mark.parametrize(
    ("cuda", "gcc"),
    [("11.8.89", 11), ("12.2", 12), ("12.4.131", 13), ("12.9.86", 14), ("13.0.88", None), ("11.5", None)],
)
def test_the_table_of_compilers(cuda: str, gcc: int | None) -> None:
    assert highest_gcc(cuda) == gcc


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\n", 12),
        ("g++-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\n", 13),
        ("x86_64-linux-gnu-g++-11 (Debian 11.3.0-12) 11.3.0\n", 11),
        ("Debian clang version 14.0.6\n", None),
        ("", None),
    ],
)
def test_the_version_of_a_compiler(text: str, major: int | None) -> None:
    assert toolkit.gcc_major(text) == major

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a toolkit comes from on each distribution, and what is refused before a package is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.volta.llm.plugins.module_utils.apt import sources
from ansible_collections.volta.llm.plugins.module_utils.apt.names import Names
from ansible_collections.volta.llm.plugins.module_utils.engine import supply
from ansible_collections.volta.llm.plugins.module_utils.engine.supply import Supply, Wish, look
from ansible_collections.volta.llm.plugins.module_utils.engine.toolkit import Cuda
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

NAMES = {
    "jammy": ("ubuntu", "22.04"),
    "noble": ("ubuntu", "24.04"),
    "bookworm": ("debian", "12"),
    "trixie": ("debian", "13"),
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make(tmp_path, "jammy")


def make(root: Path, release: str, driver: str | None = None, installed: str = "") -> Machine:
    """A captured machine: its os-release, the loaded driver, and what dpkg-query answers whatever it is asked."""
    (root / "etc").mkdir(parents=True, exist_ok=True)
    (root / "commands").mkdir(exist_ok=True)
    name, version = NAMES.get(release, (release, "1"))
    (root / "etc/os-release").write_text(f'PRETTY_NAME="{release} Linux"\nID={name}\nVERSION_ID="{version}"\n')
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
        (root / "proc/driver/nvidia/version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  x\n"
        )
    (root / "commands/packages").write_text(installed)
    (root / "commands/index.json").write_text("[]")
    machine = Machine(str(root))
    original = machine.run

    def run(argv, *more, **options):  # type: ignore[no-untyped-def]
        if argv[0] == "dpkg-query":
            shown = "${binary:Package}" in argv[3]
            lines = [line.split() for line in installed.splitlines()]
            text = "".join(f"{s} {p} {v}\n" if shown else f"{s} {p}\n" for s, p, v in lines)
            return type(original(argv))(tuple(argv), 0, text)
        return original(argv, *more, **options)

    machine.run = run  # type: ignore[method-assign]
    return machine


def codes(found: Supply) -> list[str]:
    return [fault.code for fault in found.faults]


@pytest.mark.parametrize(
    ("release", "source", "version", "gcc"),
    [
        ("jammy", "cuda_repo", "12.2", 11),
        ("noble", "cuda_repo", "12.9", 13),
        ("bookworm", "distro", "11.8", 11),
        ("trixie", "distro", "12.4", 13),
    ],
)
def test_what_each_distribution_gets(tmp_path: Path, release: str, source: str, version: str, gcc: int) -> None:
    found = look(Wish(), make(tmp_path, release), None)
    assert codes(found) == []
    assert (found.source, found.version, found.gcc) == (source, version, gcc)
    assert found.missing == found.packages
    assert found.toolkit is None


def test_nvidia_s_archive_is_asked_for_the_parts_alone(machine: Machine) -> None:
    found = look(Wish(), machine, None)
    assert found.packages == [
        "cuda-nvcc-12-2",
        "cuda-cudart-dev-12-2",
        "cuda-cccl-12-2",
        "cuda-driver-dev-12-2",
        "libcublas-dev-12-2",
        "cuda-cuobjdump-12-2",
    ]
    assert found.root == "/usr/local/cuda-12.2"
    assert found.archive_url == "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/x86_64"
    mirror = look(Wish(archive_url="http://mirror.example.org/cuda/"), machine, None)
    assert mirror.archive_url == "http://mirror.example.org/cuda"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # NVIDIA's package cuda-keyring, and the role nvidia_driver.
        ("cuda-ubuntu2204-x86_64.list", "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] {url}/ /\n"),
        ("cuda.list", "deb {url} /\n"),
        (
            "volta-llm-nvidia-cuda-repo.sources",
            "Types: deb\nURIs: {url}/\nSuites: /\nSigned-By: /etc/apt/keyrings/volta-llm-nvidia.asc\n",
        ),
    ],
)
def test_an_archive_that_another_file_names_is_not_named_again(machine: Machine, name: str, text: str) -> None:
    """Two keys for one archive: "E: Conflicting values set for option Signed-By", and no apt command works any more."""
    folder = machine.path("/etc/apt/sources.list.d")
    folder.mkdir(parents=True)
    url = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/x86_64"
    ours = "Types: deb\nURIs: {url}/\nSuites: /\nSigned-By: /etc/apt/keyrings/volta-llm-cuda.asc\n"
    (folder / "volta-llm-cuda.sources").write_text(ours.format(url=url))
    (folder / "other.list").write_text(text.format(url=url.replace("2204", "2404")))
    assert look(Wish(), machine, None).archive_file is None
    (folder / name).write_text(text.format(url=url))
    assert look(Wish(), machine, None).archive_file == f"/etc/apt/sources.list.d/{name}"
    assert look(Wish(archive_url="http://mirror.example.org/cuda"), machine, None).archive_file is None
    assert look(Wish(source="existing", root="/opt/cuda"), machine, None).archive_file is None


@pytest.mark.parametrize(
    ("release", "version", "compiler"),
    [("noble", "12.6", None), ("trixie", "", "g++-13"), ("bookworm", "", "g++-11"), ("bookworm", "12.9", None)],
)
def test_a_compiler_is_installed_beside_one_that_is_too_new(
    tmp_path: Path, release: str, version: str, compiler: str | None
) -> None:
    found = look(Wish(version=version), make(tmp_path, release), None)
    assert [name for name in found.packages if name.startswith("g++")] == ([compiler] if compiler else [])
    named = look(Wish(version=version, host_compiler="/opt/gcc/bin/g++"), make(tmp_path, release), None)
    assert [name for name in named.packages if name.startswith("g++")] == []


@pytest.mark.parametrize(
    ("release", "wish", "code", "says"),
    [
        ("noble", Wish(version="12.2"), "toolkit_unavailable", "begins with 12.5"),
        ("noble", Wish(source="distro"), "toolkit_unavailable", "Set source to cuda_repo"),
        ("trixie", Wish(source="cuda_repo"), "toolkit_unavailable", "no toolkit that compiles for V100"),
        ("trixie", Wish(source="distro", version="12.2"), "toolkit_unavailable", "Debian 13 has 12.4"),
        ("arch", Wish(), "toolkit_unavailable", "set source to existing"),
        ("jammy", Wish(source="existing"), "build_option_invalid", "is not given"),
        ("jammy", Wish(source="existing", root="cuda"), "build_option_invalid", "not an absolute path"),
        ("jammy", Wish(source="distro", root="/opt/cuda"), "build_option_invalid", "have a folder of their own"),
        ("jammy", Wish(source="existing", root="/opt/my cuda"), "build_option_invalid", "has ' ' in it"),
        ("jammy", Wish(version="12"), "build_option_invalid", "as in 12.2"),
        ("jammy", Wish(version="12.2; rm"), "build_option_invalid", "as in 12.2"),
        ("jammy", Wish(architectures=("native",)), "architecture_invalid", "70-real"),
        ("jammy", Wish(architectures=()), "architecture_invalid", "is empty"),
        ("jammy", Wish(archive_url="https://me:secret@mirror/cuda"), "build_option_invalid", "without a password"),
        ("jammy", Wish(archive_url="mirror/cuda"), "build_option_invalid", "address"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, release: str, wish: Wish, code: str, says: str) -> None:
    found = look(wish, make(tmp_path, release), None)
    assert codes(found) == [code]
    text = " ".join(f"{fault.subject} {fault.message} {fault.remedy}" for fault in found.faults)
    assert says in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("release", "driver", "installed", "refused"),
    [
        ("trixie", None, "", False),
        ("trixie", "550.163.01", "", False),
        ("trixie", "535.274.02", "", True),
        ("trixie", None, "installed libnvidia-tesla-535-cuda1:amd64 535.274.02-1\n", True),
        ("trixie", None, "installed libcuda1:amd64 550.163.01-2\n", False),
        ("trixie", None, "config-files libcuda1:amd64 535.274.02-1\n", False),
        ("bookworm", "535.261.03", "", False),
        ("bookworm", "580.95.05", "", True),
        ("bookworm", None, "installed libcuda1:amd64 580.95.05-1\n", True),
    ],
)
def test_debian_s_toolkit_goes_with_one_driver(
    tmp_path: Path, release: str, driver: str | None, installed: str, refused: bool
) -> None:
    found = look(Wish(), make(tmp_path, release, driver, installed), None)
    assert codes(found) == (["toolkit_needs_driver"] if refused else [])
    if refused:
        assert "llama_cpp_build_host" in found.faults[0].remedy


def cuda(version: str, root: str = "/usr/local/cuda-12.2") -> Cuda:
    return Cuda(root, f"{root}/bin/nvcc", version, ("70",), None, None)


def test_what_is_there_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [f"cuda-{p}-12-2" for p in ("nvcc", "cudart-dev", "cccl", "driver-dev", "cuobjdump")] + [
        "libcublas-dev-12-2"
    ]
    machine = make(tmp_path, "jammy", installed="".join(f"installed {name} 12.2.140-1\n" for name in packages))
    asked: list[object] = []

    def probe(root: str | None, *more: object) -> tuple[Cuda, list[object]]:
        asked.append(root)
        return cuda("12.2.140"), []

    monkeypatch.setattr(supply, "probe_cuda", probe)
    found = look(Wish(), machine, None)
    assert found.missing == []
    assert asked == ["/usr/local/cuda-12.2"]
    assert found.toolkit is not None
    assert json.loads(json.dumps(found.results()))["toolkit"]["version"] == "12.2.140"
    # Another release than that of the packages, in their folder.
    monkeypatch.setattr(supply, "probe_cuda", lambda *_more: (cuda("12.4.131"), []))
    assert codes(look(Wish(), machine, None)) == ["toolkit_mixed"]


def test_an_existing_toolkit_is_looked_at_at_once(machine: Machine) -> None:
    found = look(Wish(source="existing", root="/no/such/cuda"), machine, None)
    assert codes(found) == ["nvcc_missing"]
    # auto with a root is the same.
    assert codes(look(Wish(root="/no/such/cuda"), machine, None)) == ["nvcc_missing"]


def test_what_must_be_there_by_now_is_missed(machine: Machine) -> None:
    found = look(Wish(), machine, None, required=True)
    assert codes(found) == ["nvcc_missing"]


#: NVIDIA's packages among what apt would install for nvidia-cuda-toolkit on Debian 12.15 (11.8.0-5~deb12u1), without
#: recommendations; recorded by apt_simulate in the scenario cuda_toolkit.
DEBIAN_TOOLKIT = """
    glx-alternative-nvidia libcu++-dev libcub-dev libcublas11 libcublaslt11 libcuda1 libcudart11.0 libcufft10
    libcufftw10 libcuinj64-11.8 libcupti-dev libcupti11.8 libcurand10 libcusolver11 libcusolvermg11 libcusparse11
    libnppc11 libnppial11 libnvblas11 libnvidia-ml-dev libnvidia-ml1 libnvidia-pkcs11-openssl3
    libnvidia-ptxjitcompiler1 libnvjpeg11 libnvrtc-builtins11.8 libnvrtc11.2 libnvtoolsext1 libnvvm4 libthrust-dev
    nvidia-alternative nvidia-cuda-dev nvidia-cuda-toolkit nvidia-installer-cleanup nvidia-legacy-check
    nvidia-opencl-dev nvidia-profiler nvidia-support
"""
DRIVERS = """
    cuda cuda-drivers-535 nvidia-driver nvidia-driver-535-server nvidia-open nvidia-open-580 nvidia-open-kernel-dkms
    nvidia-dkms-535 libnvidia-compute-535 linux-image-6.1.0-37-amd64
"""


def test_a_driver_is_forbidden_and_a_toolkit_is_not() -> None:
    role = Path(__file__).resolve().parents[3] / "roles/cuda_toolkit/vars/main.yml"
    forbidden = Names(yaml.safe_load(role.read_text(encoding="utf-8"))["__cuda_toolkit_forbidden"])
    toolkit = [*DEBIAN_TOOLKIT.split(), "cuda-nvcc-12-2", "cuda-driver-dev-12-2", "libcublas-dev-12-2"]
    assert [name for name in toolkit if name in forbidden] == []
    assert [name for name in DRIVERS.split() if name not in forbidden] == []


def test_the_role_writes_the_file_that_counts_as_its_own() -> None:
    file = Path(__file__).parents[3] / "roles" / "cuda_toolkit" / "vars" / "main.yml"
    variables = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert variables["__cuda_toolkit_source_file"] == sources.TOOLKIT_FILE

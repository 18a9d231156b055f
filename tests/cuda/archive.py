# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An archive in the form of NVIDIA's for CUDA: flat, signed, its packages under their real names, with scripts in them.

    python -m tests.cuda.archive FOLDER

The toolkit in it is none: nvcc lists what it would compile for, and that is all. What is real are the names, what the
packages depend on, and what else such an archive holds: drivers of newer branches, a package of Ubuntu's in a higher
version, and a toolkit (12.3) that pulls a driver in.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.lab.repository import deb

#: As NVIDIA names the key beside its archives.
KEY = "3bf863cc.pub"


def toolkit(release: str, patch: str, nvcc_depends: str = "") -> Iterator[deb.Package]:
    """The packages of one release, as far as a build of the engine needs them."""
    major, minor = release.split(".")
    dashed, root = f"{major}-{minor}", f"/usr/local/cuda-{release}"

    def package(name: str, files: Mapping[str, deb.File], depends: str = "") -> deb.Package:
        return deb.Package(
            f"{name}-{dashed}",
            f"{release}.{patch}-1",
            f"{name}-{dashed}",
            "multiverse/devel",
            f"{name} of CUDA {release} (scripts in its place)",
            relations={"Depends": depends},
            files={f"{root}/{path}": content for path, content in files.items()},
        )

    nvcc = (
        "#!/bin/sh\ncase $1 in\n"
        f"--version) echo 'Cuda compilation tools, release {release}, V{release}.{patch}';;\n"
        "--list-gpu-arch) printf 'compute_50\\ncompute_70\\ncompute_80\\ncompute_90\\n';;\nesac\n"
    )
    cudart, cublas = f"libcudart.so.{release}.{patch}", f"libcublas.so.{release}.5.6"
    yield package("cuda-nvcc", {"bin/nvcc": deb.text(nvcc, 0o755)}, nvcc_depends)
    yield package("cuda-cuobjdump", {"bin/cuobjdump": deb.text("#!/bin/sh\n", 0o755)})
    yield package("cuda-cudart", {f"lib64/{cudart}": deb.text("")})
    yield package(
        "cuda-cudart-dev",
        {
            "lib64/libcudart.so": deb.link(cudart),
            "include/cuda_runtime_api.h": deb.text(f"#define CUDART_VERSION  {major}0{minor}0\n"),
        },
        f"cuda-cudart-{dashed}, cuda-cccl-{dashed}, cuda-driver-dev-{dashed}",
    )
    yield package("cuda-cccl", {"include/cub/cub.cuh": deb.text("")})
    yield package("cuda-driver-dev", {"lib64/stubs/libcuda.so": deb.text("")})
    yield package("libcublas", {f"lib64/{cublas}": deb.text("")})
    yield package("libcublas-dev", {"lib64/libcublas.so": deb.link(cublas)}, f"libcublas-{dashed}")


def packages() -> Iterator[deb.Package]:
    yield from toolkit("12.2", "140")
    yield from toolkit("12.3", "107", nvcc_depends="cuda-drivers")

    def other(name: str, version: str, depends: str = "") -> deb.Package:
        about = "what a toolkit must not bring"
        return deb.Package(name, version, name, "multiverse/libs", about, relations={"Depends": depends})

    yield other("cuda-drivers", "595.45.04-1", "nvidia-driver-595")
    yield other("nvidia-driver-595", "595.45.04-1")
    yield other("nvidia-utils-535-server", "999:535.999.99-1")


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for package in packages():
        data = deb.build(package)
        (folder / package.file_name).write_bytes(data)
        sums = f"Filename: ./{package.file_name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        entries.append(package.control() + sums)
    index = "\n".join(entries).encode()
    listed = {"Packages": index, "Packages.gz": gzip.compress(index, mtime=0)}
    for name, data in listed.items():
        (folder / name).write_bytes(data)
    sums = "".join(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}\n" for name, data in listed.items())
    release = f"Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitecture: amd64\nSHA256:\n{sums}"
    sign(folder, release)


def sign(folder: Path, release: str) -> None:
    """InRelease, signed by a key made for this archive, which lies beside it."""
    with tempfile.TemporaryDirectory(prefix="vl-gpg-") as home:
        base = ["gpg", "--homedir", home, "--batch", "--yes", "--no-tty", "--passphrase", ""]
        subprocess.run([*base, "--quick-generate-key", "cudatools of the lab", "rsa2048", "sign", "0"], check=True)
        signed = subprocess.run([*base, "--clearsign"], input=release.encode(), stdout=subprocess.PIPE, check=True)
        key = subprocess.run([*base, "--armor", "--export"], stdout=subprocess.PIPE, check=True)
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)
    (folder / "InRelease").write_bytes(signed.stdout)
    (folder / KEY).write_bytes(key.stdout)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Programs of the operating system the lab needs, and the Debian packages that bring them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.proc import as_root, output, run, say

#: podman 4 brought netavark; 3 knows neither it nor the network options used here.
OLDEST_PODMAN = (4, 0)
#: apt is called with these, so that the optional half of podman is not installed too.
APT_OPTIONS = ("--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300")


@dataclass(frozen=True)
class Need:
    """``package`` brings one of ``files`` (paths), ``program`` (found on PATH) or ``module`` (of this Python)."""

    package: str
    why: str
    program: str | None = None
    files: tuple[str, ...] = ()
    module: str | None = None


NEEDS = (
    Need("podman", "runs the machines", program="podman"),
    Need("crun", "starts systemd in them", program="crun"),
    Need("conmon", "watches them", files=("/usr/bin/conmon", "/usr/libexec/podman/conmon")),
    Need("netavark", "their network", files=("/usr/lib/podman/netavark", "/usr/libexec/podman/netavark")),
    Need("iptables", "their way out of the host", program="iptables"),
    Need("iproute2", "finding a free network", program="ip"),
    Need("mmdebstrap", "makes the base image", program="mmdebstrap"),
    Need(
        "debian-archive-keyring",
        "checks Debian's signatures",
        files=("/usr/share/keyrings/debian-archive-keyring.gpg",),
    ),
    Need("gpg", "signs the archive of the lab", program="gpg"),
    Need("openssh-client", "reaches the machines", program="ssh"),
    Need("zstd", "packs the archives of the stand-in for Ollama", program="zstd"),
    Need("util-linux", "the private mount namespace", program="unshare"),
    Need("ca-certificates", "HTTPS", files=("/etc/ssl/certs/ca-certificates.crt",)),
)

#: For the development environment and the tests, not for a lab.
DEVELOPMENT = (
    Need("python3-venv", "the development environment", module="ensurepip"),
    Need("git", "the checkout", program="git"),
    Need("cmake", "tests of the build", program="cmake"),
    Need("ninja-build", "tests of the build", program="ninja"),
    Need("g++", "tests of the build", program="c++"),
    Need("ccache", "tests of the build", program="ccache"),
    Need("shellcheck", "checks shell scripts", program="shellcheck"),
)


def _which(program: str) -> bool:
    # What root needs may be outside an ordinary user's PATH.
    path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin:/sbin"
    return shutil.which(program, path=path) is not None


def missing(
    needs: tuple[Need, ...] = NEEDS,
    *,
    has_program: Callable[[str], bool] = _which,
    has_file: Callable[[str], bool] = lambda path: Path(path).exists(),
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> list[Need]:
    """What is not there."""
    return [
        need
        for need in needs
        if not (
            (need.program is not None and has_program(need.program))
            or (need.module is not None and has_module(need.module))
            or any(has_file(file) for file in need.files)
        )
    ]


def podman_version(text: str) -> tuple[int, int] | None:
    """(major, minor) from ``podman --version``; None when it says something else."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def install(needs: list[Need]) -> None:
    """Install what is missing with apt, as root or through sudo."""
    if not _which("apt-get"):
        names = " ".join(need.package for need in needs)
        raise LabError(f"apt-get is not on this host. Install by its own means what Debian calls: {names}")
    if os.geteuid() != 0 and not _which("sudo"):
        raise LabError("Installing needs root, and sudo is not on this host. Run this command as root.")
    packages = sorted({need.package for need in needs})
    say(f"installing {' '.join(packages)}")
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *APT_OPTIONS]
    if run(as_root([*apt, "install", *packages]), check=False).returncode != 0:
        # Most often the package lists are missing or old; one update, then the error counts.
        run(as_root([*apt, "update"]))
        run(as_root([*apt, "install", *packages]))


def require() -> None:
    """Fail with everything that is missing, or with a podman that is too old."""
    absent = missing()
    if absent:
        names = ", ".join(f"{need.package} ({need.why})" for need in absent)
        raise LabError(f"Missing on this host: {names}. Install with: python -m tests.lab deps --install")
    version = podman_version(output(["podman", "--version"]))
    if version is not None and version < OLDEST_PODMAN:
        wanted = ".".join(str(part) for part in OLDEST_PODMAN)
        found = ".".join(str(part) for part in version)
        raise LabError(f"podman {found} is too old: the lab needs {wanted} or newer (Debian 12, Ubuntu 24.04)")

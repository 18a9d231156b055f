# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults that the check before the first change can report."""

from __future__ import annotations

from ..faults import PORT_TAKEN, Catalogue, FaultKind

CATALOGUE = Catalogue(
    "preflight",
    [
        FaultKind(
            "os_unsupported",
            "critical",
            "The distribution or its release is none that the collection was made for.",
            "this is Ubuntu 20.04.6 LTS (ubuntu-20.04); supported: ubuntu-22.04, ubuntu-24.04, debian-12, debian-13",
        ),
        FaultKind(
            "processor_unsupported",
            "critical",
            "The processor architecture is not supported.",
            "the machine is aarch64; supported: x86_64",
        ),
        FaultKind(
            "init_not_systemd",
            "critical",
            "systemd is not process 1, so no service can be installed.",
            "process 1 is sh",
        ),
        FaultKind("apt_missing", "critical", "apt or dpkg is not there.", "/usr/bin/apt-get does not exist"),
        FaultKind(
            "system_python_too_old",
            "error",
            "The system's Python cannot run the modules.",
            "/usr/bin/python3 is Python 3.8.10; 3.10 or newer is needed",
        ),
        FaultKind(
            "memory_short",
            "error",
            "The machine has less memory than asked for.",
            "7813 MiB, 30720 MiB are needed",
        ),
        FaultKind(
            "disk_short",
            "error",
            "A file system has less room than what is still to be stored on it. Folders on one file system are summed.",
            "/srv (/dev/sdb1) has 81920 MiB free, 108000 MiB are needed: 106000 MiB for /srv/models, "
            "2000 MiB for /srv/volta",
        ),
        FaultKind(
            "disk_unknown",
            "error",
            "The free space of a file system could not be found out.",
            "df gave no answer for /srv within 30 s",
        ),
        PORT_TAKEN,
        FaultKind(
            "clock_wrong",
            "error",
            "The clock is far from the controller's; certificates would look expired or not yet valid.",
            "the clock is 86400 s behind the controller's",
        ),
        FaultKind(
            "dpkg_unfinished",
            "warning",
            "An earlier package operation was interrupted or failed; apt may refuse to work until that is mended.",
            "half-configured: nvidia-dkms-535",
        ),
        FaultKind(
            "python_not_system",
            "warning",
            "Ansible uses a Python that is not the system's (a virtual environment, pyenv); it has no module for apt.",
            "the interpreter is /home/ops/.venv/bin/python3.12",
        ),
    ],
)

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults that simulated transactions and holds can report."""

from __future__ import annotations

from ..faults import DRIVER_PACKAGES_BROKEN, Catalogue, FaultKind
from ..preflight.catalogue import CATALOGUE as PREFLIGHT

CATALOGUE = Catalogue(
    "packages (apt_simulate, apt_hold)",
    [
        PREFLIGHT.kinds["apt_missing"],
        DRIVER_PACKAGES_BROKEN,
        FaultKind(
            "apt_broken_packages",
            "critical",
            "Packages are half installed or their dependencies are not met, so apt refuses every change.",
            "apt refuses every change: Unmet dependencies. Try 'apt --fix-broken install' with no packages.",
        ),
        FaultKind(
            "apt_failed",
            "critical",
            "apt could not say what it would do: its sources or preferences cannot be read, or it did not end in time.",
            "apt-get: Malformed entry 1 in list file /etc/apt/sources.list.d/cuda.list (Component)",
        ),
        FaultKind(
            "apt_lists_failed",
            "critical",
            "The package lists could not be brought up to date, so what apt would do is not known.",
            "E: Failed to fetch http://archive.ubuntu.com/ubuntu/dists/jammy/InRelease  Could not connect",
        ),
        FaultKind(
            "apt_unresolvable",
            "critical",
            "apt finds no way to install what is asked for; the message has its reason.",
            "nvidia-driver depends on nvidia-kernel-dkms (= 535.261.03-1), but it is not going to be installed",
        ),
        FaultKind(
            "apt_foreign_branch",
            "critical",
            "A package of another driver branch would be installed, whatever the name asked for promises.",
            "nvidia-utils-570 570.86.15-0ubuntu1 is of branch 570, not 535; nvidia-driver-550-server depends on it",
        ),
        FaultKind(
            "apt_open_flavour",
            "critical",
            "A package of the open kernel module would be installed, which does not support Volta.",
            "nvidia-dkms-535-open 535.183.01-0ubuntu0.22.04.1 (branch 535) is the open kernel module",
        ),
        FaultKind(
            "apt_branch_unknown",
            "error",
            "A driver package would be installed whose branch neither version, source package nor name tells.",
            "nvidia-helper 1.0 has no branch in version, source package or name",
        ),
        FaultKind(
            "apt_kernel_touched",
            "critical",
            "A kernel, its modules or headers, or a meta package that leads to them would change.",
            "linux-image-generic would go from 5.15.0.91.88 to 5.15.0.105.102",
        ),
        FaultKind(
            "apt_would_remove",
            "error",
            "Packages would be removed that may not be.",
            "nvidia-driver-535 535.183.01-0ubuntu0.22.04.1 would be removed",
        ),
        FaultKind(
            "apt_held_would_change",
            "error",
            "A held package would change.",
            "linux-image-generic is held and would change",
        ),
        FaultKind(
            "apt_forbidden_package",
            "error",
            "A package that must not move would be installed, changed or removed.",
            "libnvidia-compute-535 would go from 535.161.08-0ubuntu1 to 535.183.01-0ubuntu1",
        ),
        FaultKind(
            "apt_required_missing",
            "error",
            "A package that must be there would not be installed afterwards.",
            "linux-headers-6.1.0-37-amd64 would not be installed",
        ),
        FaultKind(
            "apt_pattern_invalid",
            "error",
            "A pattern for package names cannot be read.",
            "^nvidia-( is no regular expression: missing ), unterminated subpattern at position 8",
        ),
        FaultKind(
            "apt_hold_missing",
            "error",
            "A package that is to be held is not installed.",
            "linux-image-generic-hwe-22.04 is not installed",
        ),
        FaultKind(
            "apt_hold_failed",
            "critical",
            "dpkg did not take the holds.",
            "apt-mark hold: dpkg: error: dpkg database is locked by another process",
        ),
        FaultKind(
            "kernel_without_driver",
            "critical",
            "The driver has no module for a kernel beside the running one, or for the running one and another has it.",
            "5.15.0-91-generic runs, 6.8.0-60-generic boots next, and no nvidia module is on disk for 6.8.0-60-generic",
        ),
        FaultKind(
            "kernel_changes_at_boot",
            "warning",
            "The next boot brings another kernel than the running one; the driver has a module for it.",
            "6.8.0-60-generic boots next, 5.15.0-91-generic runs",
        ),
        FaultKind(
            "kernel_not_packaged",
            "warning",
            "The running kernel belongs to no installed package, so there is nothing of it to hold.",
            "no installed package brings linux-image-6.1.0-37-amd64, which is the running kernel",
        ),
        FaultKind(
            "grub_entry_missing",
            "error",
            "The kernel to be booted is not installed, or GRUB's menu has no entry for it.",
            "GRUB's menu has no entry for 5.15.0-91-generic",
        ),
        FaultKind(
            "grub_boot_failed",
            "error",
            "GRUB's environment could not be set, so the next boot is what it was.",
            "grub-reboot 'gnulinux-5.15.0-91-generic-advanced-1234': cannot open /boot/grub/grubenv",
        ),
        FaultKind(
            "no_kernel_with_driver",
            "critical",
            "No installed kernel has a module of the driver, so there is none to go back to.",
            "none of the installed kernels has an nvidia module: 6.8.0-60-generic",
        ),
    ],
)

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Proof that an installed driver will work after the next boot: apt's exit status is none (spaced#22, mokutil#69)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..apt import kernel_set
from ..apt.status import Installed
from ..faults import Catalogue, Fault, FaultKind
from ..machine import Machine
from . import dkms, driver, modinfo, packages
from .kernels import Kernels, kernels
from .values import version_key

CATALOGUE = Catalogue(
    "proof of the driver (driver_proof)",
    (
        driver.FAULTS.kinds["driver_packages_broken"],
        driver.FAULTS.kinds["driver_mixed_branches"],
        driver.FAULTS.kinds["driver_module_incomplete"],
        driver.FAULTS.kinds["driver_module_differs"],
        driver.FAULTS.kinds["driver_wrong_flavour"],
        FaultKind(
            "driver_package_missing",
            "critical",
            "A package of the driver is not installed although apt was content.",
            "nvidia-utils-535-server is not installed",
        ),
        FaultKind(
            "driver_module_not_built",
            "critical",
            "A kernel that can boot has no module of the driver; what the build said is in the message.",
            "no nvidia module for 6.8.0-60-generic; dkms: nvidia-srv/535.183.01 is only added; the end of "
            "/var/lib/dkms/nvidia-srv/535.183.01/build/make.log: error: implicit declaration of function",
        ),
        FaultKind(
            "driver_signature_missing",
            "critical",
            "Secure Boot is on, and the module for a kernel that can boot carries no signature, so it will not load.",
            "Secure Boot is on; the nvidia module for 6.1.0-38-amd64 is not signed",
        ),
    ),
)


@dataclass
class Proof:
    """``modules`` has one entry for each kernel that can boot."""

    version: str | None = None
    kernels: Kernels = field(default_factory=lambda: Kernels(None, None, None))
    modules: list[dict[str, Any]] = field(default_factory=list)
    dkms: list[str] = field(default_factory=list)
    secure_boot: bool | None = None
    faults: list[Fault] = field(default_factory=list)

    def fault(self, code: str, subject: str, message: str, remedy: str) -> None:
        self.faults.append(CATALOGUE.fault(code, subject, message, remedy))


def prove(
    machine: Machine,
    installed: Sequence[Installed],
    branch: str,
    wanted: Sequence[str],
    without_driver: Sequence[str] = (),
) -> Proof:
    """``wanted`` are the names that must be there; ``without_driver`` kernels that may go without."""
    proof = Proof(kernels=kernels(machine), secure_boot=driver.secure_boot(machine))
    by_name = {package.name: package for package in installed if not package.foreign}
    proof.faults += kernel_set.judge_unfinished(
        installed, proof.kernels, lambda kernel: modinfo.on_disk(machine, kernel) is not None
    )
    _packages(proof, by_name, branch, wanted)
    answer = machine.run(["dkms", "status"])
    status = None
    if not answer.missing and not answer.timed_out:
        proof.dkms = [line for line in answer.stdout.splitlines() if "nvidia" in line]
        status = dkms.parse((answer.stdout + "\n" + answer.stderr).splitlines())
    bootable = proof.kernels.installed or tuple(name for name in (proof.kernels.running,) if name)
    for kernel in bootable:
        if kernel not in without_driver:
            away = None if kernel == proof.kernels.running else kernel_set.way_out(installed, kernel)
            _module(machine, proof, kernel, status, away)
    return proof


def _packages(proof: Proof, by_name: dict[str, Installed], branch: str, wanted: Sequence[str]) -> None:
    foreign: dict[str, list[str]] = {}
    for package in by_name.values():
        if package.unfinished:
            continue
        if not packages.is_driver(package.name) or packages.is_companion(package.name):
            continue
        own = packages.candidate_branch(package.name, package.version, package.source)
        if own not in (None, branch):
            foreign.setdefault(str(own), []).append(package.name)
    for own, names in sorted(foreign.items()):
        proof.fault(
            "driver_mixed_branches",
            names[0],
            f"of branch {own} are still installed: {', '.join(names)}; {branch} is asked for",
            f"apt-get purge {' '.join(names)}",
        )
    for name in wanted:
        there = by_name.get(name)
        if there is None:
            proof.fault("driver_package_missing", name, f"{name} is not installed", f"apt-cache policy {name}")
        elif proof.version is None and packages.candidate_branch(name, there.version, there.source) == branch:
            proof.version = _upstream(there.version)


def _upstream(version: str) -> str:
    """The driver's own number as its module states it: leading zeros (535.261.03) are part of it."""
    return version.split(":")[-1].split("-")[0]


def _module(machine: Machine, proof: Proof, kernel: str, status: dkms.DkmsStatus | None, away: str | None) -> None:
    module = modinfo.on_disk(machine, kernel)
    proof.modules.append(
        {
            "kernel": kernel,
            "version": module.version if module else None,
            "path": module.path if module else None,
            "signed": module.signed if module else None,
            "signer": module.signer if module else None,
            "missing": list(module.missing) if module else list(modinfo.PARTS),
            "dkms": [entry.state for entry in status.for_kernel(kernel)] if status else [],
        }
    )
    install = f"apt-get install linux-headers-{kernel} && dkms autoinstall -k {kernel}"
    if module is None:
        proof.fault(
            "driver_module_not_built",
            kernel,
            f"no nvidia module for {kernel}{_why(machine, kernel, status)}",
            away or install,
        )
        return
    if module.flavour == "open":
        proof.fault(
            "driver_wrong_flavour",
            kernel,
            f"the module {module.version} for {kernel} is the open flavour, which does not support Volta",
            "apt-get purge the packages with -open in their names, then run the role again",
        )
    if module.version and proof.version and version_key(module.version) != version_key(proof.version):
        proof.fault(
            "driver_module_differs",
            kernel,
            f"the module on disk for {kernel} is {module.version}, the packages are {proof.version}"
            + _why(machine, kernel, status),
            install,
        )
    if module.missing:
        proof.fault(
            "driver_module_incomplete",
            kernel,
            f"{', '.join(module.missing)} {'is' if len(module.missing) == 1 else 'are'} missing for {kernel}",
            install,
        )
    if proof.secure_boot and module.signed is False:
        proof.fault(
            "driver_signature_missing",
            kernel,
            f"Secure Boot is on; the nvidia module for {kernel} is not signed",
            "mokutil --import /var/lib/dkms/mok.pub and confirm at the console at the next boot, or on Ubuntu set "
            "nvidia_driver_modules to prebuilt",
        )


def _why(machine: Machine, kernel: str, status: dkms.DkmsStatus | None) -> str:
    """What DKMS says of it, and the end of what its build printed."""
    text = ""
    for entry in status.entries if status else []:
        if entry.kernel in (None, kernel) and not entry.built:
            text += f"; dkms: {entry.name}/{entry.version} is only {entry.state}"
            break
    return text + dkms.what_the_build_said(machine, kernel)


def as_results(proof: Proof) -> dict[str, Any]:
    return {
        "version": proof.version,
        "kernels": proof.kernels.as_dict(),
        "modules": proof.modules,
        "dkms_status": proof.dkms,
        "secure_boot": proof.secure_boot,
    }

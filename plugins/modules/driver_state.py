#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The NVIDIA driver of a machine, and what to do about it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_state
short_description: Read the state of the NVIDIA driver and say what mends it
version_added: 0.1.0
description:
  - Compares the loaded kernel module, the module on disk for the kernel that boots next, and the libraries on disk. Loaded differs
    from disk, a reboot helps. Disk differs from the libraries, it does not, the module has to be built anew.
  - Looks for everything else that keeps a driver from working, such as a module that was only added to DKMS, nouveau, Secure Boot
    without a signature, packages that dpkg left half configured, mixed branches, the open flavour on Volta, a C(.run) installation
    below packages, a Fabric Manager of another version, and what the kernel wrote about its GPUs since boot.
  - Gives one verdict, and the commands that mend it, in order. It runs none of them and changes nothing.
  - The kernel that boots next is the one of the menu entry that GRUB's settings select. Where that cannot be told it is the newest
    one with an image in C(/boot), and where there is no image (a container) the running one. RV(kernels.next_from) says which.
  - Versions are compared as numbers, so 550.90.07 is older than 550.107.02. The version of the libraries is that of the file
    C(libnvidia-ml.so.VERSION); what nvidia-smi prints in its error message is shortened.
author:
  - The volta.llm authors (@volta-llm)
options:
  require_ok:
    description:
      - Whether any RV(verdict) other than V(ok) is a failure. The module then fails once, with every fault it found.
      - Without it the module only reports, so that a play can install or reboot by RV(verdict).
    type: bool
    default: false
  initramfs:
    description:
      - Whether to list the initramfs of the next kernel (C(lsinitramfs)), to see if it carries nouveau and its blacklist. That takes
        seconds.
    type: str
    choices:
      auto: Only when nouveau is loaded.
      always: In any case.
      never: Not at all.
    default: auto
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.gpu_inventory
  - module: volta.llm.nvlink_topology
notes:
  - The kernel log needs the rights of root or of the group C(systemd-journal). Without them RV(kernel_log) is V(null), and
    RV(kernel_log_error) says why.
  - Below a O(sysroot) other than C(/) the kernel log is read from its C(dev/kmsg), or from the recorded C(journalctl -k) or C(dmesg).
"""

EXAMPLES = r"""
- name: Read the driver
  volta.llm.driver_state:
  register: driver

- name: Stop where a reboot is due
  ansible.builtin.fail:
    msg: "{{ driver.reason }}: {{ driver.remedy | join('; ') }}"
  when: driver.verdict == 'reboot_required'

- name: Require a driver that is in order
  volta.llm.driver_state:
    require_ok: true

- name: Judge a capture of another machine
  volta.llm.driver_state:
    sysroot: captures/version-mismatch
"""

RETURN = r"""
verdict:
  description:
    - What has to be done first, one of V(no_gpu), V(repair_packages), V(wrong_flavour), V(not_installed), V(mixed_branches),
      V(blacklist_nouveau), V(enroll_key), V(rebuild_module), V(reinstall), V(reboot_required), V(load_module),
      V(fix_fabric_manager), V(replace_hardware), V(reset_gpu), V(unknown), V(ok). The order of this list decides when several apply.
  returned: always
  type: str
  sample: reboot_required
reason:
  description: Why, in one sentence.
  returned: always
  type: str
  sample: loaded 550.90.07, installed 550.107.02
remedy:
  description: Commands that mend it, in order; steps for hands are sentences.
  returned: always
  type: list
  elements: str
  sample: [reboot]
unknown:
  description: Parts that could not be looked at at all (a report of a part of a machine); they are not taken for absent.
  returned: always
  type: list
  elements: str
  sample: []
gpus:
  description: NVIDIA GPUs on the PCI bus, with C(bus_id), C(pci_id) and the kernel C(driver) bound to each (null for none).
  returned: always
  type: list
  elements: dict
  sample: [{bus_id: "0000:1a:00.0", pci_id: "10de:1db5", driver: nvidia}]
loaded:
  description: The loaded module, its C(version) and C(flavour) (V(proprietary) or V(open)); both null where none is loaded.
  returned: always
  type: dict
  sample: {version: 535.261.03, flavour: proprietary}
kernels:
  description: C(running), C(next), C(next_from) (V(grub), V(newest), V(running)) and C(installed), newest first.
  returned: always
  type: dict
  sample: {running: 6.1.0-37-amd64, next: 6.1.0-38-amd64, next_from: grub, installed: [6.1.0-38-amd64, 6.1.0-37-amd64]}
module_running:
  description:
    - The module on disk for the running kernel, with C(kernel), C(path), C(version), C(licence), C(flavour), C(signed), C(signer) and
      C(missing) (of nvidia_modeset, nvidia_uvm, nvidia_drm). Null where there is none.
  returned: always
  type: dict
module_next:
  description: The same for the kernel that boots next.
  returned: always
  type: dict
modules:
  description:
    - Every kernel that can be booted, newest first, with C(kernel), C(running) and C(next) (whether it is that one), C(version),
      C(flavour) and C(signed) of its module, C(complete) (all four parts are there) and C(dkms) (the state of its first entry, null for
      none). C(version) and C(complete) are null where it has no module.
  returned: always
  type: list
  elements: dict
  sample:
    - kernel: 6.1.0-38-amd64
      running: false
      next: true
      version: 535.261.03
      flavour: proprietary
      signed: false
      complete: true
      dkms: installed
userland:
  description: C(version) of libnvidia-ml on disk (null for none) and all versions found, newest first (C(libraries)).
  returned: always
  type: dict
  sample: {version: 535.261.03, libraries: [535.261.03]}
packages:
  description:
    - Packages of driver and kernel with C(name), C(version), C(want), C(flag), C(state) (dpkg's words), C(branch) (null where the
      package has versions of its own) and C(held). Null on a machine without dpkg.
  returned: always
  type: list
  elements: dict
held:
  description: Names of the held ones among RV(packages).
  returned: always
  type: list
  elements: str
  sample: [nvidia-driver]
pins:
  description: Preferences of apt that name driver or kernel packages, with C(file), C(packages), C(pin) and C(priority).
  returned: always
  type: list
  elements: dict
dkms:
  description:
    - The driver's entries in C(dkms status), with C(name), C(version), C(kernel), C(arch), C(state), C(note) and C(built), which is
      true only for V(installed). Null where there is no dkms.
  returned: always
  type: list
  elements: dict
dkms_messages:
  description: What dkms printed besides.
  returned: always
  type: list
  elements: str
nouveau:
  description:
    - Whether nouveau is C(loaded) and C(on_disk) for the next kernel, what it is C(blacklisted_by) (files, kernel arguments), whether
      the initramfs carries that blacklist (C(initramfs_blacklist)) and nouveau (C(initramfs_module)), and whether it C(can_load) at
      the next boot. Null where that was not looked at or cannot be told.
  returned: always
  type: dict
secure_boot:
  description: Whether Secure Boot is on; null where that cannot be told.
  returned: always
  type: bool
run_install:
  description: Files that show an installation by NVIDIA's C(.run) file; empty for none.
  returned: always
  type: list
  elements: str
nvswitches:
  description: Number of NVSwitch devices on the PCI bus.
  returned: always
  type: int
fabric_manager:
  description: Version of the installed Fabric Manager, null for none.
  returned: always
  type: str
upgrade:
  description:
    - The entry of apt's history that brought the libraries which the loaded module does not match, with C(date), C(command),
      C(unattended) and C(packages) (C(name), C(from), C(to)). Null where they match or the history does not have it.
  returned: always
  type: dict
kernel_log:
  description: What the kernel wrote about its GPUs since boot; null where it could not be read.
  returned: always
  type: dict
  contains:
    source: {description: Where it was read., type: str}
    xids:
      description:
        - Xid numbers by card, with C(xid), C(bus_id), C(count), C(kind) (hardware, link, driver, program, information), C(meaning),
          C(cause), C(remedy), C(source), C(process), C(detail), C(first_s) and C(last_s) (seconds since boot) or C(first_at) and
          C(last_at) (dates as printed).
      type: list
      elements: dict
    lost: {description: Bus ids of cards that fell off the bus., type: list, elements: str}
    lost_without_xid: {description: Those of them for which no Xid 79 was written., type: list, elements: str}
    init_failed: {description: Bus ids of cards that the driver could not initialize., type: list, elements: str}
    unsupported_by_open: {description: Bus ids of cards that the open module refused., type: list, elements: str}
    api_mismatch: {description: Versions of C(client) and C(module) that the module complained of., type: dict}
    module_rejected: {description: Whether the kernel refused a module for its signature., type: bool}
    messages: {description: "The joined messages that these were read from, 50 at most.", type: list, elements: str}
kernel_log_error:
  description: Why RV(kernel_log) is null.
  returned: always
  type: str
faults:
  description: Everything that is wrong, most serious first, each with C(code), C(subject), C(message) and C(remedy).
  returned: always
  type: list
  elements: dict
  sample:
    - code: reboot_required
      subject: nvidia module
      message: loaded 550.90.07, installed 550.107.02
      remedy: reboot
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE
from ansible_collections.volta.llm.plugins.module_utils.faults import by_severity
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            "require_ok": {"type": "bool", "default": False},
            "initramfs": {"type": "str", "choices": ["auto", "always", "never"], "default": "auto"},
        },
        supports_check_mode=True,
    )
    machine = Machine(module.params["sysroot"], module.params["timeout"])
    look = {"auto": None, "always": True, "never": False}[module.params["initramfs"]]
    state = driver.read(machine, look)
    judgement = driver.judge(state)
    results = driver.as_results(state, judgement)
    if module.params["require_ok"] and judgement.verdict != "ok":
        finish(module, judgement.faults, changed=False, **results)
    module.exit_json(changed=False, faults=[fault.as_dict() for fault in by_severity(judgement.faults)], **results)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Nouveau: read where it can load from, and keep it off the cards."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nouveau_state
short_description: Keep nouveau off the cards, in every initramfs, and prove it
version_added: 0.1.0
description:
  - Tells for every kernel of the machine whether its initramfs carries the file C(/etc/modprobe.d/volta-nouveau.conf) and nouveau itself,
    and which module a Tesla V100 would get under that kernel.
  - With O(state=disabled) writes that file (C(blacklist nouveau), C(options nouveau modeset=0)), also where a package ships one of its
    own, makes every initramfs anew that does not carry it or is older than it, looks into each again, and unloads nouveau where it is
    not in use. Where it is, RV(reboot_required) says so.
  - Everything is told from the machine as it is, so a run that was killed is completed by the next one, and only stale images are
    made anew.
  - Refuses to touch a machine whose display runs on nouveau, unless O(allow_display).
  - Images are read and made by initramfs-tools (C(lsinitramfs), C(update-initramfs)); where that is not installed, by dracut.
author:
  - The volta.llm authors (@volta-llm)
options:
  state:
    description: Whether to only read, or to bring nouveau off.
    type: str
    choices:
      read: Change nothing.
      disabled: Nouveau does not load at any boot, and is unloaded now where that is possible.
    default: read
  allow_display:
    description: Whether a display that runs on nouveau may go dark.
    type: bool
    default: false
  unload:
    description: Whether to unload nouveau now, where it is not in use. If not, a reboot is required while it is loaded.
    type: bool
    default: true
  modalias:
    description: The device that RV(kernels) are asked about, as C(/sys/bus/pci/devices/*/modalias) names it. A Tesla V100-SXM2-32GB.
    type: str
    default: pci:v000010DEd00001DB5sv000010DEsd00001249bc03sc02i00
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
seealso:
  - module: volta.llm.driver_state
notes:
  - An image of a kernel whose modules are gone cannot be made anew. It is named in a warning and fails nothing.
"""

EXAMPLES = r"""
- name: Keep nouveau off the cards
  volta.llm.nouveau_state:
    state: disabled
  register: nouveau

- name: Say what is left
  ansible.builtin.debug:
    msg: "{{ nouveau.reboot_required }}"
  when: nouveau.reboot_required is not none

- name: Prove that the file is in every initramfs
  volta.llm.nouveau_state:
  register: nouveau
  failed_when: not nouveau.disabled
"""

RETURN = r"""
changes:
  description: What was done, in words; in check mode what would be.
  returned: always
  type: list
  elements: str
  sample: [wrote /etc/modprobe.d/volta-nouveau.conf, rebuilt /boot/initrd.img-5.15.0-91-generic, unloaded nouveau]
disabled:
  description: Whether the file is in place and no initramfs is stale, so that nouveau does not load at the next boot.
  returned: always
  type: bool
loaded:
  description: Whether nouveau is loaded now.
  returned: always
  type: bool
users:
  description: How often the loaded nouveau is in use; null where it is not loaded or that is not told.
  returned: always
  type: int
reboot_required:
  description: Why nouveau goes with a reboot only; null where it is not loaded any more, and with O(state=read).
  returned: always
  type: str
  sample: nouveau is loaded and in use (4 users)
display:
  description: Why a display needs nouveau; empty for none.
  returned: always
  type: list
  elements: str
  sample: [the console is on nouveau (fb0) and there is no other display device]
blacklisted_by:
  description: Other files in modprobe.d that keep nouveau away, such as one of a package.
  returned: always
  type: list
  elements: str
  sample: [/usr/lib/modprobe.d/nvidia-graphics-drivers.conf]
kernels:
  description:
    - Every kernel with a place or an image in C(/boot), newest first, with C(kernel), C(bootable), C(has_modules), C(image) (null for
      none), C(image_error) (why it could not be listed), C(file_inside) and C(nouveau_inside) (null where not known), C(stale) (the file is
      not inside, or newer than the image; null without an image), C(candidates) (modules that know O(modalias), blacklisted or not) and
      C(resolves_to) (those that would be loaded for it; null without C(modules.alias)).
  returned: always
  type: list
  elements: dict
  sample:
    - kernel: 5.15.0-91-generic
      bootable: true
      has_modules: true
      image: /boot/initrd.img-5.15.0-91-generic
      image_error: null
      file_inside: true
      nouveau_inside: true
      stale: false
      candidates: [nouveau]
      resolves_to: []
kernels_before:
  description: The same before anything was changed.
  returned: always
  type: list
  elements: dict
faults:
  description: What is wrong or could not be done. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str, sample: initramfs_stale}
    subject: {description: The file or the image., type: str}
    message: {description: What was found., type: str}
    remedy: {description: What to do., type: str}
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.boot import modprobe, nouveau
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            **VARIABLES,
            "state": {"type": "str", "choices": ["read", "disabled"], "default": "read"},
            "allow_display": {"type": "bool", "default": False},
            "unload": {"type": "bool", "default": True},
            "modalias": {"type": "str", "default": modprobe.V100},
        },
        supports_check_mode=True,
    )
    given = module.params
    machine = Machine(given["sysroot"], given["timeout"])
    if given["state"] == "read":
        state = nouveau.read(machine, given["modalias"])
        outcome = nouveau.Outcome(state, state, faults=nouveau.report(state))
    else:
        outcome = nouveau.disable(
            machine, given["modalias"], given["allow_display"], given["unload"], check=module.check_mode
        )
    before, after = outcome.before, outcome.after
    results = {
        "changes": outcome.changes,
        "disabled": after.off(),
        "loaded": after.loaded,
        "users": after.users,
        "reboot_required": outcome.reboot_required,
        "display": before.display,
        "blacklisted_by": after.others,
        "kernels": [kernel.as_dict() for kernel in after.kernels],
        "kernels_before": [kernel.as_dict() for kernel in before.kernels],
    }
    if outcome.changes:
        results["diff"] = {
            "before_header": nouveau.PATH,
            "after_header": nouveau.PATH,
            "before": before.file or "",
            "after": nouveau.CONTENT,
            "prepared": "".join(f"{change}\n" for change in outcome.changes),
        }
    finish(module, outcome.faults, changed=bool(outcome.changes), **results)


if __name__ == "__main__":
    main()

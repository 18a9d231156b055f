# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A machine made of files whose programs act on those files, as update-initramfs and rmmod do on a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine

OLD, NEW = "5.15.0-91-generic", "5.15.0-105-generic"
#: The line of Ubuntu's linux-modules-extra for nouveau (depmod's modules.alias).
ALIASES = "alias pci:v000010DEd*sv*sd*bc03sc*i* nouveau\nalias pci:v00008086d00001533sv*sd*bc*sc*i* igb\n"


class Built(Machine):
    """A root folder; an image is a text file with the names of its files, one a line."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self.ran: list[tuple[str, ...]] = []
        self.answers: dict[str, Callable[[Sequence[str]], Completed]] = {
            "lsinitramfs": self._list,
            "update-initramfs": self._build,
            "rmmod": self._rmmod,
        }
        (root / "usr/lib").mkdir(parents=True)
        for program in ("update-initramfs", "lsinitramfs"):
            self.file(f"usr/sbin/{program}")
        self.file("proc/modules", "igb 1 0 - Live 0x0\n").file("proc/sys/kernel/osrelease", f"{OLD}\n")
        self.file("etc/modprobe.d/fbdev.conf", "blacklist nvidiafb\n")

    def file(self, path: str, text: str = "") -> Built:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def kernel(self, kernel: str, image: bool = True) -> Built:
        self.file(f"boot/vmlinuz-{kernel}").file(f"lib/modules/{kernel}/modules.alias", ALIASES)
        self.file(f"lib/modules/{kernel}/modules.dep", "kernel/drivers/gpu/drm/nouveau/nouveau.ko: \n")
        if image:
            self.pack(kernel)
        return self

    def pack(self, kernel: str) -> None:
        """What update-initramfs does: nouveau's module and modprobe.d as it is now."""
        names = sorted(path.name for path in (self.root / "etc/modprobe.d").glob("*.conf"))
        lines = [".", f"usr/lib/modules/{kernel}/kernel/drivers/gpu/drm/nouveau/nouveau.ko"]
        self.file(
            f"boot/initrd.img-{kernel}", "\n".join([*lines, *(f"etc/modprobe.d/{name}" for name in names)]) + "\n"
        )

    def nouveau(self, users: int = 0) -> Built:
        self.file("proc/modules", "nouveau 2306048 0 - Live 0x0\nigb 1 0 - Live 0x0\n")
        return self.file("sys/module/nouveau/refcnt", f"{users}\n")

    def run(self, argv: Sequence[str], timeout: float | None = None, env: Mapping[str, str] | None = None) -> Completed:
        self.ran.append(tuple(argv))
        answer = self.answers.get(argv[0])
        return answer(argv) if answer else Completed(tuple(argv), None, missing=True)

    def _list(self, argv: Sequence[str]) -> Completed:
        text = self.read(argv[1])
        return Completed(tuple(argv), 1, stderr="no such file") if text is None else Completed(tuple(argv), 0, text)

    def _build(self, argv: Sequence[str]) -> Completed:
        self.pack(argv[-1])
        return Completed(tuple(argv), 0, f"update-initramfs: Generating /boot/initrd.img-{argv[-1]}\n")

    def _rmmod(self, argv: Sequence[str]) -> Completed:
        lines = [line for line in (self.read("/proc/modules") or "").splitlines() if not line.startswith(f"{argv[1]} ")]
        self.file("proc/modules", "\n".join(lines) + "\n")
        return Completed(tuple(argv), 0)

    def built(self) -> list[str]:
        return [argv[-1] for argv in self.ran if argv[0] == "update-initramfs"]


@pytest.fixture
def machine(tmp_path: Path) -> Built:
    return Built(tmp_path).kernel(OLD).kernel(NEW)

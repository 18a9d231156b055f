# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keys and command lines for SSH to the machines. Host keys are made here, so they are known before the first login."""

from __future__ import annotations

from pathlib import Path

from tests.lab.files import write_atomic
from tests.lab.proc import run


def ensure_key(path: Path, comment: str) -> str:
    """An ed25519 key pair without a passphrase at ``path``; the public key's line is returned."""
    public = path.with_name(path.name + ".pub")
    if not (path.exists() and public.exists()):
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])
    return public.read_text().strip()


def known_hosts_text(entries: dict[str, str]) -> str:
    """The known_hosts file: ``entries`` gives the public host key's line by address."""
    lines = []
    for address, public in sorted(entries.items()):
        kind, key = public.split()[:2]
        lines.append(f"{address} {kind} {key}\n")
    return "".join(lines)


def write_known_hosts(path: Path, entries: dict[str, str]) -> None:
    write_atomic(path, known_hosts_text(entries), mode=0o600)


def options(known_hosts: Path) -> list[str]:
    """Options that make ssh trust the lab's own list of host keys and offer no other key or configuration."""
    return [
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={known_hosts}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "UpdateHostKeys=no",
    ]


def command(address: str, key: Path, known_hosts: Path, *, batch: bool = False) -> list[str]:
    """The ssh command for one machine, as root."""
    extra = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"] if batch else []
    return ["ssh", *options(known_hosts), *extra, "-i", str(key), f"root@{address}"]

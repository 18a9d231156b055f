# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who holds a port: once on this machine for real, and on captures of other machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.serving.listener import (
    Listener,
    in_the_way,
    listeners,
    unit_of,
)

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def capture(root: Path, tcp: str = "", tcp6: str = "") -> Machine:
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/tcp").write_text(HEADER + tcp)
    (root / "proc/net/tcp6").write_text(HEADER + tcp6)
    return Machine(str(root))


def row(address: str, state: str, inode: int) -> str:
    return f"   0: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 x\n"


def process(root: Path, pid: int, comm: str, inode: int, cgroup: str) -> None:
    folder = root / f"proc/{pid}"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd/3").symlink_to(f"socket:[{inode}]")
    (folder / "comm").write_text(comm + "\n")
    (folder / "cgroup").write_text(cgroup)


def test_finds_a_real_listener_of_this_process() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (found,) = listeners(Machine(), port)
    assert (found.address, found.port, found.pid) == ("127.0.0.1", port, os.getpid())
    assert found.program


def test_connected_sockets_and_other_ports_are_not_listeners(tmp_path: Path) -> None:
    machine = capture(tmp_path, row("0100007F:1F90", "01", 7) + row("0100007F:1F91", "0A", 8))
    assert listeners(machine, 8080) == []
    assert [item.port for item in listeners(machine)] == [8081]


def test_names_program_and_unit(tmp_path: Path) -> None:
    machine = capture(tmp_path, row("00000000:1F90", "0A", 42))
    process(tmp_path, 900, "nginx", 42, "0::/system.slice/nginx.service\n")
    process(tmp_path, 901, "nginx", 42, "0::/system.slice/nginx.service\n")
    assert listeners(machine, 8080) == [Listener("0.0.0.0", 8080, 900, "nginx", "nginx.service")]
    assert listeners(machine, 8080)[0].owner == "nginx (pid 900, unit nginx.service)"


def test_a_process_that_cannot_be_seen_is_null_not_absent(tmp_path: Path) -> None:
    machine = capture(tmp_path, row("00000000:1F90", "0A", 42))
    (found,) = listeners(machine, 8080)
    assert (found.pid, found.program, found.unit) == (None, None, None)
    assert "cannot be seen" in found.owner


def test_ipv6_wildcard_and_mapped_addresses(tmp_path: Path) -> None:
    machine = capture(
        tmp_path,
        tcp6=row("00000000000000000000000000000000:0050", "0A", 1)
        + row("0000000000000000FFFF00000100007F:0051", "0A", 2)
        + row("00000000000000000000000001000000:0052", "0A", 3),
    )
    assert [(item.address, item.port) for item in listeners(machine)] == [("::", 80), ("127.0.0.1", 81), ("::1", 82)]


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/ollama.service\n", "ollama.service"),
        ("12:pids:/x\n1:name=systemd:/system.slice/llama-server.service\n0::/\n", "llama-server.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/system.slice/system-llama\\x2dserver.slice/llama-server@a.service\n", "llama-server@a.service"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_unit_of_a_process(tmp_path: Path, cgroup: str, unit: str | None) -> None:
    process(tmp_path, 5, "x", 1, cgroup)
    assert unit_of(Machine(str(tmp_path)), 5) == unit


@pytest.mark.parametrize(
    ("have", "host", "collides"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("::", "127.0.0.1", True),
        ("127.0.0.1", "::", True),
        ("::1", "0.0.0.0", False),
        ("10.0.0.5", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
        ("::1", "[::1]", True),
        ("10.0.0.5", "server.example", True),
    ],
)
def test_what_is_in_the_way(have: str, host: str, collides: bool) -> None:
    assert bool(in_the_way([Listener(have, 8080)], host)) is collides

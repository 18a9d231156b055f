# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An address range for each lab that nothing else on this host uses."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from tests.lab.errors import LabError
from tests.lab.proc import output

#: Labs take /24 networks from here. Private, and not among what docker (172.17-31, 192.168), podman (10.88, 10.89),
#: kubernetes (10.96, 10.244) or libvirt (192.168.122) choose by default.
POOL = ipaddress.IPv4Network("10.213.0.0/16")
#: Last part of the first machine's address; below it is room for the gateway.
FIRST_MACHINE = 11
MOST_MACHINES = 200

Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class Addresses:
    """The addresses of one lab."""

    network: Network

    @property
    def gateway(self) -> str:
        """The host's own address on the lab's bridge."""
        return str(self.network.network_address + 1)

    def machine(self, number: int) -> str:
        """The address of machine 1, 2, ..."""
        if not 1 <= number <= MOST_MACHINES:
            raise LabError(f"A lab has 1 to {MOST_MACHINES} machines, not {number}")
        return str(self.network.network_address + FIRST_MACHINE + number - 1)


def networks_in_use(addresses: str, routes: str) -> list[Network]:
    """Networks the host knows, from the JSON of ``ip -4 -j address`` and ``ip -4 -j route show table all``."""
    used = []
    for device in json.loads(addresses or "[]"):
        for info in device.get("addr_info", []):
            if "local" in info:
                used.append(ipaddress.ip_network(f"{info['local']}/{info['prefixlen']}", strict=False))
    for route in json.loads(routes or "[]"):
        destination = route.get("dst", "default")
        # The default route says nothing about which addresses are taken.
        if destination not in ("default", "0.0.0.0/0"):
            used.append(ipaddress.ip_network(destination, strict=False))
    return [network for network in used if isinstance(network, Network)]


def bridge_name(seed: str) -> str:
    """The bridge of the lab that ``seed`` stands for. Left to podman, two stores would both take podman1."""
    return f"vlab-{hashlib.sha256(seed.encode()).hexdigest()[:8]}"


def choose(seed: str, taken: Iterable[Network]) -> Network:
    """A free /24: the one that ``seed`` points to, or the next that overlaps nothing taken.

    The seed decides where to begin so that a lab made again gets its old addresses where possible.
    """
    candidates = list(POOL.subnets(new_prefix=24))
    begin = int(hashlib.sha256(seed.encode()).hexdigest(), 16) % len(candidates)
    occupied = list(taken)
    for step in range(len(candidates)):
        candidate = candidates[(begin + step) % len(candidates)]
        if not any(candidate.overlaps(network) for network in occupied):
            return candidate
    raise LabError(f"No /24 network in {POOL} is free on this host. `python -m tests.lab status` lists the labs.")


def rules_of(rules: str, network: str) -> list[list[str]]:
    """Arguments of the iptables calls that remove a network's rules, from the text of ``iptables -t TABLE -S``.

    podman removes them itself, except when the namespace of the machines was lost before it could.
    """
    calls, chains = [], []
    for line in rules.splitlines():
        words = shlex.split(line)
        if words[:1] == ["-A"] and network in words:
            calls.append(["-D", *words[1:]])
            target = words[words.index("-j") + 1] if "-j" in words else ""
            # Besides the shared ones there is a chain for each network, called from a rule that names its subnet.
            if words[1] == "POSTROUTING" and target.startswith("NETAVARK-"):
                chains.append(target)
    for chain in chains:
        calls = [call for call in calls if call[1] != chain] + [["-F", chain], ["-X", chain]]
    return calls


def host_networks() -> list[Network]:
    """Networks this host has an address or a route in."""
    return networks_in_use(
        output(["ip", "-4", "-j", "address"]),
        output(["ip", "-4", "-j", "route", "show", "table", "all"]),
    )


def default_mtu(routes: str, links: str) -> int | None:
    """The packet size of the way out, from the JSON of ``ip -4 -j route show default`` and ``ip -j link``.

    A bridge with a larger one than the way out loses packets wherever ICMP is filtered.
    """
    sizes = {link["ifname"]: int(link["mtu"]) for link in json.loads(links or "[]")}
    for route in json.loads(routes or "[]"):
        if route.get("dev") in sizes:
            return sizes[route["dev"]]
    return None


def host_mtu() -> int | None:
    return default_mtu(output(["ip", "-4", "-j", "route", "show", "default"]), output(["ip", "-j", "link"]))

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which networks may reach a server, and what on the machine sees to it.

systemd's IPAddressAllow= filters the traffic of the unit itself, by a BPF program on its control group. Where kernel or
container cannot attach one, systemd starts the unit all the same and says so once in the journal. So a transient unit
is started here that must not reach a socket of ours; only when it does not, systemd is relied upon. Otherwise a table
of our own in nftables admits the networks to the port; it is set before each start of the server.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
from collections.abc import Mapping, Sequence

from ..addresses import address_of
from ..faults import Fault
from ..machine import Runner
from .catalogue import CATALOGUE

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FILTERS = ("auto", "systemd", "nftables")
NFT = "/usr/sbin/nft"
#: A public network with a shorter prefix is no group of clients any more; as volta_llm.networks judges it.
_WIDEST = {4: 8, 6: 16}
#: Private by definition (RFC 4193; RFC 4291 and, before it, RFC 3513), however wide.
_PRIVATE = [ipaddress.IPv6Network(network) for network in ("fc00::/7", "fe80::/10", "fec0::/10")]
#: IPv4 as a socket for IPv6 shows it; on the wire, where a filter looks, it is IPv4.
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
#: Bridges of Docker (the default one, and one a network), Podman and CNI, as they name them.
_BRIDGE = re.compile(r"docker[0-9]+|br-[0-9a-f]{12}|(?:cni-)?podman[0-9]+|cni[0-9]+")
#: Seconds for the connection that must fail; over loopback one that may succeeds at once.
_CONNECT_SECONDS = 2
_CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout={_CONNECT_SECONDS})"


def networks(clients: Sequence[str]) -> tuple[list[Network], list[Fault]]:
    """The networks, merged, and what is wrong with them. An address alone is a network of one."""
    found: list[Network] = []
    faults: list[Fault] = []
    for text in map(str, clients):
        try:
            found.append(_as_sent(ipaddress.ip_network(text.strip(), strict=False)))
        except ValueError:
            faults.append(
                _invalid(
                    f"{text!r} is no address and no network", "Write networks such as 192.168.10.0/24, one an element."
                )
            )
    fours = [network for network in found if isinstance(network, ipaddress.IPv4Network)]
    sixes = [network for network in found if isinstance(network, ipaddress.IPv6Network)]
    merged: list[Network] = [*ipaddress.collapse_addresses(fours), *ipaddress.collapse_addresses(sixes)]
    wide = [network for network in merged if _too_wide(network)]
    if wide:
        faults.append(
            _invalid(
                f"it comes to {', '.join(map(str, wide))}, a large part of the internet",
                "Name the networks of the clients, or leave the list empty and rely on a firewall.",
            )
        )
    return merged, faults


def _as_sent(network: Network) -> Network:
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        first = int(network.network_address) & 0xFFFFFFFF
        return ipaddress.IPv4Network((first, network.prefixlen - _MAPPED.prefixlen))
    return network


def nobody_admitted(host: str, admitted: Sequence[Network]) -> list[Fault]:
    """A fault where none of the networks can come to ``host``; an unspecified IPv6 address takes IPv4 as well."""
    address = address_of(host.partition("%")[0])
    if address is None or not admitted or (address.version == 6 and address.is_unspecified):
        return []
    if any(network.version == address.version for network in admitted):
        return []
    message = (
        f"all of them are IPv{admitted[0].version}, and a server on {host} is reached by IPv{address.version} alone"
    )
    remedy = "Name the clients' networks as they reach the server, or write `host` '::' for both."
    return [_invalid(message, remedy)]


def _too_wide(network: Network) -> bool:
    if isinstance(network, ipaddress.IPv6Network) and any(map(network.subnet_of, _PRIVATE)):
        return False
    return network.prefixlen < _WIDEST[network.version]


def _invalid(message: str, remedy: str) -> Fault:
    return CATALOGUE.fault("setting_invalid", "allowed_clients", message, remedy)


def container_networks(runner: Runner) -> dict[str, list[Network]]:
    """Networks of the bridges that container engines have made, by the bridge; empty where there is none."""
    done = runner(["ip", "-json", "address", "show"], 10.0)
    try:
        links = json.loads(done.stdout) if done.ok else []
    except ValueError:
        links = []
    found: dict[str, list[Network]] = {}
    for link in links:
        if not _BRIDGE.fullmatch(str(link.get("ifname"))):
            continue
        for address in link.get("addr_info") or []:
            # A link-local address is no network that a container is in.
            if address.get("scope") == "global":
                network = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
                found.setdefault(str(link["ifname"]), []).append(network)
    return found


def containers_kept_out(admitted: Sequence[Network], bridges: Mapping[str, Sequence[Network]]) -> list[Fault]:
    """A warning for each bridge whose containers the filter keeps away: Dify and its kin run in some."""
    faults = []
    for bridge, nets in bridges.items():
        left_out = [net for net in nets if not any(_within(net, allowed) for allowed in admitted)]
        if left_out:
            names = ", ".join(map(str, left_out))
            faults.append(
                CATALOGUE.fault(
                    "containers_kept_out",
                    "allowed_clients",
                    f"containers on {bridge} ({names}) of this machine are not among them",
                    f"Where clients run in containers on this machine, add {names} to `allowed_clients`; otherwise "
                    "leave it as it is.",
                )
            )
    return faults


def _within(network: Network, other: Network) -> bool:
    if isinstance(network, ipaddress.IPv4Network) and isinstance(other, ipaddress.IPv4Network):
        return network.subnet_of(other)
    if isinstance(network, ipaddress.IPv6Network) and isinstance(other, ipaddress.IPv6Network):
        return network.subnet_of(other)
    return False


def systemd_filters(runner: Runner) -> bool:
    """Whether systemd's address filter keeps a unit of this machine from a socket, tried out."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        address, port = server.getsockname()

        def reaches(*properties: str) -> bool:
            words = ["systemd-run", "--quiet", "--wait", "--collect", *properties]
            done = runner([*words, sys.executable, "-I", "-c", _CONNECT, address, str(port)], 20.0)
            return done.ok

        # The second call tells a filter that works from a machine on which nothing can be started at all.
        return not reaches("--property=IPAddressDeny=any") and reaches()


def table_name(unit: str) -> str:
    """The nftables table of a unit: letters, digits and underscores."""
    return "volta_llm_" + re.sub(r"\W", "_", unit)


def ruleset(unit: str, port: int, allowed: Sequence[Network], role: str = "llama_server") -> str:
    """Text for `nft -f`: whole, whatever was there before. Loopback is always admitted, as readiness is asked there.

    ``role`` is which role of the collection writes it.
    """
    table = f"inet {table_name(unit)}"
    lines = [
        f"# Written by Ansible (volta.llm.{role}): who may reach the server. Set before each of its starts.",
        f"table {table}",
        f"delete table {table}",
        f"table {table} {{",
        "  chain input {",
        # Before the machine's own filter, which can still refuse what is admitted here.
        "    type filter hook input priority filter - 10; policy accept;",
        f"    tcp dport != {port} accept",
        '    iifname "lo" accept',
    ]
    for version, family in ((4, "ip"), (6, "ip6")):
        of_family = [str(network) for network in allowed if network.version == version]
        if of_family:
            lines.append(f"    {family} saddr {{ {', '.join(of_family)} }} accept")
    return "\n".join([*lines, "    counter drop", "  }", "}", ""])

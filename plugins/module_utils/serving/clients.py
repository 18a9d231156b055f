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
import re
import socket
import sys
from collections.abc import Sequence

from ..faults import Fault
from ..machine import Runner
from .catalogue import CATALOGUE

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FILTERS = ("auto", "systemd", "nftables")
NFT = "/usr/sbin/nft"
#: A public network with a shorter prefix is no group of clients any more; as volta_llm.networks judges it.
_WIDEST = {4: 8, 6: 16}
#: Private by definition (RFC 4193), however wide.
_UNIQUE_LOCAL = ipaddress.IPv6Network("fc00::/7")
#: Seconds for the connection that must fail; over loopback one that may succeeds at once.
_CONNECT_SECONDS = 2
_CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout={_CONNECT_SECONDS})"


def networks(clients: Sequence[str]) -> tuple[list[Network], list[Fault]]:
    """The networks, merged, and what is wrong with them. An address alone is a network of one."""
    found: list[Network] = []
    faults: list[Fault] = []
    for text in map(str, clients):
        try:
            found.append(ipaddress.ip_network(text.strip(), strict=False))
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


def _too_wide(network: Network) -> bool:
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_UNIQUE_LOCAL):
        return False
    return network.prefixlen < _WIDEST[network.version]


def _invalid(message: str, remedy: str) -> Fault:
    return CATALOGUE.fault("setting_invalid", "allowed_clients", message, remedy)


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

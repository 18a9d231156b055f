# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judging addresses: who may reach the endpoint, and can anybody reach the one that was handed over?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from netaddr import AddrFormatError, IPAddress, IPNetwork, cidr_merge

from volta_llm.model import Fault, UsageError

#: A public network with a shorter prefix is no group of clients any more: a /8 is 1/256 of IPv4, a /16 far more than
#: any provider's share of IPv6.
_WIDEST = {4: 8, 6: 16}

#: Private by definition (RFC 4193; RFC 4291 and, before it, RFC 3513), however wide.
_PRIVATE = [IPNetwork(network) for network in ("fc00::/7", "fe80::/10", "fec0::/10")]

_HOST = "llama_server_host"
_CLIENTS = "llama_server_allowed_clients"


def refuse_bad_clients(hosts: Mapping[str, Mapping[str, Any]]) -> None:
    """UsageError when a host's allowed clients are no networks, or are in sum nearly everybody.

    ``hosts`` are the variables by host name. Values that are templates are known to the play only and left to it.
    """
    for host, variables in hosts.items():
        clients = variables.get(_CLIENTS)
        if not isinstance(clients, list):
            continue
        networks = []
        for text in clients:
            if "{{" in str(text):
                continue
            try:
                network = IPNetwork(str(text))
                # ::ffff:192.168.1.0/120 is IPv4.
                networks.append(network.ipv4() if network.is_ipv4_mapped() and network.prefixlen >= 96 else network)
            except (AddrFormatError, ValueError):
                raise UsageError(
                    f"{host}: {_CLIENTS} has {text!r}, which is no address and no network; "
                    "write networks such as 192.168.10.0/24, one a line"
                ) from None
        wide = [network for network in cidr_merge(networks) if _too_wide(network)]
        if wide:
            raise UsageError(
                f"{host}: {_CLIENTS} comes to {', '.join(map(str, wide))}, a large part of the internet; "
                "name the networks of the clients, or leave the list empty and rely on a firewall"
            )


def client_url(host: str, variables: Mapping[str, Any], url: str) -> str:
    """The base URL as a client calls it.

    The endpoint is proven on the server itself, so the URL handed over may name its loopback address, or one that
    stands for all of its addresses. Where the server listens for others the address that it listens on takes that
    place, or, when it listens on all, the one Ansible reaches it by.
    """
    parts = urlsplit(url)
    address = _address(parts.hostname or "")
    if address is None or not _reaches_nobody_else(address) or not _is_public(variables):
        return url
    name = str(variables[_HOST])
    if IPAddress(name.strip("[]")).value == 0:
        name = str(variables.get("ansible_host", host))
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return parts._replace(netloc=name if parts.port is None else f"{name}:{parts.port}").geturl()


def notes_on_endpoints(host: str, variables: Mapping[str, Any], endpoints: Iterable[str]) -> list[Fault]:
    """What is odd about the clients' base URLs of ``host``: faults to read, none that fails the run."""
    notes = []
    public = _is_public(variables)
    for url in endpoints:
        address = _address(urlsplit(url).hostname or "")
        if address is None:
            continue
        if address.value == 0:
            notes.append(
                Fault(
                    "endpoint_unspecified",
                    f"{host} {url}",
                    f"{address} stands for every address of the server and is none that a client can call",
                    "give clients the server's own address or name",
                )
            )
        elif public and address.is_loopback():
            notes.append(
                Fault(
                    "endpoint_loopback",
                    f"{host} {url}",
                    f"the server listens on {variables[_HOST]} for others, but this address works on itself only",
                    "give clients the server's own address or name",
                )
            )
    return notes


def _is_public(variables: Mapping[str, Any]) -> bool:
    """Whether the server is told to listen for other machines; the role's own default is loopback."""
    address = _address(str(variables.get(_HOST, "")))
    return address is not None and not address.is_loopback()


def _reaches_nobody_else(address: IPAddress) -> bool:
    return bool(address.is_loopback() or address.value == 0)


def _too_wide(network: IPNetwork) -> bool:
    private = any(network in wide for wide in _PRIVATE)
    return bool(network.prefixlen < _WIDEST[network.version]) and not private


def _address(text: str) -> IPAddress | None:
    try:
        return IPAddress(text.strip("[]"))
    except (AddrFormatError, ValueError):
        return None

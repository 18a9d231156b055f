# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Hosts that are written as addresses."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_of(host: str) -> Address | None:
    """The address that ``host`` is, IPv6 with or without brackets; null for a name, which is not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches ``host``."""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)

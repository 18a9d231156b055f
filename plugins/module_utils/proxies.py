# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What no_proxy keeps away from the proxy beyond Python's own reading of it."""

from __future__ import annotations

import ipaddress
import os
import re

from .addresses import address_of


def in_a_network(host: str) -> bool:
    """Whether a host that is written as an address lies in a network of no_proxy (C(10.0.0.0/8)), or is an address of
    it in another form (C([::1])).

    curl (since 7.86) and pip read it so; urllib compares names only, and sends what is meant for a mirror in the own
    network to the proxy.
    """
    address = address_of(host)
    if address is None:
        return False
    for word in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(","):
        # A single address is a network of one.
        try:
            network = ipaddress.ip_network(re.sub(r"[\[\]\s]", "", word), strict=False)
        except ValueError:
            continue
        if address.version == network.version and address in network:
            return True
    return False

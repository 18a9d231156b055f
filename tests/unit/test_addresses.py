# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A host is an address, or a name of which nothing is known."""

from __future__ import annotations

import ipaddress

import pytest
from ansible_collections.volta.llm.plugins.module_utils.addresses import address_of, is_loopback


@pytest.mark.parametrize(
    ("host", "address", "own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.9.9.9", "127.9.9.9", True),
        ("::1", "::1", True),
        ("[::1]", "::1", True),
        ("10.0.0.5", "10.0.0.5", False),
        ("0.0.0.0", "0.0.0.0", False),
        ("[2001:db8::7]", "2001:db8::7", False),
        ("localhost", None, True),
        ("gpu1.example.org", None, False),
        ("10.0.0", None, False),
        ("", None, False),
    ],
)
def test_hosts(host: str, address: str | None, own: bool) -> None:
    assert address_of(host) == (None if address is None else ipaddress.ip_address(address))
    assert is_loopback(host) is own

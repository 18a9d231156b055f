# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Address ranges, bridges and firewall rules."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import network
from tests.lab.errors import LabError

FIXTURES = Path(__file__).parents[1] / "fixtures/lab"
SUBNETS = list(network.POOL.subnets(new_prefix=24))


def net(text: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(text)


def test_networks_of_a_host() -> None:
    used = network.networks_in_use((FIXTURES / "ip-address.json").read_text(), (FIXTURES / "ip-route.json").read_text())

    assert net("192.0.2.0/24") in used
    assert {net("10.213.234.0/24"), net("10.213.128.0/24"), net("10.213.58.0/24")} <= set(used)
    assert net("0.0.0.0/0") not in used


def test_nothing_known_is_no_network() -> None:
    assert network.networks_in_use("", "") == []


@given(seed=st.text(), taken=st.lists(st.sampled_from(SUBNETS), max_size=40))
def test_choice_overlaps_nothing_taken(seed: str, taken: list[ipaddress.IPv4Network]) -> None:
    chosen = network.choose(seed, taken)

    assert chosen.subnet_of(network.POOL)
    assert chosen.prefixlen == 24
    assert not any(chosen.overlaps(other) for other in taken)


def test_choice_is_the_same_again_and_moves_on_when_taken() -> None:
    first = network.choose("state demo", [])

    assert network.choose("state demo", []) == first
    assert network.choose("state demo", [first]) != first


def test_a_wider_network_of_the_host_takes_all_in_it() -> None:
    assert network.choose("x", [net("10.213.0.0/17")]).subnet_of(net("10.213.128.0/17"))


def test_full_pool_is_an_error() -> None:
    with pytest.raises(LabError, match="is free"):
        network.choose("x", [net("10.0.0.0/8")])


def test_addresses() -> None:
    addresses = network.Addresses(net("10.213.7.0/24"))

    assert addresses.gateway == "10.213.7.1"
    assert [addresses.machine(number) for number in (1, 2)] == ["10.213.7.11", "10.213.7.12"]
    with pytest.raises(LabError, match="1 to 200"):
        addresses.machine(201)


def test_bridge_name_fits_the_kernel() -> None:
    assert len(network.bridge_name("any" * 50)) <= 15
    assert network.bridge_name("a") != network.bridge_name("b")


def test_packet_size_of_the_way_out() -> None:
    links = json.dumps([{"ifname": "lo", "mtu": 65536}, {"ifname": "eth0", "mtu": 1400}])

    assert network.default_mtu('[{"dst": "default", "dev": "eth0"}]', links) == 1400
    assert network.default_mtu("[]", links) is None


def test_rules_of_one_network_only() -> None:
    calls = network.rules_of((FIXTURES / "iptables-nat.txt").read_text(), "10.213.128.0/24")

    assert calls == [
        ["-D", "POSTROUTING", "-s", "10.213.128.0/24", "-j", "NETAVARK-8F79BD1E48302"],
        ["-F", "NETAVARK-8F79BD1E48302"],
        ["-X", "NETAVARK-8F79BD1E48302"],
    ]


def test_rules_with_a_comment_and_a_state() -> None:
    calls = network.rules_of((FIXTURES / "iptables-filter.txt").read_text(), "10.213.58.0/24")

    assert [call[:2] for call in calls] == [["-D", "NETAVARK_FORWARD"], ["-D", "NETAVARK_FORWARD"]]
    assert calls[0][-3:] == ["RELATED,ESTABLISHED", "-j", "ACCEPT"]


def test_a_network_without_rules() -> None:
    assert network.rules_of((FIXTURES / "iptables-nat.txt").read_text(), "10.213.1.0/24") == []

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who may reach a server: the networks that are taken, the rules made of them, and whether systemd can be relied upon.

The molecule scenario has real machines that are kept away, by systemd and by nftables.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.serving.clients import (
    networks,
    nobody_admitted,
    ruleset,
    systemd_filters,
    table_name,
)

from volta_llm.model import UsageError
from volta_llm.networks import refuse_bad_clients


def test_networks_are_merged_and_an_address_is_a_network_of_one() -> None:
    found, faults = networks(
        ["192.168.10.0/25", " 192.168.10.128/25", "10.1.2.3", "10.9.8.7/16", "fd00::/8", "2001:db8::1"]
    )
    assert faults == []
    assert list(map(str, found)) == ["10.1.2.3/32", "10.9.0.0/16", "192.168.10.0/24", "2001:db8::1/128", "fd00::/8"]


@pytest.mark.parametrize("text", ["", "office", "10.0.0.0/33", "300.1.1.1", "10.0.0.1-10.0.0.9", "::/200"])
def test_what_is_no_network(text: str) -> None:
    _, (fault,) = networks([text])
    assert (fault.code, fault.subject) == ("setting_invalid", "allowed_clients")
    assert repr(text) in fault.message


@pytest.mark.parametrize(
    "clients",
    [
        ["0.0.0.0/0"],
        ["0.0.0.0/1", "128.0.0.0/1"],
        ["::/0"],
        ["2000::/3"],
        ["8.0.0.0/7"],
        ["::ffff:0:0/96"],
        ["fe00::/7"],
    ],
)
def test_nearly_everybody_is_no_group_of_clients(clients: list[str]) -> None:
    """The role and volta-llm judge alike."""
    _, (fault,) = networks(clients)
    assert "a large part of the internet" in fault.message
    with pytest.raises(UsageError, match="a large part of the internet"):
        refuse_bad_clients({"gpu": {"llama_server_allowed_clients": clients}})


@pytest.mark.parametrize(
    "clients", [["10.0.0.0/8"], ["fc00::/7"], ["fe80::/10"], ["fec0::/10"], ["100.64.0.0/10", "192.168.0.0/16"]]
)
def test_wide_private_networks_are_taken_by_both(clients: list[str]) -> None:
    assert networks(clients)[1] == []
    refuse_bad_clients({"gpu": {"llama_server_allowed_clients": clients}})


def test_ipv4_written_as_ipv6_is_ipv4() -> None:
    """On the wire, where the filters look, it is."""
    found, faults = networks(["::ffff:192.168.1.0/120", "::ffff:10.1.2.3"])
    assert (faults, list(map(str, found))) == ([], ["10.1.2.3/32", "192.168.1.0/24"])


@pytest.mark.parametrize(
    ("host", "clients", "wrong"),
    [
        ("0.0.0.0", ["fd00::/8"], True),
        ("10.0.0.5", ["fd00::/8", "fe80::/10"], True),
        ("fd00::5", ["192.168.10.0/24"], True),
        ("fe80::1%eth0", ["192.168.10.0/24"], True),
        ("0.0.0.0", ["fd00::/8", "192.168.10.0/24"], False),
        ("0.0.0.0", ["::ffff:192.168.1.0/120"], False),
        # Such a socket takes both.
        ("::", ["192.168.10.0/24"], False),
        ("::", ["fd00::/8"], False),
        ("0.0.0.0", [], False),
        ("nonsense", ["fd00::/8"], False),
    ],
)
def test_clients_that_cannot_come_to_the_address(host: str, clients: list[str], wrong: bool) -> None:
    faults = nobody_admitted(host, networks(clients)[0])
    assert [(fault.code, fault.subject) for fault in faults] == [("setting_invalid", "allowed_clients")] * wrong


def test_the_rules_are_whole_and_concern_one_port() -> None:
    found, _ = networks(["192.168.10.0/24", "10.1.2.3", "fd00::/8"])
    text = ruleset("llama-server@b-2", 8081, found)
    table = "table inet volta_llm_llama_server_b_2"
    # Made, removed with all it had, made again: one transaction, whatever was there before.
    assert text.splitlines()[1:4] == [table, f"delete {table}", f"{table} {{"]
    rules = [line.strip() for line in text.splitlines()]
    assert rules[5:-2] == [
        "type filter hook input priority filter - 10; policy accept;",
        "tcp dport != 8081 accept",
        'iifname "lo" accept',
        "ip saddr { 10.1.2.3/32, 192.168.10.0/24 } accept",
        "ip6 saddr { fd00::/8 } accept",
        "counter drop",
    ]


def test_rules_of_one_family_keep_the_other_out() -> None:
    assert "ip6" not in ruleset("x", 1, networks(["10.0.0.0/8"])[0])
    assert table_name("llama-server") != table_name("llama-server@b")


@pytest.mark.parametrize(
    ("filters", "starts", "relied_upon"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_systemd_is_tried_out(filters: bool, starts: bool, relied_upon: bool) -> None:
    """A unit that must not reach us is started; where none can be started, that proves nothing."""
    called: list[tuple[str, ...]] = []

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        called.append(tuple(argv))
        denied = "--property=IPAddressDeny=any" in argv
        if starts and not (denied and filters):
            # What the program in the unit does.
            socket.create_connection((argv[-2], int(argv[-1])), timeout=5).close()
            return Completed(tuple(argv), 0)
        return Completed(tuple(argv), 1)

    assert systemd_filters(runner) is relied_upon
    assert called[0][:4] == ("systemd-run", "--quiet", "--wait", "--collect")

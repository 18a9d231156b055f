# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import pytest

from volta_llm import UsageError
from volta_llm.networks import client_url, notes_on_endpoints, refuse_bad_clients


@pytest.mark.parametrize(
    "clients",
    [
        [],
        ["192.168.10.0/24", "10.0.0.0/8"],
        ["203.0.113.7"],
        ["fd00::/8", "2001:db8::/32"],
        ["{{ office_network }}"],
        "{{ networks }}",
        None,
    ],
)
def test_clients_that_pass(clients: object) -> None:
    refuse_bad_clients({"gpu": {"llama_server_allowed_clients": clients}})


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (["192.168.10.0/33"], "has '192.168.10.0/33', which is no address and no network"),
        (["office"], "has 'office'"),
        (["0.0.0.0/0"], "comes to 0.0.0.0/0"),
        (["::/0"], "comes to ::/0"),
        (["0.0.0.0/1", "128.0.0.0/1"], "comes to 0.0.0.0/0"),
        ([f"{first}.0.0.0/8" for first in range(64, 128)], "comes to 64.0.0.0/2"),
    ],
)
def test_clients_that_are_refused(clients: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r"^gpu: llama_server_allowed_clients") as caught:
        refuse_bad_clients({"gpu": {"llama_server_allowed_clients": clients}})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "url", "codes"),
    [
        ({}, "http://127.0.0.1:8080/v1", []),
        ({"llama_server_host": "127.0.0.1"}, "http://[::1]:8080/v1", []),
        ({}, "http://0.0.0.0:8080/v1", ["endpoint_unspecified"]),
        ({}, "http://[::]:8080/v1", ["endpoint_unspecified"]),
        (
            {"llama_server_host": "0.0.0.0"},
            "http://127.0.0.1:8080/v1",
            ["endpoint_loopback"],
        ),
        (
            {"llama_server_host": "0.0.0.0"},
            "http://10.0.0.5:8080/v1",
            [],
        ),
        ({"llama_server_host": "10.0.0.5"}, "http://gpu.example.org:8080/v1", []),
    ],
)
def test_notes_on_endpoints(variables: dict[str, object], url: str, codes: list[str]) -> None:
    assert [note.code for note in notes_on_endpoints("gpu", variables, [url])] == codes


@pytest.mark.parametrize(
    ("variables", "url", "expected"),
    [
        # Listens on loopback only: that is the address.
        ({}, "http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
        # Listens on all: the one it is reached by.
        (
            {"llama_server_host": "0.0.0.0", "ansible_host": "10.0.0.5"},
            "http://127.0.0.1:8080/v1",
            "http://10.0.0.5:8080/v1",
        ),
        ({"llama_server_host": "::", "ansible_host": "fd00::5"}, "http://[::1]:8080/v1", "http://[fd00::5]:8080/v1"),
        ({"llama_server_host": "0.0.0.0"}, "http://0.0.0.0/v1", "http://gpu/v1"),
        # Listens on one.
        (
            {"llama_server_host": "10.0.0.9", "ansible_host": "gpu.lan"},
            "http://127.0.0.1:8080/v1",
            "http://10.0.0.9:8080/v1",
        ),
        # Names and reachable addresses stay.
        ({"llama_server_host": "0.0.0.0"}, "https://llm.example.org/v1", "https://llm.example.org/v1"),
        ({"llama_server_host": "0.0.0.0"}, "http://10.0.0.7:8080/v1", "http://10.0.0.7:8080/v1"),
    ],
)
def test_the_url_that_clients_call(variables: dict[str, object], url: str, expected: str) -> None:
    assert client_url("gpu", variables, url) == expected

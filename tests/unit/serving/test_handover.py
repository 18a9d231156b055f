# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What clients are told of an endpoint: an address they can call, figures that hold, and never a key (E26)."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.volta.llm.plugins.filter.hand_over import FilterModule, endpoint_cards, endpoint_records
from ansible_collections.volta.llm.plugins.module_utils.serving.handover import (
    card,
    check_advertised,
    curl,
    reachable,
    record,
)
from ansible_collections.volta.llm.plugins.module_utils.serving.probe import own_address

LOCAL = "http://127.0.0.1:8080/v1"


def server(**changed: Any) -> dict[str, Any]:
    return {
        "name": "llama-server",
        "base_url": LOCAL,
        "host": "0.0.0.0",
        "alias": "demo",
        "context_per_request": 8192,
        "parallel": 2,
        "has_keys": True,
        "api_key_file": "/etc/llama-server/api-keys",
        **changed,
    }


def probe(**changed: Any) -> dict[str, Any]:
    return {
        "address": "10.0.0.5",
        "context_per_request": 8448,
        "parallel": 2,
        "ready_s": 0.1,
        "answer": "The river runs\nto the sea.",
        "tokens_per_second": 41.3,
        "gpu_resident": True,
        **changed,
    }


@pytest.mark.parametrize(
    ("advertised", "why"),
    [
        ("https://llm.example.org", "is a URL"),
        ("llm.example.org:443", "has a port"),
        ("10.0.0.5:8080", "has a port"),
        ("[2001:db8::7]:8080", "has a port"),
        ("10.0.0.5/24", "is a network"),
        ("llm example", "neither a name nor an address"),
        ("llm.example.org\n", "neither a name nor an address"),
        ("10.0.0.256", "neither a name nor an address"),
        ("-llm", "neither a name nor an address"),
        ("a..b", "neither a name nor an address"),
    ],
)
def test_what_clients_cannot_be_told(advertised: str, why: str) -> None:
    (fault,) = check_advertised(advertised)
    assert (fault.code, fault.subject, why in fault.message) == ("setting_invalid", "advertised_host", True)
    with pytest.raises(AnsibleFilterError, match="Write a name or an address alone"):
        endpoint_records([], "10.0.0.7", advertised)


def test_a_login_in_what_clients_are_told_is_not_shown() -> None:
    (fault,) = check_advertised("https://oper:secret@llm.example.org/")
    assert "secret" not in fault.message


@pytest.mark.parametrize(
    "advertised", ["", "llm.example.org", "llm.example.org.", "gpu_1", "10.0.0.5", "2001:db8::7", "[2001:db8::7]"]
)
def test_what_clients_can_be_told(advertised: str) -> None:
    assert check_advertised(advertised) == []


@pytest.mark.parametrize(
    ("base_url", "host", "known_as", "own", "url", "others"),
    [
        (LOCAL, "0.0.0.0", "10.0.0.7", "10.0.0.5", "http://10.0.0.7:8080/v1", True),
        (LOCAL, "0.0.0.0", "gpu.example.org", "10.0.0.5", "http://gpu.example.org:8080/v1", True),
        # A name of the operator's own ssh configuration: nobody else knows it. A certificate names it all the same.
        (LOCAL, "0.0.0.0", "gpu1", "10.0.0.5", "http://10.0.0.5:8080/v1", True),
        ("https://127.0.0.1:8080/v1", "0.0.0.0", "gpu1", "10.0.0.5", "https://gpu1:8080/v1", True),
        (LOCAL, "0.0.0.0", "gpu1", None, "http://gpu1:8080/v1", True),
        # Ansible runs on the machine itself.
        (LOCAL, "0.0.0.0", "localhost", "10.0.0.5", "http://10.0.0.5:8080/v1", True),
        (LOCAL, "0.0.0.0", "127.0.0.1", "10.0.0.5", "http://10.0.0.5:8080/v1", True),
        (LOCAL, "0.0.0.0", "localhost", None, LOCAL, False),
        ("http://[::1]:8080/v1", "::", "2001:db8::7", None, "http://[2001:db8::7]:8080/v1", True),
        ("http://10.1.1.1:8080/v1", "10.1.1.1", "10.0.0.7", "10.0.0.5", "http://10.1.1.1:8080/v1", True),
        (LOCAL, "127.0.0.1", "10.0.0.7", "10.0.0.5", LOCAL, False),
        ("http://localhost:8080/v1", "localhost", "10.0.0.7", None, "http://localhost:8080/v1", False),
    ],
)
def test_an_address_that_another_machine_can_call(
    base_url: str, host: str, known_as: str, own: str | None, url: str, others: bool
) -> None:
    assert reachable(base_url, host, known_as, own) == (url, others)


def test_the_operators_own_choice_of_name_wins() -> None:
    found = record(server(), probe(), "10.0.0.7", "llm.example.org")
    assert found["base_url"] == "http://llm.example.org:8080/v1"


def test_the_record_has_what_was_granted_and_no_key() -> None:
    found = record(server(), probe(), "10.0.0.7")
    assert (found["base_url"], found["context_per_request"], found["requests_at_once"]) == (
        "http://10.0.0.7:8080/v1",
        8448,
        2,
    )
    assert found["api_key"] == {"required": True, "file": "/etc/llama-server/api-keys"}
    assert json.loads(json.dumps(found)) == found
    # Where the server does not say, what was asked for.
    silent = record(server(), probe(context_per_request=None, parallel=None), "10.0.0.7")
    assert (silent["context_per_request"], silent["requests_at_once"]) == (8192, 2)


def test_each_client_gets_the_address_in_its_own_form() -> None:
    """E26: the path doubled, localhost inside Docker, an empty key."""
    clients = record(server(), probe(), "10.0.0.7")["clients"]
    dify = clients["dify"]
    assert dify["api_endpoint_url"] == "http://10.0.0.7:8080/v1"
    assert (dify["model_context_size"], dify["concurrency"]) == (8448, 2)
    assert 0 < dify["upper_bound_for_max_tokens"] < dify["model_context_size"]
    assert dify["api_key"]
    assert clients["langchain"]["base_url"] == "http://10.0.0.7:8080/v1"
    assert clients["one_api"]["base_url"] == "http://10.0.0.7:8080"


def test_without_keys_clients_are_told_what_to_write_all_the_same() -> None:
    found = record(server(host="127.0.0.1", has_keys=False), probe(), "10.0.0.7")
    assert found["api_key"] == {"required": False, "file": None}
    assert found["clients"]["dify"]["api_key"] == "none"
    assert "Authorization" not in found["clients"]["curl"]
    assert "OPENAI_API_KEY=none" in card(found)


def test_curl_survives_a_shell() -> None:
    words = shlex.split(curl("http://h:1/v1", 'it\'s a "model"', True).replace("$OPENAI_API_KEY", "KEY"))
    assert words[:4] == ["curl", "http://h:1/v1/chat/completions", "-H", "Authorization: Bearer KEY"]
    assert json.loads(words[-1])["model"] == 'it\'s a "model"'


def test_the_card_is_for_people() -> None:
    text = card(record(server(), probe(), "10.0.0.7"), "10.0.0.7")
    for needed in (
        "http://10.0.0.7:8080/v1",
        "8448 tokens a request",
        "a line of /etc/llama-server/api-keys on 10.0.0.7",
        "The river runs to the sea. (41.3 tokens/s)",
        "Dify",
        "One API",
        "ChatOpenAI(",
        "curl ",
        "$(ssh 10.0.0.7 sudo head -n1 /etc/llama-server/api-keys)",
    ):
        assert needed in text
    assert "ssh -L" not in text
    # But for the call itself, lines fit a terminal.
    assert [line for line in text.splitlines() if len(line) > 120 and "curl http" not in line] == []


def test_a_server_on_loopback_says_how_to_get_there() -> None:
    text = card(record(server(host="127.0.0.1"), probe(), "10.0.0.7"), "10.0.0.7")
    assert "this machine only" in text
    assert "ssh -L 8080:127.0.0.1:8080 10.0.0.7" in text


@pytest.mark.parametrize(
    ("host", "url", "tunnel"),
    [
        ("::1", "http://[::1]:8080/v1", "8080:[::1]:8080"),
        ("127.0.0.2", "http://127.0.0.2:8080/v1", "8080:127.0.0.2:8080"),
        ("localhost", "http://localhost:8080/v1", "8080:localhost:8080"),
    ],
)
def test_the_way_there_leads_to_the_address_that_is_listened_on(host: str, url: str, tunnel: str) -> None:
    text = card(record(server(host=host, base_url=url), probe(), "10.0.0.7"), "10.0.0.7")
    assert f"ssh -L {tunnel} 10.0.0.7" in text


def test_the_filters_take_a_loop_and_leave_out_what_is_not_ready() -> None:
    results = [
        {"item": server(), **probe()},
        {"item": server(name="llama-server@small"), **probe(ready_s=None), "would_verify": True},
        {"item": server(name="llama-server@off"), "skipped": True},
    ]
    found = endpoint_records(results, "10.0.0.7")
    assert [endpoint["name"] for endpoint in found] == ["llama-server"]
    assert endpoint_cards(found * 2).count("llama-server serves") == 2
    assert set(FilterModule().filters()) == {"endpoint_records", "endpoint_cards", "api_key_lines"}


def test_this_machines_own_address_is_none_that_only_it_knows() -> None:
    address = own_address()
    assert address is None or not address.startswith("127.")


def test_an_endpoint_of_ollama() -> None:
    """Its probe measures context and share of the GPUs under names of its own."""
    entry = server(
        name="ollama", base_url="http://127.0.0.1:11434/v1", alias="qwen3:8b", has_keys=False, host="0.0.0.0"
    )
    measured = {"ready_s": 0.1, "context": 16384, "gpu_share": 0.98, "tokens_per_second": 71.2, "prompt_tokens": 4750}
    (made,) = endpoint_records([{"item": entry, **measured}], "gpu.example.org")
    assert (made["base_url"], made["context_per_request"]) == ("http://gpu.example.org:11434/v1", 16384)
    assert made["proof"] == {"answer": None, "tokens_per_second": 71.2, "ready_s": 0.1, "gpu_resident": True}
    assert record(entry, {"gpu_share": 0.0}, "x")["proof"]["gpu_resident"] is False
    assert "none is asked for" in card(made)


def test_a_model_of_vectors_is_handed_over_as_one() -> None:
    found = record(server(has_keys=False), probe(kind="embedding", model="all-vectors:latest", answer=None), "10.0.0.7")
    assert (found["model"], found["kind"]) == ("all-vectors:latest", "embedding")
    clients = found["clients"]
    assert clients["dify"]["model_type"] == "Text Embedding"
    words = shlex.split(clients["curl"])
    assert words[1].endswith("/v1/embeddings")
    assert json.loads(words[-1]) == {"model": "all-vectors:latest", "input": "Hello"}
    text = card(found)
    assert "OpenAIEmbeddings(" in text
    for part in ("ChatOpenAI", "Completion mode", "chat/completions"):
        assert part not in text

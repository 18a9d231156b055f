# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a client has to be told of an endpoint, as a record and as a card to read. No key is in either.

The names of settings are those of the clients: Dify's provider "OpenAI-API-compatible" (its credential form), One API's
channel types (an OpenAI channel appends /v1/..., an "OpenAI compatible" one does not), langchain-openai's ChatOpenAI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..addresses import address_of, is_loopback
from ..faults import Fault
from ..nvidia.values import is_index
from .catalogue import CATALOGUE

#: The variable that the official client and LangChain read the key from.
KEY_VARIABLE = "OPENAI_API_KEY"
#: Where no key is asked for, clients want one all the same.
NO_KEY = "none"
#: Of the context, what an answer may use by default; the rest is left to the prompt.
ANSWER_PART = 4
ANSWER_TOKENS = 8192
#: A part of a name between dots.
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def check_advertised(advertised: str) -> list[Fault]:
    """What stands against telling clients this name or address; empty for none is no mistake."""
    if not advertised:
        return []
    problem = None
    if "://" in advertised:
        problem = "is a URL"
    elif "/" in advertised:
        problem = "is a network or a path"
    elif re.fullmatch(r"(?:\[.*\]|[^:]*):[0-9]+", advertised):
        problem = "has a port in it; the server's own is added"
    else:
        address = address_of(advertised)
        labels = advertised.removesuffix(".").split(".")
        # The last part of a name is no number: that is an address, and this one is none.
        named = all(map(_LABEL.fullmatch, labels)) and not is_index(labels[-1]) and len(advertised) < 254
        if address is None and not named:
            problem = "is neither a name nor an address"
    if problem is None:
        return []
    # With a login in it a URL is a secret.
    shown = advertised.rpartition("@")[2]
    remedy = (
        "Write a name or an address alone, as in llm.example.org or 10.0.0.5; without it the machine's own is used."
    )
    return [CATALOGUE.fault("setting_invalid", "advertised_host", f"{shown!r} {problem}", remedy)]


def reachable(base_url: str, host: str, known_as: str, own_address: str | None = None) -> tuple[str, bool]:
    """The base URL as another machine calls it, and whether one can.

    ``base_url`` is as seen on the machine itself, ``host`` what the server listens on, ``known_as`` how Ansible reaches
    the machine, ``own_address`` its address towards others where that is known. A server on loopback stays as it is.
    """
    parts = urlsplit(base_url)
    if is_loopback(host):
        return base_url, False
    name, listens = host, address_of(host)
    if listens is not None and listens.is_unspecified:
        name = known_as
        # Ansible on the machine itself, or a name that only its own ssh configuration knows.
        nobody_elses = not known_as or is_loopback(known_as)
        if own_address and (
            nobody_elses or (address_of(known_as) is None and "." not in known_as and parts.scheme == "http")
        ):
            name = own_address
        elif nobody_elses:
            return base_url, False
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    netloc = name if parts.port is None else f"{name}:{parts.port}"
    return parts._replace(netloc=netloc).geturl(), True


def record(server: Mapping[str, Any], probe: Mapping[str, Any], known_as: str, advertised: str = "") -> dict[str, Any]:
    """An endpoint in the words of its clients. It is plain data and has no key in it.

    ``server``: an entry of module llama_server_arguments (``servers``) or ollama_settings (``endpoints``). ``probe``:
    the result of module llm_probe or ollama_probe for it. ``known_as``: how Ansible reaches the machine.
    ``advertised``: address or name to use instead of all that.
    """
    local = str(server["base_url"])
    address = str(probe.get("address") or "") or None
    url, others = reachable(local, advertised or str(server["host"]), known_as, address)
    context = int(probe.get("context_per_request") or probe.get("context") or server["context_per_request"])
    parallel = int(probe.get("parallel") or server["parallel"])
    # Ollama has several models: its probe tells which one it asked, and what that makes.
    model = str((probe.get("kind") and probe.get("model")) or server["alias"])
    vectors = probe.get("kind") == "embedding"
    has_keys = bool(server["has_keys"])
    proof = {name: probe.get(name) for name in ("answer", "tokens_per_second", "ready_s", "gpu_resident")}
    if proof["gpu_resident"] is None and probe.get("gpu_share") is not None:
        proof["gpu_resident"] = probe["gpu_share"] > 0
    answer = max(256, min(ANSWER_TOKENS, context // ANSWER_PART))
    return {
        "name": str(server["name"]),
        "base_url": url,
        "local_base_url": local,
        "reachable_from_others": others,
        "model": model,
        "kind": "embedding" if vectors else "completion",
        "context_per_request": context,
        "requests_at_once": parallel,
        "api_key": {"required": has_keys, "file": str(server["api_key_file"]) if has_keys else None},
        "proof": proof,
        "clients": {
            "dify": {
                "provider": "OpenAI-API-compatible",
                "model_type": "Text Embedding" if vectors else "LLM",
                "model_name": model,
                "api_key": f"a line of {server['api_key_file']}" if has_keys else NO_KEY,
                "api_endpoint_url": url,
                "completion_mode": "Chat",
                "model_context_size": context,
                "upper_bound_for_max_tokens": answer,
                "streaming_delimiter": "\\n\\n",
                "concurrency": parallel,
            },
            "langchain": {
                "class": f"langchain_openai.{'OpenAIEmbeddings' if vectors else 'ChatOpenAI'}",
                "base_url": url,
                "model": model,
                "max_tokens": answer,
                "max_concurrency": parallel,
            },
            "one_api": {
                "channel_type": "OpenAI",
                # An OpenAI channel appends /v1/chat/completions.
                "base_url": url.removesuffix("/v1"),
                "models": [model],
            },
            "curl": curl(url, model, has_keys, vectors),
        },
    }


def curl(url: str, model: str, has_keys: bool, vectors: bool = False) -> str:
    """A call to paste into a shell; the key comes from the environment."""
    asked = {"input": "Hello"} if vectors else {"messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({"model": model, **asked})
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_keys else ""
    # A quote within single quotes ends them for a moment.
    data = body.replace("'", "'\\''")
    path = "embeddings" if vectors else "chat/completions"
    return f"curl {url}/{path}{key} -H 'Content-Type: application/json' -d '{data}'"


def card(endpoint: Mapping[str, Any], known_as: str = "") -> str:
    """The record as lines to read, up to 120 characters where no address is longer."""
    clients = endpoint["clients"]
    vectors = endpoint.get("kind") == "embedding"
    dify, chain, one = clients["dify"], clients["langchain"], clients["one_api"]
    file = endpoint["api_key"]["file"]
    if file:
        key = f"a line of {file} on {known_as or 'the server'} (root reads it)"
        export = f"{KEY_VARIABLE}=$(ssh {known_as or 'SERVER'} sudo head -n1 {file})"
    else:
        key = "none is asked for; give clients that insist any word"
        export = f"{KEY_VARIABLE}={NO_KEY}"
    rows: list[tuple[str, str]] = [
        ("base URL", str(endpoint["base_url"])),
        ("model", str(endpoint["model"])),
        ("context", f"{endpoint['context_per_request']} tokens a request, prompt and answer together"),
        ("at once", f"{endpoint['requests_at_once']} requests; further ones wait in the server"),
        ("API key", key),
    ]
    proof = endpoint["proof"]
    if proof["answer"]:
        rate = f" ({proof['tokens_per_second']} tokens/s)" if proof["tokens_per_second"] is not None else ""
        answer = " ".join(str(proof["answer"]).split())
        rows.append(("answered", f"{answer[:60]}{'...' if len(answer) > 60 else ''}{rate}"))
    if not endpoint["reachable_from_others"]:
        there = urlsplit(str(endpoint["base_url"])).netloc
        rows.append(("reach", "this machine only, not containers on it either; from elsewhere:"))
        rows.append(("", f"ssh -L {there.rpartition(':')[2]}:{there} {known_as or 'SERVER'}"))
    lines = [f"{endpoint['name']} serves", *_table(rows), ""]
    lines += [
        "Dify: Model provider > OpenAI-API-compatible > Add model",
        *_table(
            [
                ("Model type, name", f"{dify['model_type']}, {dify['model_name']}"),
                ("API endpoint URL", f"{dify['api_endpoint_url']}  (as it is: ends in /v1, never localhost)"),
                *([] if vectors else [("Completion mode", dify["completion_mode"])]),
                ("Context size", str(dify["model_context_size"])),
                *([] if vectors else [("Max tokens bound", str(dify["upper_bound_for_max_tokens"]))]),
                ("Concurrency", f"{dify['concurrency']}: iteration nodes' parallelism, and APP_MAX_ACTIVE_REQUESTS"),
            ]
        ),
        "",
        f"One API: channel type {one['channel_type']}, base URL {one['base_url']} (without /v1), "
        f"model {one['models'][0]}",
        "",
        "LangChain:",
        *_langchain(chain, vectors),
        "",
        "curl:",
        f"  export {export}",
        f"  {clients['curl']}",
    ]
    return "\n".join(lines)


def _langchain(chain: Mapping[str, Any], vectors: bool) -> list[str]:
    where = f"base_url={json.dumps(chain['base_url'])}, model={json.dumps(chain['model'])}"
    if vectors:
        # It sends tokens of OpenAI's own otherwise, which no other server understands.
        return [f"  OpenAIEmbeddings({where}, check_embedding_ctx_length=False)"]
    return [
        f"  ChatOpenAI({where}, max_tokens={chain['max_tokens']})",
        f'  .batch(prompts, config={{"max_concurrency": {chain["max_concurrency"]}}})',
    ]


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(head) for head, _ in rows)
    return [f"  {head:<{width}}  {text}".rstrip() for head, text in rows]

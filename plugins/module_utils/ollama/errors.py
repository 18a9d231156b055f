# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What Ollama's own words mean, and what to do.

Wordings: ollama 0.24.0, server/images.go, download.go, auth.go; those of the registries behind it (ollama#14876, #8326,
#8045, #12826; huggingface/hub-docs#2702) and of Go's network library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..faults import Fault
from .catalogue import fault
from .client import ApiError, plain
from .names import HUGGING_FACE, Name

_WANT_GOT = re.compile(r"digest mismatch.*want sha256:([0-9a-f]{64}), got sha256:([0-9a-f]{64})")
#: What passes by itself: the next try goes on where this one broke off.
_PASSES = re.compile(
    r"max retries exceeded|timeout|timed out|deadline exceeded|EOF|connection reset|broken pipe|connection refused"
    r"|server misbehaving|temporary failure|no such host|network is unreachable|no route to host|unexpected status code"
    r"|stalled|\b(?:429|500|502|503|504):|too many requests|context canceled|proxyconnect"
    r"|Proxy Authentication Required",
    re.IGNORECASE,
)
_SERVICE_PROXY = "HTTPS_PROXY and NO_PROXY count in the unit of the service, not in a shell"


@dataclass(frozen=True)
class Trouble:
    """A fault, and whether another try may do better. ``wrong``: (SHA-256 wanted, SHA-256 got) of a blob."""

    fault: Fault
    passes: bool = False
    wrong: tuple[str, str] | None = None


def explain(error: ApiError, name: Name, base_url: str, version: str | None = None) -> Trouble:
    """What an error of a pull or of a creation means."""
    shown, text = name.shown, error.text
    low = text.lower()
    if error.kind != "said":
        return Trouble(not_answering(error, base_url), error.kind in ("broken", "silent", "refused"))
    wrong = _WANT_GOT.search(text)
    if wrong:
        message = f"the registry's bytes of blob sha256:{wrong[1]} have the SHA-256 {wrong[2]}"
        remedy = "A proxy or mirror in between changes them, or the registry is broken: try another way to it."
        return Trouble(fault("blob_from_source_wrong", shown, message, remedy), True, (wrong[1], wrong[2]))
    if "digest mismatch, expected" in low:
        remedy = "Let nothing write to it meanwhile, verify it (module model_download), and run again."
        return Trouble(fault("gguf_unproved", shown, f"the file changed while it was sent: {text}", remedy))
    if "no space left on device" in low or "disk quota exceeded" in low:
        remedy = "Make room on the file system of the store, and run again: Ollama goes on with what it has."
        return Trouble(fault("disk_full", shown, f"Ollama says: {text}", remedy))
    if "sharded gguf" in low:
        return Trouble(sharded(shown, f"the registry says: {text}"))
    if re.search(r"\b412\b", text) or "requires a newer version of ollama" in low:
        message = f"the registry asks for a newer Ollama than {version or 'this one'}: {text}"
        remedy = (
            "Name a model or tag that this release loads, let llama-server serve it, or pin a newer release: from 0.30 "
            "on with a driver of 570 or newer only, since Ollama otherwise computes on the CPU without saying so."
        )
        return Trouble(fault("ollama_too_old", shown, message, remedy))
    if "file does not exist" in low or re.search(r"\b404\b", text) or "specified tag is not" in low:
        return Trouble(_not_there(name, text))
    if re.search(r"unauthorized|\b40[13]\b|access denied|invalid username or password|unknown ollama key", low) or (
        'realm host "' in low or 'unsupported protocol scheme ""' in low
    ):
        return Trouble(_unauthorized(name, text))
    if "x509" in low or "tls: failed to verify" in low:
        remedy = (
            "Put the certificate of the authority into the system's store (update-ca-certificates) and restart the "
            "service, or for a registry of your own set insecure for this model, which speaks http to it."
        )
        return Trouble(fault("registry_not_trusted", shown, f"Ollama says: {text}", remedy))
    if "server gave http response to https client" in low or "insecure protocol http" in low:
        return Trouble(
            fault(
                "registry_not_trusted",
                shown,
                f"the registry speaks no TLS: {text}",
                "Set insecure for this model, if the registry is your own.",
            )
        )
    if "template error" in low:
        return Trouble(
            fault("bad_argument", shown, f"template: {text}", "Correct the template; its form is Ollama's own.")
        )
    if "permission denied" in low or "operation not permitted" in low or "read-only file system" in low:
        remedy = (
            "The service's user must own the folder of the models and what is in it, and reach it through every parent."
        )
        return Trouble(fault("ollama_error", shown, f"Ollama cannot write to its store: {text}", remedy))
    if _PASSES.search(text):
        what = "a proxy does not let it through" if "proxy" in low else "the registry could not be reached"
        remedy = (
            f"See from the machine whether {name.host} and the hosts it redirects to are reachable; {_SERVICE_PROXY}. "
            "Run again: what has come is used."
        )
        return Trouble(fault("source_unreachable", shown, f"{what}: {text}", remedy), True)
    return Trouble(fault("ollama_error", shown, f"Ollama says: {text}", "See journalctl -u ollama for what led to it."))


def not_answering(error: ApiError, base_url: str) -> Fault:
    """Nothing answers, or no Ollama."""
    base_url = plain(base_url)
    if error.kind == "said":
        message = f"answers {error.status}: {error.text}"
        return fault("ollama_error", base_url, message, "See journalctl -u ollama for what led to it.")
    remedy = "Look at systemctl status ollama and journalctl -u ollama; start the service or correct the address."
    if error.kind == "unexpected":
        remedy = "Correct the address, or stop what listens there."
    return fault("ollama_not_answering", base_url, error.text, remedy)


def sharded(subject: str, message: str) -> Fault:
    """A model in shards; what to do instead."""
    remedy = (
        "Join the shards (llama-gguf-split --merge FIRST-SHARD JOINED.gguf, which needs room for the model twice) and "
        "give the result as gguf of the model; or let llama-server serve them, which loads shards as they are."
    )
    return fault("ollama_sharded_model", subject, message, remedy)


def _not_there(name: Name, text: str) -> Fault:
    message = f"{name.host} has no {name.namespace}/{name.model} with the tag {name.tag} ({text})"
    if name.host.lower() in HUGGING_FACE:
        remedy = "The tag is a quantisation of a file in that repository, such as Q4_K_M: see its list of files."
    else:
        page = name.model if name.namespace == "library" else f"{name.namespace}/{name.model}"
        remedy = f"See https://ollama.com/{'library/' if name.namespace == 'library' else ''}{page}/tags for the tags."
    return fault("source_missing", name.shown, message, remedy)


def _unauthorized(name: Name, text: str) -> Fault:
    if name.host.lower() in HUGGING_FACE:
        remedy = (
            "Is the name right? Hugging Face answers so for what does not exist, too. For a private or gated "
            "repository add the service's public key (.ollama/id_ed25519.pub in its home) to your account there, or "
            "bring the file with module model_download and give it as gguf of the model."
        )
    else:
        remedy = (
            "Is the name right? For a private model add the service's public key (.ollama/id_ed25519.pub in its home) "
            "to your account at the registry."
        )
    return fault("source_unauthorized", name.shown, f"the registry refuses: {text}", remedy)

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Names of models, what Ollama's words mean, and what a model is made with."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.ollama.client import ApiError, plain
from ansible_collections.volta.llm.plugins.module_utils.ollama.errors import explain
from ansible_collections.volta.llm.plugins.module_utils.ollama.names import parse_name
from ansible_collections.volta.llm.plugins.module_utils.ollama.recipe import (
    Expected,
    compare,
    details_of,
    read_parameters,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.ollama_store import manifest_path

URL = "http://127.0.0.1:11434"


@pytest.mark.parametrize(
    ("given", "shown", "below"),
    [
        ("qwen3", "qwen3:latest", "registry.ollama.ai/library/qwen3/latest"),
        ("qwen3:8b", "qwen3:8b", "registry.ollama.ai/library/qwen3/8b"),
        ("team/qwen3:8b", "team/qwen3:8b", "registry.ollama.ai/team/qwen3/8b"),
        ("registry.ollama.ai/library/qwen3:8b", "qwen3:8b", "registry.ollama.ai/library/qwen3/8b"),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-8B-GGUF/Q4_K_M"),
        ("hf.co/Qwen/Qwen3-8B-GGUF", "hf.co/Qwen/Qwen3-8B-GGUF:latest", "hf.co/Qwen/Qwen3-8B-GGUF/latest"),
        ("localhost:5000/team/m", "localhost:5000/team/m:latest", "localhost:5000/team/m/latest"),
    ],
)
def test_a_name_and_the_place_of_its_manifest(given: str, shown: str, below: str) -> None:
    name = parse_name(given)
    assert name.shown == shown
    assert str(name.below) == f"manifests/{below}"
    # Model delivery reads the same store by the same names.
    assert manifest_path(given) == name.below


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("", "empty"),
        ("qwen3:8b:q4", "the name 'qwen3:8b'"),
        ("a/b/c/d", "4 parts"),
        ("hf.co//m", "the namespace is empty"),
        ("qwen3:", "the tag is empty"),
        ("te.am/m", "the namespace 'te.am'"),
        ("-qwen", "the name '-qwen'"),
        ("qwen 3", "the name 'qwen 3'"),
        ("q" * 81, "80 characters"),
        ("https://hf.co/o/m", "address"),
        ("m@sha256:" + "0" * 64, "digest"),
        ("gpt-oss:120b-cloud", "cloud"),
        ("gpt-oss:cloud", "cloud"),
        ("m:local", "no tag"),
        ("../etc/passwd", "the host '..'"),
    ],
)
def test_what_is_no_name_is_told_in_one_message(given: str, word: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_name(given)
    fault = caught.value.fault
    assert fault.code == "model_name_invalid"
    assert word in fault.message
    assert fault.remedy


@pytest.mark.parametrize(
    ("name", "said", "code", "passes"),
    [
        ("nosuch:7b", "pull model manifest: file does not exist", "source_missing", False),
        (
            "qwen3.5:35b",
            "pull model manifest: 412:  The model you are attempting to pull requires a newer version of Ollama. "
            "Please download the latest version at: https://ollama.com/download",
            "ollama_too_old",
            False,
        ),
        (
            "hf.co/unsloth/M-GGUF:Q8_0",
            'pull model manifest: 400: {"error":"The specified tag is a sharded GGUF. Ollama does not support this '
            'yet. Follow this issue for more info: https://github.com/ollama/ollama/issues/5245"}',
            "ollama_sharded_model",
            False,
        ),
        (
            "hf.co/unsloth/M-GGUF:Q9",
            'pull model manifest: 400: {"error":"The specified tag is not available in the repository. Please use '
            'another tag or \\"latest\\""}',
            "source_missing",
            False,
        ),
        (
            "hf.co/o/gated:Q4_K_M",
            'pull model manifest: 401: {"error":"Invalid username or password."}',
            "source_unauthorized",
            False,
        ),
        (
            "hf.co/o/gated",
            'pull model manifest: realm host "huggingface.co" does not match original host "hf.co"',
            "source_unauthorized",
            False,
        ),
        (
            "hf.co/o/private",
            'pull model manifest: Get (...): unsupported protocol scheme ""',
            "source_unauthorized",
            False,
        ),
        ("team/m", "unauthorized: access denied", "source_unauthorized", False),
        (
            "m",
            "write /var/lib/ollama/models/blobs/sha256-29fdb92e57cf-partial: no space left on device",
            "disk_full",
            False,
        ),
        (
            "m",
            "max retries exceeded: write /var/lib/ollama/models/blobs/sha256-29fd-partial: no space left on device",
            "disk_full",
            False,
        ),
        (
            "m",
            'pull model manifest: Get "https://registry.ollama.ai/v2/library/m/manifests/latest": tls: failed to '
            "verify certificate: x509: certificate signed by unknown authority",
            "registry_not_trusted",
            False,
        ),
        (
            "lab:5000/team/m",
            'pull model manifest: Get "https://lab:5000/v2/team/m/manifests/latest": http: server gave HTTP response '
            "to HTTPS client",
            "registry_not_trusted",
            False,
        ),
        (
            "m",
            'pull model manifest: Get "https://registry.ollama.ai/v2/": proxyconnect tcp: dial tcp 10.0.0.1:3128: '
            "connect: connection refused",
            "source_unreachable",
            True,
        ),
        ("m", "max retries exceeded: EOF", "source_unreachable", True),
        ("m", "max retries exceeded: unexpected EOF", "source_unreachable", True),
        (
            "m",
            'max retries exceeded: Get "https://dd20.r2.cloudflarestorage.com/x": net/http: TLS handshake timeout',
            "source_unreachable",
            True,
        ),
        (
            "m",
            'pull model manifest: Get "https://registry.ollama.ai/v2/": dial tcp: lookup registry.ollama.ai: no such '
            "host",
            "source_unreachable",
            True,
        ),
        (
            "m",
            'pull model manifest: 429: {"error":"We had to rate limit your IP."}',
            "source_unreachable",
            True,
        ),
        ("m", "pull model manifest: 503: upstream connect error", "source_unreachable", True),
        ("m", "open /srv/m/blobs/sha256-29fd-partial: permission denied", "ollama_error", False),
        ("m", "template error: template: :1: unclosed action", "bad_argument", False),
        ("m", "something new", "ollama_error", False),
    ],
)
def test_what_ollama_says_is_told_as_what_it_is(name: str, said: str, code: str, passes: bool) -> None:
    trouble = explain(ApiError("said", said, 200), parse_name(name), URL, "0.24.0")
    assert (trouble.fault.code, trouble.passes) == (code, passes)
    assert trouble.fault.remedy
    if code != "source_missing":
        assert said in trouble.fault.message


def test_a_tag_that_the_registry_lacks_is_named_with_its_parts() -> None:
    missing = ApiError("said", "pull model manifest: file does not exist", 200)
    fault = explain(missing, parse_name("qwen3:9b"), URL).fault
    assert "library/qwen3 with the tag 9b" in fault.message
    assert "https://ollama.com/library/qwen3/tags" in fault.remedy
    fault = explain(missing, parse_name("hf.co/Qwen/Qwen3-8B-GGUF:Q9"), URL).fault
    assert "hf.co has no Qwen/Qwen3-8B-GGUF with the tag Q9" in fault.message
    assert "quantisation" in fault.remedy


def test_a_digest_mismatch_tells_both_hashes() -> None:
    want, got = "a" * 64, "b" * 64
    said = f"digest mismatch, file must be downloaded again: want sha256:{want}, got sha256:{got}"
    assert explain(ApiError("said", said, 200), parse_name("m"), URL).wrong == (want, got)


@pytest.mark.parametrize(
    ("kind", "passes"), [("refused", True), ("broken", True), ("silent", True), ("unexpected", False)]
)
def test_a_server_that_does_not_answer_is_a_fault_of_the_server(kind: str, passes: bool) -> None:
    trouble = explain(ApiError(kind, "connection refused"), parse_name("m"), URL)
    assert (trouble.fault.code, trouble.fault.subject, trouble.passes) == ("ollama_not_answering", URL, passes)


def test_no_signature_or_login_gets_into_a_message_and_the_cause_stays() -> None:
    text = plain(
        'max retries exceeded: Get "https://u:pass@r2.example/blobs/data?X-Amz-Signature=secret&x=1": dial tcp: lookup '
        "r2.example: no such host"
    )
    assert "secret" not in text
    assert "pass" not in text
    assert text.endswith("dial tcp: lookup r2.example: no such host")


def test_parameters_get_the_types_that_ollama_wants() -> None:
    given = {"num_ctx": "16384", "temperature": "0.7", "use_mmap": "no", "stop": "</s>", "seed": 1, "top_p": 1}
    parameters, faults = read_parameters(given, "m:latest")
    assert faults == []
    assert parameters == {
        "num_ctx": 16384,
        "temperature": 0.7,
        "use_mmap": False,
        "stop": ["</s>"],
        "seed": 1,
        "top_p": 1.0,
    }
    assert [type(value) for value in parameters.values()] == [int, float, bool, list, int, float]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"num_context": 1}, "num_ctx"),
        ({"num_ctx": "many"}, "an integer"),
        ({"num_ctx": 1.5}, "an integer"),
        ({"num_ctx": True}, "an integer"),
        ({"temperature": None}, "a number"),
        ({"use_mmap": "perhaps"}, "true or false"),
        ({"stop": [1]}, "a list of texts"),
        ({"penalize_newline": True}, "num_ctx"),
    ],
)
def test_a_parameter_that_ollama_would_only_log_is_refused(given: dict[str, Any], word: str) -> None:
    _, faults = read_parameters(given, "m:latest")
    assert [fault.code for fault in faults] == ["model_parameter_invalid"]
    assert word in faults[0].remedy


SHOWN = {
    "details": {"family": "qwen3", "parameter_size": "8.2B", "quantization_level": "Q4_K_M"},
    "model_info": {
        "general.architecture": "qwen3",
        "general.parameter_count": 8190735360,
        "qwen3.context_length": 40960,
    },
}


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        (Expected(), []),
        (Expected("qwen3", "8B", "Q4_K_M", 40960, 100), []),
        (Expected("QWEN3", "8.2B", "q4_k_m", 4096), []),
        (Expected(parameter_size="8.19B"), []),
        (Expected(parameter_size="9B"), []),
        (Expected(parameter_size="8.4B"), ["parameter_size"]),
        (Expected(parameter_size="14B"), ["parameter_size"]),
        (Expected(parameter_size="8M"), ["parameter_size"]),
        (Expected(architecture="llama"), ["architecture"]),
        (Expected(quantization="Q8_0"), ["quantization"]),
        (Expected(context=65536), ["context"]),
        (Expected(size=99), ["size"]),
        (Expected("llama", None, "Q8_0"), ["architecture", "quantization"]),
    ],
)
def test_what_is_shown_against_what_was_asked_for(expected: Expected, wrong: list[str]) -> None:
    faults = compare("qwen3:8b", expected, details_of(SHOWN), 100)
    assert [fault.message.split()[0] for fault in faults] == wrong
    assert {fault.code for fault in faults} <= {"model_differs"}


def test_what_is_not_told_is_no_match() -> None:
    assert details_of({}) == dict.fromkeys(details_of(SHOWN))
    faults = compare("m", Expected("qwen3", "8B", "Q4_K_M", 1), details_of({}), None)
    assert len(faults) == 4
    assert all("not told" in fault.message for fault in faults)

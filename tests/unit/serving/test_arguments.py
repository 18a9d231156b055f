# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the operator's words to the command line. Rows E.. are public reports of such servers, named by thread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.addresses import is_loopback
from ansible_collections.volta.llm.plugins.module_utils.engine.capabilities import parse_help
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import (
    MANAGED,
    Plan,
    Settings,
    Surroundings,
    plan,
    reachable_host,
)
from hypothesis import given
from hypothesis import strategies as st

#: Options of llama-server 0.5.0-dev (commit 0c1e57098, CPU build), from its --help.
HELP = (Path(__file__).parents[1] / "fixtures/engine/llama-server-0.5.0-dev-help.txt").read_text(encoding="utf-8")
FLAGS = frozenset(parse_help(HELP).flags)
KEY = "0123456789abcdef-key"
MODEL = "/srv/models/qwen/Qwen-UD-Q4_K_XL-00001-of-00004.gguf"
BUS_IDS = ("0000:1a:00.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0")
V100X4 = Surroundings(
    flags=FLAGS,
    engine_version="0.5.0-dev",
    architecture="qwen4exp",
    model_context=262144,
    gpu_bus_ids=BUS_IDS,
    gpu="1db5",
)


def made(around: Surroundings = V100X4, **settings: Any) -> Plan:
    return plan(Settings(**{"model": MODEL, **settings}), around)


def codes(found: Plan) -> list[str]:
    return [fault.code for fault in found.faults]


def option(found: Plan, name: str) -> str | None:
    return found.argv[found.argv.index(name) + 1] if name in found.argv else None


def test_the_flags_of_the_fixture_are_those_of_the_engine() -> None:
    assert len(FLAGS) > 250
    assert {"--model", "-np", "--no-ui", "--no-webui", "--no-slots", "--metrics", "--fit", "--load-mode"} <= FLAGS


def test_defaults_on_four_cards() -> None:
    found = made()
    assert found.faults == ()
    assert found.argv == (
        "/opt/llama.cpp/current/bin/llama-server",
        *("--model", MODEL, "--alias", "Qwen-UD-Q4_K_XL", "--host", "127.0.0.1", "--port", "8080"),
        *("--ctx-size", "8192", "--parallel", "1"),
        *("--n-gpu-layers", "999", "--split-mode", "layer", "--fit", "off", "--no-ui", "--no-slots", "--metrics"),
        "--no-cache-idle-slots",
    )
    assert found.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert (found.gpu_count, found.base_url) == (4, "http://127.0.0.1:8080/v1")


def test_a_cpu_server_gets_no_gpu_options() -> None:
    found = made(backend="cpu")
    assert found.faults == ()
    assert not {"--n-gpu-layers", "--split-mode", "--tensor-split", "--fit"} & set(found.argv)
    assert (found.environment, found.split_mode, found.gpu_count) == ({}, None, None)


# --- context per request (E02 ggml-org/llama.cpp#11681, #17767, E04 janhq/jan#8534) ----------------------------------


@pytest.mark.parametrize(
    ("per_request", "parallel", "total"),
    [(8192, 1, 8192), (8192, 4, 32768), (4096, 2, 8192), (1000, 3, 3072), (512, 1, 512), (65536, 2, 131072)],
)
def test_the_total_is_computed_from_what_a_request_gets(per_request: int, parallel: int, total: int) -> None:
    found = made(context_per_request=per_request, parallel=parallel)
    assert (option(found, "--ctx-size"), option(found, "--parallel")) == (str(total), str(parallel))
    assert found.total_context == total


@given(st.integers(512, 262144), st.integers(1, 256))
def test_no_request_gets_less_than_was_asked_for(per_request: int, parallel: int) -> None:
    found = made(context_per_request=per_request, parallel=parallel)
    # The engine divides by the number of slots and pads each share to 256.
    share = found.total_context // parallel
    assert share == found.context
    assert per_request <= share < per_request + 256
    assert share % 256 == 0


def test_the_number_of_requests_is_always_explicit() -> None:
    """Without -np the engine shares one context among four requests."""
    assert "--parallel" in made().argv


@pytest.mark.parametrize(
    ("per_request", "code"), [(511, "setting_invalid"), (0, "setting_invalid"), (262145, "context_too_large")]
)
def test_context_out_of_range(per_request: int, code: str) -> None:
    assert codes(made(context_per_request=per_request)) == [code]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "32768"], 131072),
        (["--rope-scaling", "yarn", "--rope-scale", "2.5"], 81920),
        (["--rope_scaling", "yarn", "--rope-freq-scale", "0.25"], 131072),
        # The engine moves its limit for YaRN alone.
        (["--rope-scaling", "linear", "--rope-scale", "4"], 32768),
        (["--rope-scale", "4"], 32768),
        (["--rope-scaling", "yarn", "--rope-scale", "many"], 32768),
        (["--rope-scaling", "yarn", "--rope-scale"], 32768),
    ],
)
def test_a_model_that_is_stretched(words: list[str], most: int) -> None:
    around = replace(V100X4, model_context=32768)
    assert codes(made(around, context_per_request=most, extra_args=words)) == []
    (fault,) = made(around, context_per_request=most + 1, extra_args=words).faults
    assert (fault.code, f"Write {most} or less." in fault.remedy) == ("context_too_large", True)


def test_an_unknown_model_context_limits_nothing() -> None:
    assert codes(made(replace(V100X4, model_context=None), context_per_request=262145)) == []


# --- splitting over GPUs (E10, FACTS: --tensor-split 1:1) ------------------------------------------------------------


@pytest.mark.parametrize("given", ["1:1:1:1", "1,1,1,1", "1/1/1/1", "1 1 1 1", "1:1"])
def test_text_is_no_tensor_split(given: str) -> None:
    (fault,) = made(tensor_split=given).faults
    assert fault.code == "tensor_split_invalid"
    assert ("first card" in fault.message) is (":" in given)
    assert fault.remedy == ("Write [1, 1]." if given == "1:1" else "Write [1, 1, 1, 1].")


@pytest.mark.parametrize("given", [["1:1:1:1"], ["a"], [1, -1, 1, 1], [0, 0, 0, 0], [True, 1, 1, 1], {"a": 1}, 4])
def test_what_is_no_list_of_numbers(given: Any) -> None:
    assert codes(made(tensor_split=given)) == ["tensor_split_invalid"]


@pytest.mark.parametrize(
    ("given", "words"),
    [([1, 1, 1, 1], "1,1,1,1"), ([0.5, 1, 1, 1.25], "0.5,1,1,1.25"), (["1", "2", "1", "1"], "1,2,1,1")],
)
def test_a_list_of_numbers(given: list[Any], words: str) -> None:
    found = made(tensor_split=given)
    assert found.faults == ()
    assert option(found, "--tensor-split") == words


@given(st.lists(st.floats(0.01, 1000), min_size=4, max_size=4))
def test_numbers_reach_the_engine_separated_by_commas(given: list[float]) -> None:
    words = option(made(tensor_split=given), "--tensor-split") or ""
    assert words.count(",") == 3
    assert [float(word) for word in words.split(",")] == pytest.approx(given, rel=1e-4)


@pytest.mark.parametrize("empty", [[], (), None, ""])
def test_no_tensor_split_is_an_even_one(empty: Any) -> None:
    found = made(tensor_split=empty)
    assert (found.faults, option(found, "--tensor-split")) == ((), None)


def test_a_split_over_one_card() -> None:
    (fault,) = made(split_mode="none", tensor_split=[1, 1, 1, 1]).faults
    assert (fault.code, "one GPU" in fault.message) == ("tensor_split_invalid", True)


def test_as_many_numbers_as_gpus() -> None:
    assert codes(made(tensor_split=[1, 1])) == ["tensor_split_invalid"]
    assert codes(made(tensor_split=[1, 1], gpus=["0", "1"])) == []
    assert codes(made(replace(V100X4, gpu_bus_ids=()), tensor_split=[1, 1])) == []


@pytest.mark.parametrize("mode", ["row", "tensor"])
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_split_modes_that_cannot_work_are_refused_with_the_reason(mode: str, backend: str) -> None:
    found = made(split_mode=mode, backend=backend)
    assert codes(found) == ["split_mode_unavailable"]
    assert "layer" in found.faults[0].remedy


def test_tensor_split_mode_where_the_architecture_can() -> None:
    around = replace(V100X4, architecture="qwen3moe")
    found = made(around, split_mode="tensor")
    assert (found.faults, option(found, "--split-mode")) == ((), "tensor")
    assert codes(made(around, split_mode="tensor", gpus=["0"])) == ["split_mode_unavailable"]


@pytest.mark.parametrize("mode", ["", "Layer", "ROW", "auto "])
def test_unknown_split_modes(mode: str) -> None:
    assert codes(made(split_mode=mode)) == ["setting_invalid"]


# --- which GPUs (E14 LostRuins/koboldcpp#1023, E16 1CatAI/1Cat-vLLM#23) ----------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [
        (["0", "2"], "0,2"),
        (["0000:1d:00.0"], "2"),
        (["00000000:1D:00.0", "1a:00.0"], "2,0"),
        (["GPU-6d8f1c2e-1111-2222-3333-444455556666"], "GPU-6d8f1c2e-1111-2222-3333-444455556666"),
    ],
)
def test_gpus_by_index_bus_id_and_uuid(gpus: list[str], visible: str) -> None:
    found = made(gpus=gpus)
    assert found.faults == ()
    assert found.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    assert found.gpu_count == len(gpus)


@pytest.mark.parametrize("gpu", ["4", "0000:99:00.0", "cuda:0", "", "-1"])
def test_gpus_that_are_not_there(gpu: str) -> None:
    (fault,) = made(gpus=[gpu]).faults
    assert fault.code == "gpu_unknown"
    assert BUS_IDS[0] in fault.remedy


def test_a_gpu_named_twice() -> None:
    assert codes(made(gpus=["0", "1a:00.0"])) == ["setting_invalid"]


def test_gpus_for_a_cpu_server() -> None:
    assert codes(made(backend="cpu", gpus=["0"])) == ["setting_invalid"]


# --- cache and attention ---------------------------------------------------------------------------------------------


def test_quantised_values_need_flash_attention() -> None:
    found = made(cache_type_v="q8_0", flash_attention="off")
    assert [(fault.code, fault.subject) for fault in found.faults] == [("cache_type_unavailable", "cache_type_v")]
    assert made(cache_type_k="q8_0", flash_attention="off").faults == ()
    found = made(cache_type_k="q8_0", cache_type_v="q8_0")
    assert (option(found, "--cache-type-k"), option(found, "--cache-type-v")) == ("q8_0", "q8_0")


@pytest.mark.parametrize("setting", ["cache_type_k", "cache_type_v"])
def test_bf16_on_volta_is_refused(setting: str) -> None:
    (fault,) = made(**{setting: "bf16"}).faults
    assert (fault.code, fault.subject) == ("cache_type_unavailable", setting)
    assert f"{setting}=f16" in fault.remedy
    # On other cards it is as good as f16.
    assert made(replace(V100X4, gpu="2335"), **{setting: "bf16"}).faults == ()


def test_optional_numbers() -> None:
    found = made(threads=8, ubatch=256, flash_attention="on")
    assert [option(found, name) for name in ("--threads", "--ubatch-size", "--flash-attn")] == ["8", "256", "on"]
    assert codes(made(threads=0, ubatch=1)) == ["setting_invalid", "setting_invalid"]


def test_a_large_micro_batch_has_its_batch() -> None:
    """The engine takes the smaller of both, and the batch is 2048 where nothing is said."""
    assert option(made(ubatch=2048), "--batch-size") is None
    found = made(ubatch=4096)
    assert (found.faults, option(found, "--ubatch-size"), option(found, "--batch-size")) == ((), "4096", "4096")
    (fault,) = made(ubatch=1024, extra_args=["-b", "512"]).faults
    assert (fault.code, fault.subject) == ("setting_invalid", "ubatch")
    assert codes(made(ubatch=1024, extra_args=["-b", "4096"])) == []


# --- address and keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "2001:db8::1"])
def test_an_open_address_needs_a_key(host: str) -> None:
    assert codes(made(host=host)) == ["open_without_key"]
    assert codes(made(host=host, api_keys=[KEY], api_key_file="/etc/k")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert codes(made(host=host)) == []


@pytest.mark.parametrize("host", ["", " ", "server.example", "0.0.0.0,::", "/run/llama.sock", "[::1]", "10.0.0.256"])
def test_what_is_no_address(host: str) -> None:
    """E20 StartupHakk/OpenMonoAgent.ai#23: a bad argument restarted thousands of times."""
    assert codes(made(host=host)) == ["setting_invalid"]


def test_keys_never_reach_the_command_line() -> None:
    found = made(api_keys=[KEY], api_key_file="/etc/llama-server/api-keys")
    assert option(found, "--api-key-file") == "/etc/llama-server/api-keys"
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    "key", ["", "short", "has space in it 1234", "#0123456789abcdef", "schlüssel-0123456789", "a\nb" * 9]
)
def test_unusable_keys_are_refused_and_not_shown(key: str) -> None:
    (fault,) = made(api_keys=[KEY, key]).faults
    assert (fault.code, fault.subject) == ("api_key_unusable", "api_keys[1]")
    assert not key or key not in f"{fault.message} {fault.remedy}"


@pytest.mark.parametrize("port", [0, 80, 1023, 65536, -1])
def test_ports(port: int) -> None:
    (fault,) = made(port=port).faults
    assert fault.code == "setting_invalid"
    assert ("only root may listen" in fault.message) is (port < 1024)


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.5", "10.0.0.5"), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_where_a_client_on_the_machine_reaches_it(host: str, reached: str) -> None:
    assert reachable_host(host) == reached
    assert is_loopback(host) is (host in ("::1", "localhost"))


# --- more arguments, environment, other engines ----------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "flag"), [(setting, flags[0]) for setting, flags in MANAGED.items()])
def test_what_has_a_setting_is_refused_among_more_arguments(setting: str, flag: str) -> None:
    (fault,) = made(extra_args=[flag, "1"]).faults
    assert fault.code == "argument_managed"
    assert setting in fault.remedy


def test_all_managed_options_exist() -> None:
    """A typing error in the table would let an option slip through."""
    assert {flag for flags in MANAGED.values() for flag in flags} <= FLAGS


def test_more_arguments_come_last() -> None:
    found = made(extra_args=["--cache-reuse", "256", "--seed", "-1"])
    assert found.faults == ()
    assert found.argv[-4:] == ("--cache-reuse", "256", "--seed", "-1")


def test_options_of_another_release_are_named() -> None:
    (fault,) = made(extra_args=["--no-mmap"]).faults
    assert (fault.code, fault.subject) == ("argument_unknown", "--no-mmap")
    assert "--load-mode" in fault.remedy
    (fault,) = made(extra_args=["--cache-reus=256"]).faults
    assert "--cache-reuse" in fault.remedy


@pytest.mark.parametrize("word", ["", "a\nb", "\x00"])
def test_words_that_no_unit_can_carry(word: str) -> None:
    assert codes(made(extra_args=[word])) == ["setting_invalid"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("LLAMA_API_KEY", "argument_managed"),
        ("CUDA_VISIBLE_DEVICES", "argument_managed"),
        ("BAD NAME", "setting_invalid"),
        ("GGML_CUDA_P2P", None),
    ],
)
def test_environment(name: str, code: str | None) -> None:
    found = made(environment={name: "1"})
    assert codes(found) == ([code] if code else [])


def test_an_older_engine_gets_the_names_it_knows() -> None:
    old = (FLAGS - {"--no-ui", "--no-slots", "--fit", "--no-cache-idle-slots"}) | {"--no-webui"}
    found = made(replace(V100X4, flags=frozenset(old)))
    assert found.faults == ()
    assert "--no-webui" in found.argv
    assert not {"--no-ui", "--no-slots", "--fit", "--no-cache-idle-slots"} & set(found.argv)


def test_idle_slots_are_not_copied_at_each_request_unless_the_operator_wants_it() -> None:
    assert "--no-cache-idle-slots" in made(parallel=8).argv
    found = made(extra_args=["--cache-idle-slots"])
    assert found.faults == ()
    # The engine takes the last of two.
    assert found.argv.index("--cache-idle-slots") > found.argv.index("--no-cache-idle-slots")


def test_an_engine_without_a_needed_option_is_a_fault() -> None:
    found = made(replace(V100X4, flags=FLAGS - {"--api-key-file"}), api_keys=[KEY], api_key_file="/k")
    assert [(fault.code, fault.subject) for fault in found.faults] == [("argument_unknown", "--api-key-file")]


def test_all_findings_come_at_once() -> None:
    found = made(host="0.0.0.0", port=80, tensor_split="1:1", split_mode="row", api_keys=["x"], extra_args=["-c", "1"])
    assert set(codes(found)) == {
        "setting_invalid",
        "tensor_split_invalid",
        "split_mode_unavailable",
        "api_key_unusable",
        "argument_managed",
    }


@pytest.mark.parametrize("model", ["", "relative.gguf", "/m/x.gguf.a"])
def test_model_paths(model: str) -> None:
    assert "setting_invalid" in codes(made(model=model, alias="x"))


@pytest.mark.parametrize("alias", ["a,b", "a\n", " a"])
def test_aliases(alias: str) -> None:
    assert codes(made(alias=alias)) == ["setting_invalid"]


def test_what_to_write_instead_of_a_cache_type_is_written_for_the_one_concerned() -> None:
    (fault,) = made(cache_type_v="q8_0", flash_attention="off").faults
    assert (fault.code, fault.subject) == ("cache_type_unavailable", "cache_type_v")
    assert fault.remedy == "Write flash_attention=on or cache_type_v=f16."


def test_gpus_by_uuid_are_looked_up() -> None:
    """E14: UUIDs are the names that no order changes; a mistyped one must not leave the server on the CPU."""
    uuids = {bus: f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000" for number, bus in enumerate(BUS_IDS)}
    around = replace(V100X4, gpu_uuids=uuids)
    found = made(around, gpus=[uuids["0000:1e:00.0"], "0"])
    # All of one kind: what CUDA makes of a list of both is written nowhere.
    assert found.environment["CUDA_VISIBLE_DEVICES"] == f"{uuids['0000:1e:00.0']},{uuids['0000:1a:00.0']}"
    assert found.gpus == ("0000:1e:00.0", "0000:1a:00.0")
    assert made(around, gpus=["1", "0000:1a:00.0"]).environment["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert codes(made(around, gpus=["GPU-99999999-aaaa-bbbb-cccc-000000000000"])) == ["gpu_unknown"]
    # One card by two of its names.
    assert codes(made(around, gpus=["0", uuids["0000:1a:00.0"]])) == ["setting_invalid"]
    # A part of a card has a UUID that no card has; and without a driver nothing is known of any.
    assert codes(made(around, gpus=["MIG-99999999-aaaa-bbbb-cccc-000000000000"])) == []
    assert codes(made(gpus=["GPU-99999999-aaaa-bbbb-cccc-000000000000"])) == []


def test_the_beginning_of_a_uuid() -> None:
    """CUDA takes it where it is that of one card only."""
    uuids = {bus: f"GPU-1b9bf9b{number // 2}-{number}aaa-bbbb" for number, bus in enumerate(BUS_IDS[:3])}
    around = replace(V100X4, gpu_bus_ids=BUS_IDS[:3], gpu_uuids=uuids)
    found = made(around, gpus=["GPU-1B9bf9b1"])
    assert (found.faults, found.gpus) == ((), ("0000:1d:00.0",))
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1b9bf9b1-2aaa-bbbb"
    (fault,) = made(around, gpus=["GPU-1b9bf9b0"]).faults
    assert (fault.code, "write it in full" in fault.message) == ("gpu_unknown", True)


def test_the_order_of_the_bus_is_always_asked_for() -> None:
    """E14 LostRuins/koboldcpp#1023: without it CUDA counts the fastest card first."""
    assert made().environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made(gpus=["1"]).environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--slots"], "other users' prompts"),
        (["--ui"], "web interface"),
        (["--tools", "all"], "read files"),
        (["--props"], "for all"),
        (["--log-prompts-dir", "/tmp"], "prompts to the disk"),
        (["-v"], "prompts to the journal"),
        (["--verbose"], "prompts to the journal"),
        (["-lv", "5"], "prompts to the journal"),
        (["--verbosity", "99"], "prompts to the journal"),
        (["--log-verbosity"], "prompts to the journal"),
        (["--path", "/srv"], "files of the machine"),
        (["--api-prefix", "/x"], "/health"),
        (["--hf-token", "x"], "anyone on the machine"),
        # An underscore is a dash to the engine.
        (["--hf_token", "x"], "anyone on the machine"),
        (["--gpt-oss-20b-default"], "a model of its own"),
        (["--embd-gemma-default"], "a model of its own"),
        (["--vision-gemma-4b-default"], "a model of its own"),
        (["--fim-qwen-1.5b-default"], "a model of its own"),
        (["--version"], "prints something and ends"),
        (["-h"], "prints something and ends"),
        (["--usage"], "prints something and ends"),
        (["--list-devices"], "prints something and ends"),
        (["--cache-list"], "prints something and ends"),
        (["--completion-bash"], "prints something and ends"),
        (["--license"], "prints something and ends"),
        (["--embeddings"], "answers no chat"),
        (["--reranking"], "answers no chat"),
    ],
)
def test_what_shows_prompts_stays_off(words: list[str], why: str) -> None:
    (fault,) = made(extra_args=words).faults
    assert (fault.code, fault.subject) == ("argument_managed", "extra_args")
    assert why in fault.message
    assert {"--no-slots", "--no-ui", "--metrics"} <= set(made().argv)


def test_what_is_no_preset_of_a_model_is_left_alone() -> None:
    assert codes(made(extra_args=["--spec-default"])) == []


def test_every_preset_of_a_model_is_refused() -> None:
    presets = {flag for flag in FLAGS if flag.endswith("-default")} - {"--spec-default"}
    assert len(presets) >= 8
    assert [codes(made(extra_args=[flag])) for flag in sorted(presets)] == [["argument_managed"]] * len(presets)


def test_an_underscore_is_a_dash_to_the_engine() -> None:
    (fault,) = made(extra_args=["--ctx_size", "4096"]).faults
    assert (fault.code, "--ctx-size" in fault.message) == ("argument_managed", True)
    assert codes(made(extra_args=["--cache_reuse", "256"])) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model", "/srv/x.gguf\nExecStartPre=+/bin/evil"),
        ("binary", "/opt/x\n/llama-server"),
        ("api_key_file", "/etc/k\n"),
        ("alias", "a\nb"),
        ("unit", "x\n"),
        ("tls", {"certificate": "/srv/x\nExecStartPre=+/bin/evil", "key": "/k"}),
        ("environment", {"A": "1\nExecStartPre=+/bin/evil"}),
        ("extra_args", ["--slot-save-path", "/srv/x\nExecStartPre=+/bin/evil"]),
        ("extra_args", ["--slot-save-path", "/srv/x\x85"]),
    ],
)
def test_nothing_begins_another_line_of_the_unit(setting: str, value: Any) -> None:
    found = made(**{setting: value})
    (fault,) = found.faults
    assert (fault.code, fault.subject.partition("[")[0]) == ("setting_invalid", setting)
    assert "control character" in fault.message
    assert not [word for word in [*found.argv, *found.environment.values()] if "\n" in word or "\x85" in word]


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key=SECRET-0123456789\n"],
        ["--api-key=SECRET-0123456789"],
        ["--api-key SECRET-0123456789"],
        ["--api_key", "SECRET-0123456789\n"],
        ["--jinja", "--hf-token", "SECRET-0123456789"],
    ],
)
def test_a_secret_among_more_arguments_is_not_shown(words: list[str]) -> None:
    found = made(extra_args=words)
    assert "argument_managed" in codes(found)
    assert "SECRET" not in repr(found)
    assert "SECRET" not in repr(made(environment={"LLAMA_API_KEY": "SECRET-0123456789"}))


def test_option_and_value_in_one_word() -> None:
    (fault,) = made(extra_args=["--cache-reuse 256"]).faults
    assert (fault.code, fault.remedy) == ("setting_invalid", "Write option and value as two elements.")


@pytest.mark.parametrize("level", ["0", "3", "4"])
def test_a_log_without_prompts_may_be_longer(level: str) -> None:
    """llama.cpp 0.5.0, tools/server/server-context.cpp: each token of a prompt is a line of level 5."""
    around = replace(V100X4, flags=FLAGS | {"-lv"})
    assert codes(made(around, extra_args=["-lv", level])) == []


def test_no_option_slips_in_by_the_environment() -> None:
    (fault,) = made(environment={"LLAMA_ARG_ENDPOINT_SLOTS": "1"}).faults
    assert (fault.code, fault.subject) == ("argument_managed", "environment")


def test_tls_and_the_time_a_connection_may_be_idle() -> None:
    found = made(tls={"certificate": "/a.pem", "key": "/a.key"}, timeout=900, unit="llama-server@b")
    assert found.faults == ()
    assert option(found, "--ssl-key-file") == "/run/llama-server@b/tls-key"
    assert option(found, "--ssl-cert-file") == "/run/llama-server@b/tls-certificate"
    assert option(found, "--timeout") == "900"
    assert found.base_url == "https://127.0.0.1:8080/v1"
    assert "--timeout" not in made().argv
    assert codes(made(timeout=0)) == ["setting_invalid"]
    flags = FLAGS - {"--ssl-key-file", "--ssl-cert-file"}
    found = made(replace(V100X4, flags=flags), tls={"certificate": "/a.pem", "key": "/a.key"})
    assert codes(found) == ["argument_unknown", "argument_unknown"]


@pytest.mark.parametrize("unified", ["-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"])
def test_one_cache_for_all_requests_is_no_setting(unified: str) -> None:
    """E04 janhq/jan#8534: with it a request's share depends on what others ask; without, on numbers alone."""
    assert codes(made(extra_args=[unified])) == ["argument_managed"]

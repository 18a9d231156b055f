# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One verdict over settings, combination and memory; where headers and GPUs come from, and what is not known."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils import feasibility
from ansible_collections.volta.llm.plugins.module_utils.feasibility import Request, Verdict, consider
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
HEADERS = FIXTURES / "gguf"
REFERENCE = "qwen3.8-flash-next-ud-q4_k_xl"
FOUR = "4 x V100-SXM2-32GB"
V100_SXM2_32 = "0x1db5"


def server(**settings: Any) -> Settings:
    return Settings(**{"model": "/srv/models/m/m.gguf", **settings})


def ask(machine: Machine | None = None, **request: Any) -> Verdict:
    given = {"server": server(), "gpus": FOUR, "driver": "535", "engine": "0.5.0-dev", "read_machine": False}
    return consider(Request(**{**given, **request}), machine or Machine("/nonexistent"), timeout=5.0)


def codes(verdict: Verdict) -> list[str]:
    return [fault.code for fault in verdict.faults]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A machine with four V100 on its bus, a network card, and no driver: no program answers."""
    for number, (vendor, device, kind) in enumerate(
        [("0x10de", V100_SXM2_32, "0x030200")] * 4 + [("0x8086", "0x1572", "0x020000")]
    ):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{number + 0x1A:02x}:00.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "commands").mkdir()
    return tmp_path


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server over a folder: its address and the folder."""
    folder = tmp_path / "www"
    folder.mkdir()

    class Ranges(SimpleHTTPRequestHandler):
        """Answers ranges, as servers of models do and Python's own does not."""

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", f"bytes=0-{len(content) - 1}"))
            assert wanted
            part = content[int(wanted[1]) : int(wanted[2]) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            return None

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", folder
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_the_reference_model_fits_the_reference_machine() -> None:
    verdict = ask(model=REFERENCE, server=server(context_per_request=32768, parallel=4))

    assert codes(verdict) == []
    assert verdict.answer is not None
    assert verdict.answer.plan.fits
    assert len(verdict.gpus) == 4
    assert sum(line.endswith("fits") for line in verdict.lines) == 4


def test_every_part_reports_its_faults_at_once() -> None:
    verdict = ask(
        model=REFERENCE,
        driver="590",
        cuda="13.0",
        server=server(
            host="0.0.0.0",
            tensor_split="1:1:1:1",
            split_mode="tensor",
            parallel=64,
            context_per_request=262144,
            api_keys=(),
            flash_attention="sometimes",
        ),
    )

    assert {
        "driver_without_gpu",
        "split_mode_unavailable",
        "open_without_key",
        "tensor_split_invalid",
        "setting_invalid",
        "plan_does_not_fit",
    } <= set(codes(verdict))
    assert any("cuda" in fault.subject for fault in verdict.faults)


def test_one_reason_is_told_once_although_the_servers_check_asks_the_same_table() -> None:
    verdict = ask(model=REFERENCE, server=server(split_mode="tensor"))

    assert codes(verdict).count("split_mode_unavailable") == 1


def test_gpus_of_two_kinds_are_each_judged() -> None:
    verdict = ask(model="qwen3-0.6b-q8_0", gpus="H200, V100-SXM2-32GB", driver="590")

    assert [fault.subject for fault in verdict.faults if fault.code == "driver_without_gpu"] == [
        "gpu=Tesla V100-SXM2-32GB driver=590"
    ]


def test_a_server_on_the_cpu_is_not_refused_for_gpu_memory() -> None:
    verdict = ask(model=REFERENCE, gpus="1 x V100-SXM2-16GB", server=server(backend="cpu"))

    assert codes(verdict) == []
    assert verdict.answer is not None
    assert not verdict.answer.plan.fits
    assert any("decides nothing" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [({"parallel": 0}, "parallel"), ({"cache_type_k": "f12"}, "cache_type_k"), ({"backend": "rocm"}, "backend")],
)
def test_memory_is_not_planned_with_a_value_that_means_nothing(wrong: dict[str, Any], subject: str) -> None:
    verdict = ask(model=REFERENCE, server=server(**wrong))

    assert ("setting_invalid", subject) in [(fault.code, fault.subject) for fault in verdict.faults]
    assert verdict.answer is None
    assert verdict.lines[0] == f"memory is not planned: wrong settings: {subject}"


def test_more_context_than_the_model_was_made_for_is_refused() -> None:
    assert "context_too_large" in codes(ask(model=REFERENCE, server=server(context_per_request=400_000)))


def test_only_the_gpus_in_use_are_planned_for() -> None:
    two = ask(model="qwen3-8b-q4_k_m", server=server(gpus=["0", "3"]))
    by_bus = ask(model="qwen3-8b-q4_k_m", server=server(gpus=["1a:00.0", "1b:00.0", "1c:00.0"]))

    assert (len(two.gpus), len(by_bus.gpus)) == (2, 3)
    assert two.answer is not None
    assert len(two.answer.plan.per_gpu) == 2


def test_without_a_machine_gpus_must_be_named() -> None:
    assert codes(ask(model=REFERENCE, gpus="")) == ["plan_no_gpus"]
    assert codes(ask(model=REFERENCE, gpus="4 x Voodoo 2")) == ["plan_no_gpus"]


def test_gpus_are_known_by_their_pci_ids_before_there_is_a_driver(bare: Path) -> None:
    verdict = ask(Machine(str(bare)), model=REFERENCE, gpus="", read_machine=True)

    assert codes(verdict) == []
    assert [(gpu.product, gpu.memory_mib) for gpu in verdict.gpus] == [("Tesla V100-SXM2-32GB", 32768.0)] * 4
    assert any("PCI ids" in note for note in verdict.notes)


def test_a_gpu_that_the_table_lacks_is_named_and_not_guessed(bare: Path) -> None:
    (bare / "sys/bus/pci/devices/0000:1b:00.0/device").write_text("0x0001\n")

    verdict = ask(Machine(str(bare)), model=REFERENCE, gpus="", read_machine=True)

    assert (codes(verdict), verdict.gpus, verdict.answer) == ([], [], None)
    assert any("0000:1b:00.0 (PCI id 0001)" in note for note in verdict.notes)
    assert verdict.lines[0] == "memory is not planned: the GPUs are not known"


def test_a_machine_without_gpus_yet_gets_a_note(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()

    verdict = ask(Machine(str(tmp_path)), model=REFERENCE, gpus="", read_machine=True)

    assert codes(verdict) == []
    assert any("no GPU is visible" in note for note in verdict.notes)
    on_cpu = ask(Machine(str(tmp_path)), model=REFERENCE, gpus="", read_machine=True, server=server(backend="cpu"))
    assert on_cpu.lines[0] == "memory is not planned: backend cpu uses no GPU, and none is known"
    assert not any("no GPU is visible" in note for note in on_cpu.notes)


def test_nvidia_smi_is_believed_before_pci_ids(bare: Path) -> None:
    record = {
        "argv": ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"],
        "rc": 0,
        "stdout": "smi",
    }
    (bare / "commands/index.json").write_text(json.dumps([record]))
    (bare / "commands/smi").write_text("Tesla V100-SXM2-32GB, 32768, 7.0\n" * 3)

    verdict = ask(Machine(str(bare)), model=REFERENCE, gpus="", read_machine=True)

    assert len(verdict.gpus) == 3


@pytest.mark.parametrize("capture", ["healthy-v100x4", "no-driver", "nouveau", "version-mismatch", "missing-card"])
def test_captured_machines_in_any_state_can_be_planned_for(capture: str) -> None:
    verdict = ask(Machine(str(FIXTURES / "captures" / capture)), model=REFERENCE, gpus="", read_machine=True)

    assert len(verdict.gpus) == (3 if capture == "missing-card" else 4)
    assert verdict.answer is not None


def test_the_loaded_driver_is_judged_where_none_is_named(bare: Path) -> None:
    (bare / "sys/module/nvidia").mkdir(parents=True)
    (bare / "sys/module/nvidia/version").write_text("590.44.01\n")

    verdict = ask(Machine(str(bare)), model=REFERENCE, gpus="", driver="", read_machine=True)

    assert codes(verdict) == ["driver_without_gpu"]


def test_the_file_on_the_machine_comes_before_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((HEADERS / "qwen3-8b.header.gguf").read_bytes())

    there = ask(server=server(model=str(path)), model_name=REFERENCE, read_machine=True)
    gone = ask(server=server(model=str(path) + ".part"), model_name=REFERENCE, read_machine=True)

    assert (there.model, there.architecture) == (str(path), "qwen3")
    assert (gone.model, gone.architecture) == (REFERENCE, "qwen4exp")
    assert any("catalogue's figures" in note for note in gone.notes)


def test_a_broken_file_on_the_machine_is_left_to_the_download_to_mend(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((HEADERS / "qwen3-8b.header.gguf").read_bytes()[:1000])

    verdict = ask(server=server(model=str(path)), model_name=REFERENCE, read_machine=True)

    assert (codes(verdict), verdict.model) == ([], REFERENCE)


def test_the_header_is_read_where_the_file_will_come_from(web: tuple[str, Path]) -> None:
    address, folder = web
    (folder / "m.gguf").write_bytes((HEADERS / "qwen3moe.header.gguf").read_bytes())

    by_url = ask(files=[{"name": "m.gguf", "url": f"{address}/m.gguf"}])
    by_mirror = ask(files=[{"name": "m.gguf", "urls": [f"{address}/gone.gguf", f"{address}/m.gguf"]}])
    by_source = ask(files=[{"name": "m.gguf"}], sources=[{"url": f"{address}/"}])

    for verdict in (by_url, by_mirror, by_source):
        assert (codes(verdict), verdict.model, verdict.architecture) == ([], f"{address}/m.gguf", "qwen3moe")


def test_a_page_instead_of_the_model_is_refused_and_an_absent_server_is_noted(web: tuple[str, Path]) -> None:
    address, folder = web
    (folder / "m.gguf").write_text("<!DOCTYPE html><title>Sign in</title>")

    page = ask(files=[{"name": "m.gguf", "url": f"{address}/m.gguf"}])
    absent = ask(files=[{"name": "m.gguf", "url": f"{address}/gone.gguf"}])

    assert codes(page) == ["gguf_wrong_file"]
    assert (codes(absent), absent.answer) == ([], None)
    assert any(f"{address}/gone.gguf" in note for note in absent.notes)


def test_what_the_operator_names_must_be_readable(tmp_path: Path) -> None:
    assert codes(ask(model=str(tmp_path / "none.gguf"))) == ["gguf_not_found"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3.8-flash-next-ud-q4", "qwen3.8-flash-next-ud-q4_k_xl"),
        ("Qwen3-8B-Q4_K_N", "qwen3-8b-q4_k_m"),
        ("qwen3.8", "qwen3.8-flash-next-ud-q4_k_xl"),
        ("something else", "qwen3.8-flash-next-ud-q4_k_xl"),
    ],
)
def test_a_mistyped_name_is_told_the_nearest_one(name: str, meant: str) -> None:
    fault = ask(model=name).faults[0]

    assert (fault.code, fault.subject) == ("gguf_not_found", name)
    assert fault.message == "the catalogue has no model of that name, and there is no such file"
    assert fault.remedy == f"Write a name of docs/models.md, as {meant}, or the path or URL of a GGUF file."


def test_nothing_to_plan_says_so() -> None:
    verdict = ask(server=server(model=""))

    assert (codes(verdict), verdict.model) == ([], None)
    assert verdict.lines[0] == "memory is not planned: no model is named: set plan_model or model_files"


def test_a_token_goes_to_the_hub_it_is_for() -> None:
    sources = ({"endpoint": "https://m.cn"}, {"endpoint": "https://own.cn", "token": "o"})
    sent = {
        model: feasibility._authorization(Request(server(), model=model, token="t", sources=sources)).get(
            "Authorization"
        )
        for model in (
            "https://huggingface.co/a/b",
            "https://m.cn/a",
            "https://own.cn/a",
            "https://own.cn.evil.org/a",
            "http://huggingface.co/a",
            "https://modelscope.cn/a",
        )
    }

    assert list(sent.values()) == ["Bearer t", None, "Bearer o", None, None, None]
    assert "t" not in repr(Request(server(), token="t")).replace("token", "").split("'")


# --- Ollama beside it -------------------------------------------------------------------------------------------------


def test_an_ollama_that_goes_with_the_driver() -> None:
    verdict = ask(ollama="0.24.0", ollama_models=[{"name": "qwen3:8b"}], engines=["llama_server", "ollama"])
    assert codes(verdict) == []
    assert any("Ollama 0.24.0" in line for line in verdict.lines)


def test_what_ollama_cannot_do_under_this_driver_is_refused_before_anything_else() -> None:
    """The owner's model wants a newer Ollama, and that one a newer driver than 535."""
    assert "ollama_without_architecture" in codes(
        ask(ollama="0.24.0", ollama_models=[{"name": "m", "architecture": "qwen4exp"}])
    )
    verdict = ask(ollama="0.31.0")
    assert "ollama_ignores_gpu" in codes(verdict)
    assert any(line.endswith("REFUSED") for line in verdict.lines)
    shards = [{"name": "m", "gguf": "/srv/m-00001-of-00004.gguf"}]
    assert "ollama_sharded_model" in codes(ask(ollama="0.24.0", ollama_models=shards))
    assert codes(ask(ollama="latest")) == ["ollama_version_invalid"]


def test_a_variable_that_ollama_does_not_have_is_refused_also_where_it_is_not_set_up_yet() -> None:
    for ollama in ("", "0.24.0"):
        (fault,) = ask(ollama=ollama, ollama_environment={"OLLAMA_NUM_GPU": "4"}).faults
        assert fault.subject == "ollama_environment: OLLAMA_NUM_GPU"
        assert "ollama_gpus" in fault.remedy
        assert "num_gpu" in fault.remedy


def test_an_engine_that_there_is_not() -> None:
    (fault,) = ask(engines=["vllm", "llama_server"]).faults
    assert (fault.subject, fault.message) == ("volta_engines", "'vllm' is no engine")

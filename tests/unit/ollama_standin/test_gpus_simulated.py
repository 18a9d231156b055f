# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which cards the stand-in takes, on simulated machines, and what nvidia-smi shows of a loaded model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import ollama
import pytest

from tests.lab.ollama import standin as program
from tests.lab.ollama.gguf_file import small_gguf
from tests.lab.ollama.running import Standin


def model_of(standin: Standin) -> ollama.ProcessResponse.Model:
    client = ollama.Client(standin.url)
    client.pull("volta-small")
    client.generate("volta-small")
    return client.ps().models[0]


def runners(standin: Standin) -> list[tuple[int, str, str]]:
    """Pid, name and card of this stand-in's own processes as nvidia-smi lists them."""
    told = standin.smi("--query-compute-apps=pid,process_name,gpu_uuid", "--format=csv,noheader")
    rows = [tuple(word.strip() for word in line.split(",")) for line in told.splitlines()]
    own = str(standin.folder)
    return [(int(pid), name, uuid) for pid, name, uuid in rows if name.startswith(own)]


def test_a_loaded_model_is_a_process_on_its_card(make: Callable[..., Standin]) -> None:
    standin = make(driver="535.261.03").start()
    assert runners(standin) == []
    model_of(standin)
    ((pid, name, _),) = runners(standin)
    assert name == str(standin.program)
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "ollama"
    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[1:3] == [b"runner", b"--ollama-engine"]
    ollama.Client(standin.url).generate("volta-small", keep_alive=0)
    assert runners(standin) == []


def test_a_killed_server_takes_its_runner_along(make: Callable[..., Standin]) -> None:
    standin = make(driver="535.261.03").start()
    model_of(standin)
    ((pid, _, _),) = runners(standin)
    standin.stop(signal.SIGKILL)
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            break
    assert runners(standin) == []


def test_spread_takes_all_cards(make: Callable[..., Standin]) -> None:
    standin = make(driver="535.261.03", environment={"OLLAMA_SCHED_SPREAD": "1"}).start()
    model_of(standin)
    assert len({uuid for _, _, uuid in runners(standin)}) == 4


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        ("2", [2]),
        ("1,3", [1, 3]),
        (f"GPU-{'0' * 8}-0000-4000-8000-000000000003", [2]),
        ("-1", []),
        ("0,9,1", [0]),
        ("", []),
    ],
)
def test_cuda_visible_devices_limits_the_cards(make: Callable[..., Standin], visible: str, cards: list[int]) -> None:
    standin = make(
        driver="535.261.03", environment={"CUDA_VISIBLE_DEVICES": visible, "OLLAMA_SCHED_SPREAD": "1"}
    ).start()
    model = model_of(standin)
    found = {uuid for _, _, uuid in runners(standin)}
    assert found == {f"GPU-00000000-0000-4000-8000-{card + 1:012d}" for card in cards}
    assert bool(model.size_vram) == bool(cards)


@pytest.mark.parametrize(
    ("options", "on_cards"),
    [
        ({}, True),
        ({"libraries": ("cuda_v13",)}, False),
        ({"libraries": ("cuda_v12",)}, True),
        ({"libraries": ()}, False),
        ({"environment": {"OLLAMA_LLM_LIBRARY": "cuda_v12"}}, True),
        ({"environment": {"OLLAMA_LLM_LIBRARY": "cuda_v13"}}, False),
        ({"environment": {"OLLAMA_LLM_LIBRARY": "cpu"}}, False),
        ({"version": "0.30.5"}, False),
        ({"version": "0.30.5", "driver": "550.163.01"}, True),
        ({"version": "0.29.9"}, True),
    ],
)
def test_a_v100_needs_cuda_v12_and_from_0_30_on_driver_550(
    make: Callable[..., Standin], options: dict[str, object], on_cards: bool
) -> None:
    standin = make(**{"driver": "535.261.03", **options}).start()
    model = model_of(standin)
    assert (model.size_vram == model.size) is on_cards
    assert bool(model.size_vram) is on_cards
    assert ("library=CUDA" in standin.log()) is on_cards
    assert "too old" not in standin.log()


def test_the_reason_is_seen_at_the_second_level_of_debug_only(make: Callable[..., Standin]) -> None:
    standin = make(driver="535.261.03", version="0.30.5", environment={"OLLAMA_DEBUG": "2"}).start()
    assert 'msg="NVIDIA driver too old"' in standin.log()
    assert "supported=map[]" in standin.log()


def test_from_0_30_on_the_runner_is_llama_server(make: Callable[..., Standin]) -> None:
    standin = make(driver="550.163.01", version="0.30.5").start()
    model_of(standin)
    ((_, name, _),) = runners(standin)
    assert name.endswith("lib/ollama/llama-server")


def test_the_default_context_follows_the_memory(make: Callable[..., Standin]) -> None:
    standin = make(driver="535.261.03").start()
    assert "default_num_ctx=262144" in standin.log()
    # More than the model was made for is cut to that.
    assert model_of(standin).context_length == 32768


def header(tmp_path: Path) -> program.Gguf:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_gguf())
    return program.read_gguf(path)


def card(free: int, index: int = 0) -> program.Card:
    return program.Card(index, f"GPU-{index}", "V100", "00:00.0", free, free, "535.261.03", "7.0")


def test_what_does_not_fit_stays_with_the_host(tmp_path: Path) -> None:
    model = header(tmp_path)
    need = program.CARD_MINIMUM + program.CARD_GRAPH
    whole = program.place(model, 32768, [card(need + (1 << 30))], {}, {})
    assert whole.size == whole.size_vram
    part = program.place(model, 32768, [card(need + (40 << 20))], {}, {})
    assert 0 < part.size_vram < part.size
    assert 0 < part.layers_on_cards < part.layers
    two = program.place(model, 32768, [card(need + (40 << 20), 0), card(need + (40 << 20), 1)], {}, {})
    assert (len(two.cards), two.size == two.size_vram) == (2, True)
    none = program.place(model, 32768, [card(1 << 20)], {}, {})
    assert (none.cards, none.size_vram) == ([], 0)
    asked = program.place(model, 32768, [card(need + (1 << 30))], {"num_gpu": 4}, {})
    # The output layer is one more than the blocks.
    assert (asked.layers_on_cards, asked.layers) == (4, 5)
    assert asked.size_vram < asked.size


def test_a_smaller_cache_needs_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = header(tmp_path)
    plain = program.cache_bytes(model, 4096)
    assert plain == 4096 * 2 * 32 * 4 * 4 * 2
    monkeypatch.setenv("OLLAMA_KV_CACHE_TYPE", "q8_0")
    assert program.cache_bytes(model, 4096) == plain
    monkeypatch.setenv("OLLAMA_FLASH_ATTENTION", "1")
    assert program.cache_bytes(model, 4096) == plain * 8.5 / 16


def test_loaded_models_are_limited_and_the_oldest_goes(make: Callable[..., Standin], tmp_path: Path) -> None:
    standin = make(environment={"OLLAMA_MAX_LOADED_MODELS": "1"}).start()
    client = ollama.Client(standin.url)
    client.pull("volta-small")
    other = tmp_path / "other.gguf"
    other.write_bytes(small_gguf(layers=2))
    client.create("other", files={"other.gguf": client.create_blob(other)})
    client.generate("volta-small")
    client.generate("other")
    assert [model.model for model in client.ps().models] == ["other:latest"]

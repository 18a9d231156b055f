# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The demo's model as a file. That llama-server loads it and answers is shown by the demo and the molecule scenario."""

from __future__ import annotations

import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.lab.demo_model import SourceError, generate, source, vocabulary_file
from tests.lab.demo_model.generate import END_OF_TURN, LINE_BREAK, MAY_END, SHARDS, WORDS, Shape

SMALL = Shape(layers=4, ngram_rows=61, experts=4, experts_used=2, expert_ff=32, streams=2)
NAMES = [f"volta-demo-qwen4exp-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary file of the same form as llama.cpp's, with just the tokens that matter."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.gguf"
    tokens = ["<|endoftext|>", END_OF_TURN, ".", LINE_BREAK, "{", *(f"\u0120{word}" for word in WORDS)]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["\u0120 t", "h e"])
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    generate(vocabulary, out, SMALL)
    return out


def test_the_same_inputs_give_the_same_bytes(vocabulary: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / ".volta-demo-qwen4exp-Q8_0.partial").mkdir()
    (tmp_path / ".volta-demo-qwen4exp-Q8_0.partial/left-by-a-killed-run").write_text("x")
    generate(vocabulary, tmp_path, SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *NAMES]
    for name in ("manifest.json", *NAMES):
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()


def test_several_that_write_at_once_do_not_disturb_each_other(vocabulary: Path, model: Path, tmp_path: Path) -> None:
    """Scenarios of molecule run side by side, with one cache."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: [entry["name"] for entry in generate(vocabulary, tmp_path, SMALL)], range(8)))
    assert made == [NAMES] * 8
    for name in ("manifest.json", *NAMES):
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()


def test_the_bytes_are_the_same_on_every_machine(model: Path) -> None:
    """Known figures, so that a NumPy or gguf release that changes them is noticed."""
    assert [
        (entry["size"], entry["sha256"]) for entry in json.loads((model / "manifest.json").read_text())["files"]
    ] == [
        (470272, "c94445fffdda3d3b4c387df4c781f9d522428dd4e74f4eaef2959706c3d183b4"),
        (505440, "caa6e11af09d5158b93e00751309a4591ff37bbbaf9d684577e0ba011d71ee95"),
    ]


def test_shards_are_a_set(model: Path) -> None:
    readers = [gguf.GGUFReader(model / name) for name in NAMES]
    total = sum(len(reader.tensors) for reader in readers)
    for number, reader in enumerate(readers):
        split = {key: reader.fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")}
        assert split == {"no": number, "count": SHARDS, "tensors.count": total}
    assert readers[0].fields["general.architecture"].contents() == "qwen4exp"
    assert len(readers[1].tensors) > 10


def test_tensors_have_the_structure_of_the_architecture(model: Path) -> None:
    tensors = {t.name: t for name in NAMES for t in gguf.GGUFReader(model / name).tensors}
    attention = {int(name.split(".")[1]) for name in tensors if name.endswith("indexer.q_proj.weight")}
    recurrent = {int(name.split(".")[1]) for name in tensors if name.endswith("ssm_out.weight")}
    assert (attention, recurrent) == ({3}, {0, 1, 2})
    assert list(tensors["blk.0.ffn_down_exps.weight"].shape) == [SMALL.expert_ff, SMALL.embedding, SMALL.experts]
    assert list(tensors["per_layer_token_embd.weight"].shape) == [SMALL.embedding // 4, 61 * 4]
    assert "blk.0.ple_key.weight" in tensors
    assert "blk.1.ple_key.weight" not in tensors


def test_layers_leave_the_reserved_channels_alone(model: Path) -> None:
    tensors = [t for name in NAMES for t in gguf.GGUFReader(model / name).tensors]
    writers = [t for t in tensors if t.name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down_shexp.weight"))]
    assert len(writers) == SMALL.layers * 2
    for tensor in writers:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert not values[: MAY_END + 1].any()
        assert values[MAY_END + 1 :].any()
        assert np.isfinite(values).all()


def test_a_source_without_the_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no models/ggml-vocab-qwen35"):
        vocabulary_file(tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        vocabulary_file(tmp_path / "nothing")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / source.VOCABULARY).write_bytes(b"something else")
    with pytest.raises(SourceError, match="is not the vocabulary of llama_cpp_python"):
        vocabulary_file(tmp_path)


@pytest.mark.parametrize("content", [b"not a tar archive", None])
def test_a_wrong_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    monkeypatch.setenv("VOLTA_LAB_CACHE", str(tmp_path / "cache"))
    sdist = tmp_path / "x.tar.gz"
    if content is None:
        with tarfile.open(sdist, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("x/README"), io.BytesIO())
    else:
        sdist.write_bytes(content)
    with pytest.raises(SourceError, match="give llama_cpp_python"):
        vocabulary_file(sdist)
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_the_vocabulary_comes_out_of_the_sdist_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"the vocabulary"
    monkeypatch.setattr(source, "VOCABULARY_SHA256", source.hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("VOLTA_LAB_CACHE", str(tmp_path / "cache"))
    sdist = tmp_path / "x.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        member = tarfile.TarInfo(f"llama_cpp_python/vendor/llama.cpp/{source.VOCABULARY}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    first = vocabulary_file(sdist)
    assert first.read_bytes() == data
    sdist.write_bytes(b"gone")
    assert vocabulary_file(sdist) == first

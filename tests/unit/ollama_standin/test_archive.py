# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Archives that look like Ollama's releases, whole and broken; the registry's folder; the command that makes both."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.lab.fileserver import resolve
from tests.lab.ollama import __main__ as command
from tests.lab.ollama.archive import BROKEN, Release, make_release
from tests.lab.ollama.gguf_file import small_gguf
from tests.lab.ollama.registry import other_name, publish_model


def listed(release: Release) -> dict[str, str]:
    lines = (release.folder / "sha256sum.txt").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    content = path.read_bytes()
    if path.suffix == ".zst":
        content = subprocess.run(["zstd", "-dqc"], input=content, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {member.name: member for member in archive}


@pytest.mark.parametrize("form", ["tar.zst", "tgz"])
def test_a_release_is_laid_out_as_the_real_one(tmp_path: Path, form: str) -> None:
    release = make_release(tmp_path, "0.24.0")
    path = release.files[form]
    assert path == tmp_path / "v0.24.0" / f"ollama-linux-amd64.{form}"
    assert listed(release)[f"./{path.name}"] == hashlib.sha256(path.read_bytes()).hexdigest() == release.sha256[form]
    found = members(path)
    assert found["bin/ollama"].mode & 0o111
    assert found["lib/ollama/libggml-base.so"].linkname == "libggml-base.so.0"
    assert {"lib/ollama/cuda_v12/libggml-cuda.so", "lib/ollama/cuda_v13/libggml-cuda.so"} <= set(found)


def test_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    assert make_release(tmp_path / "a", "0.24.0").sha256 == make_release(tmp_path / "b", "0.24.0").sha256
    assert make_release(tmp_path / "c", "0.24.1").sha256 != make_release(tmp_path / "a", "0.24.0").sha256


@pytest.mark.parametrize("broken", BROKEN)
def test_each_way_of_being_broken_shows(tmp_path: Path, broken: str) -> None:
    release = make_release(tmp_path, "0.24.1", ("tgz",), broken=broken)
    path = release.files["tgz"]
    matches = listed(release).get(f"./{path.name}") == hashlib.sha256(path.read_bytes()).hexdigest()
    assert matches is (broken not in ("truncated", "wrong_hash", "not_listed"))
    if broken in ("truncated", "truncated_listed"):
        with pytest.raises((EOFError, tarfile.ReadError)):
            members(path)
        return
    found = members(path)
    if broken == "no_binary":
        assert "bin/ollama" not in found
        return
    with tarfile.open(path) as archive:
        stream = archive.extractfile("bin/ollama")
        assert stream is not None
        content = stream.read()
    program = tmp_path / "ollama"
    program.write_bytes(content)
    if broken == "wrong_architecture":
        assert (content[:4], content[18]) == (b"\x7fELF", 183)
        return
    if broken == "crash":
        assert subprocess.run(["sh", program, "--version"], capture_output=True, check=False).returncode == 127
        return
    told = subprocess.run([sys.executable, program, "-v"], capture_output=True, text=True, check=True).stdout
    assert "client version is 0.24.1" in told
    served = subprocess.run(
        [sys.executable, program, "serve"], capture_output=True, check=False, env={"HOME": str(tmp_path / "none/x")}
    ) if broken == "crash_at_serve" else None  # fmt: skip
    assert served is None or served.returncode == 2
    outside = [
        name for name, member in found.items()
        if name.startswith("/") or ".." in name.split("/") or ".." in member.linkname
    ]  # fmt: skip
    assert bool(outside) is (broken in ("traversal", "absolute", "link"))


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'nonsense' is none of"):
        make_release(tmp_path, "0.24.0", broken="nonsense")


def test_a_registry_is_a_folder_for_any_file_server(tmp_path: Path) -> None:
    digests = publish_model(tmp_path, "own", "8b", weights=small_gguf(layers=1))
    manifest = resolve(tmp_path, "/v2/library/own/manifests/8b")
    assert manifest is not None
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == digests["manifest"]
    blob = resolve(tmp_path, f"/v2/library/own/blobs/sha256:{digests['model']}")
    assert blob is not None
    assert blob.read_bytes() == small_gguf(layers=1)


def test_another_name_of_a_host() -> None:
    assert other_name("127.0.0.1") == "localhost"
    assert other_name("10.88.0.1") == "173539329"


def test_publish_writes_both_and_tells_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "own.gguf"
    weights.write_bytes(small_gguf(layers=1))
    words = ["publish", str(tmp_path / "out"), "--version", "0.24.0", "--version", "0.30.5=crash_at_serve"]
    assert command.main([*words, "--form", "tgz", "--model", "volta-small", "--model", f"own:8b={weights}"]) == 0
    told = json.loads(capsys.readouterr().out)
    for version, release in told["releases"].items():
        path = tmp_path / "out/releases" / f"v{version}" / "ollama-linux-amd64.tgz"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == release["sha256"]["tgz"]
    assert set(told["releases"]) == {"0.24.0", "0.30.5"}
    assert told["models"]["own:8b"]["model"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (tmp_path / "out/v2/library/volta-small/manifests/latest").is_file()


def test_a_wrong_word_at_the_command_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["publish", str(tmp_path), "--version", "0.24.0=nonsense"])

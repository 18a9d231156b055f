# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Releases that are packed, shipped and installed elsewhere, and the way back."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import release, ship
from ansible_collections.volta.llm.plugins.module_utils.engine.ship import Shipment

from .conftest import Bench
from .test_run import MAIN, build, codes, cuda


def done(asked: Shipment, **more: bool) -> ship.Outcome:
    outcome = ship.ship(asked, **more)
    assert outcome.faults == [], outcome.faults
    return outcome


def shipment(bench: Bench, **more: Any) -> Shipment:
    given: dict[str, Any] = {
        "action": "install",
        "prefix": str(bench.root / "target"),
        "build_user": bench.build_user,
        "sysroot": str(bench.root / "bare"),
        "nvidia_smi": "/no/such/nvidia-smi",
    }
    return Shipment(**{**given, **more})


def packed(bench: Bench, name: str) -> tuple[str, str]:
    """The archive of a release that was built here, and its hash."""
    archive = str(bench.root / "export" / f"{name}.tar.gz")
    outcome = done(shipment(bench, action="pack", prefix=str(bench.prefix), name=name, archive=archive))
    assert outcome.sha256 is not None
    return archive, outcome.sha256


def test_built_once_and_used_elsewhere(bench: Bench) -> None:
    made = build(replace(bench.archive(), portable=True, switch=False))
    name = Path(made.release or "").name
    asked = shipment(bench, name=name)
    # Nothing has come yet: the target says so, and changes nothing.
    assert not done(asked).present
    assert not (bench.root / "target").exists()

    archive, sha256 = packed(bench, name)
    whole = replace(asked, archive=archive, sha256=sha256)
    would = done(whole, check_mode=True)
    assert would.changed
    assert not (bench.root / "target").exists()
    outcome = done(whole)
    assert outcome.changed
    assert outcome.present
    assert outcome.current == outcome.release == str(bench.root / "target/releases" / name)
    assert (outcome.version, outcome.commit, outcome.fingerprint) == (made.version, made.commit, made.fingerprint)
    assert outcome.capabilities == made.capabilities
    server = bench.root / "target/current/bin/llama-server"
    assert "version: 1.0" in subprocess.run([server, "--version"], capture_output=True, text=True).stdout
    assert release.read_release(Path(outcome.release)) is not None
    # With nothing to do neither archive nor hash is needed.
    for again in (asked, whole):
        second = done(again)
        assert not second.changed
        assert second.present


def test_the_same_release_is_packed_once(bench: Bench) -> None:
    name = Path(build(bench.archive()).release or "").name
    archive, sha256 = packed(bench, name)
    stamp = Path(archive).stat().st_mtime_ns
    assert packed(bench, name) == (archive, sha256)
    assert Path(archive).stat().st_mtime_ns == stamp
    Path(archive).write_bytes(b"cut off")
    assert packed(bench, name) == (archive, sha256)
    # Another release takes its place.
    other = Path(build(bench.archive("2.0")).release or "").name
    packed(bench, other)
    assert sorted(path.name for path in Path(archive).parent.iterdir()) == [
        f"{other}.tar.gz",
        f"{other}.tar.gz.sha256",
    ]


def test_what_is_not_there_cannot_be_packed(bench: Bench) -> None:
    asked = shipment(bench, action="pack", name=f"1.0-{'a' * 12}", archive=str(bench.root / "x.tar.gz"))
    assert codes(ship.ship(asked)) == ["release_missing"]  # type: ignore[arg-type]


Change = Callable[[dict[str, bytes]], dict[str, bytes]]


def rewritten(archive: str, change: Change) -> str:
    """The archive with other content, as a broken or hostile sender would make it; its SHA-256."""
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in change(files).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = gzip.compress(out.getvalue())
    Path(archive).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def manifest_with(files: dict[str, bytes], **entry: str) -> dict[str, bytes]:
    """A manifest that lists one file more, with its right hash."""
    head = next(iter(files))
    content = json.loads(files[head])
    content["files"].append({"size": 1, "mtime_ns": 0, "sha256": hashlib.sha256(b"x").hexdigest(), **entry})
    return {**files, head: json.dumps(content).encode(), f"{head.partition('/')[0]}/{entry['path']}": b"x"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda files: {name: data.replace(b"version: ", b"version; ") for name, data in files.items()}, "another SHA"),
        (lambda files: dict(list(files.items())[:-1]), "is not in the archive"),
        (lambda files: {**files, "elsewhere/x": b"x"}, "does not list"),
        (lambda files: dict(list(files.items())[1:]), "does not begin with the manifest"),
        (lambda files: manifest_with(files, path="../../../etc/cron.d/x"), "does not list"),
        (lambda files: manifest_with(files, path="lib/../../x"), "does not list"),
        (lambda files: {next(iter(files)): b"{}", **dict(list(files.items())[1:])}, "of another release"),
    ],
)
def test_an_archive_that_is_not_what_it_says(bench: Bench, change: Change, why: str) -> None:
    name = Path(build(bench.archive()).release or "").name
    archive, _sha256 = packed(bench, name)
    sha256 = rewritten(archive, change)
    outcome = ship.ship(shipment(bench, name=name, archive=archive, sha256=sha256))
    assert [fault.code for fault in outcome.faults] == ["release_damaged"]
    assert why in outcome.faults[0].message
    assert not outcome.changed
    assert list((bench.root / "target/releases").iterdir()) == []


def test_an_archive_that_was_damaged_on_the_way(bench: Bench) -> None:
    name = Path(build(bench.archive()).release or "").name
    archive, sha256 = packed(bench, name)
    Path(archive).write_bytes(Path(archive).read_bytes()[:-100])
    outcome = ship.ship(shipment(bench, name=name, archive=archive, sha256=sha256))
    assert [fault.code for fault in outcome.faults] == ["release_damaged"]
    cut = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    outcome = ship.ship(shipment(bench, name=name, archive=archive, sha256=cut))
    assert [fault.code for fault in outcome.faults] == ["release_damaged"]


def test_the_target_tries_it_on_its_own_cards(bench: Bench) -> None:
    good = build(cuda(bench, switch=False, portable=True))
    name = Path(good.release or "").name
    archive, sha256 = packed(bench, name)
    asked = shipment(bench, name=name, archive=archive, sha256=sha256, **bench.cards("7.0", "7.0"))
    outcome = done(asked)
    assert outcome.proof[-1] == {"check": "compute", "found": "CUDA0 1000 tokens/s, CUDA1 1000 tokens/s"}

    broken = build(cuda(bench, "2.0", main=MAIN.replace("COMPUTES = 2", "COMPUTES = 0"), switch=False, portable=True))
    name = Path(broken.release or "").name
    archive, sha256 = packed(bench, name)
    refused = ship.ship(replace(asked, name=name, archive=archive, sha256=sha256))
    assert [fault.code for fault in refused.faults] == ["gpu_proof_failed"]
    assert refused.current == outcome.release


def test_a_shipped_release_takes_the_toolkit_s_libraries_along(bench: Bench) -> None:
    root = bench.toolkit()
    code = bench.root / "rt.c"
    code.write_text("int started(void) { return 0; }\n")
    library = root / "lib64/libcudart.so.12.2.140"
    library.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "-o", library, code], check=True)
    (root / "lib64/libcudart.so.12").symlink_to(library.name)
    (root / "link-the-runtime").write_text("")
    made = build(cuda(bench, switch=False, portable=True))
    taken = Path(made.release or "") / "lib/libcudart.so.12"
    assert taken.read_bytes() == library.read_bytes()
    assert not taken.is_symlink()
    # The target has no toolkit.
    name = Path(made.release or "").name
    archive, sha256 = packed(bench, name)
    library.unlink()
    done(shipment(bench, name=name, archive=archive, sha256=sha256))


# --- back ---


def test_the_way_back_and_forth(bench: Bench) -> None:
    back = shipment(bench, action="previous", prefix=str(bench.prefix))
    assert [fault.code for fault in ship.ship(back).faults] == ["release_missing"]
    one = build(bench.archive("1.0"))
    [fault] = ship.ship(back).faults
    # It is built; what is missing is another one.
    assert (fault.code, fault.remedy) == ("release_missing", "Build another version first (`llama_cpp_version`).")
    assert fault.message.endswith(f"from {Path(one.release).name}, the only one")
    two = build(bench.archive("2.0"))
    would = done(back, check_mode=True)
    assert would.changed
    assert (would.current, would.version) == (two.release, "1.0")
    outcome = done(back)
    assert (outcome.current, outcome.previous_release, outcome.version) == (one.release, two.release, "1.0")
    assert outcome.removed == []
    assert done(back).current == two.release


def test_nothing_that_fails_its_proof_is_gone_back_to(bench: Bench) -> None:
    one, two = build(bench.archive("1.0")), build(bench.archive("2.0"))
    back = shipment(bench, action="previous", prefix=str(bench.prefix))
    program = Path(one.release or "", "bin/llama-server")
    program.write_bytes(program.read_bytes()[:-1] + b"x")
    outcome = ship.ship(back)
    assert [fault.code for fault in outcome.faults] == ["release_damaged"]
    assert (bench.prefix / "current").resolve() == Path(two.release or "")


def test_wishes_that_cannot_be_meant(bench: Bench) -> None:
    asked = shipment(bench, name="../../etc", archive="x", keep_releases=0)
    outcome = ship.ship(asked)
    assert [fault.subject for fault in outcome.faults] == ["archive", "name", "sha256", "keep_releases"]

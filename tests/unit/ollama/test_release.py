# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama's releases: pinned, proved, laid beside the one in use, switched, and back."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils import releases
from ansible_collections.volta.llm.plugins.module_utils.ollama import release
from ansible_collections.volta.llm.plugins.module_utils.ollama.release import Asked, Outcome, archive_name, settle
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings

from tests.unit.transfer.site import Exchange, Site

PATIENCE = Settings(connections=2, timeout=5, stall_timeout=0.3, retries=2, retry_wait=0.01)
FORMS = ("tar.zst", "tgz")


def program(version: str) -> bytes:
    """What answers `--version` as the real program does where no server runs."""
    return (
        "#!/bin/sh\n"
        '[ "$1" = --version ] || exit 64\n'
        "echo 'Warning: could not connect to a running Ollama instance'\n"
        f"echo 'Warning: client version is {version}'\n"
    ).encode()


def entry(name: str, content: bytes | None = None, mode: int = 0o644, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of an archive; a folder where there is neither content nor a type."""
    info = tarfile.TarInfo(name)
    info.mode = mode
    info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
    info.size = len(content or b"")
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content or b""


def link(name: str, goal: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, None, 0o777, type=kind, linkname=goal)


Entries = list[tuple[tarfile.TarInfo, bytes]]


def layout(version: str, top: str = "", filler: bytes = b"") -> Entries:
    """A release as the project packs it: program, libraries with the links of their versions, one folder per CUDA."""
    return [
        entry(f"{top}bin", mode=0o755),
        entry(f"{top}bin/ollama", program(version), 0o755),
        entry(f"{top}lib/ollama", mode=0o755),
        entry(f"{top}lib/ollama/libggml-base.so.0.0.0", b"base" + filler, 0o755),
        link(f"{top}lib/ollama/libggml-base.so.0", "libggml-base.so.0.0.0"),
        link(f"{top}lib/ollama/libggml-base.so", "libggml-base.so.0"),
        entry(f"{top}lib/ollama/cuda_v12/libggml-cuda.so", b"sm_70", 0o755),
        link(f"{top}lib/ollama/cuda_v12/libcublas.so.12", "libcublas.so.12.8.4.1"),
        entry(f"{top}lib/ollama/cuda_v12/libcublas.so.12.8.4.1", b"cublas", 0o644),
        entry(f"{top}lib/ollama/cuda_v13/libggml-cuda.so", b"sm_75", 0o755),
    ]


def pack(path: Path, entries: Entries, form: str = "tgz") -> str:
    """Write an archive; its SHA-256."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "tgz":
        path.write_bytes(gzip.compress(plain.getvalue(), 1, mtime=0))
    else:
        packed = subprocess.run(["zstd", "-1", "-c"], input=plain.getvalue(), capture_output=True, check=True)
        path.write_bytes(packed.stdout)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Stands for GitHub, with nothing there."""
    site = Site()
    site.start()
    monkeypatch.setattr(release, "DOWNLOADS", site.url("/project"))
    yield site
    site.stop()


@pytest.fixture
def mirror() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


class Desk:
    """Asks for releases below a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = folder / "opt/ollama"
        self.command = folder / "usr/local/bin/ollama"
        self.outgoing = folder / "srv"
        self.asked = Asked(
            prefix=str(self.prefix), command=str(self.command), settings=PATIENCE, machine="x86_64", elsewhere=()
        )

    def ask(self, check_mode: bool = False, **options: Any) -> Outcome:
        return settle(replace(self.asked, **options), check_mode)

    def bring(self, version: str, form: str = "tgz", check_mode: bool = False, **options: Any) -> Outcome:
        """A release from an archive on the machine, which is gone afterwards."""
        archive = self.outgoing / f"{version}.{form}"
        sha256 = pack(archive, layout(version), form)
        try:
            return self.ask(check_mode, **{"version": version, "archive": str(archive), "sha256": sha256, **options})
        finally:
            archive.unlink()

    def link(self, name: str) -> str:
        return (self.prefix / name).resolve().name

    @property
    def names(self) -> list[str]:
        """What is in the folder of releases, hidden names too."""
        folder = self.prefix / "releases"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def codes(outcome: Outcome) -> list[str]:
    return [fault.code for fault in outcome.faults]


def said(outcome: Outcome) -> str:
    return "\n".join(f"{fault.subject}: {fault.message} {fault.remedy}" for fault in outcome.faults)


# --- what is asked for ---


@pytest.mark.parametrize("version", ["latest", "stable", "", "0.24", "v0.24.0", "0.24.0\n", "0.24.0-dirty", "0.3.6"])
def test_only_one_written_release_is_accepted(desk: Desk, version: str) -> None:
    outcome = desk.ask(version=version)
    assert codes(outcome) == ["ollama_version_invalid"]
    assert not desk.prefix.exists()


def test_latest_is_refused_with_the_reason(desk: Desk) -> None:
    assert "older than 550" in said(desk.ask(version="latest"))
    assert "Write 0.24.0." in said(desk.ask(version="v0.24.0"))


@pytest.mark.parametrize(
    ("version", "machine", "name"),
    [
        ("0.3.7", "x86_64", "ollama-linux-amd64.tgz"),
        ("0.13.5", "x86_64", "ollama-linux-amd64.tgz"),
        ("0.14.0-rc0", "x86_64", "ollama-linux-amd64.tar.zst"),
        ("0.24.0", "x86_64", "ollama-linux-amd64.tar.zst"),
        ("0.24.0", "aarch64", "ollama-linux-arm64.tar.zst"),
        ("1.0.0", "aarch64", "ollama-linux-arm64.tar.zst"),
    ],
)
def test_the_archive_is_called_as_the_project_calls_it(version: str, machine: str, name: str) -> None:
    assert archive_name(version, machine) == name


def test_a_machine_without_archive_is_refused_unless_it_brings_its_own(desk: Desk) -> None:
    assert codes(desk.ask(machine="ppc64le")) == ["ollama_machine_unsupported"]
    assert codes(desk.bring("0.24.0", machine="ppc64le")) == []


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"prefix": "opt/ollama"}, "prefix"),
        ({"prefix": "/opt/../etc"}, "prefix"),
        ({"command": "bin/ollama"}, "command"),
        ({"keep_releases": 0}, "keep_releases"),
        ({"sha256": "ab"}, "sha256"),
        ({"archive": "/a.tgz", "mirror": "http://m.example/"}, "mirror"),
        ({"archive": "a.tgz"}, "archive"),
        ({"archive": "ftp://m.example/a.tgz"}, "archive"),
        ({"mirror": "/srv/mirror"}, "mirror"),
        ({"checksums": "sums.txt"}, "checksums"),
        ({"settings": replace(PATIENCE, ca_path="/nonexistent/ca.pem")}, "ca_path"),
    ],
)
def test_options_that_cannot_work_are_refused(desk: Desk, options: dict[str, Any], subject: str) -> None:
    outcome = desk.ask(**options)
    assert [(fault.code, fault.subject) for fault in outcome.faults] == [("ollama_release_option_invalid", subject)]


def test_all_mistakes_are_told_at_once(desk: Desk) -> None:
    outcome = desk.ask(version="latest", keep_releases=0, sha256="x")
    assert sorted(codes(outcome)) == [
        "ollama_release_option_invalid",
        "ollama_release_option_invalid",
        "ollama_version_invalid",
    ]


# --- installing ---


@pytest.mark.parametrize("top", ["", "./"])
@pytest.mark.parametrize("form", FORMS)
def test_a_release_is_laid_down_whole(desk: Desk, form: str, top: str) -> None:
    # The name tells nothing: an archive that was copied may have any.
    archive = desk.outgoing / "copied"
    sha256 = pack(archive, layout("0.24.0", top), form)
    umask = os.umask(0o077)
    try:
        outcome = desk.ask(archive=str(archive), sha256=sha256.upper())
    finally:
        os.umask(umask)
    assert outcome.faults == []
    path = desk.prefix / f"releases/0.24.0-{sha256[:12]}"
    assert (outcome.changed, outcome.switched, outcome.activated) == (True, True, True)
    assert (outcome.release, outcome.binary) == (str(path), str(path / "bin/ollama"))
    assert (outcome.version, outcome.sha256, outcome.verified_by) == ("0.24.0", sha256, "sha256")
    assert (outcome.current, outcome.previous, outcome.source) == (str(path), None, str(archive))
    assert desk.names == [path.name]
    assert desk.link("current") == path.name
    assert (path / "lib/ollama/libggml-base.so").resolve() == path / "lib/ollama/libggml-base.so.0.0.0"
    modes = {name: (path / name).stat().st_mode & 0o7777 for name in ("bin", "bin/ollama", "lib/ollama/cuda_v12")}
    assert set(modes.values()) == {0o755}, "whatever umask the caller has, the service reaches it"
    assert (path / "lib/ollama/cuda_v12/libcublas.so.12.8.4.1").stat().st_mode & 0o7777 == 0o644
    assert desk.command.readlink() == desk.prefix / "current/bin/ollama"
    assert archive.exists(), "a file of the operator is not ours to remove"
    assert not (desk.prefix / "downloads").exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_second_run_reads_no_archive(desk: Desk, form: str) -> None:
    first = desk.bring("0.24.0", form)
    again = desk.ask(version="0.24.0", archive=str(desk.outgoing / "gone"), sha256=first.sha256)
    assert (again.faults, again.changed, again.switched) == ([], False, False)
    assert (again.release, again.binary, again.activated) == (first.release, first.binary, True)


def test_hard_links_and_repeated_folders_are_taken(desk: Desk) -> None:
    entries = [
        *layout("0.24.0"),
        entry("bin", mode=0o755),
        link("lib/ollama/copy.so", "lib/ollama/cuda_v12/libggml-cuda.so", tarfile.LNKTYPE),
    ]
    archive = desk.outgoing / "a.tgz"
    outcome = desk.ask(archive=str(archive), sha256=pack(archive, entries))
    assert outcome.faults == []
    assert outcome.release is not None
    assert (Path(outcome.release) / "lib/ollama/copy.so").read_bytes() == b"sm_70"
    assert desk.ask(archive=str(archive), sha256=outcome.sha256).changed is False


def test_a_damaged_release_is_laid_down_again(desk: Desk) -> None:
    first = desk.bring("0.24.0")
    assert first.release is not None
    for damage in ("content", "link"):
        if damage == "content":
            (Path(first.release) / "lib/ollama/cuda_v12/libggml-cuda.so").write_bytes(b"SM_70")
        else:
            (Path(first.release) / "lib/ollama/libggml-base.so").unlink()
        again = desk.bring("0.24.0")
        assert (again.faults, again.changed, again.release) == ([], True, first.release), damage
        assert desk.bring("0.24.0").changed is False


def test_check_mode_writes_nothing(desk: Desk) -> None:
    outcome = desk.bring("0.24.0", check_mode=True)
    assert (outcome.faults, outcome.changed, outcome.release) == ([], True, None)
    assert not desk.prefix.exists()
    assert not desk.command.exists()
    desk.bring("0.24.0")
    assert desk.bring("0.24.0", check_mode=True).changed is False
    assert desk.bring("0.24.1", check_mode=True).changed is True
    assert len(desk.names) == 1


def test_without_activation_the_release_only_lies_there(desk: Desk) -> None:
    desk.bring("0.24.0")
    desk.bring("0.24.1")
    new = desk.bring("0.24.2", activate=False)
    assert (new.faults, new.changed, new.activated, new.switched) == ([], True, False, False)
    assert desk.link("current").startswith("0.24.1-")
    assert len(desk.names) == 3, "what was brought just now is not the one that makes way"
    used = desk.ask(version="0.24.2", archive="/nonexistent", sha256=new.sha256)
    assert (used.faults, used.changed, used.switched, used.activated) == ([], True, True, True)
    assert [name.partition("-")[0] for name in desk.names] == ["0.24.1", "0.24.2"]
    assert [name.partition("-")[0] for name in used.removed] == ["0.24.0"]


def test_a_release_that_no_longer_runs_is_not_switched_to(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.bring("0.24.0")
    new = desk.bring("0.24.1", activate=False)
    monkeypatch.setattr(
        release, "run_in", lambda *a, **k: SimpleNamespace(ok=False, missing=False, why="no libc", stderr="")
    )
    outcome = desk.ask(version="0.24.1", archive="/nonexistent", sha256=new.sha256)
    assert codes(outcome) == ["ollama_does_not_run"]
    assert desk.link("current").startswith("0.24.0-")


# --- where it comes from, and what proves it ---


def offer(site: Site, tmp_path: Path, base: str, version: str = "0.23.0", filler: bytes = b"") -> tuple[str, bytes]:
    """Put a release with its list on a site; path of the archive and its bytes."""
    archive = tmp_path / f"{version}.made"
    form = "tgz" if version < "0.14" else "tar.zst"
    sha256 = pack(archive, layout(version, filler=filler), form)
    content = archive.read_bytes()
    archive.unlink()
    path = f"{base}/v{version}/ollama-linux-amd64.{form}"
    site.files[path] = content
    lines = [
        f"{'0' * 64}  ./ollama-linux-amd64-rocm.{form}",
        f"{sha256}  ./ollama-linux-amd64.{form}",
        f"{'1' * 64}  ./ollama-windows-amd64.zip",
    ]
    site.files[f"{base}/v{version}/sha256sum.txt"] = ("\n".join(lines) + "\n").encode()
    return path, content


@pytest.mark.parametrize("version", ["0.13.5", "0.23.0"])
def test_the_projects_own_release_is_proved_by_its_list(
    desk: Desk, project: Site, tmp_path: Path, version: str
) -> None:
    path, content = offer(project, tmp_path, "/project", version)
    outcome = desk.ask(version=version)
    assert outcome.faults == []
    assert (outcome.source, outcome.verified_by, outcome.bytes_fetched) == (project.url(path), "list", len(content))
    assert outcome.sha256 == hashlib.sha256(content).hexdigest()
    assert [note for note in outcome.notes if "not who made it" in note]
    assert not (desk.prefix / "downloads").exists()
    project.asked.clear()
    again = desk.ask(version=version)
    assert (again.faults, again.changed, again.verified_by) == ([], False, "list")
    assert project.asked == [], "a run with nothing to do needs no network"


def test_the_mirror_comes_first(desk: Desk, project: Site, mirror: Site, tmp_path: Path) -> None:
    path, _ = offer(mirror, tmp_path, "/ollama")
    outcome = desk.ask(version="0.23.0", mirror=mirror.url("/ollama/"))
    assert (outcome.faults, outcome.source) == ([], mirror.url(path))
    assert project.asked == []


def test_where_the_mirror_lacks_it_the_project_is_asked(
    desk: Desk, project: Site, mirror: Site, tmp_path: Path
) -> None:
    path, content = offer(project, tmp_path, "/project")
    outcome = desk.ask(version="0.23.0", mirror=mirror.url("/ollama"), sha256=hashlib.sha256(content).hexdigest())
    assert (outcome.faults, outcome.source) == ([], project.url(path))
    assert [item["code"] for item in outcome.passed_over] == ["source_missing"]


def test_wrong_bytes_of_a_mirror_are_passed_over(desk: Desk, project: Site, mirror: Site, tmp_path: Path) -> None:
    _, content = offer(project, tmp_path, "/project")
    offer(mirror, tmp_path, "/ollama", filler=b"changed")
    outcome = desk.ask(version="0.23.0", mirror=mirror.url("/ollama"), sha256=hashlib.sha256(content).hexdigest())
    assert outcome.faults == []
    assert [item["code"] for item in outcome.passed_over] == ["hash_mismatch"]


def test_nobody_has_it(desk: Desk, project: Site, mirror: Site) -> None:
    outcome = desk.ask(version="0.23.0", mirror=mirror.url("/ollama"), sha256="a" * 64)
    assert codes(outcome) == ["source_missing", "source_missing"]
    assert outcome.changed is False
    assert desk.names == []


def test_the_table_proves_the_default_release(desk: Desk, project: Site, tmp_path: Path) -> None:
    """The list beside a wrong archive does not help it."""
    offer(project, tmp_path, "/project", "0.24.0")
    outcome = desk.ask(version="0.24.0")
    assert codes(outcome) in (["hash_mismatch"], ["size_mismatch"])
    assert not [path for path, _ in project.asked if path.endswith("sha256sum.txt")]
    assert desk.names == []


def test_a_named_list_goes_before_the_table(desk: Desk) -> None:
    archive = desk.outgoing / "ollama-linux-amd64.tar.zst"
    sha256 = pack(archive, layout("0.24.0"), "tar.zst")
    sums = desk.outgoing / "sums"
    sums.write_text(f"{sha256}  ollama-linux-amd64.tar.zst\n")
    outcome = desk.ask(archive=str(archive), checksums=str(sums))
    assert (outcome.faults, outcome.verified_by) == ([], "checksums")


@pytest.mark.parametrize(
    "form",
    ["{0}  {1}", "{0}  ./{1}", "{0} *{1}", "SHA256 ({1}) = {0}", "SHA2-256({1})= {0}", "{0}", "sha256:{0}", "{2}  {1}"],
)
def test_every_form_of_a_list_is_read(desk: Desk, form: str) -> None:
    """G04."""
    archive = desk.outgoing / "ollama-linux-amd64.tgz"
    sha256 = pack(archive, layout("0.13.0"))
    text = form.format(sha256, archive.name, sha256.upper())
    (desk.outgoing / "sha256sum.txt").write_text(text + "\n")
    outcome = desk.ask(version="0.13.0", archive=str(archive))
    assert (outcome.faults, outcome.sha256, outcome.verified_by) == ([], sha256, "list")


def test_without_any_hash_nothing_is_fetched(desk: Desk, project: Site, tmp_path: Path) -> None:
    path, _ = offer(project, tmp_path, "/project")
    del project.files["/project/v0.23.0/sha256sum.txt"]
    outcome = desk.ask(version="0.23.0")
    assert codes(outcome) == ["checksum_missing"]
    assert "sha256sum.txt" in said(outcome)
    assert path not in [asked for asked, _ in project.asked]
    project.files["/project/v0.23.0/sha256sum.txt"] = b"0" * 64 + b"  ./ollama-darwin.tgz\n"
    assert "has no SHA-256 for ollama-linux-amd64.tar.zst" in said(desk.ask(version="0.23.0"))


def test_a_local_archive_with_another_hash_is_not_unpacked(desk: Desk) -> None:
    outcome = desk.bring("0.24.0", sha256="a" * 64)
    assert codes(outcome) == ["hash_mismatch"]
    assert desk.names == []
    assert codes(desk.ask(archive=str(desk.outgoing / "none.tgz"), sha256="a" * 64)) == ["source_missing"]


def test_a_broken_download_goes_on_where_it_was(desk: Desk, project: Site, tmp_path: Path) -> None:
    path, content = offer(project, tmp_path, "/project", filler=random.Random(1).randbytes(3 << 20))
    sha256 = hashlib.sha256(content).hexdigest()

    def breaking(exchange: Exchange) -> None:
        if exchange.start >= len(content) // 2:
            exchange.hang_up()
        else:
            exchange.proper(upto=max(0, len(content) // 2 - exchange.start))

    project.script = breaking
    outcome = desk.ask(version="0.23.0", sha256=sha256)
    assert codes(outcome) == ["source_unreachable"]
    assert outcome.changed is False
    project.script = Exchange.proper
    again = desk.ask(version="0.23.0", sha256=sha256)
    assert again.faults == []
    assert 0 < again.bytes_fetched < len(content)
    assert project.url(path) == again.source


def test_secrets_of_an_address_are_not_told(desk: Desk, mirror: Site) -> None:
    archive = desk.outgoing / "a.tgz"
    sha256 = pack(archive, layout("0.24.0"))
    mirror.files["/a.tgz"] = archive.read_bytes()
    outcome = desk.ask(archive=mirror.url("/a.tgz?token=hidden-word"), sha256=sha256)
    assert outcome.faults == []
    assert outcome.release is not None
    assert "hidden-word" not in str(outcome.results())
    assert "hidden-word" not in (Path(outcome.release) / releases.MANIFEST).read_text()
    assert "hidden-word" not in str(desk.ask(archive=mirror.url("/b.tgz?token=hidden-word"), sha256="b" * 64))


# --- archives that are none ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (entry("/etc/cron.d/x", b"x"), "outside"),
        (entry("bin/../../x", b"x"), "outside"),
        (entry("release.json", b"{}"), "manifest"),
        (entry("bin/ollama", b"again"), "twice"),
        (entry("lib/ollama/null", type=tarfile.CHRTYPE), "neither"),
        (entry("lib/ollama/sda", type=tarfile.BLKTYPE), "neither"),
        (entry("lib/ollama/pipe", type=tarfile.FIFOTYPE), "neither"),
        (link("lib/x.so", "/etc/passwd"), "outside"),
        (link("lib/x.so", "../../etc/passwd"), "outside"),
        (entry("lib/ollama/libggml-base.so/x", b"x"), "behind"),
        (entry("bin/ollama/x", b"x"), "behind"),
        (link("lib/x.so", "../../etc/passwd", tarfile.LNKTYPE), "outside"),
        (link("lib/x.so", "lib/none.so", tarfile.LNKTYPE), "no file"),
        (link("lib/x.so", "x.so"), "circle"),
        (link("lib/x.so", "ollama/libggml-base.so/y"), "another"),
    ],
)
def test_an_unsafe_archive_leaves_no_trace(desk: Desk, bad: tuple[tarfile.TarInfo, bytes], why: str, form: str) -> None:
    archive = desk.outgoing / "a"
    sha256 = pack(archive, [*layout("0.24.0"), bad], form)
    outcome = desk.ask(archive=str(archive), sha256=sha256)
    assert codes(outcome) == ["ollama_archive_unsafe"]
    assert why in said(outcome)
    assert (desk.names, outcome.changed) == ([], False)
    assert not desk.command.exists()


def test_an_archive_without_cuda_12_cannot_serve_v100(desk: Desk) -> None:
    archive = desk.outgoing / "a.tgz"
    entries = [(info, content) for info, content in layout("0.24.0") if "cuda_v12" not in info.name]
    sha256 = pack(archive, [*entries, entry("lib/ollama/cuda_v12", mode=0o755)])
    outcome = desk.ask(archive=str(archive), sha256=sha256)
    assert codes(outcome) == ["ollama_without_cuda_v12"]
    assert "sm_70" in said(outcome)
    assert desk.names == []
    assert desk.ask(archive=str(archive), sha256=sha256, gpu=False).faults == []


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_archive_of_ollama_is_refused(desk: Desk, form: str) -> None:
    archive = desk.outgoing / "a"
    sha256 = pack(archive, [entry("share/doc", b"x")], form)
    outcome = desk.ask(archive=str(archive), sha256=sha256)
    assert codes(outcome) == ["ollama_archive_unusable"]
    assert "holds no bin/ollama" in said(outcome)
    pack(archive, layout("0.24.0", filler=random.Random(2).randbytes(1 << 20)), form)
    archive.write_bytes(archive.read_bytes()[: -(1 << 19)])
    cut = desk.ask(archive=str(archive), sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    assert codes(cut) == ["ollama_archive_unusable"], said(cut)
    assert desk.names == []


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x28\xb5\x2f\xfdnonsense", b"\x1f\x8bnonsense", b"PK\x03\x04"])
def test_what_is_no_archive_at_all_is_refused(desk: Desk, content: bytes) -> None:
    archive = desk.outgoing / "a"
    archive.parent.mkdir()
    archive.write_bytes(content)
    outcome = desk.ask(archive=str(archive), sha256=hashlib.sha256(content).hexdigest())
    assert codes(outcome) == ["ollama_archive_unusable"]


def test_a_machine_without_zstd_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "SEARCH_PATH", "/nonexistent")
    assert codes(desk.bring("0.24.0", "tar.zst")) == ["zstd_missing"]
    monkeypatch.undo()
    assert desk.names == []


def test_a_full_disk_is_told_before_anything_is_unpacked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.os, "statvfs", lambda place: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    outcome = desk.bring("0.24.0")
    assert codes(outcome) == ["disk_full"]
    assert desk.names == []


# --- the program ---


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        (b"\x7fELF garbage", "ollama_does_not_run", "Exec format error"),
        (b"#!/bin/sh\necho broken >&2\nexit 1\n", "ollama_does_not_run", "broken"),
        (b"#!/nonexistent/sh\n", "ollama_does_not_run", "No such file"),
        (program("0.30.1"), "ollama_other_version", "says that it is 0.30.1, asked for is 0.24.0"),
        (b"#!/bin/sh\necho hello\n", "ollama_other_version", "names no version"),
    ],
)
def test_a_program_that_is_not_it_is_not_put_into_use(desk: Desk, content: bytes, code: str, why: str) -> None:
    desk.bring("0.23.0")
    archive = desk.outgoing / "a.tgz"
    entries = [item for item in layout("0.24.0") if item[0].name != "bin/ollama"]
    sha256 = pack(archive, [*entries, entry("bin/ollama", content, 0o755)])
    outcome = desk.ask(archive=str(archive), sha256=sha256)
    assert codes(outcome) == [code]
    assert why in said(outcome)
    assert [name.partition("-")[0] for name in desk.names] == ["0.23.0"]
    assert desk.link("current").startswith("0.23.0-")


@pytest.mark.parametrize(
    "lines", [["ollama version is 0.24.0"], ["ollama version is 0.11.2", "Warning: client version is 0.24.0"]]
)
def test_the_programs_own_version_counts_not_a_servers(tmp_path: Path, lines: list[str]) -> None:
    binary = tmp_path / "ollama"
    binary.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    binary.chmod(0o755)
    release.prove(binary, "0.24.0")


def test_no_server_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "10.0.0.1:11434")
    binary = tmp_path / "ollama"
    binary.write_text('#!/bin/sh\n[ "$OLLAMA_HOST" = 127.0.0.1:1 ] && echo client version is 0.24.0\n')
    binary.chmod(0o755)
    release.prove(binary, "0.24.0")


# --- interrupted ---


@pytest.mark.parametrize("where", ["prove", "check_room"])
def test_a_killed_run_is_simply_run_again(desk: Desk, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    desk.bring("0.23.0")
    before = desk.names
    pid = os.fork()
    if pid == 0:
        # Ends as a killed process does: nothing is tidied up.
        if where == "prove":
            release.prove = lambda *args: os._exit(9)
        else:
            release._check_room = lambda *args: os._exit(9)
        desk.bring("0.24.0")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    if where == "prove":
        assert [name for name in desk.names if name.startswith(".")], "what was unpacked is still there, hidden"
    assert [name for name in desk.names if not name.startswith(".")] == before
    assert desk.link("current") == before[0]
    outcome = desk.bring("0.24.0")
    assert (outcome.faults, outcome.changed) == ([], True)
    assert [name.partition("-")[0] for name in desk.names] == ["0.23.0", "0.24.0"]


# --- upgrade and back ---


def test_an_upgrade_keeps_the_one_before_and_no_more(desk: Desk) -> None:
    desk.bring("0.22.0")
    second = desk.bring("0.23.0")
    assert (desk.link("current")[:6], desk.link("previous")[:6]) == ("0.23.0", "0.22.0")
    assert (second.previous or "").startswith(str(desk.prefix / "releases/0.22.0-"))
    third = desk.bring("0.24.0")
    assert [name.partition("-")[0] for name in third.removed] == ["0.22.0"]
    assert [name.partition("-")[0] for name in desk.names] == ["0.23.0", "0.24.0"]
    assert (desk.link("current")[:6], desk.link("previous")[:6]) == ("0.24.0", "0.23.0")


def test_a_release_that_runs_is_never_removed(desk: Desk) -> None:
    first = desk.bring("0.22.0")
    assert first.release is not None
    runner = Path(first.release) / "bin/runner"
    shutil.copy("/bin/sleep", runner)
    with subprocess.Popen([runner, "60"]) as process:
        try:
            desk.bring("0.23.0")
            assert desk.bring("0.24.0").removed == []
            assert len(desk.names) == 3
            outcome = desk.ask(state="absent")
            assert (codes(outcome), outcome.changed) == (["ollama_in_use"], False)
            assert len(desk.names) == 3
        finally:
            process.kill()


def test_back_to_the_one_before(desk: Desk) -> None:
    old = desk.bring("0.23.0")
    new = desk.bring("0.24.0")
    assert desk.ask(state="previous", check_mode=True).changed is True
    assert desk.link("current").startswith("0.24.0-")
    outcome = desk.ask(state="previous")
    assert (outcome.faults, outcome.changed, outcome.switched, outcome.activated) == ([], True, True, True)
    assert (outcome.release, outcome.version, outcome.previous) == (old.release, "0.23.0", new.release)
    assert desk.link("current").startswith("0.23.0-")
    assert desk.ask(state="previous").version == "0.24.0", "and forward again"


def test_no_way_back_where_there_is_none(desk: Desk) -> None:
    assert codes(desk.ask(state="previous")) == ["ollama_release_missing"]
    desk.bring("0.23.0")
    assert codes(desk.ask(state="previous")) == ["ollama_release_missing"]


def test_the_way_back_leads_to_nothing_broken(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    old = desk.bring("0.23.0")
    desk.bring("0.24.0")
    assert old.binary is not None
    monkeypatch.setattr(
        release, "run_in", lambda *a, **k: SimpleNamespace(ok=False, missing=False, why="no libc", stderr="")
    )
    assert codes(desk.ask(state="previous")) == ["ollama_does_not_run"]
    monkeypatch.undo()
    Path(old.binary).write_bytes(b"#!/bin/sh\n")
    outcome = desk.ask(state="previous")
    assert (codes(outcome), outcome.changed) == (["ollama_release_damaged"], False)
    assert desk.link("current").startswith("0.24.0-")


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemd with one service, which runs unless the file beside it says that it cannot; what it was told."""
    folder = tmp_path / "programs"
    folder.mkdir()
    told = tmp_path / "told"
    (folder / "systemctl").write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {told}\n'
        f"broken={tmp_path}/broken\n"
        'case "$1" in\n'
        "show) if [ -e $broken ]; then printf 'ActiveState=failed\\nResult=exit-code\\nMainPID=0\\n'\n"
        f"  else printf 'ActiveState=active\\nSubState=running\\nMainPID=%s\\n' {os.getpid()}; fi ;;\n"
        "restart) if [ -e $broken ]; then echo 'Job failed.' >&2; exit 1; fi ;;\n"
        "esac\n"
    )
    (folder / "journalctl").write_text("#!/bin/sh\necho 'ollama: no libc'\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return told


def test_a_given_up_release_is_told_once_the_former_one_serves(desk: Desk, systemctl: Path) -> None:
    """F02."""
    desk.bring("0.24.0")
    new = desk.bring("0.30.5")
    outcome = desk.ask(state="previous", unit="ollama", because="the runner aborts in warm-up")
    assert codes(outcome) == ["ollama_upgrade_rolled_back"]
    assert outcome.faults[0].subject == "0.30.5"
    assert "did not pass (the runner aborts in warm-up); 0.24.0 is in use again and ollama runs" in said(outcome)
    assert str(new.release) in outcome.faults[0].remedy
    assert (outcome.changed, outcome.switched, outcome.version) == (True, True, "0.24.0")
    assert desk.link("current").startswith("0.24.0-")
    lines = systemctl.read_text().splitlines()
    assert lines[:2] == ["reset-failed ollama.service", "restart ollama.service"]


def test_a_former_release_that_does_not_start_either_is_told(desk: Desk, systemctl: Path, tmp_path: Path) -> None:
    desk.bring("0.24.0")
    desk.bring("0.30.5")
    (tmp_path / "broken").touch()
    outcome = desk.ask(state="previous", unit="ollama.service", because="it aborts")
    assert codes(outcome) == ["ollama_upgrade_rolled_back"]
    assert "0.24.0 is in use again, but ollama.service is failed (exit-code): ollama: no libc" in said(outcome)
    again = desk.ask(state="previous", unit="ollama.service")
    assert codes(again) == ["service_start_failed"]


def test_the_service_is_restarted_only_by_the_way_back(desk: Desk, systemctl: Path) -> None:
    desk.bring("0.24.0", unit="ollama.service")
    desk.bring("0.30.5", unit="ollama.service")
    desk.ask(state="previous", unit="ollama.service", check_mode=True)
    assert not systemctl.exists()
    assert desk.ask(state="previous", unit="ollama.service").faults == []


def test_a_release_that_has_served_is_known_for_it(desk: Desk) -> None:
    assert codes(desk.ask(state="passed")) == ["ollama_release_missing"]
    assert desk.ask(state="passed", check_mode=True).faults == []
    assert desk.bring("0.23.0").passed is False
    assert desk.ask(state="passed", check_mode=True).passed is False
    assert desk.bring("0.23.0").passed is False
    noted = desk.ask(state="passed")
    assert (noted.faults, noted.changed, noted.passed, noted.version) == ([], False, True, "0.23.0")
    assert desk.bring("0.23.0").passed is True
    assert desk.bring("0.24.0").passed is False, "each release for itself"
    assert desk.ask(state="previous").passed is True


# --- the command for shells, and other installations ---


def test_another_installation_is_reported_and_left(desk: Desk, tmp_path: Path) -> None:
    desk.command.parent.mkdir(parents=True)
    desk.command.write_text("the vendor's")
    package = tmp_path / "usr/bin/ollama"
    package.parent.mkdir()
    package.symlink_to("/usr/share/ollama/bin")
    outcome = desk.bring("0.24.0", elsewhere=(str(desk.command), str(package)))
    assert codes(outcome) == ["ollama_foreign_install"] * 2
    assert [fault.subject for fault in outcome.faults] == [str(desk.command), str(package)]
    assert (outcome.changed, outcome.activated) == (True, True), "a warning stops nothing"
    assert desk.command.read_text() == "the vendor's"
    assert desk.bring("0.24.0").changed is False


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("/usr/local/bin/ollama", "rm -r /usr/local/lib/ollama"),
        ("/usr/bin/ollama", "dpkg -S /usr/bin/ollama"),
        ("/snap/bin/ollama", "snap remove ollama"),
    ],
)
def test_the_report_says_how_to_remove_it(place: str, how: str) -> None:
    assert how in release._foreign(place, Path("/opt/ollama/current/bin/ollama")).remedy


def test_the_command_is_made_again_and_follows_the_switch(desk: Desk) -> None:
    desk.bring("0.23.0")
    desk.command.unlink()
    assert desk.bring("0.23.0").changed is True
    assert desk.bring("0.23.0").changed is False
    desk.bring("0.24.0")
    shown = subprocess.run([desk.command, "--version"], capture_output=True, text=True, check=True).stdout
    assert "client version is 0.24.0" in shown


def test_no_command_where_none_is_wanted(desk: Desk) -> None:
    assert desk.bring("0.24.0", command="").faults == []
    assert not desk.command.exists()


# --- absent ---


def test_absent_removes_what_is_ours_and_no_models(desk: Desk) -> None:
    desk.bring("0.23.0")
    desk.bring("0.24.0")
    models = desk.prefix / "models/blobs"
    models.mkdir(parents=True)
    assert desk.ask(state="absent", check_mode=True).changed is True
    assert len(desk.names) == 2
    outcome = desk.ask(state="absent")
    assert (outcome.faults, outcome.changed, len(outcome.removed)) == ([], True, 2)
    assert sorted(path.name for path in desk.prefix.iterdir()) == ["models"]
    assert not os.path.lexists(desk.command)
    assert desk.ask(state="absent").changed is False


def test_absent_leaves_the_command_of_others(desk: Desk) -> None:
    desk.command.parent.mkdir(parents=True)
    desk.command.write_text("the vendor's")
    desk.bring("0.24.0")
    assert desk.ask(state="absent").faults == []
    assert desk.command.exists()
    assert not desk.prefix.exists()

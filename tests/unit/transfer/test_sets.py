# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Sets as sources have them: other files elsewhere, locks, raw parts, shards, tokens, hosts that are out of reach."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer import deliver as deliver_module
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Report, Wanted, deliver_first
from ansible_collections.volta.llm.plugins.module_utils.transfer.lockfile import Lock, gather, read_lock
from ansible_collections.volta.llm.plugins.module_utils.transfer.raw_parts import missing_parts, raw_part
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import unproved, wanted_files, wanted_sets
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import headers_of, source_id, source_of
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import PartPlaces, Places

from tests.unit.gguf.build import real
from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Exchange, Site

ROOT = Path(__file__).parents[3]
HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
COMMIT = "5c1f0a7d6c7a7f0d1c6a6b9c5d3e2f1a0b9c8d7e"
SHARDS = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def some(name: str, size: int = 200_000) -> bytes:
    return b"GGUF" + random.Random(name).randbytes(size)


def deliver(desk: Desk, sets: Sequence[Sequence[Wanted]], check: bool = False, **options: Any) -> Report:
    def make(wanted: Sequence[Wanted], make_room: Callable[[], None]) -> Delivery:
        return Delivery(wanted, desk.settings, make_room=make_room, **options)

    return deliver_first(sets, make, check)[1]


def sets_of(desk: Desk, lock: Lock | None = None, **options: Any) -> list[list[Wanted]]:
    sets, faults = wanted_sets({"dest": str(desk.dest.parent), **options}, lock)
    assert faults == []
    return sets


def hub_of(site: Site, files: dict[str, bytes], lists: bool = True, commit: bool = True, linked: bool = True) -> None:
    """A hub as Hugging Face or a mirror of it: list of files, commit of main, redirect with size and hash; and as
    ModelScope, whose list has another form."""
    site.files = {}

    def script(exchange: Exchange) -> None:
        path = exchange.path
        if path.startswith("/api/v1/"):
            entries = [
                {"Path": name, "Size": len(data), "Sha256": sha256(data), "Type": "blob"}
                for name, data in files.items()
            ]
            answer(exchange, {"Code": 200, "Data": {"Files": entries}})
        elif "/tree/" in path and lists:
            answer(
                exchange,
                [
                    {"type": "file", "path": name, "size": len(data), "lfs": {"oid": sha256(data), "size": len(data)}}
                    for name, data in files.items()
                ],
            )
        elif "/revision/" in path and commit:
            answer(exchange, {"sha": COMMIT})
        elif "/resolve/" in path:
            name = path.split("/resolve/")[1].partition("/")[2]
            if name not in files:
                exchange.status(404)
                return
            data = files[name]
            extra = {"X-Linked-Size": len(data), "X-Linked-ETag": f'"{sha256(data)}"'} if linked else {}
            exchange.status(302, Location=f"/cdn/{name}", **extra)
        elif path.startswith("/cdn/"):
            exchange.content = files[path.removeprefix("/cdn/")]
            size = len(exchange.content)
            exchange.end = min(exchange.end or size, size) if exchange.ranged else size
            if exchange.ranged:
                exchange.end = min(size, int(exchange.headers["Range"].partition("-")[2] or size - 1) + 1)
            exchange.proper()
        else:
            exchange.status(404)

    site.script = script


def answer(exchange: Exchange, document: object) -> None:
    body = json.dumps(document).encode()
    exchange.head(200, Content_Length=len(body), Content_Type="application/json")
    exchange.body(body)


# -- other files elsewhere ---------------------------------------------------------------------------------------------


def test_another_hub_has_one_file_where_the_first_has_shards(site: Site, other_site: Site, desk: Desk) -> None:
    # C22: the manifest is by source and file; what falls back is the whole set.
    shards = {f"/{name}": some(name) for name in SHARDS}
    site.files = {path: data for path, data in list(shards.items())[:2]}
    whole = some("whole")
    other_site.files = {"/whole.gguf": whole}
    options = {
        "files": [{"name": path[1:], "sha256": sha256(data)} for path, data in shards.items()],
        "sources": [
            {"url": site.url("/")},
            {"url": other_site.url("/"), "files": [{"name": "whole.gguf", "sha256": sha256(whole)}]},
        ],
    }
    report = deliver(desk, sets_of(desk, **options))
    assert [fault.code for fault in report.passed_over] == ["source_missing"]
    assert [outcome.dest.name for outcome in report.files] == ["whole.gguf"]
    # Nothing of the set that was given up lies about.
    assert desk.leftovers == {"whole.gguf", "whole.gguf.stamp.json"}
    # The second run takes what is there, and does not try the first mirror again.
    asked = len(site.asked)
    report = deliver(desk, sets_of(desk, **options))
    assert not report.files[0].changed
    assert len(site.asked) == asked


def test_one_mirror_has_an_older_upload_of_the_same_names(site: Site, other_site: Site, desk: Desk) -> None:
    # C22: a file that is right by the first mirror's list is not mixed with the second's.
    names = ["a.gguf", "b.gguf"]
    new, old = ({name: some(f"{age} {name}") for name in names} for age in ("new", "old"))
    site.files = {"/a.gguf": new["a.gguf"]}
    other_site.files = {f"/{name}": data for name, data in old.items()}
    options = {
        "files": [{"name": name, "sha256": sha256(data)} for name, data in new.items()],
        "sources": [
            {"url": site.url("/")},
            {
                "url": other_site.url("/"),
                "files": [{"name": name, "sha256": sha256(data)} for name, data in old.items()],
            },
        ],
    }
    report = deliver(desk, sets_of(desk, **options))
    assert report.faults == []
    assert {name: (desk.dest.parent / name).read_bytes() for name in names} == old


def test_what_every_set_lacked_is_told(site: Site, other_site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.status(404)
    other_site.script = lambda exchange: exchange.status(503)
    report = deliver(
        desk,
        sets_of(
            desk,
            files=[{"name": "a.gguf", "sha256": HASH}],
            sources=[{"url": site.url("/")}, {"url": other_site.url("/"), "files": [{"name": "b.gguf"}]}],
        ),
    )
    assert [fault.code for fault in report.faults] == ["source_missing", "source_unreachable"]


# -- shards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", SHARDS)
def test_any_shard_stands_for_its_set_in_order(site: Site, desk: Desk, given: str) -> None:
    # C26: the engine is given the first, whichever the operator wrote.
    site.files = {f"/q/{name}": some(name) for name in SHARDS}
    report = deliver(desk, sets_of(desk, files=[{"name": given}], sources=[{"url": site.url(f"/q/{SHARDS[1]}")}]))
    assert [outcome.dest.name for outcome in report.files] == SHARDS


def test_a_shard_with_an_address_of_its_own_cannot_stand_for_others(tmp_path: Path) -> None:
    # C26
    _, faults = wanted_files({"dest": str(tmp_path), "files": [{"name": SHARDS[1], "url": "http://h/x"}]})
    assert "shards are missing: " + SHARDS[0] in faults[0].message


@pytest.mark.parametrize("first", ["m-00001-of-00003.gguf", "Q4/m-00001-of-00003.gguf"])
def test_a_copied_link_to_one_shard_leads_to_all(first: str) -> None:
    # Hugging Face puts a query behind the link that it gives out for copying.
    address = f"http://h/o/n/resolve/main/{first}?download=true"
    hub = {"type": "huggingface", "repo": "o/n", "path": f"{first}?download=true"}
    for name in SHARDS:
        place = f"/o/n/resolve/main/{first.replace(SHARDS[0], name)}"
        assert source_of({"url": address}, name, {}).url == f"http://h{place}?download=true"
        assert source_of(hub, name, {}).url == f"https://huggingface.co{place}"
    assert source_of({"url": "http://h/Q4/?token=abc"}, SHARDS[1], {}).url == f"http://h/Q4/{SHARDS[1]}?token=abc"
    odd = "http://h/my%20m-00001-of-00002.gguf"
    assert source_of({"url": odd}, "my m-00002-of-00002.gguf", {}).url == odd.replace("00001-", "00002-")


def test_a_hub_path_to_one_shard_leads_to_all() -> None:
    # C26
    spec = {"type": "huggingface", "repo": "o/n", "path": f"Q4/{SHARDS[1]}"}
    assert source_of(spec, SHARDS[0], {}).url == f"https://huggingface.co/o/n/resolve/main/Q4/{SHARDS[0]}"
    assert source_id(spec) == source_id({**spec, "path": "Q4/"})


@pytest.mark.parametrize("given", [SHARDS, SHARDS[1:2], [f"m.gguf.{letter}" for letter in "ab"]])
@pytest.mark.parametrize("own", [False, True])
def test_a_model_of_ollama_is_one_file(desk: Desk, given: list[str], own: bool) -> None:
    # C28: its store has one blob for a model; it neither pulls nor loads shards, and what to do instead is said.
    files = [{"name": name} for name in given]
    ollama = {"type": "ollama", "model": "qwen3:8b"}
    options = {
        "files": [{"name": "whole.gguf"}] if own else files,
        "sources": [{"url": "http://h/"}, {**ollama, "files": files} if own else ollama],
    }
    _, faults = wanted_sets({"dest": str(desk.dest.parent), **options})
    (fault,) = faults
    assert (fault.code, fault.subject) == ("bad_argument", "source ollama:qwen3:8b")
    assert "llama-gguf-split --merge" in fault.remedy
    assert "llama-server" in fault.remedy
    assert "twice" in fault.remedy
    # The same source with its one file is as good as any other.
    one = {**ollama, "files": [{"name": "whole.gguf"}]}
    sets_of(desk, files=files, sources=[{"url": "http://h/"}, one])


@pytest.fixture
def real_shards(tmp_path: Path) -> dict[str, bytes]:
    """A model in two shards, by name."""
    (tmp_path / "made").mkdir()
    first = real(tmp_path / "made" / "m.gguf", split_after=2)
    return {path.name: path.read_bytes() for path in sorted(first.parent.glob("*-of-*.gguf"))}


@pytest.mark.parametrize("wrong", ["swapped", "another model's", "none"])
def test_shards_that_nothing_proves_must_belong_together(
    site: Site, desk: Desk, tmp_path: Path, real_shards: dict[str, bytes], wrong: str
) -> None:
    # What gguf_info tells of a set, before any of it has a name.
    one, two = real_shards
    served = dict(real_shards)
    if wrong == "swapped":
        served = {one: real_shards[two], two: real_shards[one]}
    if wrong == "another model's":
        served[two] = real(tmp_path / "whole.gguf").read_bytes()
    site.files = {f"/{name}": data for name, data in served.items()}
    report = deliver(desk, sets_of(desk, files=[{"name": one}], sources=[{"url": site.url("/")}]))
    if wrong == "none":
        assert {fault.code for fault in report.faults} == {"unverified"}
        assert sorted(path.name for path in desk.dest.parent.glob("*.gguf")) == [one, two]
        return
    assert [fault.code for fault in report.faults] == ["gguf_shard_mismatch"]
    # Both where both are wrong.
    assert all(name in report.faults[0].message for name in ([one, two] if wrong == "swapped" else [two]))
    assert desk.leftovers == set()


def test_a_shard_under_the_name_of_a_whole_file_gets_no_name(
    site: Site, desk: Desk, real_shards: dict[str, bytes]
) -> None:
    site.files = {"/model.gguf": next(iter(real_shards.values()))}
    report = desk.order(site.url("/model.gguf"), sha256=None)
    assert [fault.code for fault in report.faults] == ["gguf_shard_mismatch"]
    assert not desk.dest.exists()


@pytest.mark.parametrize("kind", ["url", "file"])
def test_all_that_a_source_lacks_of_a_set_is_named_at_once(site: Site, desk: Desk, tmp_path: Path, kind: str) -> None:
    usb = tmp_path / "usb"
    usb.mkdir()
    (usb / SHARDS[1]).write_bytes(some(SHARDS[1]))
    site.files = {f"/{SHARDS[1]}": some(SHARDS[1])}
    files = [{"name": name, "sha256": sha256(some(name))} for name in SHARDS]
    source = {"url": site.url("/")} if kind == "url" else {"file": f"{usb}/"}
    report = deliver(desk, sets_of(desk, files=files, sources=[source]))
    assert [fault.code for fault in report.faults] == ["source_missing"]
    assert SHARDS[0] in report.faults[0].message + report.faults[0].subject
    assert f"not there either: {SHARDS[2]}" in report.faults[0].message


# -- raw parts ---------------------------------------------------------------------------------------------------------

#: Compressed, not cut.
PACKED = ["m.gguf.gz", "m.gguf.xz", "m.gguf.GZ", "m.gguf.zst", "m.gguf.bz2", "m.gguf.part", "m.gguf.split"]
STYLES = [
    ("m.gguf.a", "m.gguf.b", "m.gguf.c"),
    ("m.gguf.aa", "m.gguf.ab", "m.gguf.ac"),
    ("m.gguf.00", "m.gguf.01", "m.gguf.02"),
    ("m.gguf.1", "m.gguf.2", "m.gguf.3"),
    ("m.gguf.part1of3", "m.gguf.part2of3", "m.gguf.part3of3"),
    ("m.gguf-split-a", "m.gguf-split-b", "m.gguf-split-c"),
    ("m.gguf-part-a", "m.gguf-part-b", "m.gguf-part-c"),
    ("m.gguf.part-00001-of-00003", "m.gguf.part-00002-of-00003", "m.gguf.part-00003-of-00003"),
    ("m.gguf.0001", "m.gguf.0002", "m.gguf.0003"),
    ("m.gguf.part_1", "m.gguf.part_2", "m.gguf.part_3"),
    ("m.gguf.part.01", "m.gguf.part.02", "m.gguf.part.03"),
    ("m.gguf.partaaa", "m.gguf.partaab", "m.gguf.partaac"),
    ("m.gguf.split-1", "m.gguf.split-2", "m.gguf.split-3"),
]


@pytest.mark.parametrize("names", STYLES)
def test_raw_parts_are_known_by_their_names(names: tuple[str, ...]) -> None:
    # C18
    parts = [raw_part(name) for name in names]
    assert {part.whole for part in parts} == {"m.gguf"}
    assert missing_parts(parts) is None
    assert missing_parts([parts[0], parts[2]]) is not None
    assert missing_parts([parts[0], parts[0]]) is not None


@pytest.mark.parametrize("name", ["m.gguf", SHARDS[0], "m.gguf.sha256", "m.bin.a", "m.gguf.abc", ".gguf.a", *PACKED])
def test_what_is_no_raw_part(name: str) -> None:
    assert raw_part(name) is None


def cut(data: bytes, names: Sequence[str]) -> dict[str, bytes]:
    at = [len(data) * number // len(names) for number in range(len(names) + 1)]
    return {f"/{name}": data[at[number] : at[number + 1]] for number, name in enumerate(names)}


@pytest.mark.parametrize("names", [STYLES[0], STYLES[4]])
@pytest.mark.parametrize("proof", ["whole", "parts", "none"])
def test_raw_parts_are_joined(site: Site, desk: Desk, tmp_path: Path, names: tuple[str, ...], proof: str) -> None:
    # C18: part 2 has no magic, and that is right; each part has its hash, the sum its own.
    data = real(tmp_path / "whole.gguf").read_bytes() if proof == "none" else CONTENT
    site.files = cut(data, names)
    # Out of order on purpose.
    files: list[dict[str, Any]] = [{"name": name} for name in reversed(names)]
    if proof == "parts":
        files = [{"name": path[1:], "sha256": sha256(part), "size": len(part)} for path, part in site.files.items()]
    if proof == "whole":
        files.append({"name": "m.gguf", "sha256": sha256(data)})
    options = {"files": files, "sources": [{"url": site.url("/")}]}
    (wanted,) = sets_of(desk, **options)
    assert [item.dest.name for item in wanted] == ["m.gguf"]
    assert bool(unproved(wanted, True)) == (proof == "none")
    report = deliver(desk, [wanted])
    assert (desk.dest.parent / "m.gguf").read_bytes() == data
    assert report.files[0].fetched == len(data)
    assert report.files[0].sha256 == sha256(data)
    assert [fault.code for fault in report.faults] == (["unverified"] if proof == "none" else [])
    assert desk.leftovers == {"m.gguf", "m.gguf.stamp.json"}
    asked = len(site.asked)
    assert not deliver(desk, sets_of(desk, **options)).files[0].changed
    assert len(site.asked) == asked


def test_raw_parts_go_on_where_they_broke_off(site: Site, desk: Desk) -> None:
    names = STYLES[0]
    site.files = cut(CONTENT, names)
    options = {
        "files": [{"name": path[1:], "sha256": sha256(part), "size": len(part)} for path, part in site.files.items()],
        "sources": [{"url": site.url("/")}],
    }
    third = site.files["/m.gguf.c"]
    site.files["/m.gguf.c"] = third[:-1]
    report = deliver(desk, sets_of(desk, **options))
    assert [fault.code for fault in report.faults] == ["size_mismatch"]
    site.files["/m.gguf.c"] = third
    report = deliver(desk, sets_of(desk, **options))
    assert report.files[0].fetched == len(third)
    assert (desk.dest.parent / "m.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", ["part", "sum", "size"])
def test_wrong_raw_parts_get_no_name(site: Site, desk: Desk, wrong: str) -> None:
    names = STYLES[0]
    site.files = cut(CONTENT, names)
    files: list[dict[str, Any]] = [{"name": name} for name in names]
    if wrong == "part":
        files[1]["sha256"] = HASH
    else:
        files.append({"name": "m.gguf", "size" if wrong == "size" else "sha256": 17 if wrong == "size" else HASH})
    report = deliver(desk, sets_of(desk, files=files, sources=[{"url": site.url("/")}]))
    assert [fault.code for fault in report.faults] == ["size_mismatch" if wrong == "size" else "hash_mismatch"]
    assert not (desk.dest.parent / "m.gguf").exists()


def test_a_missing_raw_part_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    # C18
    files = [{"name": "m.gguf.part1of3"}, {"name": "m.gguf.part3of3"}]
    _, faults = wanted_files({"dest": str(tmp_path), "files": files})
    assert [fault.message for fault in faults] == ["missing: part 2"]


def test_raw_parts_from_a_folder_on_the_machine(desk: Desk, tmp_path: Path) -> None:
    usb = tmp_path / "usb"
    usb.mkdir()
    for path, part in cut(CONTENT, STYLES[2]).items():
        (usb / path[1:]).write_bytes(part)
    files = [*({"name": name} for name in STYLES[2]), {"name": "m.gguf", "sha256": SHA256}]
    report = deliver(desk, sets_of(desk, files=files, sources=[{"file": str(usb)}]))
    assert report.faults == []
    assert (desk.dest.parent / "m.gguf").read_bytes() == CONTENT


def test_a_part_s_state_is_its_own_and_its_bytes_are_the_whole_s(tmp_path: Path) -> None:
    whole = Places(tmp_path / "m.gguf")
    part = PartPlaces(tmp_path / "m.gguf.b", whole)
    assert part.part == whole.part
    assert part.state != whole.state


# -- locks -------------------------------------------------------------------------------------------------------------


def hub_spec(site: Site, **more: Any) -> dict[str, Any]:
    return {"type": "huggingface", "repo": "org/name", "endpoint": site.url(""), "path": "Q4/", **more}


@pytest.mark.parametrize("tells", ["list", "redirect"])
def test_a_lock_holds_what_the_hub_says(site: Site, desk: Desk, tells: str) -> None:
    # C12, C24: the revision is pinned to a commit; a mirror without a list still tells by its redirect.
    files = {f"Q4/{name}": some(name) for name in SHARDS}
    hub_of(site, files, lists=tells == "list", linked=tells == "redirect")
    lock = lock_of(desk, hub_spec(site))
    (locked,) = lock.sources
    assert (locked.revision, locked.commit) == ("main", COMMIT)
    # What is locked is of that commit, though the branch may have moved meanwhile.
    asked = [path for path, _ in site.asked if "/tree/" in path or "/resolve/" in path]
    assert asked
    assert all(COMMIT in path for path in asked)
    assert [(entry.sha256, entry.size) for entry in locked.files] == [
        (sha256(data), len(data)) for data in files.values()
    ]
    (wanted,) = sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[hub_spec(site)])
    site.asked.clear()
    report = deliver(desk, [wanted])
    verdicts = {outcome.verified(item) for item, outcome in zip(wanted, report.files, strict=True)}
    assert verdicts == {"sha256"}
    # From then on the commit is asked for, not the branch.
    assert all(COMMIT in path for path, _ in site.asked if "/resolve/" in path)


def test_a_mirror_that_tells_nothing_of_a_commit_keeps_its_revision(site: Site, desk: Desk) -> None:
    # C14: no commit from the mirror; the hash decides.
    hub_of(site, {f"Q4/{name}": some(name) for name in SHARDS}, commit=False)
    (locked,) = lock_of(desk, hub_spec(site)).sources
    assert (locked.revision, locked.commit) == ("main", None)


def test_modelscope_is_asked_in_its_own_words(site: Site, desk: Desk) -> None:
    files = {name: some(name) for name in SHARDS}
    hub_of(site, files)
    spec = {"type": "modelscope", "repo": "org/name", "endpoint": site.url("")}
    lock = lock_of(desk, spec)
    assert [entry.sha256 for entry in lock.sources[0].files] == [sha256(data) for data in files.values()]
    report = deliver(desk, sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[spec]))
    assert report.faults == []
    assert {path.split("/resolve/")[0] for path, _ in site.asked if "/resolve/" in path} == {"/models/org/name"}


def test_each_source_s_own_hashes_are_locked(site: Site, other_site: Site, desk: Desk) -> None:
    # C22: keyed by source and file.
    new, old = ({f"Q4/{name}": some(f"{age} {name}") for name in SHARDS} for age in ("new", "old"))
    hub_of(site, new)
    hub_of(other_site, old)
    specs = [hub_spec(site), hub_spec(other_site)]
    lock = lock_of(desk, *specs)
    site.script = lambda exchange: exchange.status(503)
    report = deliver(desk, sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=specs))
    assert [fault.code for fault in report.passed_over] == ["source_unreachable"]
    assert [outcome.sha256 for outcome in report.files] == [sha256(data) for data in old.values()]


def test_a_source_that_is_not_in_the_lock_must_have_what_the_lock_says(
    site: Site, other_site: Site, desk: Desk
) -> None:
    files = {f"Q4/{name}": some(name) for name in SHARDS}
    hub_of(site, files)
    lock = lock_of(desk, hub_spec(site))
    other_site.files = {f"/{name}": some("other " + name) for name in SHARDS}
    mirror = {"url": other_site.url("/")}
    report = deliver(desk, sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[mirror]))
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    other_site.files = {f"/{name}": data for name, data in zip(SHARDS, files.values(), strict=True)}
    assert deliver(desk, sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[mirror])).faults == []


def test_a_publisher_s_new_upload_is_not_accepted(site: Site, desk: Desk) -> None:
    # C24: a mismatch is fatal.
    hub_of(site, {f"Q4/{name}": some(name) for name in SHARDS}, commit=False)
    lock = lock_of(desk, hub_spec(site))
    hub_of(site, {f"Q4/{name}": some("new " + name) for name in SHARDS}, commit=False)
    report = deliver(desk, sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[hub_spec(site)]))
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    assert not list(desk.dest.parent.glob("*.gguf"))


def test_settings_that_contradict_the_lock_are_refused_all_at_once(site: Site, desk: Desk) -> None:
    hub_of(site, {f"Q4/{name}": some(name) for name in SHARDS})
    lock = lock_of(desk, hub_spec(site))
    files = [
        {"name": SHARDS[0], "sha256": HASH},
        {"name": SHARDS[1], "size": 1},
        {"name": SHARDS[2]},
        {"name": "x.gguf"},
    ]
    _, faults = wanted_sets(
        {"dest": str(desk.dest.parent), "files": files, "sources": [hub_spec(site, revision="other")]}, lock
    )
    assert {fault.code for fault in faults} == {"lock_mismatch"}
    assert len(faults) == 4
    assert all("model_lock.yml" in fault.remedy for fault in faults)
    # The commit itself is no contradiction.
    sets_of(desk, lock, files=[{"name": SHARDS[0]}], sources=[hub_spec(site, revision=COMMIT)])


def test_a_source_that_does_not_answer_is_left_out_of_the_lock(site: Site, other_site: Site, desk: Desk) -> None:
    hub_of(site, {f"Q4/{name}": some(name) for name in SHARDS})
    other_site.script = lambda exchange: exchange.status(503)
    gathered = gather([{"name": SHARDS[0]}], [hub_spec(other_site), hub_spec(site)], desk.settings, {})
    assert gathered.faults == []
    assert [source.id for source in gathered.lock.sources] == [source_id(hub_spec(site))]
    assert len(gathered.notes) == 1
    gathered = gather([{"name": SHARDS[0]}], [hub_spec(other_site)], desk.settings, {})
    assert [fault.code for fault in gathered.faults] == ["source_unreachable"]
    gathered = gather([{"name": "x.gguf"}], [hub_spec(site)], desk.settings, {})
    assert [fault.code for fault in gathered.faults] == ["source_missing"]


def test_a_gated_repository_ends_the_locking(site: Site, other_site: Site, desk: Desk) -> None:
    # C34
    site.script = lambda exchange: exchange.status(401)
    with pytest.raises(FaultError) as caught:
        gather([{"name": "a.gguf"}], [hub_spec(site, token="secret-token"), hub_spec(other_site)], desk.settings, {})
    assert caught.value.fault.code == "source_unauthorized"
    assert "secret-token" not in str(caught.value.fault)
    assert other_site.asked == []


@pytest.mark.parametrize(("status", "why"), [(403, "GatedRepo"), (401, "RepoNotFound")])
def test_a_hub_s_reason_ends_the_locking(site: Site, other_site: Site, desk: Desk, status: int, why: str) -> None:
    # C34
    site.script = lambda exchange: exchange.status(status, X_Error_Code=why)
    with pytest.raises(FaultError) as caught:
        gather([{"name": "a.gguf"}], [hub_spec(site), hub_spec(other_site)], desk.settings, {})
    assert caught.value.fault.code == "source_unauthorized"
    assert ("licence" if why == "GatedRepo" else "private") in caught.value.fault.message
    assert other_site.asked == []


def test_plain_addresses_are_locked_by_a_checksum_file_or_not_at_all(site: Site, desk: Desk) -> None:
    site.files["/SHA256SUMS"] = f"{SHA256} *model.gguf\n".encode()
    mirror = {"url": site.url("/")}
    gathered = gather([{"name": "model.gguf"}], [mirror], desk.settings, {}, checksums=site.url("/SHA256SUMS"))
    assert {entry.sha256 for source in gathered.lock.sources for entry in source.files} == {SHA256}
    gathered = gather([{"name": "model.gguf"}], [mirror], desk.settings, {})
    assert [fault.code for fault in gathered.faults] == ["not_locked"]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"version": 2, "sources": []},
        {"version": 1, "sources": []},
        {"version": 1, "sources": [{"files": []}]},
        {"version": 1, "sources": [{"id": "a", "files": [{"sha256": HASH}]}]},
        {"version": 1, "sources": [{"id": "a", "files": [{"name": "../a", "sha256": HASH}]}]},
        {
            "version": 1,
            "sources": [{"id": "a", "files": [{"name": "a", "sha256": "d41d8cd98f00b204e9800998ecf8427e"}]}],
        },
        {"version": 1, "sources": [{"id": "a", "files": [{"name": "a", "size": "12 GB"}]}]},
        {"version": 1, "sources": [{"id": "a", "files": ["a"]}]},
        {"version": 1, "sources": 3},
        {"version": 1, "sources": {"id": "a"}},
        {"version": 1, "sources": [{"id": "a", "files": 3}]},
        {"version": 1, "sources": [{"id": "a", "files": [{"name": "a", "path": 3, "sha256": HASH}]}]},
    ],
)
def test_what_is_no_lock(document: Any) -> None:
    with pytest.raises(FaultError) as caught:
        read_lock(document)
    assert caught.value.fault.code == "lock_invalid"


def test_files_that_nothing_proves(desk: Desk) -> None:
    (wanted,) = sets_of(desk, files=[{"name": "a.gguf", "sha256": HASH}, {"name": "b.gguf"}])
    (fault,) = unproved(wanted, True)
    assert (fault.code, fault.message) == ("not_locked", "no SHA-256 for b.gguf")


def lock_of(desk: Desk, *specs: dict[str, Any]) -> Lock:
    gathered = gather([{"name": name} for name in SHARDS], specs, desk.settings, {})
    assert gathered.faults == [], [fault.message for fault in gathered.faults]
    # As it comes back from the file.
    return read_lock(json.loads(json.dumps(gathered.lock.as_dict())))


# -- tokens and hosts --------------------------------------------------------------------------------------------------


def test_a_token_is_for_one_hub() -> None:
    # C34: no other hub, no mirror, no plain address sees it.
    hub = {"type": "huggingface", "repo": "o/n"}
    sent = [
        headers_of(spec, {}, "secret").get("Authorization")
        for spec in (
            hub,
            {**hub, "endpoint": "https://mirror.example.org"},
            {**hub, "endpoint": "https://mirror.example.org", "token": "own"},
            {"type": "modelscope", "repo": "o/n"},
            {"url": "http://h/"},
        )
    ]
    assert sent == ["Bearer secret", None, "Bearer own", None, None]


@pytest.mark.parametrize("named", ["127.0.0.1", "0.0.1"])
def test_a_redirect_to_a_host_declared_unreachable_ends_at_once(site: Site, desk: Desk, named: str) -> None:
    # C14: a mirror answers 308 back to the hub it stands for.
    import dataclasses

    site.script = lambda exchange: exchange.status(308, Location=f"http://127.0.0.1:{site.port}/model.gguf?x=1")
    settings = dataclasses.replace(desk.settings, unreachable=(named,))
    url = f"http://localhost:{site.port}/model.gguf"
    wanted = [Wanted(desk.dest, None, SHA256, (source_of({"url": url}, "model.gguf", {}),))]
    report = Delivery(wanted, settings).run()
    (fault,) = report.faults
    assert fault.code == "source_unreachable"
    assert "127.0.0.1, which is declared unreachable" in fault.message
    assert len(site.asked) == 1


def test_a_host_declared_unreachable_is_not_asked(site: Site, desk: Desk) -> None:
    # C14
    import dataclasses

    settings = dataclasses.replace(desk.settings, unreachable=("127.0.0.1",))
    report = Delivery([Wanted(desk.dest, None, SHA256, (source_of({"url": site.url("/m")}, "m", {}),))], settings).run()
    assert [fault.code for fault in report.faults] == ["source_unreachable"]
    assert site.asked == []


# -- what lies around --------------------------------------------------------------------------------------------------


WRITES = """
import json, os, sys
written = []
def note(event, args):
    if event == "open" and args[2] and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(os.fsdecode(args[0]) if not isinstance(args[0], int) else "")
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"):
        written.extend(os.fsdecode(path) for path in args[:2] if isinstance(path, (str, bytes, os.PathLike)))
sys.dont_write_bytecode = True
sys.addaudithook(note)
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import wanted_files
wanted, faults = wanted_files(json.loads(sys.argv[1]))
report = Delivery(wanted, Settings()).run()
print(json.dumps([report.files[0].changed, sorted({os.path.abspath(path) for path in written if path})]))
"""


@pytest.mark.parametrize("kind", ["huggingface", "modelscope", "url"])
def test_nothing_is_written_but_in_the_destination(site: Site, tmp_path: Path, kind: str) -> None:
    # C32: no cache of a hub's own tool on another file system, whatever the environment names. Seen by the interpreter
    # itself, so that it does not matter where a cache would be.
    dest = tmp_path / "models" / "model.gguf"
    home = tmp_path / "home"
    home.mkdir()
    hub_of(site, {"model.gguf": CONTENT})
    if kind == "url":
        site.files["/model.gguf"], site.script = CONTENT, Exchange.proper
    spec = {"url": {"url": site.url("/model.gguf")}}.get(
        kind, {"type": kind, "repo": "org/name", "endpoint": site.url("")}
    )
    names = ("HOME", "HF_HOME", "HF_XET_CACHE", "XDG_CACHE_HOME", "MODELSCOPE_CACHE", "TMPDIR")
    done = subprocess.run(
        [sys.executable, "-c", WRITES, json.dumps({"dest": str(dest), "sha256": SHA256, "sources": [spec]})],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".collections"), **{name: str(home) for name in names}},
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    changed, written = json.loads(done.stdout)
    assert changed
    assert str(dest) + ".part" in written
    assert [path for path in written if not Path(path).is_relative_to(dest.parent)] == []
    assert list(home.rglob("*")) == []
    assert {path.name for path in tmp_path.iterdir()} == {"models", "home"}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the test's own."""
    folder = Path("/dev/shm") / f"volta-test-{os.getpid()}"
    folder.mkdir()
    try:
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("the temporary folder lies on the file system of /dev/shm: there is no second one")
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("short", ["first", "second", None])
def test_room_is_looked_for_on_each_file_system(
    site: Site, desk: Desk, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, short: str | None
) -> None:
    # C32: where one of two is too small, that one is named, and nothing is fetched to the other either.
    places = {"first": desk.dest.parent, "second": elsewhere}
    free = {place.stat().st_dev: 10**9 for place in places.values()}
    if short is not None:
        free[places[short].stat().st_dev] = 0
    monkeypatch.setattr(deliver_module, "_free", lambda folder: free[folder.stat().st_dev])
    site.files = {"/m": CONTENT}
    source = source_of({"url": site.url("/m")}, "m", {})
    wanted = [Wanted(place / "model.gguf", len(CONTENT), SHA256, (source,)) for place in places.values()]
    if short is None:
        assert Delivery(wanted, desk.settings).run().faults == []
        return
    with pytest.raises(FaultError) as caught:
        Delivery(wanted, desk.settings).run()
    assert (caught.value.fault.code, caught.value.fault.subject) == ("disk_full", str(places[short]))
    assert site.asked == []


@pytest.mark.parametrize(
    ("there", "free", "fits"),
    [
        # Each of three would fit by itself: it is the sum that counts, and a margin with it.
        (0, 3 * len(CONTENT), False),
        (0, 3 * len(CONTENT) + (16 << 20) - 1, False),
        (0, 3 * len(CONTENT) + (16 << 20), True),
        # What an earlier run has brought is not missing.
        (1 << 20, 3 * len(CONTENT) - (1 << 20) + (16 << 20), True),
        (1 << 20, 3 * len(CONTENT) - (1 << 20) + (16 << 20) - 1, False),
    ],
)
def test_room_is_needed_for_all_that_is_missing_with_a_margin(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch, there: int, free: int, fits: bool
) -> None:
    # C32
    monkeypatch.setattr(deliver_module, "_free", lambda folder: free)
    site.files = {f"/{name}": CONTENT for name in SHARDS}
    files = [{"name": name, "size": len(CONTENT), "sha256": SHA256} for name in SHARDS]
    (wanted,) = sets_of(desk, files=files, sources=[{"url": site.url("/")}])
    if there:
        part = Places(wanted[0].dest).part
        part.write_bytes(CONTENT[:there])
        assert part.stat().st_blocks * 512 == there
    if fits:
        assert deliver(desk, [wanted]).faults == []
        return
    with pytest.raises(FaultError) as caught:
        deliver(desk, [wanted])
    assert caught.value.fault.code == "disk_full"
    assert site.asked == []


def test_a_full_disk_names_what_nobody_needs(site: Site, desk: Desk) -> None:
    # C08: orphans of `hf download`, named by etag and a random id.
    orphan = desk.dest.parent / ".cache" / "huggingface" / "download" / "Q4" / f"{HASH}.0a1b2c3d.incomplete"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x" * 5000)
    with pytest.raises(FaultError) as caught:
        desk.order(site.url("/model.gguf"), size=10**18)
    assert caught.value.fault.code == "disk_full"
    assert str(orphan) in caught.value.fault.remedy

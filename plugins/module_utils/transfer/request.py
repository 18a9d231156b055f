# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the module's options to the files that are wanted, with every mistake named at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..faults import Fault, FaultError
from ..gguf.shards import shard_name
from ..headers import sendable, unfit_header, unfit_value
from .catalogue import fault
from .checksums import checksum_for, look_up
from .deliver import Wanted, proved_by_hash
from .engine import Settings
from .http import plain, redact, trusting
from .lockfile import Lock, check_against
from .ollama_store import manifest_path
from .raw_parts import RawPart, missing_parts, raw_part
from .sources import HUBS, Source, check_url, hub_of, kind_of, read_checksum_file, source_id, source_of
from .store import Places

#: Bytes of a file's name; what is kept beside the file has longer ones, up to C(.progress.json.new).
LONGEST_NAME = 255 - len(".progress.json.new")


def wanted_files(params: Mapping[str, Any]) -> tuple[list[Wanted], list[Fault]]:
    """The files of the first set, and what is wrong with the options (then nothing should be done)."""
    sets, faults = wanted_sets(params)
    return (sets[0] if sets else []), faults


def wanted_sets(params: Mapping[str, Any], lock: Lock | None = None) -> tuple[list[list[Wanted]], list[Fault]]:
    """The sets that would do, in order of preference; one delivered whole is enough. And what is wrong.

    All sources that have the same files make one set. A source has files of its own where its entry lists them, or
    where the lock says that it has other bytes.
    """
    unfit = _unfit_path(str(params["dest"]))
    if unfit:
        return [], [_bad("dest", unfit, "Write the path of a file or folder that the file system can have.")]
    faults: list[Fault] = []
    dest = Path(params["dest"])
    single = not params.get("files")
    headers = sendable(params.get("headers"))
    token = params.get("token")
    faults += _unfit(params, "")
    if params.get("ca_path"):
        try:
            trusting(params["ca_path"])
        except FaultError as exc:
            faults.append(exc.fault)
    if single:
        if dest.is_dir():
            faults.append(_bad("dest", f"{dest} is a folder", "Name the file, or give files[] to fill a folder."))
        entries: list[dict[str, Any]] = [
            {
                "name": dest.name,
                "size": params.get("size"),
                "sha256": params.get("sha256"),
                "url": params.get("url"),
            }
        ]
        folder = dest.parent
    else:
        entries, folder = whole_sets(params["files"]), dest
        for option in ("url", "size", "sha256"):
            if params.get(option) is not None:
                faults.append(_bad(option, "is for a single file", f"With files[], write {option} in each entry."))
    specs = list(params.get("sources") or [])
    chosen: list[tuple[list[dict[str, Any]], list[Mapping[str, Any] | None]]] = []
    urls = any(entry.get("url") or entry.get("urls") for entry in entries)
    for spec in [*([None] if urls or not specs else []), *specs]:
        faults += _unfit(spec or {}, "source ")
        own, found = _own_entries(spec, entries, lock)
        faults += found + _not_one_file(spec, own)
        same = next((group for group in chosen if _same_files(group[0], own)), None)
        if same is None:
            chosen.append((own, [spec]))
        else:
            same[1].append(spec)
    sets = []
    for own, group in chosen:
        wanted, found = _one_set(own, group, folder, headers, token, lock)
        sets.append(wanted)
        # The same mistake in several sets is one mistake.
        faults += [item for item in found if item not in faults]
    return sets, list(dict.fromkeys(faults))


def whole_sets(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries in order, a shard that stands alone for its set replaced by all of it, first shard first."""
    out: list[dict[str, Any]] = []
    sets: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        named = shard_name(str(entry["name"]))
        if named is not None:
            sets.setdefault((named.stem, named.count), []).append(entry)
    for entry in entries:
        named = shard_name(str(entry["name"]))
        given = sets.get((named.stem, named.count), []) if named is not None else []
        if named is None or len(given) > 1 or entry.get("url") or entry.get("urls"):
            out.append(dict(entry))
            continue
        out += [dict(entry) if name == entry["name"] else {"name": name} for name in named.all]
    return out


def _unfit(given: Mapping[str, Any], where: str) -> list[Fault]:
    """Headers and a token that cannot be sent; the message never holds their values."""
    found = [problem] if (problem := unfit_header(given.get("headers"))) is not None else []
    token = unfit_value(str(given.get("token") or "").strip())
    found += [("token", token)] if token else []
    if where and found:
        where += str(given.get("repo") or redact(str(given.get("url") or ""))) + ": "
    return [
        _bad(
            f"{where}{subject}",
            message,
            "Write each value on one line, in the characters that it was given out with (headers as NAME: VALUE).",
        )
        for subject, message in found
    ]


def _own_entries(
    spec: Mapping[str, Any] | None, entries: list[dict[str, Any]], lock: Lock | None
) -> tuple[list[dict[str, Any]], list[Fault]]:
    """What a source's files are: its own list or the common one, with what the lock says."""
    own = whole_sets(spec["files"]) if spec is not None and spec.get("files") else [dict(entry) for entry in entries]
    if lock is None or (spec is not None and spec_problem(spec)):
        # What is wrong with an entry is said where its source is made.
        return own, []
    locked, faults = check_against(lock, spec, own)
    for entry in own:
        name = str(entry["name"])
        holds = (locked.file(name) if locked is not None else None) or lock.any_file(name)
        if holds is not None:
            entry["size"] = holds.size if entry.get("size") is None else entry["size"]
            entry["sha256"] = entry.get("sha256") or holds.sha256
    return own, faults


def _not_one_file(spec: Mapping[str, Any] | None, own: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Ollama has one blob of weights for a model (ollama#5245): every file of a set would be that one."""
    if spec is None or kind_of(spec) != "ollama" or not spec.get("model") or len(own) < 2:
        return []
    return [
        _bad(
            f"source {source_id(spec)}",
            f"is one file, and {len(own)} are wanted: Ollama neither pulls nor loads a GGUF in shards",
            "Give this source `files` of its own with one name. To serve the shards take llama-server; for Ollama join "
            "them with llama-gguf-split --merge, which needs room for the model twice.",
        )
    ]


def _unfit_path(path: str, longest: int = 255) -> str | None:
    """Why no file system can have a path, or null; ``longest`` in bytes, of the last name in it."""
    if "\0" in path:
        return "has a NUL character in it"
    lengths = [len(os.fsencode(name)) for name in path.rstrip("/").split("/")]
    if max(lengths) > 255 or lengths[-1] > longest:
        return f"has a name of {max(lengths)} bytes in it; there is room for {longest}"
    if sum(lengths) + len(lengths) > 4000:
        return f"has {sum(lengths) + len(lengths)} bytes; there is room for 4000"
    return None


def _same_files(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    def shown(entries: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        return [(entry["name"], entry.get("size"), entry.get("sha256")) for entry in entries]

    return shown(one) == shown(other)


def _one_set(
    entries: Sequence[Mapping[str, Any]],
    specs: Sequence[Mapping[str, Any] | None],
    folder: Path,
    headers: Mapping[str, str],
    token: str | None,
    lock: Lock | None,
) -> tuple[list[Wanted], list[Fault]]:
    faults: list[Fault] = []
    wanted: list[Wanted] = []
    for entry in entries:
        name = str(entry["name"])
        if not name or "/" in name or name in (".", "..") or name.endswith(".part"):
            faults.append(_bad(f"files: {name}", "is not a plain file name", "Write the name without a folder."))
            continue
        unfit = _unfit_path(name, LONGEST_NAME)
        if unfit:
            faults.append(_bad(f"files: {plain(name, 60)}", unfit, "Give the file a shorter, plain name."))
            continue
        wanted.append(_wanted(entry, folder / name, specs, headers, token, faults, lock))
    faults += _shard_faults([item.dest.name for item in wanted])
    faults += _same_place(wanted)
    wanted = _joined(wanted, faults)
    counts = {len(item.sources) for item in wanted}
    if len(counts) > 1:
        faults.append(
            _bad(
                "files",
                "the entries have different numbers of sources",
                "Give each file one url per mirror, in the same order: a mirror serves the whole set or nothing.",
            )
        )
    return wanted, faults


def _same_place(wanted: Sequence[Wanted]) -> list[Fault]:
    """Several files that are to come from one place, and one name for several: all would be the same bytes."""
    names = [item.dest.name for item in wanted]
    faults = [
        _bad(f"files: {name}", "is listed more than once", "List each file once.")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    wholes = {part.whole for name in names if (part := raw_part(name)) is not None}
    asked: dict[tuple[str, str], dict[str, Wanted]] = {}
    for item in wanted:
        # A whole only proves its parts; Ollama and the control node are judged elsewhere.
        for source in item.sources if item.dest.name not in wholes else ():
            if source.kind not in ("ollama", "controller"):
                asked.setdefault((source.label, source.url or source.path or ""), {})[item.dest.name] = item
    for (label, _), items in asked.items():
        same = {item.sha256 for item in items.values()}
        if len(items) > 1 and (len(same) > 1 or None in same):
            faults.append(
                _bad(
                    f"source {label}",
                    f"is one file, and {', '.join(items)} are wanted from it",
                    "Give each file an address of its own, or the folder that they are in, with / at its end.",
                )
            )
    return faults


def _joined(wanted: list[Wanted], faults: list[Fault]) -> list[Wanted]:
    """Raw parts put together: one file in place of them, which an entry with the whole's own name can prove."""
    parts: dict[str, list[tuple[RawPart, Wanted]]] = {}
    for item in wanted:
        part = raw_part(item.dest.name)
        if part is not None:
            parts.setdefault(part.whole, []).append((part, item))
    out: list[Wanted] = []
    wholes = set(parts)
    for item in wanted:
        part = raw_part(item.dest.name)
        if part is None and item.dest.name in wholes:
            continue
        if part is None:
            out.append(item)
            continue
        if whole := parts.pop(part.whole, []):
            problem = missing_parts([place for place, _ in whole])
            if problem:
                faults.append(_bad(f"files: {part.whole}", problem, "List all parts of the file, in their order."))
            ordered = [each for _, each in sorted(whole, key=lambda pair: pair[0].number)]
            stated = next((each for each in wanted if each.dest.name == part.whole), None)
            sizes = [each.size for each in ordered]
            total = sum(size for size in sizes if size is not None) if None not in sizes else None
            if stated is not None and stated.size is not None and total not in (None, stated.size):
                faults.append(
                    _bad(
                        f"files: {part.whole}",
                        f"has {stated.size} bytes, its parts have {total} together",
                        "List all parts of the file, and its size right.",
                    )
                )
            out.append(
                Wanted(
                    item.dest.with_name(part.whole),
                    stated.size if stated is not None and stated.size is not None else total,
                    stated.sha256 if stated is not None else None,
                    ordered[0].sources,
                    tuple(ordered),
                )
            )
    return out


def with_checksums(
    wanted: list[Wanted], place: str, settings: Settings, headers: Mapping[str, str]
) -> tuple[list[Wanted], list[Fault]]:
    """The files with the hashes that a checksum file has for those without one. FaultError: checksum_missing."""
    if all(proved_by_hash(item) for item in wanted):
        return wanted, []
    text = read_checksum_file(place, settings, headers)
    alone = sum(not item.sha256 for item in wanted) == 1
    filled = []
    for item in wanted:
        # A hash without a name is that of the whole.
        parts = tuple(
            replace(part, sha256=part.sha256 or checksum_for(text, part.dest.name, alone=False)) for part in item.parts
        )
        filled.append(replace(item, sha256=item.sha256 or checksum_for(text, item.dest.name, alone), parts=parts))
    faults = [
        fault(
            "checksum_missing",
            redact(place) if "://" in place else place,
            plain(look_up(text, item.dest.name, alone).reason, 400),
            "Check the file's name (the one the publisher uses), or write its sha256.",
        )
        for item in filled
        if not proved_by_hash(item)
    ]
    return filled, faults


def unproved(wanted: Sequence[Wanted], for_role: bool) -> list[Fault]:
    """A refusal of files for which no hash is known."""
    names = [item.dest.name for item in wanted if not proved_by_hash(item)]
    if not names:
        return []
    return [
        fault(
            "not_locked",
            "files",
            f"no SHA-256 for {', '.join(names)}",
            "Write the values that the publisher states, or let playbooks/model_lock.yml take them from a hub; "
            + ("`allow_unverified`: true accepts whatever comes." if for_role else "allow_unverified accepts all."),
        )
    ]


def secrets_in(params: Mapping[str, Any]) -> set[str]:
    """What must not show in the result although it is not an option of its own: queries and logins within URLs, and
    tokens and headers as they are sent, without the line ends that they were given with."""
    urls = [params.get("url"), params.get("checksums")]
    urls += [source.get("url") for source in params.get("sources") or []]
    for entry in params.get("files") or []:
        urls += [entry.get("url"), *(entry.get("urls") or [])]
    found = set()
    for url in urls:
        try:
            parts = urlsplit(str(url or ""))
        except ValueError:
            continue
        login = parts.netloc if parts.netloc else str(url or "")
        password = login.rpartition("@")[0].partition(":")[2]
        found |= {text for text in (parts.query, parts.password, password) if text and len(text) >= 6}
    for given in [params, *(params.get("sources") or [])]:
        for text in [given.get("token"), *sendable(given.get("headers")).values()]:
            found |= {word for word in (str(text or "").strip(),) if len(word) >= 6}
    return found


def _wanted(
    entry: Mapping[str, Any],
    dest: Path,
    specs: Sequence[Mapping[str, Any] | None],
    headers: Mapping[str, str],
    token: str | None,
    faults: list[Fault],
    lock: Lock | None,
) -> Wanted:
    subject = dest.name
    sha256 = entry.get("sha256")
    if sha256 is not None:
        sha256 = sha256.strip().lower().removeprefix("sha256:")
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            faults.append(
                _bad(
                    f"{subject}: sha256",
                    f"has {len(sha256)} characters" + ("" if len(sha256) != 64 else ", not all of them hexadecimal"),
                    "A SHA-256 has 64 hexadecimal digits.",
                )
            )
    size = entry.get("size")
    if size is not None and size < 0:
        faults.append(_bad(f"{subject}: size", f"is {size}", "Write the size in bytes."))
    urls = [url for url in [entry.get("url"), *(entry.get("urls") or [])] if url]
    made: list[Source] = []
    for spec in specs:
        for each in [{"url": url} for url in urls] if spec is None else [spec]:
            problem = spec_problem(each)
            if problem:
                named = redact(str(each.get("url") or each.get("file") or each.get("repo") or kind_of(each)))
                faults.append(_bad(f"{subject}: source {named}", *problem))
                continue
            locked = lock.source(source_id(each)) if lock is not None and spec is not None else None
            there = locked.file(dest.name) if locked is not None else None
            known = {"path": there.path, "revision": locked.commit} if locked is not None and there is not None else {}
            made.append(source_of(each, dest.name, headers, token, known, str(Places(dest).incoming)))
    return Wanted(dest, size, sha256, tuple(made))


def spec_problem(spec: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with an entry of the option C(sources), and what to write instead; null when nothing is."""
    kind = kind_of(spec)
    needs = {"url": "url", "file": "file", "controller": "controller", "ollama": "model"}.get(kind, "repo")
    if not spec.get(needs):
        return f"lacks {needs}", f"A source of type {kind} needs {needs}."
    if kind in ("file", "controller"):
        unfit = _unfit_path(str(spec[kind]))
        if unfit:
            return unfit, "Write the path of a file or folder."
    if kind == "url":
        problem = check_url(str(spec["url"]))
        if problem:
            return problem, "Write an address that begins with http:// or https://."
    if kind in HUBS and str(spec["repo"]).strip("/").count("/") != 1:
        return f"repo is {spec['repo']!r}", "Write owner/name."
    if kind in HUBS:
        base = hub_of(spec).base
        if check_url(base):
            named = "endpoint" if spec.get("endpoint") else "HF_ENDPOINT in the environment"
            shown = redact(base)
            return f"{named} is {shown!r}, which is no http or https address", (
                f"Write https://{shown}." if "://" not in base else "Write an address that begins with https://."
            )
    if kind == "ollama" and manifest_path(str(spec["model"])) is None:
        return f"model is {spec['model']!r}", "Write the name as `ollama list` shows it, such as qwen3:8b."
    return None


def _shard_faults(names: list[str]) -> list[Fault]:
    """Shards of a set that are not named, all at once."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        shard = shard_name(name)
        if shard is not None:
            sets.setdefault((shard.stem, shard.count), set()).add(shard.number)
    faults = []
    for (stem, count), numbers in sets.items():
        missing = sorted(set(range(1, count + 1)) - numbers)
        if missing:
            listed = ", ".join(f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in missing)
            faults.append(
                _bad("files", f"shards are missing: {listed}", "A model in shards needs all of them, side by side.")
            )
    return faults


def _bad(subject: str, message: str, remedy: str) -> Fault:
    return fault("bad_argument", subject, message, remedy)

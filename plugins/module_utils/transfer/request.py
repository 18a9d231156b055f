# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the module's options to the files that are wanted, with every mistake named at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..faults import Fault
from .catalogue import fault
from .checksums import checksum_for
from .deliver import Wanted
from .engine import Settings
from .http import redact
from .sources import Source, check_url, read_checksum_file, source_of

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def wanted_files(params: Mapping[str, Any]) -> tuple[list[Wanted], list[Fault]]:
    """The files, and what is wrong with the options (then nothing should be done)."""
    faults: list[Fault] = []
    dest = Path(params["dest"])
    entries = params.get("files")
    headers = {str(key): str(value) for key, value in (params.get("headers") or {}).items()}
    token = params.get("token")
    if not entries:
        if dest.is_dir():
            faults.append(_bad("dest", f"{dest} is a folder", "Name the file, or give files[] to fill a folder."))
        entry = {
            "name": dest.name,
            "size": params.get("size"),
            "sha256": params.get("sha256"),
            "url": params.get("url"),
        }
        return [_wanted(entry, dest, params.get("sources") or [], headers, token, faults)], faults
    for option in ("url", "size", "sha256"):
        if params.get(option) is not None:
            faults.append(_bad(option, "is for a single file", f"With files[], write {option} in each entry."))
    wanted = []
    for entry in entries:
        name = str(entry["name"])
        if not name or "/" in name or name in (".", "..") or name.endswith(".part"):
            faults.append(_bad(f"files: {name}", "is not a plain file name", "Write the name without a folder."))
            continue
        wanted.append(_wanted(entry, dest / name, params.get("sources") or [], headers, token, faults))
    faults += _shard_faults([item.dest.name for item in wanted])
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


def with_checksums(
    wanted: list[Wanted], place: str, settings: Settings, headers: Mapping[str, str]
) -> tuple[list[Wanted], list[Fault]]:
    """The files with the hashes that a checksum file has for those without one. FaultError: checksum_missing."""
    if all(item.sha256 for item in wanted):
        return wanted, []
    text = read_checksum_file(place, settings, headers)
    filled, faults = [], []
    for item in wanted:
        sha256 = item.sha256 or checksum_for(text, item.dest.name)
        if sha256 is None:
            faults.append(
                fault(
                    "checksum_missing",
                    redact(place) if "://" in place else place,
                    f"has no SHA-256 for {item.dest.name}",
                    "Check the file's name (the one the publisher uses), or write its sha256.",
                )
            )
        filled.append(replace(item, sha256=sha256))
    return filled, faults


def secrets_in(params: Mapping[str, Any]) -> set[str]:
    """What must not show in the result although it is not an option of its own: queries and logins within URLs."""
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
        found |= {text for text in (parts.query, parts.password) if text and len(text) >= 6}
    return found


def _wanted(
    entry: Mapping[str, Any],
    dest: Path,
    sources: list[Mapping[str, Any]],
    headers: Mapping[str, str],
    token: str | None,
    faults: list[Fault],
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
    specs: list[Mapping[str, Any]] = [{"url": url} for url in urls] + list(sources)
    made: list[Source] = []
    for spec in specs:
        problem = _spec_problem(spec)
        if problem:
            faults.append(_bad(f"{subject}: source {redact(str(spec.get('url') or spec.get('file') or ''))}", *problem))
            continue
        made.append(source_of(spec, dest.name, headers, token))
    return Wanted(dest, size, sha256, tuple(made))


def _spec_problem(spec: Mapping[str, Any]) -> tuple[str, str] | None:
    kind = spec.get("type") or ("file" if spec.get("file") else "url")
    needs = {"url": "url", "file": "file"}.get(kind, "repo")
    if not spec.get(needs):
        return f"lacks {needs}", f"A source of type {kind} needs {needs}."
    if kind == "url":
        problem = check_url(str(spec["url"]))
        if problem:
            return problem, "Write an address that begins with http:// or https://."
    if kind in ("huggingface", "modelscope") and str(spec["repo"]).strip("/").count("/") != 1:
        return f"repo is {spec['repo']!r}", "Write owner/name."
    return None


def _shard_faults(names: list[str]) -> list[Fault]:
    """Shards of a set that are not named, all at once."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = SHARD.match(name)
        if match:
            sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
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

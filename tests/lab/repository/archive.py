# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writing an apt archive: pool, indexes, and signatures with keys made for it.

The folder's name carries the hash of everything that goes in, so that an unchanged archive is found again. The keys are
made once for each cache folder and stay, so that machines made earlier still trust an archive that has changed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from tests.lab.files import locked
from tests.lab.paths import Paths
from tests.lab.proc import run
from tests.lab.repository import deb

#: Raise when the way of writing changes in a way the packages do not show.
FORMAT = 2


@dataclass(frozen=True)
class Suite:
    """One folder of indexes. ``path`` is below the archive's root; without ``components`` it is flat, as NVIDIA's."""

    path: str
    key: str
    fields: Mapping[str, str]
    packages: Sequence[deb.Package]
    components: Sequence[str] | None = None


@dataclass(frozen=True)
class Archive:
    """A finished archive on disk; ``keys`` are the public keys by name."""

    root: Path
    digest: str
    keys: Mapping[str, bytes]


def digest_of(suites: Iterable[Suite]) -> str:
    """Twelve hex digits over everything in the archive."""
    total = hashlib.sha256(f"{FORMAT}".encode())
    seen: set[int] = set()
    for suite in suites:
        total.update(repr((suite.path, suite.key, dict(suite.fields), suite.components)).encode())
        for package in suite.packages:
            total.update(repr(package.key).encode())
            if id(package) not in seen:
                seen.add(id(package))
                total.update(repr((package.control(), dict(package.scripts), package.conffiles)).encode())
                for path, item in sorted(package.files.items()):
                    total.update(repr((path, item.mode, item.link)).encode() + item.data)
    return total.hexdigest()[:12]


def digest_of_packages(packages: Iterable[deb.Package]) -> str:
    """The same for some packages, whatever suite they are in."""
    return digest_of([Suite("", "", {}, list(packages))])


def ensure(paths: Paths, suites: Sequence[Suite]) -> Archive:
    """The archive with these suites, written now or found written."""
    folder = paths.cache / "repository"
    digest = digest_of(suites)
    with locked(paths.cache / "repository.lock"):
        names = sorted({suite.key for suite in suites})
        keys = {name: _public_key(folder / "keys", name) for name in names}
        root = folder / digest
        if not root.is_dir():
            partial = Path(tempfile.mkdtemp(dir=folder, prefix=f".{digest}-"))
            try:
                partial.chmod(0o755)
                write(partial, suites, folder / "keys")
                _publish_keys(partial, suites, keys)
                partial.replace(root)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return Archive(root, digest, keys)


def write(root: Path, suites: Sequence[Suite], keys: Path) -> None:
    """Write pool, indexes and signatures below ``root``."""
    entries: dict[int, tuple[str, deb.Package]] = {}
    for suite in suites:
        pool = f"{suite.path}" if suite.components is None else suite.path.split("/dists/")[0] + "/pool"
        for package in suite.packages:
            if id(package) not in entries:
                base = suite.path if suite.components is None else suite.path.split("/dists/")[0]
                entries[id(package)] = _add(root, base, pool, package), package
    for suite in suites:
        _write_suite(root, suite, entries, keys)


def _publish_keys(root: Path, suites: Sequence[Suite], keys: Mapping[str, bytes]) -> None:
    """Put the keys where a machine can fetch them: keys/NAME.gpg, and 3bf863cc.pub in NVIDIA's folders."""
    (root / "keys").mkdir()
    for name, key in keys.items():
        (root / "keys" / f"{name}.gpg").write_bytes(key)
    for suite in suites:
        if suite.components is None:
            (root / suite.path / "3bf863cc.pub").write_bytes(armored(keys[suite.key]))


def armored(key: bytes) -> bytes:
    """A public key as text (RFC 4880, section 6.2; its checksum is optional)."""
    lines = base64.encodebytes(key)
    return b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n" + lines + b"-----END PGP PUBLIC KEY BLOCK-----\n"


def _add(root: Path, base: str, pool: str, package: deb.Package) -> str:
    """Put a package into the pool. Returns its paragraph for the index."""
    folder = pool if pool == base else f"{pool}/{package.source.split(' ')[0]}"
    relative = f"{folder}/{package.file_name}"
    data = deb.build(package)
    target = root / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.read_bytes() != data:
        raise ValueError(f"two packages want to be {relative}")
    target.write_bytes(data)
    name = relative.removeprefix(f"{base}/")
    control = package.control()
    return f"{control}Filename: {name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"


def _write_suite(root: Path, suite: Suite, entries: Mapping[int, tuple[str, deb.Package]], keys: Path) -> None:
    folder = root / suite.path
    indexes: dict[str, str] = {}
    if suite.components is None:
        indexes["Packages"] = "".join(entries[id(package)][0] for package in suite.packages)
    else:
        for component in suite.components:
            indexes[f"{component}/binary-amd64/Packages"] = "".join(
                entries[id(package)][0] for package in suite.packages if component_of(package) == component
            )
    lines = []
    for name, content in indexes.items():
        for path, data in ((name, content.encode()), (f"{name}.gz", gzip.compress(content.encode(), mtime=0))):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {path}\n")
    fields = {**suite.fields, "Date": formatdate(deb.EPOCH, usegmt=True), "Architectures": "amd64"}
    if suite.components is not None:
        fields["Components"] = " ".join(suite.components)
    release = "".join(f"{key}: {value}\n" for key, value in fields.items()) + "SHA256:\n" + "".join(lines)
    (folder / "Release").write_text(release)
    home = keys / suite.key
    for output, how in (("InRelease", "--clearsign"), ("Release.gpg", "--detach-sign")):
        _gpg(home, "--armor", "--output", str(folder / output), how, str(folder / "Release"))


def component_of(package: deb.Package) -> str:
    """``restricted/libs`` is in restricted, ``kernel`` in main."""
    area, slash, _ = package.section.partition("/")
    return area if slash else "main"


def _gpg(home: Path, *arguments: str) -> bytes:
    """gpg with a keyring of its own. Its agent ends with the call: nothing of the lab is left running."""
    # An agent's socket cannot have a long path; a home below /tmp that links to the real files is short.
    with tempfile.TemporaryDirectory(prefix="vl-gpg-") as short:
        for item in home.iterdir():
            if not item.name.startswith("S."):
                Path(short, item.name).symlink_to(item)
        done = run(["gpg", "--homedir", short, "--batch", "--yes", "--no-tty", "--digest-algo", "SHA256", *arguments])
        run(["gpgconf", "--homedir", short, "--kill", "all"], check=False)
        return done.stdout


def _public_key(keys: Path, name: str) -> bytes:
    """The public key of that name, in the form apt takes; the key is made where there is none."""
    home = keys / name
    public = home / "public.gpg"
    if not public.exists():
        shutil.rmtree(home, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="vl-gpg-") as short:
            base = ["gpg", "--homedir", short, "--batch", "--no-tty"]
            run(
                [
                    *base,
                    "--passphrase",
                    "",
                    "--quick-generate-key",
                    f"{name} archive of the lab",
                    "rsa2048",
                    "sign",
                    "0",
                ]
            )
            exported = run([*base, "--export"]).stdout
            run(["gpgconf", "--homedir", short, "--kill", "all"], check=False)
            home.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=keys, prefix=f".{name}-"))
            for item in Path(short).iterdir():
                if item.is_dir():
                    shutil.copytree(item, partial / item.name)
                elif item.is_file():
                    shutil.copy2(item, partial / item.name)
            (partial / "public.gpg").write_bytes(exported)
            partial.replace(home)
    return public.read_bytes()

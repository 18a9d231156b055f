# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The base image: what every machine starts from.

Made by mmdebstrap from Debian's archive, or on top of an image from a registry. Its name carries the hash of all it is
made of, so a changed input makes a new image and an unchanged one is found again. What this host needs to reach the
network (apt mirrors, proxies, its own certificate authorities) goes into the image, never into the repository.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.lab.errors import LabError
from tests.lab.files import locked
from tests.lab.podman import Podman
from tests.lab.proc import as_root, output, run, say

REPOSITORY = "localhost/volta-lab"
SUITES = ("bookworm", "trixie")
#: Raise when the way of building changes in a way the inputs below do not show.
RECIPE = 1
#: What a fresh server has that systemd, apt and Ansible need, and ccache, through which machines share compiled code.
PACKAGES = (
    "ca-certificates",
    "ccache",
    "dbus",
    "iproute2",
    "kmod",
    "libpam-systemd",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "sudo",
    "systemd",
    "systemd-sysv",
)
#: One cache for all machines and all users in them: keyed by content, nothing in it depends on a path or a time stamp.
CCACHE_CONF = """\
cache_dir = /var/cache/volta-lab/ccache
umask = 000
compiler_check = content
hash_dir = false
base_dir = /
max_size = 5G
"""
#: Documentation is never read on a machine of the lab, and unpacking it costs a third of the time.
DPKG_CONF = """\
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/man/*
"""
#: Downloaded packages are kept: the folder is a cache on the host.
APT_CONF = """\
Acquire::Languages "none";
Acquire::Retries "3";
APT::Keep-Downloaded-Packages "true";
Binary::apt::APT::Keep-Downloaded-Packages "true";
"""
#: Runs in the image at the end. Host keys are a machine's own; the apt timers would take apt's lock at some hour.
FINISH = """\
set -e
update-ca-certificates >/dev/null
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub /etc/apt/apt.conf.d/docker-clean
rm -f /etc/apt/apt.conf.d/99mmdebstrap /etc/dpkg/dpkg.cfg.d/99mmdebstrap
for unit in apt-daily.timer apt-daily-upgrade.timer; do ln -sf /dev/null /etc/systemd/system/$unit; done
systemctl enable ssh.service >/dev/null 2>&1
: > /etc/machine-id
rm -rf /var/lib/apt/lists/*
"""
CA_FOLDER = Path("/usr/local/share/ca-certificates")
#: apt settings of this host that decide whether it can reach its archive.
APT_SETTINGS = re.compile(
    r'^(Acquire::(?:https?|ftp)::Proxy(?:::[^ ]+)?|Acquire::Check-(?:Valid-Until|Date)) "([^"]*)";$'
)
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy")


@dataclass(frozen=True)
class Recipe:
    """All an image is made of. ``base`` is the registry image it is built on; None means Debian by mmdebstrap.

    ``sources`` are one-line apt sources, ``files`` the texts put into the image by absolute path.
    """

    suite: str
    base: str | None
    sources: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Twelve hex digits that name this recipe."""
        parts = {
            "recipe": RECIPE,
            "suite": self.suite,
            "base": self.base,
            "sources": self.sources,
            "packages": PACKAGES,
            "files": dict(self.files),
            "finish": FINISH,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def tag(self) -> str:
        name = self.suite if self.base is None else re.sub(r"[^a-z0-9]+", "-", self.base.lower()).strip("-")[-40:]
        return f"{REPOSITORY}:{name}-{self.digest}"


def debian_mirrors(sources: str) -> tuple[str, str]:
    """(main archive, security archive) as used by this host, from the text of its apt source files.

    Reads one-line and deb822 entries; an archive of another distribution is left alone and Debian's own name is used.
    """
    uris: list[str] = []
    for line in sources.splitlines():
        stripped = line.strip()
        if stripped.startswith("deb "):
            uris += [word for word in stripped.split() if "://" in word][:1]
        elif stripped.lower().startswith("uris:"):
            uris += stripped.split()[1:]
    main, security = "http://deb.debian.org/debian", "http://deb.debian.org/debian-security"
    found = {"main": "", "security": ""}
    for uri in uris:
        parts = urlsplit(uri)
        # A name and password in the address would end up in every machine.
        if parts.username or parts.scheme not in ("http", "https"):
            continue
        last = parts.path.rstrip("/").rpartition("/")[2]
        kind = {"debian": "main", "debian-security": "security"}.get(last)
        if kind and not found[kind]:
            found[kind] = uri.rstrip("/")
    return found["main"] or main, found["security"] or security


def debian_sources(suite: str, mirrors: tuple[str, str], components: str = "main") -> tuple[str, ...]:
    """One-line apt sources of a Debian release."""
    archive, security = mirrors
    return (
        f"deb {archive} {suite} {components}",
        f"deb {archive} {suite}-updates {components}",
        f"deb {security} {suite}-security {components}",
    )


def apt_settings(dump: str) -> str:
    """The lines of ``apt-config dump`` that a machine needs to reach the archive as this host does."""
    kept = [match for match in map(APT_SETTINGS.match, dump.splitlines()) if match and match[2]]
    return "".join(
        f'{match[1]} "{match[2]}";\n' for match in kept if "://127." not in match[2] and "//localhost" not in match[2]
    )


def proxy_environment(environ: Mapping[str, str], lab_networks: str) -> str:
    """The text of /etc/environment: this host's proxies. One on the host's loopback is not reachable from a machine."""
    lines = []
    for name in PROXY_VARIABLES:
        value = environ.get(name) or environ.get(name.upper()) or ""
        if not value or re.search(r"//(127\.|localhost|\[::1\])", value):
            continue
        if name == "no_proxy":
            value += f",{lab_networks}"
        lines.append(f'{name}="{value}"\n{name.upper()}="{value}"\n')
    return "".join(lines)


def recipe(suite: str, base: str | None, components: str = "main") -> Recipe:
    """The recipe for this host as it is now; ``components`` are those of Debian's archive."""
    if suite not in SUITES:
        raise LabError(f"suite {suite} is not known to the lab; choose one of: {', '.join(SUITES)}")
    files = {
        "/etc/ccache.conf": CCACHE_CONF,
        "/etc/dpkg/dpkg.cfg.d/90volta-lab": DPKG_CONF,
        "/etc/apt/apt.conf.d/90volta-lab": APT_CONF + apt_settings(output(["apt-config", "dump"])),
    }
    environment = proxy_environment(os.environ, "10.213.0.0/16")
    if environment:
        files["/etc/environment"] = environment
    for certificate in sorted(CA_FOLDER.glob("**/*.crt")):
        files[f"/usr/local/share/ca-certificates/{certificate.name}"] = certificate.read_text()
    sources: tuple[str, ...] = ()
    if base is None:
        sources = debian_sources(suite, debian_mirrors(_apt_source_texts()), components)
    return Recipe(suite=suite, base=base, sources=sources, files=files)


def ensure(podman: Podman, wanted: Recipe, *, rebuild: bool = False) -> str:
    """Make the image unless it is there. Returns its tag."""
    with locked(podman.paths.cache / "image.lock"):
        if not rebuild and podman.succeeds("image", "exists", wanted.tag):
            return wanted.tag
        if wanted.base is None:
            _import(podman, wanted, rebuild)
        else:
            _build(podman, wanted)
    return wanted.tag


def _import(podman: Podman, wanted: Recipe, rebuild: bool) -> None:
    archive = podman.paths.images / f"{wanted.suite}-{wanted.digest}.tar"
    if rebuild or not archive.exists():
        _bootstrap(wanted, archive)
    podman.call(
        "import",
        "--change",
        'CMD ["/sbin/init"]',
        "--change",
        "STOPSIGNAL SIGRTMIN+3",
        str(archive),
        wanted.tag,
    )


def _bootstrap(wanted: Recipe, archive: Path) -> None:
    say(f"making the base image from Debian {wanted.suite} (about a minute)")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="volta-lab-image-") as scratch:
        files = Path(scratch) / "files.tar"
        files.write_bytes(tar_of(wanted.files))
        finish = Path(scratch) / "finish"
        finish.write_text(FINISH)
        partial = archive.with_name(archive.name + ".partial")
        run(
            as_root(
                [
                    "mmdebstrap",
                    "--variant=minbase",
                    "--format=tar",
                    f"--include={','.join(PACKAGES)}",
                    # The first hook sees an empty root: what dpkg and apt must know before they unpack anything.
                    f"--setup-hook=tar-in {files} /",
                    f'--customize-hook=chroot "$1" sh < {finish}',
                    wanted.suite,
                    str(partial),
                    *wanted.sources,
                ]
            )
        )
        partial.replace(archive)


def _build(podman: Podman, wanted: Recipe) -> None:
    say(f"building the base image on {wanted.base}")
    with tempfile.TemporaryDirectory(prefix="volta-lab-image-") as scratch:
        context = Path(scratch)
        (context / "files.tar").write_bytes(tar_of(wanted.files))
        (context / "finish").write_text(FINISH)
        (context / "Containerfile").write_text(
            f"FROM {wanted.base}\n"
            "ADD files.tar /\n"
            "COPY finish /tmp/finish\n"
            "RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "
            f"{' '.join(PACKAGES)} && sh /tmp/finish && rm /tmp/finish\n"
            "STOPSIGNAL SIGRTMIN+3\n"
            'CMD ["/sbin/init"]\n'
        )
        # chroot isolation: no container is started, so it needs neither control groups nor limits.
        podman.call("build", "--isolation=chroot", "--tag", wanted.tag, str(context))


@dataclass(frozen=True)
class Layer:
    """An image made on another one. ``mounts`` are folders of this host seen while ``script`` runs; their content is
    named by ``stamp``.
    """

    name: str
    parent: str
    script: str
    files: Mapping[str, str] = field(default_factory=dict)
    executable: tuple[str, ...] = ()
    mounts: Mapping[Path, str] = field(default_factory=dict)
    stamp: str = ""

    @property
    def tag(self) -> str:
        parts = [self.parent, self.script, dict(self.files), self.executable, self.stamp, RECIPE]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        return f"{REPOSITORY}:{self.name}-{digest}"


def ensure_layer(podman: Podman, layer: Layer) -> str:
    """Make the layer unless it is there. Returns its tag."""
    with locked(podman.paths.cache / "layer.lock"):
        if podman.succeeds("image", "exists", layer.tag):
            return layer.tag
        say(f"making the image {layer.name}")
        with tempfile.TemporaryDirectory(prefix="volta-lab-image-") as scratch:
            context = Path(scratch)
            modes = dict.fromkeys(layer.executable, 0o755)
            (context / "files.tar").write_bytes(tar_of(layer.files, modes))
            (context / "script").write_text(layer.script)
            (context / "Containerfile").write_text(
                f"FROM {layer.parent}\nADD files.tar /\nCOPY script /tmp/script\nRUN sh /tmp/script && rm /tmp/script\n"
            )
            volumes = [f"--volume={folder}:{place}:ro" for folder, place in layer.mounts.items()]
            podman.call("build", "--isolation=chroot", "--layers=false", *volumes, "--tag", layer.tag, str(context))
    return layer.tag


def server_layer(parent: str, packages: tuple[str, ...]) -> Layer:
    """What Debian's archive gives to a server that is more than the base."""
    return Layer(
        "server",
        parent,
        "set -e\napt-get -qq update\n"
        "DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "
        f"{' '.join(packages)} >/dev/null\nrm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb\n",
    )


def tar_of(
    files: Mapping[str, str], modes: Mapping[str, int] | None = None, links: Mapping[str, str] | None = None
) -> bytes:
    """A tar archive of texts by absolute path, all owned by root; ``links`` are symbolic links, path to target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(data)
            entry.mode = (modes or {}).get(path, 0o644)
            archive.addfile(entry, io.BytesIO(data))
        for path, target in (links or {}).items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type = tarfile.SYMTYPE
            entry.linkname = target
            archive.addfile(entry)
    return buffer.getvalue()


def _apt_source_texts() -> str:
    folder = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    return "\n".join(path.read_text() for path in found if path.is_file())


def machine_id(name: str) -> str:
    """The text of /etc/machine-id: the same each time a machine is made, different between machines."""
    return hashlib.sha256(f"volta-lab {name}".encode()).hexdigest()[:32] + "\n"

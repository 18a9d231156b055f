# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is asked of a build, and whether it can be asked."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from ..faults import Fault
from .catalogue import CATALOGUE

ARCHITECTURE = re.compile(r"^[0-9]+[a-z]?(-real|-virtual)?\Z")
SHA256 = re.compile(r"^[0-9a-fA-F]{64}\Z")
COMMIT = re.compile(r"^[0-9a-fA-F]{7,40}\Z")
FULL_COMMIT = re.compile(r"^[0-9a-fA-F]{40}\Z")
VERSION = re.compile(r"^[0-9A-Za-z][0-9A-Za-z.+_-]*\Z")
TARGET = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
MODEL_ARCHITECTURE = re.compile(r"^[a-z0-9][a-z0-9._-]*\Z")
OPTION = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*\Z")

#: Where one of these stands in a path, cmake's flags, run paths or the loader's lists come apart.
_UNFIT_IN_PATHS = re.compile(r"[\s:;,\"'`$\\]")

_Bad = Callable[[str, str, str], None]

SOURCE_TYPES = ("pypi_sdist", "archive", "git")
BACKENDS = ("cuda", "cpu")

#: Options that follow from a parameter or hold the release layout together; overriding them would break its promises.
RESERVED_OPTIONS = {
    "CMAKE_CUDA_ARCHITECTURES": "cuda_architectures",
    "CMAKE_CUDA_COMPILER": "cuda_root",
    "CUDAToolkit_ROOT": "cuda_root",
    "CMAKE_CUDA_HOST_COMPILER": "cuda_host_compiler",
    "GGML_CUDA": "`backend`",
    "GGML_CUDA_NCCL": "nccl",
    "LLAMA_BUILD_COMMIT": "`commit`",
    "LLAMA_BUILD_NUMBER": "build_number",
    "BUILD_SHARED_LIBS": "the module (releases ship shared libraries)",
    "GGML_BACKEND_DL": "the module (releases ship linked backends)",
    "CMAKE_INSTALL_RPATH": "the module (releases can be moved as a whole)",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "the module (releases can be moved as a whole)",
}

#: The release is proven with them, whatever else is built: the second one computes on the cards.
SERVER = "llama-server"
BENCH = "llama-bench"


@dataclass(frozen=True)
class Request:
    """One build, as asked for; paths are absolute, hashes and commits lower case."""

    source_type: str
    prefix: str
    build_directory: str
    backend: str = "cuda"
    package_version: str | None = None
    sha256: str | None = None
    index_url: str = "https://pypi.org/simple"
    url: str | None = None
    repository: str | None = None
    commit: str | None = None
    version: str | None = None
    build_number: int = 0
    cuda_architectures: tuple[str, ...] = ("70-real",)
    cuda_root: str | None = None
    cuda_host_compiler: str | None = None
    build_user: str | None = None
    targets: tuple[str, ...] = (SERVER, "llama-fit-params", BENCH, "llama-gguf-split")
    cmake_options: Mapping[str, str] = field(default_factory=dict)
    jobs: int = 0
    keep_releases: int = 3
    ccache_directory: str | None = None
    progress_file: str | None = None
    switch: bool = True
    nccl: bool = False
    portable: bool = False
    model_architecture: str | None = None
    nvidia_smi: str = "nvidia-smi"
    sysroot: str = "/"


@dataclass(frozen=True)
class Account:
    """The account that compiles; null stands for the caller."""

    name: str
    uid: int
    gid: int


def unfit_in_path(path: str) -> str | None:
    """Why compilers cannot cope with a path, as the end of a sentence about it; null where they can."""
    unfit = _UNFIT_IN_PATHS.search(path)
    return f"has {unfit.group()!r} in it, with which compilers and linkers cannot cope" if unfit else None


def normalised(request: Request) -> Request:
    """The same request in one spelling, so that the same wish has the same fingerprint."""
    always = (SERVER, BENCH) if request.backend == "cuda" else (SERVER,)
    targets = dict.fromkeys((*always, *request.targets))
    return Request(
        **{
            **request.__dict__,
            "sha256": request.sha256.lower() if request.sha256 else None,
            "commit": request.commit.lower() if request.commit else None,
            "targets": tuple(targets),
            "cuda_architectures": tuple(dict.fromkeys(request.cuda_architectures)) if request.backend == "cuda" else (),
            "cmake_options": {name: option_text(value) for name, value in request.cmake_options.items()},
        }
    )


def option_text(value: object) -> str:
    """A cmake value: YAML's true and false are ON and OFF."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)


def check(request: Request) -> list[Fault]:
    """Everything that is wrong with the request itself; nothing is read from the machine."""
    return [*_check_source(request), *_check_architectures(request), *_check_build(request)]


def _check_source(request: Request) -> list[Fault]:
    faults: list[Fault] = []

    def bad(subject: str, message: str, remedy: str) -> None:
        faults.append(CATALOGUE.fault("source_invalid", subject, message, remedy))

    if request.source_type not in SOURCE_TYPES:
        bad("source_type", f"{request.source_type!r} is not known", f"Write one of: {', '.join(SOURCE_TYPES)}.")
        return faults
    if request.source_type in ("pypi_sdist", "archive"):
        if request.sha256 is None:
            bad(
                "sha256", "is not given", "Write the SHA-256 of the archive; it is checked before anything is unpacked."
            )
        elif not SHA256.match(request.sha256):
            bad("sha256", f"{request.sha256!r} is not 64 hexadecimal digits", "Write the SHA-256 of the archive.")
        if request.commit is not None and not COMMIT.match(request.commit):
            bad("commit", f"{request.commit!r} is not a commit", "Write 7 to 40 hexadecimal digits, or leave it out.")
    if request.source_type == "pypi_sdist":
        if request.package_version is None:
            bad("package_version", "is not given", "Write the version of llama-cpp-python, for example 0.3.36.")
        elif not VERSION.match(request.package_version):
            bad("package_version", f"{request.package_version!r} is not a version", "Write for example 0.3.36.")
        _check_url("index_url", request.index_url, ("https", "http", "file"), bad)
    elif request.source_type == "archive":
        if not request.url:
            bad("url", "is not given", "Write the archive's address or its absolute path on the machine.")
        elif not request.url.startswith("/"):
            _check_url("url", request.url, ("https", "http", "file"), bad)
    else:
        if not request.repository:
            bad("repository", "is not given", "Write the address of the git repository.")
        elif request.repository.startswith("-"):
            bad("repository", f"{request.repository!r} is not an address", "Write the address of the git repository.")
        elif not request.repository.startswith("/") and "://" in request.repository:
            _check_url("repository", request.repository, ("https", "http", "ssh", "git", "file"), bad)
        if request.commit is None or not FULL_COMMIT.match(request.commit):
            bad(
                "commit",
                "is not given" if request.commit is None else f"{request.commit!r} is not a full commit",
                "Write all 40 hexadecimal digits: a tag or a short form can come to mean something else.",
            )
    if request.version is not None and not VERSION.match(request.version):
        bad("version", f"{request.version!r} is not a version", "Write for example 0.5.0-dev, or leave it out.")
    return faults


def _check_url(subject: str, url: str, schemes: tuple[str, ...], bad: _Bad) -> None:
    try:
        parts = urlsplit(url)
        has_secret = parts.password is not None
    except ValueError:
        bad(subject, "is not an address", f"Write an address that begins with {schemes[0]}://.")
        return
    if parts.scheme not in schemes or (parts.scheme != "file" and not parts.hostname):
        bad(subject, f"{redacted(url)!r} is not an address", f"Write an address that begins with {schemes[0]}://.")
    elif has_secret:
        # Parameters are logged by Ansible; a password there would be, too.
        bad(
            subject,
            f"{redacted(url)!r} carries a password",
            "Leave it out and put it into the .netrc of the user who runs the module.",
        )


def redacted(url: str) -> str:
    """The address without account, query and fragment: signed addresses and passwords stay out of logs."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(an address that cannot be read)"
    if not parts.scheme:
        return url
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _check_architectures(request: Request) -> list[Fault]:
    if request.backend != "cuda":
        return []
    if not request.cuda_architectures:
        return [
            CATALOGUE.fault(
                "architecture_invalid",
                "cuda_architectures",
                "is empty",
                "Write the architectures of the machine's cards, for example 70-real for V100.",
            )
        ]
    return [
        CATALOGUE.fault(
            "architecture_invalid",
            "cuda_architectures",
            f"{architecture!r} is not an architecture",
            "Write numbers as in 70-real (native code for V100). 'native' and detected values are not accepted: on a "
            "machine without a loaded driver they become an empty or wrong architecture.",
        )
        for architecture in request.cuda_architectures
        if not ARCHITECTURE.match(architecture)
    ]


def _check_build(request: Request) -> list[Fault]:
    faults: list[Fault] = []

    def bad(subject: str, message: str, remedy: str) -> None:
        faults.append(CATALOGUE.fault("build_option_invalid", subject, message, remedy))

    if request.backend not in BACKENDS:
        bad("backend", f"{request.backend!r} is not known", f"Write one of: {', '.join(BACKENDS)}.")
    for name in ("prefix", "build_directory", "cuda_root", "cuda_host_compiler", "ccache_directory", "progress_file"):
        path = getattr(request, name)
        if path is None:
            continue
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            bad(name, f"{path!r} is not an absolute path", "Write a path that begins with / and has no '..' in it.")
        elif name != "progress_file" and (unfit := unfit_in_path(path)):
            bad(name, f"{path!r} {unfit}", "Write a path without it.")
    for name in ("prefix", "build_directory"):
        if PurePosixPath(getattr(request, name)) == PurePosixPath("/"):
            bad(name, "is the root folder", "Write a folder of its own.")
    if request.prefix == request.build_directory:
        bad("build_directory", "is the same folder as `prefix`", "Write two different folders.")
    for target in request.targets:
        if not TARGET.match(target):
            bad("targets", f"{target!r} is not a target", "Write names such as llama-server.")
    for name in request.cmake_options:
        if not OPTION.match(name):
            bad(
                "cmake_options",
                f"{name!r} is not the name of an option",
                "Write names without -D, such as GGML_CUDA_FA.",
            )
        elif name in RESERVED_OPTIONS:
            bad("cmake_options", f"{name} is set by {RESERVED_OPTIONS[name]}", f"Leave {name} out of cmake_options.")
    if request.model_architecture and not MODEL_ARCHITECTURE.match(request.model_architecture):
        bad(
            "model_architecture",
            f"{request.model_architecture!r} is not the name of an architecture",
            "Write it as the model's GGUF header has it, for example qwen4exp.",
        )
    if request.jobs < 0:
        bad("jobs", f"{request.jobs} is negative", "Write 0 for as many as cores and memory allow, or a number.")
    if request.keep_releases < 1:
        bad("keep_releases", f"{request.keep_releases} is too small", "Write 1 or more; the one in use is always kept.")
    if request.build_number < 0:
        bad("build_number", f"{request.build_number} is negative", "Write 0 where the number is not known.")
    return faults


def find_account(request: Request) -> tuple[Account | None, list[Fault]]:
    """The account to compile with. The compiler runs code out of the source tree, so never as root."""
    euid = os.geteuid()
    if request.build_user is None:
        if euid != 0:
            return None, []
        return None, [
            CATALOGUE.fault(
                "build_user_unusable",
                "build_user",
                "is not given, and the module runs as root",
                "Name an account without privileges, or run the module as one.",
            )
        ]
    try:
        entry = pwd.getpwnam(request.build_user)
    except KeyError:
        message, remedy = "there is no such user", "Create it (the role llama_cpp does), or name another."
    else:
        if entry.pw_uid == euid and euid != 0:
            return None, []
        if entry.pw_uid == 0:
            message, remedy = "is root", "Name an account without privileges: the build runs code of the source tree."
        elif euid != 0:
            message, remedy = "cannot be taken on without root", "Run the module as root, or leave build_user out."
        else:
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid), []
    return None, [CATALOGUE.fault("build_user_unusable", request.build_user, message, remedy)]

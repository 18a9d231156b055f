#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Thin: documentation, arguments, and the call into module_utils.engine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: llama_cpp_build
short_description: Build llama.cpp into a release folder, prove it, and switch to it
version_added: 0.1.0
description:
  - Fetches one verified source of llama.cpp, compiles it as an unprivileged user, and lays the programs and libraries down in
    C(<prefix>/releases/<version>-<fingerprint>).
  - The link C(<prefix>/current) is switched only after the built server has started, named its version and commit, and loaded its
    libraries from inside the release. With O(backend=cuda) the CUDA library must hold native code for the architectures asked for.
  - With O(backend=cuda), and a GPU with a loaded driver in the machine, the engine must also list every GPU and compute on each of them
    (C(llama-bench) on a model of half a megabyte that is made on the spot). Otherwise it is not put into use. A release that was built
    before the driver came is tried by the first run after that, and again under every other driver.
  - The fingerprint covers the source, the options, the targets and the versions of the tools. When a release of this fingerprint is in
    place and in use, nothing is done, in well under a second.
  - An interrupted build is continued by the next run. A failed one leaves the release in use as it was.
options:
  source_type:
    description:
      - V(pypi_sdist) takes the source that the package C(llama-cpp-python) carries; it can be had through any mirror of PyPI.
      - V(archive) takes a tar archive of llama.cpp or of llama-cpp-python from an address or a path on the machine.
      - V(git) fetches one commit of a repository.
    type: str
    choices: [pypi_sdist, archive, git]
    default: pypi_sdist
  package_version:
    description: Version of C(llama-cpp-python), for example V(0.3.36). Required with O(source_type=pypi_sdist).
    type: str
  sha256:
    description:
      - SHA-256 of the archive, 64 hexadecimal digits. Required with O(source_type=pypi_sdist) and O(source_type=archive).
      - It is checked before anything is unpacked. With another hash the file is removed and the module fails.
    type: str
  index_url:
    description:
      - Address of a simple package index (PEP 503 or PEP 691), for O(source_type=pypi_sdist).
      - Credentials belong into the C(.netrc) of the user who runs the module; an address with a password is refused.
    type: str
    default: https://pypi.org/simple
  url:
    description: Address (https, http, file) or absolute path of the archive. Required with O(source_type=archive).
    type: str
  repository:
    description: Address of the git repository. Required with O(source_type=git).
    type: str
  commit:
    description:
      - The commit of llama.cpp. Required in full (40 hexadecimal digits) with O(source_type=git).
      - For the other types it may be short. It is built into the programs, so that they name it, and compared with the commit that the
        archive states, where it states one.
    type: str
  version:
    description:
      - The version of llama.cpp that the source must say it is and that C(llama-server --version) must name, for example V(0.5.0-dev).
      - Left out, the version is taken as found.
    type: str
  build_number:
    description: The build number that the programs name; 0 where it is not known.
    type: int
    default: 0
  backend:
    description: V(cuda) for NVIDIA cards, V(cpu) for a machine without.
    type: str
    choices: [cuda, cpu]
    default: cuda
  cuda_architectures:
    description:
      - Architectures to compile for. V(70-real) is native code for V100.
      - Values that are detected at build time, such as V(native), are refused.
    type: list
    elements: str
    default: [70-real]
  cuda_root:
    description:
      - Root of the CUDA toolkit whose compiler, headers and libraries are used together.
      - Left out, it is the first of C(/usr/local/cuda), C(/usr/local/cuda-*) and the one in PATH that compiles for O(cuda_architectures).
    type: path
  cuda_host_compiler:
    description:
      - The C++ compiler that nvcc calls.
      - Left out, it is the system's own, or, where that is newer than the toolkit accepts, the newest C(g++-N) beside it that it does accept.
    type: path
  nccl:
    description:
      - Whether GPUs talk to each other through NCCL, which must then be installed for the toolkit. It serves O(backend=cuda) with split mode
        C(tensor); layers are split without it.
    type: bool
    default: false
  portable:
    description:
      - Whether the release is to run on other machines. It is then compiled for the common instruction sets (AVX2) instead of this processor's,
        and takes the toolkit's runtime libraries along.
    type: bool
    default: false
  model_architecture:
    description: Architecture of the model that is to be served, as its GGUF header names it, for example V(qwen4exp). The engine must know it.
    type: str
  prefix:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/llama.cpp
  build_directory:
    description: Folder for downloads, logs, the compiler cache and unfinished builds.
    type: path
    default: /var/lib/llama-build
  ccache_directory:
    description: Folder of the compiler cache, used when C(ccache) is installed. Left out, it is the one that C(/etc/ccache.conf) names, or else
      one below O(build_directory).
    type: path
  build_user:
    description:
      - The account that compiles and that runs the proof. Required when the module runs as root, and then not root itself.
      - Left out, it is the user who runs the module.
    type: str
  targets:
    description:
      - What to build. C(llama-server), and with O(backend=cuda) C(llama-bench), are always built, because the proof runs them.
      - V(rpc-server) is the name also for newer sources, which call it C(ggml-rpc-server).
    type: list
    elements: str
    default: [llama-server, llama-fit-params, llama-bench, llama-gguf-split]
  cmake_options:
    description:
      - Further options for cmake, as names without C(-D) and values. V(true) and V(false) become C(ON) and C(OFF).
      - Options that follow from other parameters or hold the release together are refused.
    type: dict
    default: {}
  jobs:
    description:
      - Compilers at a time. V(0) means as many as there are cores, but no more than one for each 2 GiB of available memory.
      - When a compiler is killed for want of memory, the build is tried once more with fewer.
    type: int
    default: 0
  keep_releases:
    description: Releases to keep in all. The one in use, the one before it and those that a process runs from are never removed.
    type: int
    default: 3
  switch:
    description: Whether to point C(current) to the release. With V(false) it is built and proven only.
    type: bool
    default: true
  progress_file:
    description: File for progress records; set by the action plugin of the same name, which shows them while the module runs.
    type: path
extends_documentation_fragment:
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.sysroot
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  check_mode:
    description: Says whether it would build or switch, and the fingerprint, without using the network.
    support: full
  diff_mode:
    description: Shows the release in use before and after.
    support: full
requirements:
  - cmake 3.14 or newer (3.18 with O(backend=cuda)), ninja, a C++ compiler, OpenSSL's development files
  - git, with O(source_type=git)
author:
  - The volta.llm authors (@volta-llm)
"""

EXAMPLES = r"""
- name: Build the pinned engine for V100
  volta.llm.llama_cpp_build:
    package_version: "0.3.36"
    sha256: 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
    version: 0.5.0-dev
    commit: 0c1e57098
    build_user: llama-build
  register: engine

- name: Build a commit for V100 and A100, without putting it into use
  volta.llm.llama_cpp_build:
    source_type: git
    repository: https://github.com/ggml-org/llama.cpp.git
    commit: 0c1e57098bba43ac29e6e3b677cdceebdd22334f
    cuda_root: /usr/local/cuda-12.2
    cuda_architectures: [70-real, 80-real]
    build_user: llama-build
    switch: false

- name: Build on a machine without a GPU
  volta.llm.llama_cpp_build:
    source_type: archive
    url: /srv/sources/llama.cpp.tar.gz
    sha256: "{{ llama_cpp_archive_sha256 }}"
    backend: cpu
    build_user: llama-build
"""

RETURN = r"""
release:
  description: The release folder; null in check mode when it does not exist yet.
  returned: always
  type: str
  sample: /opt/llama.cpp/releases/0.5.0-dev-3f6d0a9c51be
binary:
  description: The server program inside the release.
  returned: always
  type: str
  sample: /opt/llama.cpp/releases/0.5.0-dev-3f6d0a9c51be/bin/llama-server
current:
  description: The release that C(current) points to at the end; null when there is none.
  returned: always
  type: str
previous_release:
  description: The release that was in use before; null when there was none. C(<prefix>/previous) points to it.
  returned: always
  type: str
fingerprint:
  description: SHA-256 over source, options, targets and tools; null in check mode while tools are missing.
  returned: always
  type: str
version:
  description: The version that the built server names.
  returned: always
  type: str
  sample: 0.5.0-dev
commit:
  description: The commit that the built server names; null when it names none.
  returned: always
  type: str
  sample: 0c1e57098
cuda_architectures:
  description: The architectures asked for; empty with O(backend=cpu).
  returned: always
  type: list
  elements: str
  sample: [70-real]
capabilities:
  description: What the server's help text lists, read once when the release was made.
  returned: always
  type: dict
  contains:
    flags:
      description: Every option, sorted.
      type: list
      elements: str
    split_modes:
      description: Values of C(--split-mode).
      type: list
      elements: str
    load_modes:
      description: Values of C(--load-mode); empty for an engine without that option.
      type: list
      elements: str
proof:
  description: The checks that the release passed, each with what was seen; those on GPUs (C(devices), C(compute)) last.
  returned: always
  type: list
  elements: dict
  sample: [{check: version, found: "0.5.0-dev, commit 0c1e57098"}]
removed:
  description: Names of old releases that were removed.
  returned: always
  type: list
  elements: str
log:
  description: The log of cmake and ninja; null when nothing was built in this run.
  returned: always
  type: str
jobs:
  description: Compilers at a time that the build ended with; null when nothing was built in this run.
  returned: always
  type: int
build_s:
  description: Seconds for fetching, compiling and proving; null when nothing was built in this run.
  returned: always
  type: float
notes:
  description: What is worth knowing and not wrong.
  returned: always
  type: list
  elements: str
faults:
  description: What is wrong, most serious first. On failure the same list explains it.
  returned: always
  type: list
  elements: dict
  sample:
    - code: source_checksum_mismatch
      subject: llama_cpp_python-0.3.36.tar.gz
      message: SHA-256 is 5f0c..., expected 832d...; nothing was unpacked
      remedy: Check that sha256 belongs to the version asked for.
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import NVIDIA_SMI, SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request
from ansible_collections.volta.llm.plugins.module_utils.engine.run import build
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "source_type": {"type": "str", "choices": ["pypi_sdist", "archive", "git"], "default": "pypi_sdist"},
            "package_version": {"type": "str"},
            "sha256": {"type": "str"},
            "index_url": {"type": "str", "default": "https://pypi.org/simple"},
            "url": {"type": "str"},
            "repository": {"type": "str"},
            "commit": {"type": "str"},
            "version": {"type": "str"},
            "build_number": {"type": "int", "default": 0},
            "backend": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
            "cuda_architectures": {"type": "list", "elements": "str", "default": ["70-real"]},
            "cuda_root": {"type": "path"},
            "cuda_host_compiler": {"type": "path"},
            "prefix": {"type": "path", "default": "/opt/llama.cpp"},
            "build_directory": {"type": "path", "default": "/var/lib/llama-build"},
            "ccache_directory": {"type": "path"},
            "build_user": {"type": "str"},
            "targets": {
                "type": "list",
                "elements": "str",
                "default": ["llama-server", "llama-fit-params", "llama-bench", "llama-gguf-split"],
            },
            "cmake_options": {"type": "dict", "default": {}},
            "jobs": {"type": "int", "default": 0},
            "keep_releases": {"type": "int", "default": 3},
            "switch": {"type": "bool", "default": True},
            "progress_file": {"type": "path"},
            "nccl": {"type": "bool", "default": False},
            "portable": {"type": "bool", "default": False},
            "model_architecture": {"type": "str"},
            **NVIDIA_SMI,
            **SYSROOT,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = dict(module.params)
    del given["variable_prefix"]
    for name in ("cuda_architectures", "targets"):
        given[name] = tuple(given[name])
    outcome = build(Request(**given), check_mode=module.check_mode)
    results = outcome.results()
    if outcome.changed:
        before = results["current"] if module.check_mode else results["previous_release"]
        fingerprint = (results["fingerprint"] or "")[:12] or "known once the tools are there"
        after = results["release"] or f"new, fingerprint {fingerprint}"
        results["diff"] = {"before": f"release: {before or 'none'}\n", "after": f"release: {after}\n"}
    finish(module, outcome.faults, **results)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Thin: documentation, arguments, and the call into module_utils.ollama.release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_release
short_description: Install one pinned release of Ollama beside the former one, switch to it, or go back
version_added: 0.1.0
description:
  - Fetches the archive that the project publishes with a release (resumable, sources in order), compares its SHA-256, judges every entry
    of it and the room on the disk, unpacks it into C(<prefix>/releases/<version>-<first 12 digits of the SHA-256>), and runs the program.
    Only then it gets its name and, when asked, the link C(<prefix>/current) leads to it and C(<prefix>/previous) to the one before.
  - An interrupted run leaves nothing in use that is not whole; run it again. What was fetched by then is used.
  - A release that is there whole is neither fetched nor read again, and no network is used.
  - The project's install script is never run, and no driver is installed. It takes the newest release, overwrites the unit, and may install
    a driver that no longer knows Volta.
  - The service is not touched but by V(previous) with O(unit). Role ollama restarts it when C(current) leads to another program.
  - "Proxies are taken from the environment (C(http_proxy), C(https_proxy), C(no_proxy))."
options:
  version:
    description:
      - The release, such as V(0.24.0). A moving name such as V(latest) is refused. The default is the last one that is reported good under
        driver 535; those from 0.30 on run on the processor under a driver older than 550 without saying so.
      - The program must name this version.
    type: str
    default: 0.24.0
  archive:
    description:
      - Path on the machine, or address, of the archive to take in place of the project's. Empty for the project's.
      - Its name does not matter; C(.tar.zst) needs the program C(zstd) on the machine, C(.tgz) needs nothing.
    type: str
    default: ""
  mirror:
    description:
      - Address that stands for C(https://github.com/ollama/ollama/releases/download), which is tried after it. The archive is looked
        for at C(<mirror>/v<version>/ollama-linux-amd64.tar.zst) (C(arm64) on such a machine, C(.tgz) before 0.14.0).
    type: str
    default: ""
  sha256:
    description:
      - SHA-256 of the archive. Empty, it is taken from O(checksums), else from the collection's own table (0.24.0), else from C(sha256sum.txt)
        beside the archive. The last proves only the transfer, which the result says in RV(notes).
    type: str
    default: ""
  checksums:
    description:
      - Path or address of a file that has the archive's SHA-256 by name. The forms of C(sha256sum), BSD and openssl are understood, and a
        bare hash.
    type: str
    default: ""
  prefix:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/ollama
  state:
    description:
      - V(passed) notes that the release in use has served what was asked of it, which is not a change of the machine. Until then trouble
        is taken for that of the upgrade (RV(passed)).
      - V(previous) puts the release into use that C(<prefix>/previous) leads to, and C(previous) then leads to the one in use now.
      - V(absent) removes all releases and links, but no models. It is refused while a program of a release runs.
    type: str
    choices: [present, passed, previous, absent]
    default: present
  activate:
    description: Whether V(present) switches C(current) to the release. If not, it is laid down and proven only.
    type: bool
    default: true
  gpu:
    description:
      - Whether the release is to run on V100, so that an archive without C(lib/ollama/cuda_v12) is refused.
    type: bool
    default: true
  keep_releases:
    description:
      - Releases to keep in all. The one in use, the one before it and those that a process runs from are never removed.
    type: int
    default: 2
  command:
    description:
      - Link for shells to the program in use. It is made only where nothing is in its place; empty for none. Another installation's program
        is reported and left as it is.
    type: str
    default: /usr/local/bin/ollama
  unit:
    description: Service to restart after V(previous) has switched. Empty for none.
    type: str
    default: ""
  start_timeout:
    description: Seconds that the start of O(unit) may take.
    type: float
    default: 300.0
  because:
    description:
      - Why the release in use is given up. With it V(previous) ends with the fault C(ollama_upgrade_rolled_back) once the former release is
        in use again and O(unit) was restarted.
    type: str
    default: ""
  timeout:
    description: Seconds to wait for a connection.
    type: float
    default: 30.0
  stall_timeout:
    description: Seconds without a byte after which a connection is made anew.
    type: float
    default: 30.0
  retries:
    description: How many attempts in a row may bring nothing before the next source is tried.
    type: int
    default: 5
  ca_path:
    description: File with certificates to trust in place of the system's.
    type: path
  unreachable_hosts:
    description: Hosts that are not to be tried, with all below them.
    type: list
    elements: str
    default: []
  progress_file:
    description: File for progress records; set by the action plugin of the same name, which shows them while the module runs.
    type: path
extends_documentation_fragment:
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  check_mode:
    description: Says whether it would install or switch, without using the network.
    support: full
  diff_mode:
    description: Shows the release in use before and after.
    support: full
requirements:
  - zstd, for archives from 0.14.0 on
notes:
  - "The fault codes are: V(ollama_version_invalid), V(ollama_release_option_invalid), V(ollama_machine_unsupported), V(checksum_missing),
    V(hash_mismatch), V(source_missing), V(source_unreachable), V(source_refused) and the others of M(volta.llm.model_download),
    V(zstd_missing), V(ollama_archive_unusable), V(ollama_archive_unsafe), V(ollama_without_cuda_v12), V(disk_full), V(dest_not_writable),
    V(ollama_does_not_run), V(ollama_other_version), V(ollama_release_missing), V(ollama_release_damaged), V(ollama_in_use),
    V(ollama_upgrade_rolled_back), V(service_start_failed); as a warning
    V(ollama_foreign_install)."
author:
  - The volta.llm authors (@volta-llm)
"""

EXAMPLES = r"""
- name: Install the pinned release and put it into use
  volta.llm.ollama_release:
    version: 0.24.0

- name: Take it from a mirror that has the folders of GitHub
  volta.llm.ollama_release:
    version: 0.23.4
    mirror: https://mirror.example.org/ollama
    sha256: "{{ ollama_sha256 }}"

- name: Lay down the release that was copied to the machine, without putting it into use
  volta.llm.ollama_release:
    version: 0.24.0
    archive: /srv/transfer/ollama-linux-amd64.tar.zst
    activate: false

- name: Go back to the one before
  volta.llm.ollama_release:
    state: previous

- name: Go back because the new one fails, restart the service, and fail with the reason
  volta.llm.ollama_release:
    state: previous
    unit: ollama.service
    because: "{{ ansible_failed_result.msg }}"
"""

RETURN = r"""
release:
  description: The release folder; null where it is not there.
  returned: always
  type: str
  sample: /opt/ollama/releases/0.24.0-15c5f8d66ba0
version:
  description: Its version, as the program named it when it was installed.
  returned: always
  type: str
  sample: 0.24.0
binary:
  description: The program in the release. C(<prefix>/current/bin/ollama) is the one in use.
  returned: always
  type: str
  sample: /opt/ollama/releases/0.24.0-15c5f8d66ba0/bin/ollama
sha256:
  description: SHA-256 of the archive that it was unpacked from.
  returned: always
  type: str
verified_by:
  description:
    - Where that SHA-256 came from. V(sha256) is the option, V(table) the collection, V(checksums) the file that was named, V(list) the one
      beside the archive.
  returned: always
  type: str
  sample: table
source:
  description: Where the archive came from, without query string or login.
  returned: always
  type: str
  sample: https://github.com/ollama/ollama/releases/download/v0.24.0/ollama-linux-amd64.tar.zst
bytes_fetched:
  description: Bytes of the archive received in this run.
  returned: always
  type: int
passed_over:
  description: Faults of sources that failed before another one succeeded, as records like those in RV(faults).
  returned: always
  type: list
  elements: dict
activated:
  description: Whether C(current) leads to this release at the end.
  returned: always
  type: bool
switched:
  description: Whether this run switched C(current). RV(previous) is then the release that was in use before.
  returned: always
  type: bool
passed:
  description: Whether the release has ever served what was asked of it, as noted by O(state=passed).
  returned: always
  type: bool
current:
  description: The release in use at the end; null where there is none.
  returned: always
  type: str
previous:
  description: The release that C(previous) leads to at the end; null where there is none.
  returned: always
  type: str
removed:
  description: Names of releases that were removed.
  returned: always
  type: list
  elements: str
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
    - code: ollama_version_invalid
      subject: version
      message: "'v0.24.0' is not a version such as 0.24.0"
      remedy: Write 0.24.0.
"""

from ansible_collections.volta.llm.plugins.module_utils import releases
from ansible_collections.volta.llm.plugins.module_utils.arguments import VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama.release import Asked, Release, settle
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import secrets_in

#: Options that say how to fetch, not what.
FETCHING = ("timeout", "stall_timeout", "retries", "ca_path", "unreachable_hosts")


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "version": {"type": "str", "default": "0.24.0"},
            "archive": {"type": "str", "default": ""},
            "mirror": {"type": "str", "default": ""},
            "sha256": {"type": "str", "default": ""},
            "checksums": {"type": "str", "default": ""},
            "prefix": {"type": "path", "default": "/opt/ollama"},
            "state": {"type": "str", "choices": ["present", "passed", "previous", "absent"], "default": "present"},
            "activate": {"type": "bool", "default": True},
            "gpu": {"type": "bool", "default": True},
            "keep_releases": {"type": "int", "default": 2},
            "command": {"type": "str", "default": "/usr/local/bin/ollama"},
            "unit": {"type": "str", "default": ""},
            "start_timeout": {"type": "float", "default": 300.0},
            "because": {"type": "str", "default": ""},
            "timeout": {"type": "float", "default": 30.0},
            "stall_timeout": {"type": "float", "default": 30.0},
            "retries": {"type": "int", "default": 5},
            "ca_path": {"type": "path"},
            "unreachable_hosts": {"type": "list", "elements": "str", "default": []},
            "progress_file": {"type": "path"},
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    params = module.params
    addresses = [{"url": params[name]} for name in ("archive", "mirror")]
    module.no_log_values.update(secrets_in({"checksums": params["checksums"], "sources": addresses}))
    given = {name: value for name, value in params.items() if name not in (*FETCHING, "variable_prefix")}
    settings = Settings(
        timeout=params["timeout"],
        stall_timeout=params["stall_timeout"],
        retries=params["retries"],
        ca_path=params["ca_path"],
        unreachable=tuple(host.strip().lower().rstrip(".") for host in params["unreachable_hosts"]),
    )
    before = releases.Store(given["prefix"], Release).link("current")
    outcome = settle(Asked(settings=settings, **given), check_mode=module.check_mode)
    results = outcome.results()
    if outcome.changed:
        after = results["current"]
        if module.check_mode:
            wanted = results["release"] or f"new, {params['version']}"
            after = {"absent": None, "previous": wanted}.get(params["state"], wanted if params["activate"] else after)
        results["diff"] = {"before": f"release: {before or 'none'}\n", "after": f"release: {after or 'none'}\n"}
    finish(module, outcome.faults, **results)


if __name__ == "__main__":
    main()

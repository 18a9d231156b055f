# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writes the archive and prints its folder; ``--list CODENAME[-updates|...]`` prints what is in a suite."""

from __future__ import annotations

import argparse

from tests.lab.paths import Paths
from tests.lab.repository import archive, ubuntu


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.repository", description=__doc__)
    parser.add_argument("--list", metavar="SUITE", help="for example jammy, noble-updates, cuda/ubuntu2204/x86_64")
    options = parser.parse_args()
    suites = ubuntu.suites()
    if options.list:
        chosen = [suite for suite in suites if suite.path.removeprefix("ubuntu/dists/") == options.list]
        for package in sorted((package for suite in chosen for package in suite.packages), key=lambda one: one.key):
            print(package.name, package.version, package.source)
        return
    print(archive.ensure(Paths.from_environment(), suites).root)


if __name__ == "__main__":
    main()

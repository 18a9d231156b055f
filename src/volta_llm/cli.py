# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The command ``volta-llm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from volta_llm.converge import converge
from volta_llm.model import ConvergeResult, ExitStatus, RunResult, UsageError
from volta_llm.project import find_inventory, find_playbook, find_project, output_file
from volta_llm.report import summary, times_by_role, write_json, write_junit
from volta_llm.runner import Request

_EXIT_STATUSES = """\
exit status:
  0    every host is as it should be (with --twice: and the second run changed nothing)
  1    a host failed or was unreachable, or Ansible could not run the playbook
  2    not idempotent: the second run changed something
  3    usage: an option, a path or a value is wrong; nothing was run
  4    a reboot is required before the run can go on (fault code reboot_required)
  130  interrupted by Ctrl-C; 143 stopped by SIGTERM
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse exits with 2, which means "not idempotent" here.
        self.print_usage(sys.stderr)
        self.exit(int(ExitStatus.USAGE), f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="volta-llm", description="Run the volta.llm collection and judge the result.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    run = commands.add_parser(
        "converge",
        help="run the playbook against an inventory and judge the result",
        description="Run the playbook against an inventory, show it live, judge the result.",
        epilog=_EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "-i", "--inventory", action="append", required=True, metavar="PATH", help="inventory folder or file; may repeat"
    )
    run.add_argument("--playbook", default="site.yml", metavar="FILE", help="playbook to run (default: %(default)s)")
    run.add_argument("--project", metavar="DIR", help="the checkout (default: found from here upward)")
    run.add_argument("--check", action="store_true", help="say what would change, change nothing")
    run.add_argument("--diff", action="store_true", help="show what changes in files")
    run.add_argument("--twice", action="store_true", help="run a second time, which must change nothing")
    run.add_argument("--json", metavar="FILE", help="write the result as JSON")
    run.add_argument("--junit", metavar="FILE", help="write the result as JUnit XML")
    run.add_argument(
        "-e", "--extra-vars", action="append", default=[], metavar="VARS", help="key=value, JSON or @file; may repeat"
    )
    run.add_argument("--tags", action="append", default=[], metavar="TAGS", help="only tasks with these tags")
    run.add_argument("--skip-tags", action="append", default=[], metavar="TAGS", help="no tasks with these tags")
    run.add_argument("-l", "--limit", metavar="HOSTS", help="only these hosts of the inventory")
    run.add_argument("--vault-password-file", action="append", default=[], metavar="FILE", help="vault password file")
    run.add_argument("--vault-id", action="append", default=[], metavar="ID", help="vault identity, label@source")
    run.add_argument("-q", "--quiet", action="store_true", help="the summary only, no live output")
    run.add_argument("-v", "--verbose", action="count", default=0, help="Ansible's own verbosity; may repeat")
    return parser


def _request(options: argparse.Namespace, start: Path) -> Request:
    project = find_project(options.project, start)
    vault = [
        f"--vault-password-file={_file('--vault-password-file', name, start)}" for name in options.vault_password_file
    ]
    passed_on = [f"--vault-id={name}" for name in options.vault_id]
    more = [f"--tags={tags}" for tags in options.tags]
    more += [f"--skip-tags={tags}" for tags in options.skip_tags]
    more += [f"--limit={options.limit}"] if options.limit else []
    more += ["--diff"] if options.diff else []
    more += [f"-{'v' * options.verbose}"] if options.verbose else []
    return Request(
        project=project,
        playbook=find_playbook(options.playbook, project, start),
        inventories=tuple(find_inventory(name, project, start) for name in options.inventory),
        check=options.check,
        # Ansible runs in the checkout; a file is meant as seen from here.
        extra_vars=tuple(
            f"@{_file('-e', value[1:], start)}" if value.startswith("@") else value for value in options.extra_vars
        ),
        vault=(*vault, *passed_on),
        options=tuple(more),
    )


def _file(option: str, name: str, start: Path) -> Path:
    path = start / Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"{option} {name}: no such file")
    return path


def _print_live(line: str) -> None:
    print(line, flush=True)


def _print_times(run: RunResult) -> None:
    print(f"\n{times_by_role(run)}\n", flush=True)


def _converge(options: argparse.Namespace, start: Path) -> ConvergeResult:
    json_file = output_file("--json", options.json, start)
    junit_file = output_file("--junit", options.junit, start)
    result = converge(
        _request(options, start),
        twice=options.twice,
        show=None if options.quiet else _print_live,
        after_run=None if options.quiet else _print_times,
    )
    if json_file is not None:
        write_json(result, json_file)
    if junit_file is not None:
        write_junit(result, junit_file)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit statuses are those of ExitStatus."""
    options = _parser().parse_args(argv)
    try:
        result = _converge(options, Path.cwd())
    except UsageError as exc:
        print(f"volta-llm: {exc}", file=sys.stderr)
        return int(ExitStatus.USAGE)
    except KeyboardInterrupt:
        # Before or after the playbook; while it runs, Ctrl-C is passed on to it.
        print("volta-llm: interrupted", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    print(summary(result), flush=True)
    return int(result.exit_status)


def _version() -> str:
    try:
        return version("volta-llm")
    except PackageNotFoundError:
        return "(from a checkout)"

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""python -m tests.lab.ollama publish FOLDER [--version V ...] | serve FOLDER

``publish`` writes ``FOLDER/releases/v<version>/`` and the registry ``FOLDER/v2/`` with the model ``volta-small``.
Either is read by any file server with FOLDER as its root; ``serve`` is one that sends clients on for blobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .archive import BROKEN, FORMS, make_release
from .registry import RegistryServer, publish_model

DEFAULT_VERSION = "0.24.0"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.ollama", description=__doc__.partition("\n")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    publish = commands.add_parser("publish", help="write releases and the registry; tells what as JSON")
    publish.add_argument("folder", type=Path)
    publish.add_argument(
        "--version", action="append", metavar="V[=HOW]",
        help=f"a release; HOW is how it is broken: {', '.join(BROKEN)} (default: {DEFAULT_VERSION})",
    )  # fmt: skip
    publish.add_argument("--form", action="append", choices=FORMS, help="forms of the archives (default: both)")
    publish.add_argument(
        "--model", action="append", metavar="NAME[:TAG][=FILE]", help="a model, with the weights in FILE "
        "(default: volta-small:latest with small weights)",
    )  # fmt: skip
    serve = commands.add_parser("serve", help="serve such a folder over HTTP")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--bind", default="127.0.0.1", help="address (default: %(default)s)")
    serve.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.command == "serve":
        with RegistryServer((options.bind, options.port), options.folder) as server:
            print(server.url, flush=True)
            server.serve_forever()
        return 0
    told: dict[str, dict[str, object]] = {"releases": {}, "models": {}}
    for entry in options.version or [DEFAULT_VERSION]:
        version, _, broken = entry.partition("=")
        if broken and broken not in BROKEN:
            parser.error(f"{entry}: {broken} is none of {', '.join(BROKEN)}")
        made = make_release(options.folder / "releases", version, options.form or FORMS, broken=broken or None)
        told["releases"][version] = {"folder": str(made.folder), "sha256": made.sha256}
    for entry in options.model or ["volta-small"]:
        named, _, file = entry.partition("=")
        name, _, tag = named.partition(":")
        weights = Path(file).read_bytes() if file else None
        told["models"][named] = publish_model(options.folder, name, tag or "latest", weights=weights)
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Serves a quarter of one file, and the rest once another file is there: a download that is under way until then.

``python3 slow.py FILE GO ASKED``; each request's Range is a line in ASKED.
"""

import http.server
import sys
import time
from pathlib import Path

DATA = Path(sys.argv[1]).read_bytes()
GO, ASKED = map(Path, sys.argv[2:])
#: Seconds after which a test has gone wrong and nobody waits any more.
LIMIT = 300


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with ASKED.open("a", encoding="ascii") as asked:
            asked.write(f"{self.headers.get('Range')}\n")
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA[: len(DATA) // 4])
        for _ in range(LIMIT * 10):
            if GO.exists():
                break
            time.sleep(0.1)
        self.wfile.write(DATA[len(DATA) // 4 :])


http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()

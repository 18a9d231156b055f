# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Serves one file at a crawl, so that a download is still under way when somebody else wants the same."""

import http.server
import sys
import time
from pathlib import Path

DATA = Path(sys.argv[1]).read_bytes()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        for at in range(0, len(DATA), len(DATA) // 12):
            self.wfile.write(DATA[at : at + len(DATA) // 12])
            time.sleep(1)


http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()

"""A page on loopback that shows a run while it runs.

The address contains a secret, without which the server answers nothing. The page asks for the
newest piece four times a second. The last piece is the whole run.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ringsim.traces.units import count
from ringsim.traces.value import Trace
from ringsim.view.html import pack_all, page_body, page_text

_POLL_S = 0.05
_START_S = 10.0  # time that a browser may take to open the page
_GONE_S = 2.0  # a page that has not asked for this long is closed


class LivePage(ThreadingHTTPServer):
    """Shows a run in the browser while it runs; see ``ringsim.launch.live``.

    Args:
        world_size: the number of ranks.
    """

    daemon_threads = False  # so that `close` waits for them

    def __init__(self, world_size: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        path = f"/{secrets.token_urlsafe(32)}/"
        title = f"ringsim: {count(world_size, 'rank')}"
        page = page_text(title, page_body(title, ()), (), "page.js", more="; connect-src 'self'")
        self.pages, self._data = {path: page.encode()}, f"{path}run"
        self.asked_s, self.sent = time.monotonic() + _START_S, b""
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,))
        self._thread.start()
        address = f"http://127.0.0.1:{self.server_port}{path}"
        sys.stderr.write(f"ringsim: showing the ranks at {address}\n")
        webbrowser.open(address)

    def show(self, trace: Trace) -> None:
        """Shows the newest part of the run or, at the end, the whole run."""
        (self.pages[self._data],) = pack_all([trace], source=True)

    def close(self) -> None:
        """Ends the server, as soon as the page has the last data, or seems to be closed."""
        last = self.pages.get(self._data)
        while self.sent is not last and time.monotonic() < self.asked_s + _GONE_S:
            time.sleep(_POLL_S)
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that the browser has closed."""


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    timeout = 1.0  # for a connection on which the browser asks for nothing

    def do_GET(self) -> None:
        """Answers a request that knows the secret."""
        content = self.server.pages.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.server.asked_s, self.server.sent = time.monotonic(), content
        kind = "text/html" if self.path.endswith("/") else "application/octet-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

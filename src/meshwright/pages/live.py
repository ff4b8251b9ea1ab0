"""The live page: a server on this machine alone, whose page asks for new data while its runs write."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.pages.runs import ENVIRONMENT, RESOLVED
from meshwright.pages.view import view_data, view_page
from meshwright.spec.errors import UserError
from meshwright.storage.journal import JOURNAL

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
"""Names under which a browser may ask: a page of another site that has its own name point here is refused."""


class LivePage:
    """The newest data of some runs, read again when a file of theirs has changed."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._run_dirs = run_dirs
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        """The data with a stamp that changes with the runs."""
        with self._lock:
            stamp = self._stamp()
            if self._data.get("stamp") != stamp:
                self._data = view_data(self._run_dirs) | {"live": True, "stamp": stamp}
            return self._data

    def _stamp(self) -> str:
        files = [run_dir / name for run_dir in self._run_dirs for name in (JOURNAL, ENVIRONMENT, RESOLVED)]
        states = [os.stat(file) if file.exists() else None for file in files]
        locks = [len(list(run_dir.glob(".lock-*"))) for run_dir in self._run_dirs]
        return "-".join(f"{state.st_size:x}.{state.st_mtime_ns:x}" if state else "" for state in states) + str(locks)


class PageServer(ThreadingHTTPServer):
    """A server that says nothing about browsers that leave."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but not of connections."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """A request to a page of this machine: only a browser here may ask, for a page from here."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    """Seconds without a byte after which a connection ends."""

    def is_refused(self, *, changes: bool = False) -> bool:
        """Whether the request was answered with a refusal. Pages of other sites can send requests here, but not under
        these names, not without a header that names them, and not as JSON. `changes`: whether it makes the server do
        more than show a page."""
        host = self.headers.get("host", "")
        origin, site = self.headers.get("origin"), self.headers.get("sec-fetch-site", "same-origin")
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if host.rsplit(":", 1)[0] not in NAMES:
            self.refuse(403, b"this page is for this machine alone\n")
        elif changes and (origin not in (None, f"http://{host}") or site not in ("same-origin", "none")):
            self.refuse(403, b"this server answers no page of another site\n")
        elif changes and kind != "application/json":
            self.refuse(415, b"send JSON with the header Content-Type: application/json\n")
        else:
            return False
        return True

    def refuse(self, status: int, reason: bytes) -> None:
        """Answer without the body of the request."""
        self.close_connection = True  # the request's body stays unread
        self.send(status, "text/plain", reason)

    def send(self, status: int, kind: str, content: bytes) -> None:
        """Answer."""
        self.send_response(status)
        headers = {"content-type": kind, "content-length": str(len(content)), "x-content-type-options": "nosniff"}
        for name, value in (headers | APART).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


APART = {"x-frame-options": "DENY", "referrer-policy": "no-referrer", "cross-origin-resource-policy": "same-origin"}
"""Headers that keep a page out of other sites' pages."""


def serve_page(run_dirs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the live page, listening but not yet serving; port 0 chooses one.

    Raises `UserError` if the port is in use.
    """
    live = LivePage(run_dirs)
    view_page(live.data())  # so that what is missing is an error of this call

    class Handler(LocalHandler):
        def do_GET(self) -> None:
            """The page at `/`, its data at `/data`."""
            address = urlsplit(self.path)
            if self.is_refused():
                return None
            if address.path not in ("/", "/data"):
                return self.send(404, "text/plain", b"not found\n")
            try:
                data = live.data()
            except UserError as error:
                return self.send(500, "text/plain; charset=utf-8", f"{error}\n".encode())
            if address.path == "/":
                return self.send(200, "text/html; charset=utf-8", view_page(data).encode())
            if parse_qs(address.query).get("have") == [data["stamp"]]:
                return self.send(204, "application/json", b"")
            return self.send(200, "application/json", json.dumps(data, allow_nan=False).encode())

    try:
        server = PageServer((ADDRESS, port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {(error.strerror or 'cannot be used').lower()}; choose another") from error
    return server

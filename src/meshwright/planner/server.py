"""The planner's page from a server on this machine alone, which answers with the installed Python."""

from http.server import ThreadingHTTPServer
from threading import Lock

from meshwright.pages.live import ADDRESS, LocalHandler, PageServer
from meshwright.planner.answer import respond
from meshwright.planner.app import app_page
from meshwright.spec.errors import UserError

LARGEST_REQUEST = 2**22
"""Bytes of a request, with the files that were dropped onto the page."""


def serve_planner(port: int) -> ThreadingHTTPServer:
    """A server of the page, listening but not yet serving; port 0 chooses one.

    Raises `UserError` if the port is in use.
    """
    html, one_at_a_time = app_page("server").encode(), Lock()

    class PlannerHandler(LocalHandler):
        def do_GET(self) -> None:  # noqa: N802
            """The page."""
            if self.is_refused():
                return
            if self.path.partition("?")[0] == "/":
                self.send(200, "text/html; charset=utf-8", html)
            else:
                self.send(404, "text/plain", b"not found\n")

        def do_POST(self) -> None:  # noqa: N802
            """A plan."""
            if self.is_refused(changes=True):
                return
            size = self.headers.get("content-length", "")
            if self.path != "/plan":
                self.refuse(404, b"not found\n")
            elif not size.isdecimal() or int(size) > LARGEST_REQUEST:
                self.refuse(413, b"a request says its length, up to 4 MiB\n")
            else:
                body = self.rfile.read(int(size))
                with one_at_a_time:
                    answer = respond(body)
                self.send(200, "application/json", answer.encode())

    try:
        return PageServer((ADDRESS, port), PlannerHandler)
    except OSError as error:
        raise UserError(f"--port {port}: {(error.strerror or 'cannot be used').lower()}; choose another") from error

"""One HTTP request to a judge: direct or through the environment's proxy, in limited time."""

import base64
import contextlib
import ipaddress
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from urllib.parse import SplitResult, unquote, urlsplit

from meshwright.spec.errors import UserError

TIMEOUT = 300.0
"""Seconds until a response is complete."""
LARGEST_REPLY = 2**24
"""Bytes of a response."""


def exchange(
    server: SplitResult, path: str, data: bytes | None, headers: Mapping[str, str]
) -> tuple[int, str | None, bytes]:
    """(status, wait that the server asks for, content) of a response. `data` is posted; None: GET.

    Redirects are not followed: they would send the key to another server. Raises `OSError` or `HTTPException`.
    """
    connection, before, more = _connection(server)
    with contextlib.closing(connection), _ended_after(TIMEOUT, connection):
        connection.request("GET" if data is None else "POST", before + path, data, {**headers, **more})
        response = connection.getresponse()
        content = response.read(LARGEST_REPLY + 1)
    if len(content) > LARGEST_REPLY:
        raise HTTPException(f"a response of more than {LARGEST_REPLY} bytes")
    if response.length:
        raise IncompleteRead(content, response.length)
    return response.status, response.headers.get("Retry-After"), content


def is_this_machine(server: SplitResult) -> bool:
    """Whether the host is this machine."""
    host = server.hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def server_at(url: str) -> SplitResult:
    """The parts of the judge's URL. Raises `UserError` if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # it is read, and may be none, only here
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and url.isprintable()
    except ValueError:
        valid, parts = False, urlsplit("")
    if not valid or " " in url or parts.query or parts.fragment or parts.username is not None:
        raise UserError(f"--judge {url}: is not a URL; give the server's, such as http://localhost:8000/v1")
    return parts


def _connection(server: SplitResult) -> tuple[HTTPConnection, str, dict[str, str]]:
    """A connection, the beginning of its requests' paths, and headers for a proxy: the environment's, but none to this
    machine."""
    kind = HTTPSConnection if server.scheme == "https" else HTTPConnection
    path, host = server.path.rstrip("/"), server.hostname or ""
    proxy = None if is_this_machine(server) or urllib.request.proxy_bypass(host) else _proxy(server.scheme)
    if proxy is None:
        return kind(host, server.port, timeout=TIMEOUT), path, {}
    allowed: dict[str, str] = {}
    if proxy.username is not None:
        name = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        allowed["Proxy-Authorization"] = f"Basic {base64.b64encode(name.encode()).decode()}"
    connection = kind(proxy.hostname or "", proxy.port or 80, timeout=TIMEOUT)
    if server.scheme == "https":
        connection.set_tunnel(host, server.port, allowed)
        return connection, path, {}
    return connection, f"{server.scheme}://{server.netloc}{path}", allowed


def _proxy(scheme: str) -> SplitResult | None:
    """The environment's proxy. Raises `UserError` if it has no valid address."""
    given = urllib.request.getproxies().get(scheme)
    if not given:
        return None
    try:
        proxy = urlsplit(given if "://" in given else f"http://{given}")
        valid = proxy.scheme == "http" and bool(proxy.hostname) and (proxy.port or 80) > 0
    except ValueError:
        valid, proxy = False, None
    if not valid:
        raise UserError(f"{scheme}_proxy: is not the address of an HTTP proxy; give http://HOST:PORT, or unset it")
    return proxy


@contextlib.contextmanager
def _ended_after(seconds: float, connection: HTTPConnection) -> Iterator[None]:
    """Inside, the connection ends after this time, however slowly the server answers, with `TimeoutError`."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            if connection.sock is not None:
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"no complete response within {seconds:.0f} s")

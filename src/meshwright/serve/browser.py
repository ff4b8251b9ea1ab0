"""The chat page and the arena, their browser policy, and the headers that distinguish browsers' requests."""

import re
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import Request

from meshwright.pages import shell

TITLES = {"chat": "Meshwright chat", "arena": "Meshwright arena"}
STYLES = {"chat": ("chat.css",), "arena": ("chat.css", "arena.css")}
APART = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]@]*)(?::[0-9]*)?")
"""A request's header of this name: a name or an address, and a port."""
POLICY = re.compile(r'http-equiv="Content-Security-Policy" content="([^"]*)"')


def page(name: Literal["chat", "arena"]) -> tuple[str, int, dict[str, str]]:
    """The page of this name, one self-contained file; a status and headers."""
    body = [shell.header(TITLES[name], '<span id="about"></span>'), shell.static(f"{name}.html")]
    parts = (*STYLES[name], "markdown.js", "answers.js", f"{name}.js")
    text = shell.page(TITLES[name], body, parts=parts, strict=True)
    (policy,) = POLICY.findall(text)
    return text, 200, {"content-security-policy": f"{policy}; frame-ancestors 'none'", **APART}


def called(request: Request) -> str | None:
    """The host name that the client used; None if it is not a valid name."""
    match = HOST.fullmatch(request.headers.get("host", ""))
    return match and match[1].lower()


def is_from_another_site(request: Request) -> bool:
    """Whether a page of another origin makes a browser send this request. Browsers state this in headers that pages
    cannot set; older browsers send only `Origin`. Other clients send neither."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()


def is_json(request: Request) -> bool:
    """Whether the body's media type is JSON. A page of another origin can send other types without asking first."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"

"""The chat page and the arena, their browser policy, and the headers that distinguish browsers' requests."""

import base64
import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

CHAT, ARENA = (Path(__file__).with_name(f"{name}.html") for name in ("page", "arena"))
"""The pages. Each is served as one self-contained file: the common style and script replace `STYLE` and `SCRIPT`."""
STYLE, SCRIPT = "/* pages.css */", "/* pages.js */"
HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]@]*)(?::[0-9]*)?")
"""A request's header of this name: a name or an address, and a port."""


def page(file: Path) -> tuple[str, int, dict[str, str]]:
    """The page in a file, a status and headers."""
    text = file.read_text(encoding="utf-8")
    for mark in (STYLE, SCRIPT):
        name = mark.removeprefix("/* ").removesuffix(" */")
        text = text.replace(mark, file.with_name(name).read_text(encoding="utf-8").strip())
    apart = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    return text, 200, {"content-security-policy": _policy(text), **apart}


def _policy(page: str) -> str:
    """The browser's policy for the page: only its own style and script run, and they contact only this server."""
    own = {kind: re.search(f"<{kind}>(.*?)</{kind}>", page, flags=re.DOTALL) for kind in ("style", "script")}
    hashes = {
        kind: base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
        for kind, match in own.items()
        if match is not None
    }
    rules = [f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items()]
    nowhere = [f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")]
    return "; ".join(("default-src 'none'", *rules, "connect-src 'self'", *nowhere))


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

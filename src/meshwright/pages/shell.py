"""The shell of every page: one HTML file with the room's styles and script inside it, which needs no other file."""

import base64
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

STATIC = Path(__file__).with_name("static")
WORDS = {"FAILED": "failed", "ok": "passed"}
"""Cells that have a colour."""
NOTEBOOK_HEIGHT = 760
"""Height of a page in a notebook, in pixels."""
SHORT = 20
"""Letters of a cell that stays on one line if it begins with a number."""
UPLOT = "uplot-python"
"""The package that ships uPlot's script. Its Python is never imported."""

LICENCE = """\
uPlot (https://github.com/leeoniya/uPlot), the plotting library in this page, is under the MIT licence:
Copyright (c) 2021 Leon Sorokin

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright notice and
this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def page(
    title: str,
    body: Iterable[str],
    *,
    data: Any = None,
    parts: Sequence[str] = (),
    plots: bool = False,
    strict: bool = False,
) -> str:
    """A page of this title around `body`.

    `data`: a JSON value that the page's scripts read. `parts`: styles and scripts of `static/` that the page has beside
    `look.css` and `look.js`. `plots`: whether they draw with uPlot. `strict`: no style attribute works and no image
    loads, on a page of strangers' texts. Raises `UserError` if uPlot is not installed.
    """
    library = _uplot() if plots else {}
    notice = f"<!--\n{LICENCE}-->\n" if plots else ""
    files = library | {name: static(name) for name in ("look.css", "look.js", *parts)}
    styles, code = ([text for name, text in files.items() if name.endswith(end)] for end in (".css", ".js"))
    block = "" if data is None else f'<script type="application/json" id="data">{_json(data)}</script>\n'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(code, "".join(styles), strict=strict)}">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>\n'
        f"{notice}<style>{''.join(styles)}</style></head><body>\n"
        + "\n".join(body)
        + f"\n{block}"
        + "".join(f"<script>{one}</script>\n" for one in code)
        + "</body></html>\n"
    )


def header(title: str, about: str = "") -> str:
    """The top of a page: its title, a line about it in HTML, and the switch between light and dark."""
    line = f'<p class="about">{about}</p>' if about else ""
    return (
        f'<header class="top"><div><h1>{escape(title)}</h1>{line}</div>'
        '<button type="button" id="theme" aria-label="Light or dark" title="Light or dark"></button></header>'
    )


def framed(html: str) -> str:
    """A page inside a frame, as a notebook shows it: its styles are not the notebook's."""
    style = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:0;border-radius:8px"
    return f'<iframe srcdoc="{escape(html)}" style="{style}" title="meshwright"></iframe>'


def section(title: str, *parts: str, about: str = "") -> str:
    """A card with a heading."""
    line = f'<p class="about">{about}</p>' if about else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{line}{"".join(parts)}</section>'


def verdict(good: bool, title: str, lines: Iterable[str]) -> str:
    """A card with the answer of a check, and lines about it."""
    rest = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<section class="card"><h2 class="{"passed" if good else "failed"}">{escape(title)}</h2>{rest}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    start = f"<thead><tr>{names}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{start}<tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    if len(text) > SHORT:
        return f"<td>{escape(text)}</td>"
    kind = "n" if text[:1].isdigit() or (text[:1] in "+-.$" and text[1:2].isdigit()) else WORDS.get(text, "")
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _policy(code: Iterable[str], styles: str, *, strict: bool) -> str:
    """The browser's policy for a page: only its own scripts run, and they contact only the server that sent it. Bars
    and dots have their places in style attributes, unless it is `strict`."""
    scripts = " ".join(map(_hash, code))
    rules = f"default-src 'none'; script-src {scripts}; connect-src 'self'; base-uri 'none'; form-action 'none'"
    if strict:
        return f"{rules}; style-src {_hash(styles)}"
    return f"{rules}; worker-src 'self'; img-src 'self'; style-src 'unsafe-inline'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Any) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def static(name: str) -> str:
    """The text of a file of `static/`."""
    return (STATIC / name).read_text(encoding="utf-8")


def _uplot() -> dict[str, str]:
    """uPlot's script and styles, read as data from the package that ships them. Raises `UserError` without it."""
    wanted = ("uPlot.iife.js", "uPlot.min.css")
    try:
        files = importlib.metadata.files(UPLOT) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    texts = {file.name: Path(str(file.locate())) for file in files if file.name in wanted}
    if set(texts) != set(wanted) or not all(path.is_file() for path in texts.values()):
        raise UserError(f"the page draws with uPlot, which is not installed: {install('view')}")
    return {name: path.read_text(encoding="utf-8") for name, path in texts.items()}

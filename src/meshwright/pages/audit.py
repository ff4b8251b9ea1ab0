"""The page of an audit: what rows of a run hold, document by document, what is trained, and what attends to what."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from meshwright.pages.drawing import Scale, area, box, colour, lanes, legend, plot, stacked_bars
from meshwright.pages.shell import header, page, section, table, verdict

MASKS = 3
"""Rows whose attention is drawn."""
TRAINED, PADDING = "var(--text)", "var(--line)"

Row = dict[str, Any]


def audit_page(
    *, about: str, lines: Sequence[str], checks: Sequence[Sequence[str]], rows: Sequence[Row], lengths: Sequence[Row]
) -> str:
    """The page. `lines`: facts beside the checks; `checks`: name, state and claim with what was found, of each; `rows`:
    samples as `data.describe.parts_of` gives them, each with its `name`; `lengths`: a histogram."""
    faults = [f"{name}: {claim}" for name, state, claim in checks if state == "FAILED"]
    length = max(sum(part["tokens"] for part in row["parts"]) + row["padding"] for row in rows)
    separate = (
        "Each document attends to itself alone." if rows[0]["separate"] else "A row is one document for attention."
    )
    body = [
        header("Audit of the data", escape(about)),
        verdict(not faults, "Every check holds.", faults),
        section(
            "Packing",
            _packing(rows, length),
            about="The first rows of the run in its order. Colours alternate by document; the dark line is trained.",
        ),
        section("Attention", _masks(rows[:MASKS]), about=f"A coloured token is seen. {separate}"),
        section("What the first rows hold", _shares(rows)),
        *(_text(row, first=row is rows[0]) for row in rows),
        section(
            "Checks",
            table(("check", "", "claim, and what was found"), checks),
            *(f"<p>{escape(one)}</p>" for one in lines),
        ),
        section("Tokens of a document", _histogram(lengths)),
    ]
    return page("Audit - meshwright", body, parts=("reports.css",))


def _shares(rows: Sequence[Row]) -> str:
    fills = {"trained": colour(0), "context, not trained": colour(1), "padding": PADDING}

    def shares(row: Row) -> dict[str, float]:
        trained = sum(part["trained"] for part in row["parts"])
        context = sum(part["tokens"] for part in row["parts"]) - trained
        return {"trained": float(trained), "context, not trained": float(context), "padding": float(row["padding"])}

    bars = [(row["name"], shares(row)) for row in rows]
    return stacked_bars(bars, lambda tokens: f"{tokens:.0f} tokens", fills=fills)


def _packing(rows: Sequence[Row], length: int) -> str:
    x, each = Scale(0.0, float(length), lambda at: f"{at:.0f}"), 1 / len(rows)

    def shapes() -> Iterator[str]:
        for number, row in enumerate(rows):
            top, place = number * each, 0.0
            for part, (start, place) in zip(row["parts"], _spans(row), strict=True):
                tip = f"{row['name']}, document {part['document']}: {part['tokens']} tokens, {part['trained']} trained"
                fill = colour(part["document"] - 1)
                yield box(x, (start, place), fill, rows=(top + 0.1 * each, top + 0.62 * each), tip=tip)
                for span in part["spans"]:
                    yield box(x, span, TRAINED, rows=(top + 0.7 * each, top + 0.84 * each))
            if row["padding"]:
                tip = f"{row['padding']} positions of padding"
                yield box(x, (place, float(length)), PADDING, rows=(top + 0.1 * each, top + 0.62 * each), tip=tip)

    return lanes(x, [str(number) for number in range(len(rows))], shapes(), each=2.0, title="position in the row")


def _spans(row: Row) -> list[tuple[float, float]]:
    return list(pairwise(map(float, accumulate((part["tokens"] for part in row["parts"]), initial=0))))


def _masks(rows: Sequence[Row]) -> str:
    def mask(row: Row) -> str:
        used = sum(part["tokens"] for part in row["parts"])
        x, y = (Scale(0.0, float(used), lambda at: f"{at:.0f}") for _ in range(2))
        spans = _spans(row) if row["separate"] else [(0.0, float(used))]
        shapes = [area(x, y, [(a, a), (b, b)], [(a, b), (a, b)], colour(number)) for number, (a, b) in enumerate(spans)]
        picture = plot(x, y, shapes, tall="15rem", titles=("sees the token at", "the token at"))
        return f'<div class="panel"><h3>{escape(row["name"])}</h3>{picture}</div>'

    return f'<div class="panels">{"".join(map(mask, rows))}</div>'


def _text(row: Row, *, first: bool) -> str:
    """A row's text: a colour for each document, its trained part underlined."""
    parts = "".join(
        f'<div class="document" style="--of:{colour(part["document"] - 1)}"><b>{escape(part["title"])}</b>'
        + "".join(
            f'<span class="{"trained" if trained else "context"}">{escape(text)}</span>'
            for trained, text in part["text"]
        )
        + "</div>"
        for part in row["parts"]
    )
    rest = f"<p>{row['padding']} positions of padding</p>" if row["padding"] else ""
    names = legend({"underlined: trained": TRAINED, "grey: context": "var(--dim)"})
    unfolded = " open" * first
    return section(
        f"Text of {row['name']}", f"<details{unfolded}><summary>show</summary>{names}{parts}{rest}</details>"
    )


def _histogram(lengths: Sequence[Mapping[str, int]]) -> str:
    rows = [(f"{one['from']} to {one['to']}", {"documents": float(one["documents"])}) for one in lengths]
    return stacked_bars(rows, lambda count: f"{count:,.0f}")

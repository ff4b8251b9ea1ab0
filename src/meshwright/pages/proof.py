"""The page of a proof: every tensor's difference on the model's graph, the first wrong one marked."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from meshwright.pages.drawing import Scale, colour, dot, legend, line, plot
from meshwright.pages.shell import header, page, section, verdict

LAYER = re.compile(r"((?:[A-Za-z_]\w*\.)*?\d+)\.(.+)")
"""A tensor of a layer: the layer, and the tensor's name in it."""
KINDS = {"gradients": "gradient", "updates": "weight after the step", "state": "state after the step"}
SHAPES = {"gradients": "", "updates": "diamond", "state": "small"}
LEAST, MOST = 1e-6, 1e3
"""Ends of the axis, in shares of what is allowed."""


@dataclass(frozen=True)
class Cell:
    """A tensor's difference in a step."""

    tensor: str
    step: int
    kind: str
    name: str
    by: float
    allowed: float
    rank: int

    @property
    def share(self) -> float:
        """The difference as a share of what is allowed."""
        return self.by / self.allowed if self.allowed else (math.inf if self.by else 0.0)

    @property
    def wrong(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.by <= self.allowed

    @property
    def tip(self) -> str:
        """In words."""
        worst = f"{self.by:.2e} of {self.allowed:.2e} allowed, worst on rank {self.rank}"
        return f"{self.name}\n{KINDS[self.kind]}, step {self.step}: {worst}"


def proof_page(proofs: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> str:
    """The page of proofs, each as data (`Proof.as_data` with its `strategy`) and as the lines of the terminal."""
    equal = all(data["equal"] for data, _ in proofs)
    title = "The layout equals one process" if equal else "The layout differs from one process"
    body = [header("Proof of a layout", escape(", ".join(data["strategy"] for data, _ in proofs)))]
    if len(proofs) > 1:
        body.append(verdict(equal, title, []))
    for data, lines in proofs:
        end = next((number for number, text in enumerate(lines) if text.startswith(("equal", "different"))), 0)
        body.append(verdict(data["equal"], f"{data['strategy']}: {lines[end]}", lines[end + 1 :]))
        cells = list(_cells(data["comparisons"]))
        if cells:
            body.append(section("On the model's graph", _graph(cells, data["location"]), about=_explained(cells)))
            about = "A dot is a tensor in a step. Above the red line, rounding does not explain its difference."
            body.append(section("Every tensor's difference", _picture(cells), about=about))
        body.append(section("In numbers", f"<pre>{escape(chr(10).join(lines))}</pre>"))
    return page("Proof - meshwright", body, parts=("reports.css",))


def _cells(comparisons: Sequence[dict[str, Any]]) -> Iterator[Cell]:
    names = {name for comparison in comparisons for name in comparison["gradients"]}
    for comparison in comparisons:
        for kind in KINDS:
            for name, one in comparison[kind].items():
                owner = name if name in names else name.rpartition(".")[0]
                yield Cell(owner if owner in names else name, comparison["step"], kind, name, *_figures(one))


def _figures(difference: dict[str, Any]) -> tuple[float, float, int]:
    return difference["by"], difference["allowed"], difference["rank"]


def _picture(cells: Sequence[Cell]) -> str:
    """A dot for each tensor, in the order of the model, at its share of what is allowed."""
    tensors = list(dict.fromkeys(cell.tensor for cell in cells))
    places = {name: number for number, name in enumerate(tensors)}
    x = Scale(-0.5, len(tensors) - 0.5, lambda at: _block(tensors[round(at)])[0] if 0 <= at < len(tensors) else "")
    y = Scale(LEAST / 2, MOST * 2 if any(cell.wrong for cell in cells) else 3.0, lambda share: f"{share:g}", log=True)
    numbers = {kind: number for number, kind in enumerate(KINDS)}

    def dots() -> Iterator[str]:
        for cell in sorted(cells, key=lambda cell: cell.wrong):
            place = (float(places[cell.tensor]), min(MOST, max(LEAST, cell.share)))
            drawn = dot(x, y, place, numbers[cell.kind], cell.tip, shape=SHAPES[cell.kind])
            yield drawn.replace('class="dot', 'class="dot wrong') if cell.wrong else drawn

    limit = line(x, y, [(x.low, 1.0), (x.high, 1.0)], 0).replace(f'stroke="{colour(0)}"', 'stroke="var(--bad)"')
    drawn = {cell.kind for cell in cells}
    names = {KINDS[kind]: colour(number) for kind, number in numbers.items() if kind in drawn}
    titles = (
        "in the order of the model",
        "difference over what rounding explains, from 1e-06 to 1000",
    )
    return legend(names) + plot(x, y, [limit], dots="".join(dots()), tall="18rem", titles=titles)


def _block(tensor: str) -> tuple[str, str]:
    """The block of a tensor, and its name there."""
    match = LAYER.fullmatch(tensor)
    short = tensor.removesuffix(".weight")
    return (match[1], match[2].removesuffix(".weight")) if match else (short, "weight" if short != tensor else short)


def _graph(cells: Sequence[Cell], location: dict[str, Any] | None) -> str:
    """The blocks in the model's order, each with a row of cells for every tensor."""
    blocks: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        block, name = _block(cell.tensor)
        blocks.setdefault(block, {}).setdefault(name, []).append(cell)
    where = location["name"].removeprefix("input of ") if location else ""
    inside = where if location and location["phase"] in ("forward", "backward") else ""

    def rows(block: str, tensors: dict[str, list[Cell]]) -> Iterator[str]:
        for name, of_tensor in tensors.items():
            tensor = of_tensor[0].tensor
            first = where in (tensor, tensor.removesuffix(".weight"), *(cell.name for cell in of_tensor)) and bool(
                where
            )
            shown = "".join(_square(cell) for cell in of_tensor)
            mark = "<em>first difference</em>" if first else ""
            yield f'<div class="tensor{" first" * first}"><span>{escape(name)}{mark}</span><span>{shown}</span></div>'

    def block_of(block: str, tensors: dict[str, list[Cell]]) -> str:
        first = bool(inside) and (inside == block or inside.startswith(f"{block}."))
        mark = (
            f"<em>first difference: {escape(location['phase'])} of {escape(where)}</em>" if first and location else ""
        )
        head = f"<b>{escape(block)}{mark}</b>"
        return f'<li class="{"first" * first}">{head}{"".join(rows(block, tensors))}</li>'

    return f'<ol class="graph">{"".join(block_of(*item) for item in blocks.items())}</ol>'


def _square(cell: Cell) -> str:
    depth = min(1.0, max(0.0, 1 + math.log10(max(cell.share, LEAST)) / 6))
    fill = "var(--bad)" if cell.wrong else f"color-mix(in srgb, var(--c0) {10 + 80 * depth:.0f}%, var(--soft))"
    return f'<i class="{cell.kind}{" wrong" * cell.wrong}" style="--of:{fill}" data-tip="{escape(cell.tip)}"></i>'


def _explained(cells: Sequence[Cell]) -> str:
    steps = len({cell.step for cell in cells})
    of_steps = f"for each of {steps} steps " if steps > 1 else ""
    return (
        f"Of each tensor {of_steps}a square for its gradient, a diamond for the weight after the step and circles for "
        "its other state: the darker, the nearer to what rounding explains; red is beyond."
    )

"""The answer to a question of the planner, in words and as a page."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from meshwright.pages.drawing import Point, Scale, colour, dot, legend, line, plain, plot
from meshwright.pages.shell import header, page, section, table
from meshwright.planner.figures import ranged
from meshwright.planner.page import PARTS, foot
from meshwright.planner.solve import PlannedValue, Quantity, Solved
from meshwright.predict.text import duration, money_text
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.spec.text import billions, counted, quantity_text

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
TEN = 10
COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
ANSWERS: dict[Quantity, str] = {
    "devices": "the fewest devices",
    "deadline": "the shortest run",
    "budget": "the cheapest run",
    "sequence": "the longest sequence",
    "batch": "the smallest batch at full speed",
    "model": "the model of least expected loss",
    "cluster": "the cheapest cluster",
}
HEADS: dict[Quantity, str] = {
    "devices": "devices",
    "deadline": "devices",
    "budget": "devices",
    "sequence": "sequence",
    "batch": "batch",
    "model": "model",
    "cluster": "cluster",
}
LAW = "loss: Hoffmann et al. 2022, constants of Besiroglu et al. 2024; one pass over the tokens"


def parse_duration(text: str) -> float:
    """`36h`, `7d`, `90m` or `2w` in seconds. Raises `UserError` for anything else."""
    number, unit = text[:-1], text[-1:].lower()
    if unit in UNITS and (value := _positive(number)) is not None:
        return value * UNITS[unit]
    raise UserError(f"--deadline {text}: give minutes, hours, days or weeks, as in 90m, 36h, 7d or 2w")


def parse_tokens(text: str) -> int:
    """`300B` or `1.5T` as a number. Raises `UserError` for anything else."""
    short = text[-1:].lower() in COUNTS
    value = _positive(text[:-1] if short else text)
    if value is None:
        raise UserError(f"--tokens {text}: give a number of tokens, as in 300B or 1.5T")
    return round(value * (COUNTS[text[-1:].lower()] if short else 1))


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e18 else None


def solved_lines(solved: Solved, recipe: Run) -> Iterator[str]:
    """The answer, and the values that lead to it."""
    yield f"{ANSWERS[solved.question.quantity]}{limits_text(solved)}: {answer_text(solved)}"
    yield from (f"  {remark}" for remark in (*answer_remarks(solved), *remarks(solved, recipe)))
    yield ""
    shown = [option for option in solved.options if option is solved.answer or _is_worth_showing(option, solved)]
    head, *rows = rows_of(solved, shown)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for mark, cells in zip((" ", *(_mark(option, solved) for option in shown)), (head, *rows), strict=True):
        first, *others, last = zip(cells, widths, strict=True)
        figures = "".join(f"  {cell:>{width}}" for cell, width in others)
        yield f"{mark} {first[0]:<{first[1]}}{figures}  {last[0]}".rstrip()
    yield ""
    marks = "* the answer; - exceeds a limit" if solved.question.has_limits else "* the answer"
    hidden = len(solved.options) - len(shown)
    yield marks + (f"; {counted(hidden, 'more size')} in --json and --html" if hidden else "")


def _is_worth_showing(option: PlannedValue, solved: Solved) -> bool:
    """Whether no other size is both faster and cheaper."""
    if solved.question.quantity not in ("devices", "deadline", "budget"):
        return True
    if option.chosen is None or option.chosen["run_cost"] is None:
        return option.chosen is not None or not option.planned
    here = option.chosen["run_seconds"]["value"], option.chosen["run_cost"]["value"]
    others = (other.chosen for other in solved.options if other is not option and other.chosen)
    return not any(
        other["run_seconds"]["value"] <= here[0] and other["run_cost"]["value"] <= here[1] for other in others
    )


def limits_text(solved: Solved) -> str:
    """The question's limits, as a part of a sentence."""
    question = solved.question
    parts = []
    if question.deadline is not None:
        parts.append(f"within {duration(question.deadline)}")
    if question.budget is not None:
        parts.append(f"for at most {question.budget:,.0f}")
    return "".join(f" {part}" for part in parts)


def answer_text(solved: Solved) -> str:
    """The answer, or that there is none."""
    option = solved.answer
    if option is None or option.planned is None:
        return "none of those below"
    return f"{option.label} {_unit(solved.question.quantity, option.planned.facts)}".strip()


def answer_remarks(solved: Solved) -> Iterator[str]:
    """What the answer costs, and its layout."""
    option = solved.answer
    if option is None or option.planned is None or option.chosen is None:
        return
    chosen, facts = option.chosen, option.planned.facts
    if option.loss is not None:
        yield f"{quantity_text(option.tokens or 0)} tokens, expected loss {option.loss:.3f}"
    else:
        cost = (
            f", {money_text(chosen['run_cost'])} {facts['cluster'].get('currency', '')}" if chosen["run_cost"] else ""
        )
        yield f"the run takes {ranged(chosen['run_seconds'], duration)}{cost}"
        if not solved.question.is_safe(facts):
            yield "the slow end of this range exceeds the limit"
    yield f"{chosen['strategy']}: {chosen['text']}"


def _unit(quantity: Quantity, facts: dict[str, Any]) -> str:
    match quantity:
        case "devices" | "deadline" | "budget":
            return f"x {facts['cluster']['device']}"
        case "sequence":
            return "tokens"
        case "batch":
            return "sequences"
        case "model" | "cluster":
            return ""


def remarks(solved: Solved, recipe: Run) -> Iterator[str]:
    """What the answer stands on: the run's size, defaults that were taken, and where the search ended."""
    batch, length, steps = recipe.sequences_per_step(), recipe.data.sequence_length, recipe.known_steps()
    count = "" if steps is None else f", {steps:,} steps"
    match solved.question.quantity:
        case "sequence":
            yield f"with {quantity_text(batch * length)} tokens a step{count}"
        case "batch":
            yield f"of sequences of {length:,} tokens{count}"
        case "model":
            yield f"with {batch:,} x {length:,} tokens a step"
            yield LAW
        case "devices" | "deadline" | "budget" | "cluster":
            total = "" if steps is None else f": {quantity_text(batch * length * steps)} tokens"
            yield f"with {batch:,} x {length:,} tokens a step{count}{total}"
    given = recipe.training.model_fields_set & {"global_batch", "global_batch_tokens"}
    defaults = [] if given or solved.question.quantity == "batch" else ["training.global_batch"]
    defaults += [] if "sequence_length" in recipe.data.model_fields_set else ["data.sequence_length"]
    if defaults:
        yield f"by default: {' and '.join(defaults)}; set those of your run"
    if solved.end:
        yield solved.end


def rows_of(solved: Solved, options: Sequence[PlannedValue]) -> list[tuple[str, ...]]:
    """The table's head and rows; the last column is the strategy or what is missing."""
    quantity = solved.question.quantity
    if quantity == "model":
        return [("model", "size", "tokens", "a parameter", "loss", "strategy"), *map(_model_row, options)]
    head = (HEADS[quantity], "tok/s/dev", "MFU", "memory", "run", "cost", "strategy")
    return [head, *map(_row, options)]


def _row(option: PlannedValue) -> tuple[str, ...]:
    chosen = option.chosen
    if chosen is None:
        return (option.label, *[""] * 5, option.problem)
    return (
        option.label,
        f"{chosen['tokens_per_second_per_device']:.0f}",
        f"{chosen['mfu']:.0%}",
        f"{chosen['memory_total']['value'] / 1e9:.1f} GB",
        duration(chosen["run_seconds"]["value"]),
        money_text(chosen["run_cost"], short=True).partition(" (")[0] if chosen["run_cost"] else "",
        chosen["strategy"],
    )


def _model_row(option: PlannedValue) -> tuple[str, ...]:
    chosen = option.chosen
    if chosen is None or option.tokens is None:
        return (option.label, billions(option.amount) if option.amount else "", "", "", "", option.problem)
    each = f"{option.tokens / option.amount:,.{0 if option.tokens > TEN * option.amount else 2}f}"
    return (
        option.label,
        billions(option.amount),
        quantity_text(option.tokens),
        each,
        f"{option.loss:.3f}",
        chosen["strategy"],
    )


def _mark(option: PlannedValue, solved: Solved) -> str:
    """`*` for the answer, `-` for what exceeds the limits."""
    return "*" if option is solved.answer else " " if option.allowed or option.chosen is None else "-"


def solved_json(solved: Solved) -> dict[str, Any]:
    """The question, the answer's label, and every option with its plan."""
    question = solved.question
    return {
        "question": {"solve": question.quantity, "deadline_seconds": question.deadline, "budget": question.budget},
        "answer": solved.answer.label if solved.answer else None,
        "end": solved.end,
        "options": [
            {
                "label": option.label,
                "allowed": option.allowed,
                "problem": option.problem,
                "tokens": option.tokens,
                "loss": option.loss,
                "plan": option.planned.facts if option.planned else None,
            }
            for option in solved.options
        ],
    }


def solved_page(solved: Solved, recipe: Run) -> str:
    """The answer as one offline page, with the frontier as a picture."""
    title = f"{ANSWERS[solved.question.quantity].capitalize()}{limits_text(solved)}"
    head, *rows = rows_of(solved, solved.options)
    lines = "".join(f"<li>{escape(remark)}</li>" for remark in (*answer_remarks(solved), *remarks(solved, recipe)))
    drawn = (section(name, drawing) for name, drawing in _pictures(solved))
    body = [
        header(title, escape(recipe.model.name or "")),
        section("The answer", f"<p><b>{escape(answer_text(solved))}</b></p><ul>{lines}</ul>"),
        *drawn,
        section("Every value", table(head, rows)),
        foot(),
    ]
    return page(f"{title} - plan", body, parts=PARTS)


def _pictures(solved: Solved) -> Iterator[tuple[str, str]]:
    """Time against price, or the quantity against what it costs."""
    known = [option for option in solved.options if option.chosen]
    if not known:
        return
    if solved.question.quantity == "model":
        yield (
            "Loss by size",
            _picture(
                solved,
                [(one, one.amount / 1e9, one.loss or 0.0) for one in known],
                ("billions of parameters", "expected loss"),
            ),
        )
        return
    hours = [(one, one.amount, _chosen(one)["run_seconds"]["value"] / 3600) for one in known]
    if solved.question.quantity not in ("cluster", "batch", "sequence"):
        yield "Time by size", _picture(solved, hours, ("devices", "hours"))
    if solved.question.quantity in ("batch", "sequence"):
        rates = [(one, one.amount, _chosen(one)["tokens_per_second_per_device"]) for one in known]
        yield "Speed", _picture(solved, rates, (HEADS[solved.question.quantity], "tokens/s and device"))
    elif all(_chosen(one)["run_cost"] for one in known):
        priced = [(one, _chosen(one)["run_cost"]["value"], hour) for one, _, hour in hours]
        yield "Time against cost", _picture(solved, priced, ("cost of the run", "hours"), lowest=True)


def _chosen(option: PlannedValue) -> dict[str, Any]:
    assert option.chosen is not None
    return option.chosen


def _picture(
    solved: Solved,
    points: Sequence[tuple[PlannedValue, float, float]],
    titles: tuple[str, str],
    *,
    lowest: bool = False,
) -> str:
    """A dot for each option; the line joins all, or with `lowest` those that no other beats in both."""
    x = Scale.around([one[1] for one in points], _figure, wide=10)
    y = Scale.around([one[2] for one in points], _figure, wide=10)
    where = {(first, second) for _, first, second in points}
    joined = sorted(where) if not lowest else sorted(one for one in where if not _is_beaten(one, where))
    dots = "".join(
        dot(
            x,
            y,
            (first, second),
            1 if option is solved.answer else 0 if option.allowed else 7,
            f"{option.label}: {_figure(first)} {titles[0]}, {_figure(second)} {titles[1]}",
            shape="big" if option is solved.answer else "",
        )
        for option, first, second in points
    )
    names = {"within the limits": 0, "answer": 1, "exceeds a limit": 7}
    keys = legend({name: colour(number) for name, number in names.items()})
    return keys + plot(x, y, [line(x, y, joined, 0)], dots=dots, tall="19rem", titles=titles)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= TEN else plain(value)


def _is_beaten(point: Point, others: Iterable[Point]) -> bool:
    return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in others)

"""A plan as one offline page, or several plans side by side."""

import datetime
from collections.abc import Iterator, Sequence
from html import escape

from meshwright.pages.shell import header, page, section, table
from meshwright.planner.figures import Facts, bars_of, gigabytes, money, ranged, seconds, span_text, tile, verdict
from meshwright.planner.panels import errors, sensitivities
from meshwright.planner.pictures import machines, timeline
from meshwright.planner.query import Planned
from meshwright.planner.sensitivity import Progress, sensitivity
from meshwright.planner.tables import frontier, layouts, methods, strategies
from meshwright.predict.text import duration, remarks
from meshwright.spec.text import billions
from meshwright.version import __version__

PARTS = ("plan.css", "plan.js")


def plan_page(planned: Sequence[Planned], progress: Progress = lambda share, what: None) -> str:
    """The page of `plan --html`."""
    title = planned_title(planned)
    body = [header(title, planned_about(planned)), *plan_body(planned, progress), foot()]
    return page(f"{title} - plan", body, parts=PARTS)


def planned_title(planned: Sequence[Planned]) -> str:
    """The model, and the cluster if there is one."""
    model = planned[0].facts["model"]
    if len(planned) == 1:
        return f"{model} on {_cluster_name(planned[0].facts)}"
    return f"{model} on {len(planned)} clusters"


def planned_about(planned: Sequence[Planned]) -> str:
    """The line below the title, in HTML."""
    facts = planned[0].facts
    words = [
        f"{billions(facts['parameters'])} parameters",
        f"{facts['sequences_per_step']:,} x {facts['sequence_length']:,} tokens a step",
        f"{facts['steps']:,} steps",
    ]
    if len(planned) == 1:
        cluster = facts["cluster"]
        words.append(f"{cluster['devices']:,} devices of {cluster['memory_gb']:.1f} GB")
    words += [f"ranges cover {facts['interval']:.0%}", f"planned on {datetime.date.today():%d %B %Y}"]
    return escape(" · ".join((*words, f"Meshwright {__version__}")))


def foot() -> str:
    """The last line of the page."""
    return '<p class="foot">Predictions, not measurements. Made by meshwright plan.</p>'


def plan_body(planned: Sequence[Planned], progress: Progress = lambda share, what: None) -> Iterator[str]:
    """The sections of a plan; of several, a comparison and then the sections of each."""
    if len(planned) == 1:
        yield from _sections(planned[0], progress)
        return
    yield _comparison([one.facts for one in planned])
    for number, one in enumerate(planned):

        def part(share: float, what: str, number: int = number) -> None:
            progress((number + share) / len(planned), what)

        name = escape(_cluster_name(one.facts))
        yield f'<details class="plan"><summary>{name}</summary>{"".join(_sections(one, part))}</details>'


def _sections(planned: Planned, progress: Progress) -> Iterator[str]:
    facts, chosen = planned.facts, planned.plan.chosen
    yield _top(facts)
    yield strategies(facts)
    yield frontier(facts)
    if chosen:
        yield timeline(chosen)
        yield machines(planned)
        yield sensitivities(sensitivity(planned.plan, progress))
    yield layouts(facts)
    yield methods(facts)
    if chosen:
        yield errors(chosen)
        yield _recipe(planned)


def _top(facts: Facts) -> str:
    """The chosen layout's figures, and every remark of the terminal."""
    chosen = facts["chosen"]
    rows = "".join(f"<dt>{escape(label or 'problem')}</dt><dd>{escape(words)}</dd>" for label, words in remarks(facts))
    if not facts["runs_on_it"]:
        device = escape(facts["cluster"]["device"])
        rows += f"<dt>device</dt><dd>{device}: figures to compare with; this version trains on CPUs and GPUs</dd>"
    remarked = f'<section class="card"><dl class="remarks">{rows}</dl></section>'
    if not chosen:
        return remarked
    run, size = chosen["run_seconds"], chosen["memory_total"]
    tiles = [
        tile("Step", seconds(chosen["step_time"]["value"]), span_text(chosen["step_time"], seconds)),
        tile("Tokens/s and device", f"{chosen['tokens_per_second_per_device']:,.0f}", f"{chosen['mfu']:.0%} MFU"),
        tile("Memory", gigabytes(size["value"]), f"of {gigabytes(chosen['memory_available'])}, {chosen['verdict']}"),
        tile("Run", duration(run["value"]), f"{facts['steps']:,} steps"),
        _cost_tile(facts, chosen),
    ]
    words = (
        f'<p class="chosen"><b>{escape(chosen["strategy"])}</b> {verdict(chosen["verdict"])} '
        f"<code>{escape(chosen['text'])}</code></p>"
    )
    return f'{words}<div class="tiles">{"".join(tiles)}</div>{remarked}'


def _cost_tile(facts: Facts, chosen: Facts) -> str:
    value, _, span = money(facts, chosen).partition(" (")
    if not value:
        return tile("Cost", "unknown", "set price_per_hour in a cluster file")
    where = " at list price" if facts["cluster"].get("currency", "").endswith("list price") else ""
    return tile("Cost of the run", value, span.removesuffix(")") + where)


def _recipe(planned: Planned) -> str:
    code = escape(planned.write())
    words = "With the chosen layout, microbatch and recomputation, ready to train: meshwright train plan.yaml"
    copy = '<button type="button" class="copy">Copy</button>'
    return section("The recipe", f'<div class="code">{copy}<pre>{code}</pre></div>', about=words)


def _comparison(plans: list[Facts]) -> str:
    """One row for each cluster: its chosen layout with its costs."""
    shown = [(_cluster_name(facts), facts, facts["chosen"]) for facts in plans]
    known = [chosen for _, _, chosen in shown if chosen]
    if not known:
        reasons = ((name, facts["problem"] or "no layout fits") for name, facts, _ in shown)
        return section("Side by side", table((), list(reasons)))
    keys, bars = bars_of(known)
    drawn = dict(zip((id(one) for one in known), bars, strict=True))
    rows = "".join(_beside(name, facts, chosen, drawn) for name, facts, chosen in shown)
    drawn_rows = f'<div class="strategies">{rows}</div>'
    return section("Side by side", keys, drawn_rows, _figures(shown), _strategies_beside(shown))


def _beside(name: str, facts: Facts, chosen: Facts | None, drawn: dict[int, tuple[str, str]]) -> str:
    if chosen is None:
        reason = escape(facts["problem"] or "no layout that this version supports fits")
        title = f'<div class="strategy-name"><b>{escape(name)}</b></div>'
        return f'<div class="strategy">{title}<div class="why">{reason}</div></div>'
    memory, time = drawn[id(chosen)]
    return (
        f'<div class="strategy"><div class="strategy-name"><b>{escape(name)}</b>{verdict(chosen["verdict"])}</div>'
        f'<div><div class="figure">{escape(ranged(chosen["memory_total"], gigabytes))}</div>{memory}</div>'
        f'<div><div class="figure">{escape(ranged(chosen["step_time"], seconds))}</div>{time}</div>'
        f'<div class="why"><span>{escape(chosen["strategy"])}</span><code>{escape(chosen["text"])}</code></div></div>'
    )


def _figures(plans: Sequence[tuple[str, Facts, Facts | None]]) -> str:
    head = ("", "tokens/s and device", "tokens/s", "MFU", "run", "cost")
    rows = [
        (
            name,
            f"{chosen['tokens_per_second_per_device']:,.0f}",
            f"{chosen['tokens_per_second_per_device'] * facts['cluster']['devices']:,.0f}",
            f"{chosen['mfu']:.0%}",
            duration(chosen["run_seconds"]["value"]),
            money(facts, chosen),
        )
        for name, facts, chosen in plans
        if chosen
    ]
    return table(head, rows)


def _strategies_beside(plans: Sequence[tuple[str, Facts, Facts | None]]) -> str:
    """The step time of each strategy on each cluster."""
    names = dict.fromkeys(name for _, facts, _ in plans for name in facts["strategies"])

    def cell(facts: Facts, name: str) -> str:
        one = facts["strategies"].get(name)
        if one is None:
            return ""
        lost = one["verdict"] == "does not fit"
        text = f"needs {gigabytes(one['memory_total']['value'])}" if lost else seconds(one["step_time"]["value"])
        return text.replace(" ", "\u00a0")  # on one line

    rows = ((name, *(cell(facts, name) for _, facts, _ in plans)) for name in names)
    return "<h3>A step in each strategy</h3>" + table(("", *(name for name, _, _ in plans)), rows)


def _cluster_name(facts: Facts) -> str:
    cluster = facts["cluster"]
    if cluster["name"] == "local":
        return f"{cluster['devices']} x {cluster['device']} (local)"
    return cluster["name"]

"""What a plan's speed depends on: the same layout planned again for other batches, sequences, devices, networks and
precisions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.predict.candidate import Candidate
from meshwright.predict.engine import make_case, passes
from meshwright.predict.hardware import resized
from meshwright.predict.report import Plan
from meshwright.predict.search import search
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.fit import check_positions
from meshwright.spec.precision import Precision
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import Run

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
PRECISION = "Precision"
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and what comes next."""


@dataclass(frozen=True)
class OtherValue:
    """Another value of one setting."""

    label: str
    make: Callable[[], tuple[Run, ClusterSpec]]
    """The changed recipe and cluster; raises `UserError` if there is none."""
    now: bool
    """Whether it is the plan's own value."""


@dataclass(frozen=True)
class Point:
    """The best layout for another value, with the chosen layout's degrees of tp, cp, pp and ep."""

    label: str
    now: bool
    candidate: Candidate | None
    problem: str
    """Why there is none."""


@dataclass(frozen=True)
class Panel:
    """One setting's points, in order."""

    title: str
    points: tuple[Point, ...]
    ordered: bool = True
    """Whether the values are numbers."""


def sensitivity(plan: Plan, progress: Progress = lambda share, what: None) -> list[Panel]:
    """The panels of a plan that chose a layout; empty if it chose none."""
    if plan.chosen is None:
        return []
    settings = dict(_settings(plan))
    total, done, panels = sum(map(len, settings.values())), 0, []
    for title, values in settings.items():
        points = []
        for value in values:
            progress(done / total, f"{title.lower()}: {value.label}")
            points.append(_point(plan, plan.chosen, value))
            done += 1
        panels.append(Panel(title, tuple(points), ordered=title != PRECISION))
    return panels


def _point(plan: Plan, chosen: Candidate, value: OtherValue) -> Point:
    if value.now:
        return Point(value.label, True, chosen, "")
    layout = chosen.job.layout
    try:
        run, cluster = value.make()
        check_positions(run.data.sequence_length, plan.case.spec)
        if chosen.change:
            run = chosen.change.of(run)
        case = make_case(run, plan.case.spec, cluster, plan.case.limits, plan.case.base.model)
    except UserError as error:
        return Point(value.label, False, None, str(error))
    limits = replace(
        case.limits,
        change=chosen.change,
        degrees=(layout.tp, layout.cp, layout.pp, layout.ep),
        runs=passes(case.check(run)),
    )
    result = search(case.base, cluster, top=1, limits=limits)
    return Point(value.label, False, result.chosen, "does not fit" if result.legal else "no layout with these degrees")


def _settings(plan: Plan) -> Iterator[tuple[str, list[OtherValue]]]:
    run, cluster, base = plan.case.run, plan.case.cluster, plan.case.base

    def training(**changes: object) -> Run:
        return run.model_copy(update={"training": run.training.model_copy(update=changes)})

    def batch(size: int) -> Run:
        return training(global_batch=size, global_batch_tokens=None)

    def sequence(length: int) -> Run:
        same = batch(base.global_batch)
        return same.model_copy(update={"data": run.data.model_copy(update={"sequence_length": length})})

    yield (
        "Sequences a step",
        [
            OtherValue(f"{size:,}", lambda size=size: (batch(size), cluster), size == base.global_batch)
            for size in _whole(base.global_batch)
        ],
    )
    yield (
        "Tokens of a sequence",
        [
            OtherValue(f"{length:,}", lambda length=length: (sequence(length), cluster), length == base.sequence)
            for length in _whole(base.sequence)
        ],
    )
    yield (
        "Devices",
        [
            OtherValue(f"{count:,}", lambda count=count: (run, resized(cluster, count)), count == cluster.devices)
            for count in _whole(cluster.devices)
        ],
    )
    if cluster.devices > cluster.domain:
        yield "Network, Gb/s a node", [_network(run, cluster, factor) for factor in FACTORS]
    if base.precision.products == Precision.of(run.training.precision).products:
        yield PRECISION, [_precision(run, cluster, name) for name in PRECISIONS]


def _whole(value: int) -> list[int]:
    """The value times `FACTORS`, where that is a whole number."""
    return [int(value * factor) for factor in FACTORS if value * factor >= 1 and (value * factor) % 1 == 0]


def _network(run: Run, cluster: ClusterSpec, factor: float) -> OtherValue:
    rate = cluster.network_gb_s * factor
    label = f"{rate * cluster.per_node * 8:,.0f}"
    return OtherValue(label, lambda: (run, cluster.model_copy(update={"network_gb_s": rate})), factor == 1)


def _precision(run: Run, cluster: ClusterSpec, name: str) -> OtherValue:
    def make() -> tuple[Run, ClusterSpec]:
        products = Precision.of(name).products
        if products not in cluster.tflops:
            raise UserError(f"{cluster.device} has no products in {name}")
        return parse_spec(dump_recipe(run), Run, [f"training.precision={name}"]), cluster

    return OtherValue(name, make, name == run.training.precision)

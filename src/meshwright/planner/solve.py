"""Questions about a run: the fewest devices, the shortest or cheapest run, the longest sequence, the smallest batch at
full speed, the best model, the cheapest cluster.

Each question plans the recipe for several values of one quantity and picks one of the plans.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from meshwright.families import PRESETS, resolve_model
from meshwright.machine import find_machine
from meshwright.planner.query import Planned, Query
from meshwright.predict.blueprint import blueprint
from meshwright.predict.hardware import resized, resolve_cluster
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.recipe import plan_recipe
from meshwright.predict.search import ALIKE
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Run

Quantity = Literal["devices", "deadline", "budget", "sequence", "batch", "model", "cluster"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
MOST_DEVICES = 16384
MOST_SEQUENCES = 16384
"""Largest sizes that are tried, of published runs."""
SHORTEST = 512
"""Tokens of the shortest sequence that is tried."""
WORSE = 3
"""Sizes in a row that are no better, after which no larger one is tried."""
Progress = Callable[[str], None]
"""Called with the value that is planned next."""


@dataclass(frozen=True)
class PlanQuestion:
    """`--solve QUANTITY` with its limits."""

    quantity: Quantity
    deadline: float | None = None
    """Seconds within which the run must end."""
    budget: float | None = None
    """Largest price of the run, in the cluster's currency."""

    def check(self, clusters: Sequence[str]) -> None:
        """Raise `UserError` for a question that says too little or too much."""
        needs = {
            "devices": self.deadline is None and "--deadline, as in --deadline 7d",
            "budget": self.deadline is None and "--deadline: without one, one device may be the cheapest for years",
            "model": (self.deadline is None and self.budget is None) and "--deadline or --budget",
            "cluster": len(clusters) < 2 and "several --cluster",
        }
        if need := needs.get(self.quantity):
            raise UserError(f"--solve {self.quantity} needs {need}")
        if self.quantity != "cluster" and len(clusters) > 1:
            raise UserError(f"--solve {self.quantity} is for one cluster; give one --cluster, or --solve cluster")

    @property
    def has_limits(self) -> bool:
        """Whether the run has a deadline or a budget."""
        return self.deadline is not None or self.budget is not None

    def allows(self, facts: dict[str, Any]) -> bool:
        """Whether a plan's chosen layout is expected to keep the limits."""
        chosen = facts["chosen"]
        if chosen is None:
            return False
        if self.budget is not None and (chosen["run_cost"] is None or chosen["run_cost"]["value"] > self.budget):
            return False
        return self.deadline is None or chosen["run_seconds"]["value"] <= self.deadline

    def is_safe(self, facts: dict[str, Any]) -> bool:
        """Whether it keeps them at the slow end of its range too."""
        chosen = facts["chosen"]
        late = self.deadline is not None and chosen["run_seconds"]["high"] > self.deadline
        return not late and (self.budget is None or chosen["run_cost"]["high"] <= self.budget)


@dataclass(frozen=True)
class PlannedValue:
    """One value of the quantity, planned."""

    label: str
    amount: float
    """The value as a number: devices, tokens, sequences or parameters."""
    planned: Planned | None
    problem: str
    """Why there is no plan."""
    allowed: bool = False
    """Whether it keeps the question's limits."""
    tokens: float | None = None
    """Tokens that the limits allow."""
    loss: float | None = None
    """Expected loss after these tokens, nats per token."""

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The chosen layout's facts; None if nothing fits."""
        return self.planned.facts["chosen"] if self.planned else None


@dataclass(frozen=True)
class PlanProblem:
    """A question about a recipe."""

    query: Query
    question: PlanQuestion
    recipe: Run
    base_dir: Path
    """Folder of relative paths."""
    progress: Progress

    @property
    def cluster_name(self) -> str:
        """The query's cluster, else the recipe's."""
        return self.query.clusters[0] if self.query.clusters else self.recipe.cluster

    def cluster(self, name: str | None = None) -> ClusterSpec:
        """A cluster by its name; by default the query's or the recipe's."""
        where = name or self.cluster_name
        machine = find_machine(self.recipe.device) if where == "local" else None
        return resolve_cluster(where, base_dir=self.base_dir, machine=machine)

    def check(self) -> None:
        """Raise `UserError` for a recipe or a cluster that the question cannot be about."""
        option, question = f"--solve {self.question.quantity}", self.question
        timed = (question.has_limits or question.quantity == "deadline") and question.quantity != "model"
        if timed and self.recipe.known_steps() is None:
            raise UserError(
                f"{option}: training.epochs are counted when the data are prepared; set training.tokens in their place"
            )
        if question.quantity == "model" and self.recipe.finetune is not None:
            raise UserError(f"{option}: published scaling laws are of training from scratch; leave finetune out")
        if question.quantity in ("devices", "deadline", "budget") and "+" in self.cluster_name:
            raise UserError(f"{option}: {self.cluster_name} is of several kinds of device; name one, as in 8xh100")
        priced = question.budget is not None or question.quantity == "budget"
        for name in self.query.clusters or (self.cluster_name,) if priced else ():
            if self.cluster(name).price_per_hour is None:
                raise UserError(f"{option}: the price of {name} is not known; set price_per_hour in a cluster file")

    def spec(self, recipe: Run) -> ModelSpec:
        """The model of a recipe."""
        return resolve_model(recipe.model, base_dir=self.base_dir, vocab=recipe.data.tokenizer_vocab)

    def planned(self, label: str, amount: float, recipe: Run, cluster: str | ClusterSpec) -> PlannedValue:
        """A recipe planned on a cluster; a plan for a name can be written as a recipe."""
        limits = SearchLimits(margin=self.query.margin, methods=False)
        try:
            plan, facts = plan_recipe(recipe, base_dir=self.base_dir, cluster=cluster, top=1, limits=limits)
        except UserError as error:
            return PlannedValue(label, amount, None, str(error))
        problem = "" if facts["chosen"] else facts["problem"] or "does not fit"
        planned = Planned(recipe, cluster if isinstance(cluster, str) else None, plan, facts)
        return PlannedValue(label, amount, planned, problem, self.question.allows(facts))


@dataclass(frozen=True)
class Solved:
    """A question, what was planned for it, and the answer."""

    question: PlanQuestion
    options: tuple[PlannedValue, ...]
    answer: PlannedValue | None
    end: str
    """Why no further value was planned; empty if that needs no reason."""


def solve(query: Query, question: PlanQuestion, recipe: Run, base_dir: Path, progress: Progress) -> Solved:
    """Answer a question. Raises `UserError` for a question that says too little, and for what cannot be planned."""
    question.check(query.clusters)
    problem = PlanProblem(query, question, recipe, base_dir, progress)
    problem.check()
    match question.quantity:
        case "devices" | "deadline" | "budget":
            return _sizes(problem)
        case "sequence":
            return _sequences(problem)
        case "batch":
            return _batches(problem)
        case "model":
            return _models(problem)
        case "cluster":
            return _clusters(problem)


def _sizes(problem: PlanProblem) -> Solved:
    """Clusters of more and more devices, until the run gets no faster."""
    question, kind, named = problem.question, problem.cluster(), _bare_name(problem)
    if kind.device == "cpu":
        raise UserError(f"--solve {question.quantity}: clusters of CPUs are not sized; name a device, as in 8xh100")
    key: Callable[[PlannedValue], float] = _cost if question.quantity == "budget" else _seconds
    options: list[PlannedValue] = []
    for count in sizes(MOST_DEVICES):
        if question.deadline is not None and _ideal_seconds(options, count) > question.deadline:
            continue
        problem.progress(f"{count} devices")
        where = f"{count}x{named}" if named else resized(kind, count)
        options.append(problem.planned(f"{count}", count, problem.recipe, where))
        if (question.quantity == "devices" and options[-1].allowed) or _no_better(options, key):
            break
    allowed = [option for option in options if option.allowed]
    answer = min(allowed, key=(lambda option: option.amount) if question.quantity == "devices" else key, default=None)
    end = "" if allowed else f"up to {MOST_DEVICES:,} devices were considered"
    return Solved(problem.question, tuple(options), answer, end)


def sizes(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: sizes that divide usual batches."""
    power = 1
    while power <= most:
        yield power
        if power > 1 and power * 3 // 2 <= most:
            yield power * 3 // 2
        power *= 2


def _ideal_seconds(options: Sequence[PlannedValue], count: int) -> float:
    """Seconds of the run if `count` devices did nothing but the model's arithmetic, at the datasheet's rate; 0 as long
    as no layout is known."""
    for option in options:
        if option.chosen:
            return option.chosen["run_seconds"]["value"] * option.chosen["mfu"] * option.amount / count
    return 0.0


def _no_better(options: Sequence[PlannedValue], key: Callable[[PlannedValue], float]) -> bool:
    """Whether the last sizes brought nothing, after one that has a layout and, if any does, keeps the limits."""
    allowed, known = [one for one in options if one.allowed], [one for one in options if one.chosen]
    best = min(allowed, key=key) if allowed else min(known, key=_seconds, default=None)
    return best is not None and len(options) - 1 - options.index(best) >= WORSE


def _sequences(problem: PlanProblem) -> Solved:
    """Longer and longer sequences with as many tokens a step, until none fits."""
    cluster, recipe = problem.cluster(), problem.recipe
    tokens, most = recipe.sequences_per_step() * recipe.data.sequence_length, problem.spec(recipe).max_positions

    def planned(length: int) -> PlannedValue:
        problem.progress(f"sequences of {length:,} tokens")
        changed = _with_sequence(recipe, length, max(1, tokens // length))
        return problem.planned(f"{length:,}", length, changed, cluster)

    options, end, length = list[PlannedValue](), "", min(SHORTEST, most)
    while True:
        options.append(planned(length))
        if not options[-1].allowed and any(option.allowed for option in options):
            options.insert(-1, planned(length // 4 * 3))
            break
        if length == most:
            end = f"the model has {most:,} positions; model.max_positions sets others"
            break
        length = min(2 * length, most)
    answer = max((option for option in options if option.allowed), key=lambda option: option.amount, default=None)
    return Solved(problem.question, tuple(options), answer, end)


def _batches(problem: PlanProblem) -> Solved:
    """Larger and larger batches, until tokens a second grow no further."""
    cluster, length, options = problem.cluster(), problem.recipe.data.sequence_length, list[PlannedValue]()
    size = 1
    while size <= MOST_SEQUENCES:
        problem.progress(f"batches of {size:,} sequences")
        changed = _with_sequence(problem.recipe, length, size)
        options.append(problem.planned(f"{size:,}", size, changed, cluster))
        rates = [_rate(option) for option in options if option.chosen]
        if len(rates) > WORSE and rates[-1] <= rates[-1 - WORSE] * (1 + ALIKE):
            break
        size *= 2
    allowed = [option for option in options if option.allowed]
    best = max(map(_rate, allowed), default=0.0)
    answer = next((option for option in allowed if _rate(option) >= best * (1 - ALIKE)), None)
    return Solved(problem.question, tuple(options), answer, "")


def _models(problem: PlanProblem) -> Solved:
    """The published sizes of the recipe's family, each for as many tokens as the limits allow."""
    cluster, question, recipe = problem.cluster(), problem.question, problem.recipe
    own = problem.spec(recipe)
    if own.num_experts:
        raise UserError("--solve model: published scaling laws are of dense models; name a dense model of the family")
    recipes: dict[int, Run] = {}
    for name in PRESETS:
        changed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})
        spec = problem.spec(changed)
        if spec.family == own.family and not spec.num_experts:
            recipes[blueprint(spec).num_parameters] = changed  # of equal sizes, the latest
    options = []
    for size, changed in sorted(recipes.items(), key=lambda entry: entry[0]):
        name = changed.model.name or ""
        problem.progress(name)
        options.append(_trained(problem.planned(name, size, changed, cluster), question, cluster))
    known = [option for option in options if option.loss is not None]
    return Solved(problem.question, tuple(options), min(known, key=lambda option: option.loss or 0.0, default=None), "")


def _trained(option: PlannedValue, question: PlanQuestion, cluster: ClusterSpec) -> PlannedValue:
    """A model with the tokens that the limits allow, and the loss that they lead to."""
    if option.chosen is None:
        return option
    limits = [question.deadline] if question.deadline is not None else []
    if question.budget is not None and cluster.price_per_hour:
        limits.append(question.budget / (cluster.price_per_hour * cluster.devices) * 3600)
    tokens = _rate(option) * min(limits)
    return replace(option, allowed=True, tokens=tokens, loss=expected_loss(option.amount, tokens))


def expected_loss(parameters: float, tokens: float) -> float:
    """Loss in nats per token of a dense model after one pass over `tokens`: the law of Hoffmann et al. 2022
    (arXiv 2203.15556), with the constants of Besiroglu et al. 2024 (arXiv 2404.10102)."""
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def _clusters(problem: PlanProblem) -> Solved:
    """The clusters of the query: the cheapest that keeps the limits, or the fastest if a price is unknown."""
    options = []
    for name in problem.query.clusters:
        problem.progress(name)
        cluster = problem.cluster(name)
        options.append(problem.planned(cluster.name, cluster.devices, problem.recipe, name))
    allowed = [option for option in options if option.allowed]
    priced = all(option.chosen and option.chosen["run_cost"] for option in allowed)
    answer = min(allowed, key=_cost if priced else _seconds, default=None)
    end = "" if priced else "a price is unknown, so the fastest was taken; price_per_hour in a cluster file sets one"
    return Solved(problem.question, tuple(options), answer, end)


def _bare_name(problem: PlanProblem) -> str:
    """The cluster's name without its number of devices: `h100@400Gb/s`; empty for a file, this machine or a mix."""
    text = problem.cluster_name
    if text == "local" or "+" in text or (problem.base_dir / text).is_file():
        return ""
    return re.sub(r"^\s*\d+\s*x\s*", "", text, flags=re.IGNORECASE)


def _with_sequence(recipe: Run, length: int, sequences: int) -> Run:
    data = recipe.data.model_copy(update={"sequence_length": length})
    training = recipe.training.model_copy(update={"global_batch": sequences, "global_batch_tokens": None})
    return recipe.model_copy(update={"data": data, "training": training})


def _seconds(option: PlannedValue) -> float:
    return option.chosen["run_seconds"]["value"] if option.chosen else float("inf")


def _cost(option: PlannedValue) -> float:
    return option.chosen["run_cost"]["value"] if option.chosen and option.chosen["run_cost"] else float("inf")


def _rate(option: PlannedValue) -> float:
    """Tokens a second of the cluster."""
    if option.planned is None or option.chosen is None:
        return 0.0
    return option.chosen["tokens_per_second_per_device"] * option.planned.facts["cluster"]["devices"]

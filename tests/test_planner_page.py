"""The page of a plan: everything that the terminal says, and drawings that agree with the plan."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from meshwright.cli.main import main
from meshwright.families import resolve_model
from meshwright.planner.figures import gigabytes, ranged, seconds, time_parts
from meshwright.planner.links import link_traffic
from meshwright.planner.page import plan_page
from meshwright.planner.published import ENOUGH, measurements, published_error
from meshwright.planner.query import Planned, Query, answer, find_recipe
from meshwright.planner.sensitivity import sensitivity
from meshwright.planner.timeline import step_timeline
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import Candidate, evaluate
from meshwright.predict.comm import CommGroup
from meshwright.predict.engine import engine_job
from meshwright.predict.hardware import device_cluster, resolve_cluster
from meshwright.predict.layouts import SearchLimits, layouts
from meshwright.predict.search import search
from meshwright.predict.step_time import StepModel
from meshwright.predict.text import plan_lines, remarks
from meshwright.predict.traffic import traffic_without_maxima
from meshwright.spec.model import ModelSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run

SMALL = ("data.sequence_length=512", "training.global_batch=32")


def planned(what: str, *words: str, cluster: str, methods: bool = False) -> Planned:
    query = Query(what, words, (cluster,), methods=methods)
    return answer(query, *find_recipe(query.what, query.words))[0]


@pytest.fixture(scope="module")
def small() -> Planned:
    return planned("gpt2", *SMALL, cluster="8xa100-40g", methods=True)


def text_of(page: str) -> Iterator[str]:
    """The words of a page."""
    body = re.findall(r"<body>.*?(?=<script>)", page, re.DOTALL)[0]
    return ElementTree.fromstring(body.replace("<body>", "<all>") + "</all>").itertext()


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "gpt2", *SMALL, "--no-methods", "--html", str(page), "--cluster", "8xa100"]) == 0
    assert not re.search(r"(src|href|url)\s*[=(]", page.read_text())
    assert "gpt2 on 8 x A100-SXM-80GB" in "".join(text_of(page.read_text()))
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_page_says_everything_that_the_terminal_says(small: Planned) -> None:
    plan = small
    facts, words = plan.facts, squeezed("".join(text_of(plan_page([plan]))))
    for label, remark in remarks(facts):
        assert squeezed(f"{label}{remark}") in words
    for name, one in facts["strategies"].items():
        assert name in words
        assert squeezed(one["reason"]) in words, name
        assert ranged(one["memory_total"], gigabytes) in words
        assert ranged(one["step_time"], seconds) in words
    for one in facts["candidates"]:
        assert one["text"] in words
    for name, one in (facts.get("methods") or {}).items():
        assert f"{name}{one['verdict']}{gigabytes(one['memory'])}" in words
    assert squeezed(plan.write()) in words, "the recipe to copy"
    lines = [line for line in plan_lines(facts) if line and not line.startswith((" ", "*", "-"))]
    about = [facts["model"], f"{facts['parameters'] / 1e9:.3g}B parameters"]
    assert all(part in lines[0] and part in words for part in about)


@pytest.mark.slow
def test_a_recipe_on_the_page_plans_as_itself(small: Planned, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(small.write())
    query = Query(str(tmp_path / "plan.yaml"), methods=False)
    (again,) = answer(query, *find_recipe(query.what, query.words))
    assert again.facts["given"]["text"] == small.facts["chosen"]["text"]
    assert again.facts["given"]["step_time"] == small.facts["chosen"]["step_time"]


def test_parts_of_a_step_on_the_page_are_the_whole_step(small: Planned) -> None:
    for one in (*small.facts["candidates"], *small.facts["strategies"].values()):
        assert sum(time_parts(one).values()) == pytest.approx(one["step_time"]["value"], rel=1e-6)


def laid_out(cluster: str, **layout: Any) -> tuple[Run, ModelSpec, Candidate]:
    """GPT-2 in a layout, with its costs."""
    run = parse_spec(json.dumps({"model": "gpt2", "layout": layout, "training": {"micro_batch": 1}}), Run, SMALL)
    where, spec = resolve_cluster(cluster, base_dir=Path()), resolve_model(run.model, base_dir=Path())
    recompute = {"training": run.training.model_copy(update={"recompute": "full"})}
    run = run.model_copy(update=recompute)
    return run, spec, evaluate(engine_job(run, blueprint(spec), global_batch=32, micro_batch=1), where)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "interleaved-zero-bubble", "afab"])
def test_every_rank_of_the_timeline_does_its_work(schedule: str) -> None:
    """Its passes take what the plan predicts for them, without overlap, and the step ends after the slowest rank's."""
    *_, candidate = laid_out("8xa100-40g", pp=4, schedule=schedule, tp=2)
    found, model = step_timeline(candidate), StepModel(candidate.job, candidate.cluster)
    assert found is not None
    assert found.microbatches == found.of == 32
    for rank, spans in enumerate(found.ranks):
        passes, seconds_of = model.passes(rank), Counter[str]()
        for span in spans[:-2]:
            seconds_of[span.kind] += span.end - span.start
        assert seconds_of.total() == pytest.approx(32 * passes.whole.both, rel=1e-9)
        assert seconds_of["recompute"] == pytest.approx(32 * passes.repeated, rel=1e-9)
        wire = candidate.job.stage_layers[rank] * model.parts.blocks[0].tensor.both
        assert seconds_of["communication"] == pytest.approx(32 * wire, rel=1e-9)
        ends = [0.0, *(span.end for span in spans)]
        assert all(span.start >= end - 1e-12 for end, span in zip(ends, spans, strict=False))
        assert found.seconds > 32 * passes.whole.both


def test_one_stage_ends_when_the_plan_says() -> None:
    *_, candidate = laid_out("8xa100-40g", dp_shard=8, zero=3)
    found = step_timeline(candidate)
    assert found is not None
    assert found.seconds == pytest.approx(candidate.time.total, rel=1e-9)
    assert [span.kind for span in found.ranks[0][:2]] == ["forward", "communication"]


def test_a_long_step_is_drawn_in_part() -> None:
    *_, candidate = laid_out("8xa100-40g", pp=8)
    long = evaluate(replace(candidate.job, global_batch=4096), candidate.cluster)
    found = step_timeline(long)
    assert found is not None
    assert found.microbatches < found.of == 4096
    assert found.seconds < long.time.total
    assert step_timeline(evaluate(candidate.job.with_layout(pp=64), candidate.cluster)) is None


def test_bytes_go_over_the_links_between_their_ranks() -> None:
    """Groups inside a machine use its links alone; a ring over machines uses both, shared by its ranks there."""
    run, spec, candidate = laid_out("16xa100-40g", pp=2, tp=4, dp_shard=2, zero=1)
    sent = {one.title: one for one in link_traffic(run, spec, candidate)}
    assert sent["activations (tp)"].network == 0
    assert sent["activations between stages (pp)"].link == 0, "each stage is a machine"
    run, spec, candidate = laid_out("16xa100-40g", dp_shard=16, zero=3)
    (weights, _) = link_traffic(run, spec, candidate)
    total = sum(
        size for (_, axis), size in traffic_without_maxima(resolved(run, spec, candidate)).items() if axis == "shard"
    )
    assert weights.group == CommGroup(16, 8)
    assert weights.link == pytest.approx(total * 15 / 16, rel=1e-12)
    assert weights.network == pytest.approx(total * 15 / 16 / 8, rel=1e-12)


def resolved(run: Run, spec: ModelSpec, candidate: Candidate) -> ResolvedRun:
    return ResolvedRun(
        run=run, model=spec, global_batch=32, micro_batch=1, accumulation=candidate.job.microbatches, reasons={}
    )


@pytest.mark.slow
def test_other_values_are_searched_with_the_chosen_degrees(small: Planned) -> None:
    """The best of the layouts with these degrees, as brute force finds it."""
    chosen = small.plan.chosen
    assert chosen is not None
    layout = chosen.job.layout
    panels = {panel.title: panel for panel in sensitivity(small.plan)}
    point = {one.label: one for one in panels["Sequences a step"].points}["64"]
    assert point.candidate is not None
    assert point.candidate.job.global_batch == 64
    base = small.plan.case.base
    wider = replace(base, global_batch=64)
    limits = SearchLimits(degrees=(layout.tp, layout.cp, layout.pp, layout.ep))
    assert all(
        (one.tp, one.cp, one.pp, one.ep) == (layout.tp, layout.cp, layout.pp, layout.ep)
        for one, _ in layouts(wider, small.plan.case.cluster, limits)
    )
    best = search(wider, small.plan.case.cluster, top=1, limits=limits, prune=False).fastest
    assert best is not None
    assert point.candidate.time.total <= 1.03 * best.time.total
    devices = {one.label: one for one in panels["Devices"].points}["16"]
    assert devices.candidate is not None
    assert devices.candidate.cluster == device_cluster("a100-40g", 16, gpu_gb_s=small.plan.case.cluster.network_gb_s)
    assert panels["Precision"].points[-1].problem == "A100-SXM-40GB has no products in fp8"
    now = [one for panel in panels.values() for one in panel.points if one.now]
    assert len(now) == len(panels)
    assert all(one.candidate is chosen for one in now)


def test_published_errors_are_of_runs_like_the_plan(small: Planned) -> None:
    chosen = small.plan.chosen
    assert chosen is not None
    found = published_error(chosen)
    assert len(found.times) >= ENOUGH
    assert "dense models" in found.like
    assert not any(one.experts for one in found.times)
    assert {one.fitted for one in measurements()} == {True, False}


@pytest.mark.slow
def test_several_clusters_are_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "both.html"
    words = ["plan", "gpt2", *SMALL, "--cluster", "8xa100", "--cluster", "2xt4", "--html", str(page), "--json"]
    assert main(words) == 0
    plans = json.loads(capsys.readouterr().out)["clusters"]
    text = squeezed("".join(text_of(page.read_text())))
    assert "gpt2 on 2 clusters" in text
    for facts in plans:
        assert facts["cluster"]["name"] in text
        assert ranged(facts["chosen"]["step_time"], seconds) in text
    assert page.read_text().count('<details class="plan">') == 2
    for option in ("--explain", "--write"):
        assert main(["plan", "gpt2", "--cluster", "8xa100", "--cluster", "2xt4", option, str(tmp_path / "x")]) == 2


def test_clusters_side_by_side_fit_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clusters = [word for name in ("8xmi300x", "2xt4", "64xa100@400Gb/s") for word in ("--cluster", name)]
    assert main(["plan", "gpt2", *SMALL, *clusters]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "zero=" not in line) <= 80
    assert lines[-1] == "cost of the run in US dollars at list price"
    assert main(["plan", "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_plan_where_nothing_fits_has_a_page_with_the_reasons() -> None:
    plan = planned("llama-3-70b", "training.global_batch=8", cluster="2xt4")
    assert plan.facts["chosen"] is None
    words = squeezed("".join(text_of(plan_page([plan]))))
    assert "no layout that this version's trainer supports fits" in words
    assert all(squeezed(one["reason"]) in words for one in plan.facts["strategies"].values())


def test_figures_of_a_plan_have_eight_digits(small: Planned) -> None:
    """So that they are the same text on every release of Python: `sum` and `exp` differ in the last digits."""
    chosen = small.plan.chosen
    assert chosen is not None
    value = small.facts["chosen"]["step_time"]["value"]
    assert value == float(f"{evaluate(chosen.job, chosen.cluster).time.total:.8g}")
    assert len(re.sub(r"^0\.0*|\.", "", repr(value))) <= 8


def test_a_plan_for_another_machine_needs_none_of_this_ones_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> None:
        raise AssertionError(device)

    monkeypatch.setattr("meshwright.predict.recipe.find_machine", fails)
    assert planned("gpt2", *SMALL, "device=cuda", cluster="2xa100").facts["chosen"]
    with pytest.raises(AssertionError, match="cuda"):
        planned("gpt2", *SMALL, "device=cuda", cluster="local")

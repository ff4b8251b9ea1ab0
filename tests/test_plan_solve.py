"""`plan --solve`: each answer against all plans made one by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.planner.query import Query, find_recipe
from meshwright.planner.solve import PlanQuestion, Solved, expected_loss, sizes, solve
from meshwright.planner.solved import parse_duration, parse_tokens
from meshwright.predict.hardware import resolve_cluster
from meshwright.spec.errors import UserError

SMALL = ("training.global_batch=64", "data.sequence_length=1024", "training.tokens=10000000000")


def solved(question: PlanQuestion, *words: str, clusters: tuple[str, ...] = ("a100",), model: str = "gpt2") -> Solved:
    query = Query(model, (*SMALL, *words), clusters)
    recipe, folder = find_recipe(model, query.words)
    return solve(query, question, recipe, folder, lambda value: None)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `plan --json` says."""
    main(["plan", "gpt2", *SMALL, *words, "--no-methods", "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_fewest_devices_are_the_first_that_keep_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    result = solved(PlanQuestion("devices", parse_duration("6h")))
    assert result.answer is not None
    answer = int(result.answer.label)
    for count in (size for size in sizes(64) if size <= answer):
        chosen = planned(capsys, "--cluster", f"{count}xa100")["chosen"]
        assert (chosen["run_seconds"]["value"] <= 6 * 3600) == (count == answer), count


def test_the_cheapest_run_and_the_shortest_are_those_of_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    plans = {count: planned(capsys, "--cluster", f"{count}xa100")["chosen"] for count in sizes(64)}
    day = 86400.0
    cheapest = solved(PlanQuestion("budget", day)).answer
    assert cheapest is not None
    kept = {count: one for count, one in plans.items() if one and one["run_seconds"]["value"] <= day}
    assert int(cheapest.label) == min(kept, key=lambda count: kept[count]["run_cost"]["value"])
    limit = 1.2 * plans[int(cheapest.label)]["run_cost"]["value"]
    shortest = solved(PlanQuestion("deadline", budget=limit)).answer
    assert shortest is not None
    kept = {count: one for count, one in plans.items() if one and one["run_cost"]["value"] <= limit}
    assert int(shortest.label) == min(kept, key=lambda count: kept[count]["run_seconds"]["value"])


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    words = ("model.max_positions=65536", "training.micro_batch=1", "layout.offload=none")
    result = solved(PlanQuestion("sequence"), *words, clusters=("2xrtx 3060",), model="gpt2-large")
    assert result.answer is not None
    assert result.answer.chosen
    lengths = {option.amount: option for option in result.options}
    assert result.answer.amount * 4 / 3 in lengths or result.answer.amount * 1.5 in lengths
    assert all(option.chosen is None for length, option in lengths.items() if length > result.answer.amount)
    assert not result.end
    short = solved(PlanQuestion("sequence"), clusters=("8xa100",))
    assert short.answer is not None
    assert short.answer.amount == 1024
    assert "1,024 positions" in short.end


def test_the_batch_at_full_speed_is_the_smallest_within_the_error() -> None:
    result = solved(PlanQuestion("batch"), clusters=("8xa100",))
    assert result.answer is not None
    rates = {one.amount: one.chosen["tokens_per_second_per_device"] for one in result.options if one.chosen}
    enough = [size for size, rate in rates.items() if rate >= 0.97 * max(rates.values())]
    assert result.answer.amount == min(enough)


def test_the_model_has_the_least_loss_by_the_published_law() -> None:
    result = solved(PlanQuestion("model", parse_duration("2d")), clusters=("8xa100",))
    assert [option.label for option in result.options] == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    losses = []
    for option in result.options:
        assert option.planned
        assert option.chosen
        tokens = option.chosen["tokens_per_second_per_device"] * 8 * 2 * 86400
        assert option.tokens == pytest.approx(tokens)
        losses.append(1.8172 + 482.01 * option.amount**-0.3478 + 2085.43 * tokens**-0.3658)
    assert result.answer is result.options[losses.index(min(losses))]
    assert expected_loss(70e9, 1.4e12) == pytest.approx(1.9746, abs=1e-3)  # Chinchilla


def test_of_several_clusters_the_cheapest_that_keeps_the_deadline() -> None:
    clusters = ("8xa100", "8xh100", "2xa100")
    limit = parse_duration("5h")
    result = solved(PlanQuestion("cluster", limit), clusters=clusters)
    kept = [one for one in result.options if one.chosen and one.chosen["run_seconds"]["value"] <= limit]
    assert 0 < len(kept) < 3
    assert result.answer is min(kept, key=lambda one: one.chosen["run_cost"]["value"] if one.chosen else 0)
    unpriced = solved(PlanQuestion("cluster"), clusters=("2xa6000", "8xa100"))
    assert "a price is unknown" in unpriced.end
    assert unpriced.answer is unpriced.options[1]
    assert "price" not in result.end


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--solve", "devices"), "--solve devices needs --deadline, as in --deadline 7d"),
        (("--solve", "model"), "--solve model needs --deadline or --budget"),
        (("--solve", "cluster", "--cluster", "8xh100"), "--solve cluster needs several --cluster"),
        (("--solve", "batch", "--cluster", "8xh100", "--cluster", "h200"), "is for one cluster"),
        (("--deadline", "7d"), "--deadline is for --solve"),
        (("--solve", "devices", "--deadline", "soon"), "--deadline soon: give minutes, hours, days or weeks"),
        (("--solve", "deadline", "--budget", "0"), "--budget 0 is not allowed"),
        (("--solve", "devices", "--deadline", "1h", "--explain", "time"), "--explain is for one plan"),
        (("--solve", "budget", "--deadline", "1h", "--cluster", "t4"), "the price of t4"),
        (("--solve", "devices", "--deadline", "1h", "training.epochs=3"), "training.epochs are counted when the data"),
        (("--solve", "deadline", "--cluster", "8xh100+4xa100"), "8xh100+4xa100 is of several kinds of device"),
        (("--solve", "deadline", "--budget", "5", "--cluster", "t4"), "the price of t4 is not known"),
        (("--solve", "model", "--deadline", "1d", "finetune={method: lora}"), "laws are of training from scratch"),
        (("--tokens", "many"), "--tokens many: give a number of tokens, as in 300B or 1.5T"),
        (("--cluster", "8xh100+nothing"), "unknown device"),
        (("--cluster", "8xh100+"), "is not a name"),
    ],
)
def test_a_question_that_says_too_little_is_one_line(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2", *words]) == 2
    text = capsys.readouterr().err
    assert error in text
    assert len(text.splitlines()) == 1


def test_options_of_a_plan_are_refused_where_nothing_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "validate", "runs.csv", "--solve", "devices"]) == 2
    assert "--solve is for a plan of RECIPE; leave it out beside validate" in capsys.readouterr().err


def test_the_answer_is_written_as_a_recipe_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, page = tmp_path / "answer.yaml", tmp_path / "answer.html"
    words = ["plan", "gpt2", "training.global_batch=64", "--tokens", "1B", "--cluster", "a100@400Gb/s"]
    words += ["--solve", "devices", "--deadline", "2h"]
    assert main([*words, "--write", str(recipe), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert text.startswith(f"the fewest devices within 2.0 hours: {facts['answer']} x A100-SXM-80GB\n")
    written, _ = find_recipe(str(recipe), ())
    assert written.cluster == f"{facts['answer']}xa100@400Gb/s"
    assert written.layout.world_size == int(facts["answer"])
    assert written.training.tokens == 10**9
    assert main(["plan", str(recipe), "--no-methods"]) == 0  # and it plans as it is
    assert page.read_text().count('class="dot') == 2 * sum(1 for one in facts["options"] if one["plan"]["chosen"])
    assert "<td>" in page.read_text()


def test_mixed_clusters_are_as_slow_as_their_slowest_part(tmp_path: Path) -> None:
    fast, slow = (resolve_cluster(name, base_dir=tmp_path) for name in ("8xh100", "16xa100"))
    both = resolve_cluster("8xh100+16xa100", base_dir=tmp_path)
    assert both.devices == 24
    assert both.tflops["bf16"] == slow.tflops["bf16"]
    assert "fp8" in fast.tflops
    assert "fp8" not in both.tflops
    for name in ("memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "per_node", "domain"):
        assert getattr(both, name) == min(getattr(fast, name), getattr(slow, name)), name
    assert both.price_per_hour == pytest.approx((8 * 3.0 + 16 * 1.8) / 24)
    with pytest.raises(UserError, match="CPUs and GPUs"):
        resolve_cluster("8xh100+local", base_dir=tmp_path)


def test_numbers_as_people_write_them() -> None:
    assert parse_tokens("1.5T") == 1_500_000_000_000
    assert parse_tokens("300b") == 300 * 10**9
    assert parse_tokens("1000") == 1000
    assert parse_duration("1.5h") == 5400
    for text in ("", "T", "-1B", "nanB", "1e99"):
        with pytest.raises(UserError):
            parse_tokens(text)

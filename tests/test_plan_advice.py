"""Where nothing fits, `plan`, `check` and `layout: auto` say what would, in the order in which people try it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.machine import find_machine
from meshwright.predict.explain import relief
from meshwright.predict.recipe import plan_recipe
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

SMALL_DEVICE = ("cluster=1xrtx4090", "data.sequence_length=1024", "training.global_batch=64")
KINDS = ("finetune.method=lora (", "finetune.method=qlora (", "'layout.offload={optimizer: disk}' (", "8 devices (")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("model: llama-3-8b\n")
    return tmp_path / "run.yaml"


def in_order(text: str, parts: tuple[str, ...]) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_the_advice_is_adapters_offloading_and_more_devices(recipe: Path) -> None:
    plan, facts = plan_recipe(load_recipe(recipe, SMALL_DEVICE), base_dir=recipe.parent)
    assert facts["chosen"] is None
    assert [words.startswith(kind) for words, kind in zip(facts["advice"], KINDS, strict=True)] == [True] * 4
    assert plan.advice == facts["advice"]


def test_a_run_with_the_advice_fits(recipe: Path) -> None:
    for change in ("finetune.method=qlora", "layout.offload.optimizer=disk", "cluster=8xrtx4090"):
        words = [*SMALL_DEVICE, change, *(["training.recompute=full"] if "disk" in change else [])]
        plan, _ = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent)
        shown = plan.given or plan.chosen
        assert shown is not None
        assert shown.verdict == "fits", change


def test_a_shorter_sequence_is_advised_where_it_helps(recipe: Path) -> None:
    words = ("cluster=1xrtx4090", "data.sequence_length=131072", "training.global_batch=1", "finetune.method=qlora")
    words = (*words, "model.max_positions=131072", "layout.offload=none")
    _, facts = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent)
    assert any(advice.startswith("data.sequence_length=") for advice in facts["advice"])


def test_check_advises_the_same_model(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in "or model=gpt2"."""
    recipe.write_text("model: llama-3-8b\ndata: {sources: stdlib}\n")
    assert main(["check", str(recipe), f"run_dir={recipe.parent / 'run'}", *SMALL_DEVICE]) == 0
    warning = capsys.readouterr().err
    assert "or model=" not in warning
    assert in_order(warning, KINDS)


def test_layout_auto_that_fits_nothing_is_advised(recipe: Path) -> None:
    run = load_recipe(recipe, (*SMALL_DEVICE, "layout=auto"))
    with pytest.raises(UserError) as error:
        resolve_run(run, base_dir=recipe.parent, machine=replace(find_machine("cpu"), kind="gpu"))
    assert in_order(str(error.value), KINDS)


def test_explained_memory_ends_in_the_verdict(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last(*words: str) -> list[str]:
        main(["plan", str(recipe), *words, "--explain", "memory", "--no-methods"])
        lines = capsys.readouterr().out.splitlines()
        return lines[next(i for i, line in enumerate(lines) if line.startswith("  verdict ")) :]

    (fits,) = last("cluster=8xh100", "training.global_batch=8")
    assert "fits: " in fits
    assert " of 84.6 GB" in fits
    lost = last(*SMALL_DEVICE)
    assert "does not fit: needs " in lost[0]
    assert in_order("\n".join(lost[1:]), KINDS)
    own = ("layout.dp_shard=8", "layout.zero=3", "cluster=8xrtx4090", "training.micro_batch=1", "layout.offload=none")
    mended = last(*own, "data.sequence_length=8192", "training.recompute=none")
    assert "does not fit: needs " in mended[0]
    assert mended[1].split()[:2] == ["would", "fit"]
    assert "recompute=" in mended[1]


def test_an_offload_of_none_in_the_recipe_forbids_all_offloading(recipe: Path) -> None:
    """The line `disk` and the relief of the recipe's own layout offered it."""
    words = (*SMALL_DEVICE, "layout.offload=none", "training.recompute=full")
    plan, facts = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent)
    assert "offload" not in json.dumps(facts["strategies"] | {"advice": facts["advice"]})
    assert not facts["last_resort"]
    assert plan.given is not None
    assert "offload" not in (facts.get("relief") or "")
    assert "offload=" in (relief(plan.given.job, plan.given.cluster, 0.1) or "")


def test_check_offers_no_offloading_that_the_recipe_forbids(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text("model: llama-3-8b\ndata: {sources: stdlib}\n")
    words = [*SMALL_DEVICE, "layout.offload=none", f"run_dir={recipe.parent / 'run'}"]
    assert main(["check", str(recipe), *words]) == 0
    warning = capsys.readouterr().err
    assert "finetune.method=lora" in warning
    assert "offload" not in warning


def test_the_method_of_the_recipe_is_not_advised_again() -> None:
    run = Run.model_validate({"model": "llama-3-8b", "finetune": {"method": "lora"}, "cluster": "1xl4"})
    _, facts = plan_recipe(run, base_dir=Path())
    assert not any("method=lora" in words for words in facts.get("advice", []))

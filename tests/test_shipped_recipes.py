"""Every preset recipe: checked, planned on the cluster that it names, fits there, and rehearsed small."""

import json
import re
from pathlib import Path

import pytest

from conversations import TALKS, chat_tokenizer, lines
from meshwright.cli.common import presets
from meshwright.cli.main import main
from meshwright.families import resolve_model
from meshwright.families.registry import FAMILIES
from meshwright.machine import Machine
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import evaluate
from meshwright.predict.engine import Processor, engine_job
from meshwright.predict.hardware import resolve_cluster
from meshwright.prove.shrink import shrink
from meshwright.rehearse.world import rehearse
from meshwright.spec.recipe import load_recipe
from meshwright.trainer.resolve import resolve_run

RECIPES = {name: load_recipe(path) for name, path in presets().items()}
ON_CLUSTERS = [name for name, run in RECIPES.items() if run.device == "auto"]
"""All but the demonstration and the comparison, which are for a CPU."""
GIVEN = [name for name in ON_CLUSTERS if not RECIPES[name].layout.choose]


def resolved(name, base_dir):
    """The recipe, resolved on one machine of the cluster that it names."""
    run = RECIPES[name]
    cluster = resolve_cluster(run.cluster, base_dir=base_dir)
    machine = Machine("gpu", cluster.device, cluster.per_node, int(cluster.memory_gb * 1e9))
    return cluster, resolve_run(run, base_dir=base_dir, machine=machine)


def test_there_is_one_for_every_family_and_for_every_kind_of_training():
    assert len(RECIPES) >= 40
    families = {resolved_family(run.model, name) for name, run in RECIPES.items()}
    assert families == set(FAMILIES)
    layouts = [run.layout for run in RECIPES.values()]
    assert all(any(getattr(one, axis) > 1 for one in layouts) for axis in ("pp", "dp_replicate", "cp", "tp", "ep"))
    assert {one.zero_stage for one in layouts} == {0, 1, 2, 3}
    methods = {run.finetune.method for run in RECIPES.values() if run.finetune}
    assert methods == {"full", "lora", "ia3"}
    assert any(run.finetune and getattr(run.finetune, "base", "") == "nf4" for run in RECIPES.values())
    assert any(run.training.preference for run in RECIPES.values())


def resolved_family(model, name):
    return resolve_model(model, base_dir=Path(), vocab=RECIPES[name].data.tokenizer_vocab).family


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_short_and_says_what_it_is(name):
    text = presets()[name].read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert 1 <= len(comments) <= 2
    assert all(len(line) <= 120 for line in text.splitlines())
    assert len(text.splitlines()) <= 30
    run = RECIPES[name]
    assert (run.cluster == "local") == (name not in ON_CLUSTERS)
    assert run.run_dir.startswith("runs/")
    # what it starts from is made by another of them
    base = run.checkpoint.start_from
    assert base is None or base in {other.run_dir for other in RECIPES.values()} - {run.run_dir}


@pytest.mark.parametrize("name", GIVEN)
def test_it_fits_the_cluster_that_it_names(name, tmp_path):
    cluster, one = resolved(name, tmp_path)
    assert one.run.layout.world_size == cluster.devices
    job = engine_job(
        one.run,
        blueprint(one.model),
        global_batch=one.global_batch,
        micro_batch=one.micro_batch,
        processor=Processor.of(cluster),
    )
    assert evaluate(job, cluster).verdict == "fits"


@pytest.mark.every(16)
@pytest.mark.parametrize("name", ON_CLUSTERS)
def test_it_is_planned(name, capsys):
    assert main(["plan", str(presets()[name]), "--no-methods", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chosen"]["verdict"] == "fits"
    assert name not in GIVEN or not facts["given"] or facts["given"]["verdict"] == "fits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the recipes name besides: records, and the tokenizers of runs."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "conversations.jsonl").write_text(lines(*({"messages": talk} for talk in TALKS)))
    asked = [{"role": "user", "content": "What is it?"}]
    answers = [{"role": "assistant", "content": text} for text in ("That.", "No.")]
    pairs = [{"prompt": asked, "chosen": answers[:1], "rejected": answers[1:]}] * 40
    (folder / "preferences.jsonl").write_text(lines(*pairs))
    (folder / "text.txt").write_text("It says that words follow words. " * 20_000)
    for run in RECIPES.values():
        if run.data.tokenizer != "auto":
            chat_tokenizer(None).save(folder / run.data.tokenizer)
    return folder


@pytest.mark.every(4)
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_checked(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    recipe = folder / f"{name}.yaml"
    assert main(["init", name]) == 0
    recipe.write_text(capsys.readouterr().out)
    run = RECIPES[name]
    # nothing is trained here, so that there is no run to start from
    overrides = ["checkpoint.start_from=null", "model.weights=random"] if run.checkpoint.start_from else []
    overrides += ["data.sources=text.txt"] if "stdlib" in {source.path for source in run.data.sources} else []
    assert main(["check", str(recipe), *overrides]) == 0
    out = capsys.readouterr().out
    assert "no errors" in out
    if run.data.tokenizer != "auto":
        assert re.search("data.packing: best_fit, documents separate", out)


@pytest.mark.every(16)
@pytest.mark.parametrize("name", GIVEN)
def test_it_is_rehearsed_small(name, tmp_path):
    cluster, one = resolved(name, tmp_path)
    small = shrink(one.model_copy(update={"run": one.run.model_copy(update={"checkpoint": without_base(one.run)})}))
    (report,) = rehearse(small, [0], on_gpu=True, fp8="fp8" in cluster.tflops)
    assert report["parameters"] > 0
    assert report["peak"] > 0


def without_base(run):
    return run.checkpoint.model_copy(update={"start_from": None})

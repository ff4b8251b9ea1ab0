"""The verbs that load torch, end to end on a small run: train, resume, generate, eval, demo."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import meshwright
from launched import run_program
from meshwright.cli import demo
from meshwright.cli.main import main
from meshwright.trainer.run import train

RECIPE = """\
model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, max_positions: 32}
data: {sources: texts/*.txt, tokenizer_vocab: 280, sequence_length: 8, held_out: 0.3}
training:
  {steps: 3, global_batch: 4, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 1}, evaluation: {batches: 999}}
device: cpu
run_dir: runs/small
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a run was trained from another working directory than the recipe's."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipes/texts").mkdir(parents=True)
    (folder / "recipes/run.yaml").write_text(RECIPE)
    for number in range(8):
        (folder / f"recipes/texts/{number}.txt").write_text(f"fish number {number} swims in the sea\n" * 20)
    status, out, errors = run_program("train", "recipes/run.yaml", "--json", cwd=folder)
    assert status == 0, errors
    return folder, out, errors


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained[0])
    return trained[0]


@pytest.mark.slow
def test_training_for_machines_prints_json_alone_and_progress_beside_it(trained):
    folder, out, errors = trained
    result = json.loads(out)
    assert result["step"] == 3
    assert result["checkpoint"] == "runs/small/checkpoints/step-00000003"
    assert (folder / result["checkpoint"]).is_dir()
    assert "step 3/3  loss" in errors


def test_python_trains_the_recipe_in_a_file_from_any_folder(trained, tmp_path, monkeypatch):
    """Its relative paths are of its own folder, the run's directory of the working one, as for `meshwright train`."""
    monkeypatch.chdir(tmp_path)
    result = train(trained[0] / "recipes/run.yaml")
    assert result.checkpoint == Path("runs/small/checkpoints/step-00000003")
    assert result.loss == json.loads(trained[1])["loss"]
    assert "train" in dir(meshwright)


@pytest.mark.slow
def test_evaluation_of_the_saved_run_repeats_what_training_measured(trained, folder, capsys):
    at_the_end = json.loads(trained[1])["held_out_loss"]
    assert main(["eval", "runs/small", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    # The same tokens in the same samples; only the batch size, and so the order of fp32 sums, may differ.
    assert saved["loss"] == pytest.approx(at_the_end, rel=1e-6)
    assert saved["source"] == "held-out text of the run"
    # With the run's own tokenizer even if the data have grown: a newly trained one would differ.
    (folder / "recipes/texts/new.txt").write_text("zebras jump quickly over wavy boxes\n" * 20)
    assert main(["eval", "runs/small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == saved
    (folder / "recipes/texts/new.txt").unlink()


@pytest.mark.slow
def test_a_model_that_was_split_over_ranks_is_the_same_model(trained, folder, capsys):
    """Trained by two tensor-parallel ranks; evaluated and exported by one process, with one process's losses."""
    options = ["layout.tp=2", "run_dir=runs/split", "--json"]
    status, out, errors = run_program("train", "recipes/run.yaml", *options)
    assert status == 0, errors
    split, alone = json.loads(out), json.loads(trained[1])
    for figure in ("loss", "held_out_loss"):
        assert split[figure] == pytest.approx(alone[figure], rel=1e-5)
    assert main(["eval", "runs/split", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(split["held_out_loss"], rel=1e-6)
    assert main(["export", "runs/split", "--hf", "exports/split"]) == 0
    assert main(["eval", "exports/split", "--source", "recipes/texts/*.txt"]) == 0


def test_evaluation_on_other_text(folder, capsys):
    (folder / "other.txt").write_text("quite another text\n" * 40)
    assert main(["eval", "runs/small/checkpoints/step-00000003", "--source", "other.txt", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["eval", "runs/small", "--source", "other.txt", "--samples", "3"]) == 0
    text = capsys.readouterr().out
    assert "on other.txt\nloss " in text
    assert text.endswith(" 24 tokens\n")
    assert whole["tokens"] > 24
    (folder / "third.txt").write_text("a third\n" * 9)
    assert main(["eval", "runs/small", "--source", "other.txt", "--source", "third.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sources"]["other.txt"] == {figure: whole[figure] for figure in ("loss", "perplexity", "tokens")}
    parts = found["sources"].values()
    assert found["tokens"] == sum(part["tokens"] for part in parts)
    assert found["loss"] * found["tokens"] == pytest.approx(sum(part["loss"] * part["tokens"] for part in parts))


def test_generation_repeats_with_its_seed_and_not_with_another(folder, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "runs/small", "--prompt", "fish", "--max-tokens", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("fish")


def test_generation_takes_several_prompts_and_standard_input(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "runs/small", "--prompt", "-", "--prompt", "", "--json"]) == 0
    assert [pair["prompt"] for pair in json.loads(capsys.readouterr().out)["texts"]] == ["two\nlines", ""]


def test_an_exported_model_writes_what_the_run_writes(folder, tmp_path, capsys):
    exported = str(tmp_path / "hf")
    assert main(["export", "runs/small/checkpoints/step-00000003", "--hf", exported, "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["dtype"] == "fp32"
    assert proof["largest_logit_difference"] < 1e-5
    texts = []
    for model in ("runs/small/checkpoints/step-00000003", exported):
        words = ["generate", model, "--prompt", "fish", "--max-tokens", "20", "--temperature", "0"]
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["eval", exported]) == 2
    assert capsys.readouterr().err.endswith("is not a run, so it has no held-out text; give a text with --source\n")


def test_a_checkpoint_alone_generates_evaluates_exports_and_continues(folder, tmp_path, capsys):
    alone = tmp_path / "run/checkpoints/step-00000003"
    shutil.copytree(folder / "runs/small/checkpoints/step-00000003", alone)
    words = ["--prompt", "fish", "--max-tokens", "5", "--temperature", "0"]
    texts = []
    for model in ("runs/small", str(alone), str(tmp_path / "run")):
        assert main(["generate", model, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert main(["eval", str(alone), "--json"]) == 0
    assert main(["export", str(alone), "--hf", str(tmp_path / "hf")]) == 0
    again = [f"run_dir={tmp_path / 'run'}", f"data.sources={folder}/recipes/texts/?.txt", "training.steps=4"]
    assert main(["train", str(alone / "recipe.yaml"), *again, "--resume"]) == 0
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
    (alone / "tokenizer.json").write_text("{}")
    assert main(["generate", str(alone), *words]) == 2
    assert "tokenizer.json: 2 bytes, but" in capsys.readouterr().err


def test_resuming_continues_to_the_step_that_is_asked_for(folder, capsys):
    assert main(["train", "recipes/run.yaml", "--resume", "training.steps=5"]) == 0
    text = capsys.readouterr().out
    assert "trained to step 5" in text
    assert "step 3/5" not in text
    assert "next        meshwright generate runs/small" in text


@pytest.mark.slow
def test_other_data_are_continued_with_only_by_the_tokenizer_that_was_learnt(folder, capsys):
    (folder / "recipes/other").mkdir()
    for number in range(8):
        (folder / f"recipes/other/{number}.txt").write_text(f"{number} birds rest on the roof tonight\n" * 20)
    learnt = (folder / "runs/small/tokenizer/tokenizer.json").read_bytes()
    words = ["train", "recipes/run.yaml", "--resume", "data.sources=other/*.txt", "training.steps=6"]
    assert main(words) == 2
    assert (
        "data.tokenizer=auto assigns other ids to tokens than the tokenizer of runs/small, which this run continues; "
        "set data.tokenizer=../runs/small/tokenizer" in capsys.readouterr().err
    )
    words.append("data.tokenizer=../runs/small/tokenizer")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert (folder / "runs/small/tokenizer/tokenizer.json").read_bytes() == learnt
    assert "from here on the run sees other samples" in text
    assert "data.sources [texts/*.txt] -> [other/*.txt]" in text
    assert "position in the data" not in text
    assert "bit by bit" not in text
    assert main(words) == 0
    assert "nothing to train: the run is at step 6, and training.steps=6" in capsys.readouterr().out

    # The same tokens from another spelling of the path are the same data; one more file matched by a glob is not.
    words = [word.replace("other/*", "./other/*").replace("steps=6", "steps=7") for word in words]
    assert main(words) == 0
    assert "position in the data" in capsys.readouterr().out
    for number in (8, 9, 10):
        (folder / f"recipes/other/{number}.txt").write_text(f"{number} birds rest on the roof tonight\n" * 20)
    assert main([word.replace("steps=7", "steps=8") for word in words]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"the data have changed \(text: \+\d documents, \+[\d,]+ tokens\): from here on the run sees other samples",
        text,
    )
    assert "position in the data" not in text
    assert "bit by bit" not in text


@pytest.mark.slow
def test_the_demo_trains_measures_writes_and_never_overwrites_an_earlier_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("def main():\n    return 1\n" * 60)
    (tmp_path / "b.txt").write_text("def other():\n    return 2\n" * 60)
    sizes = ["model={family: llama, hidden: 16, num_layers: 1, num_heads: 2}", "layout={}", "training.steps=2"]
    data = [f"data={{sources: {tmp_path}/*.txt, tokenizer_vocab: 270, sequence_length: 16}}"]
    recipe = ["training.lr_schedule={warmup: 1}", "training.global_batch=2", "run_dir=runs/demo"]
    assert main(["demo", *sizes, *data, *recipe]) == 0
    text = capsys.readouterr().out
    assert "Perplexity on held-out files: " in text
    assert all(f"    {prompt.splitlines()[0]}" in text for prompt in demo.PROMPTS)
    assert "meshwright generate runs/demo --prompt" in text
    assert main(["demo", *sizes, *data, *recipe]) == 0
    assert "meshwright generate runs/demo-2 --prompt" in capsys.readouterr().out

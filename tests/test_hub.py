"""Models of the Hugging Face hub are found in the local cache by their ids, without a connection."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from meshwright import load_recipe, train
from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.spec.model import ModelFields
from meshwright.trainer.folder import read_resolved

RECIPE = """\
model: {name: org/tiny-1.0, weights: pretrained}
data: {sources: text.txt, sequence_length: 16, tokenizer: org/tiny-1.0}
finetune: {method: lora, rank: 2}
training: {steps: 1, global_batch: 2, precision: fp32, evaluation: {batches: 0}}
device: cpu
"""


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only model of a cache, with a recipe next to it."""
    fields = ModelFields(family="llama", hidden=16, num_layers=1, num_heads=2, ffn=32, vocab=300, max_positions=32)
    model = build_model(spec := resolve_model(fields, base_dir=tmp_path), device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    train_tokenizer(["1 and 2"], 300).save(tmp_path / "tokenizer")
    repository = tmp_path / "cache" / "models--org--tiny-1.0"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    tensors = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    export_hf(
        tensors, spec, repository / "snapshots" / "abc123", HfForm(tokenizer_dir=tmp_path / "tokenizer"), prove=False
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("1 and 2 and 3 and 4 " * 40)
    return repository / "snapshots" / "abc123"


@pytest.mark.parametrize("words", [[], ["model=org/tiny-1.0"]], ids=["weights given", "weights by default"])
def test_an_id_is_base_tokenizer_and_model_of_a_verb(
    snapshot: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "run.yaml", *words]) == 0
    train(load_recipe("run.yaml", ["run_dir=run", *words]))
    assert "starting from org/tiny-1.0\n" in capsys.readouterr().out
    assert read_resolved(Path("run/resolved.yaml")).run.model.weights == "pretrained"
    assert main(["generate", "org/tiny-1.0", "--prompt", "1", "--max-tokens", "2", "--device", "cpu"]) == 0
    assert main(["export", "run", "--adapter", "adapter"]) == 0
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny-1.0", "another machine has no such snapshot"


def test_what_is_not_there_is_told_with_the_command_that_gets_it(snapshot: Path, capsys) -> None:
    assert main(["check", "run.yaml", "model.name=org/tiny-2.0"]) == 1
    told = capsys.readouterr().err
    assert "error: model.name 'org/tiny-2.0' is not a directory, and as a model of the Hugging Face hub it is " in told
    assert f"not in the cache {snapshot.parents[2]}; download it: hf download org/tiny-2.0" in told
    assert main(["generate", "org/tiny-2.0", "--prompt", "1"]) == 2
    assert "or the hub id of a model in the local cache (hf download ID)" in capsys.readouterr().err
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    assert main(["check", "run.yaml"]) == 1
    assert "it is without *.safetensors in the cache" in capsys.readouterr().err
    assert main(["check", "run.yaml", "model=org/tiny-1.0"]) == 1
    assert "model.name 'org/tiny-1.0' has no weights" in capsys.readouterr().err
    (snapshot / "pytorch_model.bin").touch()
    assert main(["check", "run.yaml", f"model={snapshot}"]) == 1
    assert "has only .bin weights" in capsys.readouterr().err
    shutil.rmtree(snapshot)
    assert main(["check", "run.yaml", "model=llama-3.2-1b"]) == 1
    assert "'org/tiny-1.0' is not a directory" in capsys.readouterr().err, "the tokenizer's too"

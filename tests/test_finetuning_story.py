"""The story of docs/finetuning-story.md at the smallest size: every method lowers the loss of held-out answers."""

import importlib.util
import sys
from pathlib import Path

import pytest

from meshwright import load_recipe, train
from meshwright.cli.main import main
from meshwright.handover.export import export_trained
from meshwright.models.generate import Sampling
from meshwright.serve.trained import Settings, answer_texts, open_trained
from meshwright.trainer.metrics import read_journal

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "finetuning_story.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("finetuning_story", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def here(folder: Path, name: str) -> None:
    """Run in this process."""
    if name == "export":
        export_trained(open_trained(folder / "base", device="cpu"), folder / "base-hf")
    else:
        train(load_recipe(folder / f"{name}.yaml"), base_dir=folder)


def test_the_story(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talks = (
        [{"role": "user", "content": f"def get_{i}(self)"} for i in range(200)],
        [{"role": "assistant", "content": f"Return the number {i} of this object."} for i in range(200)],
    )
    monkeypatch.setattr(script, "talks", lambda: ({"messages": list(pair)} for pair in zip(*talks, strict=True)))
    (tmp_path / "text.txt").write_text("".join(f"def get_{i}(self):\n    return {i}\n" for i in range(400)))
    base = script.BASE | {
        "model": script.BASE["model"] | {"hidden": 32, "num_layers": 2},
        "data": {"sources": "text.txt", "tokenizer_vocab": 300, "sequence_length": 64},
        "training": script.BASE["training"] | {"steps": 10, "lr_schedule": {"name": "constant", "warmup": 0}},
    }
    samples = script.TUNED["training"]["samples"] | {"max_tokens": 8}
    training = {"steps": 12, "samples": samples, "lr_schedule": {"name": "constant", "warmup": 0}}
    tuned = script.TUNED | {"training": script.TUNED["training"] | training}
    found = script.story(tmp_path, here, base=base, tuned=tuned)
    before = found.pop("base model")
    assert before["trained"] < found["full"]["trained"] == found["full"]["parameters"]
    for method, figures in found.items():
        assert figures["loss"] < before["loss"] - (0.005 if method == "IA3" else 0.2), method
        assert set(figures["texts"]) == set(samples["prompts"])
    assert found["IA3"]["trained"] < found["LoRA, rank 16"]["trained"] < found["full"]["trained"]
    told = script.page(found | {"base model": before}, 200)
    assert "| QLoRA, rank 16 | 0.005 | " in told
    records = read_journal(tmp_path / "full" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "sample"] == [0, 0, 0, 12, 12, 12]
    trained = open_trained(tmp_path / "full", device="cpu")
    prompt = samples["prompts"][0]
    answers = answer_texts(trained, [prompt], Settings(max_tokens=8, sampling=Sampling(temperature=0)))
    assert answers == [found["full"]["texts"][prompt]], "generate --chat asks as training's samples did"
    assert (tmp_path / "full" / "tokenizer" / "chat_template.jinja").exists()


def test_samples_need_room(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "model: {family: llama, hidden: 32, num_layers: 1, num_heads: 2, ffn: 64}\n"
        "training: {samples: {prompts: [a], max_tokens: 1000000}}\n"
    )
    assert main(["check", "run.yaml", "device=cpu"]) == 1
    assert "run.yaml:2: training.samples.max_tokens=1000000 leaves no room for a prompt" in capsys.readouterr().err

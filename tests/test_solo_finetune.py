"""The one-file fine-tuning compared with the modular one: same base, same tokens, same losses, and the same adapter."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.data.prepare import StartingModel, prepare_corpus
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, resolve_model
from meshwright.handover.adapters import export_adapter
from meshwright.models import build_model, initialize
from meshwright.serve.trained import open_trained
from meshwright.spec.model import ModelFields
from meshwright.spec.run import Run
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.run import train

SOLO = Path(__file__).parents[1] / "solo" / "finetune_lora.py"
STEPS = 6


@pytest.mark.slow
def test_the_same_losses_and_the_same_adapter(tmp_path: Path) -> None:
    """float64 with a large epsilon, so that AdamW does not enlarge the rounding of other sums."""
    sizes = {"hidden": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 48, "max_positions": 64}
    spec = resolve_model(ModelFields(family="llama", vocab=300, init_std=0.2, **sizes), base_dir=tmp_path)
    base = build_model(spec, device="cpu")
    initialize(base, parameter_table(spec), seed=3)
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n" for i in range(500))
    (tmp_path / "text.py").write_text(text)
    train_tokenizer([text], 280).save(tmp_path / "tokenizer")
    tensors, folder = base.named_parameters(), tmp_path / "base"
    export_hf(tensors, spec, folder, HfForm(tokenizer_dir=tmp_path / "tokenizer", dtype=torch.float32), prove=False)
    run = Run.model_validate(
        {
            "model": {"name": "base", "weights": "pretrained"},
            "data": {"sources": ["text.py"], "sequence_length": 32, 
                     "cache_dir": str(tmp_path / "cache")},
            "training": {"steps": STEPS, "global_batch": 4, "precision": "fp64", "evaluation": {"batches": 0},
                         "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
                         "lr_schedule": {"name": "constant", "warmup": 2}},
            "finetune": {"method": "lora", "rank": 4, "alpha": 8.0},
            "device": "cpu",
            "run_dir": str(tmp_path / "run"),
        }
    )  # fmt: skip
    train(run, base_dir=tmp_path)
    expected = [r["loss"] for r in read_journal(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"]
    export_adapter(open_trained(tmp_path / "run", device="cpu", dtype="fp64"), tmp_path / "modular")

    found = importlib.util.spec_from_file_location("solo_finetune", SOLO)
    assert found is not None
    assert found.loader is not None
    solo = importlib.util.module_from_spec(found)
    found.loader.exec_module(solo)
    tokens = prepare_corpus(run.data, base_dir=tmp_path, model=StartingModel(tmp_path / "base")).streams[0].train.path
    words = f"--rank 4 --alpha 8 --steps {STEPS} --batch 4 --length 32 --lr 1e-2 --warmup 2 --dtype float64 --cpu"
    arguments = [str(tmp_path / "base"), "--tokens", str(tokens), *words.split(), "--save", str(tmp_path / "solo")]
    losses = solo.train(solo.parse(arguments))
    assert losses == pytest.approx(expected, rel=1e-7)
    assert losses[0] - losses[-1] > 0.01
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("modular", "solo"))
    assert ours.keys() == theirs.keys()
    assert max((ours[key] - theirs[key]).abs().max().item() for key in ours) < 1e-6

"""Weights of nanoGPT: the same numbers as in its file, without running code."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.cli.main import main
from meshwright.spec.recipe import load_recipe

ARGUMENTS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 24, "bias": True, "dropout": 0.0}


def state(*, bias: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of nanoGPT's model, by its names and in its orientation."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (24, 16), "wpe.weight": (8, 16)}
    for number in range(2):
        for name, shape in {
            "ln_1": (16,), "attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "ln_2": (16,),
            "mlp.c_fc": (64, 16), "mlp.c_proj": (16, 64),
        }.items():  # fmt: skip
            shapes[f"h.{number}.{name}.weight"] = shape
            shapes[f"h.{number}.{name}.bias"] = shape[:1]
    shapes |= {"ln_f.weight": (16,), "ln_f.bias": (16,)}
    generator = torch.Generator().manual_seed(0)
    found = {
        f"_orig_mod.transformer.{name}": torch.randn(shape, generator=generator) / math.sqrt(16)
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    }
    return found | {"_orig_mod.lm_head.weight": found["_orig_mod.transformer.wte.weight"]}


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "ckpt.pt"
    whole = {"model": state(), "model_args": ARGUMENTS, "iter_num": 5, "best_val_loss": torch.tensor(1.0), "config": {}}
    torch.save(whole | changes, path)
    return path


def test_weights_are_the_same_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path)
    (tmp_path / "train.py").write_text(
        "n_layer = 2\nmax_iters = 10\nbatch_size = 4\ngradient_accumulation_steps = 1\nwarmup_iters = 1\n"
    )
    assert main(["import", str(path), "train.py", "--weights", "mine", "--ranks", "1", "--write", "run.yaml"]) == 0
    assert "GELU is exact" in capsys.readouterr().err
    assert load_recipe(tmp_path / "run.yaml").model.name == "mine"
    stored, given = load_file(tmp_path / "mine" / "model.safetensors"), state()
    for name, tensor in stored.items():
        theirs = given[f"_orig_mod.{name if name.startswith('transformer.') else f'transformer.{name}'}"]
        assert torch.equal(tensor, theirs.T if theirs.shape != tensor.shape or "attn.c_proj.w" in name else theirs), (
            name
        )
    assert len(stored) == 2 + 2 * 12 + 2


def test_a_model_without_biases_has_zeros(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, model=state(bias=False), model_args=ARGUMENTS | {"bias": False})
    assert main(["import", str(path), "--weights", "mine"]) == 0
    assert "no biases" in capsys.readouterr().err
    biases = [tensor for name, tensor in load_file(tmp_path / "mine/model.safetensors").items() if "bias" in name]
    assert biases
    assert not any(tensor.any() for tensor in biases)


class Code:
    def __reduce__(self):
        return open, ("ran", "w")


BAD = {
    "code": ({"config": Code()}, "cannot be read as plain tensors"),
    "sizes": (
        {"model_args": ARGUMENTS | {"n_embd": "x"}},
        "model_args.n_embd: 'x' is not allowed: must be a whole number",
    ),
    "other": ({"model_args": None}, "is not a nanoGPT checkpoint"),
    "shape": ({"model_args": ARGUMENTS | {"vocab_size": 48}}, "which does not match model_args"),
    "missing": ({"model": {}}, "has no tensor"),
}


@pytest.mark.parametrize("what", BAD)
def test_other_files_are_one_sentence(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, **BAD[what][0])
    assert main(["import", str(path), "--weights", "mine"]) == 2
    assert BAD[what][1] in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
    assert not (tmp_path / "ran").exists()


def test_weights_need_a_checkpoint_and_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path)
    assert main(["import", str(path)]) == 2
    assert "--weights DIR" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("n_layer = 2\n")
    assert main(["import", "train.py", "--weights", "mine"]) == 2
    assert "ckpt.pt" in capsys.readouterr().err


def test_checkpoints_without_a_place_or_with_a_second_are_refused(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert main(["import", str(tmp_path / "one")]) == 2
    assert "one: a folder, which is read as a checkpoint; give --weights DIR" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "one"), str(tmp_path / "two"), "--weights", str(tmp_path / "w")]) == 2
    assert "two: a second checkpoint; give one" in capsys.readouterr().err

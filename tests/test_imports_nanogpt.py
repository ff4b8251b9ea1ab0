"""Configurations of nanoGPT: every constant of train.py is imported with its meaning, or named with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError


def nanogpt(folder: Path, content: str, **arguments: Any) -> tuple[dict[str, Any], Reading]:
    """The recipe of a configuration, and the reading."""
    (folder / "c.py").write_text(content)
    text, reading = import_files([folder / "c.py"], **{"ranks": 8, **arguments})
    return yaml.safe_load(text), reading


def why(reading: Reading, key: str) -> str:
    return "; ".join(reason for origin, reason in reading.without if key in origin)


def test_constants_that_are_not_set_are_train_pys(tmp_path: Path) -> None:
    recipe, reading = nanogpt(tmp_path, "wandb_log = False\n")
    assert recipe == {
        "model": {
            "family": "gpt2", "num_layers": 12, "num_heads": 12, "hidden": 768, "vocab": 50304, "max_positions": 1024,
        },
        "data": {
            "sources": [{"path": "data/openwebtext/train.bin", "tokens": "uint16"}], "sequence_length": 1024,
        },
        "training": {
            "steps": 600000, "global_batch": 480, "micro_batch": 12, "clip": 1.0, "compile": True, "seed": 1337,
            "optimizer": {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "lr_schedule": {"name": "cosine", "warmup": 2000, "final": 0.1},
            "evaluation": {"every": 2000, "batches": 200},
        },
        "layout": {"dp_replicate": 8},
        "checkpoint": {"every": 2000, "keep_last": 1},
        "run_dir": "out",
    }  # fmt: skip
    assert "always has biases" in why(reading, "c.py (nanoGPT's default): bias=False")
    assert reading.settings["training.seed"][1] == "c.py (nanoGPT's default): seed=1337"
    assert reading.settings["training.compile"][1] == "c.py (nanoGPT's default): compile=True"


def test_what_is_said_counts_before_the_defaults(tmp_path: Path) -> None:
    said = """
out_dir = 'mine'
eval_interval = 7
eval_iters = 3
always_save_checkpoint = False
dataset = 'shakespeare_char'
block_size = 256
bias = True
compile = False
grad_clip = 0.0
weight_decay = 0.0
max_iters = 5000
lr_decay_iters = 5000
gradient_accumulation_steps = 1
batch_size = 64
"""
    recipe, reading = nanogpt(tmp_path, said, ranks=1)
    assert recipe["run_dir"] == "mine"
    assert recipe["checkpoint"] == {"every": 7, "keep_last": 1, "keep_best": 1}
    assert recipe["training"]["evaluation"] == {"every": 7, "batches": 3}
    assert recipe["model"]["vocab"] == 65
    assert recipe["model"]["max_positions"] == recipe["data"]["sequence_length"] == 256
    assert recipe["training"].get("compile", False) is False
    assert recipe["training"]["clip"] is None
    assert recipe["training"]["optimizer"]["weight_decay"] == 0.0
    assert recipe["training"]["global_batch"] == 64
    assert not reading.without


def test_a_decay_that_ends_after_the_last_step_is_named(tmp_path: Path) -> None:
    _, reading = nanogpt(tmp_path, "max_iters = 6000\n")
    assert "end at the last step" in why(reading, "c.py (nanoGPT's default): lr_decay_iters=600000")
    _, reading = nanogpt(tmp_path, "max_iters = 6000\nlr_decay_iters = 6000\n")
    assert not why(reading, "lr_decay_iters")


@pytest.mark.parametrize(
    "content",
    [
        "warmup_iters = 50\nmin_lr = 1e-6\nlr_decay_iters = 9\ndecay_lr = False\n",
        "decay_lr = False\nwarmup_iters = 5\n",
    ],
)
def test_without_decay_the_rate_is_constant_wherever_that_stands(tmp_path: Path, content: str) -> None:
    recipe, reading = nanogpt(tmp_path, content)
    assert recipe["training"]["lr_schedule"] == {"name": "constant", "warmup": 0}
    assert "decay_lr=False" in why(reading, "warmup_iters")
    assert len(reading.without) == content.count("\n")  # with the biases, without decay_lr itself


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_openais_weights_are_named_with_their_sizes(tmp_path: Path, name: str) -> None:
    recipe, reading = nanogpt(tmp_path, f"n_layer = 3\nbias = False\ninit_from = '{name}'\nblock_size = 512\n")
    assert recipe["model"] == {"name": f"openai-community/{name}", "weights": "pretrained"}
    assert recipe["data"]["sequence_length"] == 512
    assert [origin for origin, _ in reading.without] == ["c.py: n_layer=3", "c.py: bias=False"]
    assert f"init_from={name} has its own" in why(reading, "n_layer")


def test_other_starts(tmp_path: Path) -> None:
    _, reading = nanogpt(tmp_path, "init_from = 'resume'\n")
    assert "--weights" in why(reading, "init_from=resume")
    with pytest.raises(UserError, match=r"c\.py: init_from=gpt3: must be scratch, resume, gpt2, "):
        nanogpt(tmp_path, "init_from = 'gpt3'\n")


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "import time\n", "batchsize = 12\n", "batch_size = None\n"]
)
def test_a_file_that_sets_nothing_of_train_py_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"c\.py: sets nothing that nanoGPT's train\.py knows; expected lines such as"):
        nanogpt(tmp_path, content)


def test_ranks_that_do_not_divide_the_accumulation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gradient_accumulation_steps=40: .* multiple of the number of ranks"):
        nanogpt(tmp_path, "batch_size = 12\n", ranks=3)


def test_a_configuration_that_only_evaluates_says_so(tmp_path: Path) -> None:
    _, reading = nanogpt(tmp_path, "eval_only = True\n")
    assert "meshwright eval" in why(reading, "eval_only=True")


def test_a_model_that_is_given_keeps_its_sizes(tmp_path: Path) -> None:
    recipe, reading = nanogpt(tmp_path, "batch_size = 4\n", model="./mine")
    assert recipe["model"] == {"name": "./mine"}
    assert not reading.without
    recipe, reading = nanogpt(tmp_path, "init_from = 'gpt2'\n", model="./mine")
    assert recipe["model"] == {"name": "./mine"}
    assert "--model ./mine sets model.name" in why(reading, "init_from=gpt2")


def test_what_another_file_says_counts_before_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("batch_size = 12\n")
    zero = '{"train_batch_size": 480, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}'
    (tmp_path / "z.json").write_text(zero)
    text, reading = import_files([tmp_path / "c.py", tmp_path / "z.json"], ranks=8)
    assert yaml.safe_load(text)["training"]["clip"] == 0.5
    assert not why(reading, "gradient_clipping")


def test_values_of_another_kind_are_one_sentence(tmp_path: Path) -> None:
    for value in ("'40'", "[40]", "2.5", "True"):
        with pytest.raises(UserError, match=r"c\.py: gradient_accumulation_steps=.*: must be a whole number"):
            nanogpt(tmp_path, f"gradient_accumulation_steps = {value}\n")
    _, reading = nanogpt(tmp_path, "gradient_accumulation_steps = 'auto'\n")
    assert any("gradient_accumulation_steps=auto" in note for note in reading.notes)

"""The YAML of Megatron-LM's functional tests."""

import re
from pathlib import Path

import pytest
import yaml

from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

FILES = Path(__file__).parent / "fixtures" / "imports"
DENSE, EXPERTS = FILES / "megatron_test.yaml", FILES / "megatron_test_moe.yaml"


def test_flags_of_a_test_are_those_of_a_script(tmp_path: Path) -> None:
    recipe = yaml.safe_load(import_files([DENSE], ranks=8)[0])
    words = [
        f"{flag} {'' if value is True else value}"
        for flag, value in yaml.safe_load(DENSE.read_text())["MODEL_ARGS"].items()
        if flag != "--recompute-modules"
    ]
    (tmp_path / "train.sh").write_text(f"python pretrain_gpt.py {' '.join(words)}\n")
    assert recipe == yaml.safe_load(import_files([tmp_path / "train.sh"], ranks=8)[0])
    assert recipe["model"]["num_kv_heads"] == 2
    assert recipe["layout"] == {"tp": 2, "dp_shard": 4, "zero": 1}


def test_lists_and_merged_entries_are_read() -> None:
    text, reading = import_files([EXPERTS], ranks=4)
    recipe = yaml.safe_load(text)
    assert recipe["model"]["family"] == "mixtral"
    assert recipe["data"]["sources"] == [{"path": "data/a.bin", "weight": 0.3}, {"path": "data/b.bin", "weight": 0.7}]
    assert recipe["training"]["steps"] == 100
    told = dict(reading.without)
    assert "taken as absent" in told["megatron_test_moe.yaml: overlap-grad-reduce=False"]
    assert "another model than GPT" in told["megatron_test_moe.yaml: hybrid-layer-pattern=M*M*"]


@pytest.mark.parametrize("path", [DENSE, EXPERTS])
def test_no_key_of_a_test_is_lost_in_silence(path: Path) -> None:
    text, _ = import_files([path], ranks=8)
    values = yaml.safe_load(path.read_text())
    keys = [*(values.keys() - {"MODEL_ARGS", "BASE_MODEL_ARGS"}), *(flag[2:] for flag in values["MODEL_ARGS"])]
    assert not [key for key in keys if not re.search(rf"\b{re.escape(key)}\b", text)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MODE: inference\nMODEL_ARGS: {--num-layers: 2}", "MODE=inference: no training"),
        ("MODEL_ARGS:", "MODEL_ARGS=None: must be a mapping of flags"),
        ("MODEL_ARGS: [--num-layers 2]", "must be a mapping of flags"),
        ("MODEL_ARGS: {trainer.num_nodes: 1}", "trainer.num_nodes changes a NeMo recipe in Python"),
        ("MODEL_ARGS: {--num-layers: 2, --bf16: 3}", "bf16=3: the flag has no value"),
        ("MODEL_ARGS: {--num-layers: {a: 2}, --hidden-size: 8}", "num-layers="),
    ],
)
def test_what_is_no_training_ends_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model_config.yaml").write_text(f"{text}\n")
    with pytest.raises(UserError) as caught:
        import_files([tmp_path / "model_config.yaml"])
    assert said in str(caught.value)

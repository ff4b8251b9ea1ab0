"""Multimodal models: the text model inside is trained like any other, and an export has the rest unchanged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from exact import make_exact
from losses import logits_of
from meshwright import Run, train
from meshwright.checkpoint.hf import HfForm, HfWeights, export_hf
from meshwright.cli.main import main
from meshwright.engines.engine import InexpressibleError
from meshwright.engines.tuning import TrlEngine
from meshwright.families import parameter_table, read_hf_directory, state_table
from meshwright.models import build_model, named_tensors
from meshwright.serve.trained import open_trained
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import one_step
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from multimodal import MODELS, PROCESSOR, logits_of_text, open_whole, save_multimodal, with_norms_in_float64
from test_equivalence import assert_equal
from test_foreign import foreign_run, recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft's call of transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DELTA_RULE = ("qwen3_5", "qwen3_5_moe")
OURS = {
    "gemma3": "gemma3",
    "mistral3": "mistral",
    "llava": "llama",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
}
"""Models whose text model our own family computes."""
ROOM = 20 * 40 * torch.finfo(torch.float64).eps
"""The logits follow from 20 operations in a row (2 layers of 4 products, 2 norms, a softmax and 2 sums; a norm and the
head), each of sums of at most 40 terms, the width of feed-forward layers: n terms round to n epsilons."""
TOKENS_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multimodal")
    save_multimodal(folder)
    return folder


def copied(directory: Path, folder: Path) -> Path:
    shutil.copytree(directory, folder)
    return folder


def respelled(directory: Path, folder: Path, old: str, new: str) -> Path:
    """A copy whose tensors have another prefix: releases of transformers write one model in several spellings."""
    copied(directory, folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {new + key.removeprefix(old) if key.startswith(old) else key: one for key, one in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def ours(directory: Path) -> Any:
    spec = read_hf_directory(directory)
    model, weights = build_model(spec, device="cpu", dtype=torch.float64), HfWeights(directory, spec)
    for row in parameter_table(spec) + state_table(spec):
        named_tensors(model)[row.name].copy_(weights.read_rows(row.name, 0, row.shape[0]))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_text_is_computed_as_by_the_whole_model(
    directories: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the whole model; an export has every tensor, the changed ones too, and the whole model reads it."""
    model = ours(directories / name)
    assert model.spec.family == OURS.get(name, "transformers")

    def opened(directory: Path) -> torch.nn.Module:
        """Our families compute norms in float64; where transformers computes both, both norms are in fp32."""
        whole = open_whole(directory)
        return with_norms_in_float64(whole) if name in OURS and name not in DELTA_RULE else whole

    if name in DELTA_RULE:
        make_exact(monkeypatch)

    wanted = logits_of_text(opened(directories / name), TOKENS_BT)
    room = ROOM if name in OURS else 0
    assert (logits_of(model, TOKENS_BT) - wanted).abs().max() <= room * wanted.abs().max()

    changed = {key: tensor.add(0.1) for key, tensor in named_tensors(model).items()}
    export_hf(changed.items(), model.spec, tmp_path / "out", HfForm(dtype=torch.float32, rest=directories / name))
    before, after = (load_file(folder / "model.safetensors") for folder in (directories / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    text = tuple(file for _, file in model.spec.wrapper.files)
    rest = {key for key in before if not key.startswith(text)}
    assert any("vis" in key for key in rest)
    assert all(torch.equal(before[key], after[key]) == (key in rest) for key in before)
    assert all((tmp_path / "out" / file).read_text() == json.dumps(content) for file, content in PROCESSOR.items())
    for key, tensor in changed.items():
        named_tensors(model)[key].copy_(tensor.float())
    found = logits_of_text(opened(tmp_path / "out"), TOKENS_BT)
    assert (logits_of(model, TOKENS_BT) - found).abs().max() <= room * found.abs().max()
    assert (found - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gemma3", "language_model.model.", "model.language_model."),
        ("mistral3", "language_model.", "model.language_model."),
        ("qwen2_5_vl", "model.", "model.language_model."),
        ("qwen3_5", "model.language_model.", "language_model.model."),
    ],
)
def test_every_spelling_of_the_files_is_read(directories: Path, tmp_path: Path, name: str, old: str, new: str) -> None:
    head = {
        "mistral3": ("model.language_model.lm_head.", "lm_head."),
        "qwen3_5": ("lm_head.", "language_model.lm_head."),
    }
    directory = respelled(directories / name, tmp_path / "a", old, new)
    if name == "mistral3":
        directory = respelled(directory, tmp_path / "b", "model.language_model.model.", "model.language_model.")
    if name in head:
        directory = respelled(directory, tmp_path / "c", *head[name])
    assert torch.equal(logits_of(ours(directory), TOKENS_BT), logits_of(ours(directories / name), TOKENS_BT))


def test_experts_that_released_files_store_transposed(directories: Path, tmp_path: Path) -> None:
    directory = copied(directories / "qwen3_vl_moe", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    stored = {key: one.mT.contiguous() if ".experts." in key else one for key, one in tensors.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    model = ours(directory)
    assert torch.equal(logits_of(model, TOKENS_BT), logits_of(ours(directories / "qwen3_vl_moe"), TOKENS_BT))
    export_hf(named_tensors(model).items(), model.spec, tmp_path / "out", HfForm(dtype=torch.float32, rest=directory))
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in stored.items())


def test_sizes_that_config_json_leaves_to_transformers(directories: Path, tmp_path: Path) -> None:
    """Released configs name few sizes of the text model, and older ones have no section for it."""
    directory = copied(directories / "gemma3", tmp_path / "gemma3")
    config = json.loads((directory / "config.json").read_text())
    usual = transformers.Gemma3TextConfig().to_dict()
    config["text_config"] = {key: one for key, one in config["text_config"].items() if usual.get(key) != one}
    assert "rms_norm_eps" not in config["text_config"]
    (directory / "config.json").write_text(
        json.dumps(config | {"text_config": config["text_config"] | {"model_type": "gemma3_text"}})
    )
    assert torch.equal(logits_of(ours(directory), TOKENS_BT), logits_of(ours(directories / "gemma3"), TOKENS_BT))

    directory = copied(directories / "qwen2_5_vl", tmp_path / "qwen2_5_vl")
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"]
    (directory / "config.json").write_text(json.dumps(text | config))
    assert torch.equal(logits_of(ours(directory), TOKENS_BT), logits_of(ours(directories / "qwen2_5_vl"), TOKENS_BT))


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "gemma4", "llama4", "mistral3", "qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("strategy", ["ddp", "zero-3"])
def test_layouts_equal_one_process(ranks: RankPool, directories: Path, name: str, strategy: str) -> None:
    layout = LAYOUTS[strategy]
    outcome = ranks.run(layout.world_size, one_step, foreign_run(directories / name, layout))[0]
    alone = one_step(foreign_run(directories / name, LayoutSpec()))
    assert alone is not None
    assert_equal(outcome, alone, dtype=torch.float64 if name in OURS else torch.float32, slope=5 * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks_of"), [("gemma3", {"dp_shard": 2}), ("qwen2_5_vl", {"tp": 2})])
def test_from_a_directory_to_a_directory(
    directories: Path, tmp_path: Path, name: str, ranks_of: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Two steps on two ranks equal two on one process; the export opens with the whole model's class, with the trained
    text and the rest as it was."""
    trained = {}
    for number, layout in enumerate(({}, ranks_of)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "run.yaml").write_text(json.dumps(recipe(folder, directories / name, layout=layout)))
        assert main(["train", str(folder / "run.yaml")]) == 0
        assert main(["export", str(folder / "run"), "--hf", str(folder / "out"), "--dtype", "fp32"]) == 0
        trained[number] = logits_of_text(open_whole(folder / "out"), TOKENS_BT)
        before, after = (load_file(one / "model.safetensors") for one in (directories / name, folder / "out"))
        assert before.keys() == after.keys()
        kept = {key for key, tensor in before.items() if torch.equal(tensor, after[key])}
        assert {key for key in kept if "vis" in key} == {key for key in before if "vis" in key}
        assert not [key for key in kept if "layers" in key and "vis" not in key]
    assert "the text model of the multimodal" in capfd.readouterr().out
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=2e-4)
    assert (trained[0] - logits_of_text(open_whole(directories / name), TOKENS_BT)).abs().max() > 0.01
    receipt = json.loads((tmp_path / "1/out/receipt.json").read_text())
    assert {reading["program"] for reading in receipt["readings"]} == {"meshwright", "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "llama4"])
def test_adapters_fit_the_whole_model(directories: Path, tmp_path: Path, name: str) -> None:
    """peft adds an adapter of the text model to the whole model, and the merged model is a whole one."""
    train(Run.model_validate(recipe(tmp_path, directories / name, finetune={"method": "lora", "rank": 4})))
    assert main(["export", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")]) == 0
    receipt = json.loads((tmp_path / "adapter/receipt.json").read_text())
    assert {reading["program"] for reading in receipt["readings"]} == {"meshwright", "peft"}
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "out"), "--merge", "--dtype", "fp32"]) == 0
    tuned = logits_of(open_trained(tmp_path / "run", device="cpu", dtype="fp64").model, TOKENS_BT)
    found = logits_of_text(open_whole(tmp_path / "out"), TOKENS_BT)
    assert (tuned - found).abs().max() < 1e-5
    assert (found - logits_of_text(open_whole(directories / name), TOKENS_BT)).abs().max() > 1e-3


def test_trl_is_refused_where_its_loss_finds_no_model_without_head(directories: Path, tmp_path: Path) -> None:
    def run(name: str) -> ResolvedRun:
        return resolve_run(Run.model_validate(recipe(tmp_path, directories / name)), base_dir=tmp_path)

    def foreign(name: str) -> transformers.PreTrainedModel:
        config = AutoConfig.for_model(**json.loads(run(name).model.foreign.config))  # pyright: ignore[reportOptionalMemberAccess]
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(InexpressibleError, match=r"model.name=.*does not find in Llama 4's"):
        TrlEngine().translate(run("llama4"))
    assert TrlEngine().translate(run("gemma4"))
    for name, lacks in (("llama4", True), ("gemma4", False)):
        model = foreign(name)
        assert (model.base_model is model) == lacks, "what trl's loss asks"


def test_what_cannot_be_trained_is_refused_by_name(directories: Path, tmp_path: Path) -> None:
    def changed(name: str, **config: Any) -> Path:
        directory = copied(directories / "qwen2_5_vl", tmp_path / name)
        given = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(given | config))
        return directory

    def opened(directory: Path) -> HfWeights:
        return HfWeights(directory, read_hf_directory(directory))

    text = json.loads((directories / "qwen2_5_vl/config.json").read_text())["text_config"]
    for name, config, message in (
        ("a", {"model_type": "strange"}, "transformers .* does not know model_type 'strange', nor does Meshwright"),
        (
            "b",
            {"model_type": "glm4v", "text_config": {}},
            "transformers has no causal language model for .*'glm4v_text'",
        ),
        ("c", {"text_config": text | {"num_hidden_layers": "two"}}, "config.json: transformers .* cannot read it: "),
        (
            "d",
            {"text_config": text | {"num_hidden_layers": 3, "layer_types": None}},
            "has no tensor model.layers.2.input_layernorm.weight",
        ),
    ):
        directory = changed(name, **config)
        with pytest.raises(ValueError, match=message):
            opened(directory)
    directory = respelled(directories / "qwen2_5_vl", tmp_path / "e", "model.", "decoder.")
    with pytest.raises(ValueError, match=r"the files have none of .*, so the text model in them cannot be found"):
        read_hf_directory(directory)
    fields = recipe(tmp_path, directories / "qwen2_5_vl")
    fields["model"]["norm_eps"] = 1e-4
    with pytest.raises(ValueError, match=r"is a multimodal model.*remove model.norm_eps"):
        train(Run.model_validate(fields))


def test_an_export_takes_the_rest_from_the_model_that_was_trained(directories: Path, tmp_path: Path) -> None:
    directory = copied(directories / "qwen3_vl", tmp_path / "model")
    model = ours(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"image_token_id": 7}))
    with pytest.raises(ValueError, match=r"its config.json is not that of the multimodal model that was trained"):
        export_hf(named_tensors(model).items(), model.spec, tmp_path / "out", HfForm(rest=directory))
    assert not (tmp_path / "out").exists()

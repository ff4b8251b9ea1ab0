"""Adapters made by peft compute the same here, or are refused by the name of the unsupported feature; ours are proved
in peft before their directory appears."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from losses import logits_of
from meshwright import Run, train
from meshwright.checkpoint import peft as written
from meshwright.checkpoint import peft_config
from meshwright.checkpoint.peft_config import COMPARED, CONFIG, WITHOUT_EFFECT
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import resolve_model, state_table
from meshwright.finetune import apply_finetune
from meshwright.handover.adapters import export_adapter
from meshwright.models import build_model
from meshwright.parallel.materialize import materialize
from meshwright.serve.trained import open_trained
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import run_weights
from tiny import tiny_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
SIZES |= {"vocab_size": 280, "max_position_embeddings": 32, "initializer_range": 0.2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
TARGETS = ["q_proj", "v_proj"]
LORA: dict[str, Any] = {"method": "lora", "rank": 4, "alpha": 8.0, "targets": ["wq", "wv"]}
MADE: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS}
TEXTS = [f"{n} and {n + 1} and" for n in range(400)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_config(config)
        for tensor in model.state_dict().values():
            tensor.normal_(std=0.2)
        model.save_pretrained(folder / name)
        train_tokenizer(TEXTS, 280).save(folder / name)
    return folder


def tokens() -> torch.Tensor:
    return torch.randint(280, (2, 16), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def made(base: Path, directory: Path, *, init: Any = True, convert: bool = False, **config: Any) -> torch.Tensor:
    """Write an adapter made by peft, moved as by training; returns peft's logits with the saved adapter."""
    torch.manual_seed(3)
    lora = peft.LoraConfig(**{**MADE, **config}, init_lora_weights=init, task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    begin = directory.with_name("begin")
    model.save_pretrained(begin)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    if convert:
        plain = json.loads((begin / CONFIG).read_text()) | {"init_lora_weights": True}
        (begin / CONFIG).write_text(json.dumps(plain))
    model.save_pretrained(directory, path_initial_model_for_weight_conversion=str(begin) if convert else None)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    return loaded.eval()(tokens()).logits


def run_on(base: Path, adapter: Path | None, **finetune: Any) -> ResolvedRun:
    start = {} if adapter is None else {"start_from": str(adapter)}
    resolved = tiny_run(LayoutSpec(), precision="fp32", finetune=LORA | finetune | start)
    model = ModelFields(name=str(base), weights="pretrained")
    run = resolved.run.model_copy(update={"model": model})
    return resolved.model_copy(update={"run": run, "model": resolve_model(model, base_dir=Path())})


@torch.no_grad()
def ours(base: Path, adapter: Path, **finetune: Any) -> torch.Tensor:
    run = run_on(base, adapter, **finetune)
    model = build_model(run.model)
    assert run.run.finetune is not None
    apply_finetune(model, run.run.finetune, torch.float32)
    materialize(model, [*model.table, *state_table(run.model)], run_weights(run), torch.device("cpu"))
    return logits_of(model.eval(), tokens())


def refusal(base: Path, adapter: Path, **finetune: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        run_weights(run_on(base, adapter, **finetune))
    assert "\n" not in str(error.value)
    return str(error.value)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-4 * expected.abs().max())


APPLIED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gaussian": ({"init": "gaussian"}, {}),
    "orthogonal": ({"init": "orthogonal"}, {}),
    "random": ({"init": False}, {}),
    "rslora": ({"use_rslora": True}, {"rslora": True}),
    "dora": ({"use_dora": True}, {"dora": True}),
    "excluded": ({"target_modules": [*TARGETS, "k_proj"], "exclude_modules": ["k_proj"]}, {}),
    "excluded by a pattern": ({"exclude_modules": r".*layers\.0\..*"}, {"targets": ["layers.1.attention.w[qv]"]}),
    "some layers": ({"layers_to_transform": [1]}, {"targets": ["layers.1.attention.w[qv]"]}),
    "the first layer": ({"layers_to_transform": 0, "layers_pattern": "layers"}, {"targets": ["layers.0.*.w[qv]"]}),
    "patterns": (
        {"rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"ranks": {"layers.0.attention.wq": 2}, "alphas": {"wv": 3.0}},
    ),
}


@pytest.mark.every(1)
@pytest.mark.parametrize("name", APPLIED)
def test_what_peft_made_computes_the_same_here(bases: Path, tmp_path: Path, name: str) -> None:
    theirs, finetune = APPLIED[name]
    expected = made(bases / "llama", tmp_path / "adapter", **theirs)
    assert close(ours(bases / "llama", tmp_path / "adapter", **finetune), expected)


@pytest.mark.slow
def test_adapters_of_a_base_that_peft_changes_are_refused_and_the_converted_read(bases: Path, tmp_path: Path) -> None:
    for init in ("pissa", "pissa_niter_2", "olora"):
        folder = tmp_path / init
        folder.mkdir()
        expected = made(bases / "llama", folder / "adapter", init=init)
        said = refusal(bases / "llama", folder / "adapter")
        assert f"init_lora_weights is '{init}', so the adapter belongs to a base that peft changed" in said
        changed = json.loads((folder / "adapter" / CONFIG).read_text()) | {"init_lora_weights": True}
        (folder / "adapter" / CONFIG).write_text(json.dumps(changed))
        assert not close(ours(bases / "llama", folder / "adapter"), expected)  # as if it were read without the check
        made(bases / "llama", folder / "converted", init=init, convert=True)
        wide = {"rank": 8, "alpha": 16.0}
        if init != "pissa_niter_2":  # whose initialization is random each time
            assert close(ours(bases / "llama", folder / "converted", **wide), expected)


def test_every_key_of_pefts_configurations_is_known_or_refused(bases: Path, tmp_path: Path) -> None:
    made(bases / "llama", tmp_path / "adapter")
    plain = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    known = COMPARED | WITHOUT_EFFECT
    others = {field.name for kind in (peft.LoraConfig, peft.IA3Config) for field in fields(kind)} - known
    assert {"alora_invocation_tokens", "target_parameters", "lora_bias", "use_qalora"} <= others
    for key, value in [*((key, True) for key in sorted(others)), ("of_tomorrow", {"a": 1})]:
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(plain | {key: value}))
        assert f"{key} is set, which Meshwright's adapters do not support" in refusal(
            bases / "llama", tmp_path / "adapter"
        )
    for key, value, told in (
        ("bias", "all", "only none is supported"),
        ("init_lora_weights", "loftq", "which only peft can compute"),
        ("init_lora_weights", "mica", "merge the adapter in peft"),
        ("init_lora_weights", "corda", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "lora_ga", "path_initial_model_for_weight_conversion"),
        ("peft_type", "ADALORA", "peft_type=ADALORA"),
        ("peft_type", "VERA", "peft_type=VERA"),
        ("layers_to_transform", "1", "layers_to_transform is '1'"),
        ("exclude_modules", [1], "exclude_modules is [1]"),
    ):
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(plain | {key: value}))
        assert told in refusal(bases / "llama", tmp_path / "adapter")


EMBEDDING = {"train": ["tok_embeddings"]}


@pytest.mark.slow
def test_a_tied_embedding_trained_in_peft(bases: Path, tmp_path: Path) -> None:
    """With its head it is read; with a fixed head, or one trained separately, it is another model, and is refused."""
    for name, saved, config in (
        ("with", ["embed_tokens"], {"ensure_weight_tying": True}),
        ("beside", ["embed_tokens"], {}),
        ("both", ["embed_tokens", "lm_head"], {}),
    ):
        (tmp_path / name).mkdir()
        expected = made(bases / "tied", tmp_path / name / "adapter", modules_to_save=saved, **config)
        if config:
            assert close(ours(bases / "tied", tmp_path / name / "adapter", **EMBEDDING), expected)
        else:
            told = refusal(bases / "tied", tmp_path / name / "adapter", **EMBEDDING)
            assert ("but not the head" if "beside" in name else "lm_head.weight and") in told
            assert "one matrix (tied)" in told


def recipe(folder: Path, directory: Path, **finetune: Any) -> Run:
    (folder / "text.txt").write_text("\n\n".join(TEXTS))
    fields = {
        "model": {"name": str(directory), "weights": "pretrained"},
        "data": {"sources": [str(folder / "text.txt")], "sequence_length": 16, "cache_dir": str(folder / "cache")},
        "training": {"steps": 2, "global_batch": 4, "precision": "fp32", "lr_schedule": {"warmup": 0}},
        "finetune": LORA | finetune,
        "run_dir": str(folder / "run"),
        "device": "cpu",
    }
    fields["training"]["optimizer"] = {"lr": 0.05}
    return Run.model_validate(fields)


@pytest.mark.slow
def test_a_tied_embedding_that_trained_here_is_exported_as_peft_computes_it(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path, bases / "tied", **EMBEDDING))
    trained = open_trained(tmp_path / "run", device="cpu", dtype="fp32")
    _, receipt = export_adapter(trained, tmp_path / "adapter")
    assert receipt.largest_difference < 1e-4
    base = AutoModelForCausalLM.from_pretrained(bases / "tied")
    with torch.no_grad():
        expected = logits_of(trained.model, tokens())
        assert not close(base(tokens()).logits, expected)
        read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert close(read(tokens()).logits, expected)
    assert close(ours(bases / "tied", tmp_path / "adapter", **EMBEDDING), expected)

    for module in (written, peft_config):  # a writer that stores the matrix under one name only
        monkeypatch.setattr(module, "tied_head", lambda model, finetune: None)
    with pytest.raises(ValueError, match="the adapter was refused: read by peft, its logits differ"):
        export_adapter(trained, tmp_path / "wrong")
    assert not [path for path in tmp_path.iterdir() if "wrong" in path.name]

    # Earlier versions wrote such files, with both names meant.
    monkeypatch.setattr("meshwright.checkpoint.hf_proof.find_spec", lambda name: None)
    export_adapter(trained, tmp_path / "old")
    monkeypatch.undo()
    assert close(ours(bases / "tied", tmp_path / "old", **EMBEDDING), expected)


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_every_export_is_proved(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    """On the base in its files' precision, however the run quantized it; and by our own reading without peft."""
    train(recipe(tmp_path, bases / "llama", base=base, dora=base == "plain"))
    trained = open_trained(tmp_path / "run", device="cpu", dtype="fp32")
    assert export_adapter(trained, tmp_path / "adapter")[1].largest_difference < 1e-4
    places = written.stored_places

    def swapped(*given: Any) -> Any:
        found = places(*given)
        a, b = (f"layers.{layer}.attention.wq.lora_b" for layer in (0, 1))
        found[a], found[b] = found[b], found[a]
        return found

    told = "read by peft"
    if base == "nf4":  # a fault only of the writer
        monkeypatch.setattr("meshwright.checkpoint.hf_proof.find_spec", lambda name: None)
        write = written.Stored.to_file
        monkeypatch.setattr(written.Stored, "to_file", lambda place, tensor: 2 * write(place, tensor))
        told = "read back"
    else:
        monkeypatch.setattr(written, "stored_places", swapped)
    with pytest.raises(ValueError, match=f"the adapter was refused: {told}, its logits differ"):
        export_adapter(trained, tmp_path / "wrong")


def test_a_model_with_state_begins_from_an_adapter(bases: Path, tmp_path: Path) -> None:
    """deepseek_v3's routers have biases, which no adapter contains: the base's are used."""
    targets = ["q_b_proj", "o_proj"]
    expected = made(bases / "deepseek_v3", tmp_path / "adapter", target_modules=targets)
    assert close(ours(bases / "deepseek_v3", tmp_path / "adapter", targets=["wq_b", "wo"]), expected)

"""Adapters equal peft's: the same losses and gradients for twenty steps, and files readable in both directions."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from beside_peft import STEPS, train_beside
from losses import logits_of
from meshwright.checkpoint.peft import WEIGHTS, Base, read_adapter, stored_places, write_adapter
from meshwright.checkpoint.peft_config import CONFIG, AdapterError, unread_by_vllm
from meshwright.families import read_hf_directory
from meshwright.finetune import merged_model
from meshwright.models import Decoder
from meshwright.spec.batch import Batch
from meshwright.spec.data import DataSpec
from meshwright.spec.finetune import FullSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here
from meshwright.trainer.setup import Trainer
from meshwright.trainer.weights import run_weights
from tiny import GLOBAL_BATCH, SEQUENCE_LENGTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft's call of transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

LR, EPS = 2e-2, 1e-3
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 40, "vocab_size": 50, "max_position_embeddings": 16, "initializer_range": 0.2}

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 3, "alpha": 6.0, "ranks": {"v_proj": 5, "layers.1.*.o_proj": 2}},
    "rslora": {
        "method": "lora",
        "rank": 4,
        "alpha": 4.0,
        "rslora": True,
        "targets": ["wq", "wo", "w2"],
        "alphas": {"wo": 3.0},
    },
    "dora": {"method": "lora", "rank": 4, "alpha": 8.0, "dora": True},
    "ends": {"method": "lora", "rank": 2, "targets": ["wq", "tok_embeddings"], "train": ["output", "norm"]},
    "ia3": {"method": "ia3"},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """transformers' models with random weights, in fp64 so that nothing is rounded."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bases")
    llama, qwen2 = LlamaForCausalLM(LlamaConfig(**SIZES)), Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in qwen2.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # initial zeros would hide computations
    llama.double().save_pretrained(folder / "llama")
    qwen2.double().save_pretrained(folder / "qwen2")
    return {name: folder / name for name in ("llama", "qwen2")}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMSNorm rounds to fp32 in any dtype; here it stays in fp64, all else unchanged."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for norm in (modeling_llama.LlamaRMSNorm, modeling_qwen2.Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def run_on(base: Path, finetune: dict[str, Any]) -> ResolvedRun:
    run = Run(
        model={"name": str(base), "weights": "pretrained"},  # type: ignore[arg-type]
        data=DataSpec(sequence_length=SEQUENCE_LENGTH),
        training={  # type: ignore[arg-type]
            "precision": "fp64",
            "steps": STEPS,
            "clip": None,
            "optimizer": {"lr": LR, "eps": EPS, "weight_decay": 0.0},
            "lr_schedule": {"name": "constant", "warmup": 0},
        },
        finetune=finetune,  # type: ignore[arg-type]
        device="cpu",
    )
    size = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH, "accumulation": 1}
    return ResolvedRun(run=run, model=read_hf_directory(base), reasons={}, **size)


def write(trainer: Trainer, directory: Path) -> Path:
    finetune, base = trainer.resolved.run.finetune, trainer.base
    assert finetune is not None
    assert not isinstance(finetune, FullSpec)
    assert base is not None
    model = trainer.resolved.model
    write_adapter(directory, trainer.parameters, model, finetune, Base(base["path"], base["fingerprint"]))
    return directory


def peft_model(base: Path, adapter: Path) -> Any:
    model = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[base.name].from_pretrained(base)
    return peft.PeftModel.from_pretrained(model.double(), adapter, is_trainable=True).double()


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The trained parameters, by their keys in files."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = name.replace(".default", "").replace(".modules_to_save", "")
            found[key.replace("magnitude_vector.weight", "magnitude_vector")] = parameter
    return found


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("method", METHODS)
def test_twenty_steps_are_pefts(bases: dict[str, Path], tmp_path: Path, family: str, method: str) -> None:
    """float64: only rounding differences, which each step of AdamW enlarges by at most LR / EPS."""
    trainer = build_here(run_on(bases[family], METHODS[method]))
    theirs = peft_model(bases[family], write(trainer, tmp_path / "begin"))
    places = stored_places(trainer.resolved.model, trainer.resolved.run.finetune)  # type: ignore[arg-type]
    found = trained_parameters(theirs)
    assert len(found) == len(places)
    train_beside(
        trainer,
        theirs,
        {name: found[place.key] for name, place in places.items()},
        loss_room=1e-9,
        gradient_room=1e-9,
        as_theirs=lambda name, gradient: places[name].to_file(gradient),
    )
    check_files_go_both_ways(trainer, theirs, bases[family], tmp_path)


@torch.no_grad()
def check_files_go_both_ways(trainer: Trainer, theirs: Any, base: Path, folder: Path) -> None:
    """Parameters trained by either give the other the same logits, also when merged."""
    model, finetune = trainer.model.eval(), trainer.resolved.run.finetune
    assert isinstance(model, Decoder)
    tokens_BT = torch.randint(50, (2, SEQUENCE_LENGTH))
    batch = Batch(tokens_BT)
    expected = model.logits(batch)
    assert (merged_model(model).logits(batch) - expected).abs().max() < 1e-12
    loaded = peft_model(base, write(trainer, folder / "ours"))
    assert (loaded.eval()(tokens_BT).logits - expected).abs().max() < 1e-9
    theirs.save_pretrained(folder / "theirs")
    assert trainer.base is not None
    read = read_adapter(
        folder / "theirs",
        trainer.resolved.model,
        finetune,  # type: ignore[arg-type]
        fingerprint=trainer.base["fingerprint"],
    )
    for name, parameter in trainer.parameters.items():
        parameter.copy_(read[name])
    assert (model.logits(batch) - theirs.eval()(tokens_BT).logits).abs().max() < 1e-12


def add_as_vllm_does(model: Any, adapter: Path) -> None:
    """By its loader's rules: modules by tensors' names, one scale for all from `r`, `lora_alpha`, `use_rslora`."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["bias"] == "none"
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        lora_b = tensors.pop(name.replace("lora_A", "lora_B"))
        model.get_parameter(f"{module}.weight").add_((lora_b @ tensors.pop(name)).double(), alpha=scale)
    assert not tensors, "a name that its loader does not know"


@torch.no_grad()
@pytest.mark.parametrize("rslora", [False, True])
def test_vllm_reads_it(bases: dict[str, Path], tmp_path: Path, rslora: bool) -> None:
    finetune = {"method": "lora", "rank": 3, "alpha": 12.0, "rslora": rslora}
    trainer, tokens_BT = build_here(run_on(bases["llama"], finetune)), torch.randint(50, (2, SEQUENCE_LENGTH))
    assert unread_by_vllm(write(trainer, tmp_path / "adapter")) == []
    model = LlamaForCausalLM.from_pretrained(bases["llama"], dtype=torch.float64).eval()
    add_as_vllm_does(model, tmp_path / "adapter")
    assert (model(tokens_BT).logits - logits_of(trainer.model.eval(), tokens_BT)).abs().max() < 1e-9


def test_what_vllm_does_not_read_is_said(bases: dict[str, Path], tmp_path: Path) -> None:
    written = {
        method: write(build_here(run_on(bases["llama"], METHODS[method])), tmp_path / method) for method in METHODS
    }
    assert {method: unread_by_vllm(directory) for method, directory in written.items()} == {
        "lora": ["ranks or alphas by pattern"],
        "rslora": ["ranks or alphas by pattern"],
        "dora": ["DoRA"],
        "ends": ["fully trained modules", "an embedding adapter"],
        "ia3": ["IA3"],
    }


@pytest.fixture(scope="module")
def adapter(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(build_here(run_on(bases["llama"], METHODS["lora"])), tmp_path_factory.mktemp("adapter") / "adapter")


def refusal(base: Path, adapter: Path, finetune: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        build_here(run_on(base, {**finetune, "start_from": str(adapter)}))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_training_continues_from_an_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    trained = build_here(run_on(bases["llama"], METHODS["ends"]))
    with torch.no_grad():
        for parameter in trained.parameters.values():
            parameter += 1
    adapter = write(trained, tmp_path / "adapter")
    begins = run_weights(run_on(bases["llama"], {**METHODS["ends"], "start_from": str(adapter)}))
    rows = [row for row in trained.table if row.trained]
    assert {row.name for row in rows} >= {"output.weight", "norm.weight", "tok_embeddings.lora_a"}
    for row in rows:
        assert torch.equal(begins(row, 0, row.shape[0]), trained.parameters[row.name]), row.name


def changed(
    adapter: Path, folder: Path, *, config: dict[str, Any] | None = None, cut: int = 0, flip: bool = False
) -> Path:
    copy = folder / "changed"
    shutil.copytree(adapter, copy)
    if config is not None:
        content = json.loads((copy / CONFIG).read_text())
        (copy / CONFIG).write_text(json.dumps({**content, **config}))
    data = bytearray((copy / WEIGHTS).read_bytes())
    if flip:
        data[-1] ^= 64
    (copy / WEIGHTS).write_bytes(data[: len(data) - cut])
    return copy


def test_what_does_not_fit_is_refused_in_a_sentence(bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    lora, llama = METHODS["lora"], bases["llama"]
    assert "was trained on another base" in refusal(bases["qwen2"], adapter, lora)
    assert "is damaged" in refusal(llama, changed(adapter, tmp_path / "a", flip=True), lora)
    assert "is truncated" in refusal(llama, changed(adapter, tmp_path / "b", cut=8), lora)
    assert "set finetune.rank=3" in refusal(llama, adapter, {**lora, "rank": 8})
    assert "set finetune.dora=false" in refusal(llama, adapter, {**lora, "dora": True})
    assert "set finetune.targets=[" in refusal(llama, adapter, {**lora, "targets": ["wq", "wo", "wv"]})
    assert "peft_type=LORA" in refusal(llama, adapter, {"method": "ia3"})
    assert "neither a checkpoint nor a run" in refusal(llama, tmp_path, lora)
    foreign = changed(adapter, tmp_path / "d", config={"target_modules": ["c_attn"]})
    assert "so it was trained on another base" in refusal(llama, foreign, lora)
    wrong = {"target_modules": [5, "(", ["q_proj", 5]], "rank_pattern": [5, {"q": "x"}, {"(": 1}], "r": ["8"]}
    for number, (key, value) in enumerate((key, value) for key, values in wrong.items() for value in values):
        strange = changed(adapter, tmp_path / f"x{number}", config={key: value})
        assert "adapter_config.json is not an adapter's configuration: " in refusal(llama, strange, lora)
    special = changed(adapter, tmp_path / "e", config={"alora_invocation_tokens": [1]})
    assert "alora_invocation_tokens is set" in refusal(llama, special, lora)


def test_tensors_that_do_not_fit_are_named(bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    def with_tensors(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        copy = changed(adapter, tmp_path / name)
        save_file(tensors, copy / WEIGHTS)
        return copy

    tensors, lora, llama = load_file(adapter / WEIGHTS), METHODS["lora"], bases["llama"]
    key = next(iter(tensors))
    missing = {other: tensor for other, tensor in tensors.items() if other != key}
    assert f"has no tensor {key}" in refusal(llama, with_tensors("a", missing), lora)
    strange = {**tensors, key + "s": tensors[key].clone()}
    assert f"did you mean '{key}'?" in refusal(llama, with_tensors("b", strange), lora)
    wide = {**tensors, key: torch.zeros(3, 99)}
    assert "was trained on another base" in refusal(llama, with_tensors("c", wide), lora)


def test_wrong_target_names(bases: dict[str, Path]) -> None:
    def told(**finetune: Any) -> str:
        with pytest.raises(ValueError, match=r"finetune\.") as error:
            build_here(run_on(bases["llama"], {"method": "lora", **finetune}))
        return str(error.value)

    assert "did you mean 'q_proj'?" in told(targets=["q_prj"])
    assert "there are tok_embeddings, wq," in told(targets=["atention_norm"])  # not one that cannot have an adapter
    assert "matches no linear layer" in told(targets=["norm"])
    assert "matches no module that has an adapter" in told(targets=["wq"], ranks={"wv": 3})
    assert "has an adapter already" in told(train=["layers.0.attention.wq"])


def test_an_adapter_is_published_whole_or_not_at_all(bases: dict[str, Path], adapter: Path) -> None:
    with pytest.raises(ValueError, match="already exists"):
        write(build_here(run_on(bases["llama"], METHODS["lora"])), adapter)
    assert issubclass(AdapterError, ValueError)

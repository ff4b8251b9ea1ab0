"""Foreign architectures: transformers computes them, and everything else works as for our own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel

from losses import logits_of
from meshwright import Run, train
from meshwright.checkpoint.hf import HfWeights
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import finetuned_table, read_hf_directory, resolve_model
from meshwright.families.tensor_headers import read_header
from meshwright.finetune import apply_finetune
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.generate import Sampling
from meshwright.objectives import NextToken
from meshwright.parallel import WholeModel, offload
from meshwright.serve.trained import Settings, continue_texts, evaluate_texts, open_trained
from meshwright.spec.batch import Batch
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for, one_step
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from test_equivalence import assert_equal
from test_finetune_run import trajectory
from tiny import NEEDS_SHARDED_INTEGERS, tiny_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft's call of transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 32}
TEXTS = [f"{n} and {n + 1} and" for n in range(400)]
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
CONFIGS: dict[str, Callable[..., transformers.PreTrainedConfig]] = {
    "phi": transformers.PhiConfig,  # biases, also in the head; rotates half of a head; dropout if configured
    "gemma2": transformers.Gemma2Config,  # tied; caps logits; sliding window in every second layer; constants
    "gpt_neox": transformers.GPTNeoXConfig,  # queries, keys and values in one matrix; another name for the head
    "qwen2_moe": transformers.Qwen2MoeConfig,  # experts that transformers stacks when loading, and one shared expert
    "opt": transformers.OPTConfig,  # learned positions, which do not restart at documents
}
MORE: dict[str, dict[str, Any]] = {
    "phi": {"attention_dropout": 0.5, "resid_pdrop": 0.5},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4},
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    },
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
}
METHODS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"method": "lora", "rank": 4, "dora": True},
    "qlora": {"method": "qlora", "rank": 4},
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory for each architecture, with random weights."""
    folder = tmp_path_factory.mktemp("foreign")
    generator = torch.Generator().manual_seed(0)
    for name, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **MORE.get(name, {})))
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2, generator=generator)
        model.save_pretrained(folder / name)
        train_tokenizer(TEXTS, 280).save(folder / name)
    return folder


def foreign_run(directory: Path, layout: LayoutSpec, **options: Any) -> ResolvedRun:
    fields = ModelFields(name=str(directory), weights="pretrained")
    resolved = tiny_run(layout, **options)
    run = resolved.run.model_copy(update={"model": fields})
    return resolved.model_copy(update={"run": run, "model": resolve_model(fields, base_dir=Path())})


def theirs(directory: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
    return model.double().eval()  # with constants from fp32


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(directories: Path, name: str) -> None:
    trainer = build_here(foreign_run(directories / name, LayoutSpec()))
    with loader_for(trainer) as loader:
        microbatches = loader.microbatches(0)
    (batch,) = microbatches
    loss, trained = trainer.train_step.gradients(microbatches)
    labels_BT = torch.from_numpy(batch.labels)
    expected = theirs(directories / name)
    logits_BTV = expected(torch.from_numpy(batch.tokens)).logits
    mean = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum") / trained
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-13)
    gradients = {parameter_name: parameter.grad for parameter_name, parameter in expected.named_parameters()}
    for ours, parameter in trainer.parameters.items():
        gradient = gradients[ours.replace("embed_out", "lm_head") if ours not in gradients else ours]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)
    assert len(gradients) == len(trainer.parameters)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_in_host_memory_change_nothing(
    directories: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    elsewhere = LayoutSpec.model_validate({"offload": {"activations": "host"}})
    plain, moved = (one_step(foreign_run(directories / name, layout)) for layout in (LayoutSpec(), elsewhere))
    assert plain is not None
    assert moved is not None
    assert moved.loss == plain.loss
    for one, gradient in plain.gradients.items():
        # A view with gaps comes back contiguous, and its product is summed in another order.
        exact = {"rtol": 1e-12, "atol": 1e-15} if "moe" in name else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(moved.gradients[one], gradient, **exact)
    assert "activations in host memory" in repr(build_here(foreign_run(directories / name, elsewhere)).model)


@pytest.mark.parametrize("name", CONFIGS)
def test_module_and_table_say_the_same(directories: Path, name: str) -> None:
    run = foreign_run(directories / name, LayoutSpec(), finetune=METHODS["qlora"])
    model = build_model(run.model)
    assert run.run.finetune is not None
    apply_finetune(model, run.run.finetune, torch.bfloat16)
    assert {row.name: (row.shape, row.trained) for row in finetuned_table(run.model, run.run.finetune)} == {
        name: (tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["phi", "gemma2", "gpt_neox"])
def test_documents_stand_alone(directories: Path, name: str) -> None:
    """Documents of any length, next to rows of one document; each document has its own sliding window."""
    model = build_here(foreign_run(directories / name, LayoutSpec())).model.eval()
    expected = theirs(directories / name)
    tokens_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    documents_BT = torch.tensor([[0] * 3 + [1] * 7 + [2] * 6, [0] * 16])
    logits_BTV = logits_of(model, tokens_BT, document_ids=documents_BT)
    for row, start, stop in ((0, 0, 3), (0, 3, 10), (0, 10, 16), (1, 0, 16)):
        alone_TV = expected(tokens_BT[row : row + 1, start:stop]).logits[0]
        torch.testing.assert_close(logits_BTV[row, start:stop], alone_TV, rtol=0, atol=1e-5)


def test_documents_that_would_be_mixed_are_refused(directories: Path) -> None:
    model = build_here(foreign_run(directories / "opt", LayoutSpec())).model
    assert isinstance(model, ForeignDecoder)
    assert "does not isolate the documents of a row" in model.mixes_documents(model)


CASES = [
    *zip(
        ["phi"] * 3,
        ["full", "qlora", "lora"],
        ["ddp", "zero-2", "zero-3"],
        strict=True,
    ),
    *zip(["gpt_neox"] * 3, ["qlora", "full", "lora"], ["hybrid-1", "hybrid-2", "hybrid-3"], strict=True),
    ("gemma2", "full", "zero-3"),
    *zip(["qwen2_moe"] * 2, ["full", "qlora"], ["zero-3-uneven", "zero-1"], strict=True),
]
_ALONE: dict[str, Any] = {}


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "strategy"),
    [pytest.param(*case, marks=NEEDS_SHARDED_INTEGERS) if "qlora" in case else case for case in CASES],
)
def test_every_layout(ranks: RankPool, directories: Path, name: str, method: str, strategy: str) -> None:
    """Equal to one process, alternately with separate documents or recomputed blocks. Gemma's norms and softmax and
    Qwen2-MoE's router compute in fp32 in any dtype of the model."""
    turn = CASES.index((name, method, strategy))
    recompute, documents = ("none", "selective", "full")[turn % 3], turn % 2 == 0
    layout, finetune = LAYOUTS[strategy], METHODS[method]
    run = foreign_run(directories / name, layout, finetune=finetune, recompute=recompute)
    outcome = ranks.run(layout.world_size, one_step, run, documents)[0]
    key = f"{name} {method} {documents}"
    if key not in _ALONE:
        _ALONE[key] = one_step(foreign_run(directories / name, LayoutSpec(), finetune=finetune), documents)
    assert_equal(
        outcome, _ALONE[key], dtype=torch.float64 if name in ("phi", "gpt_neox") else torch.float32, slope=5 * 0.1
    )


@pytest.mark.slow
def test_pairs_of_answers(ranks: RankPool, directories: Path) -> None:
    layout, options = LAYOUTS["zero-3"], {"preference": {"reference": "none"}, "finetune": METHODS["lora"]}
    outcome = ranks.run(layout.world_size, one_step, foreign_run(directories / "phi", layout, **options))[0]
    alone = one_step(foreign_run(directories / "phi", LayoutSpec(), **options))
    assert alone is not None
    assert_equal(outcome, alone, slope=5 * 0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16"])
def test_continues_bit_for_bit(ranks: RankPool, directories: Path, tmp_path: Path, precision: str) -> None:
    options = {"finetune": {"method": "lora", "rank": 4, "dropout": 0.25}, "recompute": "full", "steps": 4}
    run = foreign_run(directories / "gemma2", LAYOUTS["zero-3"], precision=precision, **options)
    seen = ranks.run(4, trajectory, run, tmp_path, 4, False)[0]
    assert ranks.run(4, trajectory, run, tmp_path, 4, True)[0] == seen[2:]


def recipe(folder: Path, directory: Path, **more: Any) -> dict[str, Any]:
    (folder / "text.txt").write_text("\n\n".join(TEXTS))
    return {
        "model": {"name": str(directory), "weights": "pretrained"},
        "data": {
            "sources": [str(folder / "text.txt")],
            "sequence_length": 16,
            "cache_dir": str(folder / "cache"),
            **more.pop("data", {}),
        },
        "training": {
            "steps": 2,
            "global_batch": 4,
            "precision": "fp32",
            "lr_schedule": {"warmup": 0},
            "optimizer": {"lr": 0.01},
            **more.pop("training", {}),
        },
        "run_dir": str(folder / "run"),
        "device": "cpu",
        **more,
    }


@torch.no_grad()
def logits_of_either(model: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The logits of one of our models or of transformers'."""
    return logits_of(model, tokens_BT) if isinstance(model, Decoder) else model(tokens_BT).logits


@pytest.mark.slow
def test_from_a_directory_to_files_that_peft_and_transformers_read(directories: Path, tmp_path: Path) -> None:
    data = {"separate_documents": True}
    finetune = {"method": "lora", "rank": 4, "train": ["lm_head"]}
    training = {"samples": {"prompts": ["1 and"], "max_tokens": 6}}
    fields = recipe(tmp_path, directories / "phi", finetune=finetune, data=data, training=training)
    (tmp_path / "run.yaml").write_text(json.dumps(fields))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0
    train(Run.model_validate(fields))
    tuned = open_trained(tmp_path / "run", device="cpu")
    tokens_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(2))
    expected = logits_of_either(tuned.model, tokens_BT)
    assert main(["export", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "merged"), "--merge"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(directories / "phi").eval()
    assert (logits_of_either(base, tokens_BT) - expected).abs().max() > 1e-3
    for read in (
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(),
    ):
        torch.testing.assert_close(logits_of_either(read, tokens_BT), expected, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "merged/config.json").read_text())["attention_dropout"] == 0.5
    assert evaluate_texts(tuned, num_samples=2).tokens
    asked_BT = torch.arange(16) == torch.tensor([[3], [7]])
    with torch.no_grad():
        assert torch.equal(
            WholeModel(tuned.model, NextToken()).next_logits(Batch(tokens_BT), asked_BT), expected[[0, 1], [3, 7]]
        )
    (text,) = continue_texts(tuned, ["1 and"], Settings(max_tokens=6, sampling=Sampling(temperature=0)))
    ids = tuned.tokenizer.encode_prompt("1 and")
    theirs = read.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=tuned.tokenizer.eos_id)
    assert text == tuned.tokenizer.decode([i for i in theirs[0, len(ids) :].tolist() if i != tuned.tokenizer.eos_id])
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["text"] for line in told if line["kind"] == "sample" and line["step"] == 2] == [text]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "qwen2_moe"])
def test_full_training_and_export_in_bf16(directories: Path, tmp_path: Path, name: str) -> None:
    """Of tied weights, one is stored; of a name that transformers changes when loading, the file's spelling; of experts
    that it stacks, each expert's tensors."""
    train(Run.model_validate(recipe(tmp_path, directories / name, training={"precision": "bf16"})))
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "out")]) == 0
    kept = {key for key, _ in safetensors_keys(tmp_path / "out")}
    assert kept == {key for key, _ in safetensors_keys(directories / name)}


def safetensors_keys(directory: Path) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tensor.shape) for name, tensor in read_header(directory / "model.safetensors").items()]


REFUSALS: dict[str, dict[str, Any]] = {
    "finetune.method=qlora with layout.tp=2: ": {"finetune": {"method": "qlora"}, "layout": {"tp": 2}},
    "layout.cp_method=ring: models that transformers computes": {"layout": {"cp": 2, "cp_method": "ring"}},
    "layout.ep=2: ranks cannot share the experts of this model: it has no": {"layout": {"dp_shard": 2, "ep": 2}},
    "layout.pp=4: 2 layers cannot be split into 4": {"layout": {"pp": 4}},
    "layout.offload=cpu: ": {"layout": {"dp_shard": 2, "offload": "cpu"}},
    "training.compile=true: ": {"training": {"compile": True}},
    "finetune.method=ia3: ": {"finetune": {"method": "ia3"}},
    r"finetune.last_layers: .*\[.model.layers.1.\]": {"finetune": {"method": "full", "last_layers": 1}},
    "finetune.targets: 'embed_tokens' matches no linear": {"finetune": {"method": "lora", "targets": ["embed_tokens"]}},
    "'wq' matches no module of the model; there are fc1, fc2, dense, k_proj, q_proj, v_proj$": {
        "finetune": {"method": "lora", "targets": ["wq"]}
    },
    "did you mean 'q_proj'": {"finetune": {"method": "lora", "targets": ["qproj"]}},
    "remove model.hidden": {"model": {"hidden": 8, "weights": "pretrained"}},
    "set model.weights=pretrained": {"model": {"weights": "random"}},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_it_cannot_do_is_refused_before_it_starts(directories: Path, tmp_path: Path, message: str) -> None:
    more = dict(REFUSALS[message])
    model = {"name": str(directories / "phi"), **more.pop("model", {"weights": "pretrained"})}
    fields = recipe(tmp_path, directories / "phi", **more) | {"model": model}
    with pytest.raises(ValueError, match=message):
        resolve_run(Run.model_validate(fields), base_dir=tmp_path)


def test_directories_that_cannot_be_computed(directories: Path, tmp_path: Path) -> None:
    shutil.copytree(directories / "phi", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())

    def build(**changes: Any) -> Any:
        (tmp_path / "model/config.json").write_text(json.dumps(config | changes))
        return build_model(read_hf_directory(tmp_path / "model"))

    with pytest.raises(ValueError, match=r"config.json: transformers .* does not know model_type 'phi7', nor does"):
        build(model_type="phi7")
    with pytest.raises(ValueError, match="PhiForSequenceClassification, but besides"):
        build(architectures=["PhiForSequenceClassification"])
    with pytest.raises(ValueError, match=r"has 3 layers, but"):
        build(num_hidden_layers=3)
    with pytest.raises(
        ValueError, match=r"mlp.fc1.bias is in transformers' PhiForCausalLM as \[44\] and in the files as"
    ):
        build(intermediate_size=44)


def test_our_own_families_may_be_left_to_transformers(tmp_path: Path) -> None:
    """The same logits from one directory, computed by us and by transformers."""
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokens_BT = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(2))
    found = []
    for family in (None, "transformers"):
        spec = read_hf_directory(tmp_path, family=family)
        model, weights = build_model(spec, device="cpu", dtype=torch.float64), HfWeights(tmp_path, spec)
        for row in model.table:
            named_tensors(model)[row.name].data.copy_(weights.read_rows(row.name, 0, row.shape[0]))
        found.append(logits_of_either(model, tokens_BT))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)

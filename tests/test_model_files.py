"""Models' files, read and written as transformers does, or refused: state besides parameters, heads, special tokens'
ids, and models that are not causal."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from losses import logits_of
from meshwright import Run, train
from meshwright.checkpoint.hf import HfForm, HfWeights, export_hf
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, read_hf_directory, state_table
from meshwright.handover.export import export_trained
from meshwright.models import build_model, named_state, named_tensors
from meshwright.models.foreign import ForeignDecoder
from meshwright.serve.token_ids import end_ids, token_ids
from meshwright.serve.trained import open_trained
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import build_here, loader_for
from test_foreign import TEXTS, foreign_run, recipe

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 32, "num_key_value_heads": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = EXPERTS | {"head_dim": 8, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ROUTED |= {"n_shared_experts": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "glm4_moe": ROUTED,
    "dots1": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": EXPERTS
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as transformers saves them, with random weights and router biases below every score."""
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    for name, more in MODELS.items():
        config = transformers.AutoConfig.for_model(name, **SIZES | more)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.dim():
                tensor.normal_(std=0.2, generator=generator)
            if key.endswith("e_score_correction_bias"):
                tensor.sub_(3)
        model.save_pretrained(folder / name)
        train_tokenizer(TEXTS, 280).save(folder / name)
    return folder


def tokens() -> torch.Tensor:
    return torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def theirs(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(tokens()).logits


@torch.no_grad()
def ours(directory: Path, family: str | None = None) -> Any:
    """The model with its weights."""
    spec = read_hf_directory(directory, family=family)
    model, weights = build_model(spec, device="cpu"), HfWeights(directory, spec)
    for row in parameter_table(spec) + state_table(spec):
        named_tensors(model)[row.name].copy_(weights.read_rows(row.name, 0, row.shape[0]))
    return model.eval()


@pytest.mark.every(3)
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_what_stands_beside_parameters_is_read_and_written(directories: Path, tmp_path: Path, name: str) -> None:
    """Router biases, activation constants, renamed experts: the same logits from the files and from our export of them,
    which has every tensor; short tensors stay in wide formats."""
    model = ours(directories / name, "transformers")
    assert (logits_of(model, tokens()) - theirs(directories / name)).abs().max() < 1e-6
    export_hf(named_tensors(model).items(), model.spec, tmp_path / "out", HfForm())
    before, after = (load_file(folder / "model.safetensors") for folder in (directories / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    beside = {key for key in before if key.endswith("e_score_correction_bias") or not before[key].dim()}
    assert all(torch.equal(after[key], before[key].float()) for key in beside)
    assert bool(beside) == (name in ("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2", "apertus", "deepseek_v3"))
    assert named_state(model).keys() == {row.name for row in state_table(model.spec)}
    assert not model.acausal(model)
    assert ("does not isolate the documents of a row" in model.mixes_documents(model)) == (name == "gpt_oss")


@pytest.mark.parametrize("name", ["ernie4_5_moe", "gpt_oss"])
def test_it_trains_in_fp64(directories: Path, name: str) -> None:
    """As in proofs; state is not trained (Ernie's module has the biases as frozen parameters)."""
    trainer = build_here(foreign_run(directories / name, LayoutSpec()))
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    assert all(parameter.grad is not None for parameter in trainer.parameters.values())
    assert not [name for name in trainer.parameters if name.endswith("e_score_correction_bias")]


def test_groups_of_experts_whose_scores_are_negative(directories: Path) -> None:
    """Our own deepseek_v3: an expert of an excluded group is never chosen, however low the others' scores."""
    model = ours(directories / "deepseek_v3")
    assert not isinstance(model, ForeignDecoder)
    assert all((bias < -1).all() for bias in named_state(model).values())
    with torch.no_grad():
        assert (logits_of(model, tokens()) - theirs(directories / "deepseek_v3")).abs().max() < 1e-5


def test_scalars_that_a_file_has_otherwise_count(directories: Path, tmp_path: Path) -> None:
    shutil.copytree(directories / "apertus", tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    changed = [key for key in tensors if key.endswith("act_fn.beta")]
    save_file(
        tensors | {key: torch.tensor(0.75) for key in changed}, tmp_path / "model/model.safetensors", {"format": "pt"}
    )
    with torch.no_grad():
        found = logits_of(ours(tmp_path / "model"), tokens())
    assert (found - theirs(tmp_path / "model")).abs().max() < 1e-6
    assert (found - theirs(directories / "apertus")).abs().max() > 1e-3
    save_file({**tensors, "model.strange": torch.tensor(1.0)}, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.strange is a scalar in the files, but not a constant"):
        ours(tmp_path / "model")


def copied(directory: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(directory, folder)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | config))
    return folder


@pytest.mark.parametrize("family", [None, "transformers"])
def test_a_tied_head_that_differs_is_refused(directories: Path, tmp_path: Path, family: str | None) -> None:
    tied = copied(directories / "llama", tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight and .* differ.*\"tie_word_embeddings\": false"):
        ours(tied, family)
    tensors = load_file(tied / "model.safetensors")
    equal = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(equal, tied / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        assert (logits_of(ours(tied, family), tokens()) - theirs(tied)).abs().max() < 1e-5


def test_a_model_that_is_not_causal_is_refused_before_its_first_step(
    directories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied(directories / "llama", tmp_path / "model", is_causal=False)
    with pytest.raises(ValueError, match="is_causal=false is not supported: only causal"):
        read_hf_directory(directory)
    fields = recipe(tmp_path, directory)
    fields["model"]["family"] = "transformers"
    (tmp_path / "run.yaml").write_text(json.dumps(fields))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "depends on later tokens" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert main(["eval", str(directory), "--family", "transformers", "--source", str(tmp_path / "text.txt")]) == 2
    assert "depends on later tokens" in capsys.readouterr().err


def test_other_documents_than_equal_ones_are_kept_apart(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that leaks a row's first token to all later ones: two equal documents show no difference."""
    model = ours(directories / "llama", "transformers")
    assert not model.acausal(model)
    assert not model.mixes_documents(model)
    right = ForeignDecoder.forward

    def leaking(self: Any, batch: Any, read: Any = None) -> torch.Tensor:
        logits_BTV = right(self, batch)
        return logits_BTV + 0.05 * torch.nn.functional.one_hot(batch.tokens[:, :1], logits_BTV.shape[-1])

    monkeypatch.setattr(ForeignDecoder, "forward", leaking)
    assert not model.acausal(model)
    assert "does not isolate the documents of a row" in model.mixes_documents(model)


def test_no_export_loses_a_special_token(directories: Path, tmp_path: Path) -> None:
    """Beginning, padding and every end token: of our families, of others, and after training."""
    end = train_tokenizer(TEXTS, 280).eos_id
    ids = {"bos_token_id": 1, "eos_token_id": [end, 3], "pad_token_id": 2}
    for number, (name, family) in enumerate({"llama": None, "glm4_moe": None, "mixtral": "transformers"}.items()):
        directory = copied(directories / name, tmp_path / f"{number}", **ids)
        (directory / "generation_config.json").unlink()
        trained = open_trained(directory, device="cpu", dtype="fp32", family=family)
        export_trained(trained, tmp_path / f"out-{number}")
        for file in ("config.json", "generation_config.json"):
            written = json.loads((tmp_path / f"out-{number}" / file).read_text())
            assert {key: written[key] for key in ids} == ids, (name, file)
        assert end_ids(trained.tokenizer, json.loads((directory / "config.json").read_text())) == {end, 3}
    fields = recipe(tmp_path, tmp_path / "0")
    train(Run.model_validate(fields))
    export_trained(open_trained(tmp_path / "run", device="cpu", dtype="fp32"), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: written[key] for key in ids} == ids
    # config.json says nothing about a tokenizer that the model was not trained with.
    tokenizer = train_tokenizer(TEXTS, 280)
    assert token_ids(tokenizer, ids | {"eos_token_id": [7, 8]}) == {
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def test_what_our_family_refuses_transformers_may_compute(
    directories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied(directories / "llama", tmp_path / "model", hidden_act="gelu")
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    verbs = {
        "eval": ["--source", str(tmp_path / "text.txt"), "--sequence-length", "16", "--samples", "2"],
        "generate": ["--prompt", "1 and", "--max-tokens", "2"],
        "export": ["--hf", str(tmp_path / "out"), "--dtype", "fp32"],
    }
    for verb, options in verbs.items():
        assert main([verb, str(directory), *options]) == 2
        told = capsys.readouterr().err
        assert "hidden_act='gelu' is not supported for llama, only 'silu'" in told
        assert "set model.family=transformers (for eval, generate and export: --family transformers)" in told
        assert main([verb, str(directory), *options, "--family", "transformers"]) == 0
        capsys.readouterr()
    assert (theirs(tmp_path / "out") - theirs(directory)).abs().max() == 0
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only 'silu'$"):  # without weights transformers cannot compute it either
        read_hf_directory(directory)

"""Models with state-space layers, whose config.json holds infinite numbers as transformers writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright.data.tokenizer import train_tokenizer
from meshwright.models.foreign import ForeignDecoder
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import build_here, loader_for
from test_foreign import TEXTS, foreign_run

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "expand": 2, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 40}
    | {"num_experts_per_tok": 0},
}


def test_an_adapter_that_transformers_reads_past_is_refused(tmp_path: Path) -> None:
    """Mamba multiplies by dt_proj's weight itself."""
    sizes = {key: value for key, value in SIZES.items() if "attention_heads" not in key}
    model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING["mamba"](**sizes | MODELS["mamba"]))
    model.save_pretrained(tmp_path)

    def skipped(**targets: Any) -> str:
        model = build_here(foreign_run(tmp_path, LayoutSpec(), finetune={"method": "lora", "rank": 2, **targets})).model
        assert isinstance(model, ForeignDecoder)
        return model.skipped_adapters(model)

    assert "reads the weight of backbone.layers.0.mixer.dt_proj without calling the layer" in skipped()
    assert not skipped(targets=["in_proj", "out_proj"])


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    headless = name in ("mamba", "mamba2")  # of Mamba-2, num_heads alone counts heads; Mamba has none
    sizes = {key: value for key, value in SIZES.items() if not (headless and "attention_heads" in key)}
    model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes | MODELS[name]))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    model.save_pretrained(tmp_path)
    train_tokenizer(TEXTS, 280).save(tmp_path)
    assert name == "mamba" or "Infinity" in (tmp_path / "config.json").read_text()
    trainer = build_here(foreign_run(tmp_path, LayoutSpec()))
    with loader_for(trainer) as loader:
        microbatches = loader.microbatches(0)
    (batch,) = microbatches
    loss, trained = trainer.train_step.gradients(microbatches)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).double()
    logits_BTV = theirs(torch.from_numpy(batch.tokens), use_cache=False).logits.double()  # Mamba-2 gives fp32
    labels_BT = torch.from_numpy(batch.labels)
    mean = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum") / trained
    mean.backward()
    exact = name not in ("mamba", "mamba2")  # their logits are rounded to fp32, and losses are computed from them
    assert loss == pytest.approx(mean.item(), rel=1e-13 if exact else 1e-6)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert len(gradients) == len(trainer.parameters)
    for key, parameter in trainer.parameters.items():
        rtol, atol = (1e-10, 1e-13) if exact else (1e-4, 1e-6)
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=rtol, atol=atol)

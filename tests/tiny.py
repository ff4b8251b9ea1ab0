"""Tiny runs for tests: a model that neither 3 nor 4 ranks divide evenly, on random tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.families import resolve_model
from meshwright.parallel.data import SHARDS_INTEGERS
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.spec.data import DataSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.testing.layouts import DATA_PARALLEL

GLOBAL_BATCH = 12
SEQUENCE_LENGTH = 16
LR = 1e-2
EPS = 0.1
"""Large, so that AdamW's step is a smooth function of the gradient: its slope is at most LR / EPS."""

NEEDS_SHARDED_INTEGERS = pytest.mark.skipif(
    not SHARDS_INTEGERS, reason="FSDP2 of this PyTorch shards no quantized base"
)
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families of which some layers have the gated delta rule."""
STRATEGIES = DATA_PARALLEL
"""The strategies that do not split the model; most tests that are not about splitting use these."""


def tiny_run(
    layout: LayoutSpec,
    *,
    family: str = "llama",
    tied: bool = False,
    accumulation: int = 1,
    num_layers: int = 2,
    finetune: dict[str, Any] | None = None,
    width: int = 24,
    z_loss: float = 0.0,
    **training: Any,
) -> ResolvedRun:
    """Two layers, of `width`, vocabulary 50, float64, twelve sequences of sixteen tokens per step.

    A pipeline runs them in at most six microbatches if `accumulation` is less than its number of ranks.
    """
    accumulation = min(6, GLOBAL_BATCH // layout.data_parallel) if accumulation < layout.pp else accumulation
    sizes: dict[str, Any] = {"hidden": width, "num_layers": num_layers, "num_heads": 4}
    sizes |= {"vocab": 50, "max_positions": 16}
    if family != "gpt2":
        sizes |= {"num_kv_heads": 2, "ffn": 40 if width == 24 else width}
    if family in ("mistral", "gemma3", "olmo3", "gpt_oss"):
        sizes["sliding_window"] = 8
    if family in ("gemma3", "olmo3", "smollm3"):  # one layer of each kind, and one more
        sizes |= {"num_layers": {"gemma3": 6, "olmo3": 4, "smollm3": 4}[family]}
    if family in ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss"):
        # Routing so uneven that some experts get no token of a microbatch.
        sizes |= {"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.5}
    if z_loss:
        sizes["router_z_loss"] = z_loss
    if family == "qwen3_moe":
        sizes["expert_ffn"] = 20
    if family in DELTA:
        sizes |= {"delta_heads": 8, "delta_key_heads": 4, "delta_key_dim": 6, "delta_value_dim": 4, "num_layers": 4}
        sizes |= {"rope_head_dim": 4, "norm_eps": 0.05}  # the heads' norms would enlarge the rounding of small outputs
    if family in ("qwen3_next", "qwen3_5_moe"):
        sizes |= {"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.5, "expert_ffn": 20, "shared_ffn": 16}
    if family == "qwen3_5_moe":
        del sizes["ffn"]
    if family == "glm4_moe":
        sizes |= {"expert_ffn": 20, "shared_experts": 2, "qk_norm": "heads", "balance_rate": 0.05, "rope_head_dim": 4}
        sizes |= {"router_groups": 4, "router_top_groups": 2}
    if family == "minimax_m2":
        sizes |= {"balance_rate": 0.05, "rope_head_dim": 4}
    if family == "deepseek_v3":
        del sizes["num_kv_heads"]
        sizes |= {"expert_ffn": 20, "shared_experts": 2, "dense_layers": 1, "num_layers": 3, "balance_rate": 0.05}
        sizes |= {"router_groups": 4, "router_top_groups": 2}
        sizes |= {"q_rank": 12, "kv_rank": 16, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8}
    fields = ModelFields(family=family, tied_embeddings=tied, init_std=0.2, **sizes)
    defaults = {
        "precision": "fp64",
        "optimizer": {"name": "adamw", "lr": LR, "eps": EPS},
        "lr_schedule": {"name": "constant", "warmup": 0},
    }
    run = Run(
        model=fields,
        data=DataSpec(sequence_length=SEQUENCE_LENGTH),
        training=TrainingSpec.model_validate(defaults | training),
        finetune=finetune,  # pyright: ignore[reportArgumentType]
        layout=layout,
        device="cpu",
    )
    model, stages = resolve_model(fields, base_dir=Path()), ()
    if layout.pp > 1:
        schedule = layout.pipeline_schedule(microbatches=accumulation, base_dir=Path())
        stages = balanced_stages(layer_costs(model, SEQUENCE_LENGTH), schedule.num_stages)
        stages = stages if layout.stage_layers == "auto" else layout.stage_layers
    return ResolvedRun(
        run=run,
        model=model,
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH // layout.data_parallel // accumulation,
        accumulation=accumulation,
        stage_layers=stages,
        reasons={},
    )


def tiny_corpus(*, held_out: bool = False) -> Any:
    """Four thousand random tokens as a corpus, and some more held out."""
    tokens = np.random.default_rng(0).integers(0, 50, 4000, dtype=np.uint16)
    file = SimpleNamespace(tokens=tokens, is_pairs=False, trained=None)
    kept = SimpleNamespace(tokens=tokens[:600], is_pairs=False, trained=None) if held_out else None
    stream = SimpleNamespace(name="tokens", train=file, held_out=kept, weight=None)
    return SimpleNamespace(streams=[stream], held_out=[kept] if kept else [])

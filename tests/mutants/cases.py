"""The tiny runs on which mutants are tried: a layout, and further options of `tiny_run`."""

from typing import Any

from meshwright.spec.layout import LayoutSpec

MOE, DEEPSEEK = {"family": "mixtral"}, {"family": "deepseek_v3"}
DPO = {"preference": {"beta": 0.5}}
DROPOUT = {"finetune": {"method": "lora", "rank": 3, "dropout": 0.5}}
FALLING = {"lr_schedule": {"name": "linear", "warmup": 0}, "steps": 12}
HOST = {"optimizer": "host"}
DORA = {"finetune": {"method": "lora", "rank": 3, "dora": True}}

CASES: dict[str, tuple[LayoutSpec, dict[str, Any]]] = {
    "ddp": (LayoutSpec(dp_replicate=2), {}),
    "zero-1": (LayoutSpec(dp_shard=2, zero=1), {}),
    "zero-3": (LayoutSpec(dp_shard=2), {}),
    "zero-3 muon": (LayoutSpec(dp_shard=2), {"optimizer": {"name": "muon", "eps": 0.1}}),
    "hybrid": (LayoutSpec(dp_replicate=2, dp_shard=2), {}),
    "tp": (LayoutSpec(tp=2), {}),
    "tp 4": (LayoutSpec(tp=4), {}),
    "tp gpt2": (LayoutSpec(tp=2), {"family": "gpt2"}),
    "tp qwen3": (LayoutSpec(tp=2), {"family": "qwen3"}),
    "tp dora": (LayoutSpec(tp=2), DORA),
    "tp dpo": (LayoutSpec(tp=2), DPO),
    "tp experts": (LayoutSpec(tp=2, dp_shard=2), MOE),
    "ring": (LayoutSpec(cp=2, cp_method="ring"), {}),
    "ring 4": (LayoutSpec(cp=4, cp_method="ring"), {}),
    "ring window": (LayoutSpec(cp=2, cp_method="ring"), {"family": "mistral"}),
    "ring documents": (LayoutSpec(cp=2, cp_method="ring"), {"documents": True}),
    "all_gather": (LayoutSpec(cp=2, cp_method="all_gather"), {}),
    "all_gather 4": (LayoutSpec(cp=4, cp_method="all_gather"), {}),
    "ulysses": (LayoutSpec(cp=2, cp_method="ulysses"), {}),
    "ulysses 4": (LayoutSpec(cp=4, cp_method="ulysses"), {}),
    "cp dpo": (LayoutSpec(cp=2), DPO),
    "cp experts": (LayoutSpec(cp=2), MOE),
    "dp experts": (LayoutSpec(dp_shard=2), DEEPSEEK),
    "ep": (LayoutSpec(dp_shard=2, ep=2), MOE),
    "pp": (LayoutSpec(pp=2), {"num_layers": 4}),
    "pp tied": (LayoutSpec(pp=2), {"tied": True}),
    "pp ddp": (LayoutSpec(pp=2, dp_replicate=2), {}),
    "pp zero bubble": (
        LayoutSpec(pp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
        {"family": "gpt2"},
    ),
    "pp zero bubble zero-2": (
        LayoutSpec(pp=2, dp_shard=2, zero=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
        {},
    ),
    "pipedream": (LayoutSpec(pp=2, schedule="pipedream-2bw"), {"num_layers": 4}),
    "pipedream ddp": (LayoutSpec(pp=2, dp_replicate=2, schedule="pipedream-2bw"), {"num_layers": 4, "tied": True}),
    "offloaded": (LayoutSpec.model_validate({"offload": {"optimizer": "host"}}), {}),
    "offloaded zero-3": (LayoutSpec.model_validate({"dp_shard": 2, "offload": {"optimizer": "host"}}), {}),
    "quantized": (LayoutSpec(dp_shard=2, quantized_weights="int8", quantized_gradients="int8"), {}),
    "quantized feedback": (LayoutSpec(dp_shard=2, quantized_gradients="int4", gradient_error_feedback=True), {}),
    "single": (LayoutSpec(), {}),
    "ddp falling": (LayoutSpec(dp_replicate=2), FALLING),
    "ddp dropout": (LayoutSpec(dp_replicate=2), DROPOUT),
    "ddp fp16": (LayoutSpec(dp_replicate=2), {"own": "fp16"}),
    "tp fp16": (LayoutSpec(tp=2), {"own": "fp16"}),
    "tp dropout": (LayoutSpec(tp=2), DROPOUT),
    "tp lora": (LayoutSpec(tp=2), {"finetune": {"method": "lora", "rank": 3}}),
    "zero-3 8-bit": (LayoutSpec(dp_shard=2), {"optimizer": {"name": "adamw_8bit", "eps": 0.1}, "width": 64}),
    "uneven zero-3 muon": (LayoutSpec(dp_shard=3), {"optimizer": {"name": "muon", "eps": 0.1}}),
    "cp zero-3": (LayoutSpec(dp_shard=2, cp=2), {}),
    "ring documents gpt2": (LayoutSpec(cp=2, cp_method="ring"), {"documents": True, "family": "gpt2"}),
    "ulysses documents": (LayoutSpec(cp=2, cp_method="ulysses"), {"documents": True}),
    "ulysses window": (LayoutSpec(cp=2, cp_method="ulysses"), {"family": "mistral"}),
    "pp recomputed dropout": (LayoutSpec(pp=2), {"num_layers": 4, "recompute": "full", **DROPOUT}),
    "pp interleaved ddp": (
        LayoutSpec(pp=2, dp_replicate=2, schedule="interleaved-1f1b", stages_per_rank=2),
        {"num_layers": 4},
    ),
    "pipedream recomputed": (LayoutSpec(pp=2, schedule="pipedream-2bw"), {"num_layers": 4, "recompute": "full"}),
    "offloaded pieces": (LayoutSpec.model_validate({"dp_shard": 2, "offload": HOST}), {"shrunk": True}),
    "offloaded pieces falling": (
        LayoutSpec.model_validate({"dp_shard": 2, "offload": HOST}),
        {"shrunk": True, **FALLING},
    ),
    "quantized pieces": (
        LayoutSpec(dp_shard=2, quantized_weights="int8", quantized_gradients="int8"),
        {"shrunk": True},
    ),
    "feedback pieces experts": (
        LayoutSpec(dp_shard=2, quantized_gradients="int4", gradient_error_feedback=True),
        {"shrunk": True, "family": "qwen3_moe"},
    ),
    "zero-3 dpo": (LayoutSpec(dp_shard=2), DPO),
    "pp dpo": (LayoutSpec(pp=2, dp_replicate=2), DPO),
}
"""By name. Ranks accumulate three microbatches. Besides options of `tiny_run`: `documents`, whether rows hold several;
`shrunk`, whether pieces of work are as small as in a shrunk run; `own`, the recipe's precision, if it is not bf16."""

"""The ranks, the batch and the objective of an axolotl configuration: what follows from several of its keys."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.reading import Reading, Rule, check_count, joined
from meshwright.imports.rules import degree, fact, only, unsupported, without
from meshwright.spec.errors import UserError

BETA = "training.preference.beta"
OBJECTIVES = ("reward_model", "process_reward_model", "diffusion")
"""Keys that switch another objective on."""


def _objective(reading: Reading, value: Any, origin: str) -> None:
    if value != "dpo":
        raise UserError(f"{origin}: a recipe does not have this objective; supported: dpo, or no rl")
    reading.fact("preferences", True, origin)


def _other_objective(reading: Reading, value: Any, origin: str) -> None:
    if value:
        raise UserError(f"{origin}: a recipe does not have this objective; supported: rl=dpo, or next-token prediction")
    reading.claim(origin, Always("no recipe has this objective"))


def _loss(reading: Reading, value: Any, origin: str) -> None:
    """DPO's loss."""
    if value not in ("sigmoid", ["sigmoid"]):
        raise UserError(f"{origin}: a recipe does not have this loss; supported: sigmoid (DPO)")
    reading.claim(origin, Always("the loss of preferences is DPO's (sigmoid)"))


RULES: Mapping[str, Rule] = {
    "tensor_parallel_size": degree("layout.tp"),
    "context_parallel_size": degree("layout.cp"),
    "sequence_parallel_degree": degree("layout.cp"),  # the older name
    "dp_shard_size": fact("dp_shard_size"),
    "dp_replicate_size": fact("dp_replicate_size"),
    "expert_parallel_size": only(1, "set layout.ep, a regrouping of dp_shard x cp x tp ranks"),
    **dict.fromkeys(("ring_attn_func", "heads_k_stride"), NoEffect.OVERLAP),
    "rl": _objective,
    **dict.fromkeys(OBJECTIVES, _other_objective),
    "rl_beta": fact("rl_beta"),
    "trl": fact("trl"),
    "dpo_beta": without("axolotl itself does not read it any more; write rl_beta or trl.beta"),
    "dpo_label_smoothing": fact("dpo_label_smoothing"),
    "dpo_loss_type": _loss,
    "dpo_loss_weights": unsupported("there is one loss"),
    "dpo_use_weighting": unsupported("pairs are never weighted by their probability"),
    "precompute_ref_log_probs": NoEffect.MEMORY,
    "dpo_padding_free": NoEffect.MEMORY,
    "dpo_use_liger_kernel": NoEffect.KERNEL,
    "batch_size": fact("batch_size"),
}


def settle_preference(reading: Reading, file: str) -> None:
    """DPO and its strength, of which trl.beta counts first; without DPO they have no effect."""
    trl, where = reading.facts.get("trl", ({}, file))
    if not isinstance(trl, Mapping):
        raise UserError(f"{where}: must be a mapping")
    _, origin = reading.facts.get("preferences", (None, ""))
    given = [(trl.get("beta"), f"{file}: trl.beta={trl.get('beta')}"), reading.facts.get("rl_beta", (None, ""))]
    betas = [(value, beta_origin) for value, beta_origin in given if value is not None]
    smoothing = reading.facts.get("dpo_label_smoothing")
    for key, value in trl.items():
        if key != "beta" and value is not None:
            reading.drop(f"{file}: trl.{key}={value}", "it is not about DPO")
    if not origin:
        for _, beta_origin in [*betas, *([smoothing] if smoothing else [])]:
            reading.drop(beta_origin, "it has no effect without rl")
        return
    for value, beta_origin in betas or [(0.1, f"{origin} (TRL's default: beta=0.1)")]:
        reading.set(BETA, value, beta_origin if beta_origin.startswith(origin) else f"{beta_origin}; {origin}")
    if smoothing:
        reading.set("training.preference.label_smoothing", *smoothing)
    reading.set("data.separate_documents", True, origin)


def settle_batch(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Without an accumulation, it is the batch of a rank divided by the micro batch."""
    if "batch_size" not in reading.facts:
        return
    batch, origin = reading.facts["batch_size"]
    micro = values.get("micro_batch_size") or 1
    check_count(batch, origin)
    check_count(micro, f"{file}: micro_batch_size={micro}")
    if values.get("gradient_accumulation_steps") is None:
        reading.fact("accumulation", max(1, batch // micro), origin)
    else:
        reading.drop(origin, "gradient_accumulation_steps counts")


def settle_ranks(reading: Reading) -> None:
    """Set the sharded and the replicated degree, as axolotl derives them: 1 counts as unset, and a degree that is unset
    becomes the rest of the data-parallel ranks."""
    shard, where = reading.facts.get("dp_shard_size", (1, ""))
    replicate, replicate_origin = reading.facts.get("dp_replicate_size", (1, ""))
    split = reading.model_ranks()
    sharded = bool(reading.known("zero") or reading.known("fsdp"))
    if shard > 1 and not sharded:
        raise UserError(f"{where}: axolotl shards with FSDP only; add fsdp_config")
    if shard > 1 and replicate > 1:
        reading.fact("ranks", shard * replicate * split, f"{where}; {replicate_origin}")
    ranks, origin = reading.facts.get("ranks", (None, ""))
    for name, axis in (("dp_shard_size", "dp_shard"), ("dp_replicate_size", "dp_replicate")):
        if reading.known(name) == 1:
            alone = shard == replicate == 1
            unset = Always("1 leaves the ranks to fsdp") if alone else Has(f"layout.{axis}", 1)
            reading.claim(reading.facts[name][1], unset)
    if shard == replicate == 1:
        return
    if ranks is None:
        if sharded and replicate > 1:
            reading.drop(replicate_origin, "the number of ranks is unknown; give --ranks N")
        elif sharded:
            reading.fact("shard", shard, where)
        return
    left, names = ranks // split, joined(where, replicate_origin)
    fits = shard * replicate == left if shard > 1 and replicate > 1 else left % (shard * replicate) == 0
    if ranks % split or not fits or (not sharded and replicate != left):
        raise UserError(f"{names}: do not fit the {left} data-parallel ranks of {origin}; give another --ranks")
    reading.claim(replicate_origin, Has("layout.dp_replicate", replicate))
    if sharded:
        reading.fact("shard", shard if shard > 1 else left // replicate, names)

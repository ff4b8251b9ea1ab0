"""The one place that predicts what a rank holds in memory, in bytes, from the parameter table."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.training import TrainingSpec

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes per rank at the peak of a step."""

    weights: int
    """Stored weights and, under bf16, fp16 or sharding, the copies that the model computes with."""
    gradients: int
    optimizer: int
    activations: int
    """What the backward pass needs from the forward pass, with the recomputation asked for."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def predict_memory(
    model: ModelSpec,
    table: Iterable[Parameter],
    training: TrainingSpec,
    layout: LayoutSpec,
    *,
    micro_batch: int,
    sequence_length: int,
) -> MemoryPrediction:
    """Peak bytes per rank; state as in the ZeRO paper (Rajbhandari et al., 2020, section 3), fp32 gradients.

    A coarse model: allocator overhead, kernels' workspaces and communication buffers are not counted.
    """
    table = tuple(table)
    psi = sum(parameter.numel for parameter in table)
    largest_block = psi // max(1, model.num_layers)
    stored = 8 if training.precision == "fp64" else 4
    compute = COMPUTE_BYTES[training.precision]
    shards, stage = layout.dp_shard, layout.zero_stage
    copies = 0 if layout.world_size == 1 and compute == stored else compute * (psi if stage < 3 else largest_block)
    states = 2 if training.optimizer.name == "adamw" else 1
    return MemoryPrediction(
        weights=stored * psi // shards + copies,
        gradients=stored * (psi // shards if stage >= 2 else psi),
        optimizer=states * stored * psi // shards,
        activations=micro_batch * sequence_length * _activation_bytes_per_token(model, training),
    )


def _activation_bytes_per_token(model: ModelSpec, training: TrainingSpec) -> int:
    """Saved activations of all blocks and the head per token of a microbatch.

    After Korthikanti et al. (2022), section 4.1, without dropout and with flash attention (no T x T scores), SwiGLU's
    two inputs and product counted.
    """
    width = COMPUTE_BYTES[training.precision]
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    ffn_inputs = 2 if model.activation == "swiglu" else 1
    products = 2 * heads + 2 * kv_heads + 2 * model.hidden + ffn_inputs * model.ffn  # qkv, attention, wo, w1 w3, w2
    between = 4 * model.hidden + 2 * model.ffn  # norms' inputs and outputs, the activation function's steps
    whole_block = products + between
    per_block = {"none": whole_block, "selective": products + model.hidden, "full": model.hidden}[training.recompute]
    again = 0 if training.recompute == "none" else whole_block  # one block at a time is recomputed
    return width * (model.num_layers * per_block + again + 3 * model.hidden)

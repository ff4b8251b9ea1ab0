"""Floating-point operations of a model.

The convention is PaLM's model FLOPs utilisation (Chowdhery et al., 2022, appendix B): 6 N + 12 L H Q T a token, with N
the parameters in matrix products, L layers, H heads of width Q and T tokens of attention. A multiplication and an
addition are two operations; the backward pass is twice the forward pass. Attention counts in full, although a causal
kernel may skip half of it; recomputation, norms, activations, the embedding's look-up and the optimizer do not count.
"""

from collections.abc import Iterator

from meshwright.families.adapters import finetuned_table
from meshwright.families.table import active_numel, parameter_table
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.layers import GatedDeltaSpec, MixerSpec
from meshwright.spec.model import ModelSpec, Parameter


def matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that every token is multiplied by: all matrices and the head, tied or not, without embeddings and
    without the experts that the token skips."""
    return sum(active_numel(spec, row) for row in _matrices(spec))


def _matrices(spec: ModelSpec) -> Iterator[Parameter]:
    table = parameter_table(spec)
    embedding = next(row.name for row in table if row.dims[0] == "vocab")  # or the head, which is as large
    looked_up = set() if spec.tied_embeddings else {embedding}
    matrices = (row for row in table if len(row.shape) >= 2 and row.dims[0] != "positions" and row.dims[-1] != "bias")
    return (row for row in matrices if row.name not in looked_up)


def attention_flops_per_token(spec: ModelSpec, sequence_length: int) -> int:
    """Forward operations of scores and weighted values for one token of a sequence, over all layers."""
    return sum(mixer_flops_per_token(layer.mixer, sequence_length) for layer in spec.layers)


def mixer_flops_per_token(mixer: MixerSpec, sequence_length: int) -> int:
    """The same of one layer. The gated delta rule reads a state by key and by query, and writes it."""
    if isinstance(mixer, GatedDeltaSpec):
        return 3 * 2 * mixer.heads * mixer.key_dim * mixer.value_dim
    span = min(sequence_length, mixer.window or sequence_length)
    return 2 * mixer.heads * (mixer.head_dim + mixer.value_dim) * span


def forward_flops_per_token(spec: ModelSpec, sequence_length: int) -> int:
    """Operations of the forward pass for one token of a sequence of `sequence_length` tokens."""
    return 2 * matmul_parameters(spec) + attention_flops_per_token(spec, sequence_length)


def flops_per_token(spec: ModelSpec, sequence_length: int, finetune: FinetuneSpec | None = None) -> int:
    """Operations of training, forward and backward, for one token of a sequence of `sequence_length` tokens.

    A frozen matrix has no weight gradient, so it counts 4 operations a parameter instead of 6.
    """
    whole = 3 * forward_flops_per_token(spec, sequence_length)
    if finetune is None:
        return whole
    table = finetuned_table(spec, finetune)
    trained = {row.name for row in table if row.trained}
    frozen = sum(active_numel(spec, row) for row in _matrices(spec) if row.name not in trained)
    adapters = sum(row.numel for row in table if row.adapter and len(row.shape) == 2)
    return int(finetuning_flops(whole, frozen, adapters))


def finetuning_flops(whole: float, frozen: float, adapters: float) -> float:
    """Operations of a token in fine-tuning: full training takes `whole`, `frozen` parameters in matrix products are
    frozen, and `adapters` parameters of adapters' matrices are added."""
    return whole - 2 * frozen + 6 * adapters

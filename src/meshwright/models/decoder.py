"""The language model: embeddings, blocks, final norm and head.

Shapes: B batch, T sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any, assert_never

import torch
from torch import nn

from meshwright.families import parameter_table
from meshwright.models.attention import Attention, Mask
from meshwright.models.batch import TensorBatch
from meshwright.models.cache import Cache, LayerCache
from meshwright.models.dropout import Draws
from meshwright.models.embedding import Embedding
from meshwright.models.feed_forward import FeedForward
from meshwright.models.gated_delta import GatedDelta
from meshwright.models.head import Head, HeadSplit
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.linear import Linear
from meshwright.models.masks import Masks, document_positions, make_masks
from meshwright.models.moe import MoE
from meshwright.models.norm import build_norm
from meshwright.models.rope import RopeTables, rope_tables
from meshwright.models.slots import Wrapped
from meshwright.models.states import StateCache
from meshwright.spec.errors import UserError
from meshwright.spec.layers import AttentionSpec, DenseSpec, ExpertsSpec, GatedDeltaSpec, LatentSpec, Rope
from meshwright.spec.model import ModelSpec


class Block(Wrapped):
    """One layer: attention and feed-forward, each after or before a norm and added to the residual stream. Strategies
    that recompute or compile it wrap `compute`."""

    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        kind = spec.layer(layer)
        before, after = kind.norms_inputs, kind.norms_outputs
        self.attention_norm = _norm_if(before, spec)
        self.attention = _mixer(spec, layer)
        self.attention_post_norm = _norm_if(after, spec)
        self.feed_forward_norm = _norm_if(before, spec)
        self.feed_forward = _feed_forward(spec, layer)
        self.feed_forward_post_norm = _norm_if(after, spec)

    def compute(
        self,
        x_BTD: torch.Tensor,
        rope: RopeTables | None = None,
        mask: Mask = None,
        cache: LayerCache | StateCache | None = None,
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        y_BTD = self.attention(self.attention_norm(x_BTD), rope, mask, cache)
        x_BTD = x_BTD + self.attention_post_norm(y_BTD)
        return x_BTD + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_BTD)))


def _norm_if(normed: bool, spec: ModelSpec) -> nn.Module:
    return build_norm(spec, spec.hidden) if normed else nn.Identity()


def _mixer(spec: ModelSpec, layer: int) -> Attention | GatedDelta:
    kind = spec.layer(layer).mixer
    match kind:
        case AttentionSpec():
            return Attention(spec, layer)
        case LatentSpec():
            return LatentAttention(spec, layer)
        case GatedDeltaSpec():
            return GatedDelta(spec, layer)
        case _:
            assert_never(kind)


def _feed_forward(spec: ModelSpec, layer: int) -> FeedForward | MoE:
    kind = spec.layer(layer).feed_forward
    match kind:
        case DenseSpec():
            return FeedForward(spec, kind.width)
        case ExpertsSpec():
            return MoE(spec, layer)
        case _:
            assert_never(kind)


Read = Callable[[torch.Tensor, Head, TensorBatch], Any]
"""(hidden states [B, T, D], the head, the batch) -> anything computed from them."""


class Decoder(Wrapped):
    """A causal language model, whole, on one device; `named_parameters()` is the parameter table, buffers its state.
    Wrappers apply to `compute`, without the head, in passes without a cache."""

    def __init__(self, spec: ModelSpec, block: Callable[[ModelSpec, int], Block] = Block):
        """`block` makes the block of a layer."""
        super().__init__()
        self.spec = spec
        self.table = parameter_table(spec)
        """The parameter table; fine-tuning replaces it."""
        self.tok_embeddings = Embedding(spec.vocab, spec.hidden)
        learned = spec.positions == "learned"
        self.pos_embeddings = Embedding(spec.max_positions, spec.hidden) if learned else None
        self.layers = nn.ModuleDict({str(i): block(spec, i) for i in range(spec.num_layers)})
        self.norm = build_norm(spec, spec.hidden)
        self.output = None if spec.tied_embeddings else Linear(spec.hidden, spec.vocab, bias=False)
        self.head_split = HeadSplit()

    draws: Draws | None = None
    """A slot: tells dropout layers which tokens are computed."""

    make_reader: Callable[["Decoder"], Any] | None = None
    """A slot: makes the reader of rows that are generated (`serve/readers.py`); None: by the kind of model."""

    next_step: Callable[[TensorBatch, Cache], torch.Tensor] | None = None
    """A slot: the logits after a step in which every sequence gets one token; None: by the modules."""

    def keep_layers(self, parts: Iterable[range]) -> None:
        """Drop every module that `forward(layers=part)` does not need for these parts of the layers.

        Embeddings go with the first layer, norm and head with the last one; a tied head keeps the embedding.
        """
        kept = {i for part in parts for i in part}
        first, last = 0 in kept, self.spec.num_layers - 1 in kept
        for i in set(range(self.spec.num_layers)) - kept:
            del self.layers[str(i)]
        if not first:
            self.pos_embeddings = None
        if not last:
            del self.norm, self.output
        if not (first or (last and self.spec.tied_embeddings)):
            del self.tok_embeddings

    def sent_shape(self, batch: TensorBatch, like: torch.Tensor, sequence_split: int) -> tuple[int, ...]:
        """The shape of what pipeline stages send for a batch, in the dtype of the empty tensor `like`, if this many
        ranks share the tokens between layers."""
        return len(batch.tokens), batch.tokens.shape[1] // sequence_split, self.spec.hidden

    @property
    def like(self) -> torch.Tensor:
        """A weight whose dtype and device are those of every unquantized weight."""
        return next(parameter for parameter in self.parameters() if parameter.is_floating_point())

    @property
    def head_weight(self) -> torch.Tensor:
        """The output head's weight [V, D]; the embedding's if they are tied."""
        head = self.tok_embeddings if self.output is None else self.output
        return head.merged()["weight"]

    def forward(
        self,
        batch: TensorBatch,
        read: Read | None = None,
        *,
        cache: Cache | None = None,
        layers: range | None = None,
        x_BTD: torch.Tensor | None = None,
    ) -> Any:
        """The hidden states [B, T, D] after `layers`; after the last one the normed ones, or the result of `read`.

        Args:
            batch: its tokens, documents and positions; by default positions count from each row's or document's start.
            read: computes the result from the last hidden states. It is called inside the forward pass, where the
                head's weight is gathered however the model is sharded.
            cache: keys and values of earlier tokens; it made the batch (`Cache.append`) and stores the new ones.
            layers: the layers to run; default all.
            x_BTD: the residual stream [B, T, D] that enters `layers` if they do not begin with the first.

        Raises:
            UserError: more positions than learned position embeddings.
        """
        self.tell_draws(batch)
        layers = range(self.spec.num_layers) if layers is None else layers
        length, device, positions_BT = batch.tokens.shape[1], batch.tokens.device, batch.position_ids
        masks = make_masks(self.spec.windows, batch) if cache is None else {}  # the cache itself has the masks
        if positions_BT is None and batch.document_ids is not None:
            positions_BT = document_positions(batch.document_ids)
        if positions_BT is None:
            if self.spec.positions == "learned" and length > self.spec.max_positions:
                raise UserError(f"{length} positions; this model has embeddings for {self.spec.max_positions}")
            positions_BT = torch.arange(length, device=device)
        compute = self.compute if self.run is None or cache is not None else self.run
        y_BTD = compute(batch.tokens if x_BTD is None else x_BTD, positions_BT, masks, layers, cache)
        if layers.stop < self.spec.num_layers or read is None:
            return y_BTD
        return read(y_BTD, Head(self.head_split, self.head_weight), batch)

    def compute(
        self, entering: torch.Tensor, positions_BT: torch.Tensor, masks: Masks, layers: range, cache: Cache | None
    ) -> torch.Tensor:
        """The hidden states after `layers`, normed after the last one; `entering` are tokens or the residual stream.
        `masks`: by the layers' windows; empty with a cache."""
        y_BTD = entering if entering.is_floating_point() else self._embed(entering, positions_BT)
        ropes: dict[tuple[Rope, int], RopeTables] = {}
        for index, kind in list(enumerate(self.spec.layers))[layers.start : layers.stop]:
            block, mixer, rope = self.layers[str(index)], kind.mixer, None
            if mixer.rope is not None:
                key = mixer.rope, mixer.rotated
                rope = ropes[key] = ropes.get(key) or rope_tables(*key, positions_BT)
            if cache is None:
                y_BTD = block(y_BTD, rope, masks[mixer.window])
            else:
                y_BTD = block(y_BTD, rope, None, cache.layers[str(index)])
        return y_BTD if layers.stop < self.spec.num_layers else self.norm(y_BTD)

    def extra_repr(self) -> str:
        """The contents of the slots."""
        next_step = "" if self.next_step is None else f"next_step: {self.next_step}"
        return ", ".join(filter(None, (super().extra_repr(), next_step)))

    def tell_draws(self, batch: TensorBatch) -> None:
        """Give dropouts the batch's tokens. Call it before the batch is computed, and before it is recomputed in a
        backward pass after other batches."""
        if self.draws is not None:
            self.draws.numbers = batch.numbers

    def logits(self, batch: TensorBatch) -> torch.Tensor:
        """The logits [B, T, V] of every position, in the model's dtype."""
        return self(batch, lambda x_BTD, head, _: head.logits(x_BTD))

    def _embed(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tok_embeddings(tokens_BT)
        if self.spec.embedding_scaled:  # by a number of the weights' dtype, as Gemma was trained
            x_BTD = x_BTD * torch.tensor(self.spec.hidden**0.5, dtype=torch.float32).to(x_BTD.dtype)
        return x_BTD if self.pos_embeddings is None else x_BTD + self.pos_embeddings(positions_BT)

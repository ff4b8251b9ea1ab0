"""The one place that puts a language model together: embeddings, blocks, final norm, head and loss.

Shapes: B batch, T sequence, D hidden, V vocabulary.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.families import parameter_table
from meshwright.models.adapters import Mergeable
from meshwright.models.attention import Attention, LayerCache, Mask
from meshwright.models.feed_forward import FeedForward
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.loss import linear_cross_entropy, linear_token_losses
from meshwright.models.masks import Documents, attention_mask, document_positions
from meshwright.models.moe import MoE
from meshwright.models.norm import build_norm
from meshwright.models.preference import PreferenceLoss
from meshwright.models.rope import RopeTables, rope_tables
from meshwright.spec.model import ModelSpec


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.attention_norm = build_norm(spec, spec.hidden)
        self.attention = Attention(spec) if spec.kv_rank is None else LatentAttention(spec)
        self.feed_forward_norm = build_norm(spec, spec.hidden)
        self.feed_forward = MoE(spec, layer) if spec.is_moe(layer) else FeedForward(spec, spec.ffn)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rope: RopeTables | None = None,
        mask: Mask = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask, cache)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Cache:
    """Every layer's keys and values for rows of up to `capacity` tokens, and each row's padding on the left."""

    def __init__(self, model: "Decoder", batch: int, capacity: int, padding_B: torch.Tensor | None = None):
        spec, like = model.spec, model.tok_embeddings.weight
        shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
        self.layers = {key: LayerCache(like.new_empty(shape), like.new_empty(shape)) for key in model.layers}
        self.padding_B = padding_B

    @property
    def length(self) -> int:
        """Tokens seen so far, padding included."""
        return next(iter(self.layers.values())).length


class Decoder(nn.Module):
    """A causal language model, whole, on one device; `named_parameters()` is the parameter table, buffers its state."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.preference: PreferenceLoss | None = None
        """The loss of pairs of answers, where the run learns from such."""
        self.table = parameter_table(spec)
        """What the parameters are; fine-tuning replaces it."""
        self.tok_embeddings = _embedding(spec.vocab, spec.hidden)
        learned = spec.positions == "learned"
        self.pos_embeddings = _embedding(spec.max_positions, spec.hidden) if learned else None
        self.layers = nn.ModuleDict({str(i): Block(spec, i) for i in range(spec.num_layers)})
        self.norm = build_norm(spec, spec.hidden)
        self.output = None if spec.tied_embeddings else nn.Linear(spec.hidden, spec.vocab, bias=False)

    def keep_layers(self, parts: Iterable[range]) -> None:
        """Drop every module that running these parts of the layers, by `forward(layers=part)`, does not need.

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

    @property
    def like(self) -> torch.Tensor:
        """A weight of the dtype and on the device of all that is kept in full."""
        return next(parameter for parameter in self.parameters() if parameter.is_floating_point())

    @property
    def head_weight(self) -> torch.Tensor:
        """The output head's weight [V, D]; the embedding's where they are tied."""
        head = self.tok_embeddings if self.output is None else self.output
        return head.merged()["weight"] if isinstance(head, Mergeable) else head.weight

    def forward(
        self,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        owners_BT: torch.Tensor | None = None,
        references_BP: torch.Tensor | None = None,
        asked_BT: torch.Tensor | None = None,
        *,
        cache: Cache | None = None,
        layers: range | None = None,
        x_BTD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits, or the summed loss where there are labels; of a part of the layers, what goes into the next part.

        Args:
            tokens_BT: int64 token ids [B, T].
            labels_BT: int64 next tokens [B, T]; -100 is not trained on.
            documents_BT: int64 [B, T]; a document is a run of equal numbers in a row. Its tokens see no other
                document, and their positions count from its first. Default: every row is one document. Of the
                whole row, where the tokens are only a part of it and attention is told how.
            positions_BT: int64 [B, T]; default 0 .. T-1 in every document, continued from the cache.
            owners_BT: int64 [B, T]: the document of each of these tokens, where answers are held against one another.
            references_BP: fp64 [B, P]: of each pair of answers the reference's margin (see `preference.py`).
            asked_BT: bool [B, T]: the one place of each row whose logits are wanted; default all.
            cache: keys and values of earlier tokens; the new ones are added to it.
            layers: the layers to run; default all.
            x_BTD: the residual stream [B, T, D] that goes into `layers` where they do not begin with the first.

        Returns:
            logits [B, T, V], or [B, V] of what is asked for, in the model's dtype; with labels a scalar: the sum over
            labels of the cross-entropy in nats, fp32 (fp64 in fp64), computed without ever holding all logits.
            Where `layers` do not end with the last one, the residual stream [B, T, D] behind them.

        Raises:
            ValueError: more positions than learned position embeddings.
        """
        x_BTD = self.features(
            tokens_BT, documents_BT, positions_BT=positions_BT, cache=cache, layers=layers, x_BTD=x_BTD
        )
        if layers is not None and layers.stop < self.spec.num_layers:
            return x_BTD
        if labels_BT is None:
            return self.logits(x_BTD, asked_BT)
        if references_BP is None:
            return self.loss(x_BTD, labels_BT)
        assert self.preference is not None
        assert owners_BT is not None
        return self.preference(self.token_losses(x_BTD, labels_BT), owners_BT, references_BP)

    def features(
        self,
        tokens_BT: torch.Tensor,
        documents_BT: torch.Tensor | None = None,
        *,
        positions_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        layers: range | None = None,
        x_BTD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream [B, T, D] behind `layers`; behind the last one normed, as the head reads it."""
        layers = range(self.spec.num_layers) if layers is None else layers
        start = 0 if cache is None else cache.length
        stop = start + tokens_BT.shape[1]
        window, device = self.spec.sliding_window, tokens_BT.device
        mask: Mask
        if documents_BT is not None:
            assert cache is None, "generation continues one document a row"
            mask = Documents(documents_BT, window=window)
            positions_BT = document_positions(documents_BT) if positions_BT is None else positions_BT
        else:
            padding_B = None if cache is None else cache.padding_B
            mask = attention_mask(stop - start, stop, window=window, padding_B=padding_B, device=device)
            if positions_BT is None:
                self._check_positions(stop)
                positions_BT = torch.arange(start, stop, device=device)
        y_BTD = self._embed(tokens_BT, positions_BT) if x_BTD is None else x_BTD
        rope = rope_tables(self.spec, positions_BT) if self.spec.positions == "rope" else None
        for key in map(str, layers):
            block = self.layers[key]
            y_BTD = block(y_BTD, rope, mask) if cache is None else block(y_BTD, rope, mask, cache.layers[key])
        return self.norm(y_BTD) if layers.stop == self.spec.num_layers else y_BTD

    def _check_positions(self, number: int) -> None:
        if self.spec.positions == "learned" and number > self.spec.max_positions:
            raise ValueError(f"{number} positions; this model has embeddings for {self.spec.max_positions}")

    def _embed(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tok_embeddings(tokens_BT)
        return x_BTD if self.pos_embeddings is None else x_BTD + self.pos_embeddings(positions_BT)

    def loss(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The summed cross-entropy of features [B, T, D] with labels [B, T], a scalar in fp32 (fp64)."""
        return linear_cross_entropy(x_BTD.flatten(0, 1), self.head_weight, labels_BT.flatten())

    def token_losses(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Each label's cross-entropy [B, T], of features [B, T, D], in fp32 (fp64); 0 where the label is -100."""
        return linear_token_losses(x_BTD.flatten(0, 1), self.head_weight, labels_BT.flatten()).view(labels_BT.shape)

    def logits(self, x_BTD: torch.Tensor, asked_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., V] of features [..., D]; [B, V] of one place of each row, where these are asked for."""
        return F.linear(x_BTD if asked_BT is None else self.pick(x_BTD, asked_BT), self.head_weight)

    def pick(self, x_BTD: torch.Tensor, asked_BT: torch.Tensor) -> torch.Tensor:
        """The features [B, D] of one place of each row; a strategy that splits rows replaces it."""
        return x_BTD.where(asked_BT.unsqueeze(-1), 0).sum(1)


def _embedding(rows: int, width: int) -> nn.Embedding:
    """One whose numbers somebody else draws: torch's own drawing on the meta device loads its compiler, for seconds."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))

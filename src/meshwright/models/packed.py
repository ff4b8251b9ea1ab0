"""Blocks packed for generation on a CPU: fewer and larger products, with weights in the order that oneDNN reads.

A step of generation multiplies a few rows with every weight, so its time depends on the overhead of each operation and
on the order of weights in memory. `pack` wraps blocks. With a cache, wrapped blocks compute with copies of their
weights: queries, keys and values in one product, both gates in another. Layers with an adapter, a quantized weight or a
custom forward pass stay unchanged.

Shapes: N tokens, D in, O out, H heads, G key and value heads, K head_dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.attention import Attention, Core
from meshwright.models.cache import CacheStep, LayerCache
from meshwright.models.decoder import Block, Decoder
from meshwright.models.feed_forward import FeedForward
from meshwright.models.from_disk import blocks_from_disk
from meshwright.models.linear import Linear, Plain
from meshwright.models.norm import LayerNorm, RMSNorm
from meshwright.models.rope import RopeTables
from meshwright.models.slots import OpPosition
from meshwright.torch_internals import linear_by_onednn, onednn_multiplies, reorder_for_onednn

SMALL = 2**16
"""Size of a weight up to which torch's own product is faster: a oneDNN call costs ten microseconds."""
DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes for which oneDNN has fast products and `decode.cpp` has code."""
ROWS = 8
"""The number of rows that weights are ordered for; other numbers work too."""
COPIED_BYTES = 4 * 2**30
"""The most bytes that copies of weights take, for packed blocks and compiled steps."""


Total = Callable[[torch.Tensor], torch.Tensor]
"""Takes parts, returns their sum over ranks."""


class PackedLinear:
    """The products of one input with several layers, merged into one. `rows` and `columns`: the order of its outputs
    and inputs. `total`: sums the products over ranks that each have a part of the inputs."""

    def __init__(
        self,
        layers: Sequence[Linear],
        *,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        total: Total | None = None,
    ) -> None:
        self._total = total
        weights = [layer.view.read(layer) for layer in layers]
        weight_OD = torch.cat([each["weight"].detach() for each in weights])
        self._bias_O = None
        if weights[0]["bias"] is not None:
            self._bias_O = torch.cat([each["bias"].detach() for each in weights])
        if rows is not None:
            weight_OD = weight_OD[rows]
            self._bias_O = None if self._bias_O is None else self._bias_O[rows]
        self._weight_OD = weight_OD if columns is None else weight_OD[:, columns]
        self._packed = None
        if self._weight_OD.numel() > SMALL:
            self._packed = reorder_for_onednn(self._weight_OD, ROWS)
            self._weight_OD = torch.empty(0)

    def __call__(self, x_1ND: torch.Tensor) -> torch.Tensor:
        """[1, N, D] to [1, N, O]."""
        if self._total is None:
            return self._product(x_1ND, self._bias_O)
        y_1NO = self._total(self._product(x_1ND, None))
        return y_1NO if self._bias_O is None else y_1NO + self._bias_O

    def _product(self, x_1ND: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x_1ND, self._weight_OD, bias_O)
        return linear_by_onednn(x_1ND, self._packed, bias_O)


class PackedAttention:
    """`Attention` with one product for queries, keys and values.

    Weights are reordered so that no step copies anything. The two numbers of a rotated pair are adjacent, like a
    complex number. Query heads that share keys are far apart, in the order in which attention returns them. `halves`:
    the KV cache has the pairs' first numbers before their second ones, as in the modules and compiled steps.
    """

    def __init__(self, attention: Attention, total: Total | None, *, halves: bool) -> None:
        width = attention.head_dim
        self._width, self._core = width, attention.core
        queries, keys = (len(layer.view.read(layer)["weight"]) for layer in (attention.wq, attention.wk))
        self._heads, self._groups = queries // width, keys // width  # this rank's
        pairs_K = torch.arange(width).view(2, -1).T.flatten()
        self._halves_K = pairs_K.argsort() if halves else None
        heads_GR = torch.arange(self._heads).view(self._groups, -1)
        q_HK, k_GK, v_GK = (
            torch.arange((self._heads + 2 * self._groups) * width)
            .view(-1, width)
            .split((self._heads, self._groups, self._groups))
        )
        rows = torch.cat((q_HK[heads_GR.T.flatten()][:, pairs_K], k_GK[:, pairs_K], v_GK)).flatten()
        self._into = PackedLinear([attention.wq, attention.wk, attention.wv], rows=rows)
        self._out = PackedLinear([attention.wo], columns=q_HK[heads_GR.T.flatten()].flatten(), total=total)
        self._norms = [None if norm is None else _norm(norm, pairs_K) for norm in (attention.q_norm, attention.k_norm)]

    def __call__(
        self, x_1ND: torch.Tensor, rope: RopeTables | None, cache: LayerCache, step: CacheStep
    ) -> torch.Tensor:
        """[1, N, D] to [1, N, D]."""
        heads_NEK = self._into(x_1ND)[0].unflatten(-1, (-1, self._width))
        both = self._heads + self._groups
        q_norm, k_norm = self._norms
        if q_norm is not None and k_norm is not None:
            heads_NEK[:, : self._heads] = q_norm(heads_NEK[:, : self._heads])
            heads_NEK[:, self._heads : both] = k_norm(heads_NEK[:, self._heads : both])
        if rope is not None:
            turned = heads_NEK[:, :both]
            wide = turned.float().unflatten(-1, (-1, 2))
            torch.view_as_complex(wide).mul_(rope.turns[0])
            if wide.dtype != turned.dtype:
                turned.copy_(wide.flatten(-2))
        if self._halves_K is not None:
            heads_NEK[:, :both] = heads_NEK[:, :both, self._halves_K]
        q_NHK, new_N2GK, singles = heads_NEK[:, : self._heads], heads_NEK[:, self._heads :], step.singles
        outputs = []
        if singles:
            q_PGRK = q_NHK[:singles].unflatten(1, (-1, self._groups)).transpose(1, 2)
            outputs.append(cache.attend_singles(q_PGRK, new_N2GK[:singles]).transpose(1, 2).flatten(1))
        if step.parts:
            q_1HNK = q_NHK.unflatten(1, (-1, self._groups)).transpose(1, 2).flatten(1, 2).transpose(0, 1)[None]
            for part in step.parts:
                y_HTK = cache.attend_part(self._core, part, q_1HNK, new_N2GK)[0]
                outputs.append(y_HTK.unflatten(0, (self._groups, -1)).permute(2, 1, 0, 3).flatten(1))
        if step.padding:
            outputs.append(x_1ND.new_zeros(step.padding, self._heads * self._width))
        return self._out((outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None])


class PackedFeedForward:
    """`FeedForward` with one product for both gates."""

    def __init__(self, layer: FeedForward, total: Total | None) -> None:
        self._into = PackedLinear([layer.w1] if layer.w3 is None else [layer.w1, layer.w3])
        self._out, self._gated = PackedLinear([layer.w2], total=total), layer.w3 is not None
        self._activation = layer.activation

    def __call__(self, x_1ND: torch.Tensor) -> torch.Tensor:
        """[1, N, D] to [1, N, D]."""
        h = self._into(x_1ND)
        if not self._gated:
            return self._out(self._activation(h))
        gate, up = h.chunk(2, -1)
        return self._out(self._activation(gate).mul_(up))


class PackedRMSNorm:
    """`RMSNorm` in half as many operations as torch's on a CPU; computed in fp32, rounded once."""

    def __init__(self, norm: RMSNorm, order: torch.Tensor | None) -> None:
        weight = norm.view.read(norm)["weight"].detach()
        weight_D = weight.float()
        self._weight_D = weight_D if order is None else weight_D[order]
        self._eps = torch.tensor(torch.finfo(weight.dtype).eps if norm.eps is None else norm.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim."""
        wide = x.float()
        size = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).mul_(self._weight_D).to(x.dtype)


class PackedBlock:
    """A wrapper of a block: with a cache it computes with packed parts, else unchanged.

    If ranks share the block, each has every token between packed blocks, so a block exchanges two sums and no parts of
    the sequence. `enter` gathers the sequence and `leave` takes this rank's part.
    """

    def __init__(
        self,
        block: Block,
        total: Total | None = None,
        *,
        halves: bool = False,
        enter: Total | None = None,
        leave: Total | None = None,
    ) -> None:
        self._enter, self._leave = enter, leave
        self._norms = [_norm(block.attention_norm), _norm(block.feed_forward_norm)]
        self._post_norms = [_norm(block.attention_post_norm), _norm(block.feed_forward_post_norm)]
        attention, feed_forward = block.attention, block.feed_forward
        self.copied: list[nn.Module] = []
        """The modules whose weights have copies here."""
        self._attention = None
        if isinstance(attention, Attention) and _may_pack_attention(attention, total):
            self._attention = PackedAttention(attention, total, halves=halves)
            self.copied.append(attention)
        self._module = attention
        self._feed_forward: Callable[[torch.Tensor], torch.Tensor] = feed_forward
        if isinstance(feed_forward, FeedForward) and _may_pack_feed_forward(feed_forward, total):
            self._feed_forward = PackedFeedForward(feed_forward, total)
            self.copied.append(feed_forward)

    def __call__(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward pass."""

        def run(
            x: torch.Tensor, rope: RopeTables | None = None, mask: Any = None, cache: LayerCache | None = None
        ) -> torch.Tensor:
            if cache is None:
                return compute(x, rope, mask, cache)
            x = x if self._enter is None else self._enter(x)
            (before, between), (after, last) = self._norms, self._post_norms
            h = before(x)
            attended = (
                self._module(h, rope, mask, cache)
                if self._attention is None
                else self._attention(h, rope, cache, cache.step)
            )
            x = x + after(attended)
            y = x + last(self._feed_forward(between(x)))
            return y if self._leave is None else self._leave(y)

        return run

    def __repr__(self) -> str:
        return "packed"


class PackedHead:
    """The rows of the head for the last hidden states of a step."""

    def __init__(self, weight_VD: torch.Tensor) -> None:
        self._packed = reorder_for_onednn(weight_VD.detach(), ROWS)

    def __call__(self, x_BD: torch.Tensor) -> torch.Tensor:
        """[B, D] to [B, V]."""
        return linear_by_onednn(x_BD, self._packed, None)

    def __repr__(self) -> str:
        return "packed"


def pack(model: Decoder) -> None:
    """Fill the slots of a model that from now on is used only for generation: later changes of its weights have no
    effect.

    Does nothing on a GPU, in precisions other than fp32 and bf16, or in bf16 on a processor without oneDNN's bf16
    products. Does nothing for models that transformers computes, or whose weights are on disk, or whose copies would
    take more than `COPIED_BYTES`.
    """
    like = model.like
    if (
        model.spec.foreign is not None
        or like.device.type != "cpu"
        or like.dtype not in DTYPES
        or not onednn_multiplies(like.dtype)
        or weight_bytes(model) * (1 if model.next_step is None else 2) > COPIED_BYTES
        or blocks_from_disk(model) is not None
    ):
        return
    split = model.head_split.vocabulary
    blocks = [block for block in model.layers.values() if type(block) is Block and not block.wrappers]
    if split is None:
        for block in blocks:
            block.wrap(PackedBlock(block, halves=model.next_step is not None))
    elif len(blocks) == len(model.layers) and all(_may_pack(block, split.sum) for block in blocks):
        for block in blocks:
            enter = split.gather_sequence if block is blocks[0] else None
            leave = split.own_sequence if block is blocks[-1] else None
            block.wrap(PackedBlock(block, split.sum, enter=enter, leave=leave))
    if model.head_split.product is None:
        model.head_split.product = PackedHead(model.head_weight)


def release(model: Decoder) -> None:
    """Free the weights of blocks that have packed copies. From now on the model computes with a cache only, and no
    adapter can share its weights."""
    for block in model.layers.values():
        for wrapper in block.wrappers if isinstance(block, Block) else ():
            for module in wrapper.copied if isinstance(wrapper, PackedBlock) else ():
                for layer in (one for one in module.modules() if isinstance(one, Linear)):
                    layer.weight.data = layer.weight.data.new_empty(0)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights in memory."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _norm(norm: nn.Module, order: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm without the overhead of a module's call; `order`: of its input's numbers."""
    if type(norm) is nn.Identity:
        return unchanged
    if type(norm) is RMSNorm and _is_known(norm):
        return PackedRMSNorm(norm, order)
    if type(norm) is LayerNorm and _is_known(norm):
        weights = norm.view.read(norm)
        shape, weight, bias = list(norm.normalized_shape), weights["weight"].detach(), weights["bias"].detach()
        if order is not None:
            weight, bias = weight[order], bias[order]
        return partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=norm.eps)
    assert order is None
    return norm


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """`x`, where a block has no norm."""
    return x


def _may_pack(block: Block, total: Total) -> bool:
    return _may_pack_attention(block.attention, total) and _may_pack_feed_forward(block.feed_forward, total)


def _may_pack_attention(attention: nn.Module, total: Total | None) -> bool:
    if type(attention) is not Attention or type(attention.core) is not Core:
        return False
    if attention.entry is not None and total is None:
        return False
    if not all(norm is None or _is_known(norm) for norm in (attention.q_norm, attention.k_norm)):
        return False
    if not attention.plain:
        return False
    return all_plain(attention.wq, attention.wk, attention.wv, attention.wo)


def _may_pack_feed_forward(layer: nn.Module, total: Total | None) -> bool:
    if type(layer) is not FeedForward or (layer.entry is not None and total is None):
        return False
    return all_plain(*([layer.w1] if layer.w3 is None else [layer.w1, layer.w3]), layer.w2)


def all_plain(*layers: Linear) -> bool:
    """Whether products are plain ones, or sums of plain ones over ranks."""
    return all(
        type(layer.ops[0]) is Plain and all(op.place == OpPosition.SPLIT for op in layer.ops[1:]) for layer in layers
    )


def _is_known(norm: nn.Module) -> bool:
    return type(norm) in (RMSNorm, LayerNorm)

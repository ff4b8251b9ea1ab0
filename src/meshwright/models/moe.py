"""Mixture-of-experts layers: routing, the experts' products, load balancing.

Shapes: B batch, T sequence, D hidden, N = B T tokens, E experts, K experts of a token, M = N K rows (each the copy of a
token for one of its experts), G microbatches that rows come from (of this rank and of others), I in, O out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.devices import on_cpu, widest
from meshwright.models.dropout import Draws
from meshwright.models.feed_forward import FeedForward, gate
from meshwright.models.linear import Linear
from meshwright.models.slots import Viewed, Wrapped, unreduced
from meshwright.spec.layers import ExpertsSpec
from meshwright.spec.model import ModelSpec


class Router(Viewed):
    """Chooses each token's experts and their weights, and counts every expert's load."""

    bias: torch.Tensor | None
    """Added to scores only for the choice of experts; [E], fp32 or wider. State, not trained."""

    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        experts = spec.layer(layer).feed_forward
        assert isinstance(experts, ExpertsSpec)
        self.spec, self.experts, self.kind = spec, experts, experts.router
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(experts.count, spec.hidden))
        self.logit_bias = nn.Parameter(torch.empty(experts.count)) if experts.bias else None
        self.register_buffer("bias", torch.empty(experts.count) if self.kind.balancing else None)
        self.over_sequence: Callable[[torch.Tensor], torch.Tensor] = unreduced
        """A slot: reduces the counts [B, E] of this rank's tokens to counts of whole sequences."""
        self.sequence_weight = 0.0
        """The factor of one sequence's losses of the router in the gradient: the trainer's share of one sequence in the
        global batch. 0 leaves them out."""
        self.load_E: torch.Tensor | None = None
        """Tokens sent to each expert in all backward passes since `take_load`, int64."""

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route every token, in fp32 (fp64 for fp64), because a rounded score may choose another expert.

        Returns:
            the chosen experts' weights [B, T, K], the experts [B, T, K], int64, and how many tokens of each
            sequence go to each expert [B, E], int64.
        """
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        weights = self.view.read(self)
        bias_E = None if self.logit_bias is None else weights["logit_bias"].to(wide)
        logits_BTE = F.linear(x_BTD.to(wide), weights["weight"].to(wide), bias_E)
        scores_BTE = self._scores(logits_BTE)
        experts_BTK = self._choose(scores_BTE.detach())
        weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if self.kind.normalised:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
        weights_BTK = weights_BTK * self.kind.scale
        chosen_BM = experts_BTK.flatten(1)
        counts_BE = chosen_BM.new_zeros(len(x_BTD), self.experts.count)
        counts_BE.scatter_add_(1, chosen_BM, torch.ones_like(chosen_BM))
        losses = self._losses(logits_BTE, scores_BTE, counts_BE)
        weights_BTK = _JoinBackward.apply(weights_BTK, *losses, self, counts_BE)
        return weights_BTK, experts_BTK, counts_BE

    def _scores(self, logits_BTE: torch.Tensor) -> torch.Tensor:
        match self.kind.scores:
            case "softmax":
                return logits_BTE.softmax(-1)
            case "sigmoid":
                return logits_BTE.sigmoid()
            case _:
                assert_never(self.kind.scores)

    def _choose(self, scores_BTE: torch.Tensor) -> torch.Tensor:
        """The experts [B, T, K] with the best scores, after adding the bias if there is one. Only the best groups are
        considered, ranked by the sum of their two best scores (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2)."""
        if self.bias is not None:
            scores_BTE = scores_BTE + self.bias.to(scores_BTE)
        if self.kind.groups > 1:
            grouped = scores_BTE.unflatten(-1, (self.kind.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.kind.top_groups, dim=-1).indices
            taking_part = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=best.device).scatter_(-1, best, True)
            scores_BTE = grouped.masked_fill(~taking_part.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_BTE.topk(self.experts.chosen, dim=-1).indices

    def move_bias(self, load_E: torch.Tensor) -> None:
        """Lower the bias of experts with more load than the mean by `balance_rate` and raise it for experts with less
        (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024). `load`: [E], of the whole global batch."""
        if self.bias is not None:
            self.bias += self.spec.balance_rate * (load_E.to(widest(load_E)).mean() - load_E).sign().to(self.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Router":
        """Keeps the bias in fp32 or wider when the model is cast, because its steps are small."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None:
            exact = self.bias if before.is_meta else before
            self.bias = exact.to(self.bias.device, torch.promote_types(self.bias.dtype, torch.float32))
        return self

    def _losses(
        self, logits_BTE: torch.Tensor, scores_BTE: torch.Tensor, counts_BE: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The balance loss and the z-loss of every sequence, summed; None for those that do not join the gradient.

        Each sequence counts separately, so the split of a batch into microbatches and ranks changes nothing.
        """
        balance, z = self.spec.balance_loss, self.spec.router_z_loss
        if self.sequence_weight * (balance + z) == 0 or not torch.is_grad_enabled():
            return None, None
        counts_BE = self.over_sequence(counts_BE)
        return (
            self._balance_loss(scores_BTE, counts_BE) if balance else None,
            self._z_loss(logits_BTE, counts_BE) if z else None,
        )

    def _z_loss(self, logits_BTE: torch.Tensor, counts_BE: torch.Tensor) -> torch.Tensor:
        """The mean over tokens of the squared logarithm of the sum of exponentials (Zoph et al., "ST-MoE", 2022,
        eq. 5). `counts`: of whole sequences."""
        length_B = counts_BE.sum(-1) / self.experts.chosen
        return (logits_BTE.logsumexp(-1).square().sum(-1) / length_B).sum()

    def _balance_loss(self, scores_BTE: torch.Tensor, counts_BE: torch.Tensor) -> torch.Tensor:
        """E sum_i f_i P_i (Fedus et al., "Switch Transformers", 2021, eq. 4, as in Mixtral): f_i is the share of the
        sequence's tokens that expert i gets, over all K choices (so they sum to K), and P_i the mean of its
        probability. Only P has a gradient. `counts`: of whole sequences."""
        length_B1 = counts_BE.sum(-1, keepdim=True) / self.experts.chosen
        probabilities_BTE = scores_BTE
        if self.kind.scores == "sigmoid":
            probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        shares_BE = (counts_BE / length_B1).to(scores_BTE.dtype)
        means_BE = probabilities_BTE.sum(1) / length_B1
        return self.experts.count * (shares_BE * means_BE).sum()

    def take_load(self) -> torch.Tensor:
        """Tokens sent to each expert [E], int64, in the backward passes since this was last called."""
        load_E, self.load_E = self.load_E, None
        return torch.zeros(self.experts.count, dtype=torch.int64) if load_E is None else load_E


class _JoinBackward(torch.autograd.Function):
    """Passes the routing weights through; the backward pass adds the gradients of the router's losses and counts the
    load.

    The losses join at the router, so that no block has to return them. The load is counted in the backward pass, which
    runs once for each microbatch even if the forward pass is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        balance: torch.Tensor | None,
        z: torch.Tensor | None,
        router: Router,
        counts_BE: torch.Tensor,
    ):
        ctx.router, ctx.load_E, ctx.joins = router, counts_BE.sum(0), (balance is not None, z is not None)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad,) = grad_outputs
        router: Router = ctx.router
        router.load_E = ctx.load_E if router.load_E is None else router.load_E + ctx.load_E
        coefficients = router.spec.balance_loss, router.spec.router_z_loss
        factors = (coefficient * router.sequence_weight for coefficient in coefficients)
        losses = (grad.new_full((), f) if joins else None for f, joins in zip(factors, ctx.joins, strict=True))
        return grad, *losses, None, None


def read_counts(*counts: torch.Tensor) -> list[list[int]]:
    """Row counts as Python ints, from several tensors of one length. Only here does a routing decision reach the host
    and become a shape."""
    return torch.stack(counts).tolist()


class Rows(NamedTuple):
    """The owners of the rows, which are sorted by expert, then by microbatch."""

    counts: torch.Tensor
    """Rows of every expert from every microbatch, int64 [E, G]."""
    numbers: torch.Tensor | None = None
    """The numbers of their tokens (`Draws`) [M], if a product's rounding uses them."""


GroupedProduct = Callable[[torch.Tensor, torch.Tensor, Rows, Callable[..., list[list[int]]]], torch.Tensor]
"""(rows [M, I], weight [E, O, I], the rows' owners, a function like `read_counts`) -> each expert's rows by its matrix
[M, O]."""


class ExpertLinear(Viewed):
    """One matrix of every expert."""

    read_counts: Callable[..., list[list[int]]] = staticmethod(read_counts)
    """A slot for the function of this name."""
    product: GroupedProduct | None = None
    """A slot: the product; None: `grouped_matmul`."""

    def __init__(self, num_experts: int, into: int, out: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out, into))
        self.bias = nn.Parameter(torch.empty(num_experts, out, 1)) if bias else None

    def forward(self, x_MI: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[M, I] to [M, O]: each expert's rows by its matrix."""
        weights = self.view.read(self)
        if self.product is not None:
            y_MO = self.product(x_MI, weights["weight"], rows, self.read_counts)
        else:
            y_MO = grouped_matmul(x_MI, weights["weight"], rows.counts.sum(1), self.read_counts)
        if self.bias is None:
            return y_MO
        bias_EO = weights["bias"][..., 0]
        return y_MO + bias_EO.repeat_interleave(rows.counts.sum(1), 0, output_size=len(y_MO))

    def extra_repr(self) -> str:
        """The shape, and the contents of the slot."""
        experts, out, into = self.weight.shape
        product = "" if self.product is None else f"product: {self.product}"
        return ", ".join(filter(None, (f"{experts} of {into} to {out}", super().extra_repr(), product)))


def grouped_matmul(
    x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor, read: Callable = read_counts
) -> torch.Tensor:
    """Rows of `x`, sorted by expert, each multiplied by its expert's matrix: [M, O].

    One kernel for all experts if torch has it: on a GPU in bf16, on a CPU not in fp64, and only for rows of whole 16
    bytes.
    """
    _, out, into = weight_EOI.shape
    grouped = x_MI.dtype != torch.float64 if on_cpu(x_MI) else x_MI.dtype == torch.bfloat16
    if grouped and (into * x_MI.itemsize) % 16 == (out * x_MI.itemsize) % 16 == 0:
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_MI, weight_EOI.mT, offs=ends_E)
    return matmul_by_expert(x_MI, weight_EOI, counts_E, read)


def matmul_by_expert(
    x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor, read: Callable = read_counts
) -> torch.Tensor:
    """`grouped_matmul`, a product for each expert."""
    (counts,) = read(counts_E)
    groups = x_MI.split(counts)
    return torch.cat([F.linear(rows, weight_OI) for rows, weight_OI in zip(groups, weight_EOI.unbind(), strict=True)])


class Experts(nn.Module):
    """All experts of a layer, each `w2(activation(w1 x) * w3 x)`."""

    def __init__(self, spec: ModelSpec, layer: int = -1):
        super().__init__()
        kind = spec.layer(layer).feed_forward
        assert isinstance(kind, ExpertsSpec)
        self.w1 = ExpertLinear(kind.count, spec.hidden, kind.width, bias=kind.bias)
        self.w2 = ExpertLinear(kind.count, kind.width, spec.hidden, bias=kind.bias)
        self.w3 = ExpertLinear(kind.count, spec.hidden, kind.width, bias=kind.bias)
        self.gate = gate(kind.activation, spec)

    @property
    def matrices(self) -> tuple[ExpertLinear, ...]:
        """w1, w2 and w3."""
        return self.w1, self.w2, self.w3

    def forward(self, x_MD: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[M, D] to [M, D]."""
        return self.w2(self.gate(self.w1(x_MD, rows), self.w3(x_MD, rows)), rows)


ComputeRows = Callable[[torch.Tensor, Rows], torch.Tensor]
"""(rows [M, D], sorted by expert, then by microbatch, their owners) -> each row by its expert [M, D], as `Experts`."""


class Dispatch:
    """Brings rows to their experts and back; here this rank has all experts."""

    def __call__(
        self, experts: ComputeRows, x_MD: torch.Tensor, counts_E: torch.Tensor, numbers_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[M, D] to [M, D]: rows of one microbatch, sorted by expert, through their experts."""
        return experts(x_MD, Rows(counts_E[:, None], numbers_M))

    def __repr__(self) -> str:
        return "local"


class MoE(Wrapped):
    """A feed-forward layer of experts; each token uses a few of them (Shazeer et al., 2017). Dropless: an expert
    processes every token that is routed to it.

    A slot: `dispatch`; a strategy whose ranks share the experts fills it.
    """

    dispatch: Dispatch = Dispatch()
    draws: Draws | None = None
    """A slot: the numbers of tokens, if rounding in the experts' products uses them."""

    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.router = Router(spec, layer)
        self.experts_per_token = self.router.experts.chosen
        self.experts = Experts(spec, layer)
        shared = self.router.experts.shared
        self.shared = FeedForward(spec, shared) if shared else None
        self.shared_gate = Linear(spec.hidden, 1, bias=False) if self.router.experts.shared_gated else None

    def compute(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        weights_BTK, experts_BTK, counts_BE = self.router(x_BTD)
        order_M = experts_BTK.flatten().argsort(stable=True)
        x_MD = x_BTD.flatten(0, 1)[order_M // self.experts_per_token]
        numbers_BT = None if self.draws is None else self.draws.numbers
        numbers_M = None if numbers_BT is None else numbers_BT.flatten()[order_M // self.experts_per_token]
        y_MD = self.dispatch(self.experts, x_MD, counts_BE.sum(0), numbers_M)
        y_BTKD = y_MD[order_M.argsort()].view(*experts_BTK.shape, -1)
        y_BTD = (y_BTKD * weights_BTK.to(y_MD.dtype).unsqueeze(-1)).sum(-2)
        if self.shared is None:
            return y_BTD
        shared_BTD = self.shared(x_BTD)
        return y_BTD + (shared_BTD if self.shared_gate is None else self.shared_gate(x_BTD).sigmoid() * shared_BTD)

    def extra_repr(self) -> str:
        """The contents of the slot, and the wrappers."""
        return ", ".join(filter(None, (f"dispatch: {self.dispatch}", super().extra_repr())))

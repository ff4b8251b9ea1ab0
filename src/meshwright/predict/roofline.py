"""Compute time of a block, the head or an update on one device: a roofline at achieved rates.

Every operator costs its arithmetic at the achievable (not the datasheet's) rate, plus the part of its memory traffic
that the arithmetic does not hide; thin matrices are slow because their traffic is large for their arithmetic. Chains of
element-wise operators cost only their traffic. The host issues operators at its own rate and may be the bottleneck.
"""

from dataclasses import dataclass
from typing import assert_never

from meshwright.predict.blueprint import LayerParameters, Matrix
from meshwright.predict.constants import Constants
from meshwright.predict.job import Job, has_adapter
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.precision import BF16, FP16, FP32

HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B200", "B300", "GB200", "GB300")
"""Devices with kernels of their own generation."""


UNMEASURED = 0.75
"""The best shape's fraction of a datasheet's rate, if it has not been measured; measured ones are 0.73 to 0.87."""

ADAPTER_OPERATORS = 6
"""Operators of an adapter's forward pass: dropout, a cast, two products, scaling and adding."""

EXPERT_OPERATORS, FUSED_ROUTING_OPERATORS = 2.0, 1.5
"""Operators of a block with experts relative to a dense one's, with routing by single operators and in the exchange."""

KEPT_WIDE = 0.15
"""Fraction of the matrix products that fp4 recipes leave in bf16 (NVIDIA, "Pretraining LLMs with NVFP4", 2025)."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of computation of one microbatch."""

    forward: float
    backward: float

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> float:
        """Seconds of both."""
        return self.forward + self.backward

    def scaled(self, factor: float) -> "PassTime":
        """Both, times `factor`."""
        return PassTime(self.forward * factor, self.backward * factor)


class Device:
    """One device of a cluster under one job's precision and software."""

    def __init__(self, cluster: ClusterSpec, job: Job, constants: Constants) -> None:
        self.job, self.constants = job, constants
        measured, low, products = cluster.measured, job.precision.compute.name, job.precision.products
        self.hopper = cluster.device.startswith(HOPPER)
        self.rate = _rate(cluster, low, constants)
        self.linear_rate = self.rate
        if job.stack.emulated:
            self.linear_rate = _rate(cluster, FP32.name, constants)
        elif products != low and products in cluster.tflops:
            self.linear_rate = max(self.rate, _rate(cluster, products, constants))
            if products == "fp4":
                self.linear_rate = 1 / ((1 - KEPT_WIDE) / self.linear_rate + KEPT_WIDE / self.rate)
        self.quantized = job.stack.emulated or self.linear_rate > self.rate
        self.bandwidth = 1e9 * (measured.memory_gb_s or cluster.memory_gb_s * constants.memory)
        self.host = 0.0 if job.stack.graphs else 1e-6 * (measured.host_us or constants.host_us * job.stack.python)
        self.start = 1e-6 * measured.matmul_half_us.get(low, 0.0)
        self.attention_rate = 1e12 * measured.attention_tflops if measured.attention_tflops else self._attention_rate()
        self.width = job.width
        self.imbalance = 1.0 if job.stack.balanced_experts else constants.imbalance
        self.fusion = constants.fused_elementwise if job.stack.fused else constants.elementwise

    def _attention_rate(self) -> float:
        kind, constants = self.job.stack.attention, self.constants
        flash = self.rate * (constants.flash_hopper if self.hopper else constants.flash)
        match kind:
            case "unfused":
                return self.rate * constants.unfused
            case "hopper":
                return self.rate * constants.hopper if self.hopper else flash
            case "flash":
                return flash
            case "flash-bias":
                return flash * constants.bias
            case _:
                assert_never(kind)

    def busy(self, block: LayerParameters) -> PassTime:
        """Computation of one block for one microbatch, without recomputation."""
        tokens = self.job.tokens
        gemm = PassTime(0.0, 0.0)
        for matrix in block.matrices:
            gemm += self._experts(matrix, tokens) if matrix.experts else self._matrix(matrix, tokens)
        attention = self.attention(block, tokens)
        traffic = self._elementwise_bytes(block, tokens) / self.bandwidth
        return gemm + attention + PassTime(traffic, 2 * traffic)

    def waiting(self, block: LayerParameters, taken: PassTime) -> PassTime:
        """Seconds in which the device, which computes and sends for the seconds `taken`, waits because the host has not
        issued the next operator. The host issues the backward pass in twice the time of the forward pass."""
        job, constants = self.job, self.constants
        operators = constants.block_operators * self._more_operators(block)
        if job.frozen:
            operators += ADAPTER_OPERATORS * sum(self._adapted(matrix) for matrix in block.matrices)
        if job.layout.tp > 1:  # both halves' sums over ranks, or, where ranks share the sequence, gathers and scatters
            operators += (4 if job.sequence_parallel else 2) * constants.collective_operators
        host = self.host * operators
        return PassTime(max(0.0, host - taken.forward), max(0.0, 2 * host - taken.backward))

    def _more_operators(self, block: LayerParameters) -> float:
        """Operators of a block relative to a dense one's."""
        if not block.num_experts:
            return 1.0
        return FUSED_ROUTING_OPERATORS if self.job.stack.fused_routing else EXPERT_OPERATORS

    def head(self) -> PassTime:
        """Output head and loss of one microbatch."""
        job = self.job
        vocab, tokens = job.model.vocab / job.layout.tp, job.tokens
        product = self._product(tokens, vocab, job.model.hidden, self.rate, quantized=False)
        traffic = tokens * vocab * self.constants.logit_bytes / self.bandwidth / 3
        return product + PassTime(traffic, 2 * traffic)

    def cheap_part(self, block: LayerParameters) -> float:
        """Seconds of a block's forward pass that selective recomputation repeats."""
        if self.job.stack.attention == "unfused":
            return self.attention(block, self.job.tokens).forward
        return self._elementwise_bytes(block, self.job.tokens) / self.bandwidth

    def update(self, parameters: float) -> float:
        """Seconds of clipping and one optimizer step over `parameters` of this rank."""
        return parameters * self.constants.optimizer_bytes / self.bandwidth

    def _matrix(self, matrix: Matrix, tokens: float) -> PassTime:
        out, into = matrix.out, matrix.into
        if matrix.split:  # which of the two is split changes nothing but the traffic, and that little
            out, into = (out / self.job.layout.tp, into) if out >= into else (out, into / self.job.layout.tp)
        product = self._product(tokens, out, into, self.linear_rate, quantized=self.quantized)
        return product + self._adapter(tokens, out, into) if self._adapted(matrix) else product

    def _adapted(self, matrix: Matrix) -> bool:
        """Whether a matrix has a low-rank adapter."""
        return self.job.frozen and has_adapter(matrix, self.job.stack.adapts)

    def _adapter(self, rows: float, out: float, into: float) -> PassTime:
        """A low-rank adapter has little arithmetic, but reads its matrix's input, and its result is written and added;
        its gradients cost the same traffic."""
        each = rows * self.width * self.fusion / self.bandwidth
        return PassTime(each * (into + 4 * out), each * (4 * into + 2 * out))

    def _experts(self, matrix: Matrix, tokens: float) -> PassTime:
        """Grouped products over this rank's experts, the busiest rank's load."""
        job, constants = self.job, self.constants
        share = job.layout.tp if job.layout.ep == 1 else 1  # tensor parallelism splits experts that ep does not
        routed = tokens * job.model.top_k * self.imbalance / (1 if job.layout.ep == 1 else job.layout.tp)
        rows = routed * job.layout.ep / matrix.experts
        rate = self.linear_rate * constants.expert_matmul
        one = self._product(rows, matrix.out / share, matrix.into, rate, quantized=self.quantized)
        moved = self._traffic(rows, matrix.out / share, matrix.into, quantized=self.quantized)
        more = constants.expert_memory / self.bandwidth * moved
        return (one + PassTime(more, more if job.frozen else 2 * more)).scaled(matrix.experts / job.layout.ep)

    def _product(self, rows: float, out: float, into: float, rate: float, *, quantized: bool) -> PassTime:
        """`rows` tokens times a matrix [out, into]; backward computes two such products and adds a gradient."""
        constants, width = self.constants, self.width
        exposed = constants.matmul_memory / self.bandwidth
        moved = self._traffic(rows, out, into, quantized=quantized)
        forward = backward = 2 * rows * out * into / rate + moved * exposed + self.start
        if quantized:  # weights once a step; the input, and the gradient of the output, for two products
            cast = constants.fp8_casts / self.bandwidth
            forward += cast * (rows * into + out * into / self.job.microbatches)
            backward += cast * rows * out / 2
        gradient = 2 * self.job.stack.gradient_bytes * out * into
        if not self.job.frozen:
            return PassTime(forward, 2 * backward + gradient * exposed)
        # A frozen matrix has no weight gradient; a quantized one is unpacked before either product.
        packed = self.job.frozen_bytes
        unpacked = out * into * (packed + 2 * width) / self.bandwidth if packed else 0.0
        return PassTime(forward + unpacked, backward + unpacked)

    @property
    def _routing(self) -> float:
        """Bytes per routed token and hidden unit of the forward pass. Where the exchange orders tokens by expert, only
        the weighted sum of their results is left, one of three passes over them."""
        return self.constants.route_bytes / (3 if self.job.stack.fused_routing else 1)

    def _traffic(self, rows: float, out: float, into: float, *, quantized: bool) -> float:
        """Bytes that a product of `rows` tokens and a matrix [out, into] reads and writes."""
        narrow = (FP32.bytes if self.job.stack.emulated else 1) if quantized else self.width
        return narrow * (rows * into + out * into) + self.width * rows * out

    def attention(self, block: LayerParameters, tokens: float) -> PassTime:
        """Scores and weighted values of one block."""
        job, model, constants = self.job, self.job.model, self.constants
        unfused = job.stack.attention == "unfused"
        context = min(job.sequence, job.document or job.sequence)
        flops = tokens * model.attention_flops(block, context, causal=not unfused) / job.layout.tp
        forward, backward = flops / self.attention_rate, constants.attention_backward * flops / self.attention_rate
        if unfused:
            span = min(job.sequence, block.window or job.sequence)
            scores = tokens * span * model.num_heads / job.layout.tp
            traffic = scores * constants.score_bytes / self.bandwidth
            forward, backward = forward + traffic, 2 * flops / self.attention_rate + 1.5 * traffic
        return PassTime(forward, backward)

    def _elementwise_bytes(self, block: LayerParameters, tokens: float) -> float:
        """Traffic of norms, residuals, rotation and activation function in a block's forward pass."""
        job, model = self.job, self.job.model
        stream = 10 * model.hidden + (5 * model.hidden if job.stack.dropout else 0)
        if job.sequence_parallel:
            stream /= job.layout.tp
        inner = 2.0 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / job.layout.tp
        routed = 0.0
        for matrix in block.matrices:
            if matrix.into != model.hidden and matrix.out == model.hidden and not matrix.name.startswith("attention"):
                steps = 5 if model.gated else 2
                per_token = model.top_k if matrix.experts else 1
                inner += steps * matrix.into * per_token / job.layout.tp
                routed += self._routing / self.width * per_token * model.hidden if matrix.experts else 0
        return tokens * self.width * (stream + inner + routed / job.layout.tp) * self.fusion


def _rate(cluster: ClusterSpec, dtype: str, constants: Constants) -> float:
    """FLOP/s that large matrix products reach in training."""
    measured = cluster.measured.matmul_tflops.get(dtype)
    if measured:
        return measured * 1e12
    twin = BF16.name if dtype == FP16.name else dtype
    peak = cluster.tflops.get(dtype, cluster.tflops.get(twin))
    if peak is None:
        raise UserError(
            f"cluster {cluster.name}: tflops has no {dtype}, in which this run multiplies matrices; add the device's "
            f"rate, tflops: {{{BF16}: ..., {dtype}: ...}}"
        )
    best = cluster.achievable_tflops.get(dtype, cluster.achievable_tflops.get(twin))
    if best is None:
        known = cluster.achievable_tflops.get("fp8") if dtype == "fp4" else None
        best = peak * (known / cluster.tflops["fp8"] if known and "fp8" in cluster.tflops else UNMEASURED)
    return 1e12 * best * constants.matmul

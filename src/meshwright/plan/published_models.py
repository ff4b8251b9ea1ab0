"""The one place that completes the sizes of a published model, and that keeps account of every gap so filled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.plan.blueprint import Blueprint, condense
from meshwright.spec.model import Parameter

VOCABULARIES = {
    "llama-2": 32000,
    "llama2": 32000,
    "llama-3": 128256,
    "llama3": 128256,
    "qwen": 151936,
    "gpt-oss": 201088,
    "deepseek": 129280,
    "nemotron": 256000,
    "mixtral": 32000,
    "grok": 131072,
    "kimi": 163840,
    "bloom": 250880,
}
"""Vocabularies by family; 51200, Megatron's padded GPT-2 vocabulary, where no name helps."""

KNOWN: dict[str, dict[str, float]] = {
    "llama2-34b": {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016, "vocab": 32000},
    "nemotron_3_nano": {
        "layers": 52,
        "hidden": 2688,
        "heads": 32,
        "kv_heads": 2,
        "ffn": 1856,
        "experts": 128,
        "top_k": 6,
        "moe_layers": 23,
    },
    "qwen3-next-80b": {
        "layers": 48,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 2,
        "ffn": 512,
        "experts": 512,
        "top_k": 10,
    },
    "deepseek-v3": {"ffn": 2048, "dense_ffn": 18432, "dense_layers": 3, "shared": 1, "kv_heads": 4},
    "mixtral-8x7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8, "top_k": 2},
    "mixtral-8x22b": {"layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "experts": 8, "top_k": 2},
    "llama-like-7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
    "llama-like-70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000},
}
"""Published architectures whose sizes tables of runs leave out."""

Row = Mapping[str, str]


@dataclass
class Completion:
    """One row being read; every rule that had to speak is written down."""

    row: Row
    completed: list[str] = field(default_factory=list)

    def number(self, column: str) -> float | None:
        """The column's number, or None."""
        text = (self.row.get(column) or "").strip()
        try:
            return float(text) or None if text else None  # a zero is how some tables write nothing
        except ValueError:
            return None

    def given(self, column: str, default: float) -> float:
        """The column's number, or what the rule says."""
        value = self.number(column)
        if value is None:
            self.completed.append(column)
            return default
        return value

    def degree(self, column: str) -> int:
        """A degree, 1 where the table is silent (not counted: silence is how tables say 1)."""
        return max(1, int(self.number(column) or 1))


def published_model(read: Completion) -> Blueprint:
    """Sizes from the columns, else from the architecture's name, else from the parameter count alone."""
    name = read.row.get("model_name", "").lower().replace(" ", "-")
    known = next((sizes for key, sizes in KNOWN.items() if key in name), {})
    params = read.number("params_b")
    size = {}
    for column, key in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("ffn_hidden", "ffn")):
        size[key] = read.number(column)
        if size[key] is None and key in known:
            size[key] = known[key]
            read.completed.append(column)
    if name.startswith("deepseek-v3"):
        size["ffn"] = known["ffn"]
    vocab = read.number("vocab")
    if vocab is None:
        vocab = known.get("vocab") or next((rows for key, rows in VOCABULARIES.items() if key in name), 51200)
        read.completed.append("vocab")
    if size["hidden"] is None:
        if params is None:
            raise ValueError("neither sizes nor a parameter count")
        read.completed += ["layers", "hidden"]
        # GPT sizes keep hidden near 128 layers, so parameters are near 12 x 128**2 layers**3.
        size["layers"] = max(1, round((params * 1e9 / 196608) ** (1 / 3)))
        size["hidden"] = 128 * size["layers"]
        matrices = params * 1e9 - vocab * size["hidden"]
        size["ffn"] = max(1.0, (matrices / size["layers"] - 4 * size["hidden"] ** 2) / 2 / size["hidden"])
    hidden = int(size["hidden"])
    if size["layers"] is None:
        if params is None:
            raise ValueError("no number of layers and no parameter count")
        read.completed.append("layers")
        size["layers"] = round((params * 1e9 - vocab * hidden) / (12 * hidden**2))
    heads = int(size["heads"] or read.given("heads", max(1, hidden // 128)))
    kv_heads = int(read.number("kv_heads") or known.get("kv_heads") or heads)
    experts = int(read.number("n_experts") or known.get("experts") or 0)
    top_k = int(read.number("top_k") or known.get("top_k") or 1) if experts else 0
    ffn = int(size["ffn"] or read.given("ffn_hidden", 4 * hidden))
    sizes = _Sizes(int(size["layers"]), hidden, heads, kv_heads, ffn, int(vocab), experts, top_k, known)
    return (
        min(sizes.candidates(), key=lambda plan: abs(plan.num_parameters - (params or 0) * 1e9))
        if params
        else (sizes.build(gated=bool(experts) or ffn != 4 * hidden, tied=not experts and ffn == 4 * hidden))
    )


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    known: Mapping[str, float]

    def candidates(self) -> list[Blueprint]:
        """Gated or not, tied or not: the one whose parameters come closest to the published count is meant."""
        return [self.build(gated=gated, tied=tied) for gated in (False, True) for tied in (True, False)]

    def build(self, *, gated: bool, tied: bool) -> Blueprint:
        rows = [row for layer in range(self.layers) for row in self._block(layer, gated)]
        head_dim = 128 if self.kv_heads < self.heads and self.hidden % self.heads else self.hidden // self.heads
        if self.experts:
            head_dim = max(64, head_dim)
        return condense(
            rows,
            name="published",
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=head_dim,
            vocab=self.vocab,
            gated=gated,
            tied=tied,
            top_k=self.top_k,
        )

    def _block(self, layer: int, gated: bool) -> Iterable[Parameter]:
        head_dim = max(1, self.hidden // self.heads)
        moe_layers = int(self.known.get("moe_layers", self.layers))
        sparse = (
            self.experts
            and layer >= self.known.get("dense_layers", 0)
            and layer < moe_layers + self.known.get("dense_layers", 0)
        )
        ffn = self.ffn if sparse or not self.experts else int(self.known.get("dense_ffn", self.ffn))

        def row(name: str, dims: str, *shape: int) -> Parameter:
            return Parameter(name=f"layers.{layer}.{name}", dims=tuple(dims.split()), shape=shape, init="normal")

        yield row("norms.weight", "embed", 4 * self.hidden)
        yield row("attention.wq.weight", "heads embed", self.heads * head_dim, self.hidden)
        yield row("attention.wk.weight", "kv_heads embed", self.kv_heads * head_dim, self.hidden)
        yield row("attention.wv.weight", "kv_heads embed", self.kv_heads * head_dim, self.hidden)
        yield row("attention.wo.weight", "embed heads", self.hidden, self.heads * head_dim)
        names = ("w1", "w3", "w2") if gated else ("w1", "w2")
        for name in names:
            dims, shape = ("embed ffn", (self.hidden, ffn)) if name == "w2" else ("ffn embed", (ffn, self.hidden))
            if sparse:
                yield row(f"experts.{name}.weight", f"experts {dims}", self.experts, *shape)
            else:
                yield row(f"feed_forward.{name}.weight", dims, *shape)
            if sparse and self.known.get("shared"):
                yield row(f"shared.{name}.weight", dims, *shape)

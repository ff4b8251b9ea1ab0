"""Published models with missing sizes filled in, every gap recorded."""

import csv
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from math import isfinite
from typing import TypeVar

from meshwright.predict.blueprint import Blueprint, condense
from meshwright.spec.errors import UserError
from meshwright.spec.model import Parameter
from meshwright.validate.words import number_of, parameters_of

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
    "mistral": 32000,
    "gemma": 256000,
    "falcon": 65024,
    "opt": 50272,
    "llama": 32000,
    "grok": 131072,
    "kimi": 163840,
    "bloom": 250880,
}
"""Vocabularies by family; if no name helps, 51200, Megatron's padded GPT-2 vocabulary."""

GATED = re.compile("llama|qwen|mistral|mixtral|gemma|deepseek|yi-|kimi|grok|dbrx|gpt-oss|internlm")
"""Families whose feed-forward layers are gated."""

GPT_SHAPE = 196608
"""12 x 128**2: in GPT sizes hidden is about 128 times the layers, so parameters are about this times layers**3."""

ALIKE = 0.25
"""Relative tolerance between a parameter count and the architecture suggested by a name."""

MOST = {
    "layers": 2000,
    "hidden": 2**17,
    "heads": 2**12,
    "kv_heads": 2**12,
    "ffn_hidden": 2**20,
    "vocab": 2**21,
    "n_experts": 2**13,
    "top_k": 2**10,
    "seq_len": 2**24,
    "gpus": 2**20,
    "gpus_per_node": 2**12,
    "year": 2100,
    "micro_batch": 2**20,
    "global_batch": 2**26,
}
"""Maximum values: a larger number is a misprint, and is ignored."""

MOST_DEGREE = 2**16

T = TypeVar("T")
Row = Mapping[str, str]
Sizes = dict[str, float]


@dataclass
class Completion:
    """One row being read; every rule that was applied is recorded."""

    row: Row
    completed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """The column's words; empty if the table has no such column."""
        return (self.row.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """The column's number, or None."""
        return number_of(self.text(column))

    def count(self, column: str) -> int | None:
        """The column's number if it is a plausible count: from 1 to the usual maximum."""
        value = self.number(column)
        return int(value) if value is not None and 1 <= value <= MOST.get(column, MOST_DEGREE) else None

    def given(self, column: str, default: int) -> int:
        """The column's count, or the rule's default."""
        value = self.count(column)
        return self.rule(column, default) if value is None else value

    def rule(self, column: str, value: T) -> T:
        """The rule's default for an empty column, counted."""
        self.completed.append(column)
        return value

    def degree(self, column: str) -> int:
        """A degree, 1 if the table gives none (not counted as a rule: no degree means 1)."""
        return self.count(column) or 1


@functools.cache
def architectures() -> Mapping[str, Sizes]:
    """Name without its punctuation -> sizes of published architectures, longest names first."""
    text = resources.files("meshwright.predict").joinpath("data/architectures.csv").read_text(encoding="utf-8")
    sizes_of = {}
    for row in csv.DictReader(text.splitlines()):
        sizes = {key: float(value) for key, value in row.items() if value.isdigit()}
        sizes |= {key: float(row[key] == "y") for key in ("gated", "tied")}
        sizes_of[_bare(row["name"])] = sizes
    return dict(sorted(sizes_of.items(), key=lambda item: -len(item[0])))


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def known_sizes(name: str, params: float | None) -> Sizes:
    """Sizes of the architecture that a name contains; empty if its parameters are not about `params` billions."""
    bare = _bare(name)
    for key, sizes in architectures().items():
        if key in bare:
            size = _whole(sizes).build(gated=bool(sizes["gated"]), tied=bool(sizes["tied"])).num_parameters / 1e9
            return sizes if params is None or abs(size / params - 1) <= ALIKE else {}
    return {}


def published_model(read: Completion) -> Blueprint:
    """Sizes from the columns, else from the architecture's name, else from the parameter count alone.

    Raises `UserError` if the row has none of them.
    """
    name = read.text("model_name").lower()
    params = read.number("params_b") or parameters_of(name)
    if params and params > 1e5:  # written out in full
        params /= 1e9
    params = params if params and 1e-4 <= params <= 1e5 else None
    known = known_sizes(name, params)
    size = _given_sizes(read, known, params, name)
    sparse = bool(size.get("experts"))
    whole = _whole(size)
    if "gated" in known:
        built = whole.build(gated=bool(known["gated"]), tied=bool(known["tied"]))
        if not params or abs(built.num_parameters / params / 1e9 - 1) <= ALIKE / 2:
            return built
    if params:
        built = [whole.build(gated=gated, tied=tied) for gated in (False, True) for tied in (True, False)]
        return min(built, key=lambda plan: abs(plan.num_parameters - params * 1e9))
    plain = not sparse and size["ffn"] == 4 * size["hidden"] and not GATED.search(name)
    return whole.build(gated=not plain, tied=plain)


def _given_sizes(read: Completion, known: Sizes, params: float | None, name: str) -> Sizes:
    """Every size, each from its column, the architecture or a rule; rules are counted."""
    size: Sizes = {key: value for key, value in known.items() if key not in ("layers", "hidden", "heads")}
    columns = {"layers": "layers", "hidden": "hidden", "heads": "heads", "ffn_hidden": "ffn", "vocab": "vocab"}
    for column, key in columns.items():
        value = read.count(column)
        if value is not None:
            size[key] = value
        elif key in known:
            size[key] = known[key]
            read.completed.append(column)
    if "dense_layers" in known and known["ffn"] < size["ffn"] <= known["dense_ffn"]:
        size["ffn"] = known["ffn"]  # tables give the dense layers' width instead of the experts'
    experts = read.count("n_experts") or known.get("experts") or 0
    if experts > 1:
        size["experts"] = experts
        size["top_k"] = min(experts, read.count("top_k") or known.get("top_k") or 1)
    if "vocab" not in size:
        size["vocab"] = next((rows for key, rows in VOCABULARIES.items() if key in name.replace(" ", "-")), 51200)
        read.completed.append("vocab")
    _by_parameters(read, size, params)
    hidden = size["hidden"]
    if "heads" not in size:
        size["heads"] = _likely_heads(int(hidden), read.count("tp") or 1)
        read.completed.append("heads")
    size["heads"] = min(size["heads"], hidden)
    size["kv_heads"] = min(read.count("kv_heads") or known.get("kv_heads") or size["heads"], size["heads"])
    if "ffn" not in size:
        size["ffn"] = 4 * hidden
        read.completed.append("ffn_hidden")
    return size


def _likely_heads(hidden: int, tp: int) -> int:
    """About one head per 128 of hidden: the nearest number that divides it and that tensor-parallel ranks can share."""
    wanted = max(1, hidden // 128)
    possible = [heads for heads in range(1, min(hidden, 8 * wanted) + 1) if hidden % heads == 0 and heads % tp == 0]
    return min(possible, key=lambda heads: abs(heads - wanted), default=wanted)


def _by_parameters(read: Completion, size: Sizes, params: float | None) -> None:
    """Layers and hidden, computed from the parameter count if the row lacks them."""
    if "hidden" in size and "layers" in size:
        return
    if params is None and "hidden" in size:
        size["layers"] = read.rule("layers", max(1, round(size["hidden"] / 128)))
        return
    if params is None and "layers" in size:
        size["hidden"] = read.rule("hidden", 128 * size["layers"])
        return
    if params is None:
        raise UserError("no size, no parameter count, and no architecture's name")
    total = params * 1e9
    if "hidden" not in size:
        read.completed.append("hidden")
        if "layers" not in size:
            read.completed.append("layers")
            size["layers"] = max(1, round((total / GPT_SHAPE) ** (1 / 3)))
            size["hidden"] = 128 * size["layers"]
        else:
            size["hidden"] = max(64, 64 * round((total / 12 / size["layers"]) ** 0.5 / 64))
        matrices = total - size["vocab"] * size["hidden"]
        left = (matrices / size["layers"] - 4 * size["hidden"] ** 2) / 2 / size["hidden"]
        size.setdefault("ffn", max(1.0, left / max(1, size.get("experts", 1))))
        return
    read.completed.append("layers")
    hidden, ffn = size["hidden"], size.get("ffn", 4 * size["hidden"])
    block = 4 * hidden**2 + 2 * hidden * ffn * max(1, size.get("experts", 1))
    size["layers"] = min(MOST["layers"], max(1, round((total - size["vocab"] * hidden) / block)))


def _whole(size: Sizes) -> "_Sizes":
    """The sizes as whole numbers."""
    numbers = {key: int(value) for key, value in size.items() if isfinite(value)}
    head_dim = max(64 if numbers.get("experts") else 1, numbers["hidden"] // numbers["heads"])
    numbers = {"head_dim": head_dim, "dense_ffn": numbers["ffn"], "moe_layers": numbers["layers"]} | numbers
    numbers["ffn"] = max(1, numbers["ffn"])
    return _Sizes(**{field.name: numbers[field.name] for field in fields(_Sizes) if field.name in numbers})


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    top_k: int = 1
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int
    moe_layers: int

    def build(self, *, gated: bool, tied: bool) -> Blueprint:
        """The blueprint; layers of a kind share one block."""
        kinds = [self._sparse(layer) for layer in range(self.layers)]
        first = {kind: kinds.index(kind) for kind in set(kinds)}
        rows = [row for layer in first.values() for row in self._block(layer, gated)]
        condensed = condense(
            rows,
            name="published",
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            gated=gated,
            tied=tied,
            top_k=self.top_k if self.experts else 0,
        )
        order = list(first)
        return replace(condensed, pattern=tuple(condensed.pattern[order.index(kind)] for kind in kinds))

    def _sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return bool(self.experts) and self.dense_layers <= layer < self.dense_layers + self.moe_layers

    def _block(self, layer: int, gated: bool) -> Iterable[Parameter]:
        sparse, inner = self._sparse(layer), self.heads * self.head_dim
        ffn = self.ffn if sparse or not self.experts else self.dense_ffn

        def row(name: str, dims: str, *shape: int) -> Parameter:
            return Parameter(name=f"layers.{layer}.{name}", dims=tuple(dims.split()), shape=shape, init="normal")

        yield row("norms.weight", "embed", 4 * self.hidden)
        yield row("attention.wq.weight", "heads embed", inner, self.hidden)
        yield row("attention.wk.weight", "kv_heads embed", self.kv_heads * self.head_dim, self.hidden)
        yield row("attention.wv.weight", "kv_heads embed", self.kv_heads * self.head_dim, self.hidden)
        yield row("attention.wo.weight", "embed heads", self.hidden, inner)
        names = ("w1", "w3", "w2") if gated else ("w1", "w2")
        for name in names:
            dims, shape = ("embed ffn", (self.hidden, ffn)) if name == "w2" else ("ffn embed", (ffn, self.hidden))
            if sparse:
                yield row(f"experts.{name}.weight", f"experts {dims}", self.experts, *shape)
                if self.shared:
                    wide = tuple(size * self.shared if size == ffn else size for size in shape)
                    yield row(f"shared.{name}.weight", dims, *wide)
            else:
                yield row(f"feed_forward.{name}.weight", dims, *shape)

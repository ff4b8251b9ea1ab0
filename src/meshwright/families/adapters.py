"""Fine-tuning of a parameter table: marks the rows that train, and adds adapters' rows.

An adapter's rows follow the rows of the module that it extends and inherit its dim names. The table therefore splits,
shards, initializes, saves and plans adapters without special code:

- LoRA: a linear layer of weight [out, in] gets `lora_a` [rank, in] and `lora_b` [out, rank], DoRA also `magnitude`
  [out]; an embedding [vocab, embed] gets `lora_a` [vocab, rank] and `lora_b` [embed, rank].
- IA3: a linear layer gets `factors` [out] or, if it ends a layer (wo, w2), [in].
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import sqrt

from meshwright.families.hf_tensors import hf_tensors
from meshwright.families.quantized import quantized_rows
from meshwright.families.registry import family_of
from meshwright.families.split import TP_SPLITS
from meshwright.families.table import parameter_table
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FinetuneSpec, FullSpec, Ia3Spec, LoraSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.problems import did_you_mean

EMBEDDING, HEAD = "tok_embeddings", "output"

IA3_TARGETS = ("wk", "wv", "wkv_b", "w2")
"""Default targets of IA3: keys, values, and the last matrix of feed-forward layers."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of one module."""

    module: str
    """The module's name, as in `layers.0.attention.wq`."""
    weight: Parameter
    """Its matrix."""
    rank: int = 0
    """LoRA's rank; 0 without LoRA."""
    alpha: float = 0.0
    scale: float = 1.0
    """The factor of LoRA's output."""
    dropout: float = 0.0
    dora: bool = False
    b_lr_ratio: float = 1.0

    @property
    def scales_input(self) -> bool:
        """Whether IA3 scales the module's inputs: for modules that end a layer, because their outputs join the residual
        stream."""
        return self.weight.dims[1] in TP_SPLITS

    def rows(self) -> Iterator[Parameter]:
        """The added parameters, in the order of `named_parameters()`."""
        (out, into), (rows, columns) = self.weight.dims, self.weight.shape
        by_rows = self.weight.segments if out in TP_SPLITS else ()
        by_columns = self.weight.segments if into in TP_SPLITS else ()

        def row(name: str, dims: tuple[str, ...], shape: tuple[int, ...], **more) -> Parameter:
            return Parameter(name=f"{self.module}.{name}", dims=dims, shape=shape, adapter=True, **more)

        if not self.rank:
            dim, size = (into, columns) if self.scales_input else (out, rows)
            yield row("factors", (dim,), (size,), init="ones")
        elif self.module == EMBEDDING:
            yield row("lora_a", (out, "rank"), (rows, self.rank), init="zeros")
            yield row("lora_b", (into, "rank"), (columns, self.rank), init="normal", init_std=1.0)
        else:
            # kaiming_uniform(a=sqrt(5)), as peft draws A: uniform up to 1 / sqrt(in)
            std = 1 / sqrt(3 * columns)
            yield row("lora_a", ("rank", into), (self.rank, columns), init="uniform", init_std=std, segments=by_columns)
            ratio = self.b_lr_ratio
            yield row("lora_b", (out, "rank"), (rows, self.rank), init="zeros", lr_ratio=ratio, segments=by_rows)
            if self.dora:
                yield row("magnitude", (out,), (rows,), init="row_norms", segments=by_rows)


def frozen_experts(model: ModelSpec, finetune: FinetuneSpec | None) -> float:
    """The share of a model's parameters that are in experts which fine-tuning leaves as they are; 0 if it changes them,
    or nothing is fine-tuned by adapters."""
    if finetune is None or isinstance(finetune, FullSpec):
        return 0.0
    table = finetuned_table(model, finetune)
    experts = [row for row in table if ".experts." in row.name]
    if any(row.trained for row in experts):
        return 0.0
    return sum(row.numel for row in experts) / sum(row.numel for row in table)


def finetuned_table(model: ModelSpec, finetune: FinetuneSpec | None) -> tuple[Parameter, ...]:
    """Every parameter of the fine-tuned model in the order of `named_parameters()`, adapters included.

    Without the adapters' rows it is `parameter_table`, with frozen rows marked and quantized matrices replaced by their
    codes and scales. Raises `UserError` if a pattern matches nothing, with the nearest name, or matches a module that
    cannot have an adapter.
    """
    table = parameter_table(model)
    if finetune is None:
        return table
    adapters = {adapter.module: adapter for adapter in find_adapters(model, finetune)}
    trains = _trained_modules(model, finetune)
    quantized = finetune if isinstance(finetune, LoraSpec) and finetune.base != "plain" else None
    rows: list[Parameter] = []
    for row, following in zip(table, (*table[1:], None), strict=True):
        module = module_of(row)
        if quantized and _is_inner(row) and not trains(module):
            rows += quantized_rows(row, quantized.base, double=quantized.double_quantization)
        else:
            rows.append(replace(row, trained=trains(module)))
        if module in adapters and (following is None or module_of(following) != module):
            rows += adapters[module].rows()
    return tuple(rows)


def find_adapters(model: ModelSpec, finetune: FinetuneSpec) -> tuple[Adapter, ...]:
    """The adapters of a fine-tuned model in the order of its modules.

    Raises like `finetuned_table`.
    """
    if isinstance(finetune, FullSpec):
        return ()
    weights = {module_of(row): row for row in parameter_table(model) if row.name.endswith(".weight")}
    if isinstance(finetune.targets, str):
        modules = [name for name, row in weights.items() if _is_inner(row)]
        if finetune.targets == "auto":
            modules = [name for name in modules if name.rpartition(".")[2] in IA3_TARGETS]
    else:
        modules = _targets(model, finetune.targets, weights)
        for module in set(modules) & {EMBEDDING, HEAD}:
            _check_end(module, model, finetune)
    if isinstance(finetune, Ia3Spec):
        return tuple(Adapter(module=module, weight=weights[module]) for module in modules)
    return _lora(model, finetune, {module: weights[module] for module in modules})


def adapter_misfit(table: Iterable[Parameter], layout: LayoutSpec) -> str | None:
    """Why a layout cannot split a table's adapters, in a sentence that ends with what would work; None if it can."""
    for row in table:
        if row.adapter and row.dims[0] == "vocab" and row.shape[0] % layout.tp and row.shape[1] % layout.shard:
            nearest = -(-row.shape[1] // layout.shard) * layout.shard
            return (
                f"finetune: a vocabulary of {row.shape[0]} cannot be split evenly over layout.tp={layout.tp} ranks, so "
                f"ZeRO shards the columns of {row.name}, and {row.shape[1]} of them cannot be split evenly over "
                f"{layout.shard} ranks; the nearest legal finetune.rank is {nearest}"
            )
    return None


def count_trained(model: ModelSpec, finetune: FinetuneSpec | None) -> tuple[int, int]:
    """(parameters that train, all parameters, adapters included); a quantized parameter counts once."""
    table = finetuned_table(model, finetune)
    base = sum(row.numel for row in parameter_table(model))
    return sum(row.numel for row in table if row.trained), base + sum(row.numel for row in table if row.adapter)


def module_of(row: Parameter) -> str:
    """Name of the module that a parameter belongs to."""
    return row.name.rpartition(".")[0]


def _lora(model: ModelSpec, finetune: LoraSpec, weights: dict[str, Parameter]) -> tuple[Adapter, ...]:
    ranks = _by_pattern(model, finetune.ranks, weights, "finetune.ranks")
    alphas = _by_pattern(model, finetune.alphas, weights, "finetune.alphas")

    def adapter(module: str, weight: Parameter) -> Adapter:
        rank, alpha = int(ranks.get(module, finetune.rank)), alphas.get(module, finetune.alpha)
        return Adapter(
            module=module,
            weight=weight,
            rank=rank,
            alpha=alpha,
            scale=alpha / (sqrt(rank) if finetune.rslora else rank),
            dropout=finetune.dropout,
            dora=finetune.dora,
            b_lr_ratio=finetune.b_lr_ratio,
        )

    return tuple(adapter(module, weight) for module, weight in weights.items())


def _is_inner(row: Parameter) -> bool:
    """Whether the row is the matrix of a linear layer of a block: neither embedding nor head, nor of a router or a
    shared expert's gate."""
    return len(row.dims) == 2 and row.dims[0] not in ("vocab", "positions", "experts", "one")


def _targets(model: ModelSpec, patterns: Iterable[str], weights: dict[str, Parameter]) -> list[str]:
    """The modules that match the patterns and can have an adapter; at least one for each pattern."""
    targets: set[str] = set()
    able = {name for name, weight in weights.items() if _is_inner(weight) or name in (EMBEDDING, HEAD)}
    _matching(model, patterns, "finetune.targets", able)  # reports all patterns that match nothing at once
    for pattern in patterns:
        matching = _matching(model, (pattern,), "finetune.targets")
        fitting = able.intersection(matching)
        if not fitting:
            raise UserError(
                f"finetune.targets: {pattern!r} matches no linear layer, only {matching[0]}, which cannot have an "
                "adapter; train it in full (finetune.train)"
            )
        targets |= fitting
    return [name for name in weights if name in targets]


def _check_end(module: str, model: ModelSpec, finetune: LoraSpec | Ia3Spec) -> None:
    """Raise `UserError` if embedding or head cannot have this adapter."""
    what = f"finetune.targets: {module}"
    if isinstance(finetune, Ia3Spec) or finetune.dora:
        raise UserError(f"{what}: embedding and head support only plain lora adapters; leave it out")
    if module == EMBEDDING and model.tied_embeddings:
        raise UserError(f"{what} is tied to the head, to which an embedding adapter would not apply; leave it out")
    if finetune.dropout:
        raise UserError(f"{what}: its adapter has no dropout; set finetune.dropout=0, or leave it out")


def _trained_modules(model: ModelSpec, finetune: FinetuneSpec) -> Callable[[str], bool]:
    """Whether the parameters of a module of the base model train."""
    if isinstance(finetune, FullSpec) and finetune.last_layers is not None:
        if model.foreign is not None:
            raise UserError(
                "finetune.last_layers: is not supported for models that transformers computes; name modules, as in "
                f'finetune.train=["{model.foreign.blocks}.{model.num_layers - 1}"]'
            )
        first = model.num_layers - finetune.last_layers
        if first < 0:
            raise UserError(
                f"finetune.last_layers={finetune.last_layers}: the model has {model.num_layers}; "
                "leave it out to train all"
            )
        return lambda module: (
            module in ("norm", HEAD) or (module.startswith("layers.") and int(module.split(".")[1]) >= first)
        )
    patterns = () if isinstance(finetune, Ia3Spec) else finetune.train
    if isinstance(finetune, FullSpec) and not patterns:
        return lambda module: True
    modules = set(_matching(model, patterns, "finetune.train"))
    if isinstance(finetune, LoraSpec):
        twice = modules & {adapter.module for adapter in find_adapters(model, finetune)}
        if twice:
            raise UserError(f"finetune.train: {min(twice)} has an adapter already (finetune.targets); choose one")
    return modules.__contains__


def _by_pattern(
    model: ModelSpec, values: dict[str, int] | dict[str, float], modules: Iterable[str], setting: str
) -> dict[str, float]:
    """Module -> the value of the first pattern that matches it."""
    value_of: dict[str, float] = {}
    for pattern, value in values.items():
        matching = set(_matching(model, (pattern,), setting)) & set(modules)
        if not matching:
            raise UserError(f"{setting}: {pattern!r} matches no module that has an adapter (finetune.targets)")
        for module in matching:
            value_of.setdefault(module, value)
    return value_of


def _matching(
    model: ModelSpec, patterns: Iterable[str], setting: str, able: Collection[str] | None = None
) -> list[str]:
    """The modules that a pattern matches, by our name or Hugging Face's, in order. If it matches nothing, the error
    suggests modules that are `able` (default all)."""
    theirs = {name: tensor.key.rpartition(".")[0] for name, tensor in hf_tensors(model).items()}
    names = {module_of(row): (module_of(row), theirs[row.name]) for row in parameter_table(model)}
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        matching = {module for module, known in names.items() if any(_matches(name, pattern) for name in known)}
        if not matching:
            offered = [module for module in names if able is None or module in able]
            known = {end for module in offered for name in names[module] for end in (name, name.rpartition(".")[2])}
            ends = dict.fromkeys(module.rpartition(".")[2] for module in offered)
            hint = did_you_mean(pattern, known) or f"; there are {', '.join(ends)}"
            problems.append(_tied(model, pattern, setting) or f"{pattern!r} matches no module of the model{hint}")
        matched |= matching
    if problems:
        raise UserError(f"{setting}: {'; '.join(problems)}")
    return [module for module in names if module in matched]


def _tied(model: ModelSpec, pattern: str, setting: str) -> str:
    """Why a pattern for the head matches nothing; empty if the head has a matrix, or the pattern means something else.

    A tied head has no parameter of its own.
    """
    theirs = "lm_head" if model.foreign else family_of(model).hf_modules[HEAD]
    if not model.tied_embeddings or not any(_matches(name, pattern) for name in (HEAD, theirs)):
        return ""
    remedy = f"name {EMBEDDING}, which then trains as both" if setting == "finetune.train" else "leave it out"
    return f"{pattern!r} is the head, which this model ties to the embedding; {remedy}"


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is the name or its end (`wq`, `attention.wq`), or matches the start or the end of the name with
    * and ?. The start of a name (`layers.0`) matches everything below it."""
    return any(
        fnmatchcase(candidate, wanted)
        for candidate in (name, *(name[i + 1 :] for i, letter in enumerate(name) if letter == "."))
        for wanted in (pattern, f"{pattern}.*")
    )

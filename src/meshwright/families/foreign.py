"""Foreign architectures, described by their Hugging Face directory: config.json, and the names and shapes in the files.
transformers computes them (`models/foreign.py`).
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from meshwright.families.fp8_files import FP8
from meshwright.families.tensor_headers import FLOATS, StoredTensor, read_scalar
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel, SplitParameter
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.problems import foreign_problems

FAMILY = "transformers"

SPELLINGS = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "sliding_window": ("sliding_window",),
    "experts_per_token": ("num_experts_per_tok", "moe_k"),
}
"""Field of `ModelSpec` -> keys of config.json that contain it, by architecture."""

HEADLESS = ("mamba", "falcon_mamba")
"""Architectures without heads, whose layers have one state for each channel."""

STACKS = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("down_proj", ("down_proj",)),
    ("down_proj", ("w2",)),
)
"""Parameter of transformers' module -> its parts for each expert, by their names in the files (`stacks` of
`ForeignModel`)."""

LIKE_MIXTRAL = (".mlp.", ".block_sparse_moe.")
RENAMED = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2", "phimoe"), LIKE_MIXTRAL),
    "ernie4_5_moe": (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
    "exaone_moe": (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
}
"""model_type -> a part of names in transformers' module, and its spelling in files."""

BUFFERS = (
    *("e_score_correction_bias", "expert_bias", "balancing_biases", "layer_scalar"),
    *("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
)
"""Last parts of the names of stored tensors that are untrained state of transformers' modules."""

ROUTERS = (".gate.weight", ".router.weight")
"""Suffixes of the names of matrices that choose experts, if they have one row per expert."""

ENDLESS = 2**20
"""Positions of a model if config.json sets no limit."""

NO_WEIGHTS = ("inv_freq", "masked_bias", "lm_head.weight")
"""Suffixes of the names of tensors that are not parameters: tables from old versions, and a tied head."""


def check_causal(config: Mapping[str, Any], *, where: str) -> None:
    """Raise `UserError` if a config.json is not a causal language model's."""
    named = config.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else "missing")
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")) or "vocab_size" not in config:
        raise UserError(
            f"{where}: model_type {config.get('model_type')!r} is not supported: architectures is {architecture}, "
            "but besides Meshwright's families only causal language models can be trained"
        )


def read_foreign(config: Mapping[str, Any], stored: Mapping[str, StoredTensor], *, where: str) -> ModelSpec:
    """The model of a Hugging Face directory of any architecture that `check_causal` takes, from its config.json and the
    tensors in its files.

    Raises:
        UserError: its blocks cannot be identified, or its files are malformed.
    """
    names = {field: _spelling(config, field) for field in SPELLINGS}
    sizes: dict[str, Any] = {field: config.get(name) for field, name in names.items()}
    if names["num_heads"] not in config and config.get("model_type") in HEADLESS:
        sizes["num_heads"] = 1
    for field in ("hidden", "num_layers", "num_heads", "vocab"):
        if type(sizes[field]) is not int or sizes[field] < 1:
            raise UserError(f"{where}: no {' or '.join(SPELLINGS[field])} that is a positive integer")
    tied = bool(config.get("tie_word_embeddings"))
    theirs, files = RENAMED.get(str(config.get("model_type")), ("", ""))
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.dtype in (*FLOATS, FP8) and not name.endswith(NO_WEIGHTS[: 3 if tied else 2])
    }
    renamed = ((theirs, files),) if files and any(files in name for name in stored) else ()
    modules = {name: name.replace(files, theirs) if renamed else name for name in stored}
    tensors = {modules[name]: tensor.shape for name, tensor in stored.items() if tensor.shape}
    blocks = _blocks(tensors, sizes["num_layers"], where)
    buffers = {name: tensors.pop(name) for name in list(tensors) if name.rpartition(".")[2] in BUFFERS}
    tensors, stacks = _stacked(tensors)
    turned = _transposed(tensors, config)
    tensors |= turned
    foreign = ForeignModel(
        config=json.dumps(config),
        blocks=blocks,
        tensors=tuple(sorted(tensors.items())),
        stacks=tuple(stacks.items()),
        transposed=tuple(sorted(turned)),
        buffers=tuple(sorted(buffers.items())),
        scalars=tuple((modules[name], read_scalar(one)) for name, one in sorted(stored.items()) if not one.shape),
        renamed=renamed,
    )
    heads = [name for name, shape in tensors.items() if shape == (sizes["vocab"], sizes["hidden"])]
    known = {
        "num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["hidden"] // sizes["num_heads"],
        "ffn": 4 * sizes["hidden"],
        "max_positions": ENDLESS,
    } | {field: size for field, size in sizes.items() if type(size) is int and size != 0}  # 0: none
    switches = {"norm": "layernorm", "norm_eps": 0.0, "activation": "gelu_tanh", "gated": False, "positions": "rope"}
    values = {"family": FAMILY, "foreign": foreign, "tied_embeddings": len(heads) < 2, **switches, **known}
    with foreign_problems(ModelSpec, values, where=where, names=names):
        return ModelSpec.model_validate(values)


def foreign_table(foreign: ForeignModel, vocab: int) -> tuple[Parameter, ...]:
    """Every parameter, in the order of names; the weights of linear layers have the dims (out, in), stacked experts
    (experts, out, in), or (experts, out, width) if expert-parallel ranks share them, routers (experts, in), embedding
    and head (vocab, embed); a dim that tensor-parallel ranks split is named heads, kv_heads or ffn. None can be
    initialized randomly."""
    split = {name: one for name, one in split_parameters(foreign).items() if not one.kept}
    stacks = {name for name, _ in foreign.stacks}
    shared = shared_experts(foreign)
    experts = {
        name.rpartition(".experts.")[0]: shape[0]
        for name, shape in foreign.tensors
        if name in stacks or (len(shape) == 3 and ".experts." in name)  # stacked here, or in the files
    }

    def dims(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        if name in shared:
            return ("experts", "out", "width")
        if name in stacks:
            return ("experts", "out", "in")
        if len(shape) == 2 and name.endswith(ROUTERS) and experts.get(name.rsplit(".", 2)[0]) == shape[0]:
            return ("experts", "in")
        if len(shape) != 2:
            return ("embed", *["other"] * (len(shape) - 1))
        if name.startswith(f"{foreign.blocks}."):
            return ("out", "in")
        return ("vocab" if shape[0] == vocab else "positions", "embed")

    def row(name: str, shape: tuple[int, ...]) -> Parameter:
        named, one = list(dims(name, shape)), split.get(name)
        if one is not None:
            named[one.dim] = one.kind
        segments = () if one is None else one.segments
        return Parameter(name=name, dims=tuple(named), shape=shape, init="zeros", segments=segments)

    return tuple(row(name, shape) for name, shape in foreign.tensors)


def split_parameters(foreign: ForeignModel) -> dict[str, SplitParameter]:
    """The parameters that tensor-parallel ranks split, or need only rows of, by name."""
    return {
        ".".join(filter(None, (foreign.blocks, str(layer), module.name, one.name))): one
        for module in (foreign.split.modules if foreign.split is not None else ())
        for layer in module.layers
        for one in module.parameters
    }


def shared_experts(foreign: ForeignModel) -> set[str]:
    """The parameters whose experts expert-parallel ranks share."""
    return {
        f"{foreign.blocks}.{layer}.{module.name}.{name}"
        for module in (foreign.experts.modules if foreign.experts is not None else ())
        for layer in module.layers
        for name in module.parameters
    }


def foreign_state(foreign: ForeignModel) -> tuple[Parameter, ...]:
    """Every stored tensor that is not a parameter, in the form of `foreign_table`."""
    return tuple(
        Parameter(name=name, dims=("other",) * len(shape), shape=shape, init="zeros") for name, shape in foreign.buffers
    )


def _stacked(
    tensors: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """The parameters of transformers' module, which stacks all experts of a layer in two tensors, and the stored
    tensors of each stack.

    Experts with other names are not stacked: transformers also renames other parameters there, so the module would not
    match the files either.
    """
    parts: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            parts.setdefault((match[1], match[3]), {})[int(match[2])] = shape
    rest, stacks = dict(tensors), {}
    for experts in {experts for experts, _ in parts}:
        for stack, names in STACKS:
            shapes = [parts.get((experts, name), {}) for name in names]
            numbers = range(len(shapes[0]))
            if not numbers or any(of != dict.fromkeys(numbers, shapes[0].get(0)) for of in shapes):
                continue
            for number in numbers:
                for name in names:
                    del rest[f"{experts}.{number}.{name}.weight"]
            rows, columns = shapes[0][0]
            rest[f"{experts}.{stack}"] = (len(numbers), len(names) * rows, columns)
            stacks[f"{experts}.{stack}"] = names
    return rest, dict(sorted(stacks.items()))


def _transposed(tensors: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The stacks of experts that the files store (in, out) but transformers' module (out, in), and their shapes there.

    Of Qwen3-VL-MoE, released files have the first form, files that transformers writes may have either.
    """
    if config.get("model_type") != "qwen3_moe":
        return {}
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    transposed = {}
    for name, shape in tensors.items():
        wanted = shapes.get(name.rpartition(".experts.")[2])
        if wanted is not None and shape[1:] == wanted[::-1] != wanted:
            transposed[name] = (shape[0], *wanted)
    return transposed


def _blocks(tensors: Mapping[str, Any], num_layers: int, where: str) -> str:
    """The prefix of names before a block's number."""
    numbers: dict[str, set[int]] = {}
    tensors_of: Counter[str] = Counter()
    for name in tensors:
        if match := re.match(r"(.+?)\.(\d+)\.", name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
            tensors_of[match[1]] += 1
    blocks = max(numbers, key=lambda name: tensors_of[name], default="")
    numbered = numbers.get(blocks, set())
    if len(numbered) != num_layers or numbered != set(range(len(numbered))):  # `num_layers` may be any number
        raise UserError(f"{where}: has {num_layers} layers, but the tensors in the files do not")
    return blocks


def _spelling(config: Mapping[str, Any], field: str) -> str:
    """The key of config.json that holds a size, or could."""
    return next((key for key in SPELLINGS[field] if config.get(key) is not None), SPELLINGS[field][0])

"""nanoGPT's configuration files: Python assignments, read and never run."""

import ast
from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import HasNot, NoEffect
from meshwright.imports.constants import constant
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import (
    fact,
    if_any,
    if_so,
    in_turn,
    no_effects,
    no_tracker,
    only,
    positive,
    sets,
    tracker,
    unsupported,
    when,
    words,
)
from meshwright.spec.errors import UserError

SIZES = ("n_layer", "n_head", "n_embd", "bias", "vocab_size")
"""Keys of the model's sizes, which pretrained weights have already."""
DECAY = ("warmup_iters", "lr_decay_iters", "min_lr")
"""Keys of the schedule, which counts only with decay_lr."""
PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
DEFAULTS: Mapping[str, Any] = {
    "out_dir": "out",
    "eval_interval": 2000,
    "eval_iters": 200,
    "always_save_checkpoint": True,
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 40,
    "batch_size": 12,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "bias": False,
    "learning_rate": 6e-4,
    "max_iters": 600000,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600000,
    "min_lr": 6e-5,
    "compile": True,
}
"""The constants of train.py that a recipe says, too; its dtype is bf16 wherever the GPU has it."""
COUNTED = ("training.micro_batch", "training.steps", "training.optimizer.lr")
"""Settings that others are worked out from, so that they cannot wait as defaults."""
SEED = 1337
BATCHES = "nanoGPT's batches of evaluation are of batch_size sequences, a recipe's global"
VOCABULARY = {"shakespeare_char": 65}
"""Data sets whose preparation counts another vocabulary than GPT-2's."""
GPT2_VOCABULARY = 50304
"""GPT-2's 50257 tokens, rounded up."""


def _data(reading: Reading, value: Any, origin: str) -> None:
    path = f"data/{value}/train.bin"
    reading.set("data.sources", [{"path": path, "tokens": "uint16"}], origin)
    reading.notes.append(
        f"{origin}: {path} holds tokens; set data.tokenizer to the tokenizer that made them. data/{value}/val.bin is "
        "not read: evaluation is on data.held_out of the tokens"
    )


def _start(reading: Reading, value: Any, origin: str) -> None:
    """Random weights, OpenAI's, or those of a checkpoint."""
    if value in PRETRAINED:
        name = f"openai-community/{value}"
        reading.set("model.name", name, origin)
        if reading.settings["model.name"][0] == name:
            reading.set("model.weights", "pretrained", origin)
    elif value == "resume":
        reading.drop(
            origin, "its sizes and weights are in the checkpoint; pass out_dir/ckpt.pt too, with --weights DIR"
        )
    elif value == "scratch":
        reading.claim(origin, HasNot("model.weights", "pretrained"))
    else:
        raise UserError(f"{origin}: must be scratch, resume, {', '.join(PRETRAINED)}")


def _context(reading: Reading, value: Any, origin: str) -> None:
    reading.set("data.sequence_length", value, origin)
    if reading.known(SCRATCH):
        reading.set("model.max_positions", value, origin)


RULES: Mapping[str, Rule] = {
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden",
    "block_size": _context,
    "vocab_size": "model.vocab",
    "dropout": unsupported("models have no dropout"),
    "bias": only(True, "GPT-2 always has biases"),
    "batch_size": "training.micro_batch",
    "gradient_accumulation_steps": fact("accumulation of all ranks"),
    "learning_rate": "training.optimizer.lr",
    "weight_decay": "training.optimizer.weight_decay",
    "beta1": fact("beta1"),
    "beta2": fact("beta2"),
    "grad_clip": positive("training.clip"),
    "max_iters": "training.steps",
    "decay_lr": if_so(  # without it there is no warm-up either
        sets({"training.lr_schedule.name": "cosine"}),
        sets({"training.lr_schedule.name": "constant", "training.lr_schedule.warmup": 0}),
    ),
    "warmup_iters": "training.lr_schedule.warmup",
    "lr_decay_iters": fact("decay steps"),
    "min_lr": fact("min_lr"),
    "dtype": words("training.precision", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}),
    "compile": when("training.compile", True),
    "out_dir": "run_dir",
    "eval_interval": in_turn("training.evaluation.every", "checkpoint.every"),
    "eval_iters": in_turn("training.evaluation.batches", sets({}, BATCHES)),
    "always_save_checkpoint": if_so(  # over the last one; or only if it is the best so far
        sets({"checkpoint.keep_last": 1}), sets({"checkpoint.keep_last": 1, "checkpoint.keep_best": 1})
    ),
    "init_from": _start,
    "dataset": _data,
    "device": words("device", {"cpu": "cpu", "cuda": "cuda"}),
    "wandb_log": if_any(tracker("wandb"), True, no_tracker("wandb")),
    "eval_only": unsupported("nanoGPT only evaluates with it; this recipe trains: to evaluate, use `meshwright eval`"),
    **no_effects({NoEffect.LOGS: {"": "wandb_project wandb_run_name log_interval"}, NoEffect.LAUNCH: {"": "backend"}}),
}


def read_assignments(text: str, file: str) -> dict[str, Any]:
    """The constants that a Python file assigns; products and sums of constants are worked out.

    Raises `UserError` for anything else, which would have to be run.
    """
    values: dict[str, Any] = {}
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno or 1}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # such as a thousand nested brackets
        raise UserError(f"{file}: cannot be read as Python: {error or 'nested too deeply'}") from error
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Name):
            if isinstance(node, ast.Import | ast.ImportFrom):
                continue  # as time, for names of runs
            raise UserError(f"{file}:{node.lineno}: only lines 'name = constant' are supported, because no code is run")
        try:
            values[target.id] = constant(node.value, values)
        except (ArithmeticError, RecursionError, ValueError) as error:
            raise UserError(f"{file}:{node.lineno}: {target.id} cannot be evaluated: {error}") from error
    return values


SCRATCH = "nanoGPT's model from scratch"


def read_nanogpt(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a nanoGPT configuration; omitted constants have the defaults of its train.py.

    Raises `UserError` if it sets nothing that train.py knows.
    """
    values = {key: value for key, value in values.items() if value is not None}
    if not values.keys() & RULES.keys():
        raise UserError(
            f"{file}: sets nothing that nanoGPT's train.py knows; expected lines such as batch_size = 12 or n_layer = 6"
        )
    default = f"{file} (nanoGPT's default)"
    counts = _overruled(reading, values, file)
    if values.get("init_from", "scratch") not in PRETRAINED and "model.name" not in reading.settings:
        reading.set("model.family", "gpt2", f"{file} (nanoGPT's model)")
        reading.fact(SCRATCH, True, file)
        reading.notes.append(f"{file} (nanoGPT's model): its GELU is exact, GPT-2's is approximated by tanh")
    reading.take(counts, RULES, file)
    left = {key: value for key, value in DEFAULTS.items() if key not in values}
    if not values.get("decay_lr", True):
        left = {key: value for key, value in left.items() if key not in DECAY}
    if not reading.known(SCRATCH):
        left = {key: value for key, value in left.items() if key not in SIZES}
    _take_defaults(reading, left, default)
    reading.default("training.seed", SEED, f"{default}: seed={SEED}")
    if reading.known(SCRATCH):
        _vocabulary(reading, values.get("dataset", DEFAULTS["dataset"]), default)
    _check_accumulation(reading)


def _overruled(reading: Reading, values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The keys that count, decay_lr before those that depend on it; the others are reported."""
    reasons = {}
    if not values.get("decay_lr", True):
        reasons |= dict.fromkeys(DECAY, "it has no effect with decay_lr=False")
    if (start := values.get("init_from")) in PRETRAINED:
        reasons |= dict.fromkeys(SIZES, f"init_from={start} has its own")
    for key in [key for key in values if key in reasons]:
        reading.drop(f"{file}: {key}={values[key]}", reasons[key])
    first = {key: values[key] for key in ("init_from", "decay_lr") if key in values}
    return first | {key: value for key, value in values.items() if key not in reasons}


def _take_defaults(reading: Reading, left: Mapping[str, Any], default: str) -> None:
    """Read the omitted constants: what any file or flag says counts before them."""
    apart = Reading(facts={SCRATCH: (True, default)} if reading.known(SCRATCH) else {})
    apart.take(left, RULES, default)
    for path, (value, origin) in apart.settings.items():
        if path not in COUNTED:
            reading.default(path, value, origin)
        elif path not in reading.settings:
            reading.set(path, value, origin)
    for name, (value, origin) in apart.facts.items():
        if name not in reading.facts:
            reading.fact(name, value, origin)
    reading.notes += apart.notes
    reading.without += apart.without


def _vocabulary(reading: Reading, dataset: Any, default: str) -> None:
    """train.py reads it from the data set's meta.pkl, where there is one."""
    vocabulary = VOCABULARY.get(str(dataset), GPT2_VOCABULARY)
    origin = f"{default}: vocab_size={vocabulary}"
    if "model.vocab" not in reading.settings:
        reading.default("model.vocab", vocabulary, origin)
        reading.notes.append(f"{origin}, unless data/{dataset}/meta.pkl has another; set model.vocab to that")


def _check_accumulation(reading: Reading) -> None:
    """Raise `UserError` if the ranks do not divide the accumulation, as train.py does."""
    ranks, origin = reading.facts.get("ranks", (1, ""))
    whole, whole_origin = reading.facts.get("accumulation of all ranks", (ranks, ""))
    if whole % ranks:
        raise UserError(
            f"{whole_origin}: nanoGPT needs a multiple of the number of ranks, but {origin}; give another --ranks"
        )

"""nanoGPT's configuration files: Python assignments, read and never run."""

import ast
from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, fact, nothing, positive, when, words
from meshwright.spec.errors import UserError


def _data(reading: Reading, value: Any, origin: str) -> None:
    path = f"data/{value}/train.bin"
    reading.set("data.sources", [{"path": path, "tokens": "uint16"}], origin)
    reading.notes.append(f"{origin}: {path} holds tokens; set data.tokenizer to the tokenizer that made them")


def _start(reading: Reading, value: Any, origin: str) -> None:
    if value != "scratch":
        reading.give_up(origin, "model.name must be a Hugging Face directory")


def _floor(reading: Reading, value: Any, origin: str) -> None:
    reading.fact("min_lr", value, origin)


def _decay(reading: Reading, value: Any, origin: str) -> None:
    if not value:  # then there is no warm-up either
        reading.set("training.lr_schedule.name", "constant", origin)
        reading.set("training.lr_schedule.warmup", 0, origin)


def _trackers(reading: Reading, value: Any, origin: str) -> None:
    if value:
        reading.set("trackers", ["wandb"], origin)


RULES: Mapping[str, Rule] = {
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden",
    "block_size": "data.sequence_length",
    "vocab_size": "model.vocab",
    "dropout": nothing("models have no dropout"),
    "bias": lambda reading, value, origin: None if value else reading.give_up(origin, "GPT-2 always has biases"),
    "batch_size": "training.micro_batch",
    "gradient_accumulation_steps": fact("accumulation of all ranks"),
    "learning_rate": "training.optimizer.lr",
    "weight_decay": "training.optimizer.weight_decay",
    "beta1": fact("beta1"),
    "beta2": fact("beta2"),
    "grad_clip": positive("training.clip"),
    "max_iters": "training.steps",
    "decay_lr": _decay,
    "warmup_iters": "training.lr_schedule.warmup",
    "lr_decay_iters": fact("decay steps"),
    "min_lr": _floor,
    "dtype": words("training.precision", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}),
    "compile": when("training.compile", True),
    "out_dir": "run_dir",
    "eval_interval": "training.evaluation.every",
    "eval_iters": "training.evaluation.batches",
    "always_save_checkpoint": nothing("a checkpoint of the last step is always saved"),
    "init_from": _start,
    "dataset": _data,
    "device": words("device", {"cpu": "cpu", "cuda": "cuda"}),
    "wandb_log": _trackers,
    **dict.fromkeys(
        ("wandb_project", "wandb_run_name", "log_interval", "eval_only", "backend"),
        nothing("it does not affect training"),
    ),
}


LARGEST = 2**63
"""Of a number, without its sign."""


def read_assignments(text: str, file: str) -> dict[str, Any]:
    """The constants that a Python file assigns; products and sums of constants are worked out.

    Raises `UserError` for anything else, which would have to be run.
    """
    found: dict[str, Any] = {}
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
            found[target.id] = _constant(node.value, found)
        except (ArithmeticError, RecursionError, ValueError) as error:
            raise UserError(f"{file}:{node.lineno}: {target.id} cannot be evaluated: {error}") from error
    return found


def _constant(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises what arithmetic raises."""
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add | ast.Sub | ast.Div):
        left, right = _constant(node.left, known), _constant(node.right, known)
        if isinstance(left, int | float) and isinstance(right, int | float):
            result = _reckoned(node.op, left, right)
            if not abs(result) < LARGEST:  # a few lines of squares fill any memory
                raise ArithmeticError("the number is too large")
            return result
        return ast.unparse(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ast.unparse(node)  # such as 'run' + str(time.time()): shown, not run
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise ArithmeticError("the number is too large")
    return value


def _reckoned(operator: ast.operator, left: float, right: float) -> float:
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Add):
        return left + right
    return left - right if isinstance(operator, ast.Sub) else left / right


def read_nanogpt(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a nanoGPT configuration; omitted constants have the defaults of its train.py."""
    given = {"block_size": 1024, "learning_rate": 6e-4, "max_iters": 600000, "bias": False}
    given |= {"batch_size": 12, "gradient_accumulation_steps": 40}
    if values.get("decay_lr", True):
        given |= {"warmup_iters": 2000, "min_lr": 6e-5}
    if "model.name" not in reading.settings:
        reading.set("model.family", "gpt2", f"{file} (nanoGPT's model)")
        given |= {"n_layer": 12, "n_head": 12, "n_embd": 768}
    reading.take(values, RULES, file)
    left = {key: value for key, value in given.items() if key not in values}
    reading.take(left, RULES, f"{file} (nanoGPT's default)")

"""torchtitan's configuration in Python, as its `config_registry` modules have it: parsed, never run."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.imports.constants import constant
from meshwright.imports.reading import flat
from meshwright.spec.errors import UserError

CALLED = "()"
"""The key of a call's name, among its keywords."""
GROUPS = "optimizer.param_groups"
MODES = {"FullAC.Config": "full", "SelectiveAC.Config": "selective", "MemoryBudgetAC.Config": "memory_budget"}
SECTIONS = {"model_spec": "model", "dataloader": "dataset", "validator": "validation"}
"""Fields of the Trainer's Config that older releases call otherwise."""


def is_titan_python(text: str) -> bool:
    """Whether a Python file makes a configuration of torchtitan's Trainer."""
    return "torchtitan" in text and "Trainer.Config(" in text


def read_titan_python(text: str, file: str, package: str) -> dict[str, Any]:
    """The keys and values of the one configuration that the module makes, by dotted names as in TOML.

    `package` is the model's name that a relative import means; empty if it is none of torchtitan's.

    Raises `UserError` if there is none, or several, or one that is made from another.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{file}: cannot be read as Python: {error}") from error
    made = [
        (function, call)
        for function in body
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _name(call.func) == "Trainer.Config"
    ]
    if len(made) != 1:
        names = ", ".join(node.name for node, _ in made) or "none"
        raise UserError(f"{file}: must have one function that returns Trainer.Config(...), but has {names}")
    function, call = made[0]
    assigned = [node for node in (*body, *ast.walk(function)) if isinstance(node, ast.Assign)]
    known = {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    try:
        values = _value(call, known, 0)
        _change(values, assigned, next((name for name, value in known.items() if value is call), ""), known)
    except RecursionError as error:
        raise UserError(f"{file}: cannot be read: nested too deeply") from error
    except ArithmeticError as error:
        raise UserError(f"{file}: cannot be evaluated: {error}") from error
    return dict(_keys(values, _models(body, package), _datasets(body), _scaling(function)))


def _change(values: dict[str, Any], assigned: list[ast.Assign], name: str, known: Mapping[str, ast.expr]) -> None:
    """Put in what is assigned to the configuration's parts after it is made, as in `config.training.steps = 10`."""
    for node in assigned:
        first, *path = _name(node.targets[0]).split(".")
        if not name or first != name or not path:
            continue
        place: Any = values
        for part in path[:-1]:
            place = place.setdefault(part, {CALLED: ""}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[path[-1]] = _value(node.value, known, 0)


def _name(node: ast.expr) -> str:
    """A dotted name; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr, known: Mapping[str, ast.expr], depth: int) -> Any:
    """Plain data; a call is its keywords, with its name and its first operand; other expressions are their source."""
    if depth > 32:
        raise RecursionError
    if isinstance(node, ast.Name) and node.id in known:
        return _value(known[node.id], {key: value for key, value in known.items() if key != node.id}, depth + 1)
    if isinstance(node, ast.Call):
        if _name(node.func) == "float" and len(node.args) == 1:
            return 0.0  # float("inf"): nothing is clipped
        keywords = {word.arg: _value(word.value, known, depth + 1) for word in node.keywords if word.arg}
        first = {"0": _value(node.args[0], known, depth + 1)} if node.args else {}
        return {CALLED: _name(node.func), **first, **keywords}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, known, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key, known, depth + 1)): _value(value, known, depth + 1) for key, value in pairs if key}
    return constant(node, {})


def _keys(
    values: dict[str, Any], model: str | None, datasets: dict[str, Any], factor: float | None
) -> Iterator[tuple[str, Any]]:
    for section, value in values.items():
        if section == CALLED:
            continue
        if section == "loss":
            yield "loss", _innermost(value)
        elif section == "activation_checkpoint":
            mode = MODES.get(value[CALLED], value[CALLED]) if isinstance(value, Mapping) else "none"
            yield "activation_checkpoint.mode", mode
        elif section == "model_spec" and isinstance(value, Mapping):
            yield "model.name", model
            yield "model.flavor", value.get("0", value.get("flavor"))
            yield from _of_section("model", value, "0", "flavor")
        elif section == "optimizer" and isinstance(value, Mapping):
            yield from _optimizer(value)
        elif isinstance(value, Mapping):
            yield from flat(dict(_of_section(SECTIONS.get(section, section), value))).items()
        else:
            yield section, value
    if datasets:
        yield "dataset.table", datasets
    if factor is not None:
        yield "model.scaling_factor", factor
    if "activation_checkpoint" not in values:
        yield "activation_checkpoint.mode", "selective"


def _innermost(loss: Any) -> str:
    """The name of a loss without those that only compute it in pieces."""
    while isinstance(loss, Mapping) and isinstance(loss.get("loss_fn"), Mapping):
        loss = loss["loss_fn"]
    return loss[CALLED] if isinstance(loss, Mapping) else str(loss)


def _of_section(section: str, value: Mapping[str, Any], *others: str) -> Iterator[tuple[str, Any]]:
    """The keywords of a section's call, by dotted names, without those that are read otherwise."""
    return ((f"{section}.{key}", inner) for key, inner in value.items() if key not in (CALLED, *others))


def _optimizer(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The group of all names; groups before it are listed where they do more than keep norms from decaying."""
    if value[CALLED] == "default_adamw":
        yield "optimizer.lr", value.get("0", value.get("lr", 8e-4))
        yield "optimizer.name", "AdamW"
        yield from _constants({key: inner for key, inner in value.items() if key not in (CALLED, "0", "lr")})
        return
    groups = value.get("param_groups")
    yield from _of_section("optimizer", value, "param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, Mapping) for group in groups):
        yield GROUPS, groups
        return
    last = groups[-1]
    constants = last.get("optimizer_kwargs") or {}
    yield "optimizer.name", last.get("optimizer_name")
    yield from _constants(constants)
    for group in groups[:-1]:
        alike = {**last, "pattern": group.get("pattern"), "optimizer_kwargs": {**constants, "weight_decay": 0.0}}
        if group == alike and "norm" in str(group.get("pattern")):
            yield "optimizer.undecayed", group["pattern"]
        else:
            yield GROUPS, group


def _constants(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == "betas" and isinstance(value, list) and len(value) == 2:
            yield "optimizer.beta1", value[0]
            yield "optimizer.beta2", value[1]
        else:
            yield f"optimizer.{key}", value


def _models(body: list[ast.stmt], package: str) -> str | None:
    """The model whose `model_registry` the module imports; a relative import is of its own package."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and any(name.name == "model_registry" for name in node.names):
            return (node.module or package).rsplit(".", 1)[-1] or None
    return None


def _datasets(body: list[ast.stmt]) -> dict[str, Any]:
    """The data sets that the module adds to torchtitan's table, by name, as sources of a recipe."""
    datasets: dict[str, Any] = {}
    for node in body:
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call)):
            continue
        target = node.targets[0]
        if not (isinstance(target, ast.Subscript) and _name(target.value) == "DATASETS"):
            continue
        words = {word.arg: word.value for word in node.value.keywords}
        datasets[str(_value(target.slice, {}, 0))] = _source(words)
    return datasets


def _source(words: Mapping[str | None, ast.expr]) -> dict[str, Any]:
    path = _value(words["path"], {}, 0) if "path" in words else None
    calls = [node for word in words.values() for node in ast.walk(word)
             if isinstance(node, ast.Call) and _name(node.func) == "load_dataset"]  # fmt: skip
    given = {word.arg: _value(word.value, {}, 0) for call in calls for word in call.keywords}
    local = "data_files" in given
    source = {"path": path if local else f"hub:{path}"}
    source |= {"subset": given["name"]} if "name" in given else {}
    source |= {"split": given["split"]} if given.get("split", "train") != "train" else {}
    columns = [node.slice for word in words.values() for node in ast.walk(word) if isinstance(node, ast.Subscript)]
    if columns and (column := _value(columns[0], {}, 0)) != "text":
        source["text_key"] = column
    return source


def _scaling(function: ast.FunctionDef) -> float | None:
    """A factor of rope's scaling that the function sets in every layer."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _name(node.targets[0]).endswith(".rope.scaling_factor"):
            return _value(node.value, {}, 0)
    return None

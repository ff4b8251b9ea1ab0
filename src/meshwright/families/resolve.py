"""The one place that turns the recipe's `model:` section into a complete, valid model."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.families.hf_config import derived_sizes, model_from_hf_config
from meshwright.families.registry import FAMILIES, PRESETS
from meshwright.families.table import parameter_table
from meshwright.spec.model import ModelFields, ModelSpec

NOT_SIZES = {"name", "weights", "family"}


def resolve_model(fields: ModelFields, *, base_dir: Path, vocab: int | None = None) -> ModelSpec:
    """The complete model that `fields` asks for.

    What is given wins over what the name (a preset or a Hugging Face directory, relative to `base_dir`) says, and that
    over the family's defaults. `vocab`, the tokenizer's size, is used where none of them says.

    Raises:
        ValueError: one sentence saying what is wrong and what would work.
    """
    given = {key: value for key, value in fields.model_dump(exclude=NOT_SIZES).items() if value is not None}
    if fields.rope_scaling is not None:
        given["rope_scaling"] = fields.rope_scaling
    directory = pretrained_directory(fields, base_dir=base_dir)
    if directory is not None:
        published = read_hf_directory(directory)
        _same_family(fields, published.family)
        _available(given, published.family)
        spec = published.model_copy(update=given)
        if fields.weights == "pretrained" and parameter_table(spec) != parameter_table(
            published.model_copy(update={"init_std": spec.init_std})
        ):
            raise ValueError(
                f"model.weights is pretrained, so the sizes are those of {directory}; remove the changed ones: "
                + ", ".join(f"{key}={given[key]}" for key in given if given[key] != getattr(published, key))
            )
    else:
        if fields.weights == "pretrained":
            raise ValueError(
                "model.weights is pretrained, so model.name must be the path of a Hugging Face directory on this "
                f"machine (got {fields.name!r}); download one, or use weights: random"
            )
        spec = _from_family(fields, given, vocab)
    problems = list(_problems(spec, vocab))
    if problems:
        raise ValueError("model: " + "; ".join(problems))
    return spec


def pretrained_directory(fields: ModelFields, *, base_dir: Path) -> Path | None:
    """The Hugging Face directory that `model.name` is the path of, or None where it is a preset's name or not given.

    A preset's name wins over a directory of the same name; `./gpt2` is always the directory.
    """
    if fields.name is None or fields.name in PRESETS:
        return None
    directory = (base_dir / Path(fields.name).expanduser()).resolve()
    if directory.is_dir():
        return directory
    close = get_close_matches(fields.name.lower(), PRESETS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the names are {', '.join(PRESETS)}"
    raise ValueError(
        f"model.name {fields.name!r} is neither a published name nor a directory ({directory}); {hint}"
    )


def read_hf_directory(directory: Path) -> ModelSpec:
    """The model of a Hugging Face directory, from its config.json alone."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{directory} is not a Hugging Face model directory: it has no config.json"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    spec = model_from_hf_config(config, where=str(path))
    problems = list(_problems(spec, None))
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return spec


def _same_family(fields: ModelFields, family: str) -> None:
    if fields.family not in (None, family):
        raise ValueError(
            f"model.family is {fields.family!r} but model.name {fields.name!r} is {family}; remove one of the two"
        )


def _available(given: dict[str, Any], family: str) -> None:
    for key in given:
        if key in FAMILIES[family].unavailable:
            raise ValueError(f"model.{key} does not exist in the family {family}; remove it")


def _from_family(fields: ModelFields, given: dict[str, Any], vocab: int | None) -> ModelSpec:
    if fields.name is not None:
        preset = PRESETS[fields.name]
        assert preset.family is not None
        _same_family(fields, preset.family)
        name = preset.family
        _available(given, name)
        published = {key: getattr(preset, key) for key in ModelFields.model_fields if key not in NOT_SIZES}
        given = {key: value for key, value in published.items() if value is not None} | given
    elif fields.family is None:
        raise ValueError(
            f"model needs a name (like {next(iter(PRESETS))}) or a family ({', '.join(FAMILIES)})"
        )
    else:
        name = fields.family
        if name not in FAMILIES:
            close = get_close_matches(name.lower(), FAMILIES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(FAMILIES)}"
            raise ValueError(f"model.family {name!r} is unknown; {hint}")
        _available(given, name)
    family = FAMILIES[name]
    if vocab is not None:
        given = {"vocab": vocab, **given}
    missing = [key for key in ("hidden", "num_layers", "num_heads", "vocab") if key not in given]
    if missing:
        raise ValueError(f"model of family {name} needs {', '.join(f'model.{key}' for key in missing)}")
    if "head_dim" not in given and given["hidden"] % given["num_heads"]:
        raise ValueError(
            f"model.hidden={given['hidden']} is not a multiple of model.num_heads={given['num_heads']}; "
            "change one, or give model.head_dim"
        )
    return ModelSpec(
        **{**family.switches, "family": name, **family.defaults, **derived_sizes(family, given), **given}
    )


def _problems(spec: ModelSpec, vocab: int | None) -> Iterator[str]:
    """What makes a model impossible, each with what would work."""
    if spec.num_heads % spec.num_kv_heads:
        yield f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
    if spec.positions == "rope" and spec.head_dim % 2:
        yield f"head_dim={spec.head_dim} is odd, and rotary embeddings turn pairs; use an even one"
    if spec.family == "gpt2" and spec.num_heads * spec.head_dim != spec.hidden:
        yield f"gpt2 needs hidden={spec.hidden} to be a multiple of num_heads={spec.num_heads}"
    if vocab is not None and vocab > spec.vocab:
        yield f"vocab={spec.vocab} is smaller than the tokenizer's {vocab}; use at least that"

"""Multimodal models in Hugging Face directories: the text model inside, which is trained, and the rest, which is kept.

The text model has a config of its own inside config.json, and tensors whose names have another prefix than in files of
a text model. transformers completes the config, because these files leave most sizes to its defaults.
"""

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.families.fp8_files import without_scales
from meshwright.families.tensor_headers import StoredTensor, stored_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.foreign import Fp8Files, Wrapper
from meshwright.spec.model import ModelSpec

PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")
"""Keys of config.json of which a multimodal model has at least one."""

TEXT_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
"""model_type of a text model -> changes to its config, to those of the model that it is if all inputs are text:
positions in time, height and width are then equal."""

EMBEDDING = "embed_tokens.weight"

FILES = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
    (("model.", "model.text_model."), ("lm_head.", "lm_head.")),
    (("model.", "model."), ("lm_head.", "lm_head.")),
)
"""Prefixes of a text model's tensors, and their spellings in the files, as transformers' releases write them."""

MODULES = {
    "llama4": FILES[0],
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), FILES[2]),
}
"""model_type -> the prefixes in transformers' class, if they are not the second of `FILES`; adapters use them."""


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model with inputs besides text."""
    return any(isinstance(config.get(key), Mapping) for key in PARTS)


def text_of(config: Mapping[str, Any], stored: Collection[str], *, where: str) -> tuple[dict[str, Any], Wrapper]:
    """The complete config of the text model inside, in the form of config.json, and what surrounds it.

    Args:
        config: of the whole model.
        stored: names of the tensors in the files.

    Raises:
        UserError: transformers is missing or does not know the model, or the files have no text model.
    """
    kind = config.get("model_type")
    text = completed(config, where=where)
    if text.get("model_type") in (None, kind):
        raise UserError(f"{where}: model_type {kind!r} has inputs besides text, but no text model of its own")
    text |= TEXT_MODELS.get(text["model_type"], {})
    text["architectures"] = [_architecture(text["model_type"], where)]
    prefixes = next((pairs for pairs in FILES if pairs[0][1] + EMBEDDING in stored), None)
    if prefixes is None:
        tried = ", ".join(pairs[0][1] + EMBEDDING for pairs in FILES)
        raise UserError(f"{where}: the files have none of {tried}, so the text model in them cannot be found")
    text["tie_word_embeddings"] = _is_tied(config, prefixes[1][1] + "weight" in stored)
    return text, Wrapper(config=json.dumps(config), modules=MODULES.get(str(kind), FILES[1]), files=prefixes)


def kept_config(model: ModelSpec) -> dict[str, Any] | None:
    """The config.json that the model itself keeps, a wrapper's with the text model's keys; None if it keeps none."""
    if model.wrapper is not None:
        whole = json.loads(model.wrapper.config)
        return whole.get("text_config", {}) | whole
    return None if model.foreign is None else json.loads(model.foreign.config)


def describe_files(model: ModelSpec) -> str:
    """What a Hugging Face directory has besides the trained model in floats; empty if nothing."""
    parts = []
    if model.wrapper is not None:
        kind = json.loads(model.wrapper.config).get("model_type")
        parts.append(f"the text model of the multimodal {kind} is trained, exports copy the rest")
    if model.fp8 is not None:
        parts.append("matrices in fp8 are dequantized as they are read")
    return "; ".join(parts)


def text_tensors(directory: Path, wrapper: Wrapper | None, fp8: Fp8Files | None) -> dict[str, StoredTensor]:
    """The tensors of a directory's model, or of the text model in it, by their names in a text model's own files,
    without scales of fp8 matrices."""
    stored = without_scales(stored_tensors(directory)[0], fp8)
    if wrapper is None:
        return stored
    return {
        text + name.removeprefix(prefix): tensor
        for name, tensor in stored.items()
        for text, prefix in wrapper.files
        if name.startswith(prefix)
    }


def completed(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The text model's config with every default of transformers; of a text model, its own."""
    return parsed(config, where=where).get_text_config(decoder=True).to_dict()


def parsed(config: Mapping[str, Any], *, where: str) -> Any:
    """transformers' object for a config.json.

    Raises `UserError` if transformers is missing, does not know the model or cannot read its config.
    """
    if find_spec("transformers") is None:
        raise UserError(
            f"{where}: model_type {config.get('model_type')!r} needs transformers: {install('transformers')}"
        )
    # Heavy and optional, so it is imported only for models that need it.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{where}: transformers {__version__} does not know model_type {kind!r}, nor does Meshwright")
    try:
        return CONFIG_MAPPING[kind].from_dict(decoded(config))
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: transformers {__version__} cannot read it: {reason}") from error


def decoded(value: Any) -> Any:
    """JSON of transformers with infinite numbers, which it writes as `{"__float__": "Infinity"}`, as numbers."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def _architecture(kind: str, where: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if kind not in KNOWN:
        raise UserError(
            f"{where}: transformers has no causal language model for its text model, {kind!r}, so it cannot be trained"
        )
    return KNOWN[kind]


def _is_tied(config: Mapping[str, Any], has_head: bool) -> bool:
    """Whether the head is the embedding: as config.json says, else as the files do, whose defaults differ by
    release."""
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return part["tie_word_embeddings"]
    return not has_head

"""Configuration files of other systems for the tests of `import`, and files that differ from them in one value."""

import ast
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.document import FAST_LOADER
from meshwright.spec.errors import UserError
from meshwright.storage.opening import read_data

FIXTURES = Path(__file__).parent / "fixtures"
CORPUS = sorted(path for folder in ("imports", "claims") for path in (FIXTURES / folder).iterdir())
RANKS = {"accelerate_fsdp.yaml": 16, "nanotron_smol.yaml": 12, "nanotron_constant.yaml": 1, "titan_70b.toml": 128}
RANKS |= {"titan_pipeline.toml": 16}
"""Where 8 ranks do not fit."""
PACKAGE = "titan"
"""The folder of torchtitan's modules, whose name tells nothing."""
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "adam_w_mode": ("false",),
    "alibi": ("x",),
    "clipping_type": ("value",),
    "collate_fn": ("own.collate",),
    "cp_comm_strategy": ("allgather",),
    "parallelism_config_cp_comm_strategy": ("allgather",),
    "chat_template": ("chatml",),
    "context_parallel_rotate_method": ("allgather",),
    "dataloader-type": ("cyclic",),
    "dataloader_type": ("cyclic",),
    "distributed_type": ("MULTI_GPU",),
    "dpo_loss_type": ("hinge",),
    "dropout_position": ("post",),
    "ds_type": ("csv",),
    "dynamo_backend": ("INDUCTOR",),
    "dynamo_mode": ("max-autotune-no-cudagraphs", "reduce-overhead"),
    "eval_strategy": ("steps", "epoch"),
    "evaluation_strategy": ("steps", "epoch"),
    "field_chosen": ("yes",),
    "field_messages": ("dialog",),
    "field_rejected": ("no",),
    "finetuning_type": ("lora", "freeze"),
    "flavor": ("70B",),
    "format": ("E4M3",),
    "freeze_trainable_modules": ("mlp",),
    "fsdp_reshard_after_forward": ("never", "always"),
    "hidden_act": ("gelu",),
    "init_from": ("gpt2", "resume"),
    "interval_type": ("seconds",),
    "lora_B_init_method": ("normal",),
    "lr_warmup_style": ("constant",),
    "lr-wsd-decay-style": ("exponential", "cosine"),
    "message_field_content": ("what",),
    "message_field_role": ("who",),
    "mix_strategy": ("interleave_under",),
    "mixed_precision": ("PURE",),
    "mode": ("max-autotune-no-cudagraphs", "reduce-overhead", "inference"),
    "model_class": ("cls",),
    "module_fqns_per_model_part": ("x",),
    "name": ("mpt_causal_lm", "freeze", "deepspeed", "gptq", "llama3", "muon", "sgd"),
    "norm_type": ("layernorm",),
    "nvme_path": ("/fast",),
    "offload_optimizer_device": ("cpu",),
    "offload_param_device": ("cpu",),
    "device": ("cpu", "nvme"),
    "output_dtype": ("float32",),
    "packing_strategy": ("wrapped",),
    "pp_schedule": ("gpipe",),
    "pref_loss": ("orpo",),
    "quantization_type": ("fp4",),
    "recipe": ("KnowledgeDistillationRecipeForNextTokenPrediction",),
    "recompute-method": ("block",),
    "recompute_method": ("block",),
    "report_to": ("wandb", "tensorboard"),
    "save_strategy": ("steps", "epoch"),
    "scaling_method": ("SPECTRAL_MUP",),
    "selective_ac_option": ("2",),
    "sharding_strategy": ("SHARD_GRAD_OP", "NO_SHARD"),
    "split": ("dev",),
    "state_dict_type": ("FULL_STATE_DICT",),
    "strategy": ("ddp",),
    "t_max": ("0.5dur",),
    "tokens": ("x",),
    "use_wandb": ("x",),
    "wandb_mode": ("online",),
    "warmup_type": ("log",),
    "weight_decay_incr_style": ("cosine",),
    "_target_": ("own.module.Class", "nemo_automodel.NeMoAutoModelForCausalLM.from_config"),
    "activation_func": ("relu",),
    "attn_backend": ("sdpa",),
    "loss_fn": ("x",),
    "master_weights_dtype": ("bf16",),
    "auto_wrap_policy": ("SIZE_BASED_WRAP",),
    "fsdp": ("full_shard auto_wrap",),
    "optimizer": ("x",),
    "override_linear_precision": ("x",),
    "exp_avg_dtype": ("torch.float32",),
    "torch_dtype": ("float16", "float32"),
    "MODE": ("inference",),
    "model_name": ("x",),
    "bnb_4bit_quant_type": ("fp4",),
    "fp16_lm_head": ("x",),
    "activation": ("gelu", "swiglu", "relu"),
    "position_embedding_type": ("rope",),
    "lr_scheduler_kwargs": ("x",),
}
"""Other legal words of keys whose words claim something."""


@dataclass(frozen=True)
class Outcome:
    """What an import made of a file."""

    recipe: Any
    """As plain data; None if the file was refused."""
    refused: str
    reading: Reading

    @classmethod
    def of(cls, path: Path, name: str) -> "Outcome":
        """Import a file, which is one of the corpus or differs from that of this name."""
        ranks = RANKS.get(name, 8)
        for model in (None, "llama-3.2-1b"):
            try:
                text, reading = import_files([path], ranks=ranks, model=model)
            except UserError as error:
                if "no file names the model" in str(error):
                    continue
                return cls(None, str(error), Reading())
            return cls(yaml.load(text, Loader=FAST_LOADER), "", reading)
        raise AssertionError(path)


def keys_of(origins: list[str]) -> list[str]:
    """The keys of origins `file: key=value`."""
    return [origin.split(": ", 1)[1].split("=", 1)[0] for origin in origins if ": " in origin]


def other_values(key: str, value: Any) -> list[Any]:
    """Other values of a key: bool negated, number changed, word replaced, list changed."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [7] if value < 1 else [3] if value == 1 else [2 * value + 1, 0]
    if isinstance(value, float):
        return [value * 2, 0.0] if value else [0.5]
    if isinstance(value, list):
        return [[*value, "other"]] if value else [["other"]]
    words = OTHER_WORDS.get(key.rsplit(".", 1)[-1], ())
    return [word for word in words if word != value] or [f"other-{value}"]


Place = tuple[str | int, ...]


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, value) of everything that is no mapping and no list of mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*place, number))
    else:
        yield place, value


def with_value(values: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place."""
    copy = deepcopy(values)
    inner = copy
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return copy


def _is(place: Place, key: str) -> bool:
    """Whether a reader calls the value at a place by this key, with or without prefixes of its section."""
    bare = re.sub(r"\b(fsdp|fp8|dynamo|megatron_lm|parallelism_config)_(?!config)", "", key)
    dotted = ".".join(map(str, place))
    if re.sub(r"\b(fsdp|fp8|dynamo|megatron_lm|parallelism_config)_(?!config)", "", dotted) == bare:
        return True
    return place[0] == "MODEL_ARGS" and str(place[-1]) == f"--{key}"


def variants(path: Path, keys: set[str]) -> Iterator[tuple[str, str]]:
    """(key with its new value, text) of files that differ from `path` in one value of one of the keys."""
    text = path.read_text()
    if path.suffix == ".sh":
        yield from _of_script(text, keys)
    elif path.suffix == ".py" and "Trainer.Config(" in text:
        yield from _of_calls(text)
    elif path.suffix == ".py":
        yield from _of_assignments(text, keys)
    else:
        values = read_data(path, text)
        write = json.dumps if path.suffix in (".json", ".toml") else partial(yaml.safe_dump, sort_keys=False)
        for place, value in leaves(values):
            key = next((key for key in keys for end in range(len(place)) if _is(place[: end + 1], key)), None)
            for other in other_values(str(place[-1]), value) if key and value is not None else ():
                yield f"{key}={other}", write(with_value(values, place, other))


def _of_script(text: str, keys: set[str]) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"--([\w-]+) ([^\s\\]+)", text):
        if found[1] in keys:
            for other in other_values(found[1], yaml.load(found[2], Loader=FAST_LOADER)):
                yield f"{found[1]}={other}", f"{text[: found.start(2)]}{other}{text[found.end(2) :]}"


def _of_assignments(text: str, keys: set[str]) -> Iterator[tuple[str, str]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in keys:
            name, lines = node.targets[0].id, text.splitlines()
            if isinstance(node.value, ast.Constant):
                for other in other_values(name, node.value.value):
                    changed = [*lines[: node.lineno - 1], f"{name} = {other!r}", *lines[node.lineno :]]
                    yield f"{name}={other}", "\n".join(changed)


def _of_calls(text: str) -> Iterator[tuple[str, str]]:
    """Every constant of a keyword, and every constant that is assigned to a part of the configuration."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword):
            name, value = node.arg or "", node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            name, value = node.targets[0].attr, node.value
        else:
            continue
        if isinstance(value, ast.Constant) and value.value is not None and value.lineno == value.end_lineno:
            line, start, end = value.lineno - 1, value.col_offset, value.end_col_offset
            for other in other_values(name, value.value):
                changed = f"{lines[line][:start]}{other!r}{lines[line][end:]}"
                yield f"{name}={other}", "\n".join([*lines[:line], changed, *lines[line + 1 :]])

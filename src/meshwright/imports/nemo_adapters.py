"""Adapters of Megatron-Bridge (the section `peft`) and of NeMo before it (`model.peft`).

Without them a file trains every parameter, so a section that is not read would turn LoRA into full training.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Has, NoEffect
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import cases, fact, last_name, only, unsupported, without

TARGETS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "attention_qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_dense": ("o_proj",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_fc1": ("gate_proj", "up_proj"),
    "mlp_fc2": ("down_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
"""Megatron's names of modules, and NeMo's words for them -> Hugging Face's."""
EVERY = frozenset(TARGETS["all"])
FUSED = ("linear_qkv", "linear_fc1", "attention_qkv", "attention", "mlp_fc1", "mlp", "all")
"""Names of several matrices that share one A."""
CLASSES = {"LoRA": 32, "CanonicalLoRA": 32, "DoRA": 64}
"""Class -> its default alpha."""
DEFAULT_DIM = 32
KIND, NAMES = "class of adapters", "modules with adapters"


RULES: Mapping[str, Rule] = {
    "peft._target_": cases({name: fact(KIND, name) for name in CLASSES}, word=last_name),
    "peft.dim": "finetune.rank",
    "peft.alpha": "finetune.alpha",
    "peft.dropout": "finetune.dropout",
    "peft.dropout_position": only("pre", "dropout is applied before the adapters"),
    "peft.target_modules": fact(NAMES),
    "peft.lora_A_init_method": without("A starts as peft starts it (kaiming), B at zero"),
    "peft.lora_B_init_method": only("zero", "B starts at zero"),
    "peft.lora_dtype": without("adapters have the dtype of trained weights"),
    "peft.a2a_experimental": NoEffect.OVERLAP,
    "peft.sequence_parallel_input_regather": NoEffect.MEMORY,
    "peft.normalize_moe_lora": unsupported("set finetune.ranks for experts"),
    "model.peft.peft_scheme": cases({
        "lora": fact(KIND, "LoRA"), "dora": fact(KIND, "DoRA"), "none": Has("finetune.rank", None),
    }),
    "model.peft.lora_tuning.adapter_dim": "finetune.rank",
    "model.peft.lora_tuning.alpha": "finetune.alpha",
    "model.peft.lora_tuning.adapter_dropout": "finetune.dropout",
    "model.peft.lora_tuning.target_modules": fact(NAMES),
    "model.peft.lora_tuning.weight_tying": unsupported("every layer has adapters of its own"),
    "model.peft.restore_from_path": without("set finetune.start_from to a peft adapter"),
}  # fmt: skip


def settle_adapters(reading: Reading, keys: Mapping[str, Any], file: str) -> None:
    """Set LoRA where the file has a section of adapters, with the defaults of its class."""
    old = any(key.startswith("model.peft.") for key in keys)
    if not any(key.startswith("peft.") for key in keys) and not (old and KIND in reading.facts):
        reading.take_back("it counts only with peft_scheme", "finetune.")
        return
    default = f"{file} (NeMo's default)" if old else f"{file} (Megatron-Bridge's default)"
    kind, origin = reading.facts.get(KIND, ("LoRA", f"{file}: peft"))
    reading.set("finetune.method", "lora", origin)
    if kind == "DoRA":
        reading.set("finetune.dora", True, origin)
    reading.default("finetune.rank", DEFAULT_DIM, default)
    reading.default("finetune.alpha", CLASSES[kind], default)
    names, where = reading.facts.get(NAMES, (["all"] if not old else ["attention_qkv"], default))
    names = [names] if isinstance(names, str) else list(names)
    if other := [name for name in names if name not in TARGETS]:
        reading.drop(where, f"list Hugging Face's names in finetune.targets, for {', '.join(map(str, other))}")
        names = [name for name in names if name in TARGETS]
    targets = list(dict.fromkeys(target for name in names for target in TARGETS[name]))
    reading.set("finetune.targets", "all-linear" if set(targets) == EVERY else targets, where)
    if shared := [name for name in names if name in FUSED and kind != "CanonicalLoRA"]:
        reading.notes.append(
            f"{where}: the matrices of {', '.join(shared)} share one A in Megatron; each has its own in a recipe"
        )

"""The registry of families, and of every published size by name."""

from meshwright.families.deepseek import DEEPSEEK_V3
from meshwright.families.family import Family
from meshwright.families.gpt2 import GPT2
from meshwright.families.llama import LLAMA
from meshwright.families.mistral import MISTRAL, MIXTRAL
from meshwright.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec

FAMILIES: dict[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)
}

PRESETS: dict[str, ModelFields] = {
    name: fields for family in FAMILIES.values() for name, fields in family.presets.items()
}


def family_of(spec: ModelSpec) -> Family:
    """The family of one of our models; raises `UserError` for a user's own model, which Hugging Face does not know."""
    if spec.family not in FAMILIES:
        raise UserError(f"{spec.family} is not a Hugging Face family, so its files cannot be read or written")
    return FAMILIES[spec.family]

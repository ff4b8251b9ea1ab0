"""The registry of families, and of every published size by name."""

from meshwright.families.deepseek import DEEPSEEK_V3
from meshwright.families.family import Family
from meshwright.families.gemma import GEMMA3
from meshwright.families.glm import GLM4_MOE
from meshwright.families.gpt2 import GPT2
from meshwright.families.gpt_oss import GPT_OSS
from meshwright.families.llama import LLAMA
from meshwright.families.minimax import MINIMAX_M2
from meshwright.families.mistral import MISTRAL, MIXTRAL
from meshwright.families.olmo import OLMO3
from meshwright.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from meshwright.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from meshwright.families.smollm import SMOLLM3
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec

DENSE = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, GEMMA3, OLMO3, SMOLLM3)
OF_EXPERTS = (MIXTRAL, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, DEEPSEEK_V3, GLM4_MOE, MINIMAX_M2, GPT_OSS)

FAMILIES: dict[str, Family] = {family.name: family for family in (*DENSE, *OF_EXPERTS)}

PRESETS: dict[str, ModelFields] = {
    name: fields for family in FAMILIES.values() for name, fields in family.presets.items()
}


def family_of(spec: ModelSpec) -> Family:
    """The family of one of our models; raises `UserError` for a user's own model, which Hugging Face does not know."""
    if spec.family not in FAMILIES:
        raise UserError(f"{spec.family} is not a Hugging Face family, so its files cannot be read or written")
    return FAMILIES[spec.family]

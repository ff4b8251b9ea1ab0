"""The parameter table equals the published models and the module, name by name."""

from pathlib import Path

import pytest

from meshwright.families import PRESETS, active_parameters, parameter_table, resolve_model
from meshwright.spec.model import ModelFields

# Totals published with the models (tied heads counted once).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "moonlight-16b-a3b": 15_960_108_544,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "kimi-k2-0905": 1_026_408_209_408,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
    "glm-4.6": 352_797_814_784,
    "minimax-m2": 228_689_748_992,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
}

# Parameters that one token uses, in billions, as published with the models.
ACTIVE = {"mixtral-8x7b": "12.9", "mixtral-8x22b": "39", "qwen3-30b-a3b": "3.3", "qwen3-235b-a22b": "22"} | {
    "moonlight-16b-a3b": "3",
    "deepseek-v3": "37",
    "kimi-k2": "32",
}
# Published without embedding and head.
ACTIVE_IN_BLOCKS = {"glm-4.5-air": "12", "glm-4.5": "32", "minimax-m2": "10"}


def test_every_preset_is_pinned():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_published_parameter_counts(name, total):
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    assert sum(parameter.numel for parameter in parameter_table(spec)) == total


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_published_active_parameters(name, billions):
    """To the last published digit, rounded or truncated."""
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    digit = 0.1 if "." in billions else 1
    assert abs(active_parameters(spec) / 1e9 - float(billions)) < digit


@pytest.mark.parametrize(("name", "billions"), ACTIVE_IN_BLOCKS.items())
def test_published_active_parameters_of_blocks(name, billions):
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    blocks = active_parameters(spec) - 2 * spec.vocab * spec.hidden
    assert abs(blocks / 1e9 - float(billions)) < 1


def test_a_dense_model_is_active_as_a_whole():
    spec = resolve_model(ModelFields(name="llama-3.2-1b"), base_dir=Path())
    assert active_parameters(spec) == PUBLISHED["llama-3.2-1b"]

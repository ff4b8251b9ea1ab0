"""A short round of the configuration fuzzer, which `python tests/config_fuzz.py` runs at any length."""

from dataclasses import replace

import pytest
import transformers

from config_fuzz import SCHEMA, one_round, schema_of
from meshwright.families import FAMILIES, registry
from meshwright.families.hf_layers import BY_LAYER

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own configurations


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_schema_is_drawn(family: str) -> None:
    """A field that transformers adds is drawn, else this test fails."""
    assert schema_of(family) == SCHEMA[family].keys()


@pytest.mark.every(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_configuration_computes_something_else(family: str) -> None:
    found = {one_round(family, seed)[0] for seed in range(1000, 1004)}
    assert "different" not in found
    assert "equal" in found


@pytest.mark.slow
def test_the_fuzzer_finds_a_window_that_is_read_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Qwen3-MoE's earlier: by layer, which transformers does not do."""
    qwen3, moe = FAMILIES["qwen3"], FAMILIES["qwen3_moe"]
    wrong = replace(moe, hf_layers=BY_LAYER, hf_absent={**qwen3.hf_absent, **moe.hf_absent})
    monkeypatch.setitem(registry.FAMILIES, "qwen3_moe", wrong)
    assert "different" in {one_round("qwen3_moe", seed)[0] for seed in range(1000, 1012)}

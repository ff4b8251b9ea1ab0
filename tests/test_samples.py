"""Samples during training: under every layout, ranks write what one process writes with a cache."""

import pytest

from meshwright.models import Decoder
from meshwright.models.generate import Sampling
from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import build_here
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.samples import continue_together
from served import generate
from tiny import tiny_run

PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 4, 11]]
NEW = 7
CASES = {
    "ddp": "gpt2",
    "zero-3-uneven": "llama",
    "hybrid-3": "mixtral",
    "offload": "llama",
    "tp-wide": "gpt2",
    "zero-3-tp": "qwen2",
    "cp": "mistral",
    "cp-ring-tp": "gpt2",
    "cp-ulysses-tp": "llama",
    "pp": "gpt2",
    "pp-tp": "llama",
    "pp-zero-3": "deepseek_v3",
    "zero-3-ep": "qwen3_moe",
    "tp-ep": "mixtral",
}
"""Layouts, each with a family."""
PIPEDREAM = LayoutSpec(pp=2, schedule="pipedream-2bw")


def write(run, ends=(50,)):
    """The continuation by all ranks together."""
    return continue_together(build_here(run), PROMPTS, NEW, ends)


def expected(run, ends=(50,)):
    """One process, whole model, with a cache."""
    alone = build_here(run.model_copy(update={"run": run.run.model_copy(update={"layout": LayoutSpec()})}))
    assert isinstance(alone.model, Decoder)
    return generate(alone.model, PROMPTS, max_tokens=NEW, eos_id=ends, sampling=Sampling(temperature=0))


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layout_writes_what_one_process_writes(ranks: RankPool, name: str) -> None:
    layout = (LAYOUTS | EXPERT_PARALLEL)[name]
    run = tiny_run(layout, family=CASES[name], tied=len(name) % 2 == 0)
    texts = expected(run)
    assert len({tuple(text) for text in texts}) == len(PROMPTS), "a model that always writes the same proves little"
    assert ranks.run(layout.world_size, write, run) == [texts] * layout.world_size


def test_an_asynchronous_pipeline_writes_with_the_newest_weights(ranks: RankPool) -> None:
    run = tiny_run(PIPEDREAM, tied=True)
    assert ranks.run(2, write, run) == [expected(run)] * 2


@pytest.mark.slow
def test_adapters_take_part(ranks: RankPool) -> None:
    finetune = {"method": "lora", "rank": 4, "targets": ["wq", "w2", "output"]}
    run = tiny_run(LAYOUTS["zero-3-tp"], finetune=finetune)
    assert ranks.run(4, write, run) == [expected(run)] * 4


def test_all_ranks_stop_where_the_text_ends(ranks: RankPool) -> None:
    run = tiny_run(LAYOUTS["pp"])
    end = expected(run)[0][2]
    texts = expected(run, (end,))
    assert [len(text) for text in texts] != [NEW] * 3
    assert ranks.run(2, write, run, (end,)) == [texts] * 2


def test_one_process_reads_rows_anew_and_writes_the_same() -> None:
    run = tiny_run(LayoutSpec(), family="mistral")
    assert write(run) == expected(run)

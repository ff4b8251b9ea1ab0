"""What every strategy exchanges in a step: counted in torch's collectives, and equal to the formulas to the byte."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.parallel.traffic import Traffic, axis_names, ranks_of
from meshwright.plan.traffic import predict_traffic
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from tiny import tiny_run

COVERED = [name for name, layout in LAYOUTS.items() if layout.pp == layout.ep == 1]


def counted_and_predicted(resolved: ResolvedRun) -> tuple[Counter, Counter]:
    """Bytes by kind and axis on this rank; axes of the same ranks have one name."""
    trainer = build_here(resolved)
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        with Traffic(trainer.meshes) as traffic:
            trainer.train_step.gradients(loader.microbatches(1))
    counted = Counter({key: count.bytes for key, count in traffic.counts.items()})
    if trainer.meshes is None or dist.group.WORLD is None:
        return counted, predict_traffic(resolved)
    meshes, names = trainer.meshes, axis_names(trainer.meshes)
    found = {axis: meshes.axis(axis) for axis in ("cp", "tp", "shard", "replicate")}
    groups = {axis: mesh.get_group() for axis, mesh in found.items() if mesh is not None} | {"world": dist.group.WORLD}
    predicted: Counter[Any] = Counter()
    for (kind, axis), size in predict_traffic(resolved).items():
        predicted[kind, names.get(ranks_of(groups[axis]), "world")] += size
    return counted, predicted


@pytest.mark.parametrize("name", COVERED)
def test_what_is_counted_is_what_was_predicted(ranks: RankPool, name: str) -> None:
    """Families, recomputation and precision alternate, all in one class of layouts."""
    layout, turn = LAYOUTS[name], COVERED.index(name)
    options: dict[str, Any] = {
        "family": ("llama", "gpt2", "qwen3")[turn % 3],
        "recompute": ("none", "selective", "full")[turn // 3 % 3],
        "precision": ("fp32", "fp64", "bf16")[turn % 3],
        "accumulation": 3 if 12 // layout.data_parallel % 3 == 0 else 2,
        "tied": turn % 2 == 1,
    }
    counted, predicted = ranks.run(layout.world_size, counted_and_predicted, tiny_run(layout, **options))[0]
    assert counted == predicted, options


def test_runs_that_the_formulas_do_not_cover() -> None:
    with pytest.raises(ValueError, match="dense"):
        predict_traffic(tiny_run(LayoutSpec(), family="mixtral"))
    assert not predict_traffic(tiny_run(LayoutSpec()))

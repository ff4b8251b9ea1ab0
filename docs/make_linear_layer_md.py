"""Writes docs/one-linear-layer.md, the slots of a model under five strategies at once: run it after changing one."""

import argparse
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.families import resolve_model
from meshwright.models.slots import Layer
from meshwright.parallel import build_meshes
from meshwright.rehearse.fake import fake_rank
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.trainer.setup import build_parallel_model

PAGE = Path(__file__).with_name("one-linear-layer.md")
SOURCE = Path(meshwright.__file__).parent
RANK = 1
BLOCK = "layers.0"
LAYERS = ("attention.wk", "feed_forward.w2", "feed_forward.w1")

MODEL = ModelFields(family="llama", hidden=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn=512, vocab=1000)
FINETUNE = {
    "method": "lora",
    "base": "nf4",
    "double_quantization": False,
    "rank": 8,
    "targets": ["wk", "w2"],
    "train": ["w1"],
}
LAYOUT = LayoutSpec(pp=2, dp_shard=2, tp=2, schedule="interleaved-zero-bubble", stages_per_rank=1)

BEGIN = f"""\
# One linear layer under five strategies

A layer declares slots, strategies fill them, and `print(model)` shows the result. Nothing else changes a layer's
computation: no method, class or `forward` is replaced after a module is built (`tests/test_slots.py` checks every built
model, `tests/test_house.py` the source).

The example is a llama of width 256 with 2 key and value heads, under tensor parallelism (`tp: 2`), ZeRO-3
(`dp_shard: 2`), a zero-bubble pipeline (`pp: 2`), selective recomputation, and QLoRA: `wk` and `w2` have adapters on an
NF4 base, `w1` trains in full. Rank {RANK} of 8 prints its first block:
"""

STACKS = """
Ops are listed from the inside out. Parameters stay registered in the layer, under their names in the parameter table.
The entry after the shapes is the view, the local shard that this rank reads: `weight dim 0` means a part of the rows;
parameters that are not listed are replicated.

| layer | content of the slot | file |
|---|---|---|"""

ABSENT = """
`wk` and `w2` defer nothing: a frozen matrix has no weight gradient, and the adapters' products are too small for
deferring to pay off. `w1` trains in full and has no adapter.

Between steps, this rank stores the following shards of these layers. ZeRO-3 has split the tensor-parallel shards again
along dim 0; FSDP2 gathers them before each pass, and the view then reads plain tensors:

| parameter | global shape | shape on this rank | trains |
|---|---|---|---|"""

END = """
## Adding a product

A new kind of matrix product, for example in low precision, is a subclass of `Product` (`models/linear.py`) with three
methods: `compute`, `input_gradient` and `weight_gradient`. One line in `parallel/apply.py` installs it in the layers:

    for linear in linears: linear.put(Fp8())

Adapters, zero-bubble schedules and tensor parallelism then work with it unchanged, because they are ops around the
product and do not depend on its kind. `tests/test_slots.py` tests this with a product that rounds its inputs, weight
and gradients.
"""


def page() -> str:
    """The text of docs/one-linear-layer.md, from a process of its own: one is only ever one rank."""
    return subprocess.run([sys.executable, __file__, "--show"], check=True, capture_output=True, text=True).stdout


def show() -> Iterator[str]:
    """The page's parts."""
    training = TrainingSpec(precision="bf16", recompute="selective")
    run = Run(model=MODEL, training=training, finetune=FINETUNE, layout=LAYOUT, device="cpu")  # type: ignore[arg-type]
    resolved = ResolvedRun(
        run=run,
        model=resolve_model(MODEL, base_dir=Path()),
        global_batch=16,
        micro_batch=1,
        accumulation=8,
        stage_layers=(1, 1),
        reasons={},
    )
    with fake_rank(RANK, LAYOUT.world_size):
        block = build_parallel_model(resolved, build_meshes(LAYOUT, "cpu")).model.get_submodule(BLOCK)
        yield f"{BEGIN}\n```\n{block}\n```\n{STACKS}"
        for path in LAYERS:
            layer = block.get_submodule(path)
            assert isinstance(layer, Layer)
            for thing in (*layer.ops, layer.view):
                yield f"| `{path}` | {thing} | `{_file(thing)}` |"
        yield ABSENT
        for path in LAYERS:
            for name, parameter in block.get_submodule(path).named_parameters():
                yield f"| `{path}.{name}` | {_kind(parameter)} | {_local(parameter)} | {_trains(parameter)} |"
        yield END.rstrip("\n")


def _file(thing: object) -> str:
    return Path(inspect.getfile(type(thing))).relative_to(SOURCE).as_posix()


def _kind(parameter: nn.Parameter) -> str:
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"


def _local(parameter: torch.Tensor) -> str:
    assert isinstance(parameter, DTensor)
    return str(list(parameter.to_local().shape))


def _trains(parameter: nn.Parameter) -> str:
    return "yes" if parameter.requires_grad else ""


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--show", action="store_true", help="print the layers instead")
    if words.parse_args().show:
        print("\n".join(show()))
    else:
        PAGE.write_text(page(), encoding="utf-8")

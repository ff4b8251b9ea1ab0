"""Writes docs/zero3-step.md and its picture: the messages of one ZeRO-3 step of solo/train_fsdp.py, recorded."""

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

PAGE = Path(__file__).with_name("zero3-step.md")
PICTURE = Path(__file__).with_name("zero3-step.svg")
SOLO = Path(__file__).parents[1] / "solo"
WORLD, WIDTH, LAYERS, LENGTH = 2, 64, 2, 32

BEGIN = """\
# One step of ZeRO-3, message by message

DDP keeps every weight, its gradient and the optimizer's two moments on every process: 16 bytes a weight in fp32. ZeRO-3
(Rajbhandari et al., 2020), which PyTorch calls fully sharded data parallelism (FSDP), divides all four by the number of
processes. This page follows one step of [solo/train_fsdp.py](../solo/train_fsdp.py), which does it by hand in 250
lines, on {world} processes and a llama of {layers} blocks and width {width}. A script has recorded the messages and
draws the picture from them.

## Where the weights are between steps

The weights of a layer are laid end to end in one line. The line is cut into {world} equal parts, and each process keeps
one, with its gradient and its moments. A part may begin in the middle of a matrix: between steps, nobody computes.

```
block 0, its matrices   wq | wk | wv | wo | w1 | w2 | w3      {line:,} numbers in a line
process 0 keeps         |---- {part:,} ----|                  x 4: weight, gradient, two moments
process 1 keeps                            |---- {part:,} ----|
```

Norms have a line of their own, because weight decay treats them differently.

## What happens in the step

A layer's weights are whole only while the layer computes:

![whole weights on one process during a step](zero3-step.svg)

Three functions are the whole strategy. Two send messages:

```python
{messages}
```

The third tells autograd that a layer is a function of its input and of *this process's part* of its weights:

```python
{sharded}
```

- `forward` gathers, computes, and lets the whole weights go: it saves the parts, not the lines.
- `backward` gathers a second time, because the whole weights are gone, computes again, and differentiates. Each process
  has the gradient of the whole line for its own samples. `reduce_scatter` adds these up and leaves each process its
  part of the sum, which is what autograd adds to the part's `.grad`.
- The optimizer then steps the parts. No further message is needed but one number, the square of the gradient's norm.

## The messages

Of process 0, for one microbatch, in order. *Sends* counts the numbers that leave the
process: its part to every other process, or every other process's part to its owner.

| # | pass | layer | message | numbers of the whole line | sends |
|---|---|---|---|---|---|"""

END = """
In all {total:,} numbers leave the process: {ratio:.2f} times (W - 1) / W of the {parameters:,} parameters, with W
processes. Two gathers and one reduction of every weight make 3; the tied embedding counts twice, as the first layer and
as the head. DDP's all-reduce makes 2.

## What the trainer adds

`layout: {{dp_shard: {world}}}` does the same through PyTorch's FSDP2 (`parallel/data.py`); a test compares the two
programs' losses. The trainer adds:

- **prefetch**: the next layer is gathered while this one computes, so most messages cost no time;
- **ZeRO-2** (`layout.zero: 2`): the weights stay whole after the forward pass, which saves the second gather;
- **lower precision**: gathers in bf16 of fp32 master weights, or quantized (`layout.quantized_weights`);
- **hybrid sharding** (`dp_replicate`): parts within a machine, copies between machines.

[Memory](memory.md) has the bytes of each stage, [traffic](traffic.md) the messages of every strategy. `meshwright
rehearse run.yaml` lists them for a run of yours.
"""


class Message(NamedTuple):
    """One message of the step."""

    way: str
    """forward or backward."""
    layer: str
    kind: str
    """gather, or reduce and scatter."""
    numbers: int
    """Numbers of the whole line."""


def record() -> dict[str, Any]:
    """The messages of one forward and backward pass of process 0, and sizes."""
    sys.path.insert(0, str(SOLO))
    import torch.distributed as dist
    import train as whole
    import train_fsdp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    words = ["--width", WIDTH, "--layers", LAYERS, "--heads", 4, "--kv-heads", 2, "--inner", 128, "--length", LENGTH]
    args = whole.parse([str(word) for word in words])
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    start = whole.Llama(args)
    whole.draw_weights(start, args.seed, args.layers)
    parameters = sum(weight.numel() for weight in start.parameters())
    model = train_fsdp.ShardedLlama(start, torch.device("cpu"))
    names = {id(model.embedding): "embedding", id(model.norm): "norm"}
    names |= {id(block): f"block {number}" for number, block in enumerate(model.blocks)}
    messages, gather, reduce_scatter = list[Message](), train_fsdp.gather, train_fsdp.reduce_scatter

    def place() -> tuple[str, str]:
        """The pass and the layer that send, read off the callers."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name not in ("forward", "backward"):
            frame = frame.f_back
        assert frame is not None
        context = frame.f_locals["ctx"]
        head = context.compute is train_fsdp.head
        return frame.f_code.co_name, "head" if head else names[id(context.layer)]

    def recorded_gather(part: torch.Tensor) -> torch.Tensor:
        messages.append(Message(*place(), "gather", part.numel() * WORLD))
        return gather(part)

    def recorded_reduction(line: torch.Tensor) -> torch.Tensor:
        messages.append(Message(*place(), "reduce and scatter", line.numel()))
        return reduce_scatter(line)

    train_fsdp.gather, train_fsdp.reduce_scatter = recorded_gather, recorded_reduction
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    whole.loss_sum(model, tokens, tokens, args).backward()
    line = model.blocks[0].parts[0].numel() * WORLD
    return {"messages": messages, "parameters": parameters, "line": line}


def recorded() -> dict[str, Any]:
    """`record` in a process of its own, because a process has one process group."""
    output = subprocess.run([sys.executable, __file__, "--record"], check=True, capture_output=True, text=True).stdout
    record = json.loads(output)
    return record | {"messages": [Message(*message) for message in record["messages"]]}


def page() -> str:
    """The text of docs/zero3-step.md."""
    return "\n".join(_lines(recorded()))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    source = (SOLO / "train_fsdp.py").read_text(encoding="utf-8")
    begin = BEGIN.format(
        world=WORLD,
        layers=LAYERS,
        width=WIDTH,
        line=facts["line"],
        part=facts["line"] // WORLD,
        messages=f"{_code(source, 'def gather')}\n\n\n{_code(source, 'def reduce_scatter')}",
        sharded=_code(source, "class Sharded("),
    )
    yield begin
    total = 0
    for number, message in enumerate(facts["messages"], 1):
        sends = message.numbers * (WORLD - 1) // WORLD
        total += sends
        yield f"| {number} | {message.way} | {message.layer} | {message.kind} | {message.numbers:,} | {sends:,} |"
    ratio = total / (facts["parameters"] * (WORLD - 1) / WORLD)
    yield END.format(total=total, ratio=ratio, parameters=facts["parameters"], world=WORLD).rstrip("\n") + "\n"


def _code(source: str, begin: str) -> str:
    """A top-level function or class of a file."""
    start = source.index(begin)
    rest = source[start:].split("\n")
    end = next(number for number, line in enumerate(rest[1:], 1) if line and not line.startswith((" ", ")")))
    return "\n".join(rest[:end]).rstrip()


def picture(messages: list[Message]) -> str:
    """Whole weights on one process over the step: a bar for each layer while it computes."""
    stays = list[tuple[str, str, int, bool]]()  # pass, layer, numbers, whether a reduction follows
    for message in messages:
        if message.kind != "gather":
            stays[-1] = (*stays[-1][:3], True)
        elif stays and stays[-1][:2] == (message.way, message.layer) and not stays[-1][3]:
            stays[-1] = (*stays[-1][:2], stays[-1][2] + message.numbers, False)
        else:
            stays.append((message.way, message.layer, message.numbers, False))
    step, base, top = 64, 190, max(size for _, _, size, _ in stays)
    width = 60 + step * len(stays)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 270" font-family="sans-serif" font-size="11">',
        "<style>text{fill:#444}.f{fill:#4c78a8}.b{fill:#f58518}.r{fill:#54a24b}line{stroke:#999}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}}</style>",
        f'<line x1="30" y1="{base}" x2="{width - 10}" y2="{base}"/>',
        '<text x="30" y="16">numbers of whole weights on one process</text>',
    ]
    for number, (way, layer, size, reduced) in enumerate(stays):
        left, height = 40 + step * number, max(2, round(140 * size / top))
        kind = "f" if way == "forward" else "b"
        middle = left + step * 0.4
        parts += [
            f'<rect class="{kind}" x="{left}" y="{base - height}" width="{step * 0.8:.0f}" height="{height}"/>',
            f'<text x="{middle:.0f}" y="{base - height - 5}" text-anchor="middle">{size:,}</text>',
            f'<text x="{middle:.0f}" y="{base + 15}" text-anchor="middle">{layer}</text>',
        ]
        if reduced:
            parts.append(f'<path class="r" d="M{middle - 5:.0f} {base + 22}h10l-5 9z"/>')
    forward = sum(way == "forward" for way, *_ in stays)
    parts += [
        f'<text x="40" y="{base + 50}">forward pass: gather, compute, let go</text>',
        f'<text x="{40 + step * forward}" y="{base + 50}">backward pass: gather again, compute again, differentiate,'
        "</text>",
        f'<text x="{40 + step * forward}" y="{base + 66}">reduce and scatter the gradient (triangle), let go</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--record", action="store_true", help="print the messages as JSON instead")
    if words.parse_args().record:
        print(json.dumps(record()))
    else:
        facts = recorded()
        PAGE.write_text("\n".join(_lines(facts)), encoding="utf-8")
        PICTURE.write_text(picture(facts["messages"]), encoding="utf-8")

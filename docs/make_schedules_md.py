"""Writes docs/schedules.md from the schedules themselves: run it after changing one."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.schedule import SCHEDULES, build_schedule, is_asynchronous
from meshwright.spec.stream import steady_bubble, steady_seconds, two_steps
from meshwright.spec.timeline import StageCosts, in_flight, simulate

PAGE = Path(__file__).with_name("schedules.md")
RANKS, MICROBATCHES = 4, 8

SOURCES = {
    "afab": "All forward, all backward: Huang et al., *GPipe*, 2019.",
    "1f1b": "One forward, one backward: Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021.",
    "interleaved-1f1b": "Several stages per rank: Narayanan et al., *Efficient Large-Scale Language Model Training on "
    "GPU Clusters*, 2021.",
    "looped-bfs": "Breadth first: Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2023.",
    "interleaved-zero-bubble": "Weight gradients fill the gaps; with one stage per rank it is ZB-H1: Qi et al., *Zero "
    "Bubble Pipeline Parallelism*, 2024.",
    "zbv": "Stages run down the ranks and up again, so rank 0 has the first and the last: Qi et al., 2024, section 6.",
    "dualpipev": "DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: DualPipe, cut in half.",
    "pipedream-2bw": "**Not equal to training on one process**: gradients are one step late (below). Narayanan et al., "
    "*Memory-Efficient Pipeline-Parallel DNN Training*, 2021. The picture shows two steps of a continuing run: 0 to 7 "
    "are the microbatches of the first, 8 to f of the second. Once the pipeline is full there is no bubble.",
}

BEGIN = f"""\
# Pipeline schedules

`layout: {{pp: 4}}` gives each of four ranks a quarter of the layers; `layout.schedule` sets the order in which each
rank runs its microbatches. A schedule is data (`spec/schedule.py`): the pictures, bubbles and memory on this page are
computed from the schedule that is executed. `meshwright check` prints bubble and memory for a recipe.

The pictures show {RANKS} ranks and {MICROBATCHES} microbatches. In every stage, the forward pass F, the input gradient
I and the weight gradient W each take 1 unit of time; a whole backward pass B takes 2. The upper line is the number of
the microbatch, the lower line the action; lower-case letters are the rank's later stages, dots are the bubble.

*In flight* is the largest number of microbatches of a stage whose activations a rank keeps at once. A rank with two
stages has half as many layers in each, so 8 in flight need as much memory there as 4 on a rank with one stage.
"""

END = """\
## Stages

Layers are assigned to stages so that the FLOPs of the heaviest stage, including the head, are minimal; dynamic
programming finds the exact optimum. `layout.stage_layers: [7, 8, 8, 7]` sets any other assignment.
`layout.stages_per_rank` sets the number of stages per rank, if the schedule supports several.

Microbatches are the accumulation steps: `training.global_batch / (data-parallel ranks x micro_batch)`. A number that a
schedule does not support is refused, and the error names the nearest supported one.

## Steps that overlap: `pipedream-2bw`

All schedules above drain the pipeline before the optimizer step. This makes them equal to one process, and causes the
bubble. `pipedream-2bw` starts the next step's forward passes during this step's backward passes (PipeDream, Narayanan
et al., 2019). A microbatch's backward pass must use the weights of its forward pass, so each rank keeps two versions of
its weights, for the newest batch and the previous one, and the optimizer applies the gradient of the previous batch:

    W(t + 1) = W(t) - step(gradient of batch t - 1 at W(t - 1))

on all stages (PipeDream-2BW, 2021). In the original PipeDream, which updates each stage as soon as possible, earlier
stages have later gradients, and a rank keeps one version for each rank after it. Here no gradient is more than one step
late.

- **Benefit**: no bubble. A step of M microbatches takes 3 M units on every rank, from the second step on.
- **Cost**: memory for a second version of the weights and a second gradient, and the delay of one step. For P
  parameters of a rank in bf16, compute weights take 2 P + 2 P bytes instead of 2 P, gradients 4 P + 4 P instead of 4 P.
  Activations are the same as with 1F1B.
- **Convergence**: slightly slower. With the small model of [verify](verify.md) over 4 stages, the mean loss of steps 91
  to 100 is 2.55; on one process it is 2.45.
- **Draining**: the pipeline drains before every checkpoint, including the last one and one after a signal. The late
  gradient is then applied, so every batch's gradient is applied exactly once. The checkpoint holds plain weights and
  optimizer state, from which any layout can resume; afterwards the pipeline fills again. So results depend on
  `checkpoint.every`. A run stopped at a step where a checkpoint was due resumes as if it had not been stopped.
- **Proof**: `verify` compares it in float64 with its definition, one process whose gradients are one step late: every
  loss and norm of four steps, an evaluation while batches are in flight, and all weights and moments after the last
  update. `tests/test_pipedream.py` does so over six steps with tied embeddings, recomputation, clipping, Muon, experts,
  replicas and context parallelism.
- **Layouts**: it combines with `dp_replicate` and `cp`. ZeRO is refused (it would save the memory that the second
  version needs), and so are `tp`, `ep`, offload, adapters, fp16 (its loss scale may change between forward and backward
  pass), and experts balanced by biases (which change in between).

The planner never chooses it.

## Custom schedules

`layout.schedule: mine.csv` (relative to the recipe) names a file with one line per rank and one cell per action: stage,
F, B, I or W, microbatch. This is 1F1B for two ranks and three microbatches:

```
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
```

Any stage may be on any rank. A schedule is refused if an action is missing, duplicated or can never run; the error
names the action and its missing dependency.

## Equality with one process

Tests compare every schedule except `pipedream-2bw` with one process in float64: loss, every gradient, and every weight
after a step, with tied and untied embeddings, with recomputation, under DDP and all ZeRO stages
(`tests/test_pipeline.py`), and under tensor and context parallelism ([equivalence](equivalence.md)). If the first and
the last stage are on different ranks, each rank has a copy of a tied embedding; their gradients are summed, and the
copies stay bit-identical. If one rank has both stages, it has one parameter.

Schedules that split the backward pass cannot be combined with `training.compile`, because a compiled block computes
both parts at once.
"""


def page() -> str:
    """The text of docs/schedules.md."""
    return "\n".join([BEGIN, *_table(), *(line for name in SCHEDULES for line in _picture(name)), END])


def _table() -> Iterator[str]:
    yield "| schedule | stages per rank | bubble | time | in flight, rank by rank |"
    yield "|---|---|---|---|---|"
    for name, kind in SCHEDULES.items():
        schedule = build_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
        costs = StageCosts.equal(schedule.num_stages)
        timeline = simulate(schedule, costs)
        per_rank = f"{kind.stages_per_rank}" if kind.fixed else f"any, here {kind.stages_per_rank}"
        # Where a rank has several stages, each is as much shorter.
        time, bubble, versions = timeline.duration / kind.stages_per_rank, timeline.bubble, ""
        if kind.asynchronous:
            time, bubble, versions = steady_seconds(schedule, costs), steady_bubble(schedule, costs), "; weights twice"
        flying = ", ".join(map(str, in_flight(schedule)))
        yield f"| `{name}` | {per_rank} | {bubble:.1%} | {time:g} | {flying}{versions} |"
    yield ""


def _picture(name: str) -> Iterator[str]:
    schedule = build_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    schedule = two_steps(schedule) if is_asynchronous(name) else schedule
    picture = simulate(schedule, StageCosts.equal(schedule.num_stages)).picture()
    yield f"## {name}\n\n{SOURCES[name]}\n\n```\n{picture}\n```\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")

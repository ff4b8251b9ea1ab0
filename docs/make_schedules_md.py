"""Writes docs/schedules.md from the schedules themselves: run it after changing one (a test notices)."""

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
    "zbv": "Stages go down the ranks and up again, so that one has the first and the last: Qi et al., 2024, section 6.",
    "dualpipev": "DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: DualPipe, cut in half.",
    "pipedream-2bw": "**Not the training of one process**: gradients are a step late (below). Narayanan et al., "
    "*Memory-Efficient Pipeline-Parallel DNN Training*, 2021. Two steps of a stream that goes on: 0 to 7 are the first "
    "one's microbatches, 8 to f the second one's. Once filled there is no bubble.",
}

BEGIN = f"""\
# Pipeline schedules

`layout: {{pp: 4}}` gives each of four ranks a quarter of the layers; `layout.schedule` says which rank runs which
microbatch when. A schedule is data (`spec/schedule.py`): what is executed is what stands here, and bubble and memory
are read off it. `meshwright check` prints both for a recipe, with its own stages and microbatches.

Below: {RANKS} ranks, {MICROBATCHES} microbatches, every stage taking 1 for its forward pass F, 1 for its input's
gradient I and 1 for its weights' W; a whole backward pass B takes 2. The upper line numbers the microbatch, the lower
one says what is done with it; small letters are the rank's later stages', dots are the bubble.

*In flight*: the most microbatches of a stage whose activations a rank keeps at once. A rank with two stages has half
as many layers in each, so 8 of them weigh as much as 4 of a rank with one.
"""

END = """\
## Stages

Layers are cut so that the heaviest stage, the head's work included, is as light as can be: exactly, by dynamic
programming over operations. `layout.stage_layers: [7, 8, 8, 7]` sets them by hand; they may be of any length.
`layout.stages_per_rank` sets how many stages a rank has where the schedule leaves it open.

Microbatches are the accumulation steps: `training.global_batch / (data-parallel ranks x micro_batch)`. A number that a
schedule cannot use is refused with the nearest that it can.

## Steps that overlap: `pipedream-2bw`

All schedules above empty the pipeline before the optimizer steps: that is their bubble, and why they compute what one
process computes. `pipedream-2bw` lets the next step's forward passes begin while this step's backward passes are still
under way (PipeDream, Narayanan et al., 2019). A microbatch's backward pass must have the weights of its forward pass,
so each rank keeps two versions of its weights, that of the newest batch and that of the batch before, and the optimizer
steps with the gradient of the batch before:

    W(t + 1) = W(t) - step(gradient of batch t - 1 at W(t - 1))

on all stages alike (PipeDream-2BW, 2021). The first PipeDream updates each stage as soon as it can: its gradients are
later the earlier the stage, and it keeps a version per rank that follows. Here no gradient is more than one step late.

- **What it saves**: the whole bubble. A step of M microbatches takes 3 M units on every rank, from the second one on.
- **What it costs**: memory for a second version of the weights and a second gradient, and the step's delay. For P
  parameters of a rank in bf16: 2 P + 2 P bytes of weights to compute with instead of 2 P, 4 P + 4 P of gradients
  instead of 4 P. Activations are those of 1F1B.
- **What it trains to**: the same region, a little behind. The small model of [verify](verify.md), over 4 stages: the
  losses of steps 91 to 100 are 2.55 on average, one process's 2.45.
- **When it is emptied**: before a checkpoint, of which there is one at the end and at a stop by signal, too. Then the
  late gradient is applied, so that every batch's gradient is applied once, and what is saved is plain weights and
  optimizer state, which any layout continues; after it the pipeline fills again. So a run depends on
  `checkpoint.every`, and one that is stopped where a checkpoint was due anyway continues as if it had not been.
- `verify` says that it is different by design, with exit status 1. Instead `tests/test_pipedream.py` holds it, in
  float64, to one process whose gradients are a step late: every loss, norm and weight of six steps, tied embeddings,
  recomputation, clipping, Muon, experts, replicas and context parallelism among them.
- It goes with `dp_replicate` and `cp`. ZeRO is refused (it is to save the very memory that versions take), and so are
  `tp`, `ep`, offload, adapters, fp16 (its loss scale may change between forward and backward pass), and experts
  balanced by biases (which do change in between).

The planner never chooses it.

## A schedule of your own

`layout.schedule: mine.csv` (relative to the recipe) reads a line per rank and a cell per action: stage, F, B, I or W,
microbatch. This is 1F1B for two ranks and three microbatches:

```
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
```

Any stage may be on any rank. What is missing, done twice or can never run is refused, with the action and what it
waits for.

## What is equal to one process

Every schedule but `pipedream-2bw` is held to one process in float64: loss, every gradient, and every weight after a
step, with tied and untied embeddings, with recomputation, under DDP and all ZeRO stages (`tests/test_pipeline.py`), and
under tensor and context parallelism ([equivalence](equivalence.md)). Where the first and the last stage are on
different ranks, each has a copy of a tied embedding; their gradients are added, and both stay equal bit for bit. Where
one rank has both, there is one parameter.

Schedules that split the backward pass do not go with `training.compile`: a compiled block computes both parts at once.
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
    PAGE.write_text(page(), encoding="utf-8")

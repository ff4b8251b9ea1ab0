"""Writes docs/engines.md from docs/engines.json, which is the compare.json of two comparisons (see `RUNS`)."""

import json
from pathlib import Path
from typing import Any

from meshwright.engines.engine import InexpressibleError, TemplateEngine
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = (Path(__file__).with_name(name) for name in ("engines.md", "engines.json"))
RECIPE = ROOT / "src" / "meshwright" / "recipes" / "compare.yaml"
LAYOUTS = {"single": "one process", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3 (FSDP)",
           "ddp2+zero3:2": "hybrid", "tp2": "tensor", "pp2": "pipeline"}  # fmt: skip
EXPRESSED = {
    "bf16": "training.precision=bf16",
    "fp16": "training.precision=fp16",
    "accumulation": "training.micro_batch=1",
    "recomputation, full": "training.recompute=full",
    "recomputation, selective": "training.recompute=selective",
    "torch.compile": "training.compile=true",
    "Muon": "training.optimizer.name=muon",
    "documents packed whole": "data.packing=best_fit",
    "LoRA": "finetune={method: lora}",
    "checkpoints": "checkpoint.every=10",
}

INTRODUCTION = """\
# Other engines

`meshwright compare run.yaml` trains one recipe in several engines and measures them side by side:

```
$ meshwright compare run.yaml
$ meshwright compare run.yaml --engines meshwright,bare,hf_trainer --quick
$ meshwright compare run.yaml --layouts ddp,zero1,zero2,zero3,tp2
$ meshwright compare a.yaml b.yaml
```

`make compare` does it with a small Llama on any machine. Install the engines with `pip install
'meshwright[compare]'`.

## What is the same

- **Tokens.** Every program reads our token file with numpy, and a file that says at which token each sample begins.
  Engines deal samples to ranks in their own ways; each step's global batch is the same set.
- **Weights.** The run's starting weights are written once as a Hugging Face directory in fp32. Dropout is 0.
- **Loss.** The sum over the tokens of a microbatch, divided by the tokens of the global batch. So accumulation and
  ranks add up to the mean in every engine, also where an engine's default does not.
- **Optimizer.** AdamW with every constant given: defaults differ (DeepSpeed and the Trainer clip at 1.0, PyTorch
  decays by 0.01, the Trainer by 0). Weight decay on matrices and embeddings only; the schedule's factor is computed
  in the program.
- **Time.** Engines take turns on one machine: A B C, then C B A, and so on, a few steps each. While one computes, all
  ranks of the others wait. Speeds are medians over all timed steps; the ratio of single rounds gives the range.
- **Threads.** Each rank has the machine's cores divided by the ranks, as our launcher gives them. (`torchrun` alone
  gives each rank one thread.)

What differs is the rest: transformers' model or ours, how gradients are reduced, how mixed precision is done, what
happens in a step beside its arithmetic. That is what is compared.

## The program

Each engine's folder holds `run_ENGINE_standalone.py`, which is what ran. It needs nothing of ours, has the recipe's
numbers in it, and starts with `python` or `torchrun`. It writes `metrics.jsonl` with our names ([what they
mean](metrics.md)): `step`, `loss`, `gnorm`, `lr`, `tokens`, `mem`, and `seconds` of this step.

After its first step a program reads back what trained: the wrappers around the model, the class of its parameters,
and how many elements of parameters and of AdamW's moments this rank holds. If a layout was asked for and another one
ran, the engine gets an error in the place of figures. This happens: on a machine without GPUs, Accelerate's FSDP and
DeepSpeed plug-ins and the Trainer's `fsdp=` are `DistributedDataParallel` in silence, and Accelerate without
`cpu=True` trains once in every process.

`meshwright export run.yaml --engine deepspeed --program handed-over` writes the program of a whole run, with its
configuration, its first weights and the order of all its samples.

## Held to the truth

`meshwright verify run.yaml --engine hf_trainer` trains a shrunk model for two steps in the engine's program and on
our one process, from the same weights on the same random tokens, in fp32. The program dumps every gradient and every
weight after the step by its Hugging Face name. They are compared with [the tolerance of verify](verify.md), times the
number of the step, because the program goes on from its own weights. The first difference in the order of computation
is named: the loss, the gradient of a parameter, the norm, or the update of a parameter.

```
$ meshwright verify run.yaml --engine hf_trainer
$ meshwright verify run.yaml --engine deepspeed layout.dp_shard=2
```

Tests plant faults in three engines' programs, and each is located: a loss over a token too few of each row (the
loss), a forgotten factor of the accumulation (the gradients, by that factor), a default clip (the clipped gradient),
weight decay on norms (their update).

## What each engine can express

**yes**: in the program. *left out*: the program does without, and no loss changes by it. no: refused by name, because
it would be another training. (On a CPU.)
"""


def page() -> str:
    """The page as text."""
    recipe = load_recipe(RECIPE)
    names = list(ENGINES)
    lines = [INTRODUCTION, f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for layout, name in LAYOUTS.items():
        run = recipe.model_copy(update={"layout": layout_called(layout)})
        lines.append(f"| {name} | {' | '.join(_verdict(engine, run) for engine in names)} |")
    for name, override in EXPRESSED.items():
        run = load_recipe(RECIPE, [override])
        path = override.split("=")[0]
        lines.append(f"| {name} | {' | '.join(_verdict(engine, run, path) for engine in names)} |")
    results: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    if results:
        lines += ["", "## Measured", "", MEASURED]
    for result in results:
        lines += [*_measured(result), ""]
    return "\n".join([*lines, "", NOT_YET])


def _verdict(engine: str, run: Run, path: str = "") -> str:
    if not isinstance(ENGINES[engine], TemplateEngine):
        return "**yes**"
    try:
        translation = ENGINES[engine].translate(resolve_run(run, base_dir=ROOT))
    except InexpressibleError:
        return "no"
    return "*left out*" if any(setting.path == path for setting in translation.left_out) else "**yes**"


MEASURED = """\
A Llama of 4 layers and width 256 (`recipes/compare.yaml`), fp32, on a small machine without a GPU that others used at
the same time. These are ratios on a CPU with a small model; they say nothing about GPUs.
"Loss differs" is the largest difference of a step's loss, in nats, from our trainer's.
"""

NOT_YET = """\
## Not yet

Megatron-core, nanoGPT, litgpt, peft, trl, axolotl, torchtitan: no adapters. Samples that are packed whole,
and fine-tuning by adapters: other engines refuse them. Programs have run on CPUs only; on GPUs they are not tested.
"""


def _measured(result: dict[str, Any]) -> list[str]:
    lines = [
        f"`{result['command']}`; {result['machine']}; {result['versions']}; {result['steps']}.",
        "",
        "| engine | tokens/s | x ours | rounds | peak GiB | first step s | loss differs | lines |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["engines"]:
        if row["error"]:
            lines.append(f"| {row['name']} | | | | | | | {row['lines'] or ''} |")
            continue
        low, high = row["ratio_of_rounds"]
        lines.append(
            f"| {row['name']} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f} | {low:.2f}-{high:.2f} | "
            f"{row['peak_bytes'] / 2**30:.2f} | {row['first_step_seconds']:.1f} | {row['max_loss_difference']:.1e} | "
            f"{row['lines']} |"
        )
    return [*lines, "", *(f"- {row['name']}: {row['error']}" for row in result["engines"] if row["error"])]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Writes docs/engines.md from benchmarks/results/*-engines.json, lists of the compare.json of comparisons.

Of comparisons with one `title` the newest file's is shown.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.engines.engine import InexpressibleError, TemplateEngine
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES
from meshwright.families import PRESETS, resolve_model
from meshwright.plan.blueprint import blueprint
from meshwright.plan.candidate import evaluate
from meshwright.plan.hardware import resolve_cluster
from meshwright.plan.job import MESHWRIGHT, Job
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.spec.recipe import load_recipe
from meshwright.trainer.resolve import resolve_run
from meshwright.validate.software import EAGER, FSDP, MEGATRON

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("engines.md")
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-engines.json"))
RECIPE = ROOT / "src" / "meshwright" / "recipes" / "compare.yaml"
LAYOUTS = {
    "single": "one process",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3 (FSDP)",
    "ddp2+zero3:2": "hybrid",
    "tp2": "tensor",
    "tp2+zero3:2": "tensor x ZeRO-3",
    "cp2": "context",
    "zero3:2+ep2": "expert",
    "pp2": "pipeline",
}
MIXTRAL = "model={family: mixtral, hidden: 256, num_layers: 4, num_heads: 8, num_experts: 4, balance_loss: 0}"
GPT2 = "model={family: gpt2, hidden: 256, num_layers: 4, num_heads: 8}"  # fmt: skip
EXPRESSED = {
    "bf16": "training.precision=bf16",
    "fp16": "training.precision=fp16",
    "state in host memory": "layout={dp_shard: 2, zero: 2, offload: {optimizer: host}}",
    "state on disk": "layout={dp_shard: 2, zero: 3, offload: {optimizer: disk}}",
    "accumulation": "training.micro_batch=1",
    "recomputation, full": "training.recompute=full",
    "recomputation, selective": "training.recompute=selective",
    "torch.compile": "training.compile=true",
    "Muon": "training.optimizer.name=muon",
    "documents packed whole": "data.packing=best_fit",
    "records, a row each": "data.packing=padded data.separate_documents=true",
    "LoRA": "finetune={method: lora}",
    "QLoRA": "finetune={method: qlora}",
    "pairs of answers (DPO)": "training.preference={} data.packing=padded data.separate_documents=true",
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

`make compare` runs it with a small Llama on any machine, in minutes. `pip install 'meshwright[compare]'` installs
Accelerate, transformers and Lightning Fabric; `'meshwright[deepspeed]'`, `[lightning]`, `[megatron]`, `[litgpt]`,
`[peft]` and `[trl]` install these.
`--install` installs each missing engine into an environment of its own under `~/.cache/meshwright/engines`, on top of
this Python's torch and packages; later runs use it without network. `--python deepspeed=PATH/TO/python` names an
environment of yours. nanoGPT is not a package: name its folder with `--checkout nanogpt=PATH/TO/nanoGPT`.

| engine | what trains |
|---|---|
| `bare` | a plain loop: DDP, ZeroRedundancyOptimizer, FSDP2 |
| `transformers` | a plain loop over a model that transformers splits (`DistributedConfig`): FSDP2, tensor, expert |
| `hf_trainer` | transformers' `Trainer`: DDP, and FSDP2 by `DistributedConfig` |
| `accelerate` | `Accelerator`: DDP |
| `fabric`, `lightning` | Lightning's Fabric and its Trainer: DDP; FSDP2, tensor, and both, by `ModelParallelStrategy` |
| `deepspeed` | ZeRO 0 to 3, hpZ, AutoTP, Ulysses, 1F1B pipeline, state in host memory and on disk |
| `megatron` | Megatron-core's GPT model of local layers: tensor parallel, DDP; 1F1B and interleaved pipeline |
| `litgpt` | LitGPT's model under Fabric, on one process |
| `nanogpt` | nanoGPT's model and optimizer, and DDP as in its train.py |
| `peft` | peft's adapters (LoRA, DoRA, rsLoRA, IA3) under the `Trainer`, on one process and under DDP |
| `trl` | trl's `SFTTrainer` with its own loss, for whole models and adapters; `DPOTrainer` for pairs of answers |

## What is the same

- **Tokens.** Every program reads our token file with numpy, and a file with the first token of each sample. For records
  (conversations, pairs of answers) it reads the rows of tokens and labels that our trainer trains on. Engines
  distribute samples to ranks in different ways; each step's global batch is the same set.
- **Weights.** The run's starting weights are written once as a Hugging Face directory in fp32, and adapters in peft's
  format. Dropout is 0.
- **Loss.** The sum over the trained tokens of a microbatch, divided by those of the global batch. So microbatches and
  ranks add up to the mean in every engine, even if an engine's default differs. (trl computes its own loss.)
- **Optimizer.** AdamW with every constant set explicitly, because defaults differ (DeepSpeed and the Trainer clip at
  1.0, PyTorch decays by 0.01, the Trainer by 0). Weight decay applies to matrices and embeddings only; the program
  computes the schedule's factor.
- **Time.** Engines take turns on one machine: A B C, then C B A, and so on, a few steps each. While one computes, all
  ranks of the others wait. Speeds are medians over all timed steps; the ratio of single rounds gives the range.
- **Threads.** Each rank gets the machine's cores divided by the number of ranks, as under our launcher. (`torchrun`
  alone gives each rank one thread.)

The comparison covers everything else: transformers' model or ours, gradient reduction, mixed precision, and the
overhead of a step.

## The program

Each engine's folder holds the program that ran, `run_ENGINE_standalone.py`. It has no dependency on Meshwright,
contains the recipe's values, and starts with `python` or `torchrun`. It writes `metrics.jsonl` with [our
names](metrics.md): `step`, `loss`, `gnorm`, `lr`, `tokens`, `mem`, and `seconds` of this step. trl reports
its use to its makers; the program switches that off.

After its first step a program inspects what trained: the wrappers around the model, the class of its parameters, and
the number of elements of parameters and of AdamW's moments on this rank. If the layout differs from the requested one,
the engine's row is an error instead of figures. This happens: on a machine without GPUs, Accelerate's FSDP and
DeepSpeed plug-ins and the Trainer's `fsdp=` silently become `DistributedDataParallel`, and Accelerate without
`cpu=True` trains separately in every process. If more than the data is split, the program also counts the rank's share
of the layers' matrices, and Lightning's and transformers' the axes of the mesh along which placements split something;
DeepSpeed's reports what is in host memory, the bytes on disk, how many ranks share a sample, and a rank's secondary
shard under hpZ.
Programs with adapters count what trains; more or less than the recipe's adapters is an error.

A program ends with its recipe as a comment. `meshwright import run_ENGINE_standalone.py` converts the program back to a
recipe, with the constants as they are in the program now ([importing](importing.md)).

DeepSpeed compiles operators at its first use (minutes). If this is killed, PyTorch's builder leaves a file `lock` in
the operator's folder under `~/.cache/torch_extensions` (or `TORCH_EXTENSIONS_DIR`), and every later run waits for it
in silence until `--patience` ends it. Remove the file when nothing compiles.

DeepSpeed keeps state on disk under ZeRO-3 only, through its operator for asynchronous IO, which needs libaio
(`apt install libaio-dev`). Groups of parameters of less than 1 MiB stay in memory; if nothing is on disk, the engine's
row is an error. The program's files lie in `layout.offload.directory`, by default in the folder `offload` beside it,
and are removed after the last step. Parameters on disk (`layout.offload.parameters: disk`) are refused: on a CPU
without fp16, version 0.19.8 writes them in bf16 even if the training computes in fp32.

Megatron-core 0.16.1 allocates on a GPU whatever the device: a count of tokens at the start of every pipeline schedule
(`torch.zeros([], dtype=torch.int, device="cuda")` in `pipeline_parallel/schedules.py`), the last stage's copy of tied
embeddings, and what a stage receives. The program's `TorchFunctionMode` puts the first two onto the program's device,
and the schedule gets a `p2p_communicator` that receives there; nothing of Megatron-core is replaced. So the program
runs its `forward_backward_pipelining_without_interleaving` (`layout.pp`) and `..._with_interleaving`
(`layout.schedule=interleaved-1f1b`), also with tensor parallelism. It reports the schedule, the layers of every stage
and the tensors sent, and other ones than the layout's are an error.

Under DeepSpeed's Ulysses a rank holds a part of each sample. Version 0.19.8 adds up the gradients of a sample's ranks
under ZeRO 1 and 2, and averages them under ZeRO 3 (there the default `reduce_scatter` divides by all ranks). The
program multiplies the loss accordingly; a script that moves from stage 2 to stage 3 must do so itself. Losses hardly
show it, because Adam does not depend on the gradient's scale: the norm does, and clipping
([a reproducer](findings.md#gradients-of-a-shared-sample-in-deepspeed)).

`meshwright export run.yaml --engine deepspeed --program handed-over` writes the program of a whole run, with its
configuration, initial weights and the order of all samples.

## Written, not run here

`export` also writes what only a GPU or the other system itself can run. `compare` and `verify --engine` refuse these
names, with the reason.

| `--engine` | what is written | who checked it here |
|---|---|---|
| `hf_trainer_fsdp` | the `Trainer` with `fsdp` and `fsdp_config` (FSDP2) | transformers 5.23.0's `TrainingArguments` |
| `accelerate_fsdp` | `Accelerator` with the FSDP2 plug-in, hybrid sharding too | Accelerate 1.15.0's plug-in |
| `accelerate_deepspeed` | `Accelerator` with the DeepSpeed plug-in and `ds_config.json` \
| Accelerate's plug-in, DeepSpeed 0.19.8's configuration |
| `deepspeed` with `layout.quantized_weights=int8`, `quantized_gradients=int4` | ZeRO++'s qwZ and qgZ \
| DeepSpeed 0.19.8's configuration |
| `torchtitan` | `run_torchtitan.py`, for `--module run_torchtitan --config run` \
| torchtitan 0.3.0's `ConfigManager`; its schedule, decay groups and model sizes |
| `megatron_lm` | `pretrain.sh` with the flags of `pretrain_gpt.py` \
| the parser and `validate_args` of Megatron-LM's main branch of 2026-08-22 (0.20.0), its schedule |
| `megatron_bridge` | `megatron_bridge.yaml`, NeMo's configuration since 2025 \
| Megatron-Bridge's `ConfigContainer.from_yaml`, main branch of 2026-08-22 |
| `nanotron` | `nanotron.yaml`, for `run_train.py --config-file` \
| the `get_config_from_file` of Nanotron's main branch of 2026-04-07; its schedule and decay groups |
| `automodel` | `automodel.yaml`, for NVIDIA's NeMo AutoModel: `automodel FILE` \
| the loader of AutoModel's main branch of 2026-08-22, its typed sections; its schedule and optimizer, as built |
| `llama_factory` | `llama_factory.yaml` and the `dataset_info.json` of its data \
| the argument parser and table reader of LLaMA-Factory's main branch of 2026-08-18; transformers' schedules |
| `axolotl` | `axolotl.yaml` for the fine-tuning of a Hugging Face directory \
| `AxolotlInputConfig` of axolotl's main branch of 2026-07-24 |

```
$ meshwright export run.yaml --engine torchtitan --program handed-over
$ meshwright export run.yaml --engine megatron_lm --program handed-over
```

A program for GPUs ends at once on a CPU, and says why: there the packages would train with DDP in silence. Programs of
the Trainer and of Accelerate's FSDP2 plug-in were run on two CPU processes with that choice forced to FSDP: five steps
had the losses and norms of DDP, to 5e-7. They have not run on GPUs.

A configuration names the recipe's own model and data. Our importer reads the file back while it is written: a setting
that comes back otherwise is refused by name, and one that changes no weight is listed in `left-out.md`, with what the
system does in its own way:

- torchtitan starts to lower the rate a step later, and reaches the same last rate; its sizes 1B and 3B scale rope by 8,
  the published models by 32, so the file says 32; norms and biases get a group without decay.
- Megatron's rate starts at 0, so every step has the rate of the step before it here. It reads token files (`NAME.bin`
  with `NAME.idx`, which `data.cache_dir` has), and does not start from Hugging Face weights.
- Nanotron's rate starts at 0, too. It decays norms unless it is told their names, and its code for these names fails
  where no parameter is tied: weight decay needs tied embeddings there. It reads `rope_scaling`, but never uses it, so a
  model with scaled rope is refused.
- AutoModel's rate starts at 0, too, because the file says so: by default its warm-up starts at a tenth of the rate.
  Norms and biases get a group without decay. It cannot be told not to clip.
- axolotl's rate starts at 0, too. ZeRO-3 is its FSDP2, under which 8-bit AdamW is torchao's: it refuses bitsandbytes'.
- LLaMA-Factory's rate starts at 0, too. It looks for `dataset_info.json` in the folder where it is started. The file
  says no sharding, because that is in a DeepSpeed JSON of its own.
- Megatron-FSDP (ZeRO-2 and -3) must not find `CUDA_DEVICE_MAX_CONNECTIONS=1`, which its other layouts need; the script
  sets it where it must.

`pytest --engines tests/test_engines_schemas.py` repeats the checks where the systems are installed; it says how.

## Proof against one process

`meshwright verify run.yaml --engine hf_trainer` trains a shrunk model for two steps in the engine's program and on
our one process, from the same weights on the same random tokens, in fp32. The program dumps every gradient and every
weight after the step by its Hugging Face name. They are compared with [the tolerance of verify](verify.md) times the
number of the step, because the program continues from its own weights. The report names the first difference in the
order of computation: the loss, the gradient of a parameter, the norm, or the update of a parameter.

```
$ meshwright verify run.yaml --engine hf_trainer
$ meshwright verify run.yaml --engine deepspeed layout.dp_shard=2
$ meshwright verify run.yaml --engine fabric layout.tp=2
```

Tests plant faults in three engines' programs, and each is located: a loss that omits one token of each row (the loss),
a missing accumulation factor (the gradients, by that factor), a default clip (the clipped gradient), weight decay on
norms (their update).

## What each engine can express

**yes**: in the program. *left out*: the program omits it, without effect on any loss. no: refused by name, because the
training would differ. (On a CPU. nanogpt trains GPT-2; the others train a Llama, and a Mixtral for expert parallelism;
peft trains a Llama's adapters.)
"""


def page() -> str:
    """The page as text."""
    names = list(ENGINES)
    lines = [INTRODUCTION, f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for layout, name in LAYOUTS.items():
        verdicts = (_verdict(engine, [MIXTRAL] if name == "expert" else [], layout=layout) for engine in names)
        lines.append(f"| {name} | {' | '.join(verdicts)} |")
    for name, override in EXPRESSED.items():
        first, *more = override.split(" data.")
        words, path = [first, *(f"data.{word}" for word in more)], first.split("=")[0]
        lines.append(f"| {name} | {' | '.join(_verdict(engine, words, path) for engine in names)} |")
    lines += ["", "## Measured", "", MEASURED]
    results: dict[str, dict[str, Any]] = {
        result["title"]: result for file in RESULTS for result in json.loads(file.read_text())
    }
    for result in results.values():
        lines += [*_measured(result), ""]
    return "\n".join([*lines, PREDICTED, *_predicted(), "", NOT_YET])


def _verdict(engine: str, overrides: list[str], path: str = "", layout: str | None = None) -> str:
    if not isinstance(ENGINES[engine], TemplateEngine):
        return "**yes**"
    own = {"nanogpt": GPT2, "peft": EXPRESSED["LoRA"]}
    run = load_recipe(RECIPE, [*([own[engine]] if engine in own else []), *overrides])
    run = run if layout is None else run.model_copy(update={"layout": layout_called(layout)})
    try:
        translation = ENGINES[engine].translate(resolve_run(run, base_dir=ROOT))
    except InexpressibleError:
        return "no"
    return "*left out*" if any(setting.path == path for setting in translation.left_out) else "**yes**"


MEASURED = """\
Every table is from a committed run (`benchmarks/results/*-engines.json`): a small model of 4 layers and width 256
(`recipes/compare.yaml`), fp32, on a small shared machine without a GPU. Its load, beside each table, counts the
programs of others too: above about 4 the speeds say little (look at the range of rounds), while losses and memory
stand. These are ratios on a CPU with a small model; they say nothing about GPUs. "Loss differs" is the largest
difference of a step's loss from our trainer's, in nats. Two engines are not in these tables,
because they train something else: nanogpt a GPT-2 (`benchmarks/results/2026-11-21-engines.md`), and peft adapters
(`benchmarks/results/2026-11-21-finetune.md`).
"""

PREDICTED = """\
## Published claims for 8 GPUs

Comparisons on the web give one table for an 8B model on 8 x H100: NeMo in fp8 is 100 % at 40 GB, NeMo in bf16 60 % at
60 GB, DeepSpeed 55 % at 45 GB, FSDP 50 % at 50 GB, Hugging Face DDP 40 % at 70 GB. They do not say how it was measured.
The table shows **predictions** of our planner, not measurements: each program with the defaults fitted to its published
runs ([prediction errors](plan-validation.md)), 8192 tokens per sample, 16 samples per GPU and step, the fastest
recomputation that fits. Each range covers its own row; the uncertainty of NeMo in fp8, the unit, comes on top.

| | speed, claimed | predicted | memory, claimed | predicted | |
|---|---:|---:|---:|---:|---|"""


def _predicted() -> Iterator[str]:
    """A line for each program."""
    eight, h100 = (
        blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path())),
        resolve_cluster("8xh100", base_dir=Path()),
    )
    base = Job(model=eight, sequence=8192, global_batch=128, micro_batch=1, layout=LayoutSpec(dp_shard=8, zero=3))
    tuned = replace(MEGATRON, overlap_tensor=True)
    jobs = {
        "NeMo, fp8": (1.0, 40, replace(base.with_layout(zero=1), precision=Precision.of("fp8"),
                                       stack=replace(tuned, gradient_bytes=2.0, reduce_bytes=2.0))),
        "NeMo, bf16": (0.6, 60, replace(base.with_layout(zero=1), stack=tuned)),
        "DeepSpeed ZeRO-3": (0.55, 45, replace(base, stack=EAGER)),
        "FSDP": (0.5, 50, replace(base, stack=FSDP)),
        "Hugging Face DDP": (0.4, 70, replace(base.with_layout(dp_shard=1, dp_replicate=8, zero=0), stack=EAGER)),
        "Meshwright ZeRO-3": (None, None, replace(base, stack=MESHWRIGHT)),
    }  # fmt: skip
    whole = None
    for name, (speed, memory, job) in jobs.items():
        policies = [evaluate(replace(job, recompute=policy), h100) for policy in ("none", "selective", "full")]
        fitting = [found for found in policies if found.verdict != "does not fit"]
        best = min(fitting or policies[-1:], key=lambda found: found.cost)
        whole = whole or best.time.total
        low, high = whole / best.seconds.high, whole / best.seconds.low
        held = (
            f"{best.memory.total / 1e9:.0f} GB ({best.memory_bytes.low / 1e9:.0f}-{best.memory_bytes.high / 1e9:.0f})"
        )
        fast = f"{whole / best.time.total:.0%} ({low:.0%}-{high:.0%})" if fitting else "-"
        if not fitting:
            verdict = "does not fit, even with full recomputation"
        elif speed is None:
            verdict = ""
        else:
            where = "inside" if low <= speed <= high else "above" if speed > high else "below"
            verdict = "the unit" if speed == 1 else f"the claimed speed is {where} the range"
        shown = ("", "") if speed is None else (f"{speed:.0%}", f"{memory} GB")
        yield f"| {name} | {shown[0]} | {fast} | {shown[1]} | {held}, recompute {best.job.recompute} | {verdict} |"


NOT_YET = """\
## Not yet

Nothing is written for LLM-Foundry, nor for Lightning's `FSDPStrategy` and
`DeepSpeedStrategy`. There is no engine for Megatron-core's distributed optimizer, nor for replicas of its pipelines.
Only the Trainer, peft and trl read records. Programs have run on CPUs only; on GPUs they are not tested.
"""


def _measured(result: dict[str, Any]) -> list[str]:
    lines = [
        f"### {result['title']}",
        "",
        f"`{result['command']}`; {result['date']}; {result['machine']}; {result['versions']}; {result['steps']}.",
        "",
        *([result["note"], ""] if "note" in result else []),
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

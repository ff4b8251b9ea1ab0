"""Writes docs/engines.md from benchmarks/results/*-engines.json, lists of the compare.json of comparisons.

Of comparisons with one `title` the newest file's is shown.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.engines.engine import InexpressibleError, TemplateEngine
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES
from meshwright.families import PRESETS, resolve_model
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import evaluate
from meshwright.predict.hardware import resolve_cluster
from meshwright.predict.job import MESHWRIGHT, Job
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
Accelerate, transformers and Lightning Fabric; the extras `[deepspeed]`, `[lightning]`, `[megatron]`, `[litgpt]`,
`[peft]` and `[trl]` install those engines. `--install` installs each missing or outdated engine into its own
environment under `~/.cache/meshwright/engines`, on top of this Python's torch and packages; later runs need no network.
Use it where extras conflict: LitGPT 0.5.13 requires an older huggingface-hub than transformers 5.23, so pip installs an
older transformers beside it, without the sharding that `hf_trainer` and `transformers` use. `--python
deepspeed=PATH/TO/python` uses an existing environment. nanoGPT is not a package: pass its folder with `--checkout
nanogpt=PATH/TO/nanoGPT`.

| engine | what trains |
|---|---|
| `bare` | a plain loop: DDP, ZeroRedundancyOptimizer, FSDP2 |
| `transformers` | a plain loop over a transformers model sharded by `DistributedConfig`: FSDP2, tensor, expert |
| `hf_trainer` | transformers' `Trainer`: DDP, FSDP2 through `DistributedConfig` |
| `accelerate` | `Accelerator`: DDP |
| `fabric`, `lightning` | Lightning's Fabric and Trainer: DDP; FSDP2, tensor, or both, with `ModelParallelStrategy` |
| `deepspeed` | ZeRO 0 to 3, hpZ, AutoTP, Ulysses, 1F1B pipeline, state in host memory and on disk |
| `megatron` | Megatron-core's GPT model with local layers: tensor parallelism, DDP, 1F1B and interleaved pipelines |
| `litgpt` | LitGPT's model under Fabric, on one process |
| `nanogpt` | nanoGPT's model and optimizer; DDP as in its `train.py` |
| `peft` | peft's adapters (LoRA, DoRA, rsLoRA, IA3) under the `Trainer`, on one process and under DDP |
| `trl` | trl's `SFTTrainer` with its own loss, for full fine-tuning and adapters; `DPOTrainer` for preference pairs |

## What is the same

- **Tokens.** Every program reads our token file with numpy, and an index of each sample's first token. For records
  (conversations, preference pairs) it reads the rows of tokens and labels that our trainer trains on. Engines
  distribute samples over ranks differently, but every step's global batch holds the same samples.
- **Weights.** The initial weights are written once: a Hugging Face directory in fp32, adapters in peft's format.
  Dropout is 0.
- **Loss.** The sum over a microbatch's trained tokens, divided by the number of trained tokens in the global batch.
  Microbatches and ranks therefore add up to the mean in every engine, whatever its default. (trl computes its own
  loss.)
- **Optimizer.** AdamW with every constant set explicitly, because defaults differ (DeepSpeed and the Trainer clip at
  1.0, PyTorch decays by 0.01, the Trainer by 0). Weight decay applies to matrices and embeddings only; the program
  computes the schedule's factor.
- **Time.** Engines alternate on one machine, a few steps each: A B C, then C B A, and so on. While one computes, the
  ranks of all others wait. Speeds are medians over all timed steps; the range comes from the ratios of single rounds.
- **Threads.** Each rank gets the machine's cores divided by the number of ranks, as under our launcher. (`torchrun` by
  itself gives each rank one thread.)

Everything else differs and is what the comparison measures: the model's code, gradient reduction, mixed precision, and
overhead per step.

## The program

Each engine's folder holds the program that ran, `run_ENGINE_standalone.py`. It contains the recipe's values, does not
import Meshwright, and starts with `python` or `torchrun`. It writes `metrics.jsonl` with [our names](metrics.md):
`step`, `loss`, `gnorm`, `lr` and `tokens`. It disables trl's usage telemetry.

Measuring is in `measure.py` beside it, which runs the program with another `Log`: it adds `mem` and the step's
`seconds`, waits between turns, and writes gradients and weights for `verify --engine`.

After the first step, `measure.py` checks the layout that the program got: the wrappers around the model, the class of
its parameters, and how many elements of the parameters and of AdamW's moments this rank holds. If this is not the
requested layout, the engine's row shows an error instead of figures. It happens: on a machine without GPUs,
Accelerate's FSDP and DeepSpeed plug-ins and the Trainer's `fsdp=` silently become `DistributedDataParallel`, and
Accelerate without `cpu=True` trains separately in every process.

Under layouts that split more than the data, it also counts this rank's share of the layers' matrices. For Lightning
and transformers it reports the mesh axes along which placements shard something; for DeepSpeed the state in host
memory, the bytes on disk, the ranks per sample, and the rank's secondary shard under hpZ; for adapters the trainable
parameters; a number other than the recipe's is an error.

DeepSpeed compiles operators on first use. On a CPU it compiles the operator that reduces in shared memory, even for one
process: about 90 s of CPU time, and 1109 s on a machine of 2 cores with a load of 30. This time does not count against
`--patience`. If the build is killed, PyTorch's builder leaves a file `lock` in the operator's folder under
`~/.cache/torch_extensions` (or `TORCH_EXTENSIONS_DIR`), and every later run waits for it without a message until
`--patience` ends the run. The error names the file. Delete it when no build is running.

DeepSpeed keeps state on disk under ZeRO-3 only, with its asynchronous-IO operator, which needs libaio (`apt install
libaio-dev`). Parameter groups smaller than 1 MiB stay in memory; if nothing is on disk, the engine's row is an error.
The files are in `layout.offload.directory`, by default the folder `offload` beside the program, and are deleted after
the last step. Parameters on disk (`layout.offload.parameters: disk`) are refused: on a CPU without fp16, DeepSpeed
0.19.8 writes them in bf16 even when it computes in fp32.

Megatron-core 0.16.1 allocates three kinds of tensors on a GPU, whatever the device: a token count at the start of every
pipeline schedule (`torch.zeros([], dtype=torch.int, device="cuda")` in `pipeline_parallel/schedules.py`), the last
stage's copy of tied embeddings, and the buffers a stage receives into. The program redirects the first two to its
device with a `TorchFunctionMode`, and passes the schedule a `p2p_communicator` that receives there; it patches nothing
in Megatron-core. So it runs Megatron's own `forward_backward_pipelining_without_interleaving` (`layout.pp`) and
`..._with_interleaving` (`layout.schedule=interleaved-1f1b`), also with tensor parallelism. `measure.py` reports the
schedule, each stage's layers and the tensors sent; a mismatch with the layout is an error.

Under DeepSpeed's Ulysses, several ranks share each sample. Version 0.19.8 sums the gradients of these ranks under
ZeRO-1 and -2, but averages them under ZeRO-3, where the default `reduce_scatter` divides by all ranks. The program
scales the loss to compensate; a script that moves from stage 2 to stage 3 must do so itself. The loss curve hardly
shows the difference, because Adam is invariant to the gradient's scale; the gradient norm and clipping do
([reproducer](findings.md#gradients-of-a-shared-sample-in-deepspeed)).

## A whole run

`meshwright export run.yaml --engine deepspeed --program handed-over` writes the same program, without `measure.py`, for
a whole run: with configuration, initial weights, tokenizer, tokens and the order of all samples. The folder can be
moved. `--output DIR` names another folder for what the program writes:

| | |
|---|---|
| `metrics.jsonl` | a line a step; a step that is trained again after a stop has two |
| `checkpoints/` | every `checkpoint.every` steps (`--save-every N`) and after the last; `keep_last` stay |
| `model/` | the trained model as a Hugging Face directory, or peft's adapters, with the tokenizer |

Started again, a program goes on from its last complete checkpoint. It then computes bit by bit what an uninterrupted
run does; tests compare them for every engine above except nanoGPT and LitGPT, and not for programs that need GPUs.
Each saves in its engine's way:

| engine | checkpoints |
|---|---|
| `bare`, `transformers` | `torch.distributed.checkpoint` where parameters are sharded, else `torch.save` |
| `nanogpt`, `megatron` | `torch.save`, a file a rank |
| `hf_trainer`, `peft`, `trl` | `save_strategy` and `resume_from_checkpoint` of the Trainer |
| `accelerate` | `save_state`, `load_state`, `skip_first_batches` |
| `fabric`, `litgpt` | `fabric.save`, `fabric.load` |
| `lightning` | `ModelCheckpoint`, `ckpt_path`; a sampler skips what is trained, as the Trainer does not |
| `deepspeed` | `save_checkpoint`, `load_checkpoint` |

The Trainer cannot resume a model that transformers has sharded (`hf_trainer` under ZeRO-3): that program saves only the
trained model, and `left-out.md` says so. A checkpoint is for the number of ranks that wrote it, except
`torch.distributed.checkpoint`'s. `checkpoint.keep_every` and `keep_best` are left out.

## Written, not run here

`export` also writes programs and configurations that only a GPU or the target system can run. `compare` and `verify
--engine` refuse these engines, with the reason.

| `--engine` | output | checked here by |
|---|---|---|
| `hf_trainer_fsdp` | the `Trainer` with `fsdp` and `fsdp_config` (FSDP2) | transformers 5.23.0's `TrainingArguments` |
| `accelerate_fsdp` | `Accelerator` with the FSDP2 plug-in, hybrid sharding too | Accelerate 1.15.0's plug-in |
| `accelerate_deepspeed` | `Accelerator` with the DeepSpeed plug-in and `ds_config.json` \
| Accelerate's plug-in, DeepSpeed 0.19.8's configuration |
| `fabric_fsdp`, `lightning_fsdp` | Fabric and Lightning's Trainer with `FSDPStrategy` (FSDP1), hybrid sharding too \
| Lightning 2.6.6's strategies |
| `fabric_deepspeed`, `lightning_deepspeed` | the same with `DeepSpeedStrategy` and `ds_config.json` \
| Lightning's strategies, DeepSpeed 0.19.8's configuration |
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
| `llm_foundry` | `llm_foundry.yaml`, for `composer train.py FILE`: fine-tuning of a Hugging Face directory \
| `TrainConfig` of LLM-Foundry's main branch of 2025-07-21; its optimizer groups, Composer's schedules and update |
| `axolotl` | `axolotl.yaml` for the fine-tuning of a Hugging Face directory \
| `AxolotlInputConfig` of axolotl's main branch of 2026-07-24 |

```
$ meshwright export run.yaml --engine torchtitan --program handed-over
$ meshwright export run.yaml --engine megatron_lm --program handed-over
```

A program for GPUs ends at once on a CPU and names the reason: the packages would train with DDP without a message, or
refuse. The programs of the first five lines were run on two CPU processes with the packages' choice forced to FSDP or
DeepSpeed (FSDP1 requires an accelerator, and got one whose streams do nothing). Five steps had the losses and norms of
DDP, to 5e-7. They have not run on GPUs. The programs handle what these runs showed:

- Under Accelerate's plug-in with ZeRO-3, transformers builds the model in flat parts. Groups by `parameter.dim()` put
  every matrix among the vectors, without weight decay; a tensor's own shape is its `ds_shape`.
- Lightning 2.6.6's Trainer divides the loss by the accumulation, and DeepSpeed 0.19.8's `backward` divides it again,
  under every ZeRO stage. Losses hide the error, because Adam does not depend on the gradient's scale; the norm and
  clipping show it ([reproducer](findings.md#accumulation-in-lightnings-trainer-with-deepspeed)).
- Fabric 2.6.6's `optimizer.step()` does not recognise DeepSpeed 0.19.8's engine and steps the optimizer inside it. The
  engine then has no norm. With an accumulation above 1 in the configuration, ZeRO-3 updates at every call instead of
  accumulating, and ZeRO-1 and -2 fail. With 1 and a call after the last microbatch, ZeRO-1 and -2 use that microbatch
  only; this comes from DeepSpeed ([reproducer](findings.md#accumulation-in-fabric-with-deepspeed)). The program
  configures the accumulation and calls the engine's `step`.

FSDP1 without synchronisation keeps gradients in the compute dtype, so programs with `FSDPStrategy` reduce every
microbatch.

An exported configuration names the recipe's model and data. Export reads each file back with our importer: a setting
that changes on the way is refused by name, and a setting without effect on the weights is listed in `left-out.md`. That
file also lists how the system differs:

- torchtitan starts to decay the learning rate one step later and reaches the same final rate. Its sizes 1B and 3B scale
  rope by 8, the published models by 32, so the file sets 32. Norms and biases get a group without weight decay.
- Megatron's learning rate starts at 0, so each step uses the rate that our previous step used. Megatron reads token
  files (`NAME.bin` and `NAME.idx`, found in `data.cache_dir`) and cannot start from Hugging Face weights.
- Nanotron's learning rate also starts at 0. It decays norms unless it is given their names, and its code for these
  names fails unless a parameter is tied, so exporting weight decay needs tied embeddings. It reads `rope_scaling` but
  never applies it, so a model with scaled rope is refused.
- AutoModel's learning rate starts at 0, as the file sets it; its default warm-up starts at a tenth of the rate. Norms
  and biases get a group without weight decay. Gradient clipping cannot be disabled.
- axolotl's learning rate also starts at 0. ZeRO-3 becomes its FSDP2, where 8-bit AdamW is torchao's, because axolotl
  refuses bitsandbytes' there.
- LLaMA-Factory's learning rate also starts at 0. It reads `dataset_info.json` from the working directory. The file sets
  no sharding, which LLaMA-Factory takes from a separate DeepSpeed JSON.
- LLM-Foundry's learning rate also starts at 0. Its `decoupled_adamw` multiplies the weight decay by the schedule's
  factor only, so the file sets the recipe's decay times the rate. Norms and biases get a group without weight decay. It
  trains on messages, or on prompts and completions. It reads token streams from Mosaic's shards only, so
  `data.packing=concatenated` is refused. Its packing does not isolate records.
- Megatron-FSDP (ZeRO-2 and -3) must run without `CUDA_DEVICE_MAX_CONNECTIONS=1`, which other Megatron layouts need; the
  script sets it for those only.

`pytest --engines tests/test_engines_schemas.py` repeats the checks where the systems are installed; the file explains
how to install them.

## Proof against one process

`meshwright verify run.yaml --engine hf_trainer` trains a shrunken model for two steps in fp32, once in the engine's
program and once in our trainer on one process, from the same weights and random tokens. The program dumps every
gradient and every updated weight under its Hugging Face name. The tolerance is [verify's](verify.md) times the step
number, because the program continues from its own weights. The report names the first difference in order of
computation: the loss, a parameter's gradient, the norm, or a parameter's update.

```
$ meshwright verify run.yaml --engine hf_trainer
$ meshwright verify run.yaml --engine deepspeed layout.dp_shard=2
$ meshwright verify run.yaml --engine fabric layout.tp=2
```

Tests plant faults in the programs of three engines and check where `verify` locates each one: a loss that omits one
token per row (the loss), a missing accumulation factor (the gradients, with the factor), a default clip (the clipped
gradient), weight decay on norms (their update).

## What each engine can express

**yes**: the program does it. *left out*: the program omits it, which changes no loss. no: refused by name, because
training would differ. The table holds for a CPU. nanogpt trains GPT-2, peft the adapters of a Llama, all others a Llama
(for expert parallelism a Mixtral).
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
Every table is from a committed run (`benchmarks/results/*-engines.json`) of a small model with 4 layers and width 256
(`recipes/compare.yaml`), in fp32, on a machine without a GPU on which nothing else ran. An engine whose range of rounds
contains 1 is not measurably faster or slower than ours here. The ratios hold for a CPU and a small model, not for GPUs.
"Loss differs" is the largest difference from our trainer's loss at any step, in nats. Two engines have tables elsewhere
because they train something else: nanogpt a GPT-2 (`benchmarks/results/2026-11-21-engines.md`), peft adapters
(`benchmarks/results/2026-11-21-finetune.md`).
"""

PREDICTED = """\
## Published claims for 8 GPUs

One table for an 8B model on 8 x H100 circulates on the web: NeMo in fp8 is 100 % at 40 GB, NeMo in bf16 60 % at 60 GB,
DeepSpeed 55 % at 45 GB, FSDP 50 % at 50 GB, Hugging Face DDP 40 % at 70 GB. Nobody says how it was measured. The table
below shows **predictions** of our planner, not measurements: 8192 tokens per sample, 16 samples per GPU and step, the
fastest recomputation that fits, and each program's defaults as fitted to its published runs ([prediction
errors](plan-validation.md)). Each range covers its own row only; the uncertainty of the unit, NeMo in fp8, comes on
top.

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

The Megatron-core engine supports neither the distributed optimizer nor data-parallel replicas of a pipeline. Only the
Trainer, peft and trl read records. Programs have run on CPUs only; they are untested on GPUs.
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
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")

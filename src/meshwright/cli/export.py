"""The verb `export`: writes a trained model as a Hugging Face directory or a GGUF file, or its adapters in peft's
format, each verified by the programs that read it, or the run as another engine's program."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from meshwright.checkpoint.peft_config import CONFIG, unread_by_vllm
from meshwright.cli.common import add_ema_argument, add_family_argument, example_prompt, next_commands, note_weights
from meshwright.cli.output import add_json_argument, print_result, progress_on_stderr
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.precision import FP32, FP64, ComputeName, GgufName
from meshwright.spec.text import command, quoted

if TYPE_CHECKING:
    from meshwright.handover.receipt import Receipt
    from meshwright.serve.trained import TrainedModel

WRITTEN_ONLY = (
    "an export-only one: axolotl, torchtitan, megatron_lm, megatron_bridge, nanotron, automodel, "
    "llama_factory, llm_foundry; for GPUs hf_trainer_fsdp, accelerate_fsdp, accelerate_deepspeed, "
    "fabric_fsdp, fabric_deepspeed, lightning_fsdp, lightning_deepspeed"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `export`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="run directory, checkpoint or Hugging Face directory (with --program also a recipe)",
    )
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="with --program and a recipe: override a setting"
    )
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--hf", metavar="DIR", type=Path, help="write a Hugging Face directory; it must not exist")
    into.add_argument("--gguf", metavar="FILE", type=Path, help="write a GGUF file, for llama.cpp and LM Studio")
    into.add_argument(
        "--ollama", metavar="DIR", type=Path, help="write a GGUF file with a Modelfile, for ollama create"
    )
    into.add_argument("--hub", metavar="OWNER/NAME", help="push a Hugging Face directory and a model card to the hub")
    into.add_argument("--adapter", metavar="DIR", type=Path, help="write only the adapters, in peft's format")
    into.add_argument(
        "--program", metavar="DIR", type=Path, help="write the run as a program of --engine, with its inputs"
    )
    parser.add_argument("--engine", metavar="NAME", help=f"with --program: an engine of compare, or {WRITTEN_ONLY}")
    parser.add_argument("--license", metavar="ID", help="with --hub: the model's license, such as apache-2.0")
    parser.add_argument("--private", action="store_true", help="with --hub: make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="with --hub: show what would be pushed; send nothing")
    parser.add_argument("--merge", action="store_true", help="merge adapters into the weights")
    parser.add_argument(
        "--dtype",
        choices=[name for name in get_args(ComputeName) if name != FP64.name],
        help="with --hf and --hub: dtype of the stored weights (default: the run's precision)",
    )
    parser.add_argument(
        "--format",
        choices=get_args(GgufName),
        help="with --gguf and --ollama: format of the matrices (default: the run's precision)",
    )
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        type=Path,
        help="with --hf, --hub and --adapter: also read it back in vLLM; the Python of vLLM's environment",
    )
    add_ema_argument(parser)
    add_family_argument(parser)
    add_json_argument(parser)
    parser.epilog = (
        "An export appears only after the installed programs have read it back with equal logits, tokens and chat\n"
        "template: meshwright and transformers, peft for adapters, llama.cpp for GGUF\n"
        f"({install('gguf')}), vLLM with --vllm. receipt.json records which programs, and how closely they agree.\n\n"
        "examples:\n"
        "  meshwright export runs/demo --hf runs/demo/export\n"
        "  meshwright export runs/demo --gguf demo-q8_0.gguf --format q8_0\n"
        "  meshwright export runs/lora --adapter runs/lora/adapter\n"
        "  meshwright export runs/lora --hf runs/lora/merged --merge\n"
        "  meshwright export runs/demo --hub owner/demo --license apache-2.0 --dry-run\n"
        "  meshwright export run.yaml layout.dp_shard=2 --engine deepspeed --program handed-over\n"
        "  meshwright export run.yaml --engine torchtitan --program handed-over"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export and print the largest difference of the logits."""
    if bool(arguments.engine) != bool(arguments.program):
        raise UserError("--engine and --program go together: --engine deepspeed --program DIR")
    if arguments.program:
        return _hand_over(arguments)
    if arguments.overrides:
        raise UserError(f"'{arguments.overrides[0]}': settings are overridden with --program and a recipe only")
    if arguments.adapter and (arguments.merge or arguments.dtype):
        raise UserError("--merge and --dtype are about whole models, written with --hf; leave them out")
    if not arguments.hub and (arguments.license or arguments.private or arguments.dry_run):
        raise UserError("--license, --private and --dry-run go with --hub OWNER/NAME; leave them out")
    if arguments.dtype and not (arguments.hf or arguments.hub):
        raise UserError("--dtype goes with --hf and --hub; a GGUF file's matrices have a --format")
    if arguments.format and not (arguments.gguf or arguments.ollama):
        raise UserError("--format goes with --gguf and --ollama; a Hugging Face directory's weights have a --dtype")
    if arguments.vllm and (arguments.gguf or arguments.ollama):
        raise UserError("--vllm goes with --hf, --hub and --adapter; GGUF files are read back by llama.cpp")
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.trained import open_trained

    trained = open_trained(
        arguments.model, device="cpu", dtype=FP32.name, averaged=arguments.ema, family=arguments.family
    )
    note_weights(trained)
    if arguments.hub:
        return _push(arguments, trained)
    return (_export_adapter if arguments.adapter else _export_model)(arguments, trained)


def _push(arguments: argparse.Namespace, trained: "TrainedModel") -> int:
    from meshwright.handover.hub import Repository, push_export

    pushed, receipt = push_export(
        trained,
        Repository(name=arguments.hub, license=arguments.license, private=arguments.private),
        dtype=arguments.dtype,
        merge=arguments.merge,
        dry_run=arguments.dry_run,
        vllm=arguments.vllm,
    )
    destination = {"repository": pushed.repository, "url": pushed.url, "files": pushed.files, "card": pushed.card}
    what = f"would be pushed to {pushed.repository}" if pushed.url is None else f"pushed to {pushed.url}"
    lines = [f"{trained.source} {what} in {receipt.dtype}; read back by", *_read_back(receipt)]
    lines += [f"  {size:>12,}  {name}" for name, size in pushed.files.items()]
    if pushed.url is None:
        lines.append(f"\n{pushed.card}")
    print_result(
        arguments,
        {
            "model": str(trained.source),
            **destination,
            "dtype": receipt.dtype,
            "readings": receipt.as_json()["readings"],
        },
        lines,
    )
    return 0


def _read_back(receipt: "Receipt") -> list[str]:
    return [f"  {line}" for line in receipt.lines()]


def _export_adapter(arguments: argparse.Namespace, trained: "TrainedModel") -> int:
    from meshwright.handover.adapters import export_adapter
    from meshwright.handover.vllm_receipt import vllm_rank

    parameters, receipt = export_adapter(trained, arguments.adapter, vllm=arguments.vllm)
    config = json.loads((arguments.adapter / CONFIG).read_text(encoding="utf-8"))
    base, name = config["base_model_name_or_path"] or "BASE", arguments.adapter.name
    commands = [command("serve", base, "--adapter", f"{name}={arguments.adapter}")]
    if unread_by_vllm(arguments.adapter):
        commands.append(f"{command('export', arguments.model, '--merge', '--hf', 'DIR')}   # for vLLM and SGLang")
    else:
        base, named = quoted(base), quoted(f"{name}={arguments.adapter}")
        lora = f"--lora-modules {named} --max-lora-rank {vllm_rank(arguments.adapter)}"
        commands.append(f"{_vllm_server(arguments)} {base} --enable-lora {lora}")
        commands.append(f"python -m sglang.launch_server --model-path {base} --lora-paths {named}")
    facts = {
        "model": str(trained.source),
        "adapter": str(arguments.adapter),
        "parameters": parameters,
        "largest_logit_difference": receipt.largest_difference,
        "readings": receipt.as_json()["readings"],
    }
    summary = f"{trained.source} written to {arguments.adapter}: {parameters} parameters, in fp32; read back by"
    print_result(arguments, facts, [summary, *_read_back(receipt), next_commands(commands)])
    return 0


def _export_model(arguments: argparse.Namespace, trained: "TrainedModel") -> int:
    from meshwright.handover.export import export_gguf, export_ollama, export_trained

    into, merge = arguments.hf or arguments.gguf or arguments.ollama, arguments.merge
    if arguments.hf:
        receipt = export_trained(trained, into, dtype=arguments.dtype, merge=merge, vllm=arguments.vllm)
    elif arguments.gguf:
        receipt = export_gguf(trained, into, form=arguments.format, merge=merge)
    else:
        receipt = export_ollama(trained, into, form=arguments.format, merge=merge)
    facts = {
        "model": str(trained.source),
        "directory" if into.is_dir() else "file": str(into),
        "dtype": receipt.dtype,
        "largest_logit_difference": receipt.largest_difference,
        **{key: receipt.as_json()[key] for key in ("readings", "proved", "notes")},
    }
    summary = f"{trained.source} written to {into} in {receipt.dtype}; read back by"
    commands = _next(arguments, trained.spec.max_positions, chats=trained.tokenizer.chat_template is not None)
    print_result(arguments, facts, [summary, *_read_back(receipt), next_commands(commands)])
    return 0


def _vllm_server(arguments: argparse.Namespace) -> str:
    """The command that starts vLLM's server, up to the model: with the Python of `--vllm`, if given. `vllm serve` does
    not start in every build (docs/handover.md); this module does."""
    if not arguments.vllm:
        return "vllm serve"
    return f"{quoted(arguments.vllm)} -m vllm.entrypoints.openai.api_server --model"


def _next(arguments: argparse.Namespace, context: int, *, chats: bool) -> list[str]:
    """Commands that use the exported files."""
    if arguments.gguf:
        return [f"llama-server -m {quoted(arguments.gguf)} --jinja"]
    if arguments.ollama:
        return [shlex.join(["ollama", "create", arguments.ollama.name, "-f", f"{arguments.ollama}/Modelfile"])]
    folder = quoted(arguments.hf)
    return [
        f"{command('generate', arguments.hf)} {example_prompt(has_template=chats)}",
        f"{_vllm_server(arguments)} {folder} --max-model-len {context}",
        f"python -m sglang.launch_server --model-path {folder} --context-length {context}",
        f"text-generation-launcher --model-id {folder} --max-total-tokens {context}",
    ]


def _hand_over(arguments: argparse.Namespace) -> int:
    """Write the run as another engine's program."""
    from meshwright.engines.handover import hand_over, run_at
    from meshwright.engines.registry import find_engine

    if arguments.merge or arguments.dtype or arguments.ema:
        raise UserError("--merge, --dtype and --ema do not apply to --program; leave them out")
    engine = find_engine(arguments.engine, written=True)
    with progress_on_stderr(arguments.json):
        translation = hand_over(run_at(arguments.model, arguments.overrides), engine, arguments.program)
    left_out = {setting.path: setting.reason for setting in translation.left_out}
    facts = {
        "directory": str(arguments.program),
        "engine": engine.name,
        "files": [*translation.files, *([] if engine.reads_sources else ["start", "data"])],
        "left_out": left_out,
        "notes": list(translation.notes),
    }
    lines = [f"{arguments.model} written to {arguments.program} as {translation.program}, {translation.lines} lines"]
    lines += [f"left out    {path}: {reason}" for path, reason in left_out.items()]
    lines += [f"its own way {note}" for note in translation.notes]
    print_result(arguments, facts, lines)
    return 0

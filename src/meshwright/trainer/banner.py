"""The summary of a run that is printed before it trains."""

from meshwright.data.describe import describe_formats, describe_mixture
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import Corpus
from meshwright.families import count_trained, describe_low_precision, parameter_table
from meshwright.families.wrapped import describe_files
from meshwright.models.attention_kernels import describe_kernel
from meshwright.models.dtypes import torch_dtype
from meshwright.models.low_precision import RECIPES, has_kernel
from meshwright.parallel.compile import describe_compile
from meshwright.predict.stages import describe_pipeline
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.fit import context_method
from meshwright.spec.recompute import describe_recompute
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.text import counted
from meshwright.trainer.display import model_size, short
from meshwright.trainer.out_of_memory import shortage
from meshwright.trainer.setup import Trainer, attention_needs
from meshwright.trainer.verification import describe
from meshwright.trainer.weights import left_out_weights


def banner(trainer: Trainer, corpus: Corpus) -> str:
    """The summary of model, data, batch and layout that is printed before training."""
    resolved, run, model = trainer.resolved, trainer.resolved.run, trainer.resolved.model
    trained, everything = count_trained(model, run.finetune)
    weights = sum(row.numel for row in parameter_table(model))
    held_out = short(corpus.num_held_out) if corpus.held_out else "none"
    samples, num_samples = training_samples(corpus, run.data), resolved.global_batch * run.training.steps
    mixture = describe_mixture(corpus, samples, num_samples)
    warmup = run.training.lr_schedule.warmup_steps(run.training.steps)
    peak, origin = trainer.peak
    compiled = f", {describe_compile(run.training.compile_mode, run.training.compile_scope)}" * run.training.compile
    lines = {
        "model": f"{run.model.name or model.family}: {model_size(weights, everything - weights, trained)}; "
        f"{model.num_layers} layers, width {model.hidden}, {model.num_heads} heads, vocabulary {model.vocab}",
        "files": describe_files(model),
        "left out": left_out_weights(resolved),
        "base": _kept_base(run),
        "data": f"{short(corpus.num_tokens)} tokens of {corpus.num_documents} documents, held out {held_out}; "
        f"tokenizer of {corpus.tokenizer.vocab_size}",
        "records": describe_formats(corpus),
        "packing": resolved.reasons.get("data.packing", ""),
        "template": resolved.reasons.get("data.chat.template", ""),
        "note": corpus.note,
        "batch": f"{resolved.tokens_per_step} tokens a step = {counted(run.layout.data_parallel, 'rank')} x "
        f"{counted(resolved.accumulation, 'microbatch')} x {counted(resolved.micro_batch, 'sequence')} x "
        f"{run.data.sequence_length}",
        "length": f"{run.training.steps} steps, {warmup} of them warm-up, {mixture}",
        "objective": str(trainer.train_step.passes.objective),
        "strategy": f"{run.layout.strategy}, {run.training.arithmetic}, "
        f"recompute {describe_recompute(resolved.recompute)}{compiled}",
        "memory": _memory(resolved),
        "attention": _attention(trainer),
        "products": _products(trainer),
        "kernels": f"{trainer.kernels.chosen}, measured: {trainer.kernels}" if trainer.kernels else "",
        "pipeline": describe_pipeline(resolved) if run.layout.pp > 1 else "",
        "devices": f"{trainer.worker.world_size} x {trainer.machine.name}, "
        f"mfu against {peak / 1e12:.3g} TFLOP/s ({origin})" + f"; {trainer.machine.note}" * bool(trainer.machine.note),
        "verified": describe(run.guards.verify_every) if run.guards.verify_every else "",
        "writes": run.run_dir,
    }
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items() if text)


def _memory(resolved: ResolvedRun) -> str:
    """The changes that `auto` made so that the run fits, and a warning where it is predicted not to; empty if
    neither."""
    chosen = ("training.recompute", "layout.offload")
    changes = [f"{name}={resolved.reasons[name]}" for name in chosen if name in resolved.reasons]
    missing = shortage(resolved)
    return "; ".join(changes + [f"{missing}: likely to run out; meshwright check names a remedy"] * bool(missing))


def _attention(trainer: Trainer) -> str:
    """The attention kernel; empty if a strategy or the model computes attention in another way."""
    run, requests = trainer.resolved.run, attention_needs(trainer.resolved, trainer.device)
    parts = run.layout.cp > 1 and context_method(run.layout, trainer.resolved.model, run.data.sequence_length)[0]
    if trainer.resolved.model.foreign is not None or parts in ("ring", "all_gather"):
        return ""
    kernels = {one.window: describe_kernel(run.training.attention, one) for one in requests}
    if len(set(kernels.values())) == 1:
        return kernels[requests[0].window]
    return "; ".join(f"{kernel} for a window of {window or 'all tokens'}" for window, kernel in kernels.items())


def _products(trainer: Trainer) -> str:
    """The low-precision products and their kernels; empty without low precision."""
    resolved, training = trainer.resolved, trainer.resolved.run.training
    if training.product_recipe is None:
        return ""
    kernel = has_kernel(RECIPES[training.product_recipe], trainer.device, torch_dtype(training.dtypes.compute))
    how = "with this GPU's kernels" if kernel else "emulated, because this device has no native kernel"
    return f"{describe_low_precision(parameter_table(resolved.model), training)}; {how}"


def _kept_base(run: Run) -> str:
    """The storage of frozen matrices; empty if they are not quantized."""
    finetune = run.finetune
    if not isinstance(finetune, LoraSpec) or finetune.base == "plain":
        return ""
    scales = ", with 8-bit scales" if finetune.base == "nf4" and finetune.double_quantization else ""
    return f"frozen matrices of linear layers in {finetune.base}{scales}; everything else in {run.training.precision}"

"""Use of a trained model from a run or a Hugging Face directory: generation, evaluation, export."""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.callbacks import EMA
from meshwright.checkpoint.dcp import held_tensors, load_tensors
from meshwright.checkpoint.hf import HfWeights
from meshwright.checkpoint.manifest import MANIFEST, CheckpointError, list_checkpoints
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.data.chat import ask
from meshwright.data.defaults import with_packing
from meshwright.data.loader import BatchShare, evaluation_batches
from meshwright.data.mixture import all_samples, held_out_samples
from meshwright.data.packing import Samples
from meshwright.data.prepare import StartingModel, prepare_corpus
from meshwright.data.readers import told_apart
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.devices import CPU, on_cpu
from meshwright.families import parameter_table, pretrained_directory, read_hf_directory, state_table
from meshwright.families.hub import cached_snapshot
from meshwright.families.quantized import split_misfit
from meshwright.families.wrapped import kept_config
from meshwright.finetune import apply_finetune
from meshwright.machine import find_machine
from meshwright.models import Decoder, build_model, named_state, named_tensors
from meshwright.models.dtypes import torch_dtype
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.generate import Sampling
from meshwright.models.packed import pack
from meshwright.objectives import NextToken
from meshwright.parallel import WholeModel
from meshwright.parallel.materialize import materialize
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.serve.engine import InferenceEngine, requests_of
from meshwright.serve.from_disk import (
    checkpoint_model_from_disk,
    hf_model_from_disk,
    is_to_stay_on_disk,
    memory_explained,
)
from meshwright.serve.token_ids import end_ids, model_config
from meshwright.spec.data import DataSpec, SourceSpec
from meshwright.spec.errors import UserError
from meshwright.spec.fit import find_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.device import choose_device
from meshwright.trainer.evaluate import Evaluation, evaluate, joined
from meshwright.trainer.folder import RESOLVED, read_resolved, records_of
from meshwright.trainer.resolve import ENOUGH_TOKENS
from meshwright.trainer.weights import base_of, check_base, kept_weights

Show = Callable[[str], None]
MAX_TOKENS = 128
"""Default number of new tokens of a continuation."""
Weights = Literal["memory", "disk", "auto"] | DeviceMesh
"""Where weights are: in memory; blocks on disk; blocks on disk if they do not fit into free memory; split over the
ranks of a tensor-parallel axis."""
AVERAGED = f"callbacks.{EMA.__name__}."
"""Prefix of averaged weights in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with its weights on one device, and the tokenizer it was trained with."""

    source: Path
    """The checkpoint, or the Hugging Face directory."""
    spec: ModelSpec
    model: Decoder
    tokenizer: TextTokenizer
    tokenizer_dir: Path
    device: torch.device
    run: ResolvedRun | None
    """The run it comes from; None for a Hugging Face directory."""
    ranks: DeviceMesh | None = None
    """The tensor-parallel ranks that share it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of generation that users choose."""

    sampling: Sampling
    max_tokens: int | None = None
    """Most new tokens; None: a default, or the rest of the context."""
    stops: Sequence[str] = ()
    """Stop strings."""


def open_trained(
    path: Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    averaged: bool = False,
    family: str | None = None,
    weights: Weights = "memory",
) -> TrainedModel:
    """Open the newest checkpoint of the run directory `path`, one checkpoint, a Hugging Face directory, or a hub id in
    the local cache.

    `dtype` is fp32, bf16, fp16 or fp64; by default a run's precision, and for a Hugging Face directory fp32
    on a CPU and bf16 on a GPU. `averaged`: use the moving average of the weights from the callback `EMA`.
    `family`: transformers, to compute a Hugging Face directory's model with that library. `weights`: where they are.

    Raises `UserError` if `path` is none of them or has no average, `CheckpointError` if a file is missing or damaged.
    """
    place = choose_device(find_machine(device), 0 if isinstance(weights, str) else weights.get_local_rank())
    if not path.exists():
        with contextlib.suppress(ValueError):  # reported below
            path = cached_snapshot(str(path), "config.json", "*.safetensors") or path
    if family is not None and ((path / MANIFEST).is_file() or (path / RESOLVED).is_file()):
        raise UserError(f"{path} belongs to a run, whose recipe sets the family; leave --family out")
    saved = [path] if (path / MANIFEST).is_file() else list_checkpoints(path / "checkpoints")
    if saved:
        with memory_explained(f"the weights of {saved[-1]}"):
            return _from_checkpoint(saved[-1], place, dtype, averaged, weights)
    if (path / RESOLVED).is_file():
        raise CheckpointError(f"{path}: has no checkpoint yet")
    if averaged and path.is_dir():
        raise UserError(f"{path} is neither a run nor a checkpoint, so it has no averaged weights; leave --ema out")
    if (path / "config.json").is_file():
        with memory_explained(f"the weights of {path}"):
            return _from_hf_directory(path, place, dtype, family, weights)
    what = f"has no {RESOLVED} and no config.json" if path.is_dir() else "no such directory"
    what = "is a file" if path.is_file() else what
    raise UserError(
        f"{path}: {what}; give a run directory, one of its checkpoints, a Hugging Face directory, or the hub id of "
        "a model in the local cache (hf download ID)"
    )


def continue_texts(
    trained: TrainedModel,
    prompts: Sequence[str],
    settings: Settings,
    *,
    report: Show = lambda line: None,
    stream: Show = lambda part: None,
) -> list[str]:
    """The continuation of each prompt, by default of 128 tokens or the rest of the context; an empty one starts a
    document. `report` is called with the speed, `stream` with each part. Raises `UserError` if a text does not fit."""
    ids = [trained.tokenizer.encode_prompt(prompt) or [trained.tokenizer.eos_id] for prompt in prompts]
    return _answers(trained, ids, set(), settings, (report, stream))


def answer_texts(
    trained: TrainedModel,
    prompts: Sequence[str],
    settings: Settings,
    *,
    system: str | None = None,
    report: Show = lambda line: None,
    stream: Show = lambda part: None,
) -> list[str]:
    """The answer to each prompt in its own conversation, as `continue_texts`; `UserError` too without a template."""
    ids, ends = ask(trained.tokenizer, prompts, system)
    return _answers(trained, ids, ends, settings, (report, stream))


def evaluate_texts(
    trained: TrainedModel,
    *,
    sources: Sequence[str] | None = None,
    sequence_length: int | None = None,
    num_samples: int | None = None,
) -> Evaluation:
    """Loss on the text of `sources` (files, globs or `stdlib`, relative to the working directory), and on each of
    several.

    Without sources, on the run's held-out text. All text counts, or `num_samples` evenly spaced samples, shared by the
    sources.

    Raises `UserError` if there is no text, or the model was not meant for `sequence_length` positions.
    """
    recipe = trained.run.run if trained.run else None
    length = sequence_length or (recipe.data.sequence_length if recipe else min(1024, trained.spec.max_positions))
    if length > trained.spec.max_positions:
        raise UserError(f"sequence length {length}: the model supports at most {trained.spec.max_positions}")
    ranks = trained.ranks
    if ranks is not None and length % ranks.size():
        raise UserError(
            f"sequence length {length}: is not divisible by the {ranks.size()} ranks that share each sequence"
        )
    named = _held_out(trained, length) if sources is None else _samples_of(trained, sources, length)
    micro_batch, everything = max(1, ENOUGH_TOKENS[trained.device.type] // length), sum(map(len, named.values()))
    parts = {}
    for name, samples in named.items():
        count = None if num_samples is None else -(-num_samples * len(samples) // everything)
        share = BatchShare(padding="cut" if ranks is None else "kept")
        batches = evaluation_batches(samples, share, micro_batch=micro_batch, num_samples=count)
        passes = WholeModel(trained.model, NextToken())
        repeats = ranks is not None and ranks.get_local_rank() > 0
        parts[name] = evaluate(passes, batches, trained.device, repeats_loss=repeats)
    return joined(parts)


def config_of(trained: TrainedModel) -> dict[str, Any]:
    """The config.json that the model was trained from; empty if it had none, or if the file no longer exists."""
    if (kept := kept_config(trained.spec)) is not None:
        return kept
    with contextlib.suppress(UserError):
        return model_config(directory_of(trained))
    return {}


def directory_of(trained: TrainedModel) -> Path | None:
    """The Hugging Face directory of the model, or the one that its run started from (`UserError` if that is gone)."""
    if trained.run is None:
        return trained.source
    return pretrained_directory(trained.run.run.model, base_dir=Path(trained.run.base_dir))


def _answers(
    trained: TrainedModel,
    prompts: Sequence[Sequence[int]],
    ends: Collection[int],
    settings: Settings,
    listeners: tuple[Show, Show],
) -> list[str]:
    """The text after each prompt, up to one of `ends` or the end of a text."""
    max_tokens, all_ends = settings.max_tokens, end_ids(trained.tokenizer, config_of(trained)).union(ends)
    if max_tokens is None:
        max_tokens = max(1, min(MAX_TOKENS, trained.spec.max_positions - max(map(len, prompts))))
    requests = requests_of(prompts, all_ends, max_tokens=max_tokens, sampling=settings.sampling, stops=settings.stops)
    with memory_explained("the answers"):
        pack(trained.model)
        start = time.perf_counter()
        engine = InferenceEngine(trained.model, decode=trained.tokenizer.decode)
        answers = [engine.submit(request, lambda _, __, text: listeners[1](text)) for request in requests]
        while engine.step():
            pass
    seconds, tokens = time.perf_counter() - start, sum(len(one.tokens) for one in answers)
    listeners[0](f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.3g} tokens/s")
    return [answer.text for answer in answers]


def _held_out(trained: TrainedModel, length: int) -> dict[str, Samples]:
    if trained.run is None:
        raise UserError(f"{trained.source} is not a run, so it has no held-out text; give a text with --source")
    if trained.run.run.training.preference is not None:
        raise UserError(
            "the run was trained on preferences, whose held-out loss is in metrics.jsonl; give a text with --source"
        )
    # With the run's own tokenizer: if the data have changed since, `auto` would train another.
    data = trained.run.run.data.model_copy(update={"tokenizer": str(trained.tokenizer_dir.resolve())})
    corpus = corpus_of(trained.run.model_copy(update={"run": trained.run.run.model_copy(update={"data": data})}))
    if not corpus.held_out:
        raise UserError("the run has no held-out text (data.held_out is 0); give a text with --source")
    joint = held_out_samples(corpus, data.model_copy(update={"sequence_length": length}))
    return dict(zip((stream.name for stream in corpus.streams if stream.held_out), joint.streams, strict=True))


def _samples_of(trained: TrainedModel, sources: Sequence[str], length: int) -> dict[str, Samples]:
    """All text of the sources, separately for each, packed like the run's own."""
    own = trained.run.run.data if trained.run else DataSpec()
    packed = {"packing": own.packing, "separate_documents": own.separate_documents}
    data = DataSpec(
        sources=tuple(SourceSpec(path=source, name=source if len(sources) > 1 else None) for source in sources),
        tokenizer=str(trained.tokenizer_dir.resolve()),
        sequence_length=length,
        # A text run, and a Hugging Face directory, give no packing for records.
        **(packed if own.packing != "concatenated" else {}),
        chat=own.chat.model_copy(update={"template": "auto"}),
        held_out=0,
        cache_dir=own.cache_dir,
    )
    data, _ = with_packing(data, told_apart(find_files(data, Path())), separates=trained.spec.foreign is None)
    if "packing" not in data.model_fields_set:
        data = data.model_copy(update=packed)
    corpus = prepare_corpus(data, base_dir=Path(), model=StartingModel(rows=trained.spec.vocab))
    if any(stream.train.is_pairs for stream in corpus.streams):
        raise UserError(
            f"--source {', '.join(sources)}: contains preferences, whose loss needs the reference model; a run with "
            "training.preference reports their held-out loss in metrics.jsonl (data.held_out)"
        )
    return dict(zip((stream.name for stream in corpus.streams), all_samples(corpus, data).streams, strict=True))


def _from_checkpoint(
    checkpoint: Path, device: torch.device, dtype: str | None, averaged: bool, weights: Weights
) -> TrainedModel:
    verify_checkpoint(checkpoint)
    records = records_of(checkpoint)
    if records is None:
        raise CheckpointError(f"{checkpoint}: has no {RESOLVED}, nor has its run directory")
    resolved = read_resolved(records.resolved)
    if averaged and not any(name.startswith(AVERAGED) for name in held_tensors(checkpoint)):
        raise UserError(f"{checkpoint} has no averaged weights; train with callbacks=[ema], or leave --ema out")
    prefix = AVERAGED if averaged else "model."
    computed = torch_dtype(dtype or resolved.run.training.dtypes.compute)
    whole = base_of(resolved) is None
    if weights == "disk" and not whole:
        raise UserError(
            f"--weights-from-disk: {checkpoint} has adapters, whose base is in other files; use the merged model "
            "(export --hf)"
        )
    if whole and is_to_stay_on_disk(weights, resolved.model, computed, device):
        model = checkpoint_model_from_disk(checkpoint, resolved.model, computed, prefix)
    else:
        model = _with_weights(resolved, checkpoint, prefix, weights).to(device, computed)
    return TrainedModel(
        source=checkpoint,
        spec=resolved.model,
        model=model.eval(),
        tokenizer=_tokenizer(records.tokenizer, resolved.model),
        tokenizer_dir=records.tokenizer,
        device=device,
        run=resolved,
        ranks=None if isinstance(weights, str) else weights,
    )


def _with_weights(resolved: ResolvedRun, checkpoint: Path, trained: str, weights: Weights) -> Decoder:
    """The run's model on the CPU, with the weights of a verified checkpoint, and of its base if it has one.

    `trained`: the prefix of trained weights in the checkpoint.
    """
    dtype, finetune = torch_dtype(resolved.run.training.dtypes.master), resolved.run.finetune
    model = build_model(resolved.model, dtype=dtype)
    base = base_of(resolved)
    if finetune is None or base is None:
        split_over(model, weights)
        model.to_empty(device="cpu")
        kept = named_tensors(model)
    else:
        check_base(checkpoint, verify_checkpoint(checkpoint), base)
        apply_finetune(model, finetune, dtype)
        split_over(model, weights)
        frozen = [row for row in model.table if not row.trained]
        materialize(model, frozen, kept_weights(resolved), CPU)
        kept = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        kept |= named_state(model)
    learnt = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    places = {f"{trained if name in learnt else 'model.'}{name}": tensor.detach() for name, tensor in kept.items()}
    load_tensors(checkpoint, places)
    return model


def split_over(model: Decoder, weights: Weights) -> None:
    """Make a model on the meta device this rank's part of it, if ranks share it. Raises `UserError` if they cannot."""
    if isinstance(weights, str):
        return
    misfits = find_misfits(LayoutSpec(tp=weights.size()), model.spec, weights.size())
    if misfits:
        raise UserError(misfits[0])
    if blocks := split_misfit(model.table, model.spec, weights.size()):
        raise UserError(
            f"{blocks.rpartition('; ')[0]}; leave layout.tp out, or use the merged model (export --merge --hf)"
        )
    apply_tensor_parallel(model, weights)


def _tokenizer(directory: Path, model: ModelSpec) -> TextTokenizer:
    tokenizer = load_tokenizer(directory)
    try:
        return tokenizer.for_rows(model.vocab)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None


def _from_hf_directory(
    directory: Path, device: torch.device, dtype: str | None, family: str | None, weights: Weights
) -> TrainedModel:
    spec = read_hf_directory(directory, family=family)
    computed = torch_dtype(dtype or (FP32 if on_cpu(device) else BF16))
    if is_to_stay_on_disk(weights, spec, computed, device):
        model = hf_model_from_disk(directory, spec, computed)
    else:
        model = build_model(spec, dtype=computed)
        split_over(model, weights)
        stored = HfWeights(directory, spec)
        table = parameter_table(spec) + state_table(spec)
        materialize(model, table, lambda row, start, stop: stored.read_rows(row.name, start, stop), device)
    if isinstance(model, ForeignDecoder) and (error := model.eval().acausal(model)):
        raise UserError(error)
    return TrainedModel(
        source=directory,
        spec=spec,
        model=model.eval(),
        tokenizer=_tokenizer(directory, spec),
        tokenizer_dir=directory,
        device=device,
        run=None,
        ranks=None if isinstance(weights, str) else weights,
    )

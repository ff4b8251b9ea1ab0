"""Export of a trained model as a Hugging Face directory or a GGUF file, each with a receipt."""

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args
from unicodedata import normalize

import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.checkpoint.hf_proof import compare_with_transformers, probe_tokens, prove_merge
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.finetune import merged_model
from meshwright.handover.gguf import (
    LLAMA_CPP_TOLERANCE,
    QUANTIZED_TOLERANCE,
    StoredModel,
    context_length,
    write_gguf,
)
from meshwright.handover.gguf_tokenizer import composes
from meshwright.handover.llama_cpp import COMMAND as LLAMA_CPP
from meshwright.handover.llama_cpp import llama_cpp_installed
from meshwright.handover.ollama import modelfile
from meshwright.handover.receipt import (
    CONVERSATIONS,
    NOT_PROVED,
    RECEIPT,
    TEXTS,
    Claim,
    Equal,
    ProgramReading,
    Receipt,
    Result,
    SeparateProgram,
    compare_tokens,
    conversations_of,
    logits_reading,
    refuse_other_tokens,
    texts_of,
    version_of,
    without_end,
)
from meshwright.handover.vllm_receipt import PROGRAM as VLLM
from meshwright.handover.vllm_receipt import vllm_python, vllm_reading
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.models.dtypes import torch_dtype
from meshwright.serve.conversation import PromptEncoder
from meshwright.serve.token_ids import TokenIds, token_ids
from meshwright.serve.trained import TrainedModel, config_of, directory_of, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.precision import BF16, FP32, FP64
from meshwright.storage.durable import complete_folder

GGUF_FILE = "model.gguf"

READ_BY_TRANSFORMERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose GGUF files transformers reads; it reads a mixtral file as a llama's, without experts."""


def export_trained(
    trained: TrainedModel,
    directory: Path,
    *,
    dtype: str | None = None,
    merge: bool = False,
    vllm: Path | None = None,
) -> Receipt:
    """Write the model as a Hugging Face directory with its receipt, in `dtype` or else the precision of its run; with
    `merge`, adapters are merged into the weights. `vllm`: the Python of an environment that has vLLM.

    Raises `UserError` if `directory` exists, or if a program that reads it computes different logits or tokens; then
    nothing is written.
    """
    dtype, python = dtype or _dtype_of(trained).name, vllm_python(vllm)
    receipts: list[Receipt] = []

    def seal(staging: Path, differences: dict[str, float]) -> None:
        results = [_hf_reading(trained, staging, *one) for one in differences.items()]
        if python is not None:
            read_back = open_trained(staging, device="cpu", dtype=FP32.name, family=trained.spec.family)
            results.append(vllm_reading(read_back.model, staging, python, tokenizer=trained.tokenizer))
        about: dict[str, Any] = {"exported": directory.name, "dtype": dtype, "source": str(trained.source)}
        receipt = Receipt.of(results, ("transformers", VLLM), claims=_claims(trained), **about)
        receipts.append(receipt.write(staging))

    export_hf(
        named_tensors(_whole(trained, merge, "--hf")).items(),
        trained.spec,
        directory,
        HfForm(
            dtype=torch_dtype(dtype),
            tokenizer_dir=trained.tokenizer_dir,
            token_ids=_token_ids(trained),
            rest=None if trained.spec.wrapper is None else directory_of(trained),
        ),
        seal=seal,
    )
    return receipts[0]


def export_gguf(trained: TrainedModel, file: Path, *, form: str | None = None, merge: bool = False) -> Receipt:
    """Write the model as the GGUF file `file`, and its receipt next to it (`NAME.receipt.json`); matrices in the format
    `form` (`GgufName`), by default the precision of the run.

    Raises `UserError` if `file` exists, llama.cpp has no such model or tokenizer, or a program that reads the file
    computes different logits or tokens; then nothing is written.
    """
    if file.exists():
        raise UserError(f"{file} already exists; export to another file, or remove it")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        receipt = _write_proved_gguf(trained, Path(folder), file.name, form, merge)
        Path(folder, RECEIPT).rename(file.with_suffix(".receipt.json"))
        Path(folder, GGUF_FILE).rename(file)
    return receipt


def export_ollama(trained: TrainedModel, directory: Path, *, form: str | None = None, merge: bool = False) -> Receipt:
    """Write a directory for `ollama create`: `model.gguf`, `Modelfile` and the receipt.

    Raises like `export_gguf`.
    """
    prompts = PromptEncoder(trained.tokenizer)
    ends = prompts.shown(prompts.answer_ends)
    content, notes = modelfile(trained.tokenizer, GGUF_FILE, context_length(trained.spec), ends)
    notes.append(f"{NOT_PROVED} by Ollama: it has not read the files")
    with complete_folder(directory) as staging:
        receipt = _write_proved_gguf(trained, staging, f"{directory.name}/{GGUF_FILE}", form, merge, notes)
        (staging / "Modelfile").write_text(content, encoding="utf-8")
    return receipt


@torch.no_grad()
def _write_proved_gguf(
    trained: TrainedModel, folder: Path, exported: str, form: str | None, merge: bool, more: Sequence[str] = ()
) -> Receipt:
    """Write `model.gguf` and its receipt, with `more` notes."""
    form = form or {FP32.name: "f32", BF16.name: "bf16"}.get(_dtype_of(trained).name, "f16")
    stored = StoredModel(trained.spec, form)
    parameters = named_tensors(_whole(trained, merge, "--gguf"))
    file, ids = folder / GGUF_FILE, _token_ids(trained)
    write_gguf(file, stored, parameters.items(), trained.tokenizer, name=exported, token_ids=ids)
    reference = build_model(trained.spec, device="cpu")
    targets = named_tensors(reference)
    for name, tensor in stored.rounded(parameters.items()):
        targets[name].copy_(tensor)
    readings, notes = [], _notes(trained, stored)
    unscaled = trained.spec.rope_scaling is None  # transformers does not read rope scaling from GGUF
    if find_spec("transformers") is not None and trained.spec.family in READ_BY_TRANSFORMERS and unscaled:
        try:
            readings.append(_transformers_gguf_reading(reference, folder))
        except (KeyError, NotImplementedError, RuntimeError, TypeError) as error:  # it reads few architectures
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            notes.append(
                f"{NOT_PROVED} by transformers {version_of('transformers')}: it cannot read the file ({reason})"
            )
    if llama_cpp_installed():
        readings.append(_llama_cpp_reading(reference, trained.tokenizer, file, form))
    if not readings:
        tried = f"; {notes[-1]}" if notes else ""
        raise UserError(f"the export was refused: no program that reads GGUF is installed: {install('gguf')}{tried}")
    about: dict[str, Any] = {"exported": exported, "dtype": form, "source": str(trained.source)}
    results = [(reading, []) for reading in readings]
    receipt = Receipt.of(results, ("llama.cpp",), (*notes, *more), claims=_claims(trained), **about)
    return receipt.write(folder)


def _whole(trained: TrainedModel, merge: bool, option: str) -> Decoder:
    """The model to write, with merged adapters."""
    if not any(row.adapter for row in trained.model.table):
        return trained.model
    if not merge:
        raise UserError(
            f"{trained.source} has adapters: write the merged model with {option} --merge, or the adapters with "
            "--adapter DIR"
        )
    model = merged_model(trained.model)
    prove_merge(trained.model, model)
    return model


def _dtype_of(trained: TrainedModel):
    ran = trained.run.run.training.dtypes.compute if trained.run else BF16
    return FP32 if ran == FP64 else ran


def _token_ids(trained: TrainedModel) -> TokenIds:
    return token_ids(trained.tokenizer, config_of(trained))


def _claims(trained: TrainedModel) -> tuple[Claim, ...]:
    return ("numbers", "tokens") if trained.tokenizer.chat_template is None else get_args(Claim)


def _notes(trained: TrainedModel, stored: StoredModel) -> list[str]:
    spec, notes = trained.spec, []
    if stored.kept_wide:
        notes.append(
            f"{len(stored.kept_wide)} matrices are stored in f16, because their row length is not a multiple of 32"
        )
    if composes(trained.tokenizer):
        notes.append("llama.cpp does not normalize to NFC as the tokenizer does; give it composed characters")
    if context_length(spec) < spec.max_positions:
        notes.append(
            f"llama.cpp does not support sliding windows for {spec.family}: its context is limited to the window, "
            f"{spec.sliding_window}"
        )
    return notes


def _hf_reading(trained: TrainedModel, staging: Path, program: str, difference: float) -> Result:
    """A program's logits, tokens and template, computed from a Hugging Face directory, and remarks about them."""
    if program == "meshwright":
        theirs, notes = load_tokenizer(staging).for_rows(trained.spec.vocab), _without_rows(trained.tokenizer)
        texts = refuse_other_tokens(program, "text", texts_of(trained.tokenizer), texts_of(theirs))
        wanted, read = conversations_of(trained.tokenizer), conversations_of(theirs)
        conversations = refuse_other_tokens(program, "conversation", wanted, read) if wanted else None
        equal: Equal = texts, conversations
    else:
        equal, notes = _transformers_tokens(trained.tokenizer, staging)
    return logits_reading(program, difference, probe_tokens(trained.spec).numel(), equal), notes


def _without_rows(tokenizer: TextTokenizer) -> list[str]:
    """A remark about tokens without a row in the model."""
    if tokenizer.rows is None:
        return []
    first, last = tokenizer.rows, tokenizer.vocab_size - 1
    return [
        f"warning: the model has no row for tokens {first} ({tokenizer.decode([first])!r}) to {last} of its tokenizer, "
        f"so programs fail at texts that contain one; {tokenizer.more_rows}"
    ]


def _transformers_tokens(tokenizer: TextTokenizer, directory: Path) -> tuple[Equal, list[str]]:
    """transformers' tokens of texts and conversations, and remarks about them.

    If `AutoTokenizer` gives different tokens, `PreTrainedTokenizerFast` must give these: for a qwen2 model,
    transformers 5 always uses Qwen2's own tokenizer, whatever tokenizer_config.json says.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    load: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return _compared_tokens(tokenizer, AutoTokenizer.from_pretrained(directory, **load)), []
    except UserError as error:
        agreed = _compared_tokens(tokenizer, PreTrainedTokenizerFast.from_pretrained(directory, **load))
        kind = type(AutoTokenizer.from_pretrained(directory, **load)).__name__
        warning = (
            f"warning: transformers' AutoTokenizer loads this tokenizer as {kind} and encodes text differently "
            f"({str(error).split(': ', 1)[1]}); load it with PreTrainedTokenizerFast, and give programs that use "
            "AutoTokenizer, as vLLM does, token ids instead of text"
        )
        return agreed, [warning]


def _compared_tokens(tokenizer: TextTokenizer, theirs: Any) -> Equal:
    def conversation(messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = theirs.apply_chat_template([*messages], add_generation_prompt=True, tokenize=False)
        return theirs(text, add_special_tokens=False).input_ids

    accepted = zip(CONVERSATIONS, conversations_of(tokenizer), strict=False)  # none without a template
    spoken = [conversation(messages) if ids else None for messages, ids in accepted]
    texts = [without_end(theirs(text).input_ids, tokenizer) for text in TEXTS]
    return compare_tokens("transformers", tokenizer, texts, spoken)


def _transformers_gguf_reading(reference: Decoder, staging: Path) -> ProgramReading:
    tokens = probe_tokens(reference.spec)[:, : context_length(reference.spec)]
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        difference = compare_with_transformers(reference, staging, tokens, gguf_file=GGUF_FILE)
    return logits_reading("transformers", difference, tokens.numel())


def _llama_cpp_reading(reference: Decoder, tokenizer: TextTokenizer, file: Path, form: str) -> ProgramReading:
    program = SeparateProgram(
        name="llama.cpp",
        command=LLAMA_CPP,
        context=context_length(reference.spec),
        allowed=LLAMA_CPP_TOLERANCE.get(form, QUANTIZED_TOLERANCE),
        questions={
            "model": str(file.resolve()),
            "texts": [normalize("NFC", text) if composes(tokenizer) else text for text in TEXTS],
        },
    )
    reading, answers = program.read(reference, tokenizer)
    texts, conversations = compare_tokens("llama.cpp", tokenizer, answers.texts, answers.conversations)
    return replace(reading, texts_equal=texts, conversations_equal=conversations)

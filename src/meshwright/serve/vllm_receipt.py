"""vLLM's results for an export, from the Python of its environment: log-probabilities, tokens and the chat template."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from meshwright.data.tokenizer import TextTokenizer
from meshwright.models import Decoder
from meshwright.serve import vllm_program
from meshwright.serve.asking import ask
from meshwright.serve.receipt import (
    CONVERSATIONS,
    TEXTS,
    Reading,
    conversations_of,
    next_logprobs,
    probe_prompts,
    refuse_other_logprobs,
    refuse_other_tokens,
    texts_of,
)
from meshwright.spec.errors import UserError

PROGRAM = "vLLM"
TOLERANCE = 1e-4
"""Relative to the range of the log-probabilities. Both compute in fp32."""
CONTEXT = 128
"""Maximum number of positions for vLLM."""
SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",  # one process, so that errors are seen and no process remains
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_LOGGING_LEVEL=ERROR",
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
)
"""Variables of the program's environment."""


def vllm_python(given: Path | None) -> Path | None:
    """The Python that has vLLM: the `given` one, or this one; None if neither has.

    Raises `UserError` if there is no such program.
    """
    if given is None:
        return Path(sys.executable) if find_spec("vllm") is not None else None
    if not given.is_file():
        raise UserError(f"--vllm {given}: does not exist; give the Python of an environment with vLLM")
    return given


@torch.no_grad()
def vllm_reading(
    reference: Decoder,
    directory: Path,
    python: Path,
    *,
    tokenizer: TextTokenizer | None,
    adapter: Path | None = None,
    rank: int = 0,
) -> tuple[Reading, list[str]]:
    """vLLM's results for a Hugging Face directory, or for an `adapter` of this `rank` on it, compared with `reference`,
    which computes in fp32. Tokens are compared if a tokenizer is given.

    Returns its reading and remarks: like transformers, vLLM may mistake a tokenizer for another one.

    Raises `UserError` if vLLM cannot read it, or computes different numbers.
    """
    spec = reference.spec
    context = min(CONTEXT, spec.max_positions)
    prompts = probe_prompts(spec, context)
    found = _asked(
        python,
        model=str(directory.resolve()),
        adapter=None if adapter is None else str(adapter.resolve()),
        max_lora_rank=rank,
        vocab=spec.vocab,
        context=context,
        prompts=prompts,
        tokenizer=tokenizer is not None,
        texts=TEXTS,
        conversations=CONVERSATIONS if tokenizer is not None and tokenizer.chat_template is not None else (),
    )
    difference, tolerance = refuse_other_logprobs(
        PROGRAM, next_logprobs(reference, prompts), found["logprobs"], TOLERANCE
    )
    texts, conversations, notes = None, None, list[str]()
    try:
        texts, conversations = _tokens(tokenizer, found) if tokenizer is not None else (None, None)
    except UserError as error:
        notes.append(f"warning: {str(error).split(': ', 1)[1]}; give vLLM token ids instead of text")
    reading = Reading(
        program=PROGRAM,
        version=found["version"],
        largest_difference=difference,
        compared="logprobs",
        tolerance=tolerance,
        positions=len(prompts),
        texts_equal=texts,
        conversations_equal=conversations,
    )
    return reading, notes


def _tokens(tokenizer: TextTokenizer, found: dict[str, Any]) -> tuple[int, int | None]:
    """Texts and conversations with equal tokens."""
    ends = tokenizer.eos_id
    read: Sequence[list[int]] = [ids[:-1] if ids and ids[-1] == ends else ids for ids in found["texts"]]
    texts = refuse_other_tokens(PROGRAM, "text", texts_of(tokenizer), read)
    wanted = conversations_of(tokenizer)
    if not wanted:
        return texts, None
    asked = [i for i, ids in enumerate(wanted) if ids]
    spoken = [found["conversations"][i] or [] for i in asked]
    return texts, refuse_other_tokens(PROGRAM, "conversation", [wanted[i] for i in asked], spoken)


def _asked(python: Path, **questions: Any) -> dict[str, Any]:
    return ask(PROGRAM, ["env", *SETTINGS, str(python), "-P", str(Path(vllm_program.__file__))], questions)

"""vLLM's results for an export, from the Python of its environment: log-probabilities, tokens and the chat template."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.checkpoint.peft_config import CONFIG
from meshwright.data.tokenizer import TextTokenizer
from meshwright.handover import vllm_program
from meshwright.handover.receipt import Result, SeparateProgram, compare_tokens, without_end
from meshwright.models import Decoder
from meshwright.spec.errors import UserError

PROGRAM = "vLLM"
TOLERANCE = 1e-4
"""Relative to the range of the log-probabilities. Both compute in fp32."""
CONTEXT = 128
"""Maximum number of positions for vLLM."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the largest rank of an adapter."""
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


def vllm_rank(directory: Path) -> int:
    """The smallest of `RANKS` that a written adapter's ranks fit."""
    rank = json.loads((directory / CONFIG).read_text(encoding="utf-8"))["r"]
    return next((allowed for allowed in RANKS if allowed >= rank), rank)


@torch.no_grad()
def vllm_reading(
    reference: Decoder,
    directory: Path,
    python: Path,
    *,
    tokenizer: TextTokenizer | None,
    adapter: Path | None = None,
) -> Result:
    """vLLM's results for a Hugging Face directory, or for an `adapter` on it, compared with `reference`, which computes
    in fp32. Tokens are compared if a tokenizer is given.

    Returns its reading and remarks: like transformers, vLLM may mistake a tokenizer for another one.

    Raises `UserError` if vLLM cannot read it, or computes different numbers.
    """
    program = SeparateProgram(
        name=PROGRAM,
        command=["env", *SETTINGS, str(python), "-P", vllm_program.__file__],
        context=min(CONTEXT, reference.spec.max_positions),
        allowed=TOLERANCE,
        questions={
            "model": str(directory.resolve()),
            "adapter": None if adapter is None else str(adapter.resolve()),
            "max_lora_rank": 0 if adapter is None else vllm_rank(adapter),
            "tokenizer": tokenizer is not None,
        },
    )
    reading, answers = program.read(reference, tokenizer)
    if tokenizer is None:
        return reading, []
    texts = [without_end(ids, tokenizer) for ids in answers.texts]
    spoken = [ids or [] for ids in answers.conversations]  # vLLM must accept every conversation that the model does
    try:
        equal = compare_tokens(PROGRAM, tokenizer, texts, spoken)
    except UserError as error:
        return reading, [f"warning: {str(error).split(': ', 1)[1]}; give vLLM token ids instead of text"]
    return replace(reading, texts_equal=equal[0], conversations_equal=equal[1]), []

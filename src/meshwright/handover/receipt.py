"""The receipt of an export: the programs that read it back, and how closely each agrees with the model.

`receipt.json` is next to the exported weights, and names the programs that were not installed. All programs get the
same texts, conversations and prompts.

Shapes: V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from meshwright.checkpoint.hf_proof import TOLERANCE, probe_tokens
from meshwright.data.tokenizer import TextTokenizer
from meshwright.handover.asking import ProgramAnswers, ask
from meshwright.models import Decoder
from meshwright.serve.conversation import PromptEncoder
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.storage.durable import write_durably

RECEIPT = "receipt.json"

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " leading space, trailing space ",
    "line one\nline two\n\n\nline five\r\n\tindented",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 3.14159, 0x7f, 1_000_000",
    "1234567890 12 345 6789, 2026-11-22, 10^-9",
    "Größe, naïve café, ÆØÅ, \u0130stanbul, e\u0301 and \u00e9",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u3001\uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f642\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "Don't you'LL we've I'M he'd THEY'RE",
    "!!! ??? ... --- === *** <a href='#'>&amp;</a> {\"key\": [null, true]}",
    "a" * 40 + " " * 17 + "b",
)
"""Texts whose tokens are compared."""

CONVERSATIONS: tuple[tuple[Mapping[str, str], ...], ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    (
        {"role": "user", "content": "Name a colour.\nOne word."},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "Another \u2026 caf\u00e9?"},
    ),
    ({"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Why?"}),
)
"""Conversations whose tokens, up to the assistant's turn, are compared. A template may refuse some."""


PROMPT_LENGTHS = (1, 2, 7, 19, 33, 64)
"""Tokens of the random prompts after which log-probabilities are compared."""


@dataclass(frozen=True, kw_only=True)
class ProgramReading:
    """One program's results with the export."""

    program: str
    version: str
    largest_difference: float
    """The largest difference of two numbers of `compared`."""
    compared: Literal["logits", "logprobs"] = "logits"
    """logprobs are natural logarithms of probabilities."""
    tolerance: float
    """Its tolerance: for logits relative to the largest logit, for log-probabilities absolute."""
    positions: int
    """Number of compared positions, each over the whole vocabulary."""
    texts_equal: int | None = None
    """Texts with equal tokens: all of them, else the export is refused. None: there was no tokenizer to compare."""
    conversations_equal: int | None = None
    """Conversations with equal tokens by the chat template; None: there was no template to compare."""


Claim = Literal["numbers", "tokens", "chat template"]
"""What an export can be proved to have."""
NOT_PROVED = "not proved"
"""The beginning of a line about what nobody has compared."""

Result = tuple[ProgramReading, list[str]]
"""A program's reading, and remarks about it."""
Equal = tuple[int | None, int | None]
"""Numbers of texts and conversations with equal tokens, as in `ProgramReading`."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """All readings of an export."""

    exported: str
    """Name of the file or directory."""
    dtype: str
    source: str
    """The checkpoint or directory that was exported."""
    readings: tuple[ProgramReading, ...]
    claims: tuple[Claim, ...] = ("numbers",)
    """What it has."""
    notes: tuple[str, ...] = ()
    not_installed: tuple[str, ...] = ()
    """Programs that could have read it."""

    @classmethod
    def of(
        cls, results: Sequence[Result], programs: Sequence[str], notes: Sequence[str] = (), **about: Any
    ) -> "Receipt":
        """The receipt of these results, with further notes; `programs` could all have read the export."""
        readings, remarks = tuple(reading for reading, _ in results), [note for _, more in results for note in more]
        absent = tuple(program for program in programs if program not in [one.program for one in readings])
        return cls(readings=readings, notes=(*remarks, *notes), not_installed=absent, **about)

    @property
    def largest_difference(self) -> float:
        """The largest difference over all programs."""
        return max(one.largest_difference for one in self.readings)

    @property
    def proved(self) -> dict[Claim, list[str]]:
        """Claim -> the programs that have confirmed it; none: it is not proved."""
        counts = {
            "numbers": lambda one: one.positions,
            "tokens": lambda one: one.texts_equal,
            "chat template": lambda one: one.conversations_equal,
        }
        return {claim: [one.program for one in self.readings if counts[claim](one)] for claim in self.claims}

    def write(self, folder: Path) -> "Receipt":
        """Write the receipt as JSON into the folder of the export."""
        write_durably(folder / RECEIPT, json.dumps(self.as_json(), indent=2) + "\n")
        return self

    def as_json(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return {**asdict(self), "proved": self.proved}

    def lines(self) -> list[str]:
        """Readable lines: one per program, what is proved and what is not, then the notes."""
        absent = (f"{program:<24}not installed" for program in self.not_installed)
        claims = [f"{claim} by {', '.join(programs)}" for claim, programs in self.proved.items() if programs]
        lacking = [
            f"{NOT_PROVED}: {claim}; no program that compares them is installed"
            for claim, by in self.proved.items()
            if not by
        ]
        return [*map(_line, self.readings), *absent, f"proved: {'; '.join(claims)}", *lacking, *self.notes]


def _line(one: ProgramReading) -> str:
    allowed = f"{one.tolerance:.0e} of the largest" if one.compared == "logits" else f"{one.tolerance:.1e}"
    parts = [f"{one.compared} differ by at most {one.largest_difference:.1e} (allowed {allowed})"]
    if one.texts_equal is not None:
        parts.append(f"tokens of {one.texts_equal} texts equal")
    if one.conversations_equal is not None:
        parts.append(f"{one.conversations_equal} conversations equal")
    return f"{one.program} {one.version}".ljust(24) + ", ".join(parts)


def refuse_other_tokens(program: str, what: str, wanted: Sequence[Sequence[int]], read: Sequence[Any]) -> int:
    """The number of token sequences, if all are equal. Else raises `UserError`, which shows the first difference."""
    for number, (ours, theirs) in enumerate(zip(wanted, read, strict=True)):
        if list(ours) != list(theirs):
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            place = min(len(ours), len(theirs)) if place is None else place
            raise UserError(
                f"the export was refused: {program} encodes {what} {number} differently: from token {place} on "
                f"{list(theirs)[place : place + 5]} instead of {list(ours)[place : place + 5]}"
            )
    return len(wanted)


def logprob_difference(expected_V: torch.Tensor, found_V: torch.Tensor) -> float:
    """The largest difference of two rows of log-probabilities; infinite if one is missing."""
    difference = (expected_V - found_V).abs().max().item()
    return difference if difference == difference else float("inf")


def compare_tokens(
    program: str, tokenizer: TextTokenizer, texts: Sequence[Sequence[int]], conversations: Sequence[Any]
) -> Equal:
    """Compare a program's tokens with the tokenizer's, and return the numbers of texts and conversations compared.

    A conversation is skipped if our template or the program's (None) refuses it. Raises `UserError` at a difference.
    """
    equal = refuse_other_tokens(program, "text", texts_of(tokenizer), texts)
    wanted = conversations_of(tokenizer)
    if not wanted:
        return equal, None
    rendered = [i for i, ids in enumerate(wanted) if ids and conversations[i] is not None]
    ours, theirs = [wanted[i] for i in rendered], [conversations[i] for i in rendered]
    return equal, refuse_other_tokens(program, "conversation", ours, theirs)


def without_end(ids: Sequence[int], tokenizer: TextTokenizer) -> Sequence[int]:
    """Like `encode_prompt`: without an end-of-text that a program's tokenizer appends to every text."""
    while ids and ids[-1] == tokenizer.eos_id:
        ids = ids[:-1]
    return ids


def logits_reading(program: str, difference: float, positions: int, equal: Equal = (None, None)) -> ProgramReading:
    """The reading of an installed program whose logits have been compared, with the tolerance of `hf_proof`."""
    return ProgramReading(
        program=program,
        version=version_of(program),
        largest_difference=difference,
        tolerance=TOLERANCE,
        positions=positions,
        texts_equal=equal[0],
        conversations_equal=equal[1],
    )


@dataclass(frozen=True, kw_only=True)
class SeparateProgram:
    """A program that reads an export in a process of its own."""

    name: str
    command: Sequence[str]
    context: int
    """The number of positions that it is given."""
    allowed: float
    """The largest difference of log-probabilities, relative to their range."""
    questions: Mapping[str, Any]
    """What it is asked besides the questions of every program: the place of the model first of all."""

    def read(self, reference: Decoder, tokenizer: TextTokenizer | None) -> tuple[ProgramReading, ProgramAnswers]:
        """Its log-probabilities compared with those of `reference`, and its other answers. Raises `UserError` if it
        cannot read the export, or one differs by more than allowed."""
        prompts = probe_prompts(reference.spec, self.context)
        chats = tokenizer is not None and tokenizer.chat_template is not None
        every = {"vocab": reference.spec.vocab, "context": self.context, "prompts": prompts, "texts": TEXTS}
        answers = ask(
            self.name, self.command, {**every, "conversations": CONVERSATIONS if chats else (), **self.questions}
        )
        expected = next_logprobs(reference, prompts)
        tolerance = self.allowed * max((row_V.max() - row_V.min()).item() for row_V in expected)
        difference = max(map(logprob_difference, expected, map(torch.tensor, answers.logprobs)))
        if not difference <= tolerance:
            raise UserError(
                f"the export was refused: log-probabilities computed by {self.name} differ from the model's by "
                f"{difference:.3g} (allowed {tolerance:.3g})"
            )
        reading = ProgramReading(
            program=self.name,
            version=answers.version,
            largest_difference=difference,
            compared="logprobs",
            tolerance=tolerance,
            positions=len(prompts),
        )
        return reading, answers


def probe_prompts(spec: ModelSpec, context: int) -> list[list[int]]:
    """The same random prompts for every export of a model, each with room for one more token in `context`."""
    probe = probe_tokens(spec)[0]
    return [probe[:length].tolist() for length in PROMPT_LENGTHS if length <= min(len(probe), context - 1)]


@torch.no_grad()
def next_logprobs(model: Decoder, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The log-probabilities [V] of every possible next token after each prompt."""
    return [model.logits(Batch(torch.tensor([prompt])))[0, -1].log_softmax(-1) for prompt in prompts]


def texts_of(tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of every text."""
    return [tokenizer.encode_prompt(text) for text in TEXTS]


def conversations_of(tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of every conversation, empty for one that the template refuses; empty if there is no template."""
    prompts, conversations = PromptEncoder(tokenizer), []
    if prompts.chats:
        for messages in CONVERSATIONS:
            try:
                conversations.append(prompts.conversation(messages))
            except UserError:
                conversations.append([])
    return conversations


def version_of(program: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return version(program)
    except PackageNotFoundError:
        return ""

"""A conversation with one trained model: its history, and answers as they are written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.models.packed import pack
from meshwright.serve.conversation import PromptEncoder
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.prefixes import DEFAULT_BYTES, Prefixes
from meshwright.serve.trained import Settings, TrainedModel
from meshwright.spec.errors import UserError

MAX_TOKENS = 512
"""Default number of new tokens of an answer, if the context has room."""


@dataclass
class ChatTurn:
    """A question and its answer, or a text and its continuation."""

    question: str
    answered: str = ""


@dataclass
class Partner:
    """One model in a chat. Without a chat template it continues each text separately."""

    trained: TrainedModel
    label: str
    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokenizer = self.trained.tokenizer
        self._prompts = PromptEncoder(tokenizer)
        pack(self.trained.model)
        self._engine = InferenceEngine(
            self.trained.model, decode=tokenizer.decode_text, prefixes=Prefixes(DEFAULT_BYTES)
        )

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._prompts.chats

    def about(self) -> list[str]:
        """The model and its template, as lines of text."""
        run = self.trained.run
        kind = f"{self.trained.spec.family}, {'Hugging Face directory' if run is None else 'checkpoint of a run'}"
        lines = [f"model     {self.trained.source} ({kind})"]
        if self.chats:
            ends = " or ".join(self._prompts.shown(self._prompts.answer_ends))
            return [*lines, f"template  the chat template of {self.trained.tokenizer_dir}; answers end at {ends}"]
        return [*lines, "template  none: a base model, which continues your text; /more continues the last text"]

    def say(self, question: str, settings: Settings) -> Iterator[str]:
        """The parts of the answer as they are generated. If the iterator is closed early, the text so far stays in the
        history.

        Raises `UserError` if the context is full; then the history is unchanged.
        """
        if self.chats:
            messages = [*self.messages(), {"role": "user", "content": question}]
            prompt, ends = self._prompts.conversation(messages), self._prompts.answer_ends
        else:
            prompt, ends = self._prompts.text(question), self._prompts.text_ends
        yield from self._write(ChatTurn(question), prompt, ends, settings)

    def more(self, settings: Settings) -> Iterator[str]:
        """Continue the last text. Raises `UserError` if there is none, or the model has a chat template."""
        if self.chats or not self.turns:
            raise UserError("/more continues the last text of a model without a chat template")
        last = self.turns.pop()
        text = last.question + last.answered
        try:
            yield from self._write(ChatTurn(text), self._prompts.text(text), self._prompts.text_ends, settings)
        except UserError:
            self.turns.append(last)
            raise

    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, in the form of training data."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pairs = (
            ({"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answered})
            for turn in self.turns
        )
        return [*system, *(message for pair in pairs for message in pair)]

    def record(self) -> dict[str, Any]:
        """The training record that /save writes."""
        if self.chats:
            return {"model": str(self.trained.source), "messages": self.messages()}
        texts = [turn.question + turn.answered for turn in self.turns]
        return {"model": str(self.trained.source), "text": "\n".join(texts)}

    def _write(self, turn: ChatTurn, prompt: Sequence[int], ends: frozenset[int], settings: Settings) -> Iterator[str]:
        room, wanted, parts = self._engine.max_context - len(prompt), settings.max_tokens, list[str]()
        if room < 1:
            raise UserError(
                f"{self.label}: the conversation has {len(prompt)} tokens, but the model supports "
                f"{self._engine.max_context}; /undo removes the last turn, /clear starts a new conversation"
            )
        request = Request(
            prompt=prompt,
            max_tokens=max(1, min(MAX_TOKENS, room)) if wanted is None else wanted,
            sampling=settings.sampling,
            row=len(self.turns),
            ends=ends,
            stops=settings.stops,
        )
        answer = self._engine.submit(request, lambda _, __, text: parts.append(text))
        self.turns.append(turn)
        try:
            while self._engine.step():
                new = "".join(parts)
                parts.clear()
                turn.answered += new
                if new:
                    yield new
        finally:
            if answer.finish is None:  # the iterator was closed, or Ctrl-C interrupted a step
                self._engine.reset()

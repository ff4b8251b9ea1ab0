"""The engine: requests join and leave a running batch, token by token (continuous batching).

Every step is one forward pass over the next token of each answer and as many tokens of new prompts as `CHUNK` allows,
without padding. An answer does not depend on the rest of the batch, up to rounding in products of another size: each
request has its own random stream, and its prompt is read in the same chunks.

Shapes: B rows that get a token, V vocabulary.
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from meshwright.models import Decoder
from meshwright.models.generate import Sampling, check_room, choose, penalize
from meshwright.serve.grammar import Grammar
from meshwright.serve.prefixes import Prefixes
from meshwright.serve.readers import CachedReader, Reader, reader_for
from meshwright.serve.text import TextWriter
from meshwright.spec.errors import UserError

CHUNK = 512
"""Most prompt tokens read in one step; a longer prompt takes several steps."""
PIECE = 32
"""Tokens of a prompt whose log-probabilities are computed together."""
MAX_BATCH = 64
"""Default number of concurrent answers."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request."""

    prompt: Sequence[int]
    max_tokens: int
    """0: no answer is generated, only the prompt's log-probabilities."""
    sampling: Sampling
    row: int = 0
    """Index among several answers to one prompt; each has its own random stream."""
    ends: Collection[int] = ()
    """Tokens that end the answer and do not belong to it."""
    stops: Sequence[str] = ()
    """Stop strings, with the same effect; they need an engine with `decode`."""
    logprobs: int | None = None
    """Return each token's log-probability and those of this many likeliest tokens."""
    scores_prompt: bool = False
    """Also score the prompt's tokens, and the token that ended the answer."""
    embeds: bool = False
    """Return the prompt's embedding; the engine must be able to (`InferenceEngine.embeds`)."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    grammar: Grammar | None = None
    """The grammar of the answer; its ends are those of the request."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to this answer's text, if not as the engine does it."""


@dataclass(frozen=True)
class Token:
    """One token of an answer."""

    id: int
    logprob: float | None = None
    """From the model's logits, before temperature, penalties and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""


@dataclass
class Answer:
    """An answer so far."""

    request: Request
    listener: "Callable[[Answer, list[Token], str], None] | None" = None
    """Called with new tokens and text, at most once per step, and at the end, when `finish` is set."""
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    """The prompt's tokens with their log-probabilities, if requested; the first has none."""
    end: Token | None = None
    """The token that ended the answer and does not belong to it."""
    embedding: torch.Tensor | None = None
    """The last hidden state [D] of the prompt, if requested."""
    text: str = ""
    finish: str | None = None
    """Why it ended: `stop` (a token or a text that ends answers, or its grammar is complete), `length`, `cancelled`, or
    `error`."""
    problem: str | None = None
    """The request's fault, if that is the error."""

    @property
    def ids(self) -> list[int]:
        """Its tokens' ids."""
        return [token.id for token in self.tokens]


class _Row:
    """A request in the batch."""

    def __init__(self, answer: Answer, decode: Callable[[Sequence[int]], str] | None, vocab: int) -> None:
        request = answer.request
        self.answer, self.sampling = answer, request.sampling
        self.read = 0
        """Tokens of the prompt that the model has read."""
        self.stream = random.Random(f"{request.sampling.seed}/{request.row}")
        decode = request.decode or decode
        self.writer = None if decode is None else TextWriter(decode, request.stops)
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None
        if request.sampling.penalizes:
            self.seen = torch.zeros(vocab, dtype=torch.bool), torch.zeros(vocab)
            self.seen[0][torch.tensor(request.prompt)] = True
        self.matcher = None if request.grammar is None else request.grammar.begin()
        self.bias: torch.Tensor | None = None
        if request.bias:
            self.bias = torch.zeros(vocab)
            self.bias[list(request.bias)] = torch.tensor(list(request.bias.values()))

    def skip(self, known: int) -> None:
        """The model already knows this many tokens of the prompt."""
        self.read = known

    @property
    def scores(self) -> bool:
        """Whether its next tokens belong to the prompt and their log-probabilities are wanted."""
        request = self.answer.request
        return request.scores_prompt and request.logprobs is not None and self.read < len(request.prompt)

    def score(self, logits_TV: torch.Tensor) -> None:
        """Record the log-probabilities of the prompt's tokens that follow the last T tokens read."""
        request, prompt = self.answer.request, self.answer.prompt
        if not prompt:
            prompt.append(Token(request.prompt[0]))
        tokens = request.prompt[len(prompt) : self.read + 1]
        for begin in range(0, len(tokens), PIECE):
            some = tokens[begin : begin + PIECE]
            prompt += _tokens_of(logits_TV[begin : begin + len(some)], request, some)

    @property
    def adjusts(self) -> bool:
        """Whether tokens are drawn from adjusted logits, not from the model's own."""
        return self.seen is not None or self.bias is not None or self.matcher is not None

    def adjusted(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits to draw from, in fp32 or wider: with penalties, biases, and only the tokens that the grammar
        allows."""
        found_V, device = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)), logits_V.device
        if self.seen is not None:
            found_V = penalize(found_V, self.sampling, *(seen_V.to(device) for seen_V in self.seen))
        if self.bias is not None:
            found_V = found_V + self.bias.to(device)
        if self.matcher is not None:
            found_V = found_V.masked_fill(~self.matcher.allowed().to(device), -torch.inf)
        return found_V

    @property
    def chunk(self) -> Sequence[int]:
        """The next tokens for the model: of the prompt, or the last generated one."""
        prompt = self.answer.request.prompt
        if self.read < len(prompt):
            return prompt[self.read : self.read + CHUNK]
        return (self.answer.tokens[-1].id,)


class InferenceEngine:
    """A model and its requests. Not thread-safe."""

    def __init__(
        self,
        model: Decoder,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_batch: int = MAX_BATCH,
        max_context: int | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`decode`: token ids to text, if text is needed. `max_context`: most tokens of prompt and answer. `prefixes`
        stores keys and values for later prompts that begin with the same tokens."""
        self.model, self.max_batch, self._decode = model, max_batch, decode
        self.max_context = min(max_context or model.spec.max_positions, model.spec.max_positions)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        """In the reader's order: rows whose prompt has been read, then at most one whose prompt has not."""
        self._reader: Reader = reader_for(model)
        self._prefixes, self._owner = prefixes, object()

    @property
    def embeds(self) -> bool:
        """Whether it can compute embeddings: not over several processes."""
        return self.model.make_reader is None

    @property
    def waiting(self) -> int:
        """Number of requests waiting for the batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    def submit(self, request: Request, listener: Callable[[Answer, list[Token], str], None] | None = None) -> Answer:
        """Queue a request; call `step` until its answer has a `finish`.

        Raises `UserError` if prompt and answer do not fit the context.
        """
        check_room([request.prompt], max(1, request.max_tokens), self.max_context)
        assert self._decode is not None or not request.stops
        answer = Answer(request, listener)
        self._waiting.append(_Row(answer, self._decode, self.model.spec.vocab))
        return answer

    def cancel(self, answer: Answer) -> None:
        """End an answer now; its slot is free for the next step."""
        if answer.finish is None:
            answer.finish = "cancelled"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers, complete."""
        answers = [self.submit(request) for request in requests]
        while any(answer.finish is None for answer in answers):
            self.step()
        return answers

    @torch.inference_mode()
    def step(self) -> bool:
        """One forward pass; False if there is nothing to do."""
        self._sweep()
        self._admit()
        if not self._rows:
            return False
        new = [(place, row.chunk) for place, row in enumerate(self._rows)]
        scored = [place for place, row in enumerate(self._rows) if row.scores]
        for row, (_, tokens) in zip(self._rows, new, strict=True):
            row.read += len(tokens)
        writing = self._whole
        if any(row.answer.request.embeds for row in self._rows[:writing]):
            logits_BV, hidden_BD = self._reader.read_hidden(new, writing, scored)
            for row, hidden_D in zip(self._rows, hidden_BD, strict=False):
                row.answer.embedding = hidden_D.clone() if row.answer.request.embeds else None
        else:
            logits_BV = self._reader.read(new, writing, scored)
        begin = writing
        for place in scored:
            end = begin + len(new[place][1])
            self._rows[place].score(logits_BV[begin:end])
            begin = end
        logits_BV = logits_BV[:writing]
        for row, token in zip(self._rows, self._choose(logits_BV, self._rows[:writing]), strict=False):
            self._write(row, token)
        self._sweep()
        return True

    def reset(self) -> list[Answer]:
        """Drop all requests, as after an error; returns unfinished answers."""
        lost = [row.answer for row in (*self._rows, *self._waiting) if row.answer.finish is None]
        self._rows, self._waiting = [], deque()
        self._reader = reader_for(self.model)
        if self._prefixes is not None:
            self._prefixes.clear()  # memory may be scarce
        return lost

    @property
    def _whole(self) -> int:
        """Number of rows whose prompt has been read."""
        return sum(row.read >= len(row.answer.request.prompt) for row in self._rows)

    def _admit(self) -> None:
        """Admit requests, unless a prompt is being read in parts or this step's chunk is full."""
        room = CHUNK
        if self._whole < len(self._rows):
            room -= len(self._rows[-1].chunk)
            if self._rows[-1].read + CHUNK < len(self._rows[-1].answer.request.prompt):
                return
        while room > 0 and self._waiting and len(self._rows) < self.max_batch:
            row = self._waiting.popleft()
            if self._prefixes is not None and isinstance(self._reader, CachedReader) and not row.scores:
                prompt = row.answer.request.prompt
                row.skip(self._prefixes.restore(self._owner, prompt, self._reader, len(self._rows)))
            self._rows.append(row)
            room -= len(row.chunk)
            if row.read + len(row.chunk) < len(row.answer.request.prompt):
                return

    def _choose(self, logits_BV: torch.Tensor, rows: Sequence[_Row]) -> list[Token]:
        """The next token of each row. Raises `UserError` if the model computes NaN or infinity."""
        if rows and not bool(logits_BV.amax(-1).isfinite().all()):
            raise UserError(
                "the model's output is not finite: its weights are damaged, or too large for its dtype (try --dtype "
                "fp32)"
            )
        from_BV = logits_BV
        if any(row.adjusts for row in rows):
            from_BV = torch.stack([row.adjusted(logits_V) for logits_V, row in zip(logits_BV, rows, strict=True)])
        chosen: dict[int, int] = {}
        order = sorted(range(len(rows)), key=lambda place: _filters(rows[place].sampling))
        for _, group in groupby(order, key=lambda place: _filters(rows[place].sampling)):
            places = list(group)
            some_BV = from_BV if len(places) == len(rows) else from_BV[places]
            tokens = choose(some_BV, rows[places[0]].sampling, [rows[place].stream for place in places])
            chosen.update(zip(places, tokens.tolist(), strict=True))
        return [
            _tokens_of(logits_BV[place : place + 1], row.answer.request, [chosen[place]])[0]
            for place, row in enumerate(rows)
        ]

    def _write(self, row: _Row, token: Token) -> None:
        answer, text, new = row.answer, "", list[Token]()
        if answer.finish is not None:
            return
        if row.matcher is not None:
            row.matcher.accept(token.id)
            answer.problem = row.matcher.problem
        if answer.problem is not None:
            answer.finish = "error"
        elif answer.request.max_tokens == 0:
            answer.finish = "length"
        elif token.id in answer.request.ends:
            answer.finish, answer.end = "stop", token
        else:
            new = [token]
            answer.tokens.append(token)
            if row.seen is not None:
                row.seen[0][token.id] = True
                row.seen[1][token.id] += 1
            if row.writer is not None:
                text = row.writer.add(token.id)
                answer.finish = None if row.writer.stopped is None else "stop"
            if row.matcher is not None and row.matcher.complete:
                answer.finish = "stop"
            if answer.finish is None and len(answer.tokens) == answer.request.max_tokens:
                answer.finish = "length"
        if answer.finish is not None and row.writer is not None:
            text += row.writer.finish()
            answer.finish = answer.finish if row.writer.stopped is None else "stop"
        answer.text += text
        if answer.listener is not None:
            answer.listener(answer, new, text)

    def _sweep(self) -> None:
        """Free the slots of answers that have ended; the last rows move into them."""
        self._waiting = deque(row for row in self._waiting if row.answer.finish is None)
        for place in reversed(range(len(self._rows))):
            if self._rows[place].answer.finish is None:
                continue
            self._keep(place)
            whole, last = self._whole, len(self._rows) - 1
            if place < whole:
                # The last row whose prompt has been read moves here, and the row being read moves to that one's slot.
                self._put(whole - 1, place)
                self._put(last, whole - 1)
            self._rows.pop()
            self._reader.drop_last()

    def _keep(self, place: int) -> None:
        if self._prefixes is not None and isinstance(self._reader, CachedReader):
            row = self._rows[place]
            read = (*row.answer.request.prompt, *row.answer.ids)[: row.read]
            self._prefixes.keep(self._owner, read, self._reader, place)

    def _put(self, source: int, target: int) -> None:
        if source != target:
            self._reader.move(source, target)
            self._rows[target] = self._rows[source]


def _filters(sampling: Sampling) -> tuple[float, ...]:
    """The settings that rows sampled together must share."""
    if sampling.temperature == 0:
        return (0.0,)
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _tokens_of(logits_TV: torch.Tensor, request: Request, chosen: Sequence[int]) -> list[Token]:
    """The tokens, with the details that the request wants."""
    if request.logprobs is None:
        return [Token(token) for token in chosen]
    logprobs_TV = logits_TV.double().log_softmax(-1)
    top = logprobs_TV.topk(min(request.logprobs, logprobs_TV.shape[1]))
    values = logprobs_TV.gather(1, torch.tensor(chosen, device=logprobs_TV.device)[:, None]).flatten().tolist()
    details = zip(chosen, values, top.indices.tolist(), top.values.tolist(), strict=True)
    return [Token(token, value, tuple(zip(ids, best, strict=True))) for token, value, ids, best in details]


def requests_of(
    prompts: Sequence[Sequence[int]],
    ends: Collection[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
) -> list[Request]:
    """A request for each prompt, each with its own random stream."""
    return [
        Request(prompt=prompt, max_tokens=max_tokens, sampling=sampling, row=row, ends=ends, stops=stops)
        for row, prompt in enumerate(prompts)
    ]

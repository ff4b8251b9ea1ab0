"""OpenAI's API as data: validated requests, and answers and errors in its format. No server here."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshwright.models.generate import LEAST_PENALTY, Sampling
from meshwright.serve.grammar import Kind

MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, LONGEST_STOP = 64, 20, 16, 1000
MAX_BIASES, MOST_BIAS = 1024, 100
MAX_MESSAGES, MAX_PROMPTS = 2**14, 2**14
QUICK = Field(fail_fast=True)
"""Checking a list ends at its first fault: collecting a million faults takes a minute and gigabytes."""


class ApiError(Exception):
    """An error response in OpenAI's format."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The response."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class TextPart(_Model):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Model):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], QUICK] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None
    tool_calls: Annotated[list[dict[str, Any]], QUICK] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        parts = content if isinstance(content, list) else ()
        kinds = (str(part.get("type"))[:40] for part in parts if isinstance(part, dict))
        if other := next((kind for kind in kinds if kind != "text"), None):
            what = "images" if other == "image_url" else f"parts of type {other!r}"
            raise ValueError(f"the models of this server read text alone, no {what}; describe them in words")
        return content

    def plain(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        kept = self.model_dump(exclude_none=True, include={"name", "reasoning_content", "tool_calls", "tool_call_id"})
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **kept}


TokenList = Annotated[list[int], QUICK]
Prompts = (
    str
    | Annotated[list[str], QUICK, Field(max_length=MAX_PROMPTS)]
    | TokenList
    | Annotated[list[TokenList], QUICK, Field(max_length=MAX_PROMPTS)]
)
"""Texts or token ids, one or several."""


class StreamOptions(_Model):
    """How an answer is streamed."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Model):
    """A schema of answers."""

    name: str | None = None
    description: str | None = None
    rules: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Model):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Model):
    """The form of an answer, in vLLM's words: one of these."""

    rules: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    choice: Annotated[list[str], QUICK] | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class AnswerFormat:
    """The form that answers must have."""

    param: str
    """The field that requests it."""
    kind: Kind
    text: str
    """The rules, as `Grammars.compile` reads them."""


class Generation(_Model):
    """The fields of both kinds of requests."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=LEAST_PENALTY, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[list[str], QUICK] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    logit_bias: dict[int, float] | None = Field(default=None, max_length=MAX_BIASES)
    max_tokens: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings of an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            message = f"stop: at most {MAX_STOPS} texts, each of 1 to {LONGEST_STOP} characters"
            raise ApiError(400, message, param="stop")
        return stops

    def biases(self, vocab: int) -> dict[int, float]:
        """The biases of some tokens' logits."""
        biases = self.logit_bias or {}
        for token, bias in biases.items():
            if not 0 <= token < vocab:
                raise ApiError(400, f"logit_bias: token {token} does not exist; tokens are 0 to {vocab - 1}")
            if not abs(bias) <= MOST_BIAS:
                raise ApiError(
                    400, (f"logit_bias: {bias:g} of token {token} is not between -{MOST_BIAS} and {MOST_BIAS}")
                )
        return biases

    def sampling(self) -> Sampling:
        """How tokens are drawn; without a given seed, from a new one."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )

    @property
    def form(self) -> AnswerFormat | None:
        """The form of answers, if the request sets one."""
        wanted, other = self.response_format, self.structured_outputs
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise ApiError(400, "response_format: json_schema is missing", param="response_format")
        forms: list[AnswerFormat] = []
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is not None:
            forms.append(AnswerFormat("response_format", "schema", json.dumps(wanted.json_schema.rules)))
        elif wanted is not None and wanted.type == "json_object":
            forms.append(AnswerFormat("response_format", "schema", '{"type": "object"}'))
        if other is not None and other.rules is not None:
            forms.append(AnswerFormat("structured_outputs", "schema", json.dumps(other.rules)))
        if other is not None and other.regex is not None:
            forms.append(AnswerFormat("structured_outputs", "regex", other.regex))
        if other is not None and other.choice is not None:
            forms.append(AnswerFormat("structured_outputs", "choice", json.dumps(other.choice)))
        if other is not None and len(forms) != 1:
            message = "structured_outputs: give exactly one of json, regex and choice, and no response_format"
            raise ApiError(400, message, param="structured_outputs")
        return forms[0] if forms else None

    @property
    def wanted_tokens(self) -> int | None:
        """Most new tokens; None: the rest of the context."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of likeliest tokens to report with each token; None: no log-probabilities."""
        return None


class FunctionName(_Model):
    """The name of a function."""

    name: str


class NamedTool(_Model):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TemplateArguments(_Model):
    """What a chat template gets besides the messages."""

    tools: Annotated[list[dict[str, Any]], QUICK] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Generation, TemplateArguments):
    """A conversation to be answered."""

    messages: Annotated[list[ChatMessage], QUICK, Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    """Texts, or token ids, to be continued."""

    prompt: Prompts = ""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, in order."""
        return _several(self.prompt, "prompt")

    @property
    def wanted_tokens(self) -> int | None:
        """See `Generation`; the default is OpenAI's. 0 if only the prompt's log-probabilities are wanted."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo: true", param="max_tokens")
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(_Model):
    """Texts, or token ids, to be embedded."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    user: str | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The texts, in order."""
        return _several(self.input, "input")


class TokenizeRequest(TemplateArguments):
    """A text or a conversation to be encoded, in vLLM's words."""

    model: str | None = None
    """None: the first model."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], QUICK, Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    """Of a text: with the tokens that the tokenizer puts around it."""
    add_generation_prompt: bool = True
    """Of a conversation."""
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeRequest(_Model):
    """Token ids to be decoded, in vLLM's words."""

    model: str | None = None
    """None: the first model."""
    tokens: TokenList


class LoadAdapter(_Model):
    """An adapter to be loaded, in vLLM's words."""

    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.:/@-]+$")
    lora_path: str = Field(min_length=1)


class UnloadAdapter(_Model):
    """An adapter to be unloaded."""

    lora_name: str
    lora_int_id: int | None = None


def _several(given: Any, param: str) -> Sequence[str | list[int]]:
    """One or several prompts as several. Raises `ApiError` if there is none, or one is empty."""
    single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if single else list(given)
    if not prompts or not all(isinstance(prompt, str) or prompt for prompt in prompts):
        raise ApiError(400, f"{param}: the list or a prompt in it is empty", param=param)
    return prompts


def parse(kind: type[BaseModel], body: bytes) -> Any:
    """A request of this kind. Raises `ApiError` with the fault and its place."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # For a field that may have several types, the places name these too.
        place = ".".join(
            str(part) for part in first["loc"] if part not in ("str", "int") and not str(part).startswith("list[")
        )
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is not JSON: {what.removeprefix('Invalid JSON: ')}") from None
        if first["type"] == "extra_forbidden":
            what = "unknown field"
        elif first["type"] in ("literal_error", "none_required", "too_long"):
            what = f"this server does not support it ({what[0].lower()}{what[1:]})"
        raise ApiError(400, f"{place or 'the body'}: {what}", param=place or None) from None

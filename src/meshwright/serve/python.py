"""The functions `evaluate` and `generate` of Python code."""

from pathlib import Path
from typing import Any, TypeVar

from meshwright.models.generate import Sampling
from meshwright.serve.examine import examinee_of
from meshwright.serve.trained import Settings, answer_texts, continue_texts, evaluate_texts, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks.ask import open_tasks
from meshwright.tasks.result import TaskResult
from meshwright.trainer.evaluate import Evaluation

Texts = str | list[str] | tuple[str, ...]
TextT = TypeVar("TextT", str, list[str])
LEAST = {"sequence_length": 1, "samples": 1, "shots": 0, "limit": 1}
"""Least values of settings of `evaluate`."""


def evaluate(
    model: Path | str,
    *,
    source: Texts | None = None,
    sequence_length: int | None = None,
    samples: int | None = None,
    tasks: Texts | None = None,
    shots: int | None = None,
    shots_from: str | None = None,
    limit: int | None = None,
    chat: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    ema: bool = False,
) -> Evaluation | list[TaskResult]:
    """The loss of a trained model on text, or its results in `tasks`.

    `model` is a run directory, a checkpoint, a Hugging Face directory, or a hub id in the local cache. `ema` uses the
    moving average of the weights. The text is the run's held-out text, or that of `source` (files, globs or `stdlib`):
    all of it, or `samples` evenly spaced sequences of `sequence_length` tokens. Tasks are .jsonl files of questions,
    YAML files or names of lm-evaluation-harness. `shots` solved questions come before each, from the file `shots_from`
    or the task's own; only the first `limit` questions are asked, with `chat` through the model's template.

    Raises `UserError` if there is no such model, text or task.
    """
    text: dict[str, Any] = {"source": source, "sequence_length": sequence_length, "samples": samples}
    about_tasks = {"shots": shots, "shots_from": shots_from, "limit": limit, "chat": chat}
    for name, value in (text if tasks is not None else about_tasks).items():
        if value:
            raise UserError(f"{name} only applies to {'text' if tasks is not None else 'tasks'}; leave it out")
    for name, least in LEAST.items():
        value = (text | about_tasks)[name]
        if value is not None and (not isinstance(value, int) or value < least):
            raise UserError(f"{name}={value!r} is not allowed: must be a whole number, at least {least}")
    if tasks is not None:
        opened = open_tasks([TaskSpec(task=task, **about_tasks) for task in _listed(tasks)], Path())
        return opened.ask(examinee_of(open_trained(Path(model), device=device, dtype=dtype, averaged=ema)))
    return evaluate_texts(
        open_trained(Path(model), device=device, dtype=dtype, averaged=ema),
        sources=None if source is None else _listed(source),
        sequence_length=sequence_length,
        num_samples=samples,
    )


def generate(
    model: Path | str,
    prompt: TextT,
    *,
    chat: bool = False,
    system: str | None = None,
    max_tokens: int | None = None,
    stop: Texts = (),
    device: str = "auto",
    dtype: str | None = None,
    ema: bool = False,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
) -> TextT:
    """A trained model's continuation of a prompt, or of each of several.

    `model` as in `evaluate`. With `chat`, a prompt is a user's message, and the model's template renders it after the
    `system` message. `max_tokens` is 128 by default, or the rest of the context. `stop` texts end a continuation.
    The other settings are those of sampling; at temperature 0 the most likely token is taken.

    Raises `UserError` if there is no such model, or the prompt does not fit.
    """
    if system and not chat:
        raise UserError("system needs chat=True")
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    settings = Settings(sampling=sampling, max_tokens=max_tokens, stops=_listed(stop))
    trained, prompts = open_trained(Path(model), device=device, dtype=dtype, averaged=ema), _listed(prompt)
    if chat:
        texts = answer_texts(trained, prompts, settings, system=system)
    else:
        texts = continue_texts(trained, prompts, settings)
    if isinstance(prompt, str):
        return texts[0]
    return texts


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)

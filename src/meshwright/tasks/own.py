"""Our own tasks: the questions of a .jsonl file, asked and scored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.chat import ask
from meshwright.spec.errors import UserError
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks.examinee import Examinee, Ids, Writing
from meshwright.tasks.questions import Layout, Question, read_questions
from meshwright.tasks.result import Metric, TaskResult


@dataclass(frozen=True)
class OwnTask:
    """A file's questions, and the examples before each question."""

    name: str
    layout: Layout
    questions: Sequence[Question]
    examples: Sequence[Question]
    chat: bool

    def prompt(self, question: Question) -> str:
        """The question's prompt for the model."""
        shown = "".join(f"{example.prompt}{example.solved}\n\n" for example in self.examples)
        return f"{question.head}{shown}{question.prompt}"


def open_task(spec: TaskSpec, base_dir: Path) -> OwnTask:
    """The questions of the file that `spec` names, relative to `base_dir`.

    Raises `UserError` if a file cannot be used, or no question is left.
    """
    path, shots = base_dir / spec.task, spec.shots or 0
    layout, questions = read_questions(path)
    examples, questions = questions[:shots], questions[shots:]
    if spec.shots_from is not None:
        there, others = read_questions(base_dir / spec.shots_from)
        examples, questions = others[:shots], [*examples, *questions]
        if there is not layout:
            raise UserError(
                f"{spec.shots_from}: the examples have the columns of {there.name}, but the task those of {layout.name}"
            )
    if len(examples) < shots or not questions:
        raise UserError(f"{path}: has too few questions for shots={shots}; use fewer shots, or give a file of examples")
    return OwnTask(path.stem, layout, questions[: spec.limit], examples, spec.chat)


def run_task(task: OwnTask, examinee: Examinee) -> TaskResult:
    """Ask every question. Raises `UserError` if a question is too long, or if a chat template is required and
    missing."""
    return _choose(task, examinee) if task.questions[0].choices else _write(task, examinee)


def encode_pair(examinee: Examinee, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of its continuation, tokenized together."""
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    encode = examinee.tokenizer.encode_prompt
    before, whole = encode(context) or [examinee.tokenizer.eos_id], encode(context + continuation)
    return before, whole[len(before) :] if context else whole


def _choose(task: OwnTask, examinee: Examinee) -> TaskResult:
    rows: list[tuple[Ids, Ids]] = []
    for question in task.questions:
        if task.chat:
            (before,), _ = ask(examinee.tokenizer, [task.prompt(question)])
            rows += [(before, examinee.tokenizer.encode(choice.strip())) for choice in question.choices]
        else:
            rows += [encode_pair(examinee, task.prompt(question), choice) for choice in question.choices]
    ranked, records, start = examinee.logprobs(rows), [], 0
    for question in task.questions:
        logprobs = [one.logprob for one in ranked[start : start + len(question.choices)]]
        start += len(question.choices)
        sizes = [max(1, len(choice.strip().encode())) for choice in question.choices]
        per_byte = [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
        scores = {"acc": _first_best(logprobs) == question.right}
        if task.layout.by_length:
            scores["acc_norm"] = _first_best(per_byte) == question.right
        answer = question.choices[_first_best(logprobs)].strip()
        records.append(_record(task, question, question.choices[question.right].strip(), answer, scores))
    return _result(task, records)


def _write(task: OwnTask, examinee: Examinee) -> TaskResult:
    texts = [task.prompt(question) for question in task.questions]
    tokenizer, layout = examinee.tokenizer, task.layout
    if task.chat:
        prompts: list[list[int]] = ask(tokenizer, texts)[0]
    else:
        prompts = [tokenizer.encode_prompt(text) or [tokenizer.eos_id] for text in texts]
    room = examinee.max_length - max(map(len, prompts))
    if room < 1:
        raise UserError(
            f"task {task.name}: a question has {max(map(len, prompts))} tokens, but the model supports "
            f"{examinee.max_length}; use fewer shots"
        )
    writing = Writing(max_tokens=min(layout.max_tokens, room), stops=() if task.chat else layout.stops, chat=task.chat)
    records = []
    for question, text in zip(task.questions, examinee.write(prompts, writing), strict=True):
        scores = {name: extract(text) in question.answers for name, extract in layout.metrics.items()}
        records.append(_record(task, question, question.answers[0], text, scores))
    return _result(task, records)


def _record(task: OwnTask, question: Question, right: str, answer: str, scores: dict[str, bool]) -> dict[str, Any]:
    return {"task": task.name, "question": question.prompt, "right": right, "answer": answer, **scores}


def _result(task: OwnTask, records: list[dict[str, Any]]) -> TaskResult:
    names = [name for name, value in records[0].items() if isinstance(value, bool)]
    metrics = {}
    for name in names:
        share = sum(record[name] for record in records) / len(records)
        error = math.sqrt(share * (1 - share) / (len(records) - 1)) if len(records) > 1 else None
        metrics[name] = Metric(share, error)
    return TaskResult(task.name, len(records), metrics, records)


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index])

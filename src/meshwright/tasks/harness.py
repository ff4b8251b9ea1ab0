"""lm-evaluation-harness's tasks for an examinee: its registry, its prompts, its metrics.

The package is an extra (`pip install 'meshwright[eval]'`), imported only when a task needs it. Every rank makes the
same requests in the same order; the first that gets results shares them.
"""

import importlib
import importlib.util
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.data.chat import find_template
from meshwright.models.generate import Sampling
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.problems import did_you_mean
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks.examinee import Examinee, Writing
from meshwright.tasks.result import Metric, TaskResult

MAX_TOKENS = 256
"""Default for the most tokens of an answer."""
_NAMED = re.compile(r"^(task|group|tag):[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class HarnessTask:
    """A task, group or tag of the registry, or of a YAML file."""

    name: str
    spec: TaskSpec
    folder: Path | None
    """The folder of the YAML file."""
    with_defaults: bool
    """Whether the package's own tasks are needed."""


def find_task(spec: TaskSpec, base_dir: Path) -> HarnessTask:
    """The named task.

    Raises `UserError` if the package is not installed, or there is no such task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"task {spec.task}: needs lm-evaluation-harness: {install('eval')} (for your own questions, give a .jsonl "
            "file)"
        )
    if spec.shots_from is not None:
        raise UserError(
            f"task {spec.task}: lm-evaluation-harness's tasks have their own examples; leave shots_from out"
        )
    path = base_dir / spec.task
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"task {spec.task}: {path} does not exist")
        named = _NAMED.search(path.read_text(encoding="utf-8"))
        if named is None:
            raise UserError(f"{path}: names no task; add a line task: NAME, as in lm-evaluation-harness's task files")
        return HarnessTask(named[2], spec, path.resolve().parent, named[1] != "task")
    known = _manager(None, with_defaults=True).all_tasks
    if spec.task not in known:
        raise UserError(f"task {spec.task}: is not in lm-evaluation-harness{did_you_mean(spec.task, known)}")
    return HarnessTask(spec.task, spec, None, True)


def run_harness_task(task: HarnessTask, examinee: Examinee) -> list[TaskResult]:
    """The results of a task, or of each in a group.

    Raises `UserError` if the task's data cannot be read.
    """
    with _undisturbed():
        try:
            output = importlib.import_module("lm_eval").simple_evaluate(
                model=_language_model(examinee),
                tasks=[task.name],
                num_fewshot=task.spec.shots,
                limit=task.spec.limit,
                apply_chat_template=task.spec.chat,
                task_manager=_manager(task.folder, with_defaults=task.with_defaults),
            )
        except OSError as error:
            raise UserError(f"task {task.spec.task}: its data cannot be read ({error})") from error
    results = None if output is None or not output.get("results") else _results(output)
    (first, *_) = (each for each in gather_everywhere(results) if each is not None)
    return first


def _manager(folder: Path | None, *, with_defaults: bool) -> Any:
    tasks = importlib.import_module("lm_eval.tasks")
    return tasks.TaskManager(include_path=None if folder is None else str(folder), include_defaults=with_defaults)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the states of random generators, which the package seeds, and keeps its messages off the terminal."""
    python, numpy, logger = random.getstate(), np.random.get_state(), logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        logger.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy)


def _results(output: Mapping[str, Any]) -> list[TaskResult]:
    """One result for each task and group."""
    sizes = {name: int(size["effective"]) for name, size in output.get("n-samples", {}).items()}
    results = []
    for name, figures in output["results"].items():
        metrics = {}
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            known = isinstance(error, int | float)
            metrics[metric if filtered == "none" else key] = Metric(float(value), float(error) if known else None)
        members = _members(name, output.get("group_subtasks", {}))
        records = [{"task": name, **_plain(sample)} for sample in output.get("samples", {}).get(name, [])]
        results.append(TaskResult(name, sum(sizes.get(member, 0) for member in members), metrics, records))
    return results


def _members(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    below = [member for each in groups.get(name, ()) for member in _members(each, groups)]
    return below or [name]


def _plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"doc_id": sample.get("doc_id"), "right": sample.get("target"), "answer": sample.get("filtered_resps")}
    return kept | {name: sample.get(name) for name in sample.get("metrics", ())}


def _language_model(examinee: Examinee) -> Any:
    """The examinee in the package's interface for models: its `TemplateLM`, with tokens as in transformers' `HFLM`."""
    tokenizer = examinee.tokenizer
    base = importlib.import_module("lm_eval.api.model").TemplateLM
    utils = importlib.import_module("lm_eval.utils")
    beginning = tokenizer.named_tokens.get("bos_token")

    class LanguageModel(base):
        """One of our models."""

        eot_token_id = tokenizer.eos_id
        prefix_token_id = (tokenizer.token_id(beginning) if beginning else None) or tokenizer.eos_id
        max_length = examinee.max_length
        max_gen_toks = MAX_TOKENS
        tokenizer_name = "meshwright"
        device = examinee.share.device

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Token ids, special tokens by their names."""
            if add_special_tokens is None:
                add_special_tokens = not (beginning and string.startswith(beginning))
            return tokenizer.encode_marked([string], add_special_tokens=add_special_tokens)[0][0]

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            """The template's source."""
            return tokenizer.chat_template if chat_template else None

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            """The conversation as text."""
            return find_template("auto", tokenizer, Path()).render(chat_history, answer=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            rows = [(before, continuation) for _, before, continuation in requests]
            return [(score.logprob, score.greedy) for score in examinee.logprobs(rows)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Each text's log-probability, read in windows of the model's length."""
            windows = [
                [
                    utils.make_disjoint_window(window)
                    for window in utils.get_rolling_token_windows(
                        token_list=self.tok_encode(request.args[0]),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=self.max_length,
                        context_len=1,
                    )
                ]
                for request in requests
            ]
            scores = iter(examinee.logprobs([row for rows in windows for row in rows]))
            return [sum(next(scores).logprob for _ in rows) for rows in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """The model's text, up to the request's stop texts."""
            arguments = (request.args for request in requests)
            return _write(examinee, [(self.tok_encode(text), options) for text, options in arguments])

    return LanguageModel()


def _write(examinee: Examinee, requests: Sequence[tuple[list[int], Mapping[str, Any]]]) -> list[str]:
    """The model's continuation of each prompt; prompts with the same options are generated together."""
    end, texts = examinee.tokenizer.decode([examinee.tokenizer.eos_id]), [""] * len(requests)
    groups: dict[str, list[int]] = {}
    for number, (_, options) in enumerate(requests):
        groups.setdefault(repr(options), []).append(number)
    for numbers in groups.values():
        writing = _writing(requests[numbers[0]][1], end)
        room = examinee.max_length - writing.max_tokens
        if room < 1:
            raise UserError(
                f"a task requests answers of {writing.max_tokens} tokens, but the model supports "
                f"{examinee.max_length} in total"
            )
        prompts = [requests[number][0][-room:] for number in numbers]
        for number, text in zip(numbers, examinee.write(prompts, writing), strict=True):
            texts[number] = text
    return texts


def _writing(options: Mapping[str, Any], end: str) -> Writing:
    """The package's generation options."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    length = next((int(options[name]) for name in _LENGTHS if options.get(name) is not None), MAX_TOKENS)
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") is False or (not options.get("do_sample") and not temperature):
        return Writing(max_tokens=length, stops=[*stops, end])
    sampling = Sampling(
        temperature=float(options.get("temperature", 1.0)),
        top_p=float(options.get("top_p", 1.0)),
        top_k=int(options.get("top_k", 0)),
    )
    return Writing(max_tokens=length, sampling=sampling, stops=[*stops, end])

"""Evaluation tasks during training (`training.evaluation.tasks`), under every layout."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.data.chat import find_template
from meshwright.data.prepare import Corpus
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.tasks.ask import Tasks, open_tasks
from meshwright.tasks.examinee import Examinee, Ids, TaskShare, Writing, ends_among
from meshwright.tasks.result import flat_figures
from meshwright.trainer.samples import continue_together
from meshwright.trainer.setup import Trainer


class TaskCallback(Callback):
    """Runs the tasks whenever held-out loss is measured; prints and writes the results."""

    patient = True

    def __init__(self, trainer: Trainer, corpus: Corpus) -> None:
        """Raises `UserError` if a task cannot be used."""
        self._trainer, self._evaluation = trainer, trainer.resolved.run.training.evaluation
        self._tasks: Tasks = open_tasks(self._evaluation.tasks, Path(trainer.resolved.base_dir))
        self._examinee = examinee_in_training(trainer, corpus.tokenizer)

    def on_step(self, training: Training, record: Record) -> None:
        every = self._evaluation.every
        if training.step == training.run.training.steps or (every and training.step % every == 0):
            results = self._tasks.ask(self._examinee)
            for result in results:
                training.say(f"step {training.step}  task {result.line()}")
            training.log("tasks", **flat_figures(results))


def examinee_in_training(trainer: Trainer, tokenizer: TextTokenizer) -> Examinee:
    """The model in training, as an `Examinee` that answers tasks. Its methods are collective."""
    layout, resolved = trainer.resolved.run.layout, trainer.resolved
    multiple = 2 * layout.cp * layout.tp  # as in `continue_together`
    rows = resolved.micro_batch
    length = resolved.run.data.sequence_length

    def write(prompts: Sequence[Ids], writing: Writing) -> list[str]:
        if writing.sampling.temperature != 0:
            raise UserError(
                "a task samples tokens at random, which is not supported during training; use `meshwright eval` instead"
            )
        ends = {tokenizer.eos_id} | ends_among(tokenizer, writing.stops)
        if writing.chat:
            ends |= set(find_template("auto", tokenizer, Path()).ends_of_turn())
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        texts = [""] * len(prompts)
        for start in range(0, len(order), rows):
            part = order[start : start + rows]
            for number, ids in zip(
                part, continue_together(trainer, [prompts[i] for i in part], writing.max_tokens, ends), strict=True
            ):
                texts[number] = before_stops(tokenizer.decode_text(ids), writing.stops)
        return texts

    share = TaskShare(
        device=trainer.device,
        max_length=resolved.model.max_positions // multiple * multiple,
        tokens_at_once=rows * length,
        multiple=multiple,
        data_rank=trainer.data_rank,
        data_ranks=layout.data_parallel,
        places_of=trainer.places_of,
    )
    return Examinee(trainer.train_step.passes, tokenizer, share, write)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops` in it."""
    return min((text.split(stop)[0] for stop in stops if stop), key=len, default=text)

"""Samples that the model generates during training.

Under every layout all ranks read the same rows together, as in an evaluation, and agree on every next token.

Shapes: B prompts, T positions for a prompt and its continuation, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.comm import collectives
from meshwright.data.chat import ask
from meshwright.data.prepare import Corpus
from meshwright.models.generate import check_room, continue_rows
from meshwright.parallel.data import release_gathered
from meshwright.spec.batch import Batch
from meshwright.spec.training import SampleSpec
from meshwright.trainer.setup import Trainer


class SampleTexts(Callback):
    """Continues the recipe's prompts (`training.samples`), prints and writes them."""

    def __init__(self, spec: SampleSpec, trainer: Trainer, corpus: Corpus) -> None:
        self.spec, self.trainer, self.corpus = spec, trainer, corpus

    def on_start(self, training: Training) -> None:
        """See `Callback`. Raises `UserError` if a prompt is too long, or there is no chat template."""
        if training.step == 0:
            self._write(training)

    def on_step(self, training: Training, record: Record) -> None:
        step, every = training.step, self.spec.every
        if step == training.run.training.steps or (every and step % every == 0):
            self._write(training)

    def _write(self, training: Training) -> None:
        spec, tokenizer = self.spec, self.corpus.tokenizer
        if spec.chat:
            prompts, ends = ask(tokenizer, spec.prompts)
        else:
            prompts = [tokenizer.encode_prompt(prompt) or [tokenizer.eos_id] for prompt in spec.prompts]
            ends = {tokenizer.eos_id}
        continued = continue_together(self.trainer, prompts, spec.max_tokens, ends)
        for prompt, tokens in zip(spec.prompts, continued, strict=True):
            text = tokenizer.decode(tokens)
            training.say(f"step {training.step}  sample {prompt!r}: {text!r}")
            training.log("sample", prompt=prompt, text=text)


def continue_together(
    trainer: Trainer, prompts: Sequence[Sequence[int]], max_tokens: int, ends: Collection[int]
) -> list[list[int]]:
    """Up to `max_tokens` of the likeliest token ids after each prompt, the same on every rank. Collective.

    Raises `UserError` if prompts and new tokens are too long.
    """
    passes, layout = trainer.train_step.passes, trainer.resolved.run.layout
    multiple = 2 * layout.cp * layout.tp  # tokens, so that every method can split them over ranks
    check_room(prompts, max_tokens, trainer.resolved.model.max_positions // multiple * multiple)

    def likeliest(tokens_BT: torch.Tensor, asked_BT: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' choices of a token id: ranks may round differently, but must continue with the same
        one."""
        positions_BT, places = None, trainer.places_of(tokens_BT.shape[1])
        if places is not None:
            here = torch.from_numpy(places).to(trainer.device)
            positions_BT = here.expand(len(tokens_BT), -1)
            tokens_BT, asked_BT = tokens_BT[:, here], asked_BT[:, here]
        logits_BV = passes.next_logits(Batch(tokens_BT, position_ids=positions_BT), asked_BT)
        nothing_B = torch.full((len(prompts),), -1, device=trainer.device)
        return collectives.all_reduce_(logits_BV.argmax(-1) if passes.has_loss else nothing_B, op="max")

    continued = continue_rows(likeliest, prompts, max_tokens, ends, multiple=multiple, device=trainer.device)
    release_gathered(passes.model)
    return continued

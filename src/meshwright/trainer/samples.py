"""The one place that lets the model write while it is trained, so that people see what a loss means.

Whatever the layout, all ranks read the same rows together, as they do in an evaluation, and agree on each next token.

Shapes: B prompts, T room for a prompt and what is written, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from meshwright.data.chat import ask
from meshwright.data.prepare import Corpus
from meshwright.models.generate import WholeRows, check_room, continue_rows
from meshwright.parallel.data import release_gathered
from meshwright.trainer.display import Display
from meshwright.trainer.metrics import Journal
from meshwright.trainer.setup import Trainer


def samples_due(trainer: Trainer) -> bool:
    """Whether the recipe wants texts continued at this step."""
    samples, step = trainer.resolved.run.training.samples, trainer.step
    if samples is None:
        return False
    return step in (0, trainer.resolved.run.training.steps) or (samples.every > 0 and step % samples.every == 0)


def write_samples(trainer: Trainer, corpus: Corpus, journal: Journal | None, display: Display) -> None:
    """Continue the recipe's prompts, print and write them. Collective.

    Raises `ValueError` where a prompt has no room, or there is no chat template.
    """
    samples, tokenizer = trainer.resolved.run.training.samples, corpus.tokenizer
    assert samples is not None
    if samples.chat:
        prompts, ends = ask(tokenizer, samples.prompts)
    else:
        prompts = [tokenizer.encode_prompt(prompt) or [tokenizer.eos_id] for prompt in samples.prompts]
        ends = {tokenizer.eos_id}
    for prompt, tokens in zip(
        samples.prompts, continue_together(trainer, prompts, samples.max_tokens, ends), strict=True
    ):
        text = tokenizer.decode(tokens)
        display.say(f"step {trainer.step}  sample {prompt!r}: {text!r}")
        if journal:
            journal.write("sample", step=trainer.step, prompt=prompt, text=text)


def continue_together(
    trainer: Trainer, prompts: Sequence[Sequence[int]], max_tokens: int, ends: Collection[int]
) -> list[list[int]]:
    """Up to `max_tokens` of the likeliest token ids behind each prompt, the same on every rank. Collective.

    Raises `ValueError` where prompts and new tokens have no room.
    """
    passes, layout = trainer.train_step.passes, trainer.resolved.run.layout
    multiple = 2 * layout.cp * layout.tp  # of tokens that ranks can share, whichever way
    check_room(prompts, max_tokens, trainer.resolved.model.max_positions // multiple * multiple)

    def read(tokens_BT: torch.Tensor, asked_BT: torch.Tensor) -> torch.Tensor:
        positions_BT, places = None, trainer.places_of(tokens_BT.shape[1])
        if places is not None:
            here = torch.from_numpy(places).to(trainer.device)
            positions_BT = here.expand(len(tokens_BT), -1)
            tokens_BT, asked_BT = tokens_BT[:, here], asked_BT[:, here]
        return passes.losses([(tokens_BT, None, None, positions_BT, None, None, asked_BT)])

    def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
        """Of ranks that round differently the largest token id is taken: what matters is that all go on alike."""
        nothing_B = torch.full((len(prompts),), -1, device=trainer.device)
        next_B = logits_BV.argmax(-1) if passes.has_loss else nothing_B
        if dist.is_initialized():
            dist.all_reduce(next_B, dist.ReduceOp.MAX)
        return next_B

    rows = WholeRows(read, prompts, max_tokens, multiple=multiple, device=trainer.device)
    continued = continue_rows(rows, max_tokens, ends, likeliest)
    release_gathered(passes.model)
    return continued

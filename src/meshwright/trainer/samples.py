"""The one place that lets the model write while it is trained, so that people see what a loss means."""

from meshwright.data.chat import ask
from meshwright.data.prepare import Corpus
from meshwright.models import Decoder
from meshwright.models.generate import Sampling, generate
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.display import Display
from meshwright.trainer.metrics import Journal
from meshwright.trainer.setup import Trainer


def check_samples(resolved: ResolvedRun) -> None:
    """Raise `ValueError` where samples are asked of a model that no process has as a whole, or has no room for them."""
    samples, layout = resolved.run.training.samples, resolved.run.layout
    if samples is None:
        return
    if layout.world_size > 1 or layout.offload != "none":
        raise ValueError(
            f"training.samples needs the whole model in one process, and the layout has {layout.world_size}; leave it "
            "out, and use `meshwright generate` on a checkpoint"
        )
    if samples.max_tokens >= resolved.model.max_positions:
        raise ValueError(
            f"training.samples.max_tokens={samples.max_tokens} leaves no room for a prompt: the model is meant for "
            f"{resolved.model.max_positions} positions"
        )


def write_samples(trainer: Trainer, corpus: Corpus, journal: Journal | None, display: Display) -> None:
    """Continue the recipe's prompts, print and write them, where it is time to.

    Raises `ValueError` where a prompt has no room, or there is no chat template.
    """
    samples, model = trainer.resolved.run.training.samples, trainer.model
    if samples is None:
        return
    first_or_last = trainer.step in (0, trainer.resolved.run.training.steps)
    if not first_or_last and (not samples.every or trainer.step % samples.every):
        return
    assert isinstance(model, Decoder)
    tokenizer = corpus.tokenizer
    if samples.chat:
        prompts, ends = ask(tokenizer, samples.prompts)
    else:
        prompts = [tokenizer.encode_prompt(prompt) or [tokenizer.eos_id] for prompt in samples.prompts]
        ends = {tokenizer.eos_id}
    continued = generate(model, prompts, max_tokens=samples.max_tokens, eos_id=ends, sampling=Sampling(temperature=0))
    for prompt, tokens in zip(samples.prompts, continued, strict=True):
        text = tokenizer.decode(tokens)
        display.say(f"step {trainer.step}  sample {prompt!r}: {text!r}")
        if journal:
            journal.write("sample", step=trainer.step, prompt=prompt, text=text)

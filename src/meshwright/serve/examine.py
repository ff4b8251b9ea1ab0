"""A trained model as an examinee: its log-probabilities, and texts generated with the KV cache."""

from collections.abc import Sequence

from meshwright.data.chat import find_template
from meshwright.models.packed import pack
from meshwright.objectives import NextToken
from meshwright.parallel import WholeModel
from meshwright.serve.engine import Engine, Request
from meshwright.serve.token_ids import end_ids
from meshwright.serve.trained import TrainedModel, config_of
from meshwright.tasks.examinee import Examinee, Ids, Share, Writing, ends_among
from meshwright.trainer.resolve import ENOUGH_TOKENS


def examinee_of(trained: TrainedModel) -> Examinee:
    """The model as an `Examinee` that answers tasks."""
    tokenizer = trained.tokenizer

    def write(prompts: Sequence[Ids], writing: Writing) -> list[str]:
        ends = end_ids(tokenizer, config_of(trained)) | ends_among(tokenizer, writing.stops)
        if writing.chat:
            ends |= set(find_template("auto", tokenizer, trained.tokenizer_dir).ends_of_turn())
        requests = [
            Request(
                prompt=prompt,
                max_tokens=writing.max_tokens,
                sampling=writing.sampling,
                row=row,
                ends=ends,
                stops=writing.stops,
            )
            for row, prompt in enumerate(prompts)
        ]
        pack(trained.model)
        return [answer.text for answer in Engine(trained.model, decode=tokenizer.decode_text).run(requests)]

    multiple = 1 if trained.ranks is None else trained.ranks.size()
    share = Share(
        device=trained.device,
        multiple=multiple,
        max_length=trained.spec.max_positions // multiple * multiple,
        tokens_at_once=ENOUGH_TOKENS[trained.device.type],
    )
    return Examinee(WholeModel(trained.model, NextToken()), tokenizer, share, write)

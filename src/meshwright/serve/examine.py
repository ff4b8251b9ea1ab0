"""A trained model that is asked questions: as an examinee of tasks, and in conversations of several turns."""

import dataclasses
from collections.abc import Sequence

from meshwright.data.chat import TEMPLATES, find_template
from meshwright.models.generate import Sampling
from meshwright.models.packed import pack
from meshwright.objectives import NextToken
from meshwright.parallel import WholeModel
from meshwright.serve.conversation import PromptEncoder
from meshwright.serve.engine import InferenceEngine, Request, requests_of
from meshwright.serve.token_ids import end_ids
from meshwright.serve.trained import TrainedModel, config_of
from meshwright.spec.errors import UserError
from meshwright.tasks.examinee import Examinee, Ids, TaskShare, Writing, ends_among
from meshwright.trainer.resolve import ENOUGH_TOKENS

PLAIN = TEMPLATES / "plain.jinja"
"""The template of a model that has none; it needs no special tokens."""
NEXT_TURN = "\n\nUser:"
"""The start of the user's next message for such a model, which has not learnt to end a turn."""


def examinee_of(trained: TrainedModel) -> Examinee:
    """The model as an `Examinee` that answers tasks."""
    tokenizer = trained.tokenizer

    def write(prompts: Sequence[Ids], writing: Writing) -> list[str]:
        ends = end_ids(tokenizer, config_of(trained)) | ends_among(tokenizer, writing.stops)
        if writing.chat:
            ends |= set(find_template("auto", tokenizer, trained.tokenizer_dir).ends_of_turn())
        requests = requests_of(
            prompts, ends, max_tokens=writing.max_tokens, sampling=writing.sampling, stops=writing.stops
        )
        pack(trained.model)
        return [answer.text for answer in InferenceEngine(trained.model, decode=tokenizer.decode_text).run(requests)]

    multiple = 1 if trained.ranks is None else trained.ranks.size()
    share = TaskShare(
        device=trained.device,
        multiple=multiple,
        max_length=trained.spec.max_positions // multiple * multiple,
        tokens_at_once=ENOUGH_TOKENS[trained.device.type],
    )
    return Examinee(WholeModel(trained.model, NextToken()), tokenizer, share, write)


def answer_questions(trained: TrainedModel, questions: Sequence[Sequence[str]], *, max_tokens: int) -> list[list[str]]:
    """The answers to each question's messages, asked in order in one conversation, at temperature 0.

    Raises `UserError` if a conversation has more tokens than the model's context.
    """
    tokenizer, stops = trained.tokenizer, ()
    if tokenizer.chat_template is None:
        tokenizer, stops = tokenizer.with_chat_template(PLAIN.read_text()), (NEXT_TURN,)
        trained = dataclasses.replace(trained, tokenizer=tokenizer)
    prompts = PromptEncoder(tokenizer)
    pack(trained.model)
    engine = InferenceEngine(trained.model, decode=tokenizer.decode_text)
    answers: list[list[str]] = [[] for _ in questions]
    for turn in range(max(map(len, questions), default=0)):
        numbers = [number for number, question in enumerate(questions) if len(question) > turn]
        requests = []
        for number in numbers:
            messages = []
            for question_text, answered in zip(questions[number], [*answers[number], None], strict=False):
                messages.append({"role": "user", "content": question_text})
                if answered is not None:
                    messages.append({"role": "assistant", "content": answered})
            ids = prompts.conversation(messages)
            room = engine.max_context - len(ids)
            if room < 1:
                raise UserError(
                    f"{trained.source}: turn {turn + 1} of question {number + 1} has {len(ids)} tokens, but the "
                    f"model supports {engine.max_context}; leave the question out"
                )
            requests.append(
                Request(
                    prompt=ids,
                    max_tokens=min(max_tokens, room),
                    sampling=Sampling(temperature=0.0),
                    row=number,
                    ends=prompts.answer_ends,
                    stops=stops,
                )
            )
        for number, answer in zip(numbers, engine.run(requests), strict=True):
            answers[number].append(answer.text.strip())
    return answers

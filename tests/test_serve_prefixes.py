"""Prompts with the same beginning as earlier ones: keys and values are not recomputed, and answers stay the same."""

from typing import Any

import pytest
import torch

from meshwright.models.generate import Sampling
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.prefixes import SHORTEST, Prefixes
from served import model_of

MIB = 2**20


def request(prompt: list[int], *, tokens: int = 9, **more: Any) -> Request:
    return Request(prompt=prompt, max_tokens=tokens, sampling=Sampling(temperature=0.0), logprobs=1, **more)


def numbers(length: int, start: int = 3) -> list[int]:
    return [(start + 7 * place) % 290 + 1 for place in range(length)]


def talk(engine: InferenceEngine, turns: int = 3) -> list[tuple[list[int], list[float]]]:
    """A conversation, with other answers of other lengths that end before and after it, so that rows move."""
    said, found = numbers(20), []
    for turn in range(turns):
        others = [request(numbers(5 + turn, 90), tokens=3 + 5 * turn), request(numbers(2, 50 + turn), tokens=15)]
        answers = engine.run([others[0], request(said), others[1]])
        found += [(answer.ids, [token.logprob or 0.0 for token in answer.tokens]) for answer in answers]
        said = [*said, *answers[1].ids, *numbers(4, 200 + turn)]
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "deepseek_v3", "gemma3", "gpt_oss"])
def test_a_conversation_is_answered_as_without_reuse(family: str) -> None:
    model, prefixes = model_of(family), Prefixes(MIB)
    found = talk(InferenceEngine(model, prefixes=prefixes))
    expected = talk(InferenceEngine(model))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert prefixes.reused == (20 + 8) + (20 + 8 + 1 + 4 + 8), (
        "all but the last token of each answer, which is not read"
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


def test_an_equal_prompt_reads_its_last_token_and_the_other_part_of_one_alike_is_read(model: Any) -> None:
    prefixes = Prefixes(MIB)
    engine = InferenceEngine(model, prefixes=prefixes)
    prompt = numbers(40)
    (first,) = engine.run([request(prompt)])
    for asked, reused in ((prompt, 39), (prompt[:25], 24), ([*prompt[:30], 2, 2, 2], 30), (prompt[: SHORTEST - 1], 0)):
        before = prefixes.reused
        (found,) = engine.run([request(asked)])
        (expected,) = InferenceEngine(model).run([request(asked)])
        assert found.ids == expected.ids
        assert prefixes.reused - before == reused
    assert engine.run([request(prompt)])[0].ids == first.ids


def test_a_scored_prompt_is_read_whole(model: Any) -> None:
    prefixes = Prefixes(MIB)
    engine = InferenceEngine(model, prefixes=prefixes)
    engine.run([request(numbers(30))])
    (answer,) = engine.run([request(numbers(30), scores_prompt=True)])
    assert (len(answer.prompt), prefixes.reused) == (30, 0)


def test_memory_is_bounded_and_the_least_recently_used_goes_first(model: Any) -> None:
    size = 2 * 2 * 2 * 8 * 8 * 28
    """Bytes of 28 tokens: keys and values of 2 layers with 2 heads of width 8 in fp64."""
    prefixes = Prefixes(2 * size)
    engine = InferenceEngine(model, prefixes=prefixes)
    for start in (1, 2):
        engine.run([request(numbers(20, start))])
        assert prefixes.num_bytes == start * size
    engine.run([request(numbers(20, 1))])
    engine.run([request(numbers(20, 3))])
    assert prefixes.num_bytes == 2 * size
    before = prefixes.reused
    engine.run([request(numbers(20, 1), tokens=1)])
    assert prefixes.reused == before + 19
    engine.run([request(numbers(20, 2), tokens=1)])
    assert prefixes.reused == before + 19
    engine.run([request(numbers(80), tokens=2)])
    assert prefixes.num_bytes <= 2 * size


def test_models_do_not_share_and_an_error_frees_all(model: Any) -> None:
    prefixes = Prefixes(MIB)
    other = model_of("llama", seed=9)
    one, two = InferenceEngine(model, prefixes=prefixes), InferenceEngine(other, prefixes=prefixes)
    one.run([request(numbers(30))])
    (found,) = two.run([request(numbers(30))])
    assert found.ids == InferenceEngine(other).run([request(numbers(30))])[0].ids
    assert prefixes.reused == 0
    assert prefixes.num_bytes > 0
    two.reset()
    assert prefixes.num_bytes == 0


def test_compiled_steps_go_on_from_what_is_restored() -> None:
    compiled = pytest.importorskip("meshwright.models.compiled")
    model = model_of("llama", dtype=torch.float32)
    compiled.compile_where_possible(model, lambda _: None)
    if model.next_step is None:
        pytest.skip("no compiler")
    prefixes = Prefixes(MIB)
    found = talk(InferenceEngine(model, prefixes=prefixes))
    assert [ids for ids, _ in found] == [ids for ids, _ in talk(InferenceEngine(model))]
    assert prefixes.reused > 60

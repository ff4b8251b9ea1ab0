"""Generation: the cache changes nothing, rows do not affect each other, tokens occur in their proportions."""

import random
import re

import pytest
import torch

from losses import logits_of
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.models.generate import Sampling, choose
from meshwright.spec.model import ModelFields
from served import generate
from tiny import DELTA

EOS = 0
PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 4, 11]]
GREEDY = Sampling(temperature=0)
FAMILIES = ["llama", "gpt2", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3", "olmo3", "smollm3"]
FAMILIES += ["glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    fields = ModelFields(
        family=request.param, hidden=32, num_layers=2, num_heads=4, vocab=50, max_positions=24, init_std=0.3
    )
    if request.param == "deepseek_v3":
        latent = {"kv_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8, "num_experts": 16}
        fields = fields.model_copy(update=latent)
    if request.param == "mistral":
        fields = fields.model_copy(update={"sliding_window": 3, "num_kv_heads": 2})
    if request.param == "gpt_oss":
        fields = fields.model_copy(update={"sliding_window": 3, "num_kv_heads": 2, "num_experts": 4, "ffn": 32})
    if request.param in ("gemma3", "olmo3", "smollm3"):
        layers = 6 if request.param == "gemma3" else 4
        fields = fields.model_copy(update={"sliding_window": 3, "num_kv_heads": 2, "num_layers": layers})
    if request.param in DELTA:
        sizes = {"num_layers": 4, "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 6}
        fields = fields.model_copy(update=sizes | {"num_kv_heads": 2})
    if request.param == "qwen3_next":
        fields = fields.model_copy(
            update={"num_experts": 4, "experts_per_token": 2, "expert_ffn": 24, "shared_ffn": 16}
        )
    spec = resolve_model(fields, base_dir=tmp_path_factory.getbasetemp())
    model = build_model(spec, device="cpu", dtype=torch.float64)
    initialize(model, parameter_table(spec), seed=1)
    return model.eval()


def continued_without_cache(model, prompt, max_tokens):
    tokens = list(prompt)
    for _ in range(max_tokens):
        following = logits_of(model, torch.tensor([tokens]))[0, -1].argmax().item()
        if following == EOS:
            break
        tokens.append(following)
    return tokens[len(prompt) :]


@pytest.mark.every(1)
def test_greedy_generation_equals_the_model_run_anew_for_every_token(model):
    expected = [continued_without_cache(model, prompt, 12) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=12, eos_id=EOS, sampling=GREEDY) == expected


def test_a_prompt_is_continued_alike_alone_and_in_a_batch(model):
    sampling = Sampling(seed=3)
    together = generate(model, PROMPTS, max_tokens=8, eos_id=EOS, sampling=sampling)
    assert generate(model, PROMPTS[:1], max_tokens=8, eos_id=EOS, sampling=sampling) == together[:1]


def test_a_row_ends_at_the_end_of_text_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_tokens=6, eos_id=-1, sampling=GREEDY)
    stop = free[0][2]
    found = generate(model, PROMPTS, max_tokens=6, eos_id=stop, sampling=GREEDY)
    assert found == [row[: row.index(stop)] if stop in row else row for row in free]


def test_the_same_seed_repeats_and_another_differs(model):
    first, again, other = (
        generate(model, PROMPTS, max_tokens=12, eos_id=-1, sampling=Sampling(seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(temperature=0.5), [0, 1, 2, 3]),
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=9), [0, 1, 2, 3]),
        (Sampling(top_p=0.39), [0]),
        (Sampling(top_p=0.41), [0, 1]),
        (Sampling(top_p=0.9, top_k=3), [0, 1, 2]),
        (Sampling(min_p=0.6), [0, 1]),
        (Sampling(min_p=0.3, top_k=2), [0, 1]),
        (Sampling(min_p=0.3, top_p=0.75), [0, 1, 2]),
        (Sampling(min_p=0.3, temperature=0.5), [0, 1]),
    ],
)
def test_tokens_are_drawn_with_their_probability(sampling, kept):
    probability = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    weights = probability ** (1 / sampling.temperature)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[kept] = weights[kept] / weights[kept].sum()
    draws = 20_000
    streams = [random.Random(str(row)) for row in range(draws)]
    # Shuffled, so that a wrongly sorted answer is detected.
    order = torch.tensor([2, 0, 3, 1])
    tokens = choose(probability.log()[order].expand(draws, 4), sampling, streams)
    found = torch.zeros(4, dtype=torch.float64)
    found[order] = torch.bincount(tokens, minlength=4).double() / draws
    # Five standard deviations of a binomial share.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_the_likeliest_token_always_stays_and_rounding_never_falls_off_the_end():
    class Last:
        def random(self):
            return 1 - 2**-53

    logits = torch.tensor([[5.0, -2.0, 1.0, 0.0]])
    assert choose(logits, Sampling(top_p=1e-9), [Last()]).tolist() == [0]
    assert choose(logits, Sampling(), [Last()]).tolist() == [3]
    assert choose(logits, Sampling(min_p=0.01), [Last()]).tolist() == [2]  # e^-4 times the likeliest's probability
    assert choose(logits, Sampling(top_k=3), [Last()]).tolist() == [3]
    assert choose(logits, Sampling(top_k=3, min_p=0.01), [Last()]).tolist() == [2]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([[1] * 24], 1, "the prompt has 24 tokens, but the model supports 24; shorten it"),
        ([[1] * 20], 5, "use at most max_tokens=4"),
        ([[1]], 0, "max_tokens=0 is not allowed: must be at least 1"),
        ([[1], []], 1, "a prompt must have at least one token"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, max_tokens=max_tokens, eos_id=EOS, sampling=GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1 is not allowed: must be at least 0"),
        ({"top_k": -1}, "top_k=-1 is not allowed: must be at least 0"),
        ({"top_p": 0}, "top_p=0 is not allowed: must be greater than 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan is not allowed"),
        ({"temperature": float("nan")}, "temperature=nan is not allowed"),
        ({"temperature": float("inf")}, "temperature=inf is not allowed: must be a finite number"),
        ({"min_p": 1.5}, "min_p=1.5 is not allowed: must be at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not allowed: must be from 1e-06 to 1e+06"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan is not allowed: must be at most 1e+06"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**settings)

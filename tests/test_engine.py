"""The engine: every answer equals the one that its request gets alone, and transformers' from the exported model."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from losses import logits_of
from meshwright.finetune import merged_model
from meshwright.models import Decoder
from meshwright.models import compiled as compiled_module
from meshwright.models import packed as packed_module
from meshwright.models.compiled import COMPILERS, compile_step, compile_where_possible
from meshwright.models.generate import Sampling
from meshwright.models.packed import pack
from meshwright.serve import engine as engine_module
from meshwright.serve.engine import Answer, InferenceEngine, Request, Token
from meshwright.serve.readers import CachedReader, WholeReader, reader_for
from meshwright.serve.text import TextWriter
from meshwright.spec.errors import UserError
from meshwright.torch_internals import onednn_multiplies
from served import CHATML, VOCAB, adapted, generate, hf_directory, model_of, tokenizer_of

FAMILIES = ["llama", "gpt2", "mistral", "qwen3", "qwen3_moe", "deepseek_v3"]
GREEDY = Sampling(temperature=0)
TOKENIZER = tokenizer_of(CHATML)


def requests_of(count: int, seed: int = 0) -> list[Request]:
    """Requests of many kinds and lengths."""
    drawn = random.Random(seed)
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 1.0, "top_p": 0.7},
    ]
    return [
        Request(
            prompt=[drawn.randrange(VOCAB) for _ in range(drawn.choice([1, 2, 3, 7, 12, 20, 33]))],
            max_tokens=drawn.choice([1, 2, 5, 11, 25]),
            sampling=Sampling(**drawn.choice(kinds), seed=drawn.randrange(4)),  # type: ignore[arg-type]
            row=drawn.randrange(3),
            ends={drawn.randrange(VOCAB) for _ in range(20)},
            logprobs=drawn.choice([None, 0, 3]),
        )
        for _ in range(count)
    ]


def numbers(answer: Answer) -> tuple[Any, ...]:
    return answer.ids, answer.finish, [[round(logprob, 9) for _, logprob in token.top] for token in answer.tokens]


@pytest.mark.every(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_gets_in_a_crowd_what_it_gets_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive while others are being answered, prompts are read in parts, some are cancelled."""
    monkeypatch.setattr(engine_module, "CHUNK", 8)
    model, requests, drawn = model_of(family), requests_of(14), random.Random(1)
    alone = [numbers(InferenceEngine(model).run([request])[0]) for request in requests]
    crowd, waiting, answers, cancelled = (
        InferenceEngine(model, max_batch=4),
        list(requests),
        list[Answer](),
        list[Answer](),
    )
    while waiting or crowd.running or crowd.waiting:
        for _ in range(drawn.randrange(3)):
            if waiting:
                answers.append(crowd.submit(waiting.pop(0)))
                cancelled.append(crowd.submit(drawn.choice(requests)))
        if cancelled and drawn.random() < 0.5:
            crowd.cancel(cancelled.pop(drawn.randrange(len(cancelled))))
        crowd.step()
        assert crowd.running <= 4
    assert [numbers(answer) for answer in answers] == alone
    assert len({finish for _, finish, _ in alone}) == 2  # end tokens, and lengths


@pytest.fixture(scope="module", params=["llama", "qwen3", "mixtral", "mistral", "gpt2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    """Our model in fp32, and transformers' from its export."""
    model = model_of(request.param, dtype=torch.float32)
    folder = hf_directory(tmp_path_factory.mktemp("hf") / request.param, model, TOKENIZER)
    return model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """The output of transformers' `generate` after a prompt."""
    end = settings.pop("eos_token_id", -1)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
        **settings,
    )[0, len(prompt) :].tolist()
    return found[: found.index(end)] if end in found else found


PROMPTS = [[5, 6, 7, 8, 9] * 4, [3], [11, 4, 11], [250, 17, 99, 98, 97, 4, 4, 4, 4, 4, 5]]


@pytest.mark.every(1)
def test_a_batch_is_answered_as_transformers_answers_each(both: tuple[Decoder, Any]) -> None:
    ours, model = both
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    assert generate(ours, PROMPTS, max_tokens=20, eos_id=-1, sampling=GREEDY) == expected
    end = expected[0][10]
    stopped = [theirs(model, prompt, eos_token_id=end) for prompt in PROMPTS]
    assert generate(ours, PROMPTS, max_tokens=20, eos_id=end, sampling=GREEDY) == stopped
    penalty = Sampling(temperature=0, repetition_penalty=1.5)
    penalized = [theirs(model, prompt, repetition_penalty=1.5) for prompt in PROMPTS]
    assert penalized != expected
    assert generate(ours, PROMPTS, max_tokens=20, eos_id=-1, sampling=penalty) == penalized


def test_adapters_answer_alike_merged_unmerged_and_in_transformers(tmp_path: Path) -> None:
    base = model_of("llama", dtype=torch.float32)
    tuned = adapted(base)
    merged = merged_model(tuned)
    folder = hf_directory(tmp_path / "merged", merged, TOKENIZER)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    for ours in (tuned, merged):
        assert generate(ours, PROMPTS, max_tokens=20, eos_id=-1, sampling=GREEDY) == expected
    assert generate(base, PROMPTS, max_tokens=20, eos_id=-1, sampling=GREEDY) != expected


@torch.no_grad()
def test_logprobs_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any sampling."""
    model, prompt = model_of("llama"), [5, 6, 7]
    sampling = Sampling(temperature=2.0, top_k=50, repetition_penalty=1.3, seed=4)
    request = Request(prompt=prompt, max_tokens=12, sampling=sampling, logprobs=4)
    answer = InferenceEngine(model).run([request])[0]
    whole = logits_of(model, torch.tensor([[*prompt, *answer.ids]]))[0].log_softmax(-1)
    for place, token in enumerate(answer.tokens, len(prompt) - 1):
        assert token.logprob == pytest.approx(whole[place, token.id].item(), abs=1e-10)
        top = whole[place].topk(4)
        assert [number for number, _ in token.top] == top.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(top.values.tolist(), abs=1e-10)


def test_penalties_lower_what_has_been_written() -> None:
    model, prompt = model_of("gpt2"), [5, 6, 7]

    def written(**settings: Any) -> list[int]:
        sampling = Sampling(temperature=0, **settings)
        return generate(model, [prompt], max_tokens=60, eos_id=-1, sampling=sampling)[0]

    assert len(set(written())) < 60
    for settings in ({"presence_penalty": 1000.0}, {"frequency_penalty": 1000.0}, {"repetition_penalty": 1e6}):
        assert len(set(written(**settings))) == 60, settings


def test_an_answer_ends_before_a_stop_string() -> None:
    """At any token boundaries; text held back for a stop string is released if the string does not come."""
    model = model_of("llama")
    request = Request(prompt=[70, 71], max_tokens=40, sampling=Sampling(seed=3))
    free = InferenceEngine(model, decode=TOKENIZER.decode).run([request])[0]
    assert free.text == TOKENIZER.decode(free.ids)
    for start, length in ((3, 1), (9, 4), (20, 7)):
        stop = free.text[start : start + length]
        heard = list[str]()
        engine = InferenceEngine(model, decode=TOKENIZER.decode)
        answer = engine.submit(
            Request(prompt=[70, 71], max_tokens=40, sampling=Sampling(seed=3), stops=["nowhere", stop]),
            lambda _, __, text, heard=heard: heard.append(text),
        )
        while engine.step():
            pass
        assert answer.text == free.text[: free.text.index(stop)] == "".join(heard)
        assert answer.finish == "stop"
        assert len(answer.tokens) < 40


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.integers(1, 5))
def test_text_is_whole_characters_up_to_the_first_stop(text: str, stops: list[str], width: int) -> None:
    """With tokens that cut characters anywhere."""
    data = text.encode()
    tokens = [data[start : start + width] for start in range(0, len(data), width)]
    writer = TextWriter(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), stops)
    heard = []
    for token in range(len(tokens)):
        heard.append(writer.add(token))
        if writer.stopped is not None:
            break
    heard.append(writer.finish())
    places = [text.index(stop) for stop in stops if stop in text]
    assert "".join(heard) == (text[: min(places)] if places else text)
    assert (writer.stopped is not None) == bool(places)


def test_a_cancelled_answer_frees_its_place_and_what_waits_takes_it() -> None:
    model = model_of("llama")
    engine = InferenceEngine(model, max_batch=1)
    long, short = (Request(prompt=[5, 6], max_tokens=count, sampling=GREEDY) for count in (60, 3))
    first, second = engine.submit(long), engine.submit(short)
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    engine.cancel(first)
    while engine.step():
        pass
    assert first.finish == "cancelled"
    assert second.ids == InferenceEngine(model).run([short])[0].ids
    assert (engine.running, engine.waiting) == (0, 0)


def test_after_an_error_the_engine_begins_anew() -> None:
    model = model_of("llama")
    engine = InferenceEngine(model)
    answers = [engine.submit(Request(prompt=[5, 6], max_tokens=5, sampling=GREEDY)) for _ in range(2)]
    engine.step()
    assert engine.reset() == answers
    assert not engine.step()
    request = Request(prompt=[5, 6], max_tokens=5, sampling=GREEDY)
    assert engine.run([request])[0].ids == InferenceEngine(model).run([request])[0].ids


@pytest.mark.parametrize("mixes", [False, True])
def test_a_users_own_model_is_cached_only_where_that_changes_nothing(mixes: bool) -> None:
    model = model_of("llama")
    model.spec = model.spec.model_copy(update={"family": "mine"})
    if mixes:  # like users' own blocks: each token sees the one before it, outside attention
        for block in model.layers.values():
            block.wrap(lambda compute: lambda x, *others: compute(x, *others) + F.pad(x, (0, 0, 1, 0))[:, :-1])
    assert isinstance(reader_for(model), WholeReader if mixes else CachedReader)
    answers = InferenceEngine(model).run([Request(prompt=prompt, max_tokens=6, sampling=GREEDY) for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = logits_of(model, torch.tensor([[*prompt, *answer.ids]]))[0].argmax(-1)
        assert answer.ids == whole[len(prompt) - 1 : -1].tolist()


PACKED = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3")
PACKED += ("gemma3", "olmo3", "smollm3", "glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5")


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PACKED)
def test_packed_models_compute_the_same(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight in oneDNN's order, at any size."""
    if not onednn_multiplies(dtype):
        pytest.skip("oneDNN has no bf16 products on this processor")
    monkeypatch.setattr(packed_module, "SMALL", 0)
    plain = model_of(family, dtype=torch.float32)
    packed = model_of(family, dtype=torch.float32)
    for model in (plain, packed):
        model.to(dtype)
    pack(packed)
    product = packed.head_split.product
    pack(packed)  # a second time changes nothing
    assert packed.head_split.product is product
    assert "run: packed" in repr(packed.layers["0"])
    new = [(row, prompt) for row, prompt in enumerate(PROMPTS)]
    singles = [(row, [row + 9]) for row in range(len(PROMPTS))]
    ours, theirs = CachedReader(packed), CachedReader(plain)
    for tokens in (new, singles, singles):
        found, expected = ours.read(tokens, len(PROMPTS)).double(), theirs.read(tokens, len(PROMPTS)).double()
        error, size = (found - expected).norm() / expected.norm(), torch.finfo(dtype).eps
        assert error <= 20 * size, error


SWITCHES: dict[str, dict[str, Any]] = {
    "offset norms": {"norm": "offset_rmsnorm"},
    "norms of outputs": {"norms": "after"},
    "norms of inputs and outputs": {"norms": "both"},
    "norms over all heads": {"qk_norm": "all"},
    "scaled scores": {"query_scalar": 3},
    "sinks": {"sinks": True},
    "partial rotation": {"rope_head_dim": 4},
    "layers without rotation": {"rope_layers": (True, False)},
    "no rotation": {"rope_layers": (False,)},
    "windows": {"sliding_window": 5},
    "layers with windows": {"sliding_window": 5, "window_layers": (True, False)},
    "layers with another rotation": {"sliding_window": 5, "window_layers": (True, False), "window_theta": 7.0},
    "scaled embeddings": {"embedding_scaled": True},
}
"""Switches of layers and models, each alone in a Llama."""


@torch.inference_mode()
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("switch", SWITCHES)
def test_fast_generation_has_each_switch_or_leaves_it_to_the_modules(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled steps and packed blocks as in `generate`, with prompts longer than the window."""
    monkeypatch.setattr(packed_module, "SMALL", 0)
    plain, fast = (model_of("llama", dtype=torch.float32, switches=SWITCHES[switch]) for _ in range(2))
    assert plain.spec != model_of("llama").spec
    compile_where_possible(fast, lambda _: None)
    pack(fast)
    ours, theirs = CachedReader(fast), CachedReader(plain)
    singles = [(row, [row + 9]) for row in range(len(PROMPTS))]
    for tokens in (list(enumerate(PROMPTS)), singles, singles):
        found, expected = ours.read(tokens, len(PROMPTS)).double(), theirs.read(tokens, len(PROMPTS)).double()
        assert (found - expected).norm() <= 20 * torch.finfo(torch.float32).eps * expected.norm()


@torch.inference_mode()
def test_bf16_is_not_packed_on_a_processor_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without AVX-512 also generate in bf16, with the modules."""
    monkeypatch.setattr(packed_module, "SMALL", 0)
    monkeypatch.setattr(packed_module, "onednn_multiplies", lambda dtype: dtype == torch.float32)
    model = model_of("llama", dtype=torch.float32).to(torch.bfloat16)
    pack(model)
    assert "packed" not in repr(model)
    CachedReader(model).read([(0, PROMPTS[0])], 1)


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skips if there is none."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")


@pytest.mark.every(1)
@torch.inference_mode()
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2", "qwen3"])
def test_compiled_steps_compute_the_same(family: str, dtype: torch.dtype) -> None:
    """Odd widths of heads, gates and vocabulary, which vectors do not divide; more rows than one product takes."""
    sizes = {"head_dim": 20} if family == "qwen3" else {"vocab": VOCAB + 1, "ffn": 52}
    plain, compiled = (model_of(family, dtype=torch.float32, **sizes).to(dtype) for _ in range(2))
    compile_step(compiled, lambda _: None)
    prompts = [*PROMPTS, *([3 + row] * (row + 1) for row in range(8))]
    ours, theirs, alone = CachedReader(compiled), CachedReader(plain), CachedReader(compiled)
    for reader in (ours, theirs, alone):
        reader.read(list(enumerate(prompts)), 1)
    for _ in prompts[1:]:
        alone.drop_last()
    for count, dropped in ((11, 0), (8, 3), (3, 5), (2, 1), (1, 1)):
        for reader in (ours, theirs) * dropped:
            reader.drop_last()
        singles = [(row, [row + count]) for row in range(count)]
        found, expected = (reader.read(singles, count).double() for reader in (ours, theirs))
        error, size = (found - expected).norm() / expected.norm(), torch.finfo(dtype).eps
        assert error <= 20 * size, error
        threads = torch.get_num_threads()
        torch.set_num_threads(2 if threads == 1 else 1)
        lonely = alone.read(singles[:1], 1)[0].double()
        torch.set_num_threads(threads)
        assert torch.equal(lonely, found[0])  # no bit depends on other rows, or on threads


@torch.inference_mode()
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_compiled_steps_go_on_where_packed_modules_read_the_prompt(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed modules take over from compiled steps at a prompt that joins them: one KV cache."""
    monkeypatch.setattr(packed_module, "SMALL", 0)
    plain, both = (model_of(family, dtype=torch.float32) for _ in range(2))
    compile_step(both, lambda _: None)
    pack(both)
    assert "run: packed" in repr(both.layers["0"])
    ours, theirs = CachedReader(both), CachedReader(plain)
    singles = [(row, [row + 9]) for row in range(2)]
    for new in ([(0, PROMPTS[0]), (1, PROMPTS[1])], singles, singles, [*singles, (2, PROMPTS[2])], singles):
        found, expected = ours.read(new, len(new)).double(), theirs.read(new, len(new)).double()
        assert (found - expected).norm() <= 20 * torch.finfo(torch.float32).eps * expected.norm()


@pytest.mark.usefixtures("compiler")
def test_compiled_steps_with_merged_adapters_answer_the_same_and_others_are_refused() -> None:
    tuned = adapted(model_of("llama", dtype=torch.float32))
    expected = generate(tuned, PROMPTS, max_tokens=9, eos_id=-1, sampling=GREEDY)
    compile_step(tuned, lambda _: None)
    pack(tuned)
    assert "next_step: compiled" in repr(tuned)
    assert generate(tuned, PROMPTS, max_tokens=9, eos_id=-1, sampling=GREEDY) == expected
    for family, dtype, word in (
        ("mixtral", torch.float32, "mixtures of experts"),
        ("deepseek_v3", torch.float32, "latent attention"),
        ("llama", torch.float64, "float64"),
    ):
        with pytest.raises(UserError, match=word):
            compile_step(model_of(family, dtype=dtype), lambda _: None)


@pytest.mark.usefixtures("compiler")
def test_steps_are_compiled_by_default_where_that_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    model = model_of("llama", dtype=torch.float32)
    compile_where_possible(model, told.append)
    assert "next_step: compiled" in repr(model)
    small = model_of("llama", dtype=torch.float32)
    others = [model_of("mixtral", dtype=torch.float32), adapted(small), model_of("llama")]
    monkeypatch.setattr(compiled_module, "COPIED_BYTES", packed_module.weight_bytes(small) - 1)
    others.append(model_of("llama", dtype=torch.float32))
    told.clear()
    for other in others:
        compile_where_possible(other, told.append)
        assert other.next_step is None
    assert not told


@pytest.mark.usefixtures("compiler")
def test_a_compiler_that_fails_costs_speed_by_default_and_is_an_error_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "decode.cpp"
    broken.write_text("int decode( {")
    (tmp_path / "file").touch()
    for name, value, reason in (
        ("SOURCE", broken, "cannot compile decode.cpp: .*error"),
        ("CACHE", tmp_path / "file" / "decode", "Not a directory"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(compiled_module, "CACHE", tmp_path / "cache")
            patched.setattr(compiled_module, name, value)
            told: list[str] = []
            model = model_of("llama", dtype=torch.float32)
            compile_where_possible(model, told.append)
            assert model.next_step is None
            assert re.search(f"^slower generation, without compiled steps: .*{reason}", told[-1]), told
            with pytest.raises(UserError, match=f"--compile: .*{reason}.*; leave it out"):
                compile_step(model, told.append)


def test_what_has_adapters_or_other_precision_is_not_packed() -> None:
    base = model_of("llama", dtype=torch.float32)
    tuned = adapted(base)
    expected = generate(tuned, PROMPTS, max_tokens=9, eos_id=-1, sampling=GREEDY)
    pack(tuned)
    assert generate(tuned, PROMPTS, max_tokens=9, eos_id=-1, sampling=GREEDY) == expected
    assert expected != generate(base, PROMPTS, max_tokens=9, eos_id=-1, sampling=GREEDY)
    wide = model_of("llama")
    pack(wide)
    assert "packed" not in repr(wide)


def test_what_has_no_room_is_refused() -> None:
    engine = InferenceEngine(model_of("llama"), max_context=20)
    with pytest.raises(UserError, match="use at most max_tokens=4"):
        engine.submit(Request(prompt=[1] * 16, max_tokens=5, sampling=GREEDY))
    assert isinstance(engine.run([Request(prompt=[1] * 16, max_tokens=4, sampling=GREEDY)])[0].tokens[0], Token)

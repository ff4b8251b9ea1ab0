"""The module equals its table, and computes what the table says."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from losses import logits_of, summed_loss
from meshwright.families import PRESETS, parameter_table, resolve_model, state_table
from meshwright.models import Cache, build_model, initialize, named_tensors
from meshwright.parallel.compile import apply_compile
from meshwright.spec.model import ModelFields
from tiny import DELTA

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"]
FAMILIES += ["gemma3", "olmo3", "smollm3", "glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
BALANCED = ("deepseek_v3", "glm4_moe", "minimax_m2")
"""Families whose experts are balanced by a bias."""
PATTERN = {"gemma3": {"num_layers": 6}, "olmo3": {"num_layers": 4}, "smollm3": {"num_layers": 4}}
SMALL_DELTA = {"num_layers": 4, "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 6}
SMALL_DELTA |= {"norm_eps": 0.05}
FEW_EXPERTS = {"num_experts": 4, "experts_per_token": 4, "expert_ffn": 24, "shared_ffn": 16}
PATTERN |= {"qwen3_5": SMALL_DELTA, "qwen3_next": SMALL_DELTA | FEW_EXPERTS}
PATTERN |= {"qwen3_5_moe": SMALL_DELTA | FEW_EXPERTS | {"ffn": None}}
"""Layers of each kind."""
TINY = {"hidden": 32, "num_layers": 2, "num_heads": 4, "vocab": 97, "ffn": 48}


LATENT = {"kv_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8, "num_experts": 16, "dense_layers": 1}


def tiny(family: str, **more):
    latent = LATENT if family == "deepseek_v3" else PATTERN.get(family, {})
    return resolve_model(ModelFields(family=family, **{**TINY, **latent, **more}), base_dir=Path())


def built(spec, dtype=torch.float64, seed=0):
    model = build_model(spec, device="cpu", dtype=dtype)
    initialize(model, parameter_table(spec), seed)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_table_is_the_module(family, tied):
    spec = tiny(family, tied_embeddings=tied)
    module = [(name, tuple(parameter.shape)) for name, parameter in build_model(spec).named_parameters()]
    assert module == [(parameter.name, parameter.shape) for parameter in parameter_table(spec)]
    state = [(name, tuple(buffer.shape)) for name, buffer in build_model(spec).named_buffers()]
    assert state == [(row.name, row.shape) for row in state_table(spec)]
    assert bool(state) == (family in BALANCED)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PRESETS)
def test_table_is_the_module_for_every_preset(name):
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    module = [(name, tuple(parameter.shape)) for name, parameter in build_model(spec).named_parameters()]
    assert module == [(parameter.name, parameter.shape) for parameter in parameter_table(spec)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_loss_is_the_cross_entropy_of_the_logits(family):
    model = built(tiny(family))
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    expected = torch.nn.functional.cross_entropy(
        logits_of(model, tokens).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(summed_loss(model, tokens, labels), expected, rtol=1e-12, atol=0)


@pytest.mark.every(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_parts_is_the_model(family, tied):
    """Each part has only the parameters it needs; in sequence they compute the same, bit for bit."""
    spec = tiny(family, num_layers=5, tied_embeddings=tied)
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    whole, parts = built(spec), [range(2), range(2, 3), range(3, 5)]
    weights = named_tensors(whole)
    x, names = None, []
    for part in parts:
        model = build_model(spec, device="cpu", dtype=torch.float64)
        model.keep_layers([part])
        for name, tensor in named_tensors(model).items():
            tensor.data.copy_(weights[name])
            names.append(name)
        x = summed_loss(model, tokens, tokens, documents, layers=part, x_BTD=x)
    assert torch.equal(x, summed_loss(whole, tokens, tokens, documents))
    assert sorted(names) == sorted([*weights, *(["tok_embeddings.weight"] if tied else [])])
    outer = build_model(spec)
    outer.keep_layers([parts[0], parts[2]])  # a rank may hold several parts
    assert named_tensors(outer).keys() == {name for name in weights if ".2." not in name}


def windowed(family: str, **more):
    """The family with grouped heads and, if it has one, a window."""
    grouped = {} if family in ("gpt2", "deepseek_v3") else {"num_kv_heads": 2}
    window = {} if family in ("gpt2", "llama", *BALANCED, *DELTA) else {"sliding_window": 5}
    return tiny(family, init_std=0.2, max_positions=32, **grouped, **window, **more)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


def continued(model, cache: Cache, new: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The logits of the new tokens of some rows, each after the tokens that the cache holds of its row."""
    batch = cache.append([(row, tokens.tolist()) for row, tokens in new])
    logits = model(batch, lambda x, head, _: head.logits(x), cache=cache)[0]
    return list(logits.split([len(tokens) for _, tokens in new]))


@pytest.mark.every(1)
@torch.no_grad()
@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 1, 5], [3, 9]])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_uncached(family, pieces):
    model, tokens = built(windowed(family)), random_tokens(2, 12)
    cache = Cache(model)
    for row in range(2):
        found = torch.cat([continued(model, cache, [(row, part)])[0] for part in tokens[row].split(pieces)])
        torch.testing.assert_close(found, logits_of(model, tokens)[row], rtol=1e-12, atol=1e-12)
    assert cache.lengths == [12, 12]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_length_are_read_side_by_side(family):
    """As rows arrive, grow, move and leave, each has the same logits as alone."""
    model, tokens = built(windowed(family)), random_tokens(4, 30)
    cache, read = Cache(model), dict.fromkeys(range(4), 0)
    alone = logits_of(model, tokens)

    def read_on(*counts: tuple[int, int, int]) -> None:
        """(slot, sequence, tokens)..."""
        new = [(place, tokens[row, read[row] : read[row] + count]) for place, row, count in counts]
        for (_, row, count), found in zip(counts, continued(model, cache, new), strict=True):
            expected = alone[row, read[row] : read[row] + count]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            read[row] += count

    read_on((0, 0, 12))
    read_on((0, 0, 1), (1, 1, 1), (2, 2, 9))
    read_on((0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 3))
    read_on((0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 20))
    cache.move(2, 0)
    cache.move(3, 2)
    cache.drop_last()
    for _ in range(3):
        read_on((0, 2, 1), (1, 1, 1), (2, 3, 1))
    read_on((1, 1, 1), (0, 2, 2))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_what_it_must_not(family):
    """Later tokens never matter; with a window of 5 in 2 layers, neither do tokens 9 or more back."""
    spec = windowed(family)
    model, tokens = built(spec), random_tokens(1, 24)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    # More than rounding, because an expert's products may be summed in another order with other tokens.
    moved = (logits_of(model, tokens) - logits_of(model, changed)).abs().amax(-1)[0] > 1e-12
    assert not moved[:10].any()
    assert moved[10]
    full = None in spec.windows
    reach = 24 if full else (spec.sliding_window - 1) * spec.num_layers
    assert moved[10 : 10 + reach + 1].any()
    assert not moved[10 + reach + 1 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(1)
def test_low_precision_stays_near_fp64(family, dtype):
    spec, tokens = windowed(family), random_tokens(2, 12)
    exact, model = built(spec), built(spec, dtype)
    loss, reference = summed_loss(model, tokens, tokens), summed_loss(exact, tokens, tokens)
    assert loss.dtype == torch.float32
    assert logits_of(model, tokens).dtype == dtype
    loss.backward()
    reference.backward()
    # A dozen roundings of the residual stream are on every path; in the worst case their errors add up.
    bound = 24 * torch.finfo(dtype).eps
    assert abs(loss.item() / reference.item() - 1) < bound
    # Relative to all gradients together, because some are zero except for rounding (a key's bias moves no attention).
    scale = sum(parameter.grad.norm() ** 2 for parameter in exact.parameters()) ** 0.5
    for (name, parameter), expected in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad.dtype == dtype
        assert (parameter.grad.double() - expected.grad).norm() < bound * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_blocks_changes_no_bit(family):
    spec, tokens = windowed(family), random_tokens(2, 12)

    def gradients(wrap):
        model = built(spec)
        for block in model.layers.values():
            wrap(block)
        summed_loss(model, tokens, tokens).backward()
        return [parameter.grad for parameter in model.parameters()]

    def recomputed(block):
        block.wrap(lambda compute: functools.partial(checkpoint, compute, use_reentrant=False))

    for plain, again in zip(gradients(lambda block: None), gradients(recomputed), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler asks for it, and hides it elsewhere
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_compiles_without_graph_breaks(family):
    """Except experts, whose loads decide the shapes: there a compiled block has a break."""
    spec, tokens = windowed(family), random_tokens(2, 12)
    plain, compiled = built(spec), built(spec)
    torch._dynamo.reset()
    options = {"fullgraph": spec.num_experts == 0, "backend": "aot_eager"}
    with mock.patch("torch.compile", functools.partial(torch.compile, **options)):
        apply_compile(compiled)
    for model in (plain, compiled):
        summed_loss(model, tokens, tokens).backward()
    for (name, parameter), expected in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_learned_positions_end():
    model = built(tiny("gpt2", max_positions=8))
    with pytest.raises(ValueError, match="9 positions; this model has embeddings for 8"):
        logits_of(model, random_tokens(1, 9))


def test_meta_models_need_only_their_parameters():
    spec = windowed("qwen3")
    model = build_model(spec)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu")
    initialize(model, parameter_table(spec), 0)
    tokens = random_tokens(1, 6)
    assert torch.equal(logits_of(model, tokens), logits_of(built(spec, torch.float32), tokens))


def dtypes_met_by_rope() -> set[torch.dtype]:
    """Dtypes of the angles that blocks receive under FSDP2's mixed precision with its default settings."""
    model, seen = built(windowed("llama"), torch.float32), set()
    for block in model.layers.values():
        block.attention.register_forward_pre_hook(lambda module, inputs: seen.add(inputs[1].cos.dtype))
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    tokens = random_tokens(1, 8)
    summed_loss(model, tokens, tokens).backward()
    return seen


@pytest.mark.slow
def test_angles_stay_fp32_under_mixed_precision(ranks):
    assert ranks.run(2, dtypes_met_by_rope) == [{torch.float32}] * 2

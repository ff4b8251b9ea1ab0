"""The gated delta rule: chunks against the token-by-token recurrence; documents and their convolution."""

from pathlib import Path

import pytest
import torch

from exact import token_by_token
from meshwright.families import resolve_model
from meshwright.families.adapters import finetuned_table
from meshwright.families.quantized import split_misfit
from meshwright.models.delta_rule import Heads, cut, gated_delta_rule, of_length_one, outputs, scan
from meshwright.models.gated_delta import Convolution
from meshwright.prove.shrink import shrink
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

B, G, R, K, V = 2, 2, 3, 4, 5
ROOM = 1e-13
"""Sums of at most 67 terms of size one, along as many tokens, in float64."""


def drawn(length: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys, values, logarithms of decays and shares."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(B, length, *shape, generator=generator, dtype=torch.float64)

    found = [draw(G, K), draw(G, K), draw(G * R, V), -draw(G * R).abs(), draw(G * R).sigmoid()]
    return [x.requires_grad_() for x in found]


def heads(q, k, v, g, beta) -> Heads:
    return Heads(of_length_one(q) * K**-0.5, of_length_one(k), v, g, beta)


def assert_equal(ours, theirs, inputs) -> None:
    """Results, and the gradients of a loss that weighs every number of them differently."""
    found = []
    for results in (ours, theirs):
        weights = (torch.arange(x.numel(), dtype=x.dtype).view_as(x).cos() for x in results)
        loss = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
        found.append([*results, *torch.autograd.grad(loss, inputs, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=ROOM * scale)


@pytest.mark.parametrize("length", [1, 5, 16, 33, 67])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 64])
def test_chunks_equal_the_recurrence(size: int, length: int) -> None:
    """Outputs, last state and all gradients, from no state and from a given one; also where the chunk does not divide
    the sequence."""
    inputs = drawn(length)
    state = torch.randn(B, G * R, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for given in (None, state.requires_grad_()):
        more = [] if given is None else [given]
        theirs = token_by_token(*inputs, initial_state=given, output_final_state=True)
        assert_equal(gated_delta_rule(heads(*inputs), None, given, size), theirs, [*inputs, *more])


@pytest.mark.parametrize("size", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("lengths", [(33,), (1, 32), (16, 16, 1), (2, 3, 1, 9, 18), (1,) * 33])
def test_documents_do_not_see_one_another(lengths: tuple[int, ...], size: int) -> None:
    """Several in a chunk, one over several chunks, bounds within and between chunks; each as if alone."""
    inputs = drawn(sum(lengths))
    one = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    documents = torch.stack((one, one.flip(0)))  # the other row has the lengths in reverse
    padded = torch.nn.functional.pad(documents, (1, 0), value=-1)
    ours, last = gated_delta_rule(heads(*inputs), padded, None, size)
    rows, states = [], []
    for row, row_lengths in enumerate((lengths, lengths[::-1])):
        parts = zip(*(x[row : row + 1].split(row_lengths, 1) for x in inputs), strict=True)
        results = [token_by_token(*part, output_final_state=True) for part in parts]
        rows.append(torch.cat([y for y, _ in results], 1))
        states.append(results[-1][1])
    assert_equal((ours, last), (torch.cat(rows), torch.cat(states)), inputs)


def test_maps_of_chunks_compose() -> None:
    """A run's map, applied to the state that enters it, is the state that leaves it, and documents end it."""
    inputs = [x.detach() for x in drawn(24)]
    for documents in (None, torch.tensor([[0] * 13 + [1] * 12, [0] * 25])):
        chunks = cut(heads(*inputs), documents, 7)
        zero = torch.zeros(B, G * R, K, V, dtype=torch.float64)
        entering = torch.randn(zero.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        *_, last = scan(chunks, torch.cat((zero, torch.eye(K, dtype=torch.float64).expand(*zero.shape[:2], K, K)), -1))
        states, new, expected = scan(chunks, entering)
        composed = last[..., :V] + last[..., V:] @ entering
        torch.testing.assert_close(composed, expected, rtol=0, atol=ROOM)
        assert outputs(chunks, states, new, 24).shape == (B, 24, G * R, V)
    assert not last[0, :, :, V:].any(), "a document that ends within the run passes no state"
    assert last[1, :, :, V:].any()


def test_quantized_matrices_of_several_parts_are_refused_under_tensor_parallelism() -> None:
    """Their rows would be another rank's."""
    spec = resolve_model(ModelFields(name="qwen3.5-0.8b"), base_dir=Path())
    table = finetuned_table(spec, LoraSpec(method="lora", base="int8"))
    assert "layers.0.attention.w_qkv are split one by one" in (split_misfit(table, spec, 2) or "")
    assert split_misfit(table, spec, 1) is None
    spec = resolve_model(ModelFields(name="qwen3-next-80b-a3b"), base_dir=Path())  # its parts follow one another
    assert split_misfit(finetuned_table(spec, LoraSpec(method="lora", base="int8")), spec, 2) is None


@pytest.mark.parametrize(("name", "kinds"), [("qwen3.5-0.8b", 2), ("gemma-3-1b", 2), ("llama-3.2-1b", 1)])
def test_small_models_of_verify_have_every_kind_of_layer(name: str, kinds: int) -> None:
    run = Run(model=ModelFields(name=name), device="cpu")
    assert len(set(shrink(resolve_run(run, base_dir=Path())).model.layers)) == kinds


def test_convolution_stops_at_documents() -> None:
    """Equal to torch's convolution of each document alone."""
    convolution, lengths = Convolution(6, 4).double(), (1, 2, 3, 9, 4)
    torch.nn.init.normal_(convolution.weight)
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    before = torch.zeros(1, 3, 6, dtype=torch.float64)
    found = convolution(torch.cat((before, x), 1), torch.nn.functional.pad(documents, (3, 0), value=-1))
    for ours, part in zip(found.split(lengths, 1), x.split(lengths, 1), strict=True):
        padded = torch.nn.functional.pad(part.mT, (3, 0))
        expected = torch.nn.functional.conv1d(padded, convolution.weight, groups=6).mT
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)

"""Packed documents: a row of several equals each one alone, on every attention path."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from losses import logits_of, summed_loss
from meshwright.families import parameter_table, resolve_model
from meshwright.models import attention, build_model
from meshwright.models.init import draw_rows
from meshwright.models.loss import IGNORED
from meshwright.models.masks import MERGED, Documents, document_positions
from meshwright.parallel.materialize import materialize
from meshwright.parallel.recompute import apply_recompute
from meshwright.spec.model import ModelFields

FAMILIES = ("gpt2", "llama", "mistral", "qwen3", "gemma3", "olmo3", "smollm3", "gpt_oss", "qwen3_5")
ROWS = ((200, 3, 1, 40, 12), (5, 70, 80, 90, 11))
"""Lengths of the documents of two rows: alone, merged with neighbours, and merged across rows."""
T = sum(ROWS[0])


def build(family):
    sizes = {"hidden": 24, "num_layers": 2, "num_heads": 4, "vocab": 50, "max_positions": T}
    if family != "gpt2":
        sizes |= {"num_kv_heads": 2, "ffn": 40}
    if family in ("mistral", "gemma3", "olmo3", "gpt_oss"):
        sizes["sliding_window"] = 20
    if family in ("gemma3", "olmo3", "smollm3"):
        sizes["num_layers"] = 6 if family == "gemma3" else 4  # one of each kind
    if family == "qwen3_5":
        sizes |= {"num_layers": 4, "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 6}
        sizes |= {"norm_eps": 0.05, "rope_head_dim": 4}
    spec = resolve_model(ModelFields(family=family, init_std=0.2, **sizes), base_dir=Path())
    model = build_model(spec, device="meta", dtype=torch.float64)
    table = parameter_table(spec)
    materialize(model, table, lambda row, start, stop: draw_rows(row, 0, start, stop), torch.device("cpu"))
    return model


def packed():
    """Tokens, labels (each document's last position has none) and documents of the two rows."""
    tokens = torch.randint(50, (2, T), generator=torch.Generator().manual_seed(0))
    documents = torch.stack([torch.repeat_interleave(torch.arange(5), torch.tensor(row)) for row in ROWS])
    labels = tokens.roll(-1, 1)
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    labels[:, -1] = IGNORED
    return tokens, labels, documents


def outcome(model, *batches):
    """Summed loss over the batches, and every parameter's gradient."""
    model.zero_grad()
    loss = torch.stack([summed_loss(model, *batch) for batch in batches]).sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def alone(tokens, labels):
    """The same documents, each in its own batch."""
    for row, lengths in enumerate(ROWS):
        yield from zip(*(x[row : row + 1].split(lengths, 1) for x in (tokens, labels)), strict=True)


def assert_equal(ours, other):
    # About 500 tokens' terms are summed in another order, each rounded to 1e-16 of at most 1e2.
    assert ours[0].item() == pytest.approx(other[0].item(), rel=1e-13)
    for name, gradient in ours[1].items():
        assert (gradient - other[1][name]).abs().max() < 1e-11, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_if_alone(family):
    model, (tokens, labels, documents) = build(family), packed()
    ours, other = outcome(model, (tokens, labels, documents)), outcome(model, *alone(tokens, labels))
    assert_equal(ours, other)
    crossing, _ = outcome(model, (tokens, labels))
    assert abs(crossing - other[0]) > 1e-3, "documents that see one another have another loss"


def test_logits_are_as_if_alone():
    model, (tokens, labels, documents) = build("llama"), packed()
    with torch.no_grad():
        ours = logits_of(model, tokens, document_ids=documents)
        others = torch.cat([logits_of(model, part).flatten(0, 1) for part, _ in alone(tokens, labels)])
    assert (ours.flatten(0, 1) - others).abs().max() < 1e-12


def reference_varlen(q_NHK, k_NGK, v_NGK, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=False):
    """`varlen_attn` according to its documentation."""
    assert enable_gqa == (q_NHK.shape[1] != k_NGK.shape[1])
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k >= cu_seq_q.diff().max()
    left, right = window_size
    assert right == 0
    outputs = []
    for start, stop in itertools.pairwise(cu_seq_q.tolist()):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        mask = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)[0].transpose(0, 1)
        )
    return torch.cat(outputs)


def traceable_varlen(q_NHK, k_NGK, v_NGK, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
    """The same with a mask, in operations that can be compiled."""
    assert window_size == (-1, 0)
    tokens = torch.arange(len(q_NHK))
    document = torch.searchsorted(cu_seq_q, tokens, right=True)
    mask = (document[:, None] == document) & (tokens[:, None] >= tokens)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)[0].transpose(0, 1)


def no_groups(*arguments, window_size, max_q, max_k):
    """A kernel without a parameter for groups, as in some versions."""
    return reference_varlen(*arguments, max_q, max_k, window_size=window_size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", [reference_varlen, no_groups])
def test_the_gpu_kernel_is_told_the_same(family, kernel, monkeypatch):
    """The call of the flash kernel, which CPUs lack, checked against its documentation."""
    model, batch = build(family), packed()
    expected = outcome(model, batch)
    told = {"window_size", "enable_gqa"} if kernel is reference_varlen else {"window_size"}
    monkeypatch.setattr(attention, "VARLEN", frozenset(told))
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "serves_varlen", lambda q: True)
    assert_equal(outcome(model, batch), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_mask_says_the_same(family, monkeypatch):
    model, batch = build(family), packed()
    expected = outcome(model, batch)
    masked = lambda self, q, k, v, mask: attention.scaled_dot_product(q, k, v, mask.mask())  # noqa: E731
    monkeypatch.setattr(attention.Core, "__call__", masked)
    assert_equal(outcome(model, batch), expected)


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # from dynamo's inspection of tensors
@pytest.mark.parametrize("policies", [("selective", "selective"), ("full", "full"), ("selective", "none")])
@pytest.mark.parametrize("varlen", [False, True])
def test_compiled_and_recomputed_blocks(policies, varlen, monkeypatch):
    """Compiled once for any number of documents, with the fastest available path inside."""
    if varlen:
        monkeypatch.setattr(attention, "VARLEN", frozenset(["window_size", "enable_gqa"]))
        monkeypatch.setattr(attention, "varlen_attn", traceable_varlen)
        monkeypatch.setattr(attention, "serves_varlen", lambda q: True)
    model, (tokens, labels, documents) = build("llama"), packed()
    expected = outcome(model, (tokens, labels, documents))
    apply_recompute(model.layers, policies)
    compiled = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.wrap(functools.partial(torch.compile, backend=compiled, dynamic=False))
    assert_equal(outcome(model, (tokens, labels, documents)), expected)
    first = compiled.frame_count
    outcome(model, (tokens, labels, documents // 2))
    outcome(model, (tokens, labels, documents // 3))
    assert compiled.frame_count == first > 0


def test_positions_start_anew():
    documents = torch.tensor([[7, 7, 7, 1, 7, 7], [0, 0, 0, 0, 0, 0]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_spans_cover_every_token_and_merge_only_the_short():
    *_, documents = packed()
    lengths = [length for length, _ in Documents(documents, window=None).spans]
    assert lengths == [200, 3 + 1 + 40 + 12 + 5, 70, 80, 90 + 11]
    assert sum(lengths) == 2 * T
    masks = [mask for _, mask in Documents(documents, window=None).spans]
    assert [mask is None for mask in masks] == [True, False, True, True, False]
    assert all(length <= MERGED for length, mask in zip(lengths, masks, strict=True) if mask is not None)
    assert Documents(documents, window=None).offsets.tolist()[-2:] == [2 * T - 11, 2 * T]

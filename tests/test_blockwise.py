"""The stored form of a quantized matrix, compared with bitsandbytes bit for bit."""

import logging
import sys

import pytest
import torch

from meshwright.models import blockwise
from meshwright.models.blockwise import (
    Scales,
    code_book,
    decode_int8,
    decode_nf4,
    decode_scales,
    encode_blocks,
    encode_int8,
    encode_nf4,
    encode_scales,
)

logging.disable(logging.WARNING)  # bitsandbytes warns of a kernel for CPUs that it does not find
functional = pytest.importorskip("bitsandbytes.functional")
logging.disable(logging.NOTSET)

SIZES = [(64, 128), (3, 320), (1, 64), (300, 1024)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    values = torch.randn(size, generator=generator) * torch.rand(size[0], 1, generator=generator)
    if values.numel() > 64:
        values[0, :64] = 0
    return values.to(dtype)


def test_code_books() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(code_book("nf4", cpu), functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(code_book("signed", cpu), functional.create_dynamic_map(signed=True))
    assert torch.equal(code_book("unsigned", cpu), functional.create_dynamic_map(signed=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernels", [frozenset(), frozenset(["nf4"])])
def test_nf4_is_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], dtype: torch.dtype, kernels: frozenset[str]
) -> None:
    monkeypatch.setattr(blockwise, "_kernels", kernels)
    values = matrix(size, dtype)
    codes, scales = encode_nf4(values)
    theirs, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    assert torch.equal(codes, theirs.view(-1))
    assert torch.equal(scales, state.absmax)
    for compute in DTYPES:
        state.dtype = compute
        assert torch.equal(decode_nf4(codes, scales, compute).view(size), functional.dequantize_4bit(theirs, state))


@pytest.mark.parametrize("size", [(64, 128), (3, 320), (300, 1024), (512, 4096)])
def test_double_quantization_is_bitsandbytes(size: tuple[int, int]) -> None:
    _, scales = encode_nf4(matrix(size))
    kept = encode_scales(scales, double=True)
    mean = scales.mean()
    theirs, groups = portable_quantize_blockwise(scales - mean, functional.create_dynamic_map(), 256)
    assert kept.groups is not None
    assert torch.equal(kept.scales, theirs)
    assert torch.equal(kept.groups.view(torch.float32), torch.cat([groups, mean[None]]))
    book = functional.create_dynamic_map()
    state = functional.QuantState(absmax=groups, code=book, blocksize=256, dtype=torch.float32)
    assert torch.equal(decode_scales(kept), functional.dequantize_blockwise(theirs, state) + mean)
    assert torch.equal(decode_scales(encode_scales(scales, double=False)), scales)


def portable_quantize_blockwise(values: torch.Tensor, book: torch.Tensor, block: int) -> list[torch.Tensor]:
    """bitsandbytes' own definition, which its CUDA kernel follows; its CPU kernel sometimes misses the nearest code."""
    everywhere = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    return torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(everywhere, values, book, block)


def test_double_quantization_does_not_depend_on_threads() -> None:
    scales = matrix((64, 2**14)).abs().flatten()  # enough that torch sums them in several threads
    threads = torch.get_num_threads()
    kept = []
    for torch_threads in (1, 2, 3):
        torch.set_num_threads(torch_threads)
        kept.append(encode_scales(scales, double=True))
    torch.set_num_threads(threads)
    for scales, groups in kept[1:]:
        assert torch.equal(scales, kept[0].scales)
        assert torch.equal(groups, kept[0].groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("book", ["nf4", "signed"])
def test_every_number_gets_its_nearest_code(book: str) -> None:
    values = matrix((50, 256))
    codes_of = code_book(book, values.device)
    codes, scales = encode_blocks(values, codes_of)
    scaled = values.double() / scales.double().clamp(min=1e-300)[:, None]
    nearest = (scaled[..., None] - codes_of.double()).abs().amin(-1)
    chosen = (scaled - codes_of[codes.int()].double()).abs()
    assert (chosen - nearest).max() < 2e-7


def test_many_blocks_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_kernels", frozenset())
    codes, scales = encode_nf4(matrix((300, 1024)))
    whole = decode_nf4(codes, scales, torch.bfloat16)
    monkeypatch.setattr(blockwise, "AT_ONCE", 1024)
    assert torch.equal(decode_nf4(codes, scales, torch.bfloat16), whole)


@pytest.mark.parametrize("size", SIZES)
def test_int8_is_bitsandbytes(size: tuple[int, int]) -> None:
    values = matrix(size)
    values[0, 0] = 1  # bitsandbytes divides by a row's largest value
    codes, scales = encode_int8(values)
    theirs, their_scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(values)
    assert torch.equal(codes, theirs)
    assert torch.equal(scales, their_scales)
    dense = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(theirs, their_scales)
    assert torch.equal(decode_int8(codes, scales, torch.float32), dense)


def test_int8_of_a_row_of_zeros() -> None:
    codes, scales = encode_int8(torch.zeros(2, 8))
    assert torch.equal(decode_int8(codes, scales, torch.float32), torch.zeros(2, 8))


def test_scales_survive_a_cast_of_the_model() -> None:
    scales = torch.tensor([1.0000001, 3.14159])
    module = torch.nn.Module()
    module.register_parameter(
        "kept", torch.nn.Parameter(encode_scales(scales, double=False).scales, requires_grad=False)
    )
    module.to(torch.bfloat16)
    assert torch.equal(decode_scales(Scales(module.kept, None)), scales)  # type: ignore[arg-type]


def test_kernels_are_used_where_bitsandbytes_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_kernels", set())
    assert blockwise.load_kernels()
    assert blockwise._kernels == {"nf4"}
    monkeypatch.setattr(blockwise, "_kernels", set())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert not blockwise.load_kernels()

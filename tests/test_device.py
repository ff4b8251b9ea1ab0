"""The speed that MFU is measured against: measured quickly, whatever kernels a device has."""

import pytest
import torch

from meshwright.machine import Machine
from meshwright.spec.precision import BF16, FP16, FP32, Precision
from meshwright.trainer import device as module
from meshwright.trainer.device import peak_flops
from meshwright.trainer.peaks import datasheet_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize(("flops", "size"), [(1e12, 1024), (4e9, 512), (1e9, 256), (1e6, 256)])
def test_the_largest_product_that_is_quick_is_measured(
    monkeypatch: pytest.MonkeyPatch, flops: float, size: int
) -> None:
    asked = []

    def seconds(device: torch.device, dtype: torch.dtype, size: int) -> float:
        asked.append(size)
        return 2 * size**3 / flops

    monkeypatch.setattr(module, "_seconds_of_product", seconds)
    module._measured_matmul_flops.cache_clear()
    found, where = peak_flops(CPU, Machine("cpu", "cpu", 8, 64 * 10**9), Precision.of(FP16.name))
    assert found == pytest.approx(flops)
    assert where == f"measured here, {size}^3 fp16 product"
    assert asked == [one for one in (256, 512, 1024) if one <= size]
    assert peak_flops(CPU, Machine("cpu", "cpu", 8, 64 * 10**9), Precision.of(FP16.name)) == (found, where)
    assert len(asked) == len(set(asked))  # once in a process
    module._measured_matmul_flops.cache_clear()


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_a_product_s_name_is_matched_by_words(name: str, teraflops: float | None) -> None:
    assert datasheet_flops(name, BF16) == (None if teraflops is None else pytest.approx(teraflops * 1e12))
    assert datasheet_flops(name, FP32) is None


def test_a_product_is_timed() -> None:
    found, where = peak_flops(CPU, Machine("cpu", "cpu", 8, 64 * 10**9), Precision.of("fp32"))
    assert 1e8 < found < 1e15
    assert where.endswith("^3 fp32 product")

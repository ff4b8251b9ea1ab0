"""The speed that MFU is measured against: measured quickly, whatever kernels a device has."""

import pytest
import torch

from meshwright.machine import Machine
from meshwright.spec.precision import FP16, Precision
from meshwright.trainer import device as module
from meshwright.trainer.device import peak_flops

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


def test_a_product_is_timed() -> None:
    found, where = peak_flops(CPU, Machine("cpu", "cpu", 8, 64 * 10**9), Precision.of("fp32"))
    assert 1e8 < found < 1e15
    assert where.endswith("^3 fp32 product")

"""Peak rates that model FLOPs utilization is measured against."""

import re

from meshwright.spec.precision import BF16, Dtype

PEAK_BF16_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L4": 121.0,
    "RTX 3090": 71.0,
}
"""Dense bf16 tensor-core rate by words of the product's name, the more specific names first.

From NVIDIA's datasheets, as collected by stas00/ml-engineering, karpathy/nanochat and NVIDIA-NeMo/Automodel.
"""


def datasheet_flops(device_name: str, dtype: Dtype) -> float | None:
    """FLOP/s of a GPU's dense matrix products in bf16 or fp16; None for other dtypes and unknown GPUs."""
    if dtype.bytes != BF16.bytes:
        return None
    for name, teraflops in PEAK_BF16_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name):  # an RTX A1000 is no A100
            return teraflops * 1e12
    return None

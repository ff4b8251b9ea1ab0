"""Devices and networks by name: the hardware table, and the resolution of `cluster:`."""

import csv
import functools
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from meshwright.machine import Machine, find_machine
from meshwright.spec.cluster import HOST_GB, ClusterSpec, Measured, parse_cluster_name
from meshwright.spec.errors import UserError
from meshwright.spec.precision import BF16
from meshwright.spec.recipe import load_spec

SIBLINGS = {
    "A100": "A100-SXM-80GB",
    "A800": "A100-SXM-80GB",
    "H800": "H100-SXM-80GB",
    "H20": "H200-SXM-141GB",
    "GB300": "B300-SXM",
}
"""Export and successor variants inherit missing figures from their base device."""

NETWORK_GB_S = {"P100": 12.5, "V100": 12.5, "A100": 25.0, "A800": 25.0, "MI250X": 25.0, "TPU": 50.0}
"""Default network per device: 4 x 100 Gb/s a node of Voltas, 8 x 200 Gb/s of Amperes."""

MODERN_NETWORK_GB_S = 50.0
"""8 x 400 Gb/s a node: Hopper and later."""

WORKSTATION = {"A10", "A10G", "A30", "A40", "A6000", "L4", "L20", "L40", "L40S", "T4"}
WORKSTATION_NETWORK_GB_S = 3.1
"""25 Gb/s a node for these cards, and for all named RTX."""
DESKTOP_HOST_GB = 64.0
"""Default host memory of a machine with GeForce cards."""

HALF_ONLY = ("P100", "V100", "T4", "RTX 2080 Ti")
"""Devices whose fast products are in fp16 alone: PyTorch computes bf16 on them, at the rate of fp32."""
ELSEWHERE = ("TPU", "Gaudi", "910B")
"""Devices that need another build of PyTorch than those that this project trains with."""

VARIANTS = {"V100": (16,), "RTX 3060": (8,), "RTX 3080": (12,), "RTX 4060 Ti": (8,), "RTX 5060 Ti": (8,)}
"""Other memory sizes of a card than its row's, in gigabytes."""

USABLE_GB = 2**30 / 1e9 * 0.985
"""Usable part of a nominal gigabyte: it is 2**30 bytes, less the part for error correction."""

PRICES = {
    "V100": 1.0,
    "A100": 1.8,
    "A800": 1.8,
    "H100": 3.0,
    "H800": 3.0,
    "H200": 3.8,
    "B200": 5.5,
    "GB200": 6.0,
    "B300": 6.5,
    "GB300": 7.0,
    "MI300X": 2.5,
    "L40S": 1.2,
    "A10G": 0.9,
    "L4": 0.6,
    "RTX 4090": 0.5,
    "RTX 3090": 0.3,
}
"""US dollars a device and hour, rounded list prices of GPU clouds in 2025; give `price_per_hour` for your own."""

SILENT = ("pcie", "geforce", "instinct", "tensor", "core", "gpu", "tesla", "dgx", "hgx", "ascend", "google", "intel")
"""Words of a device's name that do not identify it."""

SLICE = 256
"""TPUs joined by their own network: the smallest generation's pod."""

CPU_CORE_TFLOPS = {"fp64": 0.02, "fp32": 0.05, "bf16": 0.1, "fp16": 0.05}
"""A current CPU core, to an order of magnitude: `meshwright plan calibrate` measures it."""


@functools.cache
def hardware_table() -> tuple[dict[str, str], ...]:
    """Accelerators of the packaged table (datasheets and measurements, each with its source), by name of column. Rates
    in fp32, outside tensor cores, and GeForce cards' in fp8, accumulated in fp32, are from the vendors' datasheets."""
    text = resources.files("meshwright.predict").joinpath("data/hardware.csv").read_text(encoding="utf-8")
    return tuple(row for row in csv.DictReader(text.splitlines()) if row["kind"] == "accelerator")


@functools.cache
def find_device(name: str) -> dict[str, str]:
    """The row of an accelerator such as `h100`, `A100-80GB-SXM` or `NVIDIA H200`.

    Of several matches, prefer the exact memory size, SXM over PCIe, measured rates, then the largest memory. Raises
    `UserError` with the known names.
    """
    wanted, memory_gb, form = _words(name)
    short = name.split("-")[0]
    fitting = [row for row in hardware_table() if _fits(row, wanted, memory_gb, form)]
    if not fitting and wanted[:1].isdigit():  # a GeForce card's number alone
        wanted = f"rtx{wanted}"
        fitting = [row for row in hardware_table() if _fits(row, wanted, memory_gb, form)]
    if not fitting:
        sizes = [size for row in hardware_table() if _fits(row, wanted, None, form) for size in _sizes(row)]
        if sizes:
            known = " or ".join(f"{size:g}" for size in sorted(set(sizes)))
            raise UserError(f"no {short} with {memory_gb} GB is known, only with {known} GB")
        known = sorted({row["name"].split("-")[0] for row in hardware_table()}, key=str.lower)
        near = get_close_matches(short.lower(), [kind.lower() for kind in known], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown device {short!r}; {hint}known are {', '.join(known)}")
    return max(fitting, key=lambda row: _preference(row, memory_gb, form))


def is_known(name: str) -> bool:
    """Whether the table has a device of this name."""
    try:
        find_device(name)
    except UserError:
        return False
    return True


def nearest_device(text: str) -> str | None:
    """The device whose name occurs anywhere in a text (`DGX-A100 (48 GB)`); None if no name does."""
    bare = re.sub(r"[^a-z0-9]", "", text.lower())
    names = sorted({row["name"].split("-")[0].split(" (")[0] for row in hardware_table()}, key=len, reverse=True)
    return next((name for name in names if re.sub(r"[^a-z0-9]", "", name.lower()) in bare), None)


def device_cluster(
    device: str,
    devices: int,
    *,
    per_node: int | None = None,
    node_gb_s: float | None = None,
    gpu_gb_s: float | None = None,
) -> ClusterSpec:
    """A cluster of `devices` of one kind with the table's figures; `node_gb_s` is a node's network, one way."""
    row = find_device(device)
    short = row["name"].split("-")[0].split(" (")[0]
    sibling = find_device(SIBLINGS[short]) if short in SIBLINGS else row

    def figure(column: str, default: float = 0.0) -> float:
        return float(row[column] or sibling[column] or default)

    rack = "NVL72" in row["scale_up_link"]
    per_node = min(per_node or (4 if rack else 8), devices)
    workstation = short in WORKSTATION or short.startswith("RTX")
    network = gpu_gb_s or (node_gb_s / per_node if node_gb_s else None)
    if network is None and workstation:
        network = WORKSTATION_NETWORK_GB_S / per_node
    elif network is None:
        network = next((rate for name, rate in NETWORK_GB_S.items() if short.startswith(name)), MODERN_NETWORK_GB_S)
    peak = figure("bf16_dense_tflops")
    # A product in fp32 uses no tensor cores: PyTorch's default excludes TF32.
    tflops = {"fp32": figure("fp32_tflops", peak / 16), "fp16": peak, "bf16": peak, "fp64": peak / 16}
    half = short in HALF_ONLY
    if half:
        tflops["bf16"] = tflops["fp32"]
    tflops |= {
        precision: figure(f"{precision}_dense_tflops")
        for precision in ("fp8", "fp4")
        if figure(f"{precision}_dense_tflops")
    }
    best = {precision: _achieved(row, sibling, precision, tflops.get(precision, 0.0)) for precision in ("bf16", "fp8")}
    if half:
        best = {"fp16": best["bf16"]}
    link = figure("scale_up_unidir_gb_s_per_gpu", 25.0)
    if short in ("A800", "H800"):
        link = 200.0  # the export variants' NVLink: 400 GB/s, both ways together
    return ClusterSpec(
        name=f"{devices} x {row['name']}",
        device=row["name"],
        devices=devices,
        per_node=per_node,
        domain=min(72 if rack else SLICE if "ICI" in row["scale_up_link"] else per_node, devices),
        memory_gb=float(_words(device)[1] or figure("mem_gb", 80.0)) * USABLE_GB,
        memory_gb_s=figure("mem_bw_gb_s", 1000.0),
        tflops=tflops,
        achievable_tflops={precision: rate for precision, rate in best.items() if rate},
        link_gb_s=link,
        network_gb_s=network,
        host_memory_gb=DESKTOP_HOST_GB if short.startswith("RTX") else HOST_GB,
        price_per_hour=next((price for name, price in PRICES.items() if row["name"].startswith(name)), None),
        currency="US dollars at list price",
        source=row["source"],
    )


def resolve_cluster(text: str | ClusterSpec, *, base_dir: Path, machine: Machine | None = None) -> ClusterSpec:
    """Resolve `cluster:`: a ClusterSpec, `local`, a YAML or JSON file below `base_dir`, a short name, or several joined
    by `+`.

    Raises `UserError` if it is none of them.
    """
    if isinstance(text, ClusterSpec):
        return text
    if text == "local":
        return local_cluster(machine or find_machine())
    path = base_dir / text
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        if not path.is_file():
            raise UserError(f"cluster file {path} does not exist; 'meshwright plan calibrate {text}' writes one")
        return load_spec(path, ClusterSpec)
    if "+" in text:
        return mixed([resolve_cluster(part, base_dir=base_dir, machine=machine) for part in text.split("+")])
    name = parse_cluster_name(text)
    return device_cluster(name.device, name.devices, node_gb_s=name.node_gb_s, gpu_gb_s=name.gpu_gb_s)


def mixed(parts: Sequence[ClusterSpec]) -> ClusterSpec:
    """Clusters of different devices as one: every rank waits for the slowest, and has no more memory than the least.

    Raises `UserError` if a part is on CPUs and another is not.
    """
    if len({part.device == "cpu" for part in parts}) > 1:
        raise UserError(f"cluster {'+'.join(part.name for part in parts)}: CPUs and GPUs do not train together")
    names = set.intersection(*(set(part.tflops) for part in parts))
    slowest = min(parts, key=lambda part: part.achievable_tflops.get(BF16.name, part.tflops[BF16.name]))
    prices, devices = [part.price_per_hour for part in parts], sum(part.devices for part in parts)
    least = ("per_node", "domain", "memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "host_memory_gb")
    total = sum(price * part.devices for price, part in zip(prices, parts, strict=True) if price is not None)
    return slowest.model_copy(
        update={
            "name": " + ".join(part.name for part in parts),
            "devices": devices,
            "tflops": {name: min(part.tflops[name] for part in parts) for name in slowest.tflops if name in names},
            "price_per_hour": None if None in prices else total / devices,
        }
        | {name: min(getattr(part, name) for part in parts) for name in least}
    )


def resized(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """The cluster with more or fewer of its devices: of a known kind, in its usual nodes."""
    try:
        here, there = (
            device_cluster(cluster.device, n, gpu_gb_s=cluster.network_gb_s) for n in (cluster.devices, devices)
        )
    except UserError:
        return _cut(cluster, devices)
    same = here.model_copy(update={"name": cluster.name, "price_per_hour": cluster.price_per_hour}) == cluster
    return there.model_copy(update={"price_per_hour": cluster.price_per_hour}) if same else _cut(cluster, devices)


def _cut(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """The cluster with another number of devices in nodes like its own."""
    sizes = {name: min(getattr(cluster, name), devices) for name in ("per_node", "domain")}
    return cluster.model_copy(update={"devices": devices, **sizes})


def local_cluster(machine: Machine, ranks: int | None = None) -> ClusterSpec:
    """This machine: its GPUs with their table row, or `ranks` processes (default: one a core) on its CPU cores."""
    if machine.is_gpu:
        spec = device_cluster(machine.name, machine.devices, per_node=machine.devices)
        local = {"name": "local", "memory_gb": machine.memory_bytes / 1e9}
        if machine.host_memory_bytes:
            local["host_memory_gb"] = machine.host_memory_bytes / 1e9
        return spec.model_copy(update=local)
    ranks = ranks or machine.devices
    cores = max(1, machine.devices // ranks)
    return ClusterSpec(
        name="local",
        device="cpu",
        devices=ranks,
        per_node=ranks,
        domain=ranks,
        memory_gb=machine.memory_bytes / ranks / 1e9,
        memory_gb_s=10.0,
        tflops={precision: rate * cores for precision, rate in CPU_CORE_TFLOPS.items()},
        link_gb_s=1.0,
        network_gb_s=1.0,
        measured=Measured(host_us=20.0),
        source="orders of magnitude; 'meshwright plan calibrate' measures this machine",
    )


def _achieved(row: dict[str, str], sibling: dict[str, str], precision: str, peak: float) -> float:
    """A device's measured rate, else its sibling's share of the datasheet's; 0 if neither was measured."""
    column = f"{precision}_achievable_tflops"
    if row[column] or not sibling[column]:
        return float(row[column] or 0)
    return float(sibling[column]) / float(sibling[f"{precision}_dense_tflops"]) * peak


def multiplies_fp8(machine: Machine) -> bool:
    """Whether a machine's GPUs have matrix products in fp8; assumed of a GPU that the table does not list."""
    return machine.is_gpu and (not is_known(machine.name) or "fp8" in device_cluster(machine.name, 1).tflops)


def _words(name: str) -> tuple[str, int | None, str | None]:
    """`A100-80GB-SXM4` as ("a100", 80, "sxm"); words that do not identify the device are left out."""
    kind, memory_gb, form = [], None, None
    for word in re.sub(r"[^a-z0-9.]+", " ", name.lower().replace("nvidia", " ").replace("amd", " ")).split():
        size = word.removesuffix("gb").removesuffix("g")
        if word.startswith(("sxm", "hbm", "nvl")) or word in SILENT:
            form = form or (word[:3] if word.startswith("sxm") else word if word in ("pcie", "nvl") else None)
        elif size != word and size.isdigit():
            memory_gb = memory_gb or int(size)
        else:
            kind.append(word)
    return "".join(kind), memory_gb, form


def _fits(row: dict[str, str], wanted: str, memory_gb: int | None, form: str | None) -> bool:
    kind, _, row_form = _words(row["name"].split(" (")[0])
    sizes = _sizes(row)
    return (
        kind == wanted
        and (memory_gb is None or not sizes or any(abs(size - memory_gb) <= 3 for size in sizes))
        and (form is None or row_form in (form, None))
    )


def _sizes(row: dict[str, str]) -> list[float]:
    """A device's memory sizes in gigabytes; empty if the table does not know."""
    bare = row["name"].split(" (")[0]
    _, named, _ = _words(bare)
    known = named or float(row["mem_gb"] or 0)
    return [known, *VARIANTS.get(bare.split("-")[0], ())] if known else []


def _preference(row: dict[str, str], memory_gb: int | None, form: str | None) -> tuple[bool, bool, bool, bool, float]:
    """Sort key: the requested memory, no brackets in the name, the usual form, measured, large."""
    size, usual = float(row["mem_gb"] or 0), "PCIe" not in row["name"] and "NVL" not in row["name"]
    exact = memory_gb is not None and abs(size - memory_gb) < 1
    return exact, "(" not in row["name"], usual or form is not None, bool(row["bf16_achievable_tflops"]), size

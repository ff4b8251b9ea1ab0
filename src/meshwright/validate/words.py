"""Words in tables of runs, as people write them: numbers, yes and no, policies, networks.

Every function takes the text of one cell and never fails: it returns None for unreadable text.
"""

import re
from math import isfinite

from meshwright.spec.recompute import Policy

NUMBER = re.compile(r"((?:\d[\d,_']*\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?: ?([kmbt])(?![a-z0-9]))?", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"(?:0|\d+(?!,\d{3}$)),\d+$")
"""A number whose only comma is a decimal comma: `1039,5`, `0,125`."""
SILENT = re.compile(r"\?|unknown|unclear|n/?a$|nan$|not |unstated|tbd|default|-+$|null$")
"""Prefixes of cells without information."""
FACTORS = {"": 1.0, "k": 1024.0, "m": 2.0**20, "b": 1.0, "t": 1000.0}
"""`4k` tokens are 4096; a parameter count of `7B` is 7 in the table's own unit, and `1T` 1000."""

NO = ("", "n", "no", "none", "off", "false", "0", "-", "n/a", "na", "disabled")
YES = ("y", "yes", "true", "on", "1", "enabled")

GIGABITS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
"""InfiniBand's generations, Gb/s per port."""

RATE = r"(\d+(?:\.\d+)?) ?"
BITS = r"(?:gbps|gb/s|gbit/s|gbit|gbe|gb)"
NETWORKS = (
    (r"(\d+) ?[x×][^0-9;]*?" + RATE + r"bytes", "ports", 1.0),
    (r"(\d+) ?[x×][^0-9;]*?" + RATE + BITS, "ports", 1 / 8),
    (RATE + BITS + r" ?(?:/|per|a) ?(?:gpu|device|accelerator|nic|port)", "device", 1 / 8),
    (RATE + r"tb(?:ps|/s|it/s)", "node", 125.0),
    (RATE + BITS, "node", 1 / 8),
)
"""(pattern, the link that has this rate, factor to GB/s): `8x50 GB/s`, `4x Omni-Path (100 Gb)`, `400 Gb/s per GPU`,
`3.2 Tbps`, `1600 Gbps`."""


def number_of(text: str) -> float | None:
    """The first number of a cell; None if it has none above zero: some tables write 0 for no value."""
    text = (text or "").strip()
    match = NUMBER.search(text)
    if not match or text.startswith("-"):
        return None
    digits = match[1].replace(",", ".") if DECIMAL_COMMA.match(match[1]) else match[1]
    value = float(re.sub(r"[,_']", "", digits)) * FACTORS[(match[2] or "").lower()]
    return value if isfinite(value) and value > 0 else None


def says_nothing(text: str) -> bool:
    """Whether a cell is empty or says that the value is unknown."""
    words = text.strip().lower()
    return not words or words == "none" or bool(SILENT.match(words))


def gigabytes(text: str) -> float | None:
    """A device's memory in GB, or GiB: no device has thousands of GB, so such numbers are MB, or MiB."""
    value = number_of(text)
    if value is None or value < 2000:
        return value
    return value / (1024 if re.search(r"mib", text, re.IGNORECASE) else 1000)


def says_yes(text: str) -> bool | None:
    """Whether a cell says yes; None if it says neither yes nor no."""
    word = text.strip().lower()
    return True if word in YES else False if word in NO and word else None


def parameters_of(name: str) -> float | None:
    """Billions of parameters in a model's name: `GPT3-175B`, `llama-2-7b-chat`, `GPT2-345M`, `30B-A3B`."""
    for count, unit in re.findall(r"(?<![a-zA-Z0-9.])(\d+(?:\.\d+)?)[ _]?([bBmMtT])(?![a-zA-Z])", name):
        return float(count) * {"b": 1.0, "m": 1e-3, "t": 1e3}[unit.lower()]
    return None


def precision_of(text: str) -> str | None:
    """The precision of matrix products."""
    words = text.lower().replace("float", "fp").replace("bfp", "bf").replace("half", "fp16").replace("mxfp", "fp")
    for name in ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32"):
        if name in words:
            return "fp32" if name == "tf32" else name
    return None


def zero_of(text: str) -> int | None:
    """The ZeRO stage that a cell names in any wording; None if it names none."""
    words = text.lower()
    if match := re.search(r"(?:zero|stage)[ _-]*(?:stage)?[ _-]*([0-3])", words) or re.fullmatch(
        r"\s*([0-3])\s*", words
    ):
        return int(match[1])
    if "optimizer+grad" in words or "shard_grad_op" in words:
        return 2
    if "no_shard" in words:
        return 0
    if "sdp" in words or "full_shard" in words or "hybrid_shard" in words:
        return 3
    if "distributed" in words or "dist-opt" in words or "dist_opt" in words:
        return 1
    return 0 if "ddp" in words or words.strip() in NO[1:] else None


def recompute_of(text: str) -> tuple[Policy, float] | None:
    """(policy, share of the blocks); None if the cell gives neither."""
    words = text.strip().lower()
    if not words or (words != "-" and SILENT.match(words)):
        return None
    if words in NO or words.startswith("no"):
        return "none", 1.0
    if words.startswith(("selective-layer", "selective-op", "partial")):
        return "full", 0.5  # every other block, every other matrix product
    if words.startswith(("selective", "core", "attn", "attention", "sac")):
        return "selective", 1.0
    return "full", 1.0


def node_rate(text: str, per_node: int) -> float | None:
    """A node's network in GB/s, one way; None if the cell gives none."""
    words = re.sub(r"GB(?:/s|ps|yte)", "bytes", text).lower()
    for pattern, whose, factor in NETWORKS:
        match = re.search(pattern, words)
        if match and whose == "ports":
            return float(match[1]) * float(match[2]) * factor
        if match:
            # A rate given with the name of its generation is per port, and nodes have one port per device.
            port = whose == "device" or any(n in words and rate == float(match[1]) for n, rate in GIGABITS.items())
            return float(match[1]) * factor * (per_node if port else 1)
    for name, rate in GIGABITS.items():
        if name in words:
            return rate * per_node / 8
    return 50.0 if re.search(r"4 ?x omni-path", words) else None


def link_rate(text: str) -> float | None:
    """A device's link inside the node in GB/s, one way; None if the cell gives none."""
    match = re.search(RATE + r"GB/s intra", text)
    return float(match[1]) if match else None


def ran_out(text: str) -> bool:
    """Whether a cell of memory or time records an out-of-memory failure."""
    words = text.lower()
    return "oom" in words or "out of mem" in words or "out-of-mem" in words

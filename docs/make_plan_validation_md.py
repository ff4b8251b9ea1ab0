"""Writes docs/plan-validation.md, the planner's error on published runs: run it after changing the planner."""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.predict.constants import FITTED
from meshwright.validate.judge import Judged, judge, regret, report, source_name, worst
from meshwright.validate.table import read_table

PAGE = Path(__file__).with_name("plan-validation.md")
TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "published_runs.csv"

FRESH = TABLE.with_name("published_runs_fresh.csv")
FIRST = TABLE.parent / "results" / "plan-fresh-first.json"
LATER = TABLE.with_name("published_runs_2026.csv")
LATER_FIRST = TABLE.parent / "results" / "plan-2026-first.json"
LEFT_OUT = TABLE.parent / "results" / "plan-left-out.json"

BEGIN = """\
# The planner's error

The planner's predictions compared with {rows} published training runs (`benchmarks/published_runs.csv`, each row with
its source). `meshwright plan validate benchmarks/published_runs.csv` computes the tables.

The planner has {constants} constants for all devices, models and programs, and none per row or source
([`predict/constants.py`](../src/meshwright/predict/constants.py)). They were fitted to this table. For an unbiased
error, see [left out](#left-out), where every family of sources is predicted with constants fitted to all others, and
[fresh sources](#fresh-sources), to which nothing was fitted.

| column | meaning |
|---|---|
| median, mean | absolute error relative to the measurement |
| skill | 1 - mean error / mean error of a rule of thumb: the same model FLOPs utilisation for all (the median of the \
other sources) |
| rank | Spearman's correlation among layouts of one job: rows of a source with the same model, sequence, batch and \
number of devices, in at least three layouts; repetitions count once, by their median; averaged over jobs, weighted by \
their number of layouts |
| inside | share of measurements within the {nominal:.0%} interval |
| one factor | median error after one factor per source, fitted on the source's other rows |
"""

RULES = """\

## How gaps are filled

{completed} of {rows} rows lack an input; {refused} cannot be predicted at all, for example because they give neither a
size nor a known name. Impossible numbers count as gaps. Nothing is dropped silently: `--json` lists the rules applied
to each row. The table counts rows.

| input | rows | rule |
|---|---|---|
"""

RULE = {
    "interconnect": "per node 4 x 100 Gb/s for Volta, 8 x 200 for Ampere, 8 x 400 for Hopper and later",
    "vocab": "from the family in the model's name, else 51200 (Megatron's padded GPT-2)",
    "ffn_hidden": "derived from the published parameter count, else four times hidden",
    "recompute": "none if it fits, else selective; full recomputation would have been mentioned",
    "heads": "about hidden / 128: the nearest number that divides hidden and is divisible by tp",
    "layers": "from the architecture's name (`data/architectures.csv`) or the parameter count, else hidden / 128",
    "hidden": "the same",
    "micro_batch": "1",
    "global_batch": "one microbatch per data-parallel rank",
    "seq_len": "2048",
    "gpu": "A100-80GB; for an unknown device, a known one whose name it contains, else the usual one of its year",
    "precision": "bf16",
    "tp": "as many ranks as the devices allow",
    "pp": "as many stages as devices and layers allow",
    "zero_stage_or_fsdp": "the least ZeRO stage that fits, else ZeRO-3",
    "cp": "if the batch has fewer sequences than data-parallel ranks, ranks share sequences (context parallelism)",
    "gpus": "the product of the degrees",
    "document": "1024 tokens, if the row only says that documents are packed",
}

FRESH_WORDS = """\
{rows} runs of other sources (`benchmarks/published_runs_fresh.csv`), copied by hand from papers, manuals and logs, each
with its source. No constant was ever fitted to them. *First* are the predictions before any change of the planner
(`benchmarks/results/plan-fresh-first.json`). They showed gaps, which were then filled: recognition of programs by a
row's words, Megatron without overlapped tensor parallelism, pipelines that are not sharded further, experts' tokens
sent once per rank, the memory traffic of adapters. So *now* is no longer a blind test. The rows of Megatron Bridge on
Blackwell devices were added last; the rate of fp8 products on GB200 was changed after they had been seen.
"""

LATER_WORDS = """\
{rows} runs of 2023 to 2026 (`benchmarks/published_runs_2026.csv`: MLPerf, NeMo, Megatron Bridge, ms-swift, axolotl,
torchtune, peft, llm.c), each with its source. *First* are the predictions before any change
(`benchmarks/results/plan-2026-first.json`). Then the planner learned to read each property of a program by itself: what
it stores of the logits and of the optimizer's moments, the rank of its adapters and the matrices that have them, an
int8 base, CUDA graphs, packed documents, and how experts' tokens travel. Then grouped products got a cost for their
memory traffic, exchanges that order tokens by expert (DeepEP, HybridEP) one pass over them instead of three, and GB200
and GB300 rates of their own, for which these rows were looked at. The constants were fitted again, to the first table
alone.
"""

PRECISION_WORDS = """\
Step time by the precision of matrix products. *fp8* joins scaling by tensor and by blocks of 128. No fitted row is in
MXFP8 or NVFP4: both are predicted with the constants of fp8 and the devices' own rates.
"""

SOFTWARE = """\

Tables of runs rarely describe the software. It is inferred from a row's words, precision, year and sharding
([`software.py`](../src/meshwright/validate/software.py)):

- **fp16, or a year before 2023**: attention that materializes its scores (unless the row names FlashAttention),
  dropout, 16-byte optimizer state, and no overlap of gradient reduction with the backward pass. Before 2020 also no
  fused kernels.
- **FSDP, DeepSpeed's ZeRO-2 and -3, and unmodified modules**: eager PyTorch with FlashAttention-2 (slower with ALiBi's
  bias), unless compiled or with custom kernels.
- **Everything else**: Megatron Core with fused kernels, Hopper attention and a distributed optimizer. Recipes in fp8,
  and recipes of NeMo and Megatron Bridge, overlap tensor-parallel messages; fp8 recipes keep bf16 gradients.

Other properties do not depend on the kind, and are read from the row's words one by one: a loss fused with the head
(cut cross-entropy, Liger), moments in 8 bits, CUDA graphs, the matrices that have adapters, and how experts' tokens are
sent, balanced and hidden.

Rates are converted to times by the convention in the row's notes; reported TFLOP/s are never compared. Memory is
compared by its kind: calculated states, the allocator's count, or the driver's.
"""

WHY = {
    "v1-": "a V100 cluster whose own authors warn of 40 % between allocations; the same job took 82 s and 217 s",
    "gv-": "a continuous-integration run of a toy model: bound by kernel launches, slowed by deterministic kernels",
    "bl-035": "more than the same job at twice the microbatch (bl-036, 56 GB): probably swapped",
    "mb-228": "twice as slow as the next release of the same program on the same job (mb-191)",
    "mb-260": "twice as slow as the previous release of the same program on the same job (mb-277)",
    "vm-016": "one microbatch of 64 sequences took twice as long as two of 32 (vm-017)",
    "ca-": "batch and recomputation are not stated, and one row exceeds the device's memory",
}


def page() -> str:
    """The whole page."""
    table = read_table(TABLE)
    runs, refused = table.runs, table.refused
    judged = judge(runs)
    summary = report(judged, refused)["summary"]
    return "\n".join(_lines(summary, judged, refused)) + "\n"


def _lines(summary: dict[str, Any], judged: Sequence[Judged], refused: dict[str, str]) -> Iterator[str]:
    yield BEGIN.format(rows=summary["rows"], constants=len(FITTED.__dict__), nominal=summary["nominal_coverage"])
    for quantity, title in (("step_time", "Step time"), ("memory", "Memory")):
        yield f"## {title}\n"
        yield "| source | rows | median | mean | skill | rank | inside | one factor |"
        yield "|---|---|---|---|---|---|---|---|"
        yield _row("**all**", summary[quantity])
        for name, source in summary["per_source"].items():
            if source[quantity]["rows"]:
                yield _row(name, source[quantity])
        yield ""
    memory = summary["memory"]
    yield (
        f"Of {memory['oom_rows']} rows that ran out of memory, {memory['oom_recall']:.0%} were predicted to do so; of "
        f"{memory['oom_predicted']} rows that were predicted to run out, {memory['oom_precision']:.0%} did. Most of "
        "the others ran close to the limit, with batches that their authors had pushed to it; "
        f"{_old_zero3(judged)} are ZeRO-3 on V100s with up to 64 sequences per microbatch, and no column shows what "
        "DeepSpeed kept in host memory."
    )
    yield from _left_out()
    yield from _later("Fresh sources", FRESH, FIRST, FRESH_WORDS)
    yield from _later("Runs of 2023 to 2026", LATER, LATER_FIRST, LATER_WORDS)
    yield from _by_precision(judged)
    yield "\n## The ten largest errors\n"
    yield "| row | quantity | predicted | measured | why |"
    yield "|---|---|---|---|---|"
    for quantity, unit in (("step_time", "s"), ("memory", "GB")):
        for row in worst(judged, quantity):
            predicted, value = row.pairs(quantity)
            cells = (row.run.id, quantity.replace("_", " "), f"{predicted.value:.3g} {unit}", f"{value:.3g} {unit}")
            yield f"| {' | '.join(cells)} | {_why(row)} |"
    yield from _regret(judged)
    yield RULES.format(**summary).rstrip()
    for name, count in summary["completed_inputs"].items():
        yield f"| {name} | {count} | {RULE[name]} |"
    yield SOFTWARE
    if refused:
        yield f"Not predictable: {', '.join(refused)}."


def _old_zero3(judged: Sequence[Judged]) -> int:
    """Rows of the V100 cluster under ZeRO-3 that ran and are predicted not to fit."""
    return sum(
        row.run.job.layout.zero_stage == 3
        and not row.fits
        and not row.run.out_of_memory
        and row.run.id.startswith("v1-")
        for row in judged
    )


def _left_out() -> Iterator[str]:
    """Errors of families whose rows the constants have not seen, as `benchmarks/fit_planner.py` wrote them."""
    yield "\n## Left out\n"
    yield (
        "Errors of step time for each family of sources (sources that share authors or program), with constants fitted "
        "to all other families and to priors from datasheets and kernel benchmarks (`python benchmarks/fit_planner.py "
        "--left-out`). The terms of the model were chosen with all sources in view, so an unseen source may have a "
        "larger error.\n"
    )
    yield "| family | rows | median | mean | inside |"
    yield "|---|---|---|---|---|"
    for family, errors in json.loads(LEFT_OUT.read_text(encoding="utf-8")).items():
        shown = f"{errors['median_ape']:.1%} | {errors['mape']:.1%} | {errors['coverage']:.0%}"
        yield f"| {family} | {errors['rows']} | {shown} |"


def _later(title: str, path: Path, predicted: Path, words: str) -> Iterator[str]:
    """Errors on sources that were collected later, as first predicted and as predicted now."""
    table = read_table(path)
    runs, refused = table.runs, table.refused
    judged, first = judge(runs), json.loads(predicted.read_text(encoding="utf-8"))
    yield f"\n## {title}\n"
    yield words.format(rows=len(runs) + len(refused))
    yield "| source | quantity | rows | first: median | mean | inside | now: median | mean | inside |"
    yield "|---|---|---|---|---|---|---|---|---|"
    names = dict.fromkeys(source_name(row.run.source) for row in judged)
    for name in (None, *names):
        for quantity in ("step_time", "memory"):
            known = [
                (first[row.run.id][quantity], *row.pairs(quantity))
                for row in judged
                if name in (None, source_name(row.run.source)) and row.pairs(quantity)[1]
            ]
            if known:
                before = _errors([(value, low, high, measured) for (value, low, high), _, measured in known])
                now = _errors([(p.value, p.low, p.high, measured) for _, p, measured in known])
                cells = (name or "**all**", quantity.replace("_", " "), str(len(known)), before, now)
                yield f"| {' | '.join(cells)} |"


def _by_precision(judged: Sequence[Judged]) -> Iterator[str]:
    """Errors of step time by the format of products, on the fitted rows and on the fresh ones."""
    yield "\n## By precision\n"
    yield PRECISION_WORDS
    yield "| precision | rows | step times | median | mean | inside |"
    yield "|---|---|---|---|---|---|"
    for rows, table, found in (("fitted", TABLE, judged), ("fresh", FRESH, judge(read_table(FRESH).runs))):
        with table.open(encoding="utf-8", newline="") as file:
            words = {row["id"]: row["precision"] for row in csv.DictReader(file)}
        known: dict[str, list[tuple[float, float, float, float | None]]] = defaultdict(list)
        for row in found:
            predicted, measured = row.pairs("step_time")
            if measured:
                name = _precision(words[row.run.id], row)
                known[name].append((predicted.value, predicted.low, predicted.high, measured))
        for name in sorted(known, key=PRECISIONS.index):
            yield f"| {name} | {rows} | {len(known[name])} | {_errors(known[name])} |"


PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "MXFP8", "NVFP4")


def _precision(word: str, row: Judged) -> str:
    """The format of products that a row names, or that was assumed for it."""
    return {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}.get(word, row.run.job.precision.products)


def _regret(judged: Sequence[Judged]) -> Iterator[str]:
    """The cost of following the planner, on the fitted rows and on the fresh ones."""
    yield "\n## Regret\n"
    yield (
        "For jobs measured in several layouts: how much slower the planner's choice is than the fastest layout. A "
        "layout measured several times counts once, by its median. The constants were fitted to the *fitted* "
        "rows and never to the *fresh* rows.\n"
    )
    yield "| rows | source | layouts | devices | parameters | chosen | regret |"
    yield "|---|---|---|---|---|---|---|"
    for rows, found in (("fitted", regret(judged)), ("fresh", regret(judge(read_table(FRESH).runs)))):
        for sweep in found:
            size = f"{sweep['parameters'] / 1e9:.1f}B"
            yield (
                f"| {rows} | {sweep['source']} | {sweep['layouts']} | {sweep['devices']} | {size} | {sweep['chosen']} "
                f"| {sweep['regret']:.1%} |"
            )
        mean = statistics.mean(sweep["regret"] for sweep in found)
        yield f"| **{rows}** | **mean of {len(found)}** | | | | | **{mean:.1%}** |"


def _errors(found: list[tuple[float, float, float, float | None]]) -> str:
    """Median and mean error and share inside, of (predicted, low, high, measured)."""
    known = [(abs(value / measured - 1), low <= measured <= high) for value, low, high, measured in found if measured]
    errors = [error for error, _ in known]
    inside = statistics.mean(inside for _, inside in known)
    return f"{statistics.median(errors):.1%} | {statistics.mean(errors):.1%} | {inside:.0%}"


def _row(name: str, errors: dict[str, Any]) -> str:
    rank = errors.get("spearman")
    cells = [name.replace("|", "/"), str(errors["rows"])]
    cells += [_percent(errors.get(key)) for key in ("median_ape", "mape", "skill")]
    cells += ["" if rank is None else f"{rank:.2f}"]
    cells += [_percent(errors.get(key)) for key in ("coverage", "calibrated_median_ape")]
    return f"| {' | '.join(cells)} |"


def _why(row: Judged) -> str:
    return next((reason for start, reason in WHY.items() if row.run.id.startswith(start)), "")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")

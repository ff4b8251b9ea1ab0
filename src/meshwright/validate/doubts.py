"""Doubtful cells of published runs: not understood, or contradicting others. Nothing here changes a prediction."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.validate.models import MOST, MOST_DEGREE, Completion, Row
from meshwright.validate.rows import PublishedRun
from meshwright.validate.words import (
    DECIMAL_COMMA,
    NO,
    NUMBER,
    link_rate,
    node_rate,
    number_of,
    precision_of,
    ran_out,
    recompute_of,
    says_nothing,
    says_yes,
    zero_of,
)

SIZES = ("params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "n_experts", "top_k", "seq_len")
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "dp")
MEASURED = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s", "memory_gb_per_gpu")
NUMBERS = (*SIZES, "year", "gpus", "gpus_per_node", *DEGREES, "micro_batch", "global_batch", *MEASURED)
WORDS = (
    "gpu",
    "interconnect",
    "zero_stage_or_fsdp",
    "sequence_parallel",
    "precision",
    "recompute",
    "compile",
    "offload",
)
COLUMNS = ("id", "source", "model_name", *NUMBERS, *WORDS, "notes", "quality")
"""Every column that is read; `quality` is for people."""

FRACTIONS = ("params_b", *MEASURED)
ZERO_IS_NONE = ("n_experts", "top_k", "vpp", "ep", "params_b", *MEASURED)
"""Columns in which tables write 0 for none."""
EVERYTHING = re.compile(
    r"full|yes|true|\bon\b|enabl|all|block|uniform|checkpoint|layer|every|recomput|^y$|^1$|^gc$|^ac$"
)
"""Words for recomputing whole blocks."""
APART = 1.25
"""Two statements of one quantity contradict each other if they differ by at least this factor."""
IMPOSSIBLE = 1.05
"""Model FLOPs utilisation above which a measurement is a misprint."""
WHY_CUT = {
    "tp": "more than the devices",
    "pp": "too few devices or layers for this many stages",
    "vpp": "more than a stage's layers, or there is only one stage",
    "cp": "devices do not suffice, or the batch has fewer sequences than there are data-parallel ranks",
    "ep": "more than the ranks or experts",
}
"""Why another degree was used."""


@dataclass(frozen=True)
class Doubt:
    """One cell, or one row if `column` is empty."""

    line: int
    id: str
    column: str
    value: str
    made: str
    """The value used."""


Unused = tuple[str, str, str]
"""(column, value, the value used)."""


def cell_doubts(row: Row, run: PublishedRun) -> Iterator[Unused]:
    """Every cell of a row that was not used as written."""
    read, used, doubted = Completion(row), _used(run), set[str]()
    for column in NUMBERS:
        text = read.text(column)
        made = _number_doubt(column, text, used.get(column))
        if made:
            doubted.add(column)
            yield column, text, made
    for column, made in _word_doubts(read, run):
        yield column, read.text(column), made
    for column, made in _contradictions(read, run, used):
        if column not in doubted:
            yield column, read.text(column), made


def _used(run: PublishedRun) -> dict[str, int]:
    """The prediction's value for each column that is a count."""
    job, model = run.job, run.job.model
    return {
        "layers": model.num_layers,
        "hidden": model.hidden,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "vocab": model.vocab,
        "seq_len": job.sequence,
        "gpus": job.layout.world_size,
        "gpus_per_node": run.cluster.per_node,
        "tp": job.layout.tp,
        "pp": job.layout.pp,
        "cp": job.layout.cp,
        "ep": job.layout.ep,
        "dp": job.layout.data_parallel,
        "vpp": job.layout.virtual_stages,
        "micro_batch": job.micro_batch,
        "global_batch": job.global_batch,
    }


def _number_doubt(column: str, text: str, used: int | None) -> str | None:
    """The number used for a cell that should contain one; None if it does, or is empty."""
    if says_nothing(text) or (column in MEASURED and ran_out(text)):
        return None
    taken = "not compared" if column in MEASURED else f"{used} taken" if used else "completed by its rule"
    value = number_of(text)
    if value is None:
        zero = re.fullmatch(r"[0.,]+", text) and column in ZERO_IS_NONE
        return None if zero else f"no number above zero; {taken}"
    if column not in FRACTIONS:
        if not 1 <= value <= MOST.get(column, MOST_DEGREE):
            return f"more or less than any run has; {taken}"
        if value != int(value):
            return f"no whole number; {int(value)} taken"
    number = NUMBER.search(text)
    assert number
    if re.search(r"\d", text.replace(number[0], "", 1)):
        return f"read as {value:g}; the rest is passed over"
    if DECIMAL_COMMA.match(number[1]):
        return f"read as {value:g}: a decimal comma"
    return None


def _word_doubts(read: Completion, run: PublishedRun) -> Iterator[tuple[str, str]]:
    """(column, the value used) for cells in words that were not understood."""

    def stated(column: str) -> str:
        text = read.text(column)
        return "" if says_nothing(text) else text

    job = run.job
    if stated("gpu") and run.unknown_device:
        yield "gpu", f"no device of that name is known; {run.cluster.device} taken"
    network = stated("interconnect")
    if re.search(r"\d", network) and node_rate(network, 8) is None and link_rate(network) is None:
        yield "interconnect", f"no rate in it that is understood; {run.cluster.network_gb_s:g} GB/s a device taken"
    if stated("precision") and precision_of(stated("precision")) is None:
        yield "precision", f"no precision that is known; {job.precision} taken"
    sharding = stated("zero_stage_or_fsdp")
    if sharding and zero_of(sharding) is None:
        yield "zero_stage_or_fsdp", f"no ZeRO stage, FSDP or DDP; ZeRO-{job.layout.zero_stage} taken"
    recompute = stated("recompute")
    policy = recompute_of(recompute)
    if policy == ("full", 1.0) and not EVERYTHING.search(recompute.lower()):
        yield "recompute", f"no policy that is known; {job.recompute} taken"
    for column, taken in (("sequence_parallel", "by the program's habit"), ("compile", "not compiled")):
        if stated(column) and says_yes(stated(column)) is None:
            yield column, f"neither yes nor no; {taken}"
    offload = stated("offload").lower()
    if offload and offload not in NO and "optimizer" not in offload and "alpha=" not in offload:
        yield "offload", "neither optimizer nor activations alpha=PART; none taken"


def _contradictions(read: Completion, run: PublishedRun, used: dict[str, int]) -> Iterator[tuple[str, str]]:
    """(column, the value used) for numbers that contradict the rest of the row, or arithmetic."""
    job = run.job
    degrees = f"tp x pp x cp = {job.layout.tp * job.layout.pp * job.layout.cp}"
    for column, taken in used.items():
        value = read.number(column)
        if value is None or int(value) == taken or not 1 <= value <= MOST.get(column, MOST_DEGREE):
            continue
        if column == "gpus":
            yield column, f"{degrees} does not divide it; predicted on {taken} devices"
        elif column == "dp":
            yield (
                column,
                f"{degrees}, and {taken} data-parallel ranks make {job.layout.world_size} devices; {taken} taken",
            )
        elif column == "global_batch":
            if "tok" not in read.text(column).lower():
                yield column, f"too many for sequences, so read as tokens; {taken} sequences taken"
        elif column != "gpus_per_node" or taken != job.layout.world_size:
            yield column, f"{WHY_CUT.get(column, 'other cells contradict it')}; {taken} taken"
    if job.model.num_heads % job.layout.tp:
        yield "tp", f"it does not divide {job.model.num_heads} heads; predicted as if it did"
    params = read.number("params_b")
    if params and (params > 1e5 or not 1 / APART < params * 1e9 / job.model.num_parameters < APART):
        yield "params_b", f"the sizes make {job.model.num_parameters / 1e9:.3g} billion parameters; those taken"
    yield from _measurement_doubts(run, read.number("step_time_s"), read.number("tokens_per_s_per_gpu"))


def _measurement_doubts(run: PublishedRun, stated: float | None, rate: float | None) -> Iterator[tuple[str, str]]:
    """Doubts about the measured time: two cells disagree, or no device is so fast."""
    if not run.seconds:
        return
    job, cluster = run.job, run.cluster
    tokens = job.global_batch * job.sequence / job.layout.world_size
    if stated and rate and not 1 / APART < run.seconds * rate / tokens < APART:
        yield "tokens_per_s_per_gpu", f"{tokens / run.seconds:.4g} by step_time_s, which is taken"
    peak = cluster.peak(job.precision) * 1e12
    utilisation = tokens * job.model.model_flops(job.sequence) / run.seconds / peak
    if utilisation > IMPOSSIBLE:
        column = "step_time_s" if stated else "tokens_per_s_per_gpu" if rate else "tflops_per_gpu"
        yield column, f"{utilisation:.0%} of the device's peak; compared as given"

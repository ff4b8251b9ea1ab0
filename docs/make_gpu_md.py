"""Writes docs/gpu.md from the tables of the tests: run it after changing one."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "gpu.md"
sys.path.insert(0, str(HERE.parent / "tests"))

import test_deadlocks  # noqa: E402
import test_devices  # noqa: E402
import test_host_reads  # noqa: E402
import test_nccl_rules  # noqa: E402

TEXT = """\
# GPUs: what is proved without one

**No line of this project has run on a GPU yet.** Tests on CPUs prove what they can; [`make gpu`](accept.md) tries the
rest in one command. Cases are counted from the tests' own tables; the last column is what the tests assert.

## NCCL's rules

Every rank's collectives and messages are recorded on gloo, FSDP2's and DTensor's included, and checked for equal
kinds, order, dtypes, sizes, rows and roots, first uses of communicators, and sends that wait for sends
(`rehearse/nccl.py`). [`meshwright rehearse run.yaml --deadlocks`](verbs.md#deadlocks) does the same for all ranks of
a job.

| test | cases | found |
|---|---|---|
| layouts, two steps | {layouts}: the equivalence tests', and every schedule and context-parallel method | no fault |
| experts, two steps | {experts} layouts with expert parallelism | no fault |
| tied embeddings | {tied} layouts with pipelines | no fault |
| documents kept apart | 5 layouts | no fault |
| whole runs: evaluation, samples, checkpoints, callbacks | {runs}: {run_names} | no fault |
| classes of ranks: each rank's record equals its class's | {jobs} jobs | no fault |
| 1,024 ranks | 1 job | no fault |
| planted faults | {faults}: {fault_names} | all, with ranks and `file:line` |
| planted in a user's objective, by the verb | {verb}: {verb_names} | all, with ranks and `file:line` |

`tests/test_nccl_rules.py`, `tests/test_deadlocks.py`. A batch of two messages between ranks of a larger group, which
hung at three pipeline stages, was found this way.

## Devices

A GPU's state is built and stepped as tensors without data: each must be on the device that computes with it
(`tests/test_devices.py`).

| state | optimizers | precisions | other | cases | misplaced |
|---|---|---|---|---|---|
| on the device | {optimizers} | {precisions} | {tuned} | {stays} | none |
| between tiers | {optimizers} | {precisions} | {tiers} | {moves} | none |

- The state of a bucket moves by one copy each way, which the host does not wait for.
- Pinned memory is registered at its own size; PyTorch's own is a power of two. State, checkpoints and offloaded
  activations use it. FSDP2 pins parameters in host memory itself, so rounded up.
- `devices.py` alone names a kind of device: {kinds}. A house test finds any other file that does.
  `xpu` and `mps` are used only where the recipe names them (`device: xpu`); `mps` trains in one process, without fp64.

## Host synchronisations

A step waits for its device where the host reads a number. A dispatch mode finds each place in forward and backward
passes (`testing/host_reads.py`); {read_layouts} layouts and {read_options} settings have this budget (M microbatches,
L expert layers, P parameters):

| | before | now |
|---|---|---|
| a step of a dense model, any layout | 6, and an all-reduce over gloo | 1: loss and norm together; the clock adds 1 |
| documents kept apart | + 2 M for each stage | + 0 |
| low-bit optimizers, Muon | + P | + 0 |
| experts | + 1 + M L | + 1 |
| expert parallelism | + M L, twice with full recomputation | + M L, twice with full recomputation: rows become shapes |
| experts in low precision | + 3 M L | + 3 M L |

Counts of trained tokens are the host's, and go over gloo. Loss and norm are not read one step late: the decision to
skip a step that is not finite would have to be made on the device.

## The acceptance without a GPU

`meshwright accept` on a CPU with two cores, the dry run of [accept.md](accept.md):

```
train       passed      47 s  4 of 4 checks passed
kernels     passed       5 s  20 of 20 checks passed
layouts     passed      10 s  4 of 4 checks passed
generate    passed      24 s  3 of 3 checks passed
failures    passed      13 s  1 of 1 checks passed
```
"""


def listed(names: object) -> str:
    """Names in a sentence."""
    return ", ".join(map(str, names))  # type: ignore[call-overload]


def page() -> str:
    """The page."""
    nccl, devices, reads, deadlocks = test_nccl_rules, test_devices, test_host_reads, test_deadlocks
    optimizers, precisions = devices.OPTIMIZERS, devices.PRECISIONS
    return TEXT.format(
        layouts=len(nccl.ALL),
        experts=len(nccl.EXPERT_PARALLEL),
        tied=len(nccl.TIED),
        runs=len(nccl.RUNS),
        run_names=listed(nccl.RUNS),
        jobs=len(deadlocks.JOBS),
        faults=len(nccl.FAULTS),
        fault_names=listed(nccl.FAULTS),
        verb=len(deadlocks.FOUND),
        verb_names=listed(deadlocks.FOUND),
        optimizers=listed(optimizers),
        precisions=listed(precisions),
        tuned=listed(devices.TUNED),
        tiers=listed(devices.TIERS),
        stays=len(optimizers) * len(precisions) * len(devices.TUNED),
        moves=len(optimizers) * len(precisions) * len(devices.TIERS),
        kinds=listed(f"`{kind}`" for kind in devices.ACCELERATORS),
        read_layouts=len(reads.LAYOUTS),
        read_options=len(reads.OPTIONS),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")

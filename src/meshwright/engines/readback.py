"""Check of what really ran against the request, so that silent fallbacks of engines are detected."""

from collections.abc import Iterator
from typing import Any

from meshwright.engines.engine import strategy_of
from meshwright.families import count_trained
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun


class SilentFallbackError(UserError):
    """A program trained differently than the recipe says."""


def check_what_ran(resolved: ResolvedRun, report: dict[str, Any]) -> None:
    """Raise `SilentFallbackError` if a rank's report contradicts the layout: fewer ranks than asked, no wrapper that
    reduces gradients, or parameters or optimizer state that are not sharded.

    A share of one n-th may be padded or rounded up to whole rows, so it passes where it is nearer to an n-th than to
    the whole.
    """
    for contradiction in _contradictions(resolved, report):
        raise SilentFallbackError(contradiction)


def _contradictions(resolved: ResolvedRun, report: dict[str, Any]) -> Iterator[str]:
    layout, wrappers = resolved.run.layout, " in ".join(reversed(report["wrappers"]))
    but = f"the layout is {layout.strategy}, but"
    if report["world_size"] != layout.world_size:
        yield f"the layout has {layout.world_size} ranks, but each process trained in a group of {report['world_size']}"
    if "host" in report and not report["host"]:
        yield f"{but} no state is in host memory ({wrappers})"
    if report.get("disk") == 0:
        yield (
            f"{but} no state is on disk ({wrappers}): groups smaller than 1 MiB stay in memory; train a larger model"
        )
    if report.get("sequence", layout.cp) != layout.cp:
        yield f"{but} {report['sequence']} ranks share a sample ({wrappers})"
    if "trained" in report and report["trained"] != (wanted := count_trained(resolved.model, resolved.run.finetune)[0]):
        yield f"the adapters have {wanted} parameters, but {report['trained']} are trained"
    if layout.world_size > layout.data_parallel or layout.ep > 1:
        yield from _wrongly_split(resolved, report, wrappers)
        return
    strategy = strategy_of(layout)
    if strategy == "single":
        return
    whole = report["parameters"]
    if strategy == "ddp" and report["held"] < whole:
        yield f"the layout is DDP, but a rank holds {report['held']} of {whole} parameters ({wrappers})"
    shares = {"parameters": (report["held"], strategy in ("zero3", "hybrid"))}
    shares["optimizer state"] = report["state"], strategy != "ddp"
    for what, (held, sharded) in shares.items():
        if sharded and held > whole * (1 + 1 / layout.dp_shard) / 2:
            yield f"{but} a rank holds {held} of {whole} elements of {what} ({wrappers})"
    if report.get("second") == 0:
        yield f"{but} a rank holds no secondary shard ({wrappers})"
    names = ("FSDP", "DeepSpeed", *(("DistributedDataParallel",) if strategy in ("ddp", "zero1") else ()))
    if not any(name in wrapper for wrapper in report["wrappers"] for name in names):
        yield f"{but} the model is {wrappers}, which does not reduce gradients"


def _wrongly_split(resolved: ResolvedRun, report: dict[str, Any], wrappers: str) -> Iterator[str]:
    """The same for a layout that splits more than the data, if the program reports what its layers hold."""
    layout, (held, whole) = resolved.run.layout, report.get("matrices", (0, 0))
    but = f"the layout is {layout.strategy}, but"
    shares = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage == 3 else 1)
    if shares > 1 and held > whole * (1 + 1 / shares) / 2:
        yield f"{but} a rank holds {held} of {whole} elements of the layers' matrices ({wrappers})"
    if "ranks" in report:
        yield from _wrong_stages(resolved, report)
    for axis, theirs in {"tp": "tensor_parallel", "ep": "ep"}.items():
        if getattr(layout, axis) > 1 and not {axis, theirs} & set(report.get("axes", (axis,))):
            yield f"{but} no parameter is split along {axis} ({wrappers})"


def _wrong_stages(resolved: ResolvedRun, report: dict[str, Any]) -> Iterator[str]:
    """The same for a pipeline that reports its schedule, and every rank's layers (a list for each stage that the rank
    holds) and how many tensors the rank sent in the first step."""
    layout, ranks = resolved.run.layout, report["ranks"][:: resolved.run.layout.tp]
    chunks, layers = layout.virtual_stages, resolved.model.num_layers
    stages = [ranks[stage % layout.pp]["layers"][stage // layout.pp] for stage in range(layout.pp * chunks)]
    if [layer for stage in stages for layer in stage] != list(range(layers)):
        yield f"the layout is {layout.strategy}, but the stages hold the layers {stages}"
    if report["schedule"] != f"forward_backward_pipelining_{'with' if chunks > 1 else 'without'}_interleaving":
        yield f"the layout is {layout.strategy}, but the schedule that ran is {report['schedule']}"
    wanted = 2 * (len(stages) - 1) * resolved.accumulation * layout.tp
    if (sent := sum(rank["sent"] for rank in report["ranks"])) != wanted:
        yield f"the stages of {layout.strategy} send {wanted} tensors per step, but {sent} were sent"


def check_optimizer(resolved: ResolvedRun, report: dict[str, Any]) -> None:
    """Raise `SilentFallbackError` if the optimizer is not the recipe's, or has other constants."""
    wanted = resolved.run.training.optimizer
    if wanted.name != "adamw":
        return
    for group in report["groups"]:
        same = tuple(group["betas"]) == wanted.betas and group["eps"] == wanted.eps
        if not same or group["weight_decay"] not in (0, wanted.weight_decay):
            raise SilentFallbackError(f"the optimizer's settings are {group}, not the recipe's")
    if "AdamW" not in report["optimizer"]:
        raise SilentFallbackError(f"the recipe's optimizer is adamw, but the program's is {report['optimizer']}")

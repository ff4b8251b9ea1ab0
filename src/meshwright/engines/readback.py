"""Check of what really ran against the request, so that silent fallbacks of engines are detected."""

from collections.abc import Iterator
from typing import Any

from meshwright.engines.engine import strategy_of
from meshwright.families import count_trained
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun


class SilentFallbackError(UserError):
    """A program trained differently than the recipe says."""


def check_what_ran(resolved: ResolvedRun, found: dict[str, Any]) -> None:
    """Raise `SilentFallbackError` if a rank's report contradicts the layout: fewer ranks than asked, no wrapper that
    reduces gradients, or parameters or optimizer state that are not sharded.

    A share of one n-th may be padded or rounded up to whole rows, so it passes where it is nearer to an n-th than to
    the whole.
    """
    for contradiction in _contradictions(resolved, found):
        raise SilentFallbackError(contradiction)


def _contradictions(resolved: ResolvedRun, found: dict[str, Any]) -> Iterator[str]:
    layout, wrappers = resolved.run.layout, " in ".join(reversed(found["wrappers"]))
    asked = f"the layout is {layout.strategy}, but"
    if found["world_size"] != layout.world_size:
        yield f"the layout has {layout.world_size} ranks, but each process trained in a group of {found['world_size']}"
    if "host" in found and not found["host"]:
        yield f"{asked} no state is in host memory ({wrappers})"
    if found.get("disk") == 0:
        yield (
            f"{asked} no state is on disk ({wrappers}): groups smaller than 1 MiB stay in memory; train a larger model"
        )
    if found.get("sequence", layout.cp) != layout.cp:
        yield f"{asked} {found['sequence']} ranks share a sample ({wrappers})"
    if "trained" in found and found["trained"] != (wanted := count_trained(resolved.model, resolved.run.finetune)[0]):
        yield f"the adapters have {wanted} parameters, but {found['trained']} are trained"
    if layout.world_size > layout.data_parallel or layout.ep > 1:
        yield from _wrongly_split(resolved, found, wrappers)
        return
    strategy = strategy_of(layout)
    if strategy == "single":
        return
    whole = found["parameters"]
    if strategy == "ddp" and found["held"] < whole:
        yield f"the layout is DDP, but a rank holds {found['held']} of {whole} parameters ({wrappers})"
    shares = {"parameters": (found["held"], strategy in ("zero3", "hybrid"))}
    shares["optimizer state"] = found["state"], strategy != "ddp"
    for what, (held, sharded) in shares.items():
        if sharded and held > whole * (1 + 1 / layout.dp_shard) / 2:
            yield f"{asked} a rank holds {held} of {whole} elements of {what} ({wrappers})"
    if found.get("second") == 0:
        yield f"{asked} a rank holds no secondary shard ({wrappers})"
    names = ("FSDP", "DeepSpeed", *(("DistributedDataParallel",) if strategy in ("ddp", "zero1") else ()))
    if not any(name in wrapper for wrapper in found["wrappers"] for name in names):
        yield f"{asked} the model is {wrappers}, which does not reduce gradients"


def _wrongly_split(resolved: ResolvedRun, found: dict[str, Any], wrappers: str) -> Iterator[str]:
    """The same for a layout that splits more than the data, if the program reports what its layers hold."""
    layout, (held, whole) = resolved.run.layout, found.get("matrices", (0, 0))
    asked = f"the layout is {layout.strategy}, but"
    shares = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage == 3 else 1)
    if shares > 1 and held > whole * (1 + 1 / shares) / 2:
        yield f"{asked} a rank holds {held} of {whole} elements of the layers' matrices ({wrappers})"
    if "ranks" in found:
        yield from _wrong_stages(resolved, found)
    for axis, theirs in {"tp": "tensor_parallel", "ep": "ep"}.items():
        if getattr(layout, axis) > 1 and not {axis, theirs} & set(found.get("axes", (axis,))):
            yield f"{asked} no parameter is split along {axis} ({wrappers})"


def _wrong_stages(resolved: ResolvedRun, found: dict[str, Any]) -> Iterator[str]:
    """The same for a pipeline that reports its schedule, and every rank's layers (a list for each stage that the rank
    holds) and how many tensors the rank sent in the first step."""
    layout, ranks = resolved.run.layout, found["ranks"][:: resolved.run.layout.tp]
    chunks, layers = layout.virtual_stages, resolved.model.num_layers
    stages = [ranks[stage % layout.pp]["layers"][stage // layout.pp] for stage in range(layout.pp * chunks)]
    if [layer for stage in stages for layer in stage] != list(range(layers)):
        yield f"the layout is {layout.strategy}, but the stages hold the layers {stages}"
    if found["schedule"] != f"forward_backward_pipelining_{'with' if chunks > 1 else 'without'}_interleaving":
        yield f"the layout is {layout.strategy}, but the schedule that ran is {found['schedule']}"
    wanted = 2 * (len(stages) - 1) * resolved.accumulation * layout.tp
    if (sent := sum(rank["sent"] for rank in found["ranks"])) != wanted:
        yield f"the stages of {layout.strategy} send {wanted} tensors per step, but {sent} were sent"


def check_optimizer(resolved: ResolvedRun, found: dict[str, Any]) -> None:
    """Raise `SilentFallbackError` if the optimizer is not the recipe's, or has other constants."""
    wanted = resolved.run.training.optimizer
    if wanted.name != "adamw":
        return
    for group in found["groups"]:
        same = tuple(group["betas"]) == wanted.betas and group["eps"] == wanted.eps
        if not same or group["weight_decay"] not in (0, wanted.weight_decay):
            raise SilentFallbackError(f"the optimizer's settings are {group}, not the recipe's")
    if "AdamW" not in found["optimizer"]:
        raise SilentFallbackError(f"the recipe's optimizer is adamw, but the program's is {found['optimizer']}")

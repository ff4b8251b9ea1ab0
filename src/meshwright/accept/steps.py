"""The steps of the acceptance, in the order of their value: what a machine shows first is worth most.

Each step is a generator `checks(place)` in a file of this room. It runs in a process of its own, with a time limit, and
none stops the next.
"""

from dataclasses import dataclass

from meshwright.spec.errors import UserError


@dataclass(frozen=True)
class Step:
    """One step."""

    name: str
    """Also the module of this room that has its `checks`."""
    seconds: float
    """Time limit on a GPU."""
    about: str
    """What it does, for the report."""


STEPS = (
    Step("machine", 45, "programs, a large product, a generated kernel"),
    Step("train", 75, "a run: the CPU's losses, the same after resuming, a clean stop"),
    Step("kernels", 75, "every kernel that a CPU never runs, beside its definition"),
    Step("families", 60, "every family's loss and gradients beside the CPU's, in fp64 and fp32"),
    Step("layouts", 75, "every layout beside one process in fp64: ranks share a GPU, or have one each"),
    Step("settings", 75, "precisions, optimizers, offloading, adapters: three steps beside the CPU's"),
    Step("predictions", 90, "memory and seconds of a step, measured and predicted"),
    Step("speed", 150, "tokens per second beside the bare loop, nanoGPT and transformers"),
    Step("profile", 40, "waits of the host, kernels, idle time of a step"),
    Step("generate", 40, "greedy tokens beside the CPU's, alone and in a batch"),
    Step("failures", 60, "out of memory is explained; a killed rank ends the run"),
)


def named(names: list[str] | None) -> tuple[Step, ...]:
    """The steps of these names, in the order of `STEPS`; all for None. Raises `UserError` for an unknown name."""
    known = [step.name for step in STEPS]
    for name in names or []:
        if name not in known:
            raise UserError(f"--steps: no step is called {name!r}; there are {', '.join(known)}")
    return tuple(step for step in STEPS if names is None or step.name in names)

"""fp16's dynamic loss scale (Micikevicius et al., "Mixed Precision Training", 2018)."""


class LossScaler:
    """Doubles the scale after `growth_interval` finite steps in a row and halves it after a non-finite one.

    The global gradient norm decides whether a step was finite. It is the same on every rank, so the scales of all ranks
    stay equal without communication.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.finite_steps = 0

    def update(self, *, finite: bool) -> None:
        """Count one step."""
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale *= 2
            self.finite_steps = 0

    def state(self) -> dict[str, float]:
        """The state for checkpoints."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load(self, state: dict[str, float]) -> None:
        """Continue from `state()`."""
        self.scale, self.finite_steps = float(state["scale"]), int(state["finite_steps"])

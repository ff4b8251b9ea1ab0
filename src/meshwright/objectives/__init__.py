"""Training losses, computed from the model's last hidden states: one file per objective; none of them knows a rank."""

from meshwright.objectives.dpo import DPO
from meshwright.objectives.next_token import NextToken
from meshwright.objectives.objective import Objective, Sums
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import make_plugin
from meshwright.spec.run import Run

__all__ = ["DPO", "NextToken", "Objective", "Sums", "build_objective"]


def build_objective(run: Run) -> Objective:
    """The objective of a recipe; raises `UserError` if the plug-in is not an objective."""
    if run.training.objective is not None:
        made = make_plugin("objectives", run.training.objective)
        if not isinstance(made, Objective):
            name = run.training.objective.name
            raise UserError(f"training.objective: {name} returns a {type(made).__name__}, not a meshwright.Objective")
        return made
    preference = run.training.preference
    if preference is None:
        return NextToken()
    return DPO(beta=preference.beta, label_smoothing=preference.label_smoothing, reference=preference.reference)

"""A proof as lines of text."""

from typing import Any

from meshwright.spec.run import ResolvedRun, Run


def step_lines(comparison: Any) -> list[str]:
    """The comparison of a step as lines of text."""

    def tensors(differences: dict[str, Any]) -> str:
        worst = max(differences, key=lambda name: differences[name].share)
        wrong = sum(not difference.equal for difference in differences.values())
        equal = f"{len(differences) - wrong} of {len(differences)} equal"
        return f"{equal}; largest difference in {worst}: {amount(differences[worst])}"

    lines = [
        f"step {comparison.step}",
        f"  loss       {comparison.reference['loss']:.6f}, differs by {amount(comparison.loss)}",
        f"  gradients  {tensors(comparison.gradients)}",
    ]
    if comparison.gnorm is None:
        return lines
    return [
        *lines,
        f"  norm       {comparison.reference['gnorm']:.6f}, differs by {amount(comparison.gnorm)}",
        f"  updates    {tensors(comparison.updates)}",
        f"  state      {tensors(comparison.state)}",
    ]


def whole_lines(proof: Any) -> list[str]:
    """The comparison of whole steps as lines of text."""

    def summary(comparison: Any) -> str:
        if comparison.wrong:
            name, difference = comparison.wrong
            return f"differs in {name}, by {amount(difference)}"
        both = comparison.numbers | comparison.tensors
        equal = f"{len(both)} of {len(both)} equal"
        if comparison.is_scaled:
            return equal
        worst = max(both, key=lambda name: both[name].share)
        return f"{equal}; largest difference in {worst}: {amount(both[worst])}"

    lines = [f"  {comparison.name:<17}  {summary(comparison)}" for comparison in proof.whole]
    return ["whole steps, as in training", *lines] if lines else []


def format_lines(recipe: Run, proof: Any) -> list[str]:
    """The check of the recipe's own precision."""
    dtypes = recipe.training.dtypes
    if not proof.whole or not dtypes.narrow or not (proof.equal or proof.location.phase == "formats"):
        return []
    facts = f"gradients summed in {dtypes.reduce.name}, copies equal to their masters"
    steps = "" if recipe.training.product_recipe or proof.measured else "steps within its rounding, "
    return [f"  in {dtypes.compute.name:<14}  {'differs' if proof.location else steps + facts}"]


def _is_rounded(proof: Any) -> bool:
    return any(comparison.rounded is not None for comparison in proof.comparisons)


def quantized_lines(resolved: ResolvedRun, proof: Any) -> list[str]:
    """The tolerance added for quantized collectives, and their effect."""
    layout, lines = resolved.run.layout, list[str]()
    if layout.quantized_weights == "fp8":
        lines.append("  weights    gathered in fp8; one process gathers none, and must get the same result")
    elif layout.quantized_weights != "none":
        lines.append(
            f"  weights    gathered in {layout.quantized_weights}; one process used the same quantized weights"
        )
    if layout.quantized_gradients != "none":
        moved = [comparison.rounded for comparison in proof.comparisons if comparison.rounded is not None]
        by = f", which changed them by {max(moved):.1%}" if moved else ""
        allowed = "half a quantization step per rank is allowed"
        if layout.gradient_error_feedback:
            allowed = "the errors carried into and out of a step, half a quantization step per rank each, are allowed"
        lines.append(f"  gradients  reduced in {layout.quantized_gradients}{by}; {allowed}")
    return ["quantized collectives", *lines] if lines else []


def cost_lines(proof: Any) -> list[str]:
    """The effect of low precision, shown with the proof."""
    if (cost := proof.cost) is None:
        return []
    loss = proof.comparisons[-1].reference["loss"] if proof.comparisons[-1:] else cost.loss
    what = "rounding itself" if "gathered" in cost.beside else "low precision itself"
    return [
        f"{what}, in step {cost.step} on one process",
        f"  loss       {cost.loss:.6f} in {cost.beside}, {loss - cost.loss:+.1e} with it",
        f"  gradients  {cost.gradients:.1%} from those in {cost.beside}; the worst {cost.worst}: {cost.worst_by:.1%}",
    ]


def amount(difference: Any) -> str:
    """A difference, its allowance, and the factor that it is."""
    factor = ""
    if difference.factor is not None:
        off = difference.factor - 1
        factor = f", a factor of {f'1 {off:+.1e}' if abs(off) < 1e-5 else f'{difference.factor:.6g}'}"
    return f"{difference.by:.1e} of {difference.allowed:.1e} allowed{factor}"


def _place(location: Any) -> str:
    """Where the first difference is, in words."""
    return {
        "start": f"the weight {location.name}, before the first step",
        "data": f"the data: {location.name}",
        "forward": f"the forward pass: {location.name}",
        "loss": "the loss, although all activations are equal: "
        + (
            "of these ranks"
            if location.ranks
            else "each rank's own loss is right, so the sum over ranks or the number of terms is wrong"
        ),
        "backward": f"the backward pass: the gradient of {location.name}, although the whole forward pass is equal",
        "reduction": f"the gradient of the weight {location.name}, although every activation and its gradient are "
        "equal: the sum over microbatches or ranks is wrong",
        "norm": "the gradient norm, although every gradient is equal",
        "update": f"the update of the weight {location.name}, although every gradient and the norm are equal",
        "state": f"{location.name} after the step, although every weight is equal",
        "whole": f"whole steps, although single steps are equal: {location.name}",
        "formats": f"the recipe's own precision: {location.name}",
    }[location.phase]


def conclusion(proof: Any) -> str:
    """The verdict, and where the first difference is."""
    if proof.equal:
        steps = ", plus the half steps of quantized gradients" if _is_rounded(proof) else ""
        explained = f"{proof.relative:.1e}, which rounding explains"
        within = "the rounding measured on one process" if proof.measured else explained
        return f"\nequal: every difference is within {within}{steps} (docs/verify.md)"
    location = proof.location
    what = _place(location)
    difference = location.difference
    if location.phase == "data":
        return f"\ndifferent; first in {what}"
    if difference is None:
        where = "no rank computed it"
    else:
        ranks = ", ".join(str(rank) for rank in location.ranks)
        where = f"by {amount(difference)}, worst on rank {difference.rank}"
        where += f" at {difference.place}" if difference.place else ""
        where += f"; ranks that differ: {ranks}" if len(location.ranks) > 1 else ""
    return f"\ndifferent; first in {what}\n           {where}"

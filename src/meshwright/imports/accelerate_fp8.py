"""Products in fp8 as Accelerate configures them: torchao's and Transformer Engine's."""

from collections.abc import Mapping

from meshwright.imports.claims import Always, NoEffect
from meshwright.imports.reading import Reading, Rule, check_count
from meshwright.imports.rules import cases, fact, only, unsupported, without

BACKEND = "fp8 backend"
RECIPE = "training.low_precision.recipe"
ALGORITHM, HISTORY, MARGIN = "fp8 amax_compute_algo", "fp8 amax_history_len", "fp8 margin"
UNREAD = "Accelerate does not read this spelling; it reads amax_history_len and amax_compute_algo"


FP8_RULES: Mapping[str, Rule] = {
    "backend": fact(BACKEND),
    "amax_history_len": fact(HISTORY),
    "amax_compute_algo": fact(ALGORITHM),
    "amax_history_length": without(UNREAD),
    "amax_compute_algorithm": without(UNREAD),
    "margin": fact(MARGIN),
    "interval": only(1, "scales are computed at every step"),
    "format": only("HYBRID", "forward in e4m3, gradients in e5m2 (HYBRID)"),
    "override_linear_precision": cases(
        {True: without("all three products of a layer are in fp8; set training.low_precision.keep")},
        Always("all three products of a layer are in fp8"),
        any,
    ),
    "use_mxfp8_block_scaling": unsupported("set training.precision=mxfp8"),
    "use_autocast_during_eval": NoEffect.EVALUATES,
    "enable_fsdp_float8_all_gather": unsupported("set layout.quantized_weights=fp8, which changes no result"),
    "pad_inner_dim": unsupported("sizes of layers must be multiples of 16"),
    "opt_level": unsupported("MS-AMP is not supported"),
    "optimization_level": unsupported("MS-AMP is not supported"),
}
"""The keys of `fp8_config`, without their prefix."""


def settle_fp8(reading: Reading, origin: str) -> None:
    """Set the recipe of fp8: torchao's, or Transformer Engine's with scales of previous steps."""
    backend, where = reading.facts.get(BACKEND, ("auto", origin))
    word = str(backend).lower()
    if word in ("ao", "torchao"):
        reading.set(RECIPE, "tensorwise", where)
    elif word == "te":
        _settle_delayed(reading, where)
    elif word in ("auto", "no"):
        reading.set(RECIPE, "tensorwise", where)
        reading.notes.append(f"{origin}: no backend is named; Accelerate takes torchao, if it is installed")
    else:
        reading.drop(where, "supported: AO, TE; the recipe computes in fp8 with one scale per tensor")
    if word != "te":
        reading.notes.append(
            f"{where}: torchao under Accelerate leaves the first linear layer in bf16; a recipe quantizes it, unless "
            "training.low_precision.keep names it"
        )
        reading.ignore(ALGORITHM, HISTORY, MARGIN, reason="only Transformer Engine (TE) reads it")


def give_up_fp8(reading: Reading) -> None:
    """Report the settings of fp8 where nothing is computed in it."""
    reading.ignore(BACKEND, ALGORITHM, HISTORY, MARGIN, reason="without mixed_precision=fp8 it has no effect")


def _settle_delayed(reading: Reading, where: str) -> None:
    """Transformer Engine's scales, which come from the last step or from the largest of several."""
    reading.set(RECIPE, "delayed", where)
    default = f"{where} (Accelerate's default: amax_compute_algo=most_recent)"
    algorithm, origin = reading.facts.get(ALGORITHM, ("most_recent", default))
    length, given = reading.facts.get(HISTORY, (1024, where))
    check_count(length, given)
    if str(algorithm).lower() == "most_recent":
        reading.set("training.low_precision.amax_history", 1, origin)
        if HISTORY in reading.facts:
            reading.drop(given, f"only the last amax counts: {origin}")
    else:
        reading.set("training.low_precision.amax_history", length, f"{given}; {origin}")
    reading.set_fact("training.low_precision.margin", MARGIN)

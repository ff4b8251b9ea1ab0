"""Proof of an adapter's export: read back by us, and by peft if installed, it gives the model's logits."""

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.checkpoint.hf_proof import compare_logits, probe_tokens
from meshwright.families import FAMILIES
from meshwright.models import Decoder
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError


@torch.no_grad()
def prove_adapter(
    reference: Decoder,
    directory: Path,
    read: Callable[[Path], Mapping[str, torch.Tensor]],
    write_base: Callable[[], Path],
) -> dict[str, float]:
    """Compare the logits of `reference` (fp32, whole, with the base before any quantization) with the logits of the
    adapter in `directory`.

    Args:
        read: returns all trained parameters, by our names, from the adapter's directory.
        write_base: returns the base as a Hugging Face directory; called only if peft is installed.

    Returns:
        the largest difference found, by program: meshwright and, if installed, peft.

    Raises:
        UserError: the logits differ, or peft cannot read the adapter.
    """
    batch = Batch(probe_tokens(reference.spec))
    expected_BTV = reference.logits(batch)
    parameters = dict(reference.named_parameters())
    for name, tensor in read(directory).items():
        parameters[name].copy_(tensor)
    worst = {"meshwright": compare_logits(expected_BTV, reference.logits(batch), "read back", what="the adapter")}
    known = reference.spec.foreign is not None or reference.spec.family in FAMILIES
    if known and find_spec("peft") is not None and find_spec("transformers") is not None:
        theirs_BTV = _peft_logits(write_base(), directory, batch.tokens)
        worst["peft"] = compare_logits(expected_BTV, theirs_BTV, "read by peft", what="the adapter")
    return worst


def _peft_logits(base: Path, adapter: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    # Heavy and optional, so they are imported only when an adapter is proved.
    import peft
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's notes on tied embeddings and transformers
            adapted = peft.PeftModel.from_pretrained(model, str(adapter))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"the adapter was refused: peft {peft.__version__} cannot read it ({str(error).splitlines()[0]}); write "
            "the whole model with --hf DIR --merge"
        ) from error
    return adapted.eval()(tokens_BT).logits

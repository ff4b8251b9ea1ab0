"""Proof of an export, of a model or of adapters: the directory, read back, computes the exported model's logits."""

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.families import FAMILIES, parameter_table, read_hf_directory, state_table
from meshwright.families.wrapped import is_multimodal
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

TOLERANCE = 1e-4
"""Largest allowed difference of two logits, relative to the largest logit. All models compute in fp32 from the same
stored weights, so differences are rounding (about 1e-6); one wrong tensor makes them as large as the logits."""

PROBE = (2, 64)
"""Sequences and tokens that are compared."""

RowReader = Callable[[str, int, int], torch.Tensor]


@torch.no_grad()
def prove_export(
    reference: Decoder, directory: Path, open_weights: Callable[[ModelSpec], RowReader]
) -> dict[str, float]:
    """Compare the logits of `reference` (fp32, with the weights rounded as for export) with the logits of the
    model in `directory`: read by us and, if it is installed, by transformers.

    Args:
        open_weights: takes the model that config.json describes, returns a reader of its parameters' rows.

    Returns:
        the largest difference found, by program: meshwright and, if installed, transformers.

    Raises:
        UserError: the logits differ.
    """
    spec = reference.spec
    batch = Batch(probe_tokens(spec))
    expected_BTV = reference.logits(batch)

    written = read_hf_directory(directory, family=spec.family)
    read_rows = open_weights(written)
    reread = build_model(written, device="cpu")
    tensors = named_tensors(reread)
    expected = named_tensors(reference)
    for row in parameter_table(written) + state_table(written):
        tensors[row.name].copy_(read_rows(row.name, 0, row.shape[0]))
    logits_BTV, other = reread.logits(batch), partial(_first_other, expected, tensors)
    worst = {"meshwright": compare_logits(expected_BTV, logits_BTV, "read back", where=other)}
    del reread, tensors, other

    if find_spec("transformers") is not None:
        worst["transformers"] = compare_with_transformers(reference, directory, batch.tokens)
    return worst


@torch.no_grad()
def prove_merge(adapted: Decoder, merged: Decoder) -> float:
    """Compare the logits of a model and of the same model with merged adapters, both in fp32; returns the largest
    difference. Raises `UserError` if they differ by more than rounding."""
    batch = Batch(probe_tokens(adapted.spec))
    return compare_logits(adapted.logits(batch), merged.logits(batch), "adapters merged")


def probe_tokens(spec: ModelSpec) -> torch.Tensor:
    """The same random tokens for every export of a model."""
    length = min(PROBE[1], spec.max_positions)
    return torch.randint(spec.vocab, (PROBE[0], length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def compare_with_transformers(reference: Decoder, directory: Path, tokens_BT: torch.Tensor, **options: Any) -> float:
    """The largest difference between logits of `reference` and of the model that transformers reads from `directory`,
    both in fp32; `options` are passed to `from_pretrained`.

    Raises `UserError` with the first block whose output differs, if the difference exceeds rounding.
    """
    model = _transformers_model(directory, **options)
    return compare_logits(
        reference.logits(Batch(tokens_BT)),
        _text_model(model, reference.spec)(tokens_BT).logits,
        "read by transformers",
        where=lambda: _first_other_block(reference, _text_model(model, reference.spec), tokens_BT),
    )


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
        theirs_BTV = _text_model(_peft_model(write_base(), directory), reference.spec)(batch.tokens).logits
        worst["peft"] = compare_logits(expected_BTV, theirs_BTV, "read by peft", what="the adapter")
    return worst


def _peft_model(base: Path, adapter: Path) -> nn.Module:
    import peft  # heavy and optional, so it is imported only when an adapter is proved

    model = _transformers_model(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's notes on tied embeddings and transformers
            adapted = peft.PeftModel.from_pretrained(model, str(adapter))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"the adapter was refused: peft {peft.__version__} cannot read it ({str(error).splitlines()[0]}); write "
            "the whole model with --hf DIR --merge"
        ) from error
    return adapted.eval().get_base_model()


def _text_model(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """The part of transformers' model that computes logits from text alone: the whole, unless the head is in a part."""
    part = "" if spec.wrapper is None else spec.wrapper.modules[-1][1].removesuffix("lm_head.")
    return model.get_submodule(part.removesuffix("."))


def _transformers_model(directory: Path, **options: Any) -> nn.Module:
    """The model that transformers reads from a directory, in fp32, ready for inference: of its own class, if it is a
    multimodal model."""
    # Heavy and optional, so it is imported only when an export is proved.
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    if (directory / "config.json").is_file():  # not beside a GGUF file
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if is_multimodal(config):
            load = getattr(transformers, config["architectures"][0]).from_pretrained
    return load(directory, local_files_only=True, dtype=torch.float32, **options).eval()


def _first_other(expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    """The first tensor that was stored wrongly."""
    wrong = (name for name, tensor in expected.items() if not torch.equal(tensor, tensors[name]))
    return next(wrong, "none: the computation differs")


def _first_other_block(reference: Decoder, theirs: nn.Module, tokens_BT: torch.Tensor) -> str:
    """The first block whose output differs; transformers' last hidden states come after the norm."""
    ours: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        ours.append(output)

    hooks = [block.register_forward_hook(keep) for block in reference.layers.values()]
    try:
        reference.logits(Batch(tokens_BT))
    finally:
        for hook in hooks:
            hook.remove()
    behind = theirs(tokens_BT, output_hidden_states=True).hidden_states[1:-1]
    for number, (a, b) in enumerate(zip(ours, behind, strict=False)):
        if not (a - b).abs().max().item() <= TOLERANCE * a.abs().max().item():
            return f"the output of block {number}"
    return "the last block, the norm or the head"


def compare_logits(
    expected_BTV: torch.Tensor,
    found_BTV: torch.Tensor,
    how: str,
    *,
    what: str = "the export",
    where: Callable[[], str] | None = None,
) -> float:
    """The largest difference of two logits. If it exceeds rounding, raises `UserError` with `what` was read, `how`, and
    the first difference that `where` finds."""
    difference = (expected_BTV - found_BTV).abs().max().item()
    if not difference <= TOLERANCE * expected_BTV.abs().max().item():
        first = f"; first difference: {where()}" if where else ""
        raise UserError(
            f"{what} was refused: {how}, its logits differ from the model's by {difference:.3g} "
            f"(the largest logit is {expected_BTV.abs().max().item():.3g}){first}"
        )
    return difference

"""Export of a trained model's adapters in peft's format, checked by comparing logits."""

import itertools
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.checkpoint.hf_proof import probe_tokens, prove_adapter
from meshwright.checkpoint.peft import Base, read_adapter, write_adapter
from meshwright.checkpoint.peft_config import unread_by_vllm
from meshwright.devices import CPU
from meshwright.families import parameter_table, state_table
from meshwright.families.fp8_files import QUANTIZATION
from meshwright.families.hub import hub_id
from meshwright.finetune import apply_finetune
from meshwright.handover.receipt import Receipt, logits_reading
from meshwright.handover.vllm_receipt import PROGRAM as VLLM
from meshwright.handover.vllm_receipt import vllm_python, vllm_reading
from meshwright.models import Decoder, build_model, named_state
from meshwright.parallel.materialize import materialize
from meshwright.serve.trained import TrainedModel, directory_of
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec, LoraSpec
from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import base_of, base_weights


def export_adapter(trained: TrainedModel, directory: Path, *, vllm: Path | None = None) -> tuple[int, Receipt]:
    """Write the trained parameters as a peft adapter, with its receipt.

    Returns the number of its parameters, and the receipt: the largest difference of logits between the model and the
    adapter read back, also by peft if it is installed, and by vLLM with the Python of its environment, `vllm`.

    Raises `UserError` if there are no adapters, `directory` exists, peft has no name for them, or the logits differ by
    more than rounding; then nothing is written.
    """
    run, python = trained.run, vllm_python(vllm)
    finetune = None if run is None else run.run.finetune
    base = None if run is None else base_of(run)
    if run is None or finetune is None or isinstance(finetune, FullSpec) or base is None:
        raise UserError(f"{trained.source} has no adapters; write the whole model with --hf DIR")
    fingerprint = base["fingerprint"]
    name = hub_id(Path(base["path"])) or base["path"] if run.run.model.weights == "pretrained" else None
    kept = {name: tensor for name, tensor in trained.model.named_parameters() if tensor.requires_grad}
    receipts: list[Receipt] = []

    def prove(written: Path) -> None:
        reference = _on_plain_base(trained, run, kept)
        with tempfile.TemporaryDirectory(dir=written.parent, prefix=f"{written.name}-base-") as folder:
            write_base = cache(lambda: _base_directory(trained, run, Path(folder)))
            differences = prove_adapter(
                reference,
                written,
                lambda place: read_adapter(place, trained.spec, finetune, fingerprint=fingerprint),
                write_base,
            )
            positions = probe_tokens(trained.spec).numel()
            results = [
                (logits_reading(program, difference, positions), []) for program, difference in differences.items()
            ]
            notes = [f"vLLM does not support {reason}" for reason in unread_by_vllm(written)]
            if python is not None and not notes:
                results.append(vllm_reading(reference, write_base(), python, tokenizer=None, adapter=written))
        programs = ("peft",) if python is None else ("peft", VLLM)
        about: dict[str, Any] = {"exported": directory.name, "dtype": FP32.name, "source": str(trained.source)}
        receipts.append(Receipt.of(results, programs, notes, **about).write(written))

    write_adapter(directory, kept, trained.spec, finetune, Base(name, fingerprint), prove=prove)
    return sum(tensor.numel() for tensor in kept.values()), receipts[0]


@torch.no_grad()
def _on_plain_base(trained: TrainedModel, run: ResolvedRun, kept: Mapping[str, torch.Tensor]) -> Decoder:
    """The model with its unquantized base; a copy if the run quantized the base."""
    finetune = run.run.finetune
    if not isinstance(finetune, LoraSpec) or finetune.base == "plain":
        return trained.model
    model = build_model(trained.spec, dtype=torch.float32)
    apply_finetune(model, finetune.model_copy(update={"base": "plain"}), torch.float32)
    frozen = [*(row for row in model.table if not row.trained), *state_table(trained.spec)]
    materialize(model, frozen, base_weights(run), CPU)
    parameters = dict(model.named_parameters())
    for name, tensor in kept.items():
        parameters[name].copy_(tensor)
    return model.eval()


def _base_directory(trained: TrainedModel, run: ResolvedRun, folder: Path) -> Path:
    """The base as a Hugging Face directory: the one that the run began with, or one written into `folder`, which every
    transformers opens: without quantized matrices, and without code of its own."""
    started = directory_of(trained) if run.run.model.weights == "pretrained" else None
    if started is not None and not run.run.checkpoint.start_from:
        config = json.loads((started / "config.json").read_text(encoding="utf-8"))
        if not {QUANTIZATION, "auto_map"} & config.keys():
            return started
    rows = base_weights(run)
    whole = ((row.name, rows(row, 0, row.shape[0])) for row in parameter_table(trained.spec))
    export_hf(
        itertools.chain(whole, named_state(trained.model).items()),
        trained.spec,
        folder / "base",
        HfForm(dtype=torch.float32, rest=started),
        prove=False,
    )
    return folder / "base"

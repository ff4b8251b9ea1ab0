"""Proves layouts of tiny models of transformers on real ranks, and writes docs/foreign.md.

    python benchmarks/foreign_layouts.py --types llama,phi3      # measures these
    python benchmarks/foreign_layouts.py --limit 20              # measures up to 20 more architectures
    python benchmarks/foreign_layouts.py --missing               # measures missing columns

Each architecture is a model of two or four layers with random weights. transformers' loss and gradients are compared
with one process of ours, and each layout with that one process, in float64: loss, the norm, every gradient, and every
weight after a step.
"""

import argparse
import datetime
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.derive.derive import rounds_in_float32
from meshwright.derive.probe import draw
from meshwright.families import read_hf_directory
from meshwright.models.foreign import ForeignDecoder
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError
from meshwright.spec.fit import find_misfits, foreign_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.derived import derived_here
from meshwright.testing.equivalence import Outcome, build_here, largest_difference, loader_for, one_step
from meshwright.testing.ranks import RankPool

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PAGE = DOCS / "foreign.json", DOCS / "foreign.md"
LENGTH, BATCH = 16, 4
LORA = {"method": "lora", "rank": 4}
COLUMNS: dict[str, tuple[LayoutSpec, dict[str, Any] | None]] = {
    "ZeRO-3": (LayoutSpec(dp_shard=2, zero=3), None),
    "tp 2": (LayoutSpec(tp=2), None),
    "tp 2 x ZeRO-2": (LayoutSpec(tp=2, dp_shard=2, zero=2), None),
    "LoRA, tp 2": (LayoutSpec(tp=2), LORA),
    "pp 2": (LayoutSpec(pp=2), None),
    "pp 2 x tp 2": (LayoutSpec(pp=2, tp=2), None),
    "cp 2": (LayoutSpec(cp=2), None),
    "cp 2 x tp 2": (LayoutSpec(cp=2, tp=2), None),
    "ep 2": (LayoutSpec(dp_shard=2, zero=3, ep=2), None),
    "ep 2 x cp 2 x pp 2": (LayoutSpec(pp=2, cp=2, ep=2), None),
}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "dff"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 40),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 6),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "n_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "rotary_dim": 4,
    "first_k_dense_replace": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "query_pre_attn_scalar": 8,
    "num_nextn_predict_layers": 0,
}
OPTIONAL = ("q_lora_rank", "sliding_window", "attention_chunk_size", "n_inner", "n_shared_experts")
ZEROED = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "layerdrop")
LATENT = {"num_key_value_heads": 4}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "sarvam_mla", "glm4_moe_lite", "minicpm3"), LATENT),
    **dict.fromkeys(("deepseek_v3", "youtu", "axk1"), LATENT | {"head_dim": 4}),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
}


def tiny_config(kind: str) -> Any:
    """A small configuration of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    default = cls().to_dict()
    known = {key: value for key, value in SIZES.items() if key in default}
    sizes = {key: value for key, value in known.items() if key not in OPTIONAL or default[key] is not None}
    sizes |= {key: 0.0 for key, value in default.items() if key.endswith(ZEROED) and isinstance(value, float)}
    if default.get("layer_types"):
        kinds = list(dict.fromkeys(default["layer_types"]))
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    return cls(**{**sizes, **MORE.get(kind, {}), "dtype": "float32"})


def resolved_run(directory: Path, layout: LayoutSpec, finetune: dict[str, Any] | None) -> ResolvedRun:
    """A run of one step in float64."""
    fields = ModelFields(name=str(directory), weights="pretrained", family="transformers")
    training = {"precision": "fp64", "optimizer": {"lr": 1e-2, "eps": 0.1}, "lr_schedule": {"warmup": 0}}
    data = {"sequence_length": LENGTH, "cache_dir": str(directory.parent / "cache")}
    values = {"model": fields, "data": DataSpec(**data), "training": training, "finetune": finetune, "layout": layout}
    run = Run.model_validate({**values, "device": "cpu"})
    model = derived_here(read_hf_directory(directory, family="transformers"), layout)
    assert model.foreign is not None
    if misfits := find_misfits(layout, model, LENGTH) or foreign_misfits(run, layout, model.foreign):
        raise UserError(misfits[0])
    ranks, accumulation = layout.data_parallel, layout.pp
    stages = balanced_stages(layer_costs(model, LENGTH), layout.pp) if layout.pp > 1 else ()
    return ResolvedRun(
        run=run,
        base_dir=".",
        model=model,
        global_batch=BATCH,
        micro_batch=BATCH // ranks // accumulation,
        accumulation=accumulation,
        stage_layers=stages,
        reasons={},
    )


def differs(ours: Outcome, expected: Outcome, tolerance: float) -> str:
    """What differs by more than `tolerance` of the largest gradient; empty if nothing."""
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for what, ours_, theirs in (("loss", ours.loss, expected.loss), ("norm", ours.gnorm, expected.gnorm)):
        if not abs(ours_ - theirs) <= tolerance * abs(theirs):
            return f"{what} differs by {abs(ours_ - theirs) / abs(theirs):.1e}"
    by, name = largest_difference(ours.gradients, expected.gradients)
    if not by <= tolerance * largest:
        return f"the gradient of {name} differs by {by / largest:.1e}"
    by, name = largest_difference(ours.weights, expected.weights)
    return "" if by <= tolerance * largest else f"{name} differs by {by:.1e} after a step"


def against_transformers(directory: Path, run: ResolvedRun, tolerance: float) -> str:
    """What differs between one process of ours and transformers' own loss and gradients; empty if nothing."""
    import transformers

    trainer = build_here(run)
    with loader_for(trainer) as loader:
        microbatches = loader.microbatches(0)
    loss, trained = trainer.train_step.gradients(microbatches)
    (batch,) = microbatches
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
    model = model.double().eval()
    logits = model(torch.from_numpy(batch.tokens), use_cache=False).logits
    labels = torch.from_numpy(batch.labels).flatten()
    mean = F.cross_entropy(logits.flatten(0, 1).double(), labels, reduction="sum") / trained
    mean.backward()
    if not abs(loss - mean.item()) <= tolerance * abs(loss):
        return f"loss differs from transformers' by {abs(loss - mean.item()) / abs(loss):.1e}"
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
    for name, parameter in trainer.parameters.items():
        theirs = gradients[name.replace("embed_out", "lm_head") if name not in gradients else name]
        theirs = torch.zeros_like(parameter) if theirs is None else theirs
        ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not (ours - theirs).abs().max() <= tolerance * largest:
            return f"the gradient of {name} differs from transformers'"
    return ""


def measure(kind: str, pool: RankPool, columns: Collection[str]) -> dict[str, str]:
    """These cells of one architecture: `equal`, `refused: reason`, `wrong: what` or `no experts`."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / kind
        try:
            torch.manual_seed(0)
            model: Any = transformers.AutoModelForCausalLM.from_config(tiny_config(kind))
            draw(model)
            model.save_pretrained(directory)
            plain = resolved_run(directory, LayoutSpec(), None)
            tokens = torch.randint(40, (BATCH, LENGTH))
            double = model.double().eval()
            if hasattr(double, "set_experts_implementation"):
                double.set_experts_implementation("eager")
            rounds = rounds_in_float32(lambda: double(tokens, use_cache=False))
            tolerance = 1e-6 if rounds else 1e-11
            alone = {str(None): one_step(plain)}
            if wrong := against_transformers(directory, plain, tolerance):
                return dict.fromkeys(columns, f"wrong: {wrong}") | {"rounds": str(rounds)}
        except Exception as error:
            return {"not tried": " ".join(f"{type(error).__name__}: {error}".split())[:160]}
        cells = {"rounds": str(rounds)}
        for column in columns:
            layout, finetune = COLUMNS[column]
            try:
                if str(finetune) not in alone:
                    tuned = resolved_run(directory, LayoutSpec(), finetune)
                    module = build_here(tuned).model
                    assert isinstance(module, ForeignDecoder)
                    if problem := module.skipped_adapters(module):
                        raise UserError(problem)
                    alone[str(finetune)] = one_step(tuned)
                run = resolved_run(directory, layout, finetune)
                expected = alone[str(finetune)]
                assert expected is not None
                wrong = differs(pool.run(layout.world_size, one_step, run)[0], expected, tolerance)
                cells[column] = f"wrong: {wrong}" if wrong else "equal"
                if layout.tp > 1 and run.model.foreign is not None and run.model.foreign.split is not None:
                    cells["split"] = share_of(run)
            except UserError as error:
                cells[column] = "no experts" if "it has no experts" in str(error) else f"refused: {error}"
            except Exception as error:
                cells[column] = f"wrong: {' '.join(str(error).split())[-160:]}"
        return cells


def share_of(run: ResolvedRun) -> str:
    """Percent of the numbers in blocks' matrices that ranks split."""
    from meshwright.families.foreign import split_parameters

    foreign = run.model.foreign
    assert foreign is not None
    split = {name for name, one in split_parameters(foreign).items() if not one.kept}
    matrices = {
        name: torch.Size(shape).numel()
        for name, shape in foreign.tensors
        if name.startswith(f"{foreign.blocks}.") and len(shape) > 1
    }
    return f"{100 * sum(size for name, size in matrices.items() if name in split) / sum(matrices.values()):.0f} %"


def candidates() -> list[str]:
    """The causal language models of transformers that are decoders of text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return [kind for kind in NAMES if NAMES[kind].endswith(("ForCausalLM", "LMHeadModel"))]


def page(results: dict[str, Any]) -> str:
    """The page, from all results."""
    cells = {kind: found for kind, found in results["cells"].items() if "not tried" not in found}
    values = [found[column] for found in cells.values() for column in COLUMNS if column in found]
    values = [value for value in values if value != "no experts"]
    dates = [f"{column} {results['dates'][column]}" for column in COLUMNS]
    equal, wrong = values.count("equal"), sum(value.startswith("wrong") for value in values)
    lines = [
        "# Layouts of transformers' models, proved on real ranks",
        "",
        f"Written by `python benchmarks/foreign_layouts.py`, with transformers {results['transformers']} and PyTorch "
        f"{results['torch']}, on CPUs (gloo). Measured last: {', '.join(dates)}.",
        "",
        f"{len(cells)} architectures, {len(values)} cells: **{equal} equal, {len(values) - equal - wrong} refused, "
        f"{wrong} wrong** ({100 * equal // max(1, len(values))} % equal). Each model is tiny, with random weights, "
        "in float64. One process is compared with transformers' own loss and gradients, and each layout's loss, norm, "
        "gradients and weights after a step with it: to 1e-11, or to 1e-6 (marked *) where in transformers norms, "
        "gates or routers compute in float32 in any dtype. *split* is the share of the numbers in blocks' matrices "
        "that tensor-parallel ranks split; the rest is computed whole on every rank. Pipelines (pp) run two "
        "microbatches under 1F1B. –: the model has no experts.",
        "",
        f"| architecture | split | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    reasons: dict[str, list[str]] = {}
    for kind, found in sorted(cells.items()):
        shown = []
        for column in COLUMNS:
            word, _, reason = found.get(column, "").partition(": ")
            shown.append({"wrong": "**wrong**", "no experts": "–"}.get(word, word))
            if reason:
                reasons.setdefault(f"{word}: {reason}", []).append(f"{kind} ({column})")
        star = "*" if found["rounds"] == "True" else ""
        lines.append(f"| {kind}{star} | {found.get('split', '')} | {' | '.join(shown)} |")
    lines += ["", "## Refused", ""] if reasons else []
    lines += [f"- {', '.join(places)}: {reason}" for reason, places in sorted(reasons.items())]
    left = {kind: found["not tried"] for kind, found in results["cells"].items() if "not tried" in found}
    if left:
        lines += ["", "## Not tried", "", "No tiny model of these could be made, saved and read by this script:", ""]
        lines += [f"- {kind}: {reason}" for kind, reason in sorted(left.items())]
    return "\n".join(lines).replace("<", "&lt;") + "\n"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="architectures, separated by commas; default: those not measured")
    parser.add_argument("--missing", action="store_true", help="measure the missing columns of measured architectures")
    parser.add_argument("--limit", type=int, default=0, help="measure at most this many; 0: only write the page")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no other architecture after this time")
    arguments = parser.parse_args()
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}, "dates": {}}
    asked = [kind for kind in arguments.types.split(",") if kind]
    kinds = asked or [kind for kind in candidates() if kind not in results["cells"]][: arguments.limit]
    wanted = {kind: list(COLUMNS) for kind in kinds}
    if arguments.missing:
        cells = {kind: found for kind, found in results["cells"].items() if "not tried" not in found}
        missing = {kind: [column for column in COLUMNS if column not in found] for kind, found in cells.items()}
        wanted |= {kind: columns for kind, columns in missing.items() if columns}
    began, pool = time.monotonic(), RankPool()
    for kind, columns in wanted.items():
        if time.monotonic() - began > arguments.seconds:
            break
        found = measure(kind, pool, columns)
        known = {} if "not tried" in found else results["cells"].get(kind, {})
        results["cells"][kind] = known | found
        print(kind, found, flush=True)
        results["dates"] |= dict.fromkeys(columns, str(datetime.date.today()))
        results["transformers"] = transformers.__version__
        results["torch"] = torch.__version__.partition("+")[0]
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if results["cells"]:
        PAGE.write_text(page(results))
    print(f"{len(results['cells'])} architectures in {PAGE.name}", flush=True)
    pool.close()
    os._exit(0)


if __name__ == "__main__":
    main()

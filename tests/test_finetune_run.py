"""A fine-tuned run from its base to its files: small checkpoints, exact resumption, use, merging, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import CheckpointPolicy

from losses import logits_of
from meshwright import Run, train
from meshwright.checkpoint.dcp import held_tensors
from meshwright.checkpoint.manifest import CheckpointError
from meshwright.checkpoint.peft import WEIGHTS
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.cli.main import main
from meshwright.cli.train import whats_next
from meshwright.handover.adapters import export_adapter
from meshwright.handover.export import export_trained
from meshwright.launch.status import MISUSE, TrainingFailed
from meshwright.models import named_tensors
from meshwright.models.generate import Sampling
from meshwright.parallel.recompute import _keep_expensive_results
from meshwright.serve.trained import Settings, continue_texts, open_trained
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import PreferenceSpec
from meshwright.testing.equivalence import build_here, loader_for, whole
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer import run as run_module
from meshwright.trainer.banner import banner
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.folder import read_resolved
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.state import begin, restore, state_tensors, state_values
from meshwright.trainer.weights import SAMPLED_BYTES, SAMPLES, _sample
from tiny import tiny_run

LORA: dict[str, Any] = {"method": "lora", "rank": 4, "dora": True, "dropout": 0.2, "train": ["norm"]}
QLORA: dict[str, Any] = {"method": "qlora", "rank": 4}
TEXT = "\n".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(200))


def recipe(folder: Path, name: str, **more: Any) -> Run:
    training = {"steps": 2, "global_batch": 4, "precision": "fp32", "lr_schedule": {"warmup": 0}}
    return Run(
        model={
            "weights": "random",
            "family": "llama",
            "hidden": 32,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 64,
        },  # type: ignore[arg-type]
        data={  # type: ignore[arg-type]
            "sources": [str(folder / "text.txt")],
            "sequence_length": 32,
            "tokenizer_vocab": 280,
            "cache_dir": str(folder / "cache"),
        },
        training=training,  # type: ignore[arg-type]
        run_dir=str(folder / name),
        device="cpu",
        **more,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pretrained run `base` and one fine-tuned from it, `lora`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    train(recipe(folder, "base"))
    train(recipe(folder, "lora", finetune=LORA, checkpoint={"start_from": str(folder / "base")}))
    return folder


@pytest.mark.slow
def test_a_refused_continuation_leaves_the_run_as_it_was(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks: refused before they start or, if they choose the checkpoint themselves, by the ranks."""
    names = ("recipe.yaml", "resolved.yaml")
    before = [(runs / "lora" / name).read_bytes() for name in names]
    seen: list[ResolvedRun] = []

    def start(run: Run, nodes: Any, words: list[str], *_: Any) -> int:
        seen.append(read_resolved(Path(words[words.index("--resolved") + 1])))
        return MISUSE

    monkeypatch.setattr(run_module, "start_workers", start)
    two: dict[str, Any] = {"layout": {"dp_shard": 2}, "checkpoint": base_of(runs)}
    changes = {
        r"lora_a has shape \(4, 32\), but this run's has \(8, 32\)": {"finetune": LORA | {"rank": 8}},
        "has model.norm.weight, which this run does not train": {"finetune": LORA | {"train": []}},
        "has adapters of .*, but this run trains the whole model": {},
    }
    for message, change in changes.items():
        with pytest.raises(CheckpointError, match=message):
            train(recipe(runs, "lora", **two, **change), resume=True)
    assert not seen
    with pytest.raises(TrainingFailed):
        train(recipe(runs, "lora", **two, finetune=LORA | {"rank": 8}), resume="auto")
    assert [run.run.layout.dp_shard for run in seen] == [2]
    assert [(runs / "lora" / name).read_bytes() for name in names] == before


def test_what_is_said_is_what_can_be_done(runs: Path) -> None:
    base, tuned = recipe(runs, "base"), recipe(runs, "lora", finetune=LORA)
    assert whats_next(base, has_template=False).splitlines() == [
        f"next        meshwright generate {runs}/base --prompt 'Once upon a time'",
        f"            meshwright eval {runs}/base",
        f"            meshwright export {runs}/base --hf {runs}/base/export",
    ]
    pairs = tuned.training.model_copy(update={"preference": PreferenceSpec()})
    said = whats_next(tuned.model_copy(update={"training": pairs}), has_template=True)
    assert "--chat --prompt" in said
    assert "eval" not in said
    assert f"export {runs}/lora --adapter {runs}/lora/adapter\n" in said
    assert said.endswith(f"export {runs}/lora --hf {runs}/lora/merged --merge")
    trainer = build_here(resolve_run(recipe(runs, "few", finetune=QLORA, checkpoint=base_of(runs)), base_dir=runs))
    assert begin(trainer, runs / "few", None) == f"starting from {runs}/base, step 2"
    kept = "base      frozen matrices of linear layers in nf4, with 8-bit scales; everything else in fp32\n"
    assert kept in banner(trainer, corpus_of(trainer.resolved))


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return named_tensors(open_trained(path, device="cpu", dtype="fp32").model)


def test_a_checkpoint_holds_what_trains_and_the_base_stays_what_it_was(runs: Path) -> None:
    kept = {name for name in held_tensors(runs / "lora/checkpoints/step-00000002") if name.startswith("model.")}
    base, tuned = weights_of(runs / "base"), weights_of(runs / "lora")
    trained = {f"model.{name}" for name in tuned if name.split(".")[-1] in ("lora_a", "lora_b", "magnitude")}
    assert kept == trained | {"model.norm.weight"}
    for name, tensor in base.items():
        assert torch.equal(tuned[name], tensor) == (name != "norm.weight"), name
    assert any(tensor.any() for name, tensor in tuned.items() if name.endswith("lora_b"))


@pytest.mark.slow
def test_a_fine_tuned_run_is_used_as_any_other(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapted = open_trained(runs / "lora", device="cpu")
    assert continue_texts(adapted, ["def add"], Settings(max_tokens=4, sampling=Sampling(temperature=0)))
    assert main(["eval", str(runs / "lora"), "--samples", "4"]) == 0
    with pytest.raises(ValueError, match=r"--merge, or the adapters with --adapter"):
        export_trained(adapted, tmp_path / "no")
    with pytest.raises(ValueError, match="has no adapters"):
        export_adapter(open_trained(runs / "base", device="cpu"), tmp_path / "no")
    assert main(["export", str(runs / "lora"), "--adapter", str(tmp_path / "adapter")]) == 0
    written = load_file(tmp_path / "adapter" / WEIGHTS)
    assert written["base_model.model.model.norm.weight"].equal(adapted.model.norm.weight), "as trained, unrounded"
    assert main(["export", str(runs / "lora"), "--hf", str(tmp_path / "merged"), "--merge"]) == 0
    merged = open_trained(tmp_path / "merged", device="cpu", dtype="fp32")
    tokens_BT = torch.randint(adapted.spec.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (logits_of(merged.model, tokens_BT) - logits_of(adapted.model, tokens_BT)).abs().max()
    assert 0 < difference < 1e-4
    train(recipe(runs, "again", finetune=LORA | {"start_from": str(tmp_path / "adapter")}, checkpoint=base_of(runs)))
    capsys.readouterr()


def base_of(runs: Path) -> dict[str, str]:
    return {"start_from": str(runs / "base")}


def test_another_base_is_refused(runs: Path, tmp_path: Path) -> None:
    other = recipe(runs, str(tmp_path / "other"), finetune=LORA | {"start_from": str(runs / "lora")})
    with pytest.raises(CheckpointError, match="use the same base"):
        train(other)
    missing = recipe(runs, str(tmp_path / "other"), finetune=LORA, checkpoint={"start_from": str(runs / "lora")})
    with pytest.raises(CheckpointError, match="has no"):
        train(missing)


def trajectory(run: ResolvedRun, root: Path, steps: int, resume: bool) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step; the first two are saved."""
    trainer = build_here(run)
    writer = CheckpointWriter(root, run.run.checkpoint)
    if resume:
        restore(trainer, root / "step-00000002")
    frozen = {name: whole(p) for name, p in trainer.model.named_parameters() if not p.requires_grad}
    seen = []
    with loader_for(trainer) as loader:
        while trainer.step < steps:
            trainer.step += 1
            result = trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1))
            seen.append((result.loss, result.gnorm))
            if trainer.step == 2 and not resume:
                writer.begin(2, state_tensors(trainer), state_values(trainer))
                assert writer.finish()
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(whole(after[name]), tensor) for name, tensor in frozen.items())
    return seen


def test_a_change_anywhere_in_a_large_file_is_another_base(tmp_path: Path) -> None:
    """More exactly, in one of the sampled pieces; here they cover nearly all of it."""
    content, digests = bytearray(SAMPLES * SAMPLED_BYTES + 100), set()
    for place in (0, len(content) // 2, len(content) - 1):
        (tmp_path / "base").write_bytes(content[:place] + b"x" + content[place + 1 :])
        digests.add(hash(_sample(tmp_path / "base")))
    assert len(digests) == 3


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("single", "fp32"), ("zero-3", "bf16"), ("hybrid-2", "fp32"), ("zero-3-tp", "bf16"), ("pp", "fp32")],
)
def test_continues_bit_for_bit(ranks: RankPool, tmp_path: Path, strategy: str, precision: str) -> None:
    """With dropout and recomputation; frozen weights are equal bit for bit after training."""
    finetune = {"method": "lora", "rank": 4, "dropout": 0.25}
    run = tiny_run(LAYOUTS[strategy], precision=precision, finetune=finetune, recompute="full", steps=4)
    world = run.run.layout.world_size
    whole_run = ranks.run(world, trajectory, run, tmp_path, 4, False)[0]
    assert ranks.run(world, trajectory, run, tmp_path, 4, True)[0] == whole_run[2:]


def test_selective_recomputation_does_not_keep_what_adapters_widen() -> None:
    """W x and A x [T, R] are kept; B A x, and DoRA's W + B A, are recomputed."""
    kept = [_keep_expensive_results(frozenset({4}), None, torch.ops.aten.mm.default, *pair) for pair in product_pairs()]
    assert kept == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
    weight, b, a = torch.empty(16, 8), torch.empty(16, 4), torch.empty(4, 8)
    norms = _keep_expensive_results(frozenset({4}), None, torch.ops.aten.addmm.default, weight, b, a)
    assert norms == CheckpointPolicy.PREFER_RECOMPUTE


def product_pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The factors of W x, A x and B A x, 3 tokens of width 8."""
    x, inner = torch.empty(3, 8), torch.empty(3, 4)
    return [(x, torch.empty(8, 16)), (x, torch.empty(8, 4)), (inner, torch.empty(4, 16))]


def test_recomputation_draws_the_same_dropout() -> None:
    finetune = {"method": "lora", "rank": 4, "dropout": 0.5}
    norms = []
    for recompute in ("none", "selective", "full"):
        trainer = build_here(tiny_run(LayoutSpec(), finetune=finetune, recompute=recompute))
        with loader_for(trainer) as loader:
            loss, _ = trainer.train_step.gradients(loader.microbatches(0))
        norms.append((loss, trainer.train_step.gradient_norm()))
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert norms[2] == pytest.approx(norms[0], rel=1e-12)

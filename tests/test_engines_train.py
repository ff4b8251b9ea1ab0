"""Engines compared with ours over ten steps: the same losses and norms, and settings that each has read back."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from meshwright.engines.compare import Contestant, ContestRow, Pace, compare
from meshwright.engines.layouts import layout_called
from meshwright.engines.parity import verify_engine
from meshwright.engines.registry import ENGINES
from meshwright.prove.shrink import shrink
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, tied_embeddings: true}
data: {sources: "*.txt", tokenizer_vocab: 300, sequence_length: 32, cache_dir: cache}
training: {steps: 10, global_batch: 8, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 3}}
device: cpu
"""
MIXTRAL = (
    "model={family: mixtral, hidden: 32, num_layers: 2, num_heads: 4, num_experts: 4, balance_loss: 0, vocab: 300}"
)
GPT2 = "model={family: gpt2, hidden: 32, num_layers: 2, num_heads: 4, max_positions: 32}"
UNTIED = "model.tied_embeddings=false"
MORE = {
    "host": {"offload": {"optimizer": "host"}},
    "disk": {"offload": {"optimizer": "disk"}},
    "both": {"offload": {"optimizer": "disk", "parameters": "host"}},
    "interleaved": {"schedule": "interleaved-1f1b"},
}
TOLERANCE = 2e-5
"""For a loss of about 6 in fp32: a few dozen roundings, in an order that differs between engines."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with text, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} cats sat on {n * n} mats\n" for n in range(400)))
    return tmp_path


def installed(engine: str) -> bool:
    return all(importlib.util.find_spec(module) for module in ENGINES[engine].packages)


def trained(
    folder: Path, recipe: list[str], rows: dict[str, str], checkout: Path | None = None
) -> dict[str, ContestRow]:
    """Ten steps of ours on one process, and of every engine in its layout; all have our losses and norms.

    Each of `rows` is an engine and a word -> its layout, and its options from `MORE`.
    """
    entered = []
    for name, words in {"meshwright": "single", **rows}.items():
        layout, *overrides = words.split()
        engine = ENGINES[name.split()[0]]
        if not installed(engine.name):
            pytest.skip(f"{engine.name} is not installed")
        run = parse_spec(RECIPE, Run, recipe).model_copy(update={"layout": layout_called(layout)})
        more: dict[str, Any] = MORE[overrides[0]] if overrides else {}
        layout_of = type(run.layout)(**run.layout.model_dump() | more)
        resolved = resolve_run(run.model_copy(update={"layout": layout_of}), base_dir=folder)
        entered.append(Contestant(name=name, engine=engine, resolved=resolved, checkout=checkout))
    found = compare(entered, folder / "out", pace=Pace(2, 4, 2), patience=600, say=lambda line: None)
    ours = found[0]
    assert len(ours.losses) == 10
    assert ours.losses[0] > ours.losses[-1]
    for row in found:
        assert row.error is None, (row.name, row.error)
        for what in ("losses", "gnorms"):
            difference = row.difference_from(ours, what)
            assert difference is not None
            assert difference <= TOLERANCE, (row.name, what)
        assert row.ran.get("trained", row.ran["parameters"]) == ours.ran["parameters"]
    return {row.name: row for row in found}


def share(row: ContestRow) -> float:
    """Fraction of the layers' matrices that a rank holds."""
    held, whole = row.ran["matrices"]
    return held / whole


@pytest.mark.engines
def test_transformers_splits_its_own_model(folder):
    rows = trained(
        folder, [], {"transformers": "single", "transformers sharded": "zero3", "transformers tensor": "tp2"}
    )
    assert rows["transformers sharded"].ran["parameter"] == ["DTensor"]
    assert share(rows["transformers tensor"]) < 0.6
    assert "tp" in rows["transformers tensor"].ran["axes"]


@pytest.mark.engines
def test_transformers_splits_experts(folder):
    rows = trained(folder, [MIXTRAL], {"transformers experts": "zero3:2+ep2"})
    assert "ep" in rows["transformers experts"].ran["axes"]


@pytest.mark.engines
def test_deepspeed_splits_matrices_and_keeps_state_on_the_host(folder):
    engines = {"deepspeed tensor": "tp2", "deepspeed host": "zero2 host"}
    rows = trained(folder, [UNTIED], engines)
    assert share(rows["deepspeed tensor"]) < 0.6
    assert rows["deepspeed host"].ran["host"] == ["cpu_offload"]


@pytest.mark.engines
def test_deepspeed_keeps_state_on_disk(folder):
    """Groups of less than 1 MiB stay in memory, so the model is wider."""
    wider = ["model.hidden=128", "model.num_layers=3"]
    rows = trained(folder, wider, {"deepspeed disk": "single disk", "deepspeed both": "zero3 both"})
    assert rows["deepspeed disk"].ran["disk"] > 3 * 4 * 500_000  # fp32 weights and two moments of the matrices
    assert rows["deepspeed both"].ran["disk"] > 3 * 4 * 250_000
    assert rows["deepspeed both"].ran["host"] == ["offload_param"]
    assert not list((folder / "out").rglob("*.swp"))


@pytest.mark.engines
def test_deepspeed_shares_samples(folder):
    rows = trained(folder, [], {"deepspeed ulysses": "cp2", "deepspeed sharded": "cp2+zero3:2"})
    assert rows["deepspeed ulysses"].ran["sequence"] == 2
    assert rows["deepspeed sharded"].ran["sequence"] == 2
    assert rows["deepspeed sharded"].ran["world_size"] == 4


@pytest.mark.engines
def test_deepspeed_in_a_pipeline(folder):
    rows = trained(folder, [UNTIED], {"deepspeed pipeline": "pp2"})
    assert share(rows["deepspeed pipeline"]) == 0.5
    assert "PipelineEngine" in rows["deepspeed pipeline"].ran["wrappers"]


@pytest.mark.engines
def test_four_ranks_in_two_groups(folder):
    engines = {
        "transformers hybrid": "ddp2+zero3:2",
        "transformers grid": "tp2+zero3:2",
        "deepspeed hpz": "ddp2+zero3:2",
    }
    rows = trained(folder, [UNTIED], engines)
    assert share(rows["transformers grid"]) < 0.3
    assert rows["deepspeed hpz"].ran["second"] > rows["deepspeed hpz"].ran["held"]


@pytest.mark.engines
def test_lightning(folder):
    rows = trained(folder, [], {"lightning": "single", "lightning ddp": "ddp", "lightning sharded": "zero3"})
    assert "DistributedDataParallel" in rows["lightning ddp"].ran["wrappers"]
    assert rows["lightning sharded"].ran["parameter"] == ["DTensor"]


@pytest.mark.engines
def test_lightning_splits_matrices(folder):
    """Embedding and head are one matrix; both plans split it."""
    engines = {"fabric tensor": "tp2", "lightning tensor": "tp2", "lightning grid": "tp2+zero2:2"}
    rows = trained(folder, [], engines)
    for name, row in rows.items():
        if name != "meshwright":
            assert "tensor_parallel" in row.ran["axes"], name
    assert share(rows["fabric tensor"]) == share(rows["lightning tensor"]) == 0.5
    assert share(rows["lightning grid"]) == 0.25
    assert "data_parallel" in rows["lightning grid"].ran["axes"]


@pytest.mark.engines
def test_engines_that_split_are_equal_tensor_by_tensor(folder):
    layouts = {"fabric": ("layout.tp=2", "layout={tp: 2, dp_shard: 2, zero: 3}"), "deepspeed": ("layout.cp=2",)}
    for name, layout in [(name, layout) for name, of in layouts.items() for layout in of]:
        run = parse_spec(RECIPE, Run, ["model.vocab=96", layout])
        assert verify_engine(shrink(resolve_run(run, base_dir=folder)), ENGINES[name], steps=2).first is None


@pytest.mark.engines
def test_nanogpt(folder, request):
    checkout = request.config.getoption("--nanogpt")
    if not checkout:
        pytest.skip("give --nanogpt, the folder of karpathy/nanoGPT")
    trained(folder, [GPT2], {"nanogpt": "single", "nanogpt ddp": "ddp"}, Path(checkout))


@pytest.mark.engines
def test_megatron(folder):
    engines = {"megatron": "single", "megatron ddp": "ddp", "megatron tensor": "tp2"}
    rows = trained(folder, [], engines)
    assert "DistributedDataParallel" in rows["megatron ddp"].ran["wrappers"]
    assert share(rows["megatron tensor"]) < 0.6


@pytest.mark.engines
def test_megatron_in_its_pipelines(folder):
    """Its own 1F1B and interleaved schedule; embedding and head are one matrix, in the first and the last stage."""
    rows = trained(folder, ["model.num_layers=4"], {"megatron line": "pp2", "megatron loops": "pp2 interleaved"})
    for name, schedule, layers in (
        ("megatron line", "without", [[[0, 1]], [[2, 3]]]),
        ("megatron loops", "with", [[[0], [2]], [[1], [3]]]),
    ):
        assert share(rows[name]) == 0.5
        assert rows[name].ran["schedule"] == f"forward_backward_pipelining_{schedule}_interleaving"
        assert [rank["layers"] for rank in rows[name].ran["ranks"]] == layers


@pytest.mark.engines
def test_megatron_in_a_pipeline_of_split_matrices(folder):
    rows = trained(folder, [UNTIED], {"megatron grid": "pp2+tp2"})
    assert share(rows["megatron grid"]) == 0.25


@pytest.mark.engines
def test_litgpt(folder):
    trained(folder, [], {"litgpt": "single"})
    resolved = shrink(resolve_run(parse_spec(RECIPE, Run, [UNTIED, "model.vocab=96"]), base_dir=folder))
    assert verify_engine(resolved, ENGINES["litgpt"], steps=2).first is None


@pytest.mark.engines
def test_megatron_is_equal_tensor_by_tensor(folder):
    """Tied embeddings in a pipeline: the gradients of both copies are added."""
    for more in ([UNTIED, "layout.tp=2"], ["layout={pp: 2, schedule: interleaved-1f1b}", "model.num_layers=4"]):
        run = parse_spec(RECIPE, Run, ["model.vocab=96", *more])
        assert verify_engine(shrink(resolve_run(run, base_dir=folder)), ENGINES["megatron"], steps=2).first is None

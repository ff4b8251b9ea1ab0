"""`plan validate`: rows completed by rule, measurements by their source's convention, honest summaries."""

import csv
import json
import random
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.validate.doubts import COLUMNS as COLUMNS_READ
from meshwright.validate.doubts import cell_doubts
from meshwright.validate.judge import judge, regret, report, spearman, sweep_correlation
from meshwright.validate.rows import read_row
from meshwright.validate.software import EAGER, FSDP, LEGACY, MEGATRON
from meshwright.validate.table import read_table
from meshwright.validate.words import number_of, recompute_of, zero_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

LLAMA = {
    "id": "a-1",
    "source": "a",
    "year": "2024",
    "model_name": "Llama3-8B",
    "params_b": "8",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn_hidden": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "A100-80GB-SXM",
    "gpus": "64",
    "gpus_per_node": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage_or_fsdp": "FSDP2",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "recompute": "selective-op",
    "tokens_per_s_per_gpu": "2973",
}

NAMES = "H800 MI300X MI250 TPUv3 TPU-v5p A100-40GB L40S B200 GB200-NVL72 H20 Ascend-910B XPU9 8xA100-48GB K80 RTX4090"
DEVICES = NAMES.split()
ODD = [
    "not stated",
    "selective+offload",
    "",
    "0",
    "-1",
    "nan",
    "inf",
    "?",
    "1e30",
    "0.5",
    "1,024",
    "4k",
    "8x8",
    "y",
    "OOM",
    "128 (DP=16)",
    "2e-7",
]

COLUMNS = [
    *LLAMA, "n_experts", "top_k", "interconnect", "vpp", "cp", "ep", "dp", "sequence_parallel", "compile", "offload",
    "tflops_per_gpu", "mfu", "step_time_s", "memory_gb_per_gpu", "notes",
]  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | LLAMA | changes


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_complete_row_is_read_as_it_is() -> None:
    run = read_row(row(interconnect="8x200 Gbps"))
    assert run.completed == ()
    assert run.job.model.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert (run.job.layout.zero, run.job.layout.dp_shard) == (3, 64)
    assert (run.job.stack.attention, run.job.recompute_share) == ("flash", 0.5)
    assert run.seconds == pytest.approx(64 * 8192 / (2973 * 64))
    assert run.cluster.network_gb_s == 25


@pytest.mark.parametrize(
    ("text", "per_gpu"),
    [
        ("1600 Gbps node-node RoCE", 25.0),
        ("NVLink; 4x Omni-Path (100 Gb) per node", 6.25),
        ("NVLink 4; InfiniBand 8x50 GB/s", 50.0),
        ("RoCE 400 Gb/s per GPU; 3072-GPU pods", 50.0),
        ("800 Gbps inter-node, 150 GB/s intra-node", 12.5),
        ("800 Gbps inter-node, PCIe at 16 GB/s intra-node", 12.5),
        ("", 25.0),
    ],
)
def test_networks_are_read_in_every_spelling(text: str, per_gpu: float) -> None:
    run = read_row(row(interconnect=text))
    assert run.cluster.network_gb_s == pytest.approx(per_gpu)
    assert ("interconnect" in run.completed) == (not text)
    assert run.cluster.link_gb_s == (16 if "PCIe" in text else 300)  # 150 is NVLink's rate, counted in another way


def test_gaps_are_filled_by_rule_and_counted() -> None:
    gaps = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "recompute"), "")
    run = read_row(row(**gaps))
    assert run.job.model.num_parameters == pytest.approx(8e9, rel=0.02)
    assert {"layers", "hidden", "vocab", "recompute"} <= set(run.completed)
    assert run.job.model.vocab == 128256  # by the family's name


def test_the_feed_forward_layer_is_the_one_that_gives_the_published_count() -> None:
    assert read_row(row()).job.model.gated
    gpt = {"model_name": "GPT", "params_b": "22", "layers": "48", "hidden": "6144", "heads": "64", "kv_heads": "64"}
    run = read_row(row(**gpt, ffn_hidden="24576", vocab="51200", precision="fp16-mixed", year="2021"))
    assert not run.job.model.gated
    assert run.job.model.tied
    assert run.job.stack.attention == "unfused"  # fp16, before flash attention


def test_flops_are_turned_into_time_by_the_sources_own_convention() -> None:
    both = {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "150"}
    model = read_row(row(notes="Model FLOPs (Megatron appendix A formula)", **both))
    hardware = read_row(row(notes="hardware FLOPs 8*N*T", **both))
    assert model.seconds == pytest.approx(8192 * model.job.model.model_flops(8192) / 150e12)
    assert hardware.seconds == pytest.approx(8192 * 8 * model.job.model.num_parameters / 150e12)


def test_units_are_read_with_their_numbers() -> None:
    assert read_row(row(step_time_s="950 ms")).seconds == pytest.approx(0.95)
    assert read_row(row(step_time_s="1.2 s")).seconds == pytest.approx(1.2)
    for batch in ("512K tokens", "524288", "64"):
        assert read_row(row(global_batch=batch)).job.global_batch == 64
    assert read_row(row(memory_gb_per_gpu="40960 MiB")).memory_gb == pytest.approx(42.95, abs=0.01)
    assert read_row(row(memory_gb_per_gpu="40 GiB")).memory_gb == pytest.approx(42.95, abs=0.01)
    assert read_row(row(memory_gb_per_gpu="61000 MB")).memory_gb == pytest.approx(61)


def test_memory_is_compared_by_what_was_counted() -> None:
    assert read_row(row(memory_gb_per_gpu="40", notes="Mem = nvidia-smi max, GB")).memory_kind == "device"
    allocated = read_row(row(memory_gb_per_gpu="40", notes="max_memory_allocated, here GiB"))
    assert (allocated.memory_kind, allocated.memory_gb) == ("allocated", pytest.approx(42.95, abs=0.01))
    ran_out = read_row(row(memory_gb_per_gpu="OOM"))
    assert (ran_out.memory_gb, ran_out.out_of_memory) == (None, True)


def test_every_row_is_predicted_or_refused_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = write(
        tmp_path / "runs.csv",
        row(),
        row(id="a-2", recompute="full", tokens_per_s_per_gpu="2700", gpu="XPU9", interconnect="8x200 Gbps"),
        row(id="a-3", recompute="none", tokens_per_s_per_gpu="", memory_gb_per_gpu="OOM"),
        row(id="a-4", **dict.fromkeys(("model_name", "params_b", "layers", "hidden"), "")),
        row(id="b-1", source="b row 7", gpu="H100-80GB-SXM", tokens_per_s_per_gpu="5800"),
    )
    read = read_table(table)
    runs, refused = read.runs, read.refused
    assert [run.id for run in runs] == ["a-1", "a-2", "a-3", "b-1"]
    assert "no architecture's name" in refused["a-4"]
    assert main(["plan", "validate", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = found["summary"]
    assert (summary["rows"], summary["refused"]) == (5, 1)
    assert summary["step_time"]["rows"] == 3
    assert summary["step_time"]["median_ape"] < 0.2
    assert set(summary["per_source"]) == {"a", "b"}
    assert {"rows", "median_ape", "mape", "skill", "spearman", "coverage"} <= set(summary["step_time"])
    assert summary["memory"]["oom_rows"] == 1
    first = found["rows"][0]["step_time"]
    assert first["low"] < first["predicted"] < first["high"]
    assert first["measured"] == pytest.approx(64 * 8192 / (2973 * 64))
    assert len(found["rows"]) == 5
    assert summary["unknown_devices"] == {"XPU9 as H100-SXM-80GB": 1}
    assert main(["plan", "validate", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "5 rows" in printed
    assert "XPU9 as H100-SXM-80GB (1)" in printed


@pytest.mark.slow
def test_no_row_is_so_odd_that_it_ends_the_program() -> None:
    """Five hundred rows with cells that are blank or misprinted, or name unknown devices, models and words."""
    rng, predicted = random.Random(0), 0
    for _ in range(500):
        odd = row(model_name=rng.choice(["Mixtral-8x7B", "DeepSeek-V3", "GPT3-175B", "nobody-7B", "nobody", ""]))
        for column in rng.sample(COLUMNS[2:], rng.randint(1, 9)):
            odd[column] = rng.choice(DEVICES if column == "gpu" else ODD)
        for column in rng.sample(COLUMNS[2:], rng.choice([0, 0, 0, 3])):
            del odd[column]
        try:
            run = read_row(odd)
            (judged,) = judge([run])
        except ValueError:  # neither a size nor a name with a size
            continue
        predicted += 1
        assert all(made for _, _, made in cell_doubts(odd, run))
        for value in (judged.seconds, judged.memory_gb):
            assert 0 < value.low < value.value < value.high < float("inf")
    assert predicted > 450


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [
        ("Llama-2-70b-hf", 69.0, 0),
        ("meta-llama/Meta-Llama-3-8B", 8.0, 0),
        ("mixtral 8x7B", 46.7, 8),
        ("Qwen3-235B-A22B", 235, 128),
        ("deepseek-v3", 671, 256),
        ("falcon 40B", 41.3, 0),
        ("GPT2-7.5B", 7.5, 0),
        ("OurModel-13B", 13, 0),
    ],
)
def test_models_are_known_by_their_names(name: str, billions: float, experts: int) -> None:
    blank = dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), "")
    model = read_row(row(model_name=name, **blank)).job.model
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert max(block.num_experts for block in model.kinds) == experts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"name": FSDP.name, "fused": False, "attention": "flash"}),
        ({"notes": "Transformer Engine"}, {"name": FSDP.name, "fused": True, "attention": "hopper"}),
        ({"notes": "ALiBi+flash attn"}, {"attention": "flash-bias"}),
        ({"zero_stage_or_fsdp": "DeepSpeed ZeRO-3"}, {"name": EAGER.name, "reduce_bytes": 2}),
        ({"zero_stage_or_fsdp": "", "notes": "LoRA; Hugging Face"}, {"name": EAGER.name, "fused": False}),
        ({"zero_stage_or_fsdp": "ZeRO-3", "tp": "8"}, {"name": MEGATRON.name, "overlap_tensor": False}),
        ({"zero_stage_or_fsdp": "", "tp": "8", "precision": "fp8"}, {"gradient_bytes": 2, "overlap_tensor": True}),
        ({"zero_stage_or_fsdp": "", "tp": "8", "notes": "NeMo 25.04"}, {"gradient_bytes": 4, "overlap_tensor": True}),
        ({"precision": "fp16"}, {"name": LEGACY.name, "attention": "unfused", "fused": True}),
        ({"precision": "fp16", "notes": "with FlashAttention"}, {"name": LEGACY.name, "attention": "flash"}),
        ({"precision": "fp16", "notes": "without flash attention"}, {"attention": "unfused"}),
        ({"year": "2019"}, {"name": LEGACY.name, "fused": False, "gradient_bytes": 6}),
    ],
)
def test_programs_are_known_by_their_words(changes: dict[str, str], expected: dict[str, object]) -> None:
    stack = read_row(row(**changes)).job.stack
    assert {name: getattr(stack, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("notes", "field", "otherwise", "value"),
    [
        ("axolotl, cut cross entropy (logits not stored)", "logit_bytes", 10.0, 0.0),
        ("Hugging Face model; liger kernels", "hidden_bytes", 0.0, 8.0),
        ("Hugging Face model; 8-bit AdamW", "state_bytes", 12.0, 6.0),
        ("NeMo, CUDA graphs", "graphs", False, True),
        ("NeMo, no CUDA graphs", "graphs", False, False),
        ("NeMo; MLPerf llama2_70b_lora, NVIDIA/DGXB200", "graphs", False, True),
        ("NeMo; MLPerf llama2_70b_lora, AMD/MI300X_EPYC", "graphs", False, False),
        ("Hugging Face model; LoRA q,v r64", "adapts", "all", "attention"),
        ("ms-swift megatron; LoRA r8 all-linear", "adapts", "attention", "experts"),
        ("Megatron Core; all-to-all, unfused permutation", "expert_relay", True, False),
        ("Megatron Core; HybridEP, EP overlap", "overlap_experts", False, True),
        ("Megatron Core; HybridEP, no EP overlap", "overlap_experts", False, False),
        ("Megatron Core; forced balance", "balanced_experts", False, True),
    ],
)
def test_each_property_of_a_program_is_read_by_itself(notes: str, field: str, otherwise: object, value: object) -> None:
    given = {"zero_stage_or_fsdp": "", "n_experts": "8", "top_k": "2"}
    stacks = [read_row(row(notes=text, **given)).job.stack for text in (re.split(r"[,;]", notes)[0], notes)]
    assert [getattr(stack, field) for stack in stacks] == [otherwise, value]
    assert stacks[0].name == stacks[1].name, "of the same kind"


@pytest.mark.parametrize(
    ("notes", "parameters", "frozen_bytes"),
    [
        ("LoRA", 80e6, None),
        ("LoRA r8 all-linear", 20971520, None),
        ("LoRA q,v r64", 32 * 64 * (6 * 4096 + 2 * 1024), None),
        ("QLoRA r8 all-linear", 20971520, 0.516),
        ("LoRA r8 all-linear; base in int8", 20971520, 1.0),
        ("ln_tuning, trainable 175104", 175104, None),
    ],
)
def test_adapters_are_counted_by_their_rank(notes: str, parameters: float, frozen_bytes: float | None) -> None:
    job = read_row(row(notes=f"Hugging Face model; {notes}", zero_stage_or_fsdp="")).job
    assert job.adapters == pytest.approx(parameters, rel=0.01)
    assert job.frozen_bytes == (frozen_bytes and pytest.approx(frozen_bytes, rel=0.01))


def test_packed_documents_do_not_attend_to_one_another() -> None:
    read = read_row(row(notes="packing"))
    assert read.job.document == 1024
    assert "document" in read.completed
    assert read_row(row()).job.document is None


@pytest.mark.parametrize(
    ("gpu", "name", "memory_gb", "counted"),
    [
        ("V100-16GB-SXM2", "V100", 17, False),
        ("A100 SXM4 40 GB", "A100-SXM-40GB", 42, True),
        ("8xA100-48GB", "A100-SXM-80GB", 85, True),
        ("H100-96GB", "H100-96GB-HBM2e", 102, False),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB", 85, False),
        ("GB200 NVL72", "GB200", 197, False),
        ("Trillium", "H100-SXM-80GB", 85, True),
    ],
)
def test_devices_are_known_by_their_words(gpu: str, name: str, memory_gb: int, counted: bool) -> None:
    run = read_row(row(gpu=gpu))
    assert run.cluster.device.startswith(name)
    assert run.cluster.memory_gb == pytest.approx(memory_gb, abs=1)
    assert ("gpu" in run.completed) is counted


def test_a_pipeline_that_does_not_fit_is_not_sharded_further() -> None:
    huge = {"tp": "1", "pp": "8", "zero_stage_or_fsdp": "", "recompute": "", "micro_batch": "8", "seq_len": "16384"}
    run = read_row(row(**huge))
    assert (run.job.layout.zero_stage, run.job.recompute) == (1, "selective")
    assert read_row(row(**huge | {"pp": "1"})).job.layout.zero_stage == 3


@pytest.mark.slow
def test_what_is_published_is_predicted() -> None:
    """Floors of docs/plan-validation.md: the fitted table, and sources that no constant was fitted to."""
    table = read_table(BENCHMARKS / "published_runs.csv")
    runs, refused = table.runs, table.refused
    summary = report(judge(runs), refused)["summary"]
    assert summary["refused"] == 0
    assert summary["step_time"]["median_ape"] < 0.07
    assert summary["step_time"]["mape"] < 0.12
    assert summary["step_time"]["spearman"] > 0.75
    assert 0.75 < summary["step_time"]["coverage"] < 0.92
    assert summary["memory"]["median_ape"] < 0.045
    table = read_table(BENCHMARKS / "published_runs_fresh.csv")
    fresh, refused = table.runs, table.refused
    summary = report(judge(fresh), refused)["summary"]
    assert not refused
    assert {run.id for run in fresh} == set(json.loads((BENCHMARKS / "results/plan-fresh-first.json").read_text()))
    assert summary["step_time"]["median_ape"] < 0.14
    assert summary["memory"]["median_ape"] < 0.08
    table = read_table(BENCHMARKS / "published_runs_2026.csv")
    assert {run.id for run in table.runs} == set(json.loads((BENCHMARKS / "results/plan-2026-first.json").read_text()))
    assert not table.refused
    summary = report(judge(table.runs), table.refused)["summary"]
    assert summary["step_time"]["median_ape"] < 0.14
    assert summary["step_time"]["mape"] < 0.16
    assert summary["memory"]["median_ape"] < 0.12
    assert summary["memory"]["coverage"] > 0.75


def test_words_of_tables() -> None:
    numbers = {
        "4k": 4096,
        "1,024": 1024,
        "7B": 7,
        "38GB": 38,
        "~0.5": 0.5,
        "nan": None,
        "-3": None,
        "0": None,
        "1039,5": 1039.5,
        "0,125": 0.125,
    }
    assert {text: number_of(text) for text in numbers} == numbers
    stages = {"ZeRO-3": 3, "fsdp": 3, "stage 2": 2, "1": 1, "DDP": 0, "FULL_SHARD": 3, "distributed optimizer": 1}
    assert {text: zero_of(text) for text in stages} == stages
    assert [recompute_of(text) for text in ("", "?", "unknown", "not stated")] == [None] * 4
    policies = {"yes": "full", "none": "none", "False": "none", "selective-op": "full", "core-attn": "selective"}
    assert {text: (recompute_of(text) or ("",))[0] for text in policies} == policies


def test_a_table_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert main(["plan", "validate", str(tmp_path / "other.csv")]) == 2
    assert "it is not a table of published runs" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a;b\n1;2\n", "id,source,gpu,gpus\n"])
def test_a_file_without_rows_or_columns_is_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "none.csv").write_text(text)
    assert main(["plan", "validate", str(tmp_path / "none.csv")]) == 2
    assert re.search("it is not a table of published runs|has a header and no row", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("column", "value", "made"),
    [
        ("gpus", "eight", "no number above zero; 1 taken"),
        ("gpus_per_node", "0", "no number above zero; 8 taken"),
        ("tokens_per_s_per_gpu", "-5", "no number above zero; not compared"),
        ("tokens_per_s_per_gpu", "1039,5", "read as 1039.5: a decimal comma"),
        ("tokens_per_s_per_gpu", "2973000", "of the device's peak; compared as given"),
        ("step_time_s", "1", "of the device's peak"),
        ("tp", "7", "it does not divide 32 heads"),
        ("dp", "3", "64 data-parallel ranks make 64 devices; 64 taken"),
        ("pp", "128", "too few devices or layers for this many stages; 32 taken"),
        ("vpp", "1e30", "more or less than any run has"),
        ("global_batch", "524288", "too many for sequences, so read as tokens; 64 sequences taken"),
        ("micro_batch", "1 (DP=16)", "read as 1; the rest is passed over"),
        ("layers", "32.7", "no whole number; 32 taken"),
        ("params_b", "80", "the sizes make"),
        ("precision", "fp7", "no precision that is known; bf16 taken"),
        ("recompute", "some", "no policy that is known; full taken"),
        ("zero_stage_or_fsdp", "ZeRO-5", "no ZeRO stage, FSDP or DDP; ZeRO-"),
        ("offload", "perhaps", "none taken"),
        ("compile", "perhaps", "neither yes nor no; not compiled"),
        ("interconnect", "400", "no rate in it that is understood; 25 GB/s a device taken"),
        ("gpu", "XPU9", "no device of that name is known; H100-SXM-80GB taken"),
    ],
)
def test_a_cell_that_is_not_understood_is_named(column: str, value: str, made: str, tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "runs.csv", row(), row(**{"id": "odd", column: value})))
    assert len(table.runs) == 2
    assert all((doubt.line, doubt.id) == (3, "odd") for doubt in table.doubts)
    assert [
        doubt.made for doubt in table.doubts if (doubt.column, doubt.value) == (column, value) and made in doubt.made
    ]


def test_lines_that_do_not_follow_their_header_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Semicolons, an unused column, too many and too few cells, a repeated id, rows without a size."""
    path = tmp_path / "runs.csv"
    lines = [
        "id;Source;gpu;gpus;params_b;layer;tp",
        "a;s;H100;8;7;32;1",
        "a;s;H100;8;7;32;1;9",
        "b;s;H100;8;7",
        ";s;h100;8;;;",
    ]
    path.write_text("\n".join([*lines, ";s;h100;8;;;"]))
    table = read_table(path)
    assert (len(table.runs), list(table.refused)) == (3, ["line 5", "line 6"])
    assert [(doubt.line, doubt.made.partition(";")[0].partition(":")[0]) for doubt in table.doubts] == [
        (1, "a column that is not read"),
        (3, "an earlier row has the same"),
        (3, "cells beyond the header's"),
        (4, "cells missing at the end"),
        (5, "not predictable"),
        (6, "not predictable"),
    ]
    assert main(["plan", "validate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{path}:1: layer: a column that is not read; is layers meant?" in shown
    assert (
        f"{path}:5: not predictable: no size, no parameter count, and no architecture's name (and in 1 more row"
        in shown
    )
    path.write_bytes(path.read_text().encode("utf-16"))
    assert main(["plan", "validate", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells_not_understood"]) == 6


def test_many_odd_cells_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [row(id=f"r{n}", gpus="eight", notes="") for n in range(3)]
    odd = [row(id=f"o{n}", recompute=f"some{n}") for n in range(12)]
    assert main(["plan", "validate", str(write(tmp_path / "runs.csv", *rows, *odd))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-12].startswith("cells not understood, or contradicted by other cells (15)")
    assert shown[-11].endswith(":2: gpus=eight: no number above zero; 1 taken (and in 2 more rows)")
    assert shown[-1] == "  ... and 3 more kinds; --json has all"


def test_the_documented_table_is_read_as_documented(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = (BENCHMARKS.parent / "docs" / "plan.md").read_text()
    text, _, said = page.partition("$ cat runs.csv\n")[2].partition("$ meshwright plan validate runs.csv\n...\n")
    (tmp_path / "runs.csv").write_text(text)
    assert main(["plan", "validate", str(tmp_path / "runs.csv")]) == 0
    assert said.partition("\n```")[0] in capsys.readouterr().out.replace(f"{tmp_path}/", "")
    section = page.partition("## A table of runs")[2]
    assert not [column for column in COLUMNS_READ if f"`{column}`" not in section and column != "quality"]


def test_what_is_published_is_understood() -> None:
    """The shipped tables: few cells that others contradict, none that is not understood."""
    doubts = read_table(BENCHMARKS / "published_runs_fresh.csv").doubts
    stages = [("tg-011", "vpp"), ("lp-008", "vpp"), ("lp-010", "vpp")]  # 126 layers in 16 x 8 stages
    assert [(doubt.id, doubt.column) for doubt in doubts] == stages


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_repeats_of_a_layout_are_one_layout(tmp_path: Path) -> None:
    """Three times FSDP2 and once with recomputation: two layouts, no rank correlation, the median compared with the
    other."""
    speeds = {"a-1": "2900", "a-2": "3000", "a-3": "1000"}
    rows = [row(id=name, tokens_per_s_per_gpu=speed) for name, speed in speeds.items()]
    rows.append(row(id="a-4", recompute="full", tokens_per_s_per_gpu="3190"))
    judged = judge(read_table(write(tmp_path / "runs.csv", *rows)).runs)
    (sweep,) = regret(judged)
    assert (sweep["layouts"], sweep["chosen"]) == (2, "a-1")
    assert sweep["regret"] == pytest.approx(3190 / 2900 - 1)
    rows[-1]["gpu"] = "H200"  # another device's speed does not count for a layout
    assert not regret(judge(read_table(write(tmp_path / "runs.csv", *rows)).runs))
    assert sweep_correlation(judged, "step_time") is None

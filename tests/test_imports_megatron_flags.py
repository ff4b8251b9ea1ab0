"""Megatron-LM's scripts: what a shell would do with them, and what several flags say together. Exported programs that
were edited."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.engines.registry import ENGINES
from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3"
QUIET = "--hidden-dropout 0 --attention-dropout 0"


def imported(folder: Path, text: str, name: str = "s.sh") -> tuple[dict[str, Any], Reading]:
    """The recipe of a script, and the reading."""
    (folder / name).write_text(text)
    written, reading = import_files([folder / name])
    return yaml.safe_load(written), reading


def flags(folder: Path, more: str) -> tuple[dict[str, Any], Reading]:
    """The recipe of a small model with more flags."""
    return imported(folder, f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {QUIET} {more}\n")


def told(reading: Reading, key: str) -> str:
    """What the report says about a key without a counterpart; empty if nothing."""
    return "\n".join(why for origin, why in reading.without if key in origin)


@pytest.mark.parametrize(
    ("given", "precision", "low"),
    [
        ("--bf16 --fp8-format hybrid", "fp8", {"recipe": "delayed", "amax_history": 1}),
        (
            "--bf16 --fp8-format hybrid --fp8-amax-history-len 64 --fp8-amax-compute-algo max --fp8-margin 2",
            "fp8",
            {"recipe": "delayed", "amax_history": 64, "margin": 2},
        ),
        # The most recent of a long history is the newest.
        ("--bf16 --fp8-format hybrid --fp8-amax-history-len 64", "fp8", {"recipe": "delayed", "amax_history": 1}),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "fp8", {"recipe": "tensorwise"}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "fp8", {"recipe": "blockwise"}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", None),
        ("--bf16 --fp4-format e2m1", "nvfp4", None),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "fp8", {"recipe": "tensorwise", "compute": "fp32"}),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            "fp8",
            {"recipe": "tensorwise", "keep": ["layers.0", "layers.-2", "layers.-1"]},
        ),
    ],
)
def test_fp8_is_a_precision_with_its_recipe(tmp_path: Path, given: str, precision: str, low: dict[str, Any]) -> None:
    recipe, reading = flags(tmp_path, given)
    assert recipe["training"]["precision"] == precision
    assert recipe["training"].get("low_precision") == low
    assert not [origin for origin, _ in reading.without if "fp8" in origin or "bf16" in origin]


def test_what_fp8_cannot_say_is_named(tmp_path: Path) -> None:
    recipe, reading = flags(tmp_path, "--bf16 --fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather")
    assert recipe["training"]["low_precision"] == {"recipe": "blockwise"}
    assert "gradients of recipe blockwise are in e4m3" in told(reading, "fp8-format=hybrid")
    assert "weights stay in bf16" in told(reading, "fp8-param-gather")
    recipe, reading = flags(tmp_path, "--bf16 --fp8-format hybrid --fp8-recipe custom --fp8-margin 2")
    assert recipe["training"]["precision"] == "bf16"
    assert told(reading, "fp8-format=hybrid")
    assert told(reading, "fp8-recipe=custom")
    assert told(reading, "fp8-margin=2")
    _, reading = flags(tmp_path, "--bf16 --fp8-margin 2")
    assert "without --fp8-format" in told(reading, "fp8-margin=2")
    _, reading = flags(tmp_path, "--fp16 --fp8-format hybrid")
    assert "everything is in bf16" in told(reading, "fp16=True")


def test_a_run_in_samples_becomes_steps(tmp_path: Path) -> None:
    samples = "--train-samples 16005 --lr-warmup-samples 320 --lr-decay-samples 16000 --lr-decay-style WSD"
    recipe, reading = flags(tmp_path, f"{samples} --lr-wsd-decay-samples 1600 --lr-wsd-decay-style linear")
    assert recipe["training"]["steps"] == 1000
    assert recipe["training"]["lr_schedule"] == {"name": "wsd", "warmup": 20, "decay": 100, "final": 0.0}
    assert not told(reading, "samples")
    _, reading = flags(tmp_path, "--train-samples 16000 --lr-decay-samples 8000")
    assert "end at the last step" in told(reading, "lr-decay-samples=8000")


def test_samples_need_a_global_batch(tmp_path: Path) -> None:
    model = MODEL.replace("--global-batch-size 16", "--train-samples 1600 --lr-warmup-samples 160")
    recipe, _ = imported(tmp_path, f"torchrun --nproc_per_node 8 p.py {model}\n")
    assert recipe["training"]["steps"] == 200  # one micro batch of eight ranks
    assert recipe["training"]["lr_schedule"]["warmup"] == 20
    _, reading = imported(tmp_path, f"python p.py {model}\n")
    assert "divided by the global batch" in told(reading, "train-samples")
    assert "divided by the global batch" in told(reading, "lr-warmup-samples")
    with pytest.raises(UserError, match=r"s\.sh: train-samples=3: is less than one batch"):
        flags(tmp_path, "--train-samples 3")


def test_the_share_of_warm_up_is_of_the_decay(tmp_path: Path) -> None:
    recipe, _ = flags(tmp_path, "--train-iters 1000 --lr-decay-iters 500 --lr-warmup-fraction 0.1")
    assert recipe["training"]["lr_schedule"]["warmup"] == 50
    recipe, _ = flags(tmp_path, "--train-iters 1000 --lr-warmup-fraction 0.1")
    assert recipe["training"]["lr_schedule"]["warmup"] == 100


def test_flags_of_several_values_are_read_whole(tmp_path: Path) -> None:
    several = "--recompute-granularity selective --recompute-modules core_attn mlp --moe-router-load-balancing-type a b"
    recipe, reading = flags(tmp_path, f"{several} --bf16")
    assert recipe["training"]["recompute"] == "selective"
    assert recipe["training"]["precision"] == "bf16"
    assert told(reading, "recompute-modules=core_attn mlp")
    assert told(reading, "moe-router-load-balancing-type=a b")
    recipe, _ = flags(tmp_path, "--data-path 0.3 one 0.7 two\necho done")
    assert recipe["data"]["sources"] == [{"path": "one.bin", "weight": 0.3}, {"path": "two.bin", "weight": 0.7}]


@pytest.mark.parametrize(
    ("given", "expected", "named"),
    [
        ("full --recompute-method uniform --recompute-num-layers 1", "full", ""),
        ("full --recompute-method block --recompute-num-layers 2", {"full": 2}, ""),
        ("full --recompute-method uniform --recompute-num-layers 2", "full", "recompute-num-layers"),
        ("selective --recompute-method block", "selective", "recompute-method"),
        ("some", None, "recompute-granularity"),
    ],
)
def test_recomputed_layers(tmp_path: Path, given: str, expected: Any, named: str) -> None:
    recipe, reading = flags(tmp_path, f"--recompute-granularity {given}")
    assert recipe["training"].get("recompute") == expected
    assert [origin for origin, _ in reading.without if named in origin and "recompute" in origin] == [
        origin for origin, _ in reading.without if "recompute" in origin
    ]
    assert bool(named) == any("recompute" in origin for origin, _ in reading.without)


@pytest.mark.parametrize("word", ["$EXTRA", "${EXTRA}", '"$@"', "${MORE[@]}", "$(cat flags.txt)", "`cat flags.txt`"])
@pytest.mark.parametrize("before", ["--bf16 ", "--lr-decay-style cosine "])
def test_words_that_may_hold_flags_are_named(tmp_path: Path, word: str, before: str) -> None:
    recipe, reading = flags(tmp_path, f"{before}{word} --clip-grad 0.5")
    assert "flags that it holds are missing" in told(reading, word.strip('"'))
    assert recipe["training"]["clip"] == 0.5
    assert recipe["training"]["precision"] == ("bf16" if "bf16" in before else "fp32")


@pytest.mark.parametrize(
    ("lines", "use", "expected"),
    [
        ("", "${N:-2}", 2),
        ("N=3", "${N:-2}", 3),
        ("N=", "${N:-2}", 2),
        ("N=${N:-2}", "$N", 2),
        ("A=4", "${N:-$A}", 4),
        ("", "${N:-${M:-5}}", 5),
        (': "${N:=2}"', "$N", 2),
        ("A=2; B=3", "$((A * $B + 1))", 7),
        ("A=7", "$((${A} / 2))", 3),
        ("A=(2 3)", "$((2))", 2),
        ("export N=6", "$N", 6),
        ("local -r N=6", '"${N}"', 6),
    ],
)
def test_variables_have_the_values_that_a_shell_gives(tmp_path: Path, lines: str, use: str, expected: int) -> None:
    text = f"{lines}\ntorchrun p.py {MODEL.replace('--num-layers 2', f'--num-layers {use}')} {QUIET}\n"
    recipe, reading = imported(tmp_path, text)
    assert recipe["model"]["num_layers"] == expected
    assert not told(reading, "num-layers")


@pytest.mark.parametrize("use", ["$((A * 2))", "$((2 ** 99999999))", "${A%x}", "$1"])
def test_a_value_that_only_a_shell_knows_is_named(tmp_path: Path, use: str) -> None:
    _, reading = flags(tmp_path, f"--seed {use}")
    assert told(reading, "seed=") == "a shell variable that the file does not set"


def test_lists_of_arguments_are_used_as_in_a_shell(tmp_path: Path) -> None:
    script = (
        'ARGS=(--seed 3 "--clip-grad 0.5" # a comment\n)\nARGS+=(\n  --bf16\n)\nALL=("${ARGS[@]}" --weight-decay 0.2)\n'
    )
    recipe, _ = imported(tmp_path, f'{script}torchrun p.py {MODEL} --swiglu "${{ALL[@]}}" --adam-eps 1e-6\n')
    training = recipe["training"]
    assert (training["seed"], training["clip"], training["precision"]) == (3, 0.5, "bf16")
    assert training["optimizer"]["weight_decay"] == 0.2
    assert training["optimizer"]["eps"] == 1e-6
    assert recipe["model"]["family"] == "llama"


def test_branches_and_repeated_flags_are_told(tmp_path: Path) -> None:
    script = 'if [ "$1" = big ]; then L=8; else L=4; fi\nif [ -n "$D" ]; then MORE="--clip-grad 0.5"; fi\n'
    recipe, reading = imported(
        tmp_path, f"{script}torchrun p.py {MODEL.replace('rs 2', 'rs $L')} --seed 1 --seed 2 $MORE\n"
    )
    assert recipe["model"]["num_layers"] == 4
    assert "s.sh: L is 8 or 4, by a branch; 4 is taken" in reading.notes
    assert any("every branch of an if or a case is taken" in note and "--clip-grad" in note for note in reading.notes)
    assert recipe["training"]["seed"] == 2
    assert "gives it again: 2" in told(reading, "seed=1")


@pytest.mark.parametrize(
    "script",
    [
        f"srun bash -c 'torchrun p.py {MODEL} --bf16'\n",
        f'CMD="torchrun p.py {MODEL} --bf16"\neval "$CMD"\n',
        f"cat > run.sh <<EOF\n# don't\ntorchrun p.py {MODEL} --bf16\nEOF\n",
        f"cat > run.sh <<'EOF'\ntorchrun p.py {MODEL} \\\n --bf16 2>&1 | tee log\nEOF\nbash run.sh\n",
        f"torchrun p.py {MODEL} > log 2>&1 \\\n --bf16 && echo done\n",
        f"{MODEL}\n--bf16\n",
    ],
)
def test_commands_in_other_places_are_read(tmp_path: Path, script: str) -> None:
    recipe, _ = imported(tmp_path, script)
    assert recipe["model"]["num_layers"] == 2
    assert recipe["training"]["precision"] == "bf16"


def test_megatrons_defaults_are_set_or_told(tmp_path: Path) -> None:
    rope = "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --qk-layernorm"
    recipe, reading = flags(tmp_path, f"{rope} --adam-beta1 0.8 --eval-interval 10 --group-query-attention")
    model = recipe["model"]
    assert (model["family"], model["norm_eps"], model["rope_theta"], model["ffn"]) == ("qwen3", 1e-5, 10000, 128)
    assert model["num_kv_heads"] == 1
    assert recipe["training"]["optimizer"]["betas"] == [0.8, 0.999]
    assert recipe["training"]["evaluation"] == {"every": 10, "batches": 100}
    assert [note for note in reading.notes if not note.startswith("no file names data")] == []
    _, reading = imported(tmp_path, f"torchrun p.py {MODEL} --swiglu --num-query-groups 2 --lr-decay-style WSD\n")
    assert "without --group-query-attention" in told(reading, "num-query-groups=2")
    assert "always decays linearly" in told(reading, "no --lr-wsd-decay-style")
    for word in ("hidden-dropout", "attention-dropout", "normalization", "position-embedding-type"):
        assert any(f"no --{word}" in note for note in reading.notes), word


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.sh", MODEL.replace("layers 2", "layers two"), r"s\.sh: num-layers=two: model\.num_layers: 'two' is not"),
        (
            "s.sh",
            f"torchrun --nproc_per_node 8 {MODEL} --num-distributed-optimizer-instances 2 --context-parallel-size 0",
            r"s\.sh: context-parallel-size=0: must be a whole number",
        ),
        ("s.sh", f"{MODEL} --num-distributed-optimizer-instances x", r"s\.sh: num-distributed-optimizer-instances=x: "),
        ("s.sh", f"{MODEL} --use-rope-scaling --rope-scaling-factor x", r"s\.sh: rope-scaling-factor=x: must be a num"),
        ("s.sh", f"{MODEL} --adam-eps 0", r"s\.sh: adam-eps=0: training\.optimizer\.eps: 0 is not allowed"),
        (
            "s.sh",
            f"{MODEL} --fp8-format hybrid --fp8-margin x",
            r"s\.sh: fp8-margin=x: training\.low_precision\.margin",
        ),
        ("d.json", '{"train_batch_size": 8, "gradient_clipping": "x"}', r"d\.json: gradient_clipping=x: "),
        ("s.sh", f"{MODEL} --adam-beta1 1.5", r"s\.sh: adam-beta1=1\.5; .*training\.optimizer\.betas"),
        ("s.sh", f"{MODEL} --train-samples some", r"s\.sh: train-samples=some: must be a number"),
        ("s.sh", f"A='x\n{MODEL}", r"s\.sh: .*no closing quotation or bracket for the ' in or after line 1"),
        ("s.sh", f"A=(x\n{MODEL}", r"s\.sh: .*no closing bracket of a list"),
        ("s.sh", f"{MODEL} --seed {'${A:-' * 50}{'}' * 50}", r"s\.sh: a variable's default is nested too deeply"),
    ],
)
def test_an_error_cites_the_file_and_the_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(f"{text}\n")
    with pytest.raises(UserError) as found:
        import_files([tmp_path / name], model=None if name == "s.sh" else "gpt2")
    assert re.match(message, str(found.value)), found.value
    assert "imported recipe" not in str(found.value)


@pytest.mark.parametrize(
    "bad", ["$()" * 20000 + "x", "`" * 30001, "$(" * 30000, '"' * 30001, "${A:+" * 30000, "<<A " * 9999]
)
@pytest.mark.slow
def test_hostile_scripts_end_at_once(tmp_path: Path, bad: str) -> None:
    (tmp_path / "s.sh").write_text(f"python p.py {MODEL} --swiglu {bad}\n")
    with contextlib.suppress(UserError):  # never a stack trace, nor minutes
        import_files([tmp_path / "s.sh"])


def test_lists_in_quoted_commands_keep_their_spaces(tmp_path: Path) -> None:
    script = f'ARGS=({MODEL}\n --seed 5 "--split \'99,1,0\'")\nif x; then ARGS=("${{ARGS[@]}}" --bf16); fi\n'
    run = 'CMD="cd x;\n python p.py ${ARGS[@]}"\nsbatch <<EOF\nsrun bash -c "${CMD}"\nEOF\n'
    recipe, reading = imported(tmp_path, script + run)
    assert (recipe["model"]["num_layers"], recipe["training"]["seed"], recipe["data"]["held_out"]) == (2, 5, 0.01)
    assert recipe["training"]["precision"] == "bf16"
    assert [note for note in reading.notes if "branch" in note] == [
        "s.sh: every branch of an if or a case is taken; they give --bf16"
    ]


def test_a_flag_without_its_value_is_named(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, f"DATA=<path to data>\npython p.py {MODEL} --data-path $DATA --seed --bf16\n")
    assert told(reading, "data-path") == told(reading, "seed") == "the file gives it no value"
    assert "data" not in recipe
    assert (recipe["training"]["seed"], recipe["training"]["precision"]) == (1234, "bf16")


def test_printed_flags_are_text(tmp_path: Path) -> None:
    usage = 'echo "Don\'t use --seed 7 (see below"\nARGS="--clip-grad 0.5"\necho $ARGS\n'
    recipe, reading = imported(tmp_path, f"{usage}python p.py {MODEL}\nlog 'it isn\"t --seed 8'\n")
    assert recipe["training"]["seed"] == 1234
    assert recipe["training"]["clip"] == 0.5  # of a variable that is only printed here
    assert "s.sh: flags that it only prints are not read: --seed" in reading.notes
    assert any("not a command, so not read" in note and "--seed 8" in note for note in reading.notes)


def test_what_a_family_lacks_is_named(tmp_path: Path) -> None:
    _, reading = flags(tmp_path, "--swiglu --num-experts 4 --moe-aux-loss-coeff 0.1 --qk-layernorm --add-qkv-bias")
    assert "mixtral has none" in told(reading, "qk-layernorm")
    assert "mixtral has none" in told(reading, "add-qkv-bias")
    _, reading = flags(tmp_path, "--qk-layernorm --normalization RMSNorm")
    assert "gpt2 has none" in told(reading, "qk-layernorm")
    assert "gpt2 has LayerNorm" in told(reading, "normalization")
    _, reading = imported(tmp_path, "python pretrain_mamba.py --hidden-size 64 --num-attention-heads 4\n")
    assert "another model than GPT" in told(reading, "pretrain_mamba.py")
    assert told(reading, "no --num-layers") == "Megatron has no default; set model.num_layers"


def test_a_script_without_flags_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("while true; do x; done\n")
    with pytest.raises(UserError, match=r"s\.sh: has neither Megatron-LM's flags"):
        import_files([tmp_path / "s.sh"])


def test_a_distributed_optimizer_of_one_replica_shards_nothing(tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 1"
    recipe, _ = flags(tmp_path, f"{layout} --use-distributed-optimizer")
    assert recipe["layout"] == {"tp": 4, "pp": 2, "cp": 1}


RECIPE = "model: {family: gpt2, vocab: 256, hidden: 32, num_layers: 2, num_heads: 2, max_positions: 64}\n"
RECIPE += "data: {sequence_length: 32}\ndevice: cpu\ntraining: {steps: 40, global_batch_tokens: 256, seed: 3}\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that was exported."""
    run = resolve_run(parse_spec(RECIPE, Run), base_dir=tmp_path_factory.mktemp("run"))
    return ENGINES["bare"].translate(run).files["run_bare_standalone.py"]


def edited(program: str, before: str, after: str) -> str:
    assert program.count(before) == 1, before
    return program.replace(before, after)


@pytest.mark.parametrize("change", [str, lambda text: text.replace("\n", "\r\n"), lambda text: f"{text}\n\n"])
def test_a_program_that_nobody_edited_is_its_recipe(tmp_path: Path, program: str, change: Any) -> None:
    recipe, reading = imported(tmp_path, change(program), "p.py")
    assert recipe == yaml.safe_load(RECIPE)
    assert not reading.notes
    assert not reading.without


@pytest.mark.parametrize(
    ("before", "after", "path", "value"),
    [
        ("(0.9, 0.95)", "(0.8, 0.95)", "optimizer.betas", [0.8, 0.95]),
        ("1e-08", "1e-06", "optimizer.eps", 1e-6),
        ("1e-08, 0.1", "1e-08, 0.3", "optimizer.weight_decay", 0.3),
        ("CLIP = 1.0", "CLIP = math.inf", "clip", None),
        ("LENGTH = 40,", "LENGTH = 50,", "steps", 50),
        ("CLIP = 1.0", "CLIP = 1.0\nCLIP = 0.5", "clip", 0.5),
    ],
)
def test_an_edited_constant_is_imported_and_told(
    tmp_path: Path, program: str, before: str, after: str, path: str, value: Any
) -> None:
    recipe, reading = imported(tmp_path, edited(program, before, after), "p.py")
    found: Any = recipe["training"]
    for part in path.split("."):
        found = found[part]
    assert found == value
    assert any("the program was edited; its recipe has" in note for note in reading.notes)
    assert not reading.without


@pytest.mark.parametrize(
    ("batch", "before", "after", "expected"),
    [
        ("global_batch_tokens: 256", "40, 8, 8, 32", "40, 16, 8, 32", {"global_batch": 16, "micro_batch": 8}),
        ("global_batch_tokens: 256", "40, 8, 8, 32", "40, 8, 8, 16", {"global_batch": 8, "micro_batch": 8}),
        ("micro_batch: 2", "40, 64, 2, 32", "40, 64, 2, 32", {"global_batch": 64, "micro_batch": 2}),
        ("micro_batch: 2, global_batch_tokens: 256", "", "", {"global_batch_tokens": 256, "micro_batch": 2}),
    ],
)
def test_the_batch_is_the_programs(
    tmp_path: Path, batch: str, before: str, after: str, expected: dict[str, int]
) -> None:
    run = resolve_run(parse_spec(RECIPE.replace("global_batch_tokens: 256", batch), Run), base_dir=tmp_path)
    text = ENGINES["bare"].translate(run).files["run_bare_standalone.py"]
    recipe, _ = imported(tmp_path, edited(text, before, after) if before else text, "p.py")
    keys = ("global_batch", "global_batch_tokens", "micro_batch")
    assert {key: value for key, value in recipe["training"].items() if key in keys} == expected


def test_other_edits_are_named_with_their_lines(tmp_path: Path, program: str) -> None:
    text = edited(program, "step / 4", "step / 5")
    text = edited(text, "torch.manual_seed(3)", "torch.manual_seed(7)")
    text = edited(text, "        optimizer.zero_grad(set_to_none=True)\n", "")
    text = edited(text, "import math\n", "import math\n# a comment\n\nimport random\n")
    recipe, reading = imported(tmp_path, f"{text}print('more')\n", "p.py")
    lines = text.split("\n")
    assert recipe == yaml.safe_load(RECIPE)
    named = [origin for origin, why in reading.without if why == "edited by hand, not imported"]
    removed = next(number for number, line in enumerate(lines, 1) if "log.step(" in line)
    assert named == [
        f"p.py:{lines.index('import random') + 1}: import random",
        f"p.py:{lines.index('        return step / 5') + 1}: return step / 5",
        f"p.py:{lines.index('    torch.manual_seed(7)') + 1}: torch.manual_seed(7)",
        f"p.py:{removed}: lines before this one were removed",
        f"p.py:{len(lines)}: print('more')",
    ]


def test_a_program_that_differs_everywhere_says_so_once(tmp_path: Path, program: str) -> None:
    text = re.sub(r"^(    .*)$", r"\1  # mine", program, flags=re.MULTILINE)
    _, reading = imported(tmp_path, text, "p.py")
    assert len(reading.without) == 1
    assert re.match(r"p\.py:\d+$", reading.without[0][0])
    assert re.match(r"\d\d\d? places from here on were edited by hand", reading.without[0][1])


def test_a_program_without_a_record_says_that_edits_are_unseen(tmp_path: Path, program: str) -> None:
    start = program.index("# Its lines as they were written")
    text = program[:start] + program[program.index("# The recipe of this program") :]
    recipe, reading = imported(tmp_path, edited(text, "1e-08", "1e-06"), "p.py")
    assert recipe["training"]["optimizer"]["eps"] == 1e-6
    assert any("EPS=1e-06" in note for note in reading.notes)
    assert any("has no record of its lines" in note for note in reading.notes)


def test_an_edited_recipe_or_a_lost_constant_is_told(tmp_path: Path, program: str) -> None:
    recipe, reading = imported(tmp_path, edited(program, "#     steps: 40", "#     steps: 60"), "p.py")
    assert recipe["training"]["steps"] == 40
    assert any("the recipe at its end was edited; its recipe has 60" in note for note in reading.notes)
    _, reading = imported(tmp_path, edited(program, "CLIP = 1.0\n", "CLIP: float = 2.0\n"), "p.py")
    assert told(reading, "p.py: CLIP").endswith("its recipe's value is taken")
    assert told(reading, "CLIP: float = 2.0") == "edited by hand, not imported"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("STEPS, GLOBAL_BATCH", "STEPS GLOBAL_BATCH", r"p\.py: cannot be read as Python"),
        ("CLIP = 1.0", "CLIP = float(x)", r"p\.py:\d+: CLIP is not a number"),
        ("CLIP = 1.0", "CLIP = 'x'", r"p\.py: CLIP=x: training\.clip: 'x' is not allowed"),
        ("# The recipe of this program", "# A recipe", r"p\.py: contains no recipe"),
        (
            "finds edited ones:\n",
            "finds edited ones:\n#   zz\n",
            r"p\.py: the record of the program's lines is damaged",
        ),
        ("#   training:", "#   training: 5\n#   more:", r"p\.py: training: sets a section that has settings"),
    ],
)
def test_a_broken_program_is_one_error(tmp_path: Path, program: str, before: str, after: str, message: str) -> None:
    (tmp_path / "p.py").write_text(edited(program, before, after))
    with pytest.raises(UserError) as found:
        import_files([tmp_path / "p.py"])
    assert re.search(message, str(found.value)), found.value


@pytest.mark.parametrize(
    ("given", "sources", "named"),
    [
        ("a b c", ["a.bin", "b.bin", "c.bin"], []),
        ("a b", ["a.bin", "b.bin"], []),
        ("0.3 a 0.7 b", [{"path": "a.bin", "weight": 0.3}, {"path": "b.bin", "weight": 0.7}], []),
        ("a $EXTRA", ["a.bin"], ["$EXTRA"]),
        ("0.3 a 0.7 $B", [{"path": "a.bin", "weight": 0.3}], ["$B"]),
        ("$FIRST 0.7 b ${MORE}", [{"path": "b.bin", "weight": 0.7}], ["$FIRST", "${MORE}"]),
        ("$EVERYTHING", None, ["$EVERYTHING"]),
    ],
)
def test_token_files_that_the_script_knows_are_imported(
    tmp_path: Path, given: str, sources: list[Any] | None, named: list[str]
) -> None:
    recipe, reading = flags(tmp_path, f"--data-path {given}")
    found = recipe.get("data", {}).get("sources")
    plain = [
        source["path"] if isinstance(source, dict) and len(source) == 1 else source for source in found or []
    ] or None
    assert plain == sources
    assert [word for word in named if told(reading, f": {word}")] == named


def test_a_weight_before_only_some_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a weight before every path"):
        flags(tmp_path, "--data-path 0.3 a b c")

"""Reading recipes: valid ones are accepted; for all others, one line says what is wrong, where, and what works."""

import random
import re
from pathlib import Path

import pytest
import yaml

import meshwright
from meshwright.spec import document
from meshwright.spec.document import Origin, dotted, read_yaml, write_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields
from meshwright.spec.problems import RecipeError, _all_paths
from meshwright.spec.recipe import dump_recipe, load_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.spec.schedule import SCHEDULES
from meshwright.spec.synonyms import SYNONYMS, plain
from meshwright.storage import opening

PRESETS = sorted((Path(meshwright.__file__).parent / "recipes").glob("*.yaml"))

RECIPE = """\
# A comment.
model: gpt2
training:
  steps: 200
  optimizer: {name: adamw, lr: 1e-4}
data:
  sources: [{path: "a/*.txt"}, {path: b.jsonl, text_key: body}]
"""


def parse(text, *overrides):
    return parse_spec(text, Run, overrides, source="run.yaml")


def problems(text, *overrides):
    with pytest.raises(RecipeError) as caught:
        parse(text, *overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert not any("\n" in problem for problem in caught.value.problems)
    return caught.value.problems


def test_a_recipe_is_read_and_what_is_not_given_takes_its_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    run = load_recipe(path)
    assert run.model == ModelFields(name="gpt2")
    assert run.training.steps == 200
    assert run.training.optimizer.lr == 1e-4
    assert run.training.clip == 1.0
    assert [source.path for source in run.data.sources] == ["a/*.txt", "b.jsonl"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E6", 1e6),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("12", 12),
        ("+12", 12),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("'5'", "5"),
        ('"1e-4"', "1e-4"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    document = read_yaml(f"key: {text}", lambda line: Origin(line, str(line)))
    assert not document.problems
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)


BAD_TEXT = {
    "empty": ("", "run.yaml:1: empty; a recipe is lines of 'key: value', 'model: NAME' at the least"),
    "only comments": ("# nothing\n", "run.yaml:1: empty"),
    "a list": ("- model\n- data\n", "run.yaml:1: not a recipe"),
    "a word": ("gpt2", "run.yaml:1: not a recipe"),
    "duplicate key": ("model: gpt2\nmodel: llama\n", "run.yaml:2: model: given twice, first at run.yaml:1"),
    "duplicate key inside": (
        "model: gpt2\ntraining:\n  steps: 300\n  seed: 1\n  steps: 400\n",
        "run.yaml:5: training.steps: given twice, first at run.yaml:3",
    ),
    "python tag": (
        "model: !!python/object/apply:os.system [ls]",
        "run.yaml:1: the tag '!!python/object/apply:os.system'",
    ),
    "own tag": ("model: gpt2\ndata: !include x.yaml", "run.yaml:2: the tag '!include' is not allowed"),
    "alias": (
        "model: gpt2\nlayout: *d",
        "run.yaml:2: '*d' is an alias in YAML; write the value out",
    ),
    "unquoted glob": (
        "model: gpt2\nrun_dir: *.txt",
        "run.yaml:2: a value that starts with '*' or '&' needs quotes",
    ),
    "merge key": ("model: gpt2\n<<: {seed: 1}", "run.yaml:2: merge keys ('<<') are not supported"),
    "tab": ("model: gpt2\ntraining:\n\tsteps: 1", "run.yaml:3: YAML needs spaces here, not a tab"),
    "colon in value": ("model: gpt2: small", "run.yaml:1: ':' is not expected here"),
    "no space after colon": ("model: gpt2\nseed:1\nlayout: {}", "run.yaml:2: this line is not 'key: value'"),
    "open bracket": (
        "model: gpt2\ntrackers: [wandb\n",
        "run.yaml:2: the bracket that starts here is never closed",
    ),
    "open quote": ("model: 'gpt2\nseed: 1\n", "run.yaml:1: the quote that starts here is never closed"),
    "indentation": (
        "model: gpt2\ntraining:\n    steps: 1\n  seed: 1\n",
        "run.yaml:4: the indentation does not match",
    ),
    "reserved character": ("model: @gpt2", "run.yaml:1: a value cannot start with '@'"),
    "control character": (
        "model: gpt2\nrun_dir: a\x01b",
        "run.yaml:2: character U+0001 is not allowed in a YAML file",
    ),
    "two documents": ("model: gpt2\n---\nmodel: llama", "run.yaml:2: a second document ('---') starts here"),
    "a list as key": ("model: gpt2\n? [a]\n: b", "run.yaml:2: a key is a single word"),
    "endless nesting": ("[" * 600 + "]" * 600, "run.yaml:1: nested too deeply"),
}


@pytest.mark.parametrize(("text", "message"), BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_text_that_is_no_recipe_is_refused_with_its_line(text, message):
    assert problems(text)[0].startswith(message)


BAD_VALUES = {
    "unknown section": ("modle: gpt2", "run.yaml:2: modle: unknown key; did you mean 'model'?"),
    "unknown key": (
        "training: {optimzer: 1}",
        "run.yaml:2: training.optimzer: unknown key; did you mean 'optimizer'?",
    ),
    "known elsewhere": (
        "training: {lr: 1}",
        "run.yaml:2: training.lr: unknown key; did you mean 'training.optimizer.lr'?",
    ),
    "what others call it": (
        "layout: {zero_stage: 3}",
        "run.yaml:2: layout.zero_stage: unknown key; did you mean 'zero'?",
    ),
    "what others call it, elsewhere": (
        "training: {learning-rate: 1}",
        "run.yaml:2: training.learning-rate: unknown key; did you mean 'training.optimizer.lr'?",
    ),
    "what others call a value": (
        "training: {precision: bfloat16}",
        "run.yaml:2: training.precision: 'bfloat16' is not allowed: must be 'fp32', 'bf16', 'fp16', "
        "'fp64', 'fp8', 'mxfp8' or 'nvfp4'; did you "
        "mean 'bf16'?",
    ),
    "a choice for the whole section": (
        "training: {lr_schedule: Cosine}",
        "run.yaml:2: training.lr_schedule: 'Cosine' is not allowed: must be a section (lines of 'key: value'); did you "
        "mean training.lr_schedule.name=cosine?",
    ),
    "no method": (
        "finetune: {rank: 8}",
        "run.yaml:2: finetune: method is required, but not given; there are full, lora, qlora, ia3",
    ),
    "an unknown method": (
        "finetune: {method: qlorra}",
        "run.yaml:2: finetune: method: 'qlorra' is not allowed; there are full, lora, qlora, ia3; did you mean 'ql",
    ),
    "a word for null": (
        "training: {clip: off}",
        "run.yaml:2: training.clip: 'off' is not allowed: must be a number; write null",
    ),
    "a list of one": (
        "trackers: wandb",
        "run.yaml:2: trackers: 'wandb' is not allowed: must be a list, such as [a, b]; write [wandb]",
    ),
    "an impossible beta": (
        "training: {optimizer: {betas: [0.9, 1.5]}}",
        "run.yaml:2: training.optimizer.betas.1: 1.5 is not allowed: must be less than 1",
    ),
    "unknown and nothing near": (
        "checkpoint: {interval: 1}",
        "run.yaml:2: checkpoint.interval: unknown key; there are every, asynchronous, keep_last, keep_every, keep_best",
    ),
    "too small": (
        "training: {steps: -5}",
        "run.yaml:2: training.steps: -5 is not allowed: must be at least 1",
    ),
    "not positive": (
        "training: {clip: 0}",
        "run.yaml:2: training.clip: 0 is not allowed: must be greater than 0",
    ),
    "layers below 0": (
        "training: {recompute: {full: [1, -2]}}",
        "run.yaml:2: training.recompute.full.1: -2 is not allowed: must be at least 0",
    ),
    "too large": ("data: {held_out: 1}", "run.yaml:2: data.held_out: 1 is not allowed: must be less than 1"),
    "quoted number": (
        "training: {steps: '5'}",
        "run.yaml:2: training.steps: '5' is not allowed: must be a whole number; remove the quotes",
    ),
    "number with a point": (
        "training: {steps: 1e3}",
        "run.yaml:2: training.steps: 1000.0 is not allowed: must be a whole number; write 1000",
    ),
    "text for a number": (
        "training: {clip: no}",
        "run.yaml:2: training.clip: 'no' is not allowed: must be a number",
    ),
    "infinity": (
        "training: {optimizer: {lr: .inf}}",
        "run.yaml:2: training.optimizer.lr: '.inf' is not allowed: must be a number",
    ),
    "number for text": (
        "run_dir: 5",
        "run.yaml:2: run_dir: 5 is not allowed: must be text; put it in quotes",
    ),
    "yes for true": (
        "training: {compile: yes}",
        "run.yaml:2: training.compile: 'yes' is not allowed: must be true or false",
    ),
    "one for true": (
        "training: {compile: 1}",
        "run.yaml:2: training.compile: 1 is not allowed: must be true or false",
    ),
    "not a choice": (
        "training: {optimizer: {name: adam}}",
        "run.yaml:2: training.optimizer.name: 'adam' is not allowed: must be 'adamw', 'adamw_8bit', 'paged_adamw' or",
    ),
    "gpu is not cpu": (
        "device: gpu",
        "run.yaml:2: device: 'gpu' is not allowed: must be 'auto', 'cpu', 'cuda', 'cuda_shared', 'xpu' or",
    ),
    "neither of two kinds": (
        "training: {micro_batch: big}",
        "run.yaml:2: training.micro_batch: 'big' is not allowed: must be a whole number or 'auto'",
    ),
    "empty value": (
        "training:\n  steps:",
        "run.yaml:3: training.steps: an empty value is not allowed: must be a whole number",
    ),
    "value for a section": (
        "checkpoint: 500",
        "run.yaml:2: checkpoint: 500 is not allowed: must be a section (lines of 'key: value')",
    ),
    "list too short": (
        "training: {optimizer: {betas: [0.9]}}",
        "run.yaml:2: training.optimizer.betas: [0.9] has too few values",
    ),
    "list too long": (
        "training: {optimizer: {betas: [0.9, 0.9, 0.9]}}",
        "run.yaml:2: training.optimizer.betas: [0.9, 0.9, 0.9] is not allowed: must be a list of at most 2",
    ),
    "empty list": (
        "data: {sources: []}",
        "run.yaml:2: data.sources: [] is not allowed: must be a list of at least 1",
    ),
    "missing in a list": (
        "data:\n  sources:\n    - path: a\n    - text_key: b",
        "run.yaml:5: data.sources.1.path: required, but not given",
    ),
    "wrong in a list": (
        "data:\n  sources:\n    - path: a\n    - path: 5",
        "run.yaml:5: data.sources.1.path: 5 is not allowed: must be text; put it in quotes",
    ),
    "two ways to say one thing": (
        "training:\n  global_batch: 8\n  global_batch_tokens: 8192",
        "run.yaml:2: training: global_batch and global_batch_tokens both set the batch size",
    ),
    "longer than the run": (
        "seed_of_nothing: 1\ntraining: {steps: 10, lr_schedule: {warmup: 11}}",
        "run.yaml:3: training: lr_schedule.warmup=11 exceeds steps=10; warmup=auto is",
    ),
    "a degree that does not divide": (
        "layout: {ep: 2}",
        "run.yaml:2: layout: ep=2 does not divide dp_shard x cp x tp = 1, the ranks that share the experts; "
        "the nearest legal layout is ep=1, or with ep=2 dp_shard=2",
    ),
    "nothing to shard over": ("layout: {zero: 3}", "run.yaml:2: layout: zero=3 with dp_shard=1"),
    "true for a stage": (
        "layout: {zero: true}",
        "run.yaml:2: layout.zero: true is not allowed: must be 'auto', 0, 1, 2 or 3",
    ),
    "unknown tracker": ("trackers: [mlflow]", "run.yaml:2: trackers: unknown tracker 'mlflow'"),
}


@pytest.mark.parametrize(("text", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_wrong_value_is_refused_with_its_line_and_what_would_work(text, message):
    found = [problem for problem in problems("model: gpt2\n" + text) if problem.startswith(message)]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("layout: {pp: 2, schedule: GPipe}", "afab"),
        ("layout: {pp: 2, schedule: Interleaved_1F1B}", "interleaved-1f1b"),
        ("layout: {pp: 2, schedule: 1F1B}", "1f1b"),
        ("layout: fsdp", "layout.dp_shard"),
        ("finetune: lora", "finetune.method=lora"),
        ("training: {precision: bf16-mixed}", "bf16"),
    ],
)
def test_what_others_call_it_is_understood(text, hint):
    (problem,) = problems("model: gpt2\n" + text)
    assert problem.replace("'", "").endswith(f"; did you mean {hint}?")


def test_every_synonym_means_a_setting_or_a_value():
    paths = [f".{dotted(path)}" for path in _all_paths(Run)]
    values = {plain(name) for name in SCHEDULES} | {"fp32", "fp16", "bf16", "fp64"}
    for theirs, ours in SYNONYMS.items():
        assert theirs == plain(theirs)
        assert not any(path.endswith(f".{theirs}") for path in paths), f"{theirs} is a setting's own name"
        assert ours in values or any(path.endswith(f".{ours}") for path in paths), ours


def test_every_problem_is_reported_at_once_in_the_order_of_the_file():
    found = problems("training:\n  steps: 0\n  seed: x\nsteps: 1\nsteps: 2\ndevice: tpu\n", "layout.zero=7", "seed")
    places = [problem.split(": ")[0] for problem in found]
    assert places == [f"run.yaml:{line}" for line in (1, 2, 3, 4, 5, 6)] + ["command line"] * 2
    assert found[0] == "run.yaml:1: model: required, but not given"


def test_a_file_that_is_not_text_names_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: gpt2\nrun_dir: \xff\xfe\n")
    with pytest.raises(RecipeError, match=r"run.yaml:2: not UTF-8 text"):
        load_recipe(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: gpt2\r\nrun_dir: x\r\n")
    assert load_recipe(path).run_dir == "x"


def test_overrides_make_another_run():
    run = parse(
        RECIPE,
        "training.steps=500",
        "training.optimizer.lr=3e-3",
        "training.lr_schedule={name: linear, warmup: 5}",
        "trackers=[wandb]",
        "data.sources.1.path=*.txt",
        "run_dir=runs/a: b",
        "checkpoint.every=50",
        "training.steps=600",
    )
    assert run.training.steps == 600
    assert run.training.optimizer.lr == 3e-3
    assert run.training.lr_schedule.name == "linear"
    assert run.trackers == ("wandb",)
    assert run.data.sources[1].path == "*.txt"
    assert run.data.sources[1].text_key == "body"
    assert run.run_dir == "runs/a: b"
    assert run.checkpoint.every == 50


def test_an_override_changes_one_size_of_a_named_model():
    assert parse(RECIPE, "model.num_layers=2").model == ModelFields(name="gpt2", num_layers=2)
    assert parse(RECIPE, "model=llama-3.2-1b", "model.ffn=64").model == ModelFields(name="llama-3.2-1b", ffn=64)


def test_an_override_turns_none_into_a_section():
    text = "model: gpt2\nlayout: {offload: none}\ntraining: {recompute: none}\n"
    run = parse(text, "layout.offload.optimizer=disk", "training.recompute.full=2")
    assert run.layout.tiers.optimizer == "disk"
    assert run.training.recompute.full == 2


def test_an_override_fills_a_section_left_empty():
    assert parse("model: gpt2\ntraining:\n", "training.seed=3").training.seed == 3


BAD_OVERRIDES = {
    "training.step=5": "unknown key; did you mean 'steps'?",
    "training.steps=0": "0 is not allowed: must be at least 1",
    "training.steps": "an override is written key=value, for example training.steps=100",
    "=5": "an override is written key=value, for example training.steps=100",
    "training..steps=5": "an override is written key=value, for example training.steps=100",
    "training.steps.x=5": "training.steps: it is 200, not a section, so it has no setting x",
    "training.optimizer={lr: 1, nam: x}": "training.optimizer.nam: unknown key; did you mean 'name'?",
    "training.optimizer.betas=[0.9,": "the bracket that starts here is never closed",
    "training.optimizer.betas.0=0.8": "training.optimizer.betas: the recipe has no list here; set the whole list",
    "data.sources.2.path=x": "data.sources: the recipe's list has 2 items, counted from 0",
    "training.lr_schedule.warmup=-1": "-1 is not allowed: must be at least 0 or 'auto'",
    "training=": "an empty value is not allowed: must be a section",
}


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES.items(), ids=BAD_OVERRIDES.keys())
def test_a_wrong_override_is_named_as_it_was_typed(override, message):
    (problem,) = problems(RECIPE, override)
    assert problem.startswith(f"command line: {override}: {message}")


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.num_layers=2", "run_dir='5'", "trackers=[wandb, tensorboard]"),
        ("training.optimizer.eps=1e-12", "training.micro_batch=4", "training.clip=null", "run_dir='on'"),
        ("run_dir='1e-4'", "data.sources=stdlib", "layout={dp_shard: 2, zero: 1}"),
    ],
)
def test_a_dumped_recipe_loads_back_to_an_equal_run(overrides, expanded):
    run = parse(RECIPE, *overrides)
    text = dump_recipe(run, expanded=expanded)
    assert parse(text) == run
    assert ("keep_last" in text) == expanded


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("path", PRESETS, ids=[path.stem for path in PRESETS])
@pytest.mark.every(1)
def test_every_preset_survives_being_written_and_read(path, expanded):
    run = load_recipe(path)
    assert parse(dump_recipe(run, expanded=expanded)) == run


@pytest.mark.slow
def test_whatever_is_mutilated_is_a_recipe_or_a_list_of_lines():
    rng = random.Random(0)
    texts = [path.read_text() for path in PRESETS]
    found = []
    for _ in range(300):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(text))
            stop = start + rng.choice([0, 1, 1, 5])
            text = (
                text[:start]
                + rng.choice(["", "\t", ":", "- ", "[", "}", "*", "&a", "!", "#", "'", "\n", "9"])
                + text[stop:]
            )
        try:
            parse(text)
        except RecipeError as error:
            found += error.problems
    assert len(found) > 100
    assert all(re.match(r"run\.yaml:\d+: \S", problem) for problem in found)


def test_what_is_written_means_the_same_to_readers_of_yaml_1_1():
    value = {
        "texts": ["on", "no", "1e-4", "0x1", "0o7", "1.", ".inf", "", "*.txt", "a: b", "<<", "ü\n", "=", "~"],
        "numbers": [1e-8, 3e-4, 1e22, 5, -1, 0.1],
        "others": [True, None, {"nested": []}],
        "empty": {},
    }
    text = write_yaml(value)
    assert yaml.safe_load(text) == value
    assert read_yaml(text, lambda line: Origin(line, "")).value == value


def data_of(text: str) -> object:
    """The data of another system's file, or the error."""
    try:
        return opening.read_data(Path("a.yaml"), text)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("around", ["model: {}gpt2", "- {}a\n- b", "a: |{}\n  text\nb: 1", "a: 1\n{}b: [2, 'c']"])
def test_libyaml_and_the_loader_in_python_read_the_same(monkeypatch, around):
    for inside in ["", "\t", "\ufeff", "#", " #", "&", "'", "<<: ", "\x85", "\u2028"]:
        text = around.format(inside)
        found = []
        for loader in (yaml.CSafeLoader, yaml.SafeLoader):
            monkeypatch.setattr(document, "FAST_LOADER", loader)
            monkeypatch.setattr(opening, "FAST_LOADER", loader)
            read = read_yaml(text, lambda line: Origin(line, f"line {line}"))
            found.append((read.value, read.places, read.problems, data_of(text)))
        assert found[0] == found[1], text

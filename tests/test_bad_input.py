"""Users' mistakes, end to end: status 2 (1 from `check`) and one line each, with the fault, its place, and what would
work; never a stack trace.
"""

import json
import os
import shutil
import signal
import socket
from types import SimpleNamespace

import pytest

from meshwright.cli.main import main
from meshwright.data import sources
from meshwright.spec.recipe import with_place
from meshwright.spec.run import RecipeFile
from meshwright.storage.lock import Lock

RECIPE = """\
model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, max_positions: 32}
data: {sources: "*.txt", tokenizer_vocab: 260, sequence_length: 8}
training: {steps: 2, global_batch: 2, precision: fp32, lr_schedule: {warmup: 1}}
device: cpu
run_dir: runs/small
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe and its text, to work in, on a Python with a small standard library."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python/os.py").write_text("import this\n" * 30)
    monkeypatch.setattr(sources, "sysconfig", SimpleNamespace(get_path=lambda name: str(tmp_path / "python")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "a.txt").write_text("one fish two fish\n" * 30)
    (tmp_path / "b.txt").write_text("red fish blue fish\n" * 30)
    return tmp_path


@pytest.fixture
def time_limit():
    """Ends a test that waits."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def errors(capsys):
    """The lines on standard error; each must be an error's."""
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


RECIPES = {
    # contents of run.yaml: the start of the one line
    "": "run.yaml:1: empty; a recipe is lines of 'key: value', 'model: NAME' at the least",
    "{}": "run.yaml:1: model: required, but not given",
    "model: gpt2\nmodel: gpt2-xl": "run.yaml:2: model: given twice, first at run.yaml:1",
    "model: !!python/name:os.system": "run.yaml:1: the tag '!!python/name:os.system' is not allowed",
    "model: gpt2\ntraining:\n\tsteps: 5": "run.yaml:3: YAML needs spaces here, not a tab",
    "model: gpt2\ndata: {sources: *.txt}": "run.yaml:2: a value that starts with '*' or '&' needs quotes",
    "model: gpt2\ntrainin: {}": "run.yaml:2: trainin: unknown key; did you mean 'training'?",
    "model: gpt2\ntraining: {precision: fp5}": "run.yaml:2: training.precision: 'fp5' is not allowed: must be",
    "model: gpt2\ntraining: {compile: on}": "run.yaml:2: training.compile: 'on' is not allowed: must be true",
    "model: gpt2\nlayout: {pp: 4, schedule: 2f2b}": "run.yaml:2: layout: schedule=2f2b: known are afab, 1f1b,",
    "model: gpt2\ntraining: {global_batch: 7}\nlayout: {dp_shard: 2}": "run.yaml:2: training.global_batch=7 ",
    "model: gpt3": "run.yaml:1: model.name 'gpt3' is neither a published model nor a directory; did you mean 'gpt2'?",
    "model: {family: lama}": "run.yaml:1: model.family 'lama' is unknown; did you mean 'llama'?",
    "model: {family: llama}": "run.yaml:1: model: a llama model without a published name needs model.hidden",
    "model: {name: gpt2, weights: pretrained}": "run.yaml:1: model.weights is pretrained, but model.name",
}


@pytest.mark.parametrize(("text", "message"), RECIPES.items(), ids=RECIPES.keys())
def test_recipes(text, message, folder, capsys):
    (folder / "run.yaml").write_text(text)
    assert main(["check", "run.yaml"]) == 1
    assert any(line.startswith(message) for line in errors(capsys))


OVERRIDES = {
    # command line: the start of the one line
    "training.steps": "command line: training.steps: an override is written key=value",
    "training.optimiser.lr=1": "command line: training.optimiser.lr=1: training.optimiser: unknown key; did",
    "training.global_batch_tokens=9": "training: global_batch and global_batch_tokens both set the batch size",
    "layout.zero=2": "layout: zero=2 with dp_shard=1: there is no axis to shard over",
    "model.num_heads=3": "model: hidden=16 is not a multiple of num_heads=3",
    "model.num_kv_heads=3": "model: num_heads=2 is not a multiple of num_kv_heads=3",
    "layout.dp_replicate=3": "training.global_batch=2 sequences cannot be split over 3 data-parallel ranks;",
    "training.micro_batch=3": "training.micro_batch=3 does not divide the 2 sequences of a rank; the nearest",
    "data.sequence_length=64": "data.sequence_length=64 is longer than the model's 32 positions; use",
    "run_dir=a.txt/x": "run_dir=a.txt/x: a.txt is not writable (not a directory); choose another",
    "run_dir=/proc/nope": "run_dir=/proc/nope: /proc is not writable (no such file or directory); choose",
    "model.vocab=100": "the tokenizer has 260 tokens but the model only 100 rows; set model.vocab=260",
    "model.hidden=64000000000000": "64000000000000 is not allowed: must be at most 1e+07",
    "model.num_layers=1000000000": "1000000000 is not allowed: must be at most 10000",
    "training.steps=100000000000000000000000": "is not allowed: must be at most 1e+12",
    "data.sources=[{path: a.txt, weight: 1.0e+308}, {path: b.txt, weight: 1}]": "is not allowed: must be at most 1e+09",
    "model.vocab=258": "but the model only 258 rows; set model.vocab=260, or data.tokenizer_vocab=258",
}


@pytest.mark.parametrize(("override", "message"), OVERRIDES.items(), ids=OVERRIDES.keys())
def test_overrides(override, message, folder, capsys):
    assert main(["check", "run.yaml", override]) == 1
    (line,) = errors(capsys)
    assert message in line


def test_reasons_stand_on_lines_of_their_own(folder, capsys):
    words = ["run.yaml", "layout={tp: 3, cp: 3}"]
    assert main(["check", *words]) == 1
    found = errors(capsys)
    assert [line.partition("=")[0] for line in found] == ["layout.tp", "layout.cp"]
    assert main(["train", *words]) == 2
    assert errors(capsys) == found


def test_train_refuses_a_run_dir_that_cannot_be_made_before_any_process_starts(folder, capsys):
    before = sorted(folder.iterdir())
    for words in (["run_dir=a.txt/x"], ["run_dir=/proc/nope", "layout.dp_shard=2"]):
        assert main(["train", "run.yaml", *words]) == 2
        (line,) = errors(capsys)
        assert line.startswith("run_dir=")
    assert sorted(folder.iterdir()) == before


def test_a_run_dir_in_which_another_run_is_at_work_is_left_alone(folder, capsys):
    with Lock(folder / "runs/small/.lock"):
        before = sorted(folder.rglob("*"))
        for words in ([], ["--resume", "auto"], ["--wait-for-lock", "0.1"]):
            assert main(["train", "run.yaml", *words]) == 2
            *_, line = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: runs/small is in use by process {os.getpid()} on ")
            assert line.endswith("; wait for it with --wait-for-lock, or choose another run_dir")
        assert sorted(folder.rglob("*")) == before
    assert not (folder / "runs").exists()


def damaged(name, content):
    return lambda folder: (folder / name).write_bytes(content)


DATA = {
    # data.sources: the folder's content, the start of the one line
    "nothing/*.txt": (None, "data source nothing/*.txt matches no file (looked in "),
    ".": (None, "data source . is a folder; name its files, as in ./**/*.txt"),
    "[a.txt, a.txt]": (None, "data source a.txt is given twice; remove one"),
    "[b*.txt, b.txt]": (None, "one file would be read twice: as b.txt by data source b*.txt, and as b.txt by b.txt"),
    "[a.txt, empty.txt]": (damaged("empty.txt", b""), "data source empty.txt is empty: empty.txt contains no data"),
    "latin1.txt": (damaged("latin1.txt", b"caf\xe9"), "latin1.txt: is not UTF-8 at byte 3"),
    "empty.jsonl": (damaged("empty.jsonl", b'{"text": ""}'), "empty.jsonl: every document is empty"),
    "short.txt": (damaged("short.txt", b"red"), "the corpus has 2 tokens, but one sample needs 9; add text, or lower"),
    "t.json": (damaged("t.json", b"{}"), "t.json: a .json file must contain a list of records"),
    "t.csv": (damaged("t.csv", b"a,b"), "t.csv: no column 'text' (its columns are a, b); set the source's text_key"),
    "t.bin": (damaged("t.bin", b"abcd"), "t.bin: has no t.idx beside it; set its integer type, as in {path"),
    "{path: t.bin, tokens: uint16}": (
        damaged("t.bin", b"abcd"),
        "t.bin contains tokens; set data.tokenizer to the tokenizer that made",
    ),
    "x.jsonl": (
        damaged("x.jsonl", b'{"text": "a"}\n{"body": "b"}'),
        "x.jsonl:2: has no 'text' (its keys are",
    ),
    "y.jsonl": (damaged("y.jsonl", b'{"text": "a"}\n{"text": '), "y.jsonl:2: is not JSON: "),
    "m.jsonl": (
        damaged("m.jsonl", b'{"prompt": "a", "completion": "b"}'),
        "m.jsonl contains records, but a tokenizer is trained only on text; set data.tokenizer to the tokenizer of",
    ),
    "z.jsonl": (damaged("z.jsonl", b'{"text": 5}'), "z.jsonl:1: 'text' is not a string but int"),
}


@pytest.mark.parametrize(("given", "prepare", "message"), [(k, *v) for k, v in DATA.items()], ids=DATA.keys())
def test_data(given, prepare, message, folder, capsys):
    if prepare:
        prepare(folder)
    assert main(["check", "run.yaml", f"data.sources={given}"]) == 1
    (line,) = errors(capsys)
    assert line.startswith(message)


TOKENIZERS = {
    "nowhere.json": (None, "nowhere.json"),
    "broken.json": (damaged("broken.json", b"{"), "broken.json"),
}


@pytest.mark.parametrize(
    ("tokenizer", "prepare", "message"), [(k, *v) for k, v in TOKENIZERS.items()], ids=TOKENIZERS.keys()
)
def test_tokenizers(tokenizer, prepare, message, folder, capsys):
    if prepare:
        prepare(folder)
    assert main(["check", "run.yaml", f"data.tokenizer={tokenizer}"]) == 1
    (line,) = errors(capsys)
    assert message in line


NOT_FILES = {
    # command line, {} for the file: its name
    "check {}": "x.yaml",
    "train {}": "x.yaml",
    "plan {}": "x.yaml",
    "plan validate {}": "x.csv",
    "rehearse {}": "x.yaml",
    "verify {}": "x.yaml",
    "compare {}": "x.yaml",
    "data prepare {}": "x.yaml",
    "data audit {}": "x.yaml",
    "import {}": "x.yaml",
    "import {} --write y.yaml": "x.py",
    "import  {}": "x.sh",
    "import {} ": "x.json",
    "check run.yaml data.sources={}": "x.jsonl",
    "check run.yaml data.tokenizer={}": "x.json",
    "check run.yaml model.name=.": "config.json",
    "eval hf --tasks {} --device cpu": "x.jsonl",
    "judge {} --judge http://127.0.0.1:9 --answers a": "x.jsonl",
}
KINDS = {"pipe": os.mkfifo, "socket": lambda path: bound(path), "device": lambda path: os.symlink("/dev/zero", path)}


def bound(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_is_refused_by_every_verb_that_reads_one(kind, folder, capsys, time_limit):
    """A reader of a pipe waits, and one of /dev/zero never ends."""
    for words, name in NOT_FILES.items():
        KINDS[kind](name)
        assert main([word.format(name) for word in words.split()]) in (1, 2), words
        assert any(f"{name} is a {kind}, not a file" in line for line in errors(capsys)), words
        os.unlink(name)


CONFIG = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"intermediate_size": 32, "vocab_size": 260, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}

CONFIGS = {
    # config.json of the model's directory: the start of the one line
    json.dumps(CONFIG | {"model_type": ["a"]}): "hf/config.json: model_type is ['a'], not a name",
    json.dumps(CONFIG | {"model_type": {}}): "hf/config.json: model_type is {}, not a name",
    json.dumps(CONFIG | {"vocab_size": -1}): "hf/config.json: vocab_size: -1 is not allowed: must be at least 1",
    json.dumps(
        CONFIG | {"hidden_size": 64 * 10**12}
    ): "hf/config.json: hidden_size: 64000000000000 is not allowed: must be at",
    json.dumps(
        CONFIG | {"num_hidden_layers": 10**9}
    ): "hf/config.json: num_hidden_layers: 1000000000 is not allowed: must be",
    json.dumps(
        CONFIG | {"rms_norm_eps": float("nan")}
    ): "hf/config.json: rms_norm_eps: NaN is not allowed: must be a finite number",
    "[" * 100_000: "hf/config.json: its JSON is nested too deeply",
}


@pytest.mark.parametrize(("config", "message"), CONFIGS.items(), ids=lambda text: text[:40])
def test_configs(config, message, folder, capsys):
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(config)
    assert main(["check", "run.yaml", "model={name: hf}"]) == 1
    assert errors(capsys)[0].removeprefix("command line: ").startswith(message)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a small run has been trained."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.yaml").write_text(RECIPE)
    (folder / "a.txt").write_text("one fish two fish\n" * 30)
    (folder / "b.txt").write_text("red fish blue fish\n" * 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "run.yaml"]) == 0
    return folder


@pytest.fixture
def run_dir(trained, tmp_path, monkeypatch):
    """A copy of `trained`, to damage."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs/small"


CHECKPOINT = "checkpoints/step-00000002"


def remove(name):
    return lambda run_dir: (run_dir / name).unlink()


def flip(name):
    def damage(run_dir):
        path = run_dir / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return damage


def cut(name):
    return lambda run_dir: (run_dir / name).write_bytes((run_dir / name).read_bytes()[:-1])


def add(name):
    return lambda run_dir: (run_dir / name).write_bytes(b"x")


DAMAGES = {
    "no manifest": (
        remove(f"{CHECKPOINT}/manifest.json"),
        "manifest.json: missing, so this checkpoint is incomplete",
    ),
    "no shard": (remove(f"{CHECKPOINT}/__0_0.distcp"), "__0_0.distcp: missing"),
    "a flipped bit": (
        flip(f"{CHECKPOINT}/__0_0.distcp"),
        "__0_0.distcp: damaged, its sha256 differs from the manifest's",
    ),
    "a shard cut short": (cut(f"{CHECKPOINT}/__0_0.distcp"), "bytes, but"),
    "flipped metadata": (
        flip(f"{CHECKPOINT}/.metadata"),
        ".metadata: damaged, its sha256 differs from the manifest's",
    ),
    "no JSON as manifest": (cut(f"{CHECKPOINT}/manifest.json"), "manifest.json: is not a manifest"),
    "a foreign file": (
        add(f"{CHECKPOINT}/note.txt"),
        "note.txt: is not part of this checkpoint; remove it to continue",
    ),
    "no checkpoint": (
        lambda run_dir: shutil.rmtree(run_dir / "checkpoints"),
        "no checkpoint",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize(
    "words",
    [("train", "run.yaml", "--resume"), ("generate", "runs/small", "--prompt", "x")],
    ids=["train", "generate"],
)
@pytest.mark.every(1)
def test_damaged_checkpoints(words, damage, message, run_dir, capsys):
    damage(run_dir)
    assert main(words) == 2
    (line,) = errors(capsys)
    assert message in line


AFTER_TRAINING = {
    # command line: the one line
    "train run.yaml": "runs/small already contains a run (up to step-00000002); continue it with --resume",
    "train run.yaml --resume training.seed=1 data.packing=best_fit": "was trained with training.seed=0, not 1, "
    "data.packing=concatenated, not best_fit; continue with training.seed=0 data.packing=concatenated, so",
    "train run.yaml --resume latest": "'latest' is neither a checkpoint nor a setting: --resume takes auto, or a step",
    "train run.yaml --resume model.hidden=32": "but this run's has",
    "generate runs/nowhere --prompt x": "runs/nowhere: no such directory; give a run directory",
    "generate . --prompt x": ".: has no resolved.yaml and no config.json; give a run directory",
    "generate runs/small": "the following arguments are required: --prompt; see 'meshwright generate --help'",
    "generate runs/small --prompt x --tempratur 1": "unknown option '--tempratur'; did you mean '--temperature'?",
    "generate runs/small --prompt x --top-p 2": "top_p=2.0 is not allowed: must be greater than 0",
    "generate runs/small --prompt x --max-tokens 99": "use at most max_tokens=31",
    "generate runs/small --prompt x --seed y": "argument --seed: invalid int value: 'y'",
    "generate runs/small --prompt x --dtype fp8": "argument --dtype: invalid choice: 'fp8'",
    "export runs/small": "--adapter --program is required; see 'meshwright export --help'",
    "export runs/small --hf runs": "runs already exists; export to another directory or remove it",
    "eval runs/small --source nowhere.txt": "data source nowhere.txt matches no file",
    "eval runs/small --sequence-length 64": "sequence length 64: the model supports at most 32",
}


WORDS = {
    # command line: the one line
    "train run.yaml --steps 5": "'--steps'; to change a setting of the recipe, write training.steps=VALUE",
    "train run.yaml --learning-rate=1": "to change a setting of the recipe, write training.optimizer.lr=VALUE",
    "check run.yml": "run.yml: no such file or directory; did you mean 'run.yaml'?",
    "train run.yaml layout={tp:2}": "layout.tp:2: unknown key; in 'tp: 2' a space follows the colon",
    "data show run.yaml --samples -1": "argument --samples: '-1' is not allowed: must be a whole number, at least 1",
    "data audit run.yaml --steps 0": "argument --steps: '0' is not allowed: must be a whole number, at least 1",
}


@pytest.mark.parametrize(("words", "message"), WORDS.items(), ids=WORDS.keys())
def test_words(words, message, folder, capsys):
    assert main(words.split()) == 2
    (line,) = errors(capsys)
    assert message in line


@pytest.mark.parametrize(("words", "message"), AFTER_TRAINING.items(), ids=AFTER_TRAINING.keys())
def test_after_training(words, message, run_dir, capsys):
    assert main(words.split()) == 2
    (line,) = errors(capsys)
    assert message in line


def test_what_only_looks_like_a_setting_gets_no_line(folder, capsys):
    """A recipe may be named data.yaml, and a message may begin with a file name."""
    (folder / "data.yaml").write_text("model: gpt2\ndata: {sources: a.txt}\ntraining: {steps: zero}\n")
    assert main(["train", "data.yaml"]) == 2
    assert errors(capsys) == ["data.yaml:3: training.steps: 'zero' is not allowed: must be a whole number"]
    file = RecipeFile(folder / "data.yaml")
    for message in ("model.safetensors: damaged", "data.yaml:3: training.steps: no", "texts: no such file"):
        assert with_place(message, file) == message
    assert with_place("model.vocab=3: no", file) == f"{folder / 'data.yaml'}:1: model.vocab=3: no"

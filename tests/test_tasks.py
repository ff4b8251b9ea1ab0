"""Tasks: questions recognised by their columns, scored by the model's own log-probabilities, under every layout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright import load_recipe, train
from meshwright.cli.main import main
from meshwright.launch.watchdog import Watchdog
from meshwright.models.generate import Sampling
from meshwright.serve.examine import examinee_of
from meshwright.serve.trained import TrainedModel
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks import questions
from meshwright.tasks.ask import open_tasks
from meshwright.tasks.examinee import ContinuationScore
from meshwright.tasks.own import encode_pair, open_task, run_task
from meshwright.tasks.questions import layout_of, read_questions
from meshwright.testing.equivalence import build_here
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.tasks import before_stops, examinee_in_training
from served import CHATML, generate, hf_directory, model_of, tokenizer_of
from tiny import tiny_run

MMLU = {"question": "Which is a verb?", "subject": "plain_words", "choices": ["add", "x", "def", "one"], "answer": 2}
ARC = {"question": "Which?", "choices": {"text": ["add one", "x"], "label": ["1", "2"]}, "answerKey": "2"}
HELLASWAG = {"ctx": "def add_1(x):", "endings": ["return x + 1", "return", "x"], "label": "0"}
GSM8K = {"question": "What is 700 + 500?", "answer": "It is 700 + 500 = 1200.\n#### 1,200"}
MATH = {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac12}$.", "level": "Level 1", "type": "Algebra"}
SHORT = {"question": "Who wrote it?", "answer": ["Ada Lovelace", "Lovelace"]}

LAYOUT_CASES = {
    "ddp": "gpt2",
    "zero-3-tp": "qwen2",
    "cp-ring-tp": "gpt2",
    "pp-tp": "llama",
    "zero-3-ep": "qwen3_moe",
}


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained_of(tmp_path: Path, *, template: str | None = None, dtype=torch.float64) -> TrainedModel:
    tokenizer = tokenizer_of(template)
    model = model_of("llama", dtype=dtype, max_positions=256)
    return TrainedModel(
        source=tmp_path,
        spec=model.spec,
        model=model,
        tokenizer=tokenizer,
        tokenizer_dir=tmp_path,
        device=torch.device("cpu"),
        run=None,
    )


def alone(model, before, asked) -> ContinuationScore:
    """One continuation's log-probability, by one pass without padding."""
    ids = [*before, *asked]
    logprobs = model.logits(Batch(torch.tensor([ids]))).detach().double().log_softmax(-1)[0, len(before) - 1 : -1]
    return ContinuationScore(
        float(logprobs.gather(1, torch.tensor(asked)[:, None]).sum()), logprobs.argmax(-1).tolist() == list(asked)
    )


@pytest.mark.parametrize(
    ("row", "name", "end", "right"),
    [
        (MMLU, "MMLU", "\nC. def\nD. one\nAnswer:", " C"),
        (MMLU | {"answer": "def"}, "MMLU", "\nC. def\nD. one\nAnswer:", " C"),
        (MMLU | {"choices": 0, "answer": "C", "A": "add", "B": "x", "C": "def", "D": 1}, "MMLU", "D. 1\nAnswer:", " C"),
        (ARC, "ARC", "Question: Which?\nAnswer:", " x"),
        (HELLASWAG, "HellaSwag", "def add_1(x):", " return x + 1"),
    ],
)
def test_choices_are_recognised_by_their_columns(tmp_path, row, name, end, right):
    row = {key: value for key, value in row.items() if not (key == "choices" and value == 0)}
    layout, (question,) = read_questions(write_rows(tmp_path / "q.jsonl", row))
    assert layout.name == name
    assert question.prompt.endswith(end)
    assert question.choices[question.right] == question.solved == right
    assert ("about plain words" in question.head) == (name == "MMLU")


@pytest.mark.parametrize(
    ("row", "name", "text", "wrong"),
    [
        (GSM8K, "GSM8K", "So 700 + 500 is 1200 #### 1200", "#### 1300"),
        (MATH, "MATH", "thus $\\boxed{ \\dfrac{1}{2} }$", "\\boxed{\\frac13}"),
        (MATH | {"answer": "0.5"}, "MATH", "the answer is .5.", "no idea"),
        (SHORT, "short answers", " ada  LOVELACE!", "Ada"),
    ],
)
def test_written_answers_are_found_and_compared(row, name, text, wrong):
    layout = layout_of(row)
    assert layout is not None
    assert layout.name == name
    extract, right = layout.metrics["exact_match"], layout.read(row).answers
    assert extract(text) in right
    assert extract(wrong) not in right


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("\\frac12", "\\dfrac{1}{2}"),
        ("1/2", "\\frac{1}{2}"),
        ("x = 5", "5"),
        ("90^\\circ", "90"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("10\\%", "10"),
        ("5 \\text{ cm}", "5"),
    ],
)
def test_spellings_of_one_expression_are_equal(left, right):
    assert questions.plain_math(left) == questions.plain_math(right)


def test_the_last_number_and_nested_boxes():
    assert questions.last_number("first 3, then $1,234.50.") == "1234.50"
    assert questions.last_number("none") is None
    assert questions.boxed("\\boxed{1} or \\boxed{\\frac{a}{b}}") == "\\frac{a}{b}"
    assert questions.boxed("\\boxed{never closed") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "contains no questions"),
        ("{", "q.jsonl:1: is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"text": "x"}', "no known format has the columns text"),
        (json.dumps(MMLU | {"answer": 7}), "q.jsonl:1: is not a question in the format MMLU: the answer is number 7"),
        (json.dumps(MMLU) + "\n" + json.dumps(SHORT), "q.jsonl:2: has the columns of short answers"),
        (json.dumps(MATH | {"solution": "none"}), "has no \\boxed{} answer"),
    ],
)
def test_what_is_no_question_is_told_with_its_line(tmp_path, content, message):
    (tmp_path / "q.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"q\.jsonl") as caught:
        read_questions(tmp_path / "q.jsonl")
    assert message in str(caught.value)


def test_a_line_ends_where_json_says_and_not_inside_its_texts(tmp_path):
    row = {"question": "a\u2028b\x85c", "answer": "d"}
    (tmp_path / "q.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n")
    _, (question,) = read_questions(tmp_path / "q.jsonl")
    assert "a\u2028b\x85c" in question.prompt


def test_examples_come_from_their_file_or_are_not_asked(tmp_path):
    rows = [MMLU | {"question": f"Question {number}?"} for number in range(4)]
    write_rows(tmp_path / "q.jsonl", *rows)
    write_rows(tmp_path / "dev.jsonl", MMLU | {"question": "Solved?"})
    own = open_task(TaskSpec(task="q.jsonl", shots=1), tmp_path)
    assert [question.prompt[:11] for question in own.questions] == ["Question 1?", "Question 2?", "Question 3?"]
    assert own.prompt(own.questions[0]).count("Question 0?") == 1
    dev = open_task(TaskSpec(task="q.jsonl", shots=1, shots_from="dev.jsonl", limit=3), tmp_path)
    assert len(dev.questions) == 3
    assert "Solved?" in dev.prompt(dev.questions[0])
    assert "Answer: C\n\nQuestion 0?" in dev.prompt(dev.questions[0])
    with pytest.raises(UserError, match="too few questions for shots=4"):
        open_task(TaskSpec(task="q.jsonl", shots=4), tmp_path)


def test_log_probabilities_are_the_models_own(tmp_path):
    """Rows of different lengths in one batch, one token and several, one that is too long."""
    trained = trained_of(tmp_path)
    rows = [([5, 6, 7], [8]), ([5, 6, 7], [9]), ([3] * 40, [11, 4, 11]), ([9], [2, 3]), ([1, 2] * 150, [5, 6])]
    best = generate(trained.model, [[5, 6, 7]], max_tokens=3, eos_id=(), sampling=Sampling(temperature=0))[0]
    rows += [([5, 6, 7], best), ([5, 6, 7], best[:1])]
    found = examinee_of(trained).logprobs(rows)
    for (before, asked), one in zip(rows, found, strict=True):
        expected = alone(trained.model, before[-(256 + 1 - len(asked)) :], asked)
        assert one.logprob == pytest.approx(expected.logprob, abs=1e-9)
        assert one.greedy == expected.greedy
    assert [one.greedy for one in found[-2:]] == [True, True]


def test_a_choice_is_the_likeliest_continuation(tmp_path):
    trained = trained_of(tmp_path)
    rows = [MMLU | {"question": f"Question {number}?", "answer": number % 4} for number in range(12)]
    task = open_task(TaskSpec(task="q.jsonl"), write_rows(tmp_path / "q.jsonl", *rows).parent)
    result = run_task(task, examinee_of(trained))
    right = 0
    for question, record in zip(task.questions, result.records, strict=True):
        before = trained.tokenizer.encode_prompt(task.prompt(question))
        scores = [alone(trained.model, before, trained.tokenizer.encode(one)).logprob for one in question.choices]
        assert record["answer"] == "ABCD"[scores.index(max(scores))]
        right += scores.index(max(scores)) == question.right
    assert result.metrics["acc"].value == right / 12
    assert 0 < right < 12


def test_spaces_at_the_end_of_a_prompt_belong_to_the_answer(tmp_path):
    examinee = examinee_of(trained_of(tmp_path))
    assert encode_pair(examinee, "return ", "x") == encode_pair(examinee, "return", " x")
    before, asked = encode_pair(examinee, "", "x")
    assert (before, examinee.tokenizer.decode(asked)) == ([examinee.tokenizer.eos_id], "x")


def test_written_answers_are_the_models_greedy_text(tmp_path):
    trained = trained_of(tmp_path, template=CHATML)
    write_rows(tmp_path / "q.jsonl", SHORT, SHORT | {"question": "def add_1(x):"})
    for chat in (False, True):
        result = run_task(open_task(TaskSpec(task="q.jsonl", chat=chat, limit=2), tmp_path), examinee_of(trained))
        assert len(result.records) == 2
        assert all("\n" not in record["answer"] for record in result.records if not chat)
    text = run_task(open_task(TaskSpec(task="q.jsonl"), tmp_path), examinee_of(trained)).records[0]["answer"]
    write_rows(tmp_path / "own.jsonl", SHORT | {"answer": text}, SHORT | {"answer": "something else"})
    own = run_task(open_task(TaskSpec(task="own.jsonl"), tmp_path), examinee_of(trained))
    assert own.metrics["exact_match"].value == 0.5
    assert own.metrics["exact_match"].stderr == pytest.approx(0.5)


ROWS = [([5, 6, 7], [8]), ([5, 6, 7], [9]), ([3] * 9, [11, 4, 11]), ([9], [2, 3]), ([4, 4, 4, 1], [5, 6]), ([7], [7])]
ROWS += [
    ([number, *before], asked) for number in range(20) for before, asked in ROWS
]  # for several batches of each rank


def score(run) -> list[tuple[float, bool]]:
    """The results of all ranks together."""
    found = examinee_in_training(build_here(run), tokenizer_of()).logprobs(ROWS)
    return [(round(one.logprob, 4), one.greedy) for one in found]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_every_kind_of_layout_finds_what_one_process_finds(ranks: RankPool, name: str) -> None:
    layout = (LAYOUTS | EXPERT_PARALLEL)[name]
    run = tiny_run(layout, family=LAYOUT_CASES[name])
    one = score(run.model_copy(update={"run": run.run.model_copy(update={"layout": LayoutSpec()})}))
    for found in ranks.run(layout.world_size, score, run):
        assert found == [(pytest.approx(logprob, abs=2e-4), greedy) for logprob, greedy in one]


@pytest.mark.slow
def test_a_run_is_asked_as_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "verbs.jsonl", MMLU, MMLU | {"answer": 1})
    write_rows(tmp_path / "who.jsonl", SHORT)
    (tmp_path / "text.txt").write_text("".join(f"def get_{i}(self):\n    return {i}\n" for i in range(300)))
    (tmp_path / "run.yaml").write_text(
        "model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, max_positions: 256}\n"
        "data: {sources: text.txt, tokenizer_vocab: 300, sequence_length: 32}\n"
        "training:\n"
        "  steps: 2\n"
        "  global_batch: 2\n"
        "  precision: fp32\n"
        "  evaluation: {every: 1, batches: 0, tasks: [verbs.jsonl, {task: who.jsonl, limit: 1}]}\n"
        "run_dir: run\n"
        "checkpoint: {every: 1}\n"
        "device: cpu\n"
    )
    entered, enter = [], Watchdog.enter

    def spy(self, kind, which="", *, patient=False) -> None:
        entered.append((kind, patient))
        enter(self, kind, which, patient=patient)

    monkeypatch.setattr(Watchdog, "enter", spy)
    train(load_recipe(tmp_path / "run.yaml"), base_dir=tmp_path)
    assert ("TaskCallback.on_step", True) in entered, "tasks may take hours"
    told = [record for record in read_journal(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "tasks"]
    assert [record["step"] for record in told] == [1, 2]
    assert main(["eval", "run", "--device", "cpu", "--tasks", "verbs.jsonl", "who.jsonl", "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index('{\n  "model"') :])["tasks"]
    assert found["verbs"]["metrics"]["acc"]["value"] == told[-1]["verbs/acc"]
    assert found["who"]["metrics"]["exact_match"]["value"] == told[-1]["who/exact_match"]
    assert found["verbs"]["questions"] == 2
    assert main(["eval", "run", "--device", "cpu", "--tasks", "verbs.jsonl", "--log", "log.jsonl"]) == 0
    assert [json.loads(line)["right"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == ["C", "B"]
    assert "acc" in capsys.readouterr().out
    assert (
        main(["eval", "run", "--device", "cpu", "--tasks", "verbs.jsonl", "--all-checkpoints", "--html", "x.html"]) == 0
    )
    assert f"step 2: verbs acc {told[-1]['verbs/acc']:.4f}" in (tmp_path / "x.html").read_text()
    acc = told[-1]["verbs/acc"]
    assert re.search(
        rf"verbs acc, from .*\n  step        1 .*\n  step        2  {acc:>10.4f}  #", capsys.readouterr().out
    )
    assert main(["eval", "run", "--device", "cpu", "--all-checkpoints", "--source", "text.txt", "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)["checkpoints"]
    assert main(["eval", "run/checkpoints/step-00000001", "--device", "cpu", "--source", "text.txt", "--json"]) == 0
    assert [one["step"] for one in curve] == [1, 2]
    assert curve[0]["loss"] == json.loads(capsys.readouterr().out)["loss"] != curve[1]["loss"]
    assert main(["eval", "text.txt", "--all-checkpoints"]) == 2
    assert "needs a run's folder" in capsys.readouterr().err


def test_texts_end_before_the_first_stop():
    assert before_stops("one\ntwo Question: three", ("Question:", "\n")) == "one"
    assert before_stops("one", ()) == "one"


def test_misuse_is_told_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "q.jsonl", MMLU)
    (tmp_path / "sub").mkdir()
    write_rows(tmp_path / "sub" / "q.jsonl", MMLU)
    with pytest.raises(UserError, match="two tasks are named q"):
        open_tasks([TaskSpec(task="q.jsonl"), TaskSpec(task="sub/q.jsonl")], tmp_path)
    for words, message in {
        ("--tasks", "none.jsonl"): "none.jsonl: cannot be read",
        ("--shots", "1"): "--shots only applies to tasks",
        ("--tasks", "q.jsonl", "--samples", "3"): "choose one",
        ("--tasks", "q.jsonl", "--shots", "-1"): "must be a whole number",
    }.items():
        assert main(["eval", "nowhere", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_harness_measures_the_same_through_transformers(tmp_path):
    """Three offline tasks (choices, rolling perplexity, generated answers): every metric, and every answer."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    tokenizer = tokenizer_of()
    hf_directory(tmp_path / "hf", model_of("llama", dtype=torch.float32, max_positions=256), tokenizer)
    script = Path(__file__).with_name("beside_lm_eval.py")
    command = [sys.executable, str(script), str(tmp_path / "hf"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=400)

"""Preference tuning: the loss equals the formula on every layout; the reference is the model at its start."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conversations import chat_tokenizer, lines
from losses import logits_of
from meshwright import load_recipe, train
from meshwright.cli.main import main
from meshwright.data.chat import TEMPLATES
from meshwright.data.describe import describe_sample
from meshwright.data.loader import Loader
from meshwright.data.packing import NO_LABEL, build_samples
from meshwright.data.prepare import Corpus, TokenStream, prepare_corpus
from meshwright.data.token_file import file_in_memory
from meshwright.models.batch import to_device
from meshwright.prove.inputs import RandomSamples
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for, one_step
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.evaluate import Evaluation, evaluate
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.reference import _read, with_references
from test_equivalence import alone, assert_equal
from tiny import SEQUENCE_LENGTH, tiny_run

PREFERENCE = {"beta": 0.7, "label_smoothing": 0.1}


def rewards(trainer, batch) -> torch.Tensor:
    """beta (r - r_ref) of every pair, each answer computed separately, with whole logits."""
    found = []
    margins = batch.pairs.reference_margins
    for inputs, labels, documents, references in zip(
        batch.tokens, batch.labels, batch.document_ids, margins, strict=True
    ):
        logs = []
        for document in range(2 * int((~np.isnan(references)).sum())):
            here = documents == document
            logits = logits_of(trainer.model, torch.from_numpy(inputs[here])[None])[0]
            targets = torch.from_numpy(labels[here])
            logs.append(-F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum"))
        for pair, (chosen, rejected) in enumerate(zip(logs[::2], logs[1::2], strict=True)):
            found.append(PREFERENCE["beta"] * (chosen - rejected - references[pair]))
    return torch.stack(found)


def by_formula(trainer, batch) -> torch.Tensor:
    """The loss of all pairs."""
    z, smoothing = rewards(trainer, batch), PREFERENCE["label_smoothing"]
    return (-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)).sum()


def test_the_loss_is_the_formulas():
    trainer = build_here(tiny_run(LayoutSpec(), preference=PREFERENCE))
    samples = RandomSamples(vocab=50, sequence_length=SEQUENCE_LENGTH, count=5, pairs=True)
    with Loader(samples, seed=0, global_batch=5, micro_batch=5) as loader:
        (batch,) = loader.microbatches(0)
    ours = trainer.model(to_device(batch, trainer.device), trainer.train_step.passes.loss)
    wanted = by_formula(trainer, batch)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-12)
    parameters = list(trainer.model.parameters())
    torch.testing.assert_close(torch.autograd.grad(ours, parameters), torch.autograd.grad(wanted, parameters))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "zero-3-uneven",
        "tp",
        "zero-3-tp-wide",
        "cp",
        "cp-ring-tp",
        "cp-ulysses-tp",
        "pp",
        "pp-zero-3",
        "pp-cp-tp",
    ],
)
def test_every_kind_of_layout(ranks: RankPool, name: str):
    run = tiny_run(LAYOUTS[name], preference=PREFERENCE)
    outcome = ranks.run(LAYOUTS[name].world_size, one_step, run)[0]
    assert_equal(outcome, alone(preference=PREFERENCE))


def measured(run: ResolvedRun) -> Evaluation:
    """On the pairs of two training steps. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        batches = loader.microbatches(0) + loader.microbatches(1)
    return evaluate(trainer.train_step.passes, batches, trainer.device, repeats_loss=trainer.train_step.repeats_loss)


@pytest.mark.parametrize("name", ["zero-3-uneven", "cp-ring-tp", "pp-cp"])
def test_held_out_pairs_are_measured_alike_on_every_kind_of_layout(ranks: RankPool, name: str):
    run = tiny_run(LAYOUTS[name], preference=PREFERENCE)
    alone = build_here(tiny_run(LayoutSpec(), preference=PREFERENCE))
    with loader_for(alone) as loader, torch.no_grad():
        z = torch.cat([rewards(alone, batch) for step in (0, 1) for batch in loader.microbatches(step)])
    for found in ranks.run(LAYOUTS[name].world_size, measured, run):
        assert found.tokens == len(z)
        assert found.metrics["accuracy"] == (z > 0).double().mean().item() != 0.5
        assert found.metrics["margin"] == pytest.approx(z.mean().item(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero-3-tp", "pp"])
def test_with_adapters(ranks: RankPool, name: str):
    options = {"preference": PREFERENCE, "finetune": {"method": "lora", "rank": 3}}
    outcome = ranks.run(LAYOUTS[name].world_size, one_step, tiny_run(LAYOUTS[name], **options))[0]
    assert_equal(outcome, alone(**options), slope=5 * 0.1)


def references_of(run: ResolvedRun, folder: Path) -> np.ndarray:
    """The reference's margins for 24 pairs, and for four that are held out. Collective."""
    generator = np.random.default_rng(0)
    answers = [generator.integers(0, 50, generator.integers(3, 9)) for _ in range(56)]
    train, held_out = (replace(file_in_memory(part), is_pairs=True) for part in (answers[8:], answers[:8]))
    stream = TokenStream(name="pairs", train=train, held_out=held_out, weight=None)
    corpus = Corpus(tokenizer=chat_tokenizer(), streams=(stream,))
    (found,) = with_references(build_here(run), corpus, folder).streams
    assert found.held_out is not None
    return np.concatenate([found.train.references, found.held_out.references])  # type: ignore[list-item]


def test_a_damaged_table_of_references_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "reference.npz", a=np.arange(99.0))
    whole = (tmp_path / "reference.npz").read_bytes()
    for content in (whole[:-40], whole[:300], b"", b"PK", whole[:60] + b"~" * 40 + whole[100:]):
        (tmp_path / "reference.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"reference.npz is damaged \(.*\), and the reference model has"):
            _read(tmp_path / "reference.npz", {})


@pytest.mark.parametrize("name", ["zero-3-uneven", "pp-cp-tp"])
def test_the_reference_is_the_same_on_every_layout(ranks: RankPool, tmp_path: Path, name: str):
    run = tiny_run(LAYOUTS[name], preference=PREFERENCE)
    expected = references_of(tiny_run(LayoutSpec(), preference=PREFERENCE), tmp_path)
    assert np.abs(expected).min() > 0
    for found in ranks.run(LAYOUTS[name].world_size, references_of, run, tmp_path):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_pair_counts_once_however_many_share_its_tokens():
    """A rank that does not count the pair has the same gradient, and sums of zero."""
    trainer = build_here(tiny_run(LayoutSpec(), preference=PREFERENCE))
    passes = trainer.train_step.passes
    with loader_for(trainer) as loader:
        batch = loader.microbatches(0)[0]
    found = []
    for counts in (True, False):
        trainer.model.head_split.sequence = mock.Mock(counts=counts, sum=lambda parts: parts)
        loss = trainer.model(to_device(batch, trainer.device), passes.loss)
        gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
        found.append((loss, passes.count(batch), passes.evaluate([to_device(batch, trainer.device)]), gradients))
    (loss, terms, sums, gradients), (other_loss, other_terms, other_sums, other_gradients) = found
    assert loss > other_loss == 0
    assert terms > other_terms == 0
    assert sums.loss == loss
    assert sums.metrics.keys() == {"accuracy", "margin"}
    assert all(x == 0 for x in (other_sums.loss, *other_sums.metrics.values()))
    assert all(torch.equal(*pair) for pair in zip(gradients, other_gradients, strict=True))


RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 1, num_heads: 2, ffn: 64, max_positions: 96, vocab: 320}
data:
  sources: {path: pairs.jsonl, name: colours}
  tokenizer: tokenizer
  sequence_length: 96
  packing: best_fit
  separate_documents: true
  held_out: 0.2
  chat: {template: plain}
training:
  steps: 6
  global_batch: 4
  precision: fp32
  lr_schedule: {name: constant, warmup: 0}
  optimizer: {lr: 1e-2}
  preference: {beta: 0.5}
device: cpu
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat_tokenizer().save(tmp_path / "tokenizer")
    answer = [{"role": "assistant", "content": "Blue."}], [{"role": "assistant", "content": "Red!"}]
    records = (
        {"prompt": f"Sky number {i}?", "chosen": answer[i % 2], "rejected": answer[1 - i % 2]} for i in range(40)
    )
    (tmp_path / "pairs.jsonl").write_text(lines(*records))
    (tmp_path / "run.yaml").write_text(RECIPE)
    return tmp_path


def test_pairs_lie_side_by_side(folder, capsys):
    data = load_recipe("run.yaml").data
    corpus = prepare_corpus(data, base_dir=folder)
    assert corpus.tokenizer.chat_template == (TEMPLATES / "plain.jinja").read_text(), "it goes on with the run"
    (stream,), tokenizer = corpus.streams, chat_tokenizer()
    samples = build_samples(stream.train, data)
    pairs = 0
    for sample in map(samples.__getitem__, range(len(samples))):
        here = int((~np.isnan(sample.references)).sum())
        pairs += here
        for pair in range(here):
            texts = []
            for document in (2 * pair, 2 * pair + 1):
                labels = sample.labels[sample.documents == document]
                texts.append(tokenizer.decode(labels[labels != NO_LABEL]))
            asked = tokenizer.decode(sample.inputs[sample.documents == 2 * pair])
            chosen = int(asked.split("number ")[1].split("?")[0]) % 2
            wanted = ["Blue.<|im_end|>", "Red!<|im_end|>"]
            assert texts == (wanted[::-1] if chosen else wanted)
    assert pairs == samples.num_pairs == stream.train.num_documents // 2
    wide = {"sequence_length": 256}
    together, alone_ = (
        build_samples(stream.train, data.model_copy(update=wide | more)) for more in ({}, {"packing": "padded"})
    )
    assert len(alone_) == pairs > len(together)
    assert sorted(np.concatenate(together.pairs)) == list(range(pairs))
    assert describe_sample(together, 0, tokenizer)[0].endswith(f", {len(together.pairs[0])} pairs")
    assert describe_sample(alone_, 0, tokenizer)[0].endswith(", 1 pair")
    assert main(["data", "audit", "run.yaml"]) == 0
    assert "FAULT" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_learns_what_is_preferred_and_goes_on(folder, capsys):
    run = load_recipe("run.yaml", ["run_dir=whole"])
    train(run, base_dir=folder)
    records = read_journal(folder / "whole" / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6), "at first it is its own reference"
    assert losses[-1] < 0.6
    (evaluation,) = (record for record in records if record["kind"] == "evaluation")
    assert 0.5 < evaluation["accuracy"] <= 1
    assert evaluation["margin"] > 0
    assert evaluation["tokens"] == len(np.load(folder / "whole" / "reference.npz")["held_out.0"])
    for steps, resume in ((3, False), (6, True)):
        train(load_recipe("run.yaml", ["run_dir=parts", f"training.steps={steps}"]), base_dir=folder, resume=resume)
    parts = [r["loss"] for r in read_journal(folder / "parts" / "metrics.jsonl") if r["kind"] == "step"]
    assert parts == losses
    assert main(["eval", "parts", "--source", "pairs.jsonl"]) == 2
    assert "--source pairs.jsonl: contains preferences, whose loss needs the reference model" in capsys.readouterr().err
    pairs = (folder / "pairs.jsonl").read_text()
    (folder / "pairs.jsonl").write_text(pairs.replace("number 1?", "number 4?", 1))
    with pytest.raises(ValueError, match=r"contain other pairs than at the start of the run"):
        train(load_recipe("run.yaml", ["run_dir=parts", "training.steps=7"]), base_dir=folder, resume=True)
    (folder / "pairs.jsonl").write_text(pairs)
    (folder / "parts" / "reference.npz").unlink()
    with pytest.raises(ValueError, match=r"reference\.npz: the reference's margins are missing"):
        train(load_recipe("run.yaml", ["run_dir=parts", "training.steps=7"]), base_dir=folder, resume=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.preference=null", "colours contains preferences; train on them with training.preference"),
        ("data.separate_documents=false", "one sample holds both answers of a preference pair; set data.separate_doc"),
        ("data.sources=text.txt", "training.preference trains on preference pairs, but data source text has none"),
    ],
)
def test_mistakes(override, message, folder):
    (folder / "text.txt").write_text("Some text.\n" * 40)
    with pytest.raises(ValueError, match=message):
        train(load_recipe("run.yaml", [override]), base_dir=folder)

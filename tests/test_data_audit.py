"""The audit finds nothing in a sound run, and each planted fault of the kinds that cost people days."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest

from meshwright.cli import data as verb
from meshwright.cli.main import main
from meshwright.data.audit import CHECKS, PlannedRun, audit
from meshwright.data.loader import BatchShare, HostBatch, Loader
from meshwright.data.mixture import JoinedSamples, Mixture
from meshwright.data.packing import NO_LABEL, build_samples
from meshwright.data.prepare import Corpus, TokenStream
from meshwright.data.tokenizer import train_tokenizer
from meshwright.spec.data import DataSpec
from tokens import token_file

T, GLOBAL_BATCH, STEPS, RANKS = 16, 8, 12, 2
TOKENIZER = train_tokenizer(["."], 257)


def stream(name: str, seed: int, weight: float | None = None) -> TokenStream:
    """About 60 documents to train on and 10 held out: random tokens, each document followed by an end-of-text token."""
    generator = np.random.default_rng(seed)

    def file(count: int):
        lengths = generator.integers(2, 40, count)
        tokens = generator.integers(1, 250, lengths.sum())
        tokens[np.cumsum(lengths) - 1] = TOKENIZER.eos_id
        return token_file(tokens, lengths)

    return TokenStream(name=name, train=file(60), held_out=file(10), weight=weight)


def planned(
    *, packing: str = "concatenated", separate: bool = True, weights=(None,), sees=None, padding="kept"
) -> PlannedRun:
    """A sound run of two ranks; more than an epoch of every stream."""
    data = DataSpec(sequence_length=T, packing=packing, separate_documents=separate)
    corpus = Corpus(tokenizer=TOKENIZER, streams=tuple(stream(f"s{i}", i, weight) for i, weight in enumerate(weights)))
    mixture = Mixture([build_samples(part.train, data) for part in corpus.streams], list(weights))
    held_out = JoinedSamples([build_samples(file, data, keep_tail=True) for file in corpus.held_out])
    return PlannedRun(
        corpus=corpus,
        data=data,
        mixture=mixture,
        held_out=held_out,
        seed=7,
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        world_size=RANKS,
        batches=lambda rank: loader(mixture, rank, padding=padding),
        epochs=mixture.epochs(STEPS * GLOBAL_BATCH),
        sees=sees,
    )


def loader(mixture, rank: int, *, seed: int = 7, world_size: int = RANKS, padding="kept") -> Loader:
    share = BatchShare(rank=rank, world_size=world_size, padding=padding)
    return Loader(mixture, share, seed=seed, global_batch=GLOBAL_BATCH, micro_batch=2)


class Changed:
    """A sound loader's batches, changed on the way."""

    def __init__(self, sound: Loader, change: Callable[[int, HostBatch], HostBatch]):
        self.sound, self.change = sound, change

    def microbatches(self, step):
        return [self.change(step, copy_of(batch)) for batch in self.sound.microbatches(step)]


def copy_of(batch: HostBatch) -> HostBatch:
    return batch.map(np.copy)


def changed(run: PlannedRun, change, *, rank: int = 1) -> PlannedRun:
    """The run with the batches of one rank changed."""
    sound = run.batches
    return dataclasses.replace(run, batches=lambda r: Changed(sound(r), change) if r == rank else sound(r))


@pytest.mark.parametrize("packing", ["concatenated", "best_fit"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("weights", [(None,), (None, None), (0.7, 0.3), (3, 1, 1)])
def test_a_sound_run_passes(packing, separate, weights):
    report = audit(planned(packing=packing, separate=separate, weights=weights))
    assert report.ok, report.findings
    assert report.samples == STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("padding", ["kept", "cut", "left_out"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_sound_run_of_padded_rows_passes(padding, separate):
    """Some end with labels, some with context only, some have no label at all."""
    run = planned(packing="padded", separate=separate, padding=padding, sees=verb.attention_sees if separate else None)
    trained = np.random.default_rng(5).integers(0, 2, len(run.corpus.streams[0].train.tokens), dtype=np.uint8)
    trained[40:100] = 0
    file = dataclasses.replace(run.corpus.streams[0].train, trained=trained)
    corpus = dataclasses.replace(run.corpus, streams=(dataclasses.replace(run.corpus.streams[0], train=file),))
    mixture = Mixture([build_samples(file, run.data)])
    batches = lambda rank: loader(mixture, rank, padding=padding)  # noqa: E731
    run = dataclasses.replace(run, corpus=corpus, mixture=mixture, batches=batches)
    report = audit(run)
    assert report.ok, report.findings
    assert report.samples == STEPS * GLOBAL_BATCH
    if padding == "left_out":
        one = np.zeros
        crossed = audit(
            changed(run, lambda step, batch: dataclasses.replace(batch, document_ids=one(batch.tokens.shape, int)))
        )
        assert crossed.counts["documents"]
        longer = audit(changed(run, lambda step, batch: batch.map(lambda array: np.tile(array, 2))))
        assert longer.counts["rows"]
        shorter = audit(changed(run, lambda step, batch: batch.map(lambda array: array[:, 3:])))
        assert shorter.counts["rows"]


def overlap(run):
    """Rank 1 reads the same as rank 0."""
    return dataclasses.replace(run, batches=lambda rank: loader(run.mixture, 0))


def gap(run):
    """A document is in no sample."""
    samples = run.mixture.streams[0]
    object.__setattr__(samples._bins, "lengths", np.where(samples._bins.lengths == 3, 2, samples._bins.lengths))
    return run


def wrong_ratio(run):
    """Streams are mixed one to one, whatever the weights."""
    mixture = Mixture(run.mixture.streams, [1.0] * len(run.mixture.streams))
    epochs = mixture.epochs(STEPS * GLOBAL_BATCH)
    return dataclasses.replace(run, mixture=mixture, batches=lambda rank: loader(mixture, rank), epochs=epochs)


def no_shift(run):
    def unshift(step, batch):
        return dataclasses.replace(batch, labels=np.where(batch.labels == NO_LABEL, NO_LABEL, batch.tokens))

    return changed(run, unshift)


def double_shift(run):
    def shift(step, batch):
        labels = np.roll(batch.labels, -1, axis=1)
        labels[:, -1] = NO_LABEL
        return dataclasses.replace(batch, labels=labels)

    return changed(run, shift)


def lost_tail(run):
    """The last samples are never seen."""
    samples = run.mixture.streams[0]
    samples._len -= 2
    mixture = Mixture([samples])
    epochs = mixture.epochs(STEPS * GLOBAL_BATCH)
    return dataclasses.replace(run, mixture=mixture, batches=lambda rank: loader(mixture, rank), epochs=epochs)


def lost_held_out_tail(run):
    run.held_out.streams[0]._len -= 1
    return run


def repeated_sample(run):
    """One row of a microbatch is a copy of another."""

    def repeat(step, batch):
        for array in (batch.tokens, batch.labels, batch.document_ids):
            array[1] = array[0]
        return batch

    return changed(run, repeat)


def cross_document_attention(run):
    return changed(run, lambda step, batch: dataclasses.replace(batch, document_ids=None))


def merged_documents(run):
    return changed(run, lambda step, batch: dataclasses.replace(batch, document_ids=batch.document_ids // 2))


def torn_documents(run):
    return changed(
        run,
        lambda step, batch: dataclasses.replace(
            batch, document_ids=batch.document_ids + (np.arange(T) >= T // 2) * 100
        ),
    )


def inverted_loss_mask(run):
    def invert(step, batch):
        return dataclasses.replace(batch, labels=np.where(batch.labels == NO_LABEL, batch.tokens, NO_LABEL))

    return changed(run, invert)


def label_across_border(run):
    def fill(step, batch):
        following = np.append(batch.tokens[:, 1:], batch.tokens[:, :1], axis=1)
        return dataclasses.replace(batch, labels=np.where(batch.labels == NO_LABEL, following, batch.labels))

    return changed(run, fill)


def held_out_leak(run):
    """A held-out document is trained on too."""
    source, into = run.corpus.held_out[0], run.corpus.streams[0].train
    lengths = np.diff(source.starts())
    document = next(i for i, length in enumerate(np.diff(into.starts())) if length in lengths)
    copied = int(np.flatnonzero(lengths == np.diff(into.starts())[document])[0])
    start, other = into.start(document), source.start(copied)
    into.tokens[start : into.start(document + 1)] = source.tokens[other : source.start(copied + 1)]
    return run


def wrong_epoch_count(run):
    return dataclasses.replace(run, epochs=[epochs + 1 for epochs in run.epochs])


def another_seed(run):
    return dataclasses.replace(run, batches=lambda rank: loader(run.mixture, rank, seed=8))


def foreign_tokens(run):
    return changed(run, lambda step, batch: dataclasses.replace(batch, tokens=batch.tokens + (step == 3)))


def missing_microbatch(run):
    sound = run.batches

    class Short:
        def __init__(self, rank):
            self.loader = sound(rank)

        def microbatches(self, step):
            return self.loader.microbatches(step)[: 1 if step == STEPS - 1 else None]

    return dataclasses.replace(run, batches=Short)


def inverted_attention(run):
    return dataclasses.replace(run, sees=lambda documents: ~verb.attention_sees(documents))


def attention_to_the_future(run):
    return dataclasses.replace(run, sees=lambda documents: documents[:, :, None] == documents[:, None, :])


def attention_to_neighbours(run):
    whole = np.zeros((1, T), np.int64)
    return dataclasses.replace(run, sees=lambda documents: verb.attention_sees(whole))


MIXED, FITTED = {"weights": (3, 1)}, {"packing": "best_fit"}
FAULTS = {
    # the fault: (its run, the check that finds it, the message)
    overlap: ({}, "ranks", "which rank 0 has also seen"),
    gap: (FITTED, "packing", "documents are not completely in samples"),
    wrong_ratio: (MIXED, "mixture", "% of the tokens in 48 samples; the recipe requires about"),
    no_shift: ({}, "rows", "the labels are the inputs themselves"),
    double_shift: ({"separate": False}, "rows", "the labels are shifted by two tokens"),
    lost_tail: ({}, "packing", "tokens at the end are in no sample"),
    lost_held_out_tail: ({}, "held out", "tokens at the end are in no sample"),
    repeated_sample: ({}, "epochs", "times instead of 1 or 2"),
    cross_document_attention: ({}, "documents", "attention crosses"),
    merged_documents: (FITTED, "documents", "attention crosses"),
    torn_documents: ({"separate": True}, "documents", "documents are cut at"),
    inverted_loss_mask: ({}, "rows", "the mask is inverted"),
    label_across_border: ({}, "rows", "extra labels"),
    held_out_leak: ({}, "held out", "an exact copy of training document"),
    wrong_epoch_count: ({}, "epochs", "planned"),
    another_seed: ({}, "order", "instead of sample"),
    foreign_tokens: ({}, "rows", "its tokens match no sample of any stream"),
    missing_microbatch: ({}, "order", f"step {STEPS} holds 4 samples"),
    inverted_attention: ({}, "attention", "attends to a later token"),
    attention_to_the_future: ({}, "attention", "attends to a later token"),
    attention_to_neighbours: ({}, "attention", "attends to another document"),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant):
    options, check, message = FAULTS[plant]
    report = audit(plant(planned(**options)))
    assert not report.ok
    assert any(message in finding for finding in report.findings[check]), report.findings


def test_the_models_attention_passes():
    report = audit(planned(packing="best_fit", sees=verb.attention_sees))
    assert report.ok, report.findings


RECIPE = f"""
model: {{family: llama, hidden: 16, num_layers: 1, num_heads: 2, ffn: 32, max_positions: 32}}
data:
  sources: [{{path: a/*.txt, weight: 2}}, {{path: b.jsonl, weight: 1}}]
  tokenizer_vocab: 300
  sequence_length: {T}
  packing: best_fit
  separate_documents: true
  held_out: 0.2
  cache_dir: cache
training: {{steps: 6, global_batch: 8, micro_batch: 2, lr_schedule: {{warmup: 0}}}}
layout: {{dp_replicate: 2}}
device: cpu
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "a").mkdir()
    for i in range(20):
        (tmp_path / "a" / f"{i}.txt").write_text(f"number {i} is {i * i}\n" * (i % 4 + 1))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(30)))
    return tmp_path


def test_the_verb(folder, capsys):
    assert main(["data", "prepare", "run.yaml"]) == 0
    assert "a/*.txt: " in capsys.readouterr().out
    assert main(["data", "audit", "run.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6 steps on 2 ranks: 48 samples, ")
    assert [line.split()[0] for line in lines[2:]] == ["ok"] * (len(CHECKS) - 1), "nothing here is masked"
    assert main(["data", "show", "run.yaml", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "- document 1: " in shown
    assert "tokens of a document" in shown
    assert main(["data", "show", "run.yaml", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 2


def test_the_verb_finds_a_leak(folder, capsys):
    """The same text in two sources: hashes agree on its side, but small sources hold out at least one document."""
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(3)))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(1, 9)))
    sources = "data.sources=[{path: b.jsonl, weight: 1}, {path: c.jsonl, weight: 1}]"
    for held_out in (0.01, 0.02, 0.05):
        status = main(["data", "audit", "run.yaml", sources, f"data.held_out={held_out}", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] == (status == 0)
        assert (report["duplicates"] > 0) == (status == 1)
    assert status == 1


def test_misuse_of_the_verb(folder, capsys):
    assert main(["data", "polish", "run.yaml"]) == 2
    assert "invalid choice: 'polish'" in capsys.readouterr().err
    assert main(["data", "audit", "none.yaml"]) == 2

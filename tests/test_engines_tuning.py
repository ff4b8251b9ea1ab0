"""peft and trl compared with our fine-tuning: equal losses from the same adapters and records; proofs by tensor."""

import json

import numpy as np
import pytest

from meshwright.data.mixture import training_samples
from meshwright.data.tokenizer import train_tokenizer
from meshwright.engines.engine import Engine
from meshwright.engines.materials import write_materials
from meshwright.engines.parity import verify_engine
from meshwright.engines.registry import ENGINES
from meshwright.prove.shrink import shrink
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.resolve import resolve_run
from test_engines_train import RECIPE, trained

LORA = ["finetune={method: lora, rank: 4, alpha: 8}", "model.weights=random", "training.optimizer.lr=1e-2"]
RECORDS = [
    "data.tokenizer=tokenizer",
    "data.sources=[chat.jsonl]",
    "data.chat.template=plain",
    "data.separate_documents=true",
]
PADDED, PACKED = [*RECORDS, "data.packing=padded"], [*RECORDS, "data.packing=best_fit", "data.sequence_length=96"]
PAIRS = [
    *(
        "data.tokenizer=tokenizer",
        "data.sources=[pairs.jsonl]",
        "data.chat.template=plain",
        "data.separate_documents=true",
    ),
    *("data.packing=padded", "data.held_out=0", "data.sequence_length=128", "training.preference={}"),
    *("training.optimizer.eps=1e-3", "training.optimizer.lr=2e-4"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with text, conversations and pairs of answers, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} cats sat on {n * n} mats\n" for n in range(400)))
    asked = [f"What is {n} plus {n}?" for n in range(200)]
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": f"It is {2 * n}."}]}
        for n, ask in enumerate(asked)
    ]
    pairs = [
        {
            "prompt": ask,
            "chosen": [{"role": "assistant", "content": f"It is {2 * n}."}],
            "rejected": [{"role": "assistant", "content": f"It may be {2 * n + 1}, or more."}],
        }
        for n, ask in enumerate(asked)
    ]
    for name, records in (("chat", chats), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train_tokenizer([json.dumps(record) for record in (*chats, *pairs)], 300).save(tmp_path / "tokenizer")
    return tmp_path


def test_inputs_are_the_samples_that_ours_sees(folder):
    resolved = resolve_run(parse_spec(RECIPE, Run, [*PACKED, *LORA]), base_dir=folder)
    corpus = corpus_of(resolved)
    write_materials(resolved, corpus, folder / "inputs", steps=2)
    rows, labels, places = (
        np.load(folder / "inputs" / "data" / f"{name}.npy") for name in ("rows", "labels", "places")
    )
    mixture = training_samples(corpus, resolved.run.data)
    for number in range(2 * resolved.global_batch):
        sample = mixture.sample(number, resolved.run.training.seed)
        assert (rows[number] == sample.inputs).all()
        assert (labels[number] == sample.labels).all()
        assert sample.documents is not None
        begins = np.flatnonzero(np.diff(sample.documents)) + 1
        assert (np.flatnonzero(places[number] == 0)[1:] == begins).all()
    assert (folder / "inputs" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.engines
def test_adapters_on_a_stream(folder):
    rows = trained(folder, LORA, {"peft": "single", "peft ddp": "ddp", "trl": "single", "trl ddp": "ddp"})
    adapters = rows["peft"].ran["trained"]
    assert 0 < adapters < 0.5 * rows["peft"].ran["parameters"]
    for row in list(rows.values())[1:]:
        assert row.ran["trained"] == adapters
        assert any("Peft" in wrapper for wrapper in row.ran["wrappers"])


@pytest.mark.engines
def test_whole_models_on_records(folder):
    """Padded rows; their trained tokens are counted over the global batch."""
    trained(folder, PADDED, {"hf_trainer": "single", "hf_trainer ddp": "ddp", "trl": "single"})


@pytest.mark.engines
def test_adapters_on_joined_records_kept_apart(folder):
    trained(
        folder,
        [*PACKED, "model.weights=random", "finetune={method: lora, dora: true, ranks: {wq: 2}}"],
        {"peft": "single"},
    )


@pytest.mark.engines
def test_pairs_of_answers(folder):
    trained(folder, PAIRS, {"trl": "single"})


@pytest.mark.engines
def test_adapters_on_pairs_of_answers(folder):
    trained(folder, [*PAIRS, *LORA], {"trl": "single"})


@pytest.mark.engines
@pytest.mark.parametrize(("engine", "adapter"), [("peft", "ia3"), ("peft", "dora"), ("trl", "dora")])
def test_adapters_are_equal_tensor_by_tensor(folder, engine, adapter):
    """From records, although the proof's tokens are one stream."""
    finetune = "finetune={method: ia3}" if adapter == "ia3" else "finetune={method: lora, dora: true, rslora: true}"
    recipe = [*PADDED, *LORA, "model.vocab=96", finetune]
    resolved = shrink(resolve_run(parse_spec(RECIPE, Run, recipe), base_dir=folder))
    proof = verify_engine(resolved, ENGINES[engine], steps=2)
    assert proof.first is None
    ending = {"ia3": "ia3_l", "dora": "lora_magnitude_vector"}[adapter]
    assert any(one.name.endswith(ending) for one in proof.compared)


@pytest.mark.engines
def test_a_wrong_scale_of_adapters_is_found(folder):
    """alpha / rank twice as large."""
    resolved = shrink(resolve_run(parse_spec(RECIPE, Run, [*LORA, "model.vocab=96"]), base_dir=folder))

    def changed(self: Engine, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        name, files = ENGINES["peft"].files(resolved)
        place = "optimizer = torch.optim.AdamW("
        assert place in files[name]
        lines = ("for m in model.modules():", "    if hasattr(m, 'lora_A'):", "        m.scaling['default'] *= 2")
        before, after = files[name].split(place, 1)
        indent = before.rpartition("\n")[2]  # the line's
        return name, files | {name: before + "".join(f"{line}\n{indent}" for line in lines) + place + after}

    engine: Engine = type("Changed", (type(ENGINES["peft"]),), {"files": changed})()
    proof = verify_engine(resolved, engine, steps=1)
    assert proof.first is not None
    assert (proof.first.step, proof.first.what) == (1, "loss")

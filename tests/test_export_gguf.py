"""GGUF files: llama.cpp and transformers compute the model's logits, tokens and template, or no file is written."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.cli.main import main
from meshwright.data.tokenizer import TextTokenizer
from meshwright.handover import export
from meshwright.handover.export import export_gguf, export_trained
from meshwright.handover.gguf import StoredModel
from meshwright.handover.gguf_tokenizer import WORDS, vocabulary_of
from meshwright.handover.receipt import CONVERSATIONS, TEXTS
from meshwright.models import Decoder, named_tensors
from meshwright.serve.trained import TrainedModel, open_trained
from meshwright.spec.errors import UserError
from served import CHATML, hf_directory, model_of, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns when it reads GGUF

TEXT = "".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(50))


def uneven(model: Decoder) -> Decoder:
    """With unequal norms and biases, so that none can replace another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def opened(folder: Path, family: str, tokenizer: TextTokenizer | None = None, **more) -> TrainedModel:
    model = uneven(model_of(family, dtype=torch.float32, **more))
    directory = hf_directory(folder / family, model, tokenizer or tokenizer_of(CHATML))
    return open_trained(directory, device="cpu", dtype="fp32")


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_every_family_is_read_with_its_own_numbers(tmp_path, family):
    file = tmp_path / "model.gguf"
    receipt = export_gguf(opened(tmp_path, family), file, form="f32")
    readings = {reading.program: reading for reading in receipt.readings}
    both = family in ("mistral", "qwen2")
    assert readings.keys() == ({"transformers", "llama.cpp"} if both else {"llama.cpp"})
    # It assumes 1,024 positions (gpt2) and heads of 128 (qwen3).
    unread = [note for note in receipt.notes if note.startswith("not proved by transformers")]
    assert bool(unread) == (not both and family != "mixtral")
    assert all("it cannot read the file (" in note for note in unread)
    assert receipt.proved["tokens"] == ["llama.cpp"]
    assert readings["llama.cpp"].largest_difference < (1e-4 if family != "gpt2" else 1e-2)
    assert readings["llama.cpp"].texts_equal == len(TEXTS)
    assert readings["llama.cpp"].conversations_equal == len(CONVERSATIONS)
    assert json.loads((tmp_path / "model.receipt.json").read_text()) == json.loads(json.dumps(receipt.as_json()))
    assert {path.name for path in tmp_path.glob("*.gguf*")} == {"model.gguf"}


@pytest.mark.every(1)
@pytest.mark.parametrize("form", ["bf16", "q8_0"])
def test_formats_round_as_the_receipt_says(tmp_path, capsys, form):
    trained = opened(tmp_path, "llama")
    command = ["export", str(trained.source), "--gguf", str(tmp_path / "x.gguf"), "--format", form, "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dtype"] == form
    exact, llama_cpp = said["readings"]
    assert exact["largest_difference"] < 1e-4  # transformers computes in fp32 from the rounded weights
    assert exact["largest_difference"] < llama_cpp["largest_difference"] < llama_cpp["tolerance"]
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_tensor_is_refused_with_the_block_and_nothing_is_written(tmp_path, monkeypatch):
    trained = opened(tmp_path, "llama")
    right = StoredModel._named

    def swapped(self, parameters):
        for name, tensor in right(self, parameters):
            yield name, tensor.flip(0) if name == "blk.1.attn_q.weight" else tensor

    monkeypatch.setattr(StoredModel, "_named", swapped)
    with pytest.raises(
        UserError, match=r"read by transformers, its logits differ .* the last block, the norm or the head"
    ):
        export_gguf(trained, tmp_path / "x.gguf")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log-probabilities computed by llama.cpp differ"):
        export_gguf(trained, tmp_path / "x.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "llama-tokenizer"}


def bpe(pattern: str | None, normalizer: str | None = None) -> TextTokenizer:
    """A byte-level tokenizer that cuts words by `pattern`; without one, SentencePiece-like with a byte fallback."""
    ends = ["<|endoftext|>"]
    if pattern is None:
        inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
        inner.train_from_iterator([TEXT], trainer)
        content = json.loads(inner.to_str())
        content["added_tokens"] = content["added_tokens"][:3]
        return TextTokenizer({"tokenizer.json": json.dumps(content).encode()}, where="test")
    inner = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    if normalizer:
        inner.normalizer = getattr(normalizers, normalizer)()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=ends, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT], trainer)
    return TextTokenizer({"tokenizer.json": inner.to_str().encode()}, where="test")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_rope_is_llama_cpps_own(tmp_path, kind):
    scaling = {"kind": kind, "factor": 4.0, "original_max_positions": 24}
    receipt = export_gguf(opened(tmp_path, "llama", rope_scaling=scaling), tmp_path / "x.gguf", form="f32")
    assert [one.program for one in receipt.readings] == ["llama.cpp"]
    assert receipt.largest_difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WORDS.values(), "sentencepiece"])
def test_tokens_of_every_kind_of_tokenizer_are_llama_cpps(tmp_path, kind):
    pattern = next((pattern for pattern, name in WORDS.items() if name == kind), None)
    tokenizer = bpe(pattern, "NFC" if kind == "qwen2" else None)
    receipt = export_gguf(opened(tmp_path, "llama", tokenizer, vocab=600), tmp_path / "x.gguf", form="f32")
    assert receipt.readings[-1].texts_equal == len(TEXTS)


def test_tokenizers_that_llama_cpp_lacks_are_refused():
    with pytest.raises(UserError, match="is none of those known"):
        vocabulary_of(bpe(r"\w+|\s+"), 600)
    with pytest.raises(UserError, match="normalizer"):
        vocabulary_of(bpe(next(iter(WORDS)), "Lowercase"), 600)
    with pytest.raises(UserError, match="the embedding 200 rows"):
        vocabulary_of(bpe(next(iter(WORDS))), 200)


def test_other_tokens_are_refused(tmp_path, monkeypatch):
    trained = opened(tmp_path, "llama", bpe(next(pattern for pattern, name in WORDS.items() if name == "llama-bpe")))
    monkeypatch.setitem(WORDS, next(p for p, name in WORDS.items() if name == "llama-bpe"), "gpt-2")
    with pytest.raises(UserError, match=r"llama.cpp encodes text \d+ differently: from token \d+ on"):
        export_gguf(trained, tmp_path / "x.gguf", form="f32")


def test_models_and_options_that_cannot_be_written(tmp_path, capsys):
    trained = opened(tmp_path, "deepseek_v3")
    assert main(["export", str(trained.source), "--gguf", str(tmp_path / "x.gguf")]) == 2
    assert "deepseek_v3 is not supported; supported are gpt2, llama" in capsys.readouterr().err
    for wrong in (["--gguf", "x", "--dtype", "bf16"], ["--hf", "x", "--format", "q8_0"]):
        assert main(["export", str(trained.source), *wrong]) == 2
        assert "goes with" in capsys.readouterr().err


@pytest.mark.slow
def test_a_directory_for_ollama_and_one_for_transformers(tmp_path, capsys):
    trained = opened(tmp_path, "qwen2")
    assert main(["export", str(trained.source), "--ollama", str(tmp_path / "o"), "--format", "q4_0"]) == 0
    printed = capsys.readouterr().out
    assert "ollama create o -f" in printed
    assert "proved: numbers by transformers, llama.cpp; tokens by llama.cpp; chat template by llama.cpp" in printed
    assert "not proved by Ollama: it has not read the files" in printed
    assert 'TEMPLATE """' in (tmp_path / "o" / "Modelfile").read_text()
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"model.gguf", "Modelfile", "receipt.json"}
    assert 'PARAMETER stop "<|im_end|>"' in (tmp_path / "o" / "Modelfile").read_text()
    receipt = export_trained(trained, tmp_path / "hf", dtype="bf16")
    assert [one.program for one in receipt.readings] == ["meshwright", "transformers"]
    for reading in receipt.readings:
        assert (reading.texts_equal, reading.conversations_equal) == (len(TEXTS), len(CONVERSATIONS))
    assert json.loads((tmp_path / "hf" / "receipt.json").read_text())["exported"] == "hf"
    assert (
        open_trained(tmp_path / "hf", device="cpu").spec.vocab
        == named_tensors(trained.model)["tok_embeddings.weight"].shape[0]
    )

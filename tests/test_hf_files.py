"""Hugging Face directories that are damaged, hostile or unfinished; exports that are complete or absent."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshwright.checkpoint import hf
from meshwright.checkpoint.hf import INDEX, WEIGHTS, HfForm, HfWeights, export_hf
from meshwright.checkpoint.hf_proof import probe_tokens
from meshwright.cli.main import main
from meshwright.families import hf_tensors, model_to_hf_config, parameter_table, read_hf_directory, resolve_model
from meshwright.models import build_model, initialize, named_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec

SIZES = {"hidden": 32, "num_layers": 2, "num_heads": 4, "vocab": 60, "max_positions": 32, "init_std": 0.2}
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(params=["llama", "gpt2"])
def family(request) -> str:
    return request.param


def spec_of(family: str) -> ModelSpec:
    return resolve_model(ModelFields(family=family, **SIZES), base_dir=Path())


def random_model(spec: ModelSpec):
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), 0)
    return model


def export(out: Path, spec: ModelSpec, **options) -> dict[str, float]:
    prove, form = options.pop("prove", False), HfForm(**{"dtype": torch.float32} | options)
    return export_hf(named_tensors(random_model(spec)).items(), spec, out, form, prove=prove)


@pytest.fixture
def llama(tmp_path) -> Path:
    """A good directory of one file."""
    export(tmp_path / "one", spec_of("llama"))
    return tmp_path / "one"


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A good directory of several files."""
    export(tmp_path / "many", spec_of("llama"), shard_bytes=100_000)
    return tmp_path / "many"


def refused(directory: Path) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        HfWeights(directory, spec_of("llama"))
    assert "\n" not in str(error.value)
    return str(error.value)


def rewritten(directory: Path, change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def test_no_weights(llama):
    (llama / WEIGHTS).unlink()
    assert f"neither {WEIGHTS} nor {INDEX}" in refused(llama)
    (llama / "pytorch_model.bin").touch()
    assert "has only .bin weights" in refused(llama)


def test_a_tensor_that_is_missing_misshapen_unknown_or_quantized(llama):
    good = llama.rename(llama.with_name("good"))
    for change, message in (
        (lambda tensors: tensors.pop(Q), f"{WEIGHTS} has no tensor {Q}, which llama needs for layers.0.attention.wq"),
        (lambda tensors: tensors.update({Q: torch.zeros(8, 32)}), f"{Q} has shape [8, 32], but config.json implies"),
        (
            lambda tensors: tensors.update({Q[:-6] + "bias": torch.zeros(32)}),
            "q_proj.bias does not belong to the llama",
        ),
        (lambda tensors: tensors.update({Q: torch.zeros(32, 32, dtype=torch.int8)}), f"{Q} is I8; only F64"),
    ):
        shutil.copytree(good, llama)
        rewritten(llama, change)
        assert message in refused(llama)
        shutil.rmtree(llama)


MTP_SIZES = {"deepseek_v3": {"kv_rank": 8, "nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 8}}
MTP_SIZES["deepseek_v3"] |= {"num_experts": 4, "experts_per_token": 2, "router_groups": 1, "router_top_groups": 1}
MTP_SIZES["deepseek_v3"] |= {"expert_ffn": 8, "dense_layers": 1}
MTP_SIZES["qwen3_5"] = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8, "delta_heads": 4, "delta_key_heads": 2}
MTP_SIZES["qwen3_5"] |= {"delta_key_dim": 8, "delta_value_dim": 8, "rope_head_dim": 4}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5", ("mtp.fc.weight", "mtp.norm.weight")),
        ("deepseek_v3", ("model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight")),
    ],
)
def test_tensors_of_multi_token_prediction_are_left_out_and_named(tmp_path, capsys, family, names):
    """Once on the command line; a directory without them has no note."""
    export(tmp_path / "hf", resolve_model(ModelFields(family=family, **SIZES | MTP_SIZES[family]), base_dir=Path()))
    spec = read_hf_directory(tmp_path / "hf")
    assert hf.about_left_out(tmp_path / "hf", spec) == ""
    rewritten(tmp_path / "hf", lambda tensors: tensors.update({name: torch.zeros(32, 32) for name in names}))
    HfWeights(tmp_path / "hf", spec)
    note = f"2 tensors of multi-token prediction not read: {names[0]} to {names[1]}; exports do not have them"
    assert hf.about_left_out(tmp_path / "hf", spec) == note
    Tokenizer(WordLevel({f"t{row}": row for row in range(59)} | {"</s>": 59}, "t0")).save(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    assert main(["generate", str(tmp_path / "hf"), "--prompt", "t1", "--max-tokens", "1", "--no-compile"]) == 0
    assert capsys.readouterr().err.count(f"note: {note}\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file: its header is not JSON"),
        (b"\xff" * 8 + b"{}", "its header would be"),
        ((25 * 10**6 + 1).to_bytes(8, "little") + b"{", "its header would be 25,000,001 bytes long"),
        ((4).to_bytes(8, "little") + b"[{}]", "its header is malformed"),
        ((12).to_bytes(8, "little") + b'{"a":{"b":1}', "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
)
def test_what_is_no_safetensors_file(llama, content, message):
    (llama / WEIGHTS).write_bytes(content)
    assert message in refused(llama)


def rewritten_header(file, change):
    """The same bytes after a changed header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_tensors_that_do_not_cover_the_file(llama):
    file = llama / WEIGHTS
    good = file.read_bytes()
    file.write_bytes(good + bytes(7))
    assert "is damaged: 7 bytes follow its last tensor" in refused(llama)
    for move, message in ((-4, "overlaps the previous tensor"), (4, "is truncated")):
        file.write_bytes(good)

        def moved(header, move=move):
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            last = max(entries, key=lambda entry: entry["data_offsets"])
            last["data_offsets"] = [place + move for place in last["data_offsets"]]

        rewritten_header(file, moved)
        assert message in refused(llama)
    for strange in ([1], ["a", "b"], None):
        file.write_bytes(good)
        rewritten_header(file, lambda header, strange=strange: header["lm_head.weight"].update(data_offsets=strange))
        assert "its header is malformed" in refused(llama)
    file.write_bytes(good)
    rewritten_header(file, lambda header: header.update(__metadata__={"a": 1}))  # which only safetensors reads
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is not a safetensors file: "):
        HfWeights(llama, spec_of("llama")).read_rows("tok_embeddings.weight", 0, 1)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX, "config.json"])
def test_a_pipe_is_not_waited_for(llama, name):
    (llama / WEIGHTS).unlink()
    (llama / name).unlink(missing_ok=True)
    os.mkfifo(llama / name)
    with pytest.raises(UserError, match=rf"{name} is a pipe, not a file"):
        HfWeights(llama, read_hf_directory(llama))


def test_a_file_cut_short(llama):
    content = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(content[:-1])
    assert f"{WEIGHTS} is truncated: tensor lm_head.weight ends at byte" in refused(llama)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin"])
def test_an_index_that_points_elsewhere(sharded, name):
    shutil.copyfile(sharded / "model-00001-of-00003.safetensors", sharded.parent / "outside.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][Q] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert "is not a safetensors file in that directory" in refused(sharded)


def test_an_index_that_is_wrong(sharded):
    index = json.loads((sharded / INDEX).read_text())
    moved = index["weight_map"] | {Q: index["weight_map"]["lm_head.weight"]}
    (sharded / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert f"{INDEX} lists {Q} in model-0000" in refused(sharded)
    for broken in ("{", "[]", '{"weight_map": []}', '{"weight_map": {"a": []}}'):
        (sharded / INDEX).write_text(broken)
        assert "has no valid weight_map" in refused(sharded)


def test_an_index_whose_file_is_missing(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors cannot be read: No such file" in refused(sharded)


def test_checkpoints_of_the_model_without_its_head(tmp_path, family):
    """As openai-community/gpt2 was saved: without prefix, with causal masks that are not parameters."""
    spec = resolve_model(ModelFields(family=family, **SIZES, tied_embeddings=True), base_dir=Path())
    export(tmp_path / "hf", spec)
    prefix = {"gpt2": "transformer.", "llama": "model."}[family]

    def strip(tensors):
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)
        masks = {"gpt2": "h.0.attn.bias", "llama": "layers.0.self_attn.rotary_emb.inv_freq"}
        tensors[masks[family]] = torch.ones(1, 1, 4, 4)

    before = HfWeights(tmp_path / "hf", spec)
    expected = {row.name: before.read_rows(row.name, 0, row.shape[0]) for row in parameter_table(spec)}
    rewritten(tmp_path / "hf", strip)
    weights = HfWeights(tmp_path / "hf", spec)
    for name, value in expected.items():
        assert torch.equal(weights.read_rows(name, 0, len(value)), value)


def test_rows_of_one_tensor_are_read_without_the_others(sharded):
    """All other files may be missing by then: only the requested tensor is read."""
    spec = spec_of("llama")
    weights = HfWeights(sharded, spec)
    index = json.loads((sharded / INDEX).read_text())
    for file in set(index["weight_map"].values()) - {index["weight_map"][Q]}:
        (sharded / file).unlink()
    expected = dict(random_model(spec).named_parameters())["layers.0.attention.wq.weight"]
    assert torch.equal(weights.read_rows("layers.0.attention.wq.weight", 3, 9), expected[3:9])


def test_export_is_proved_and_complete(tmp_path, family):
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    spec, out = spec_of(family), tmp_path / "out"
    difference = export(
        out, spec, tokenizer_dir=tmp_path / "tokenizer", prove=True, dtype=torch.bfloat16, token_ids={"eos_token_id": 7}
    )
    assert difference.keys() == {"meshwright", "transformers"}
    assert max(difference.values()) < 1e-4
    names = {WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 7}
    with safe_open(out / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    model = random_model(spec).bfloat16()
    weights = HfWeights(out, read_hf_directory(out))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read_rows(name, 0, len(parameter)), parameter)


def test_shards_respect_their_size_and_the_index_its_totals(sharded):
    index = json.loads((sharded / INDEX).read_text())
    rows = parameter_table(spec_of("llama"))
    assert index["metadata"] == {
        "total_parameters": sum(row.numel for row in rows),
        "total_size": 4 * sum(row.numel for row in rows),
    }
    for file in set(index["weight_map"].values()):
        assert sum(tensor.nbytes for tensor in load_file(sharded / file).values()) <= 100_000


def nothing_left(folder: Path) -> bool:
    return not list(folder.iterdir())


def test_an_export_that_differs_is_refused(tmp_path, family, monkeypatch):
    """Two matrices of one shape swapped while writing: every file is valid, only the logits differ."""

    def swapped(spec):
        places = hf_tensors(spec)
        k, v = "layers.1.attention.wk.weight", "layers.1.attention.wv.weight"
        places[k], places[v] = places[v], places[k]
        return places

    monkeypatch.setattr(hf, "hf_tensors", swapped)
    with pytest.raises(ValueError, match=r"refused: read by transformers, its logits differ"):
        export(tmp_path / "out", spec_of(family), prove=True)
    assert nothing_left(tmp_path)


def test_an_export_with_a_wrong_config_is_refused(tmp_path, family, monkeypatch):
    """The config has another epsilon than the model."""

    def wrong(spec, **options):
        return model_to_hf_config(spec.model_copy(update={"norm_eps": 0.5}), **options)

    monkeypatch.setattr(hf, "model_to_hf_config", wrong)
    with pytest.raises(ValueError, match=r"refused: read back, its logits differ"):
        export(tmp_path / "out", spec_of(family), prove=True)
    assert nothing_left(tmp_path)


def test_an_export_never_overwrites(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"out already exists"):
        export(tmp_path / "out", spec_of("llama"))


def test_an_export_that_fails_leaves_nothing(tmp_path):
    spec = spec_of("llama")
    parameters = list(random_model(spec).named_parameters())
    options = {"form": HfForm(), "prove": False}
    for stream, message in (
        (parameters[1:], "1 parameters are missing, first tok_embeddings.weight"),
        ([*parameters, parameters[0]], "tok_embeddings.weight of shape [60, 32] is unexpected or occurs twice"),
        ([("other", parameters[0][1])], "other of shape [60, 32] is unexpected"),
    ):
        with pytest.raises(ValueError, match=r"^export: ") as error:
            export_hf(stream, spec, tmp_path / "out", **options)
        assert message in str(error.value)
        assert nothing_left(tmp_path)


def test_the_probe_is_the_same_for_every_export():
    spec = spec_of("llama")
    assert torch.equal(probe_tokens(spec), probe_tokens(spec))
    assert probe_tokens(spec).shape == (2, 32)

"""Weights of other systems: the same numbers as in their files, without running code."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file, save_file

from meshwright.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def right(tmp_path, monkeypatch) -> Tensors:
    """A Llama's tensors by Hugging Face's names; `model/` has its sizes."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (24, 16), "model.norm": (16,), "lm_head": (24, 16)}
    for number in range(2):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}self_attn.{one}_proj": (8 if one in "kv" else 16, 16) for one in "qkvo"}
        shapes |= {f"{layer}mlp.{one}_proj": (20, 16) for one in ("gate", "up")} | {f"{layer}mlp.down_proj": (16, 20)}
        shapes |= {f"{layer}{norm}_layernorm": (16,) for norm in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tensors


def imported(*words: str) -> Tensors:
    assert main(["import", *words, "--weights", "mine"]) == 0
    return load_file(Path("mine/model.safetensors"))


def assert_same(found: Tensors, right: Tensors) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name


def refused(capsys, *words: str) -> str:
    assert main(["import", *words, "--weights", "mine"]) == 2
    assert not Path("mine").exists()
    return capsys.readouterr().err


LITGPT = {
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 4,
    "n_embd": 16,
    "intermediate_size": 20,
    "block_size": 32,
    "padded_vocab_size": 24,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "rotary_percentage": 1.0,
    "bias": False,
    "norm_eps": 1e-5,
    "rope_base": 10000,
}


def litgpt(right: Tensors, **changes) -> None:
    names = {
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
        "self_attn.o_proj": "attn.proj",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
    }
    state = {"transformer.wte.weight": right["model.embed_tokens.weight"], "lm_head.weight": right["lm_head.weight"]}
    state["transformer.ln_f.weight"] = right["model.norm.weight"]
    for number in range(2):
        old, new = f"model.layers.{number}.", f"transformer.h.{number}."
        state |= {f"{new}{theirs}.weight": right[f"{old}{ours}.weight"] for ours, theirs in names.items()}
        state[f"{new}attn.qkv.weight"] = torch.cat([right[f"{old}self_attn.{one}_proj.weight"] for one in "qkv"])
    torch.save({"model": state}, "lit_model.pth")
    Path("model_config.yaml").write_text(yaml.safe_dump(LITGPT | changes))


def test_litgpt(right, capsys):
    litgpt(right)
    assert_same(imported("lit_model.pth"), right)
    config = json.loads(Path("mine/config.json").read_text())
    assert (config["num_key_value_heads"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (2, 1e-5, False)


def test_other_models_of_litgpt_are_refused_by_their_setting(right, capsys):
    litgpt(right, rotary_percentage=0.25)
    assert "rotary_percentage is 0.25" in refused(capsys, "lit_model.pth")
    litgpt(right)
    state = torch.load("lit_model.pth")
    torch.save(state["model"] | {"transformer.h.0.attn.qkv.lora_A": torch.zeros(1)}, "lit_model.pth")
    assert "litgpt merge_lora" in refused(capsys, "lit_model.pth")
    Path("model_config.yaml").unlink()
    assert "has no model_config.yaml beside it" in refused(capsys, "lit_model.pth")


class LossScaler:
    """A stand-in for DeepSpeed's class."""

    def __init__(self) -> None:
        self.cur_scale = 1


def zero(right: Tensors, monkeypatch, *, stage: int, ranks: int = 2) -> None:
    """A checkpoint as DeepSpeed writes it, with one of its own objects."""
    with monkeypatch.context() as patch:
        words = ["deepspeed", "runtime", "fp16", "loss_scaler"]
        for count in range(1, len(words) + 1):
            patch.setitem(sys.modules, ".".join(words[:count]), types.ModuleType(".".join(words[:count])))
        patch.setattr(sys.modules[".".join(words)], "LossScaler", LossScaler, raising=False)
        patch.setattr(LossScaler, "__module__", ".".join(words))
        write_zero(right, stage=stage, ranks=ranks)


def write_zero(right: Tensors, *, stage: int, ranks: int) -> None:
    folder = Path("ckpt/global_step2")
    folder.mkdir(parents=True)
    Path("ckpt/latest").write_text("global_step2")
    shapes = [
        {name: tensor.shape for name, tensor in right.items() if (tensor.dim() > 1) == wide} for wide in (True, False)
    ]
    named = dict.fromkeys(right)
    whole = {"module": named, "buffer_names": [], "param_shapes": shapes, "shared_params": {}, "ds_version": "0.19.8"}
    shares: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        groups = []
        for group in shapes:
            if stage == 3:
                parts = [right[name].flatten() for name in group]
                size = [-(-len(part) // ranks) for part in parts]
                padded = [
                    torch.cat([part, torch.zeros(n * ranks - len(part))]) for part, n in zip(parts, size, strict=True)
                ]
                groups.append(torch.cat([part.chunk(ranks)[rank] for part in padded]))
            else:
                flat = torch.cat([right[name].flatten() for name in group])
                flat = torch.cat([flat, torch.zeros(-len(flat) % (2 * ranks))])
                groups.append(flat.chunk(ranks)[rank])
        shares.append(groups)
    for rank, groups in enumerate(shares):
        state = {"partition_count": ranks, "zero_stage": stage, "loss_scaler": LossScaler()}
        state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = groups
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(whole, folder / file)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(right, monkeypatch, stage):
    zero(right, monkeypatch, stage=stage)
    assert_same(imported("ckpt", "--model", "model"), right)


def test_checkpoints_of_deepspeed_that_are_incomplete_or_of_another_model(right, monkeypatch, capsys):
    zero(right, monkeypatch, stage=3)
    assert "give --model" in refused(capsys, "ckpt")
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 24}))
    save_file(right, Path("other/model.safetensors"))
    assert "the model's has [24, 16]" in refused(capsys, "ckpt", "--model", "other")
    Path("ckpt/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "was written by 2 ranks, but contains 1" in refused(capsys, "ckpt", "--model", "model")
    Path("ckpt/latest").write_text("../model")
    assert "this folder does not exist beside it" in refused(capsys, "ckpt", "--model", "model")


def save_dcp(state: Tensors, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about saving in one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def torchtitan(right: Tensors, *, newer: bool) -> Tensors:
    """The tensors in torchtitan's layout: rows of a head that rotate together are adjacent."""
    names = {
        **{f"self_attn.{one}_proj": f"attention.{'qkv_linear.' if newer else ''}w{one}" for one in "qkv"},
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    found = {"tok_embeddings.weight": right["model.embed_tokens.weight"], "norm.weight": right["model.norm.weight"]}
    found["lm_head.weight" if newer else "output.weight"] = right["lm_head.weight"]
    for number in range(2):
        for ours, theirs in names.items():
            tensor = right[f"model.layers.{number}.{ours}.weight"]
            if ours in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = 4 if "q_proj" in ours else 2
                tensor = tensor.view(heads, 2, 2, 16).transpose(1, 2).reshape(tensor.shape)
            found[f"layers.{number}.{theirs}.weight"] = tensor
    return found


@pytest.mark.parametrize("newer", [False, True])
def test_torchtitan(right, newer):
    state = torchtitan(right, newer=newer)
    save_dcp(state | {"optimizer.norm.weight.step": torch.ones(1)}, "step-10")
    assert_same(imported("step-10", "--model", "model"), right)


def test_a_folder_of_another_model_is_one_sentence(right, capsys):
    save_dcp({"weight": torch.ones(1)}, "step-10")
    assert "has no tok_embeddings.weight" in refused(capsys, "step-10", "--model", "model")
    assert "contains no checkpoint of a known system" in refused(capsys, "model", "--model", "model")


def test_megatron(right, capsys):
    """Layers are stacked, and the vocabulary is padded."""
    found: dict[str, list[torch.Tensor]] = {}
    for number in range(2):
        layer = f"model.layers.{number}."
        q, k, v = (right[f"{layer}self_attn.{one}_proj.weight"].unflatten(0, (2, -1)) for one in "qkv")
        for name, tensor in {
            "self_attention.linear_qkv.weight": torch.cat((q, k, v), 1).flatten(0, 1),
            "self_attention.linear_proj.weight": right[f"{layer}self_attn.o_proj.weight"],
            "mlp.linear_fc1.weight": torch.cat([right[f"{layer}mlp.{one}_proj.weight"] for one in ("gate", "up")]),
            "mlp.linear_fc2.weight": right[f"{layer}mlp.down_proj.weight"],
            "self_attention.linear_qkv.layer_norm_weight": right[f"{layer}input_layernorm.weight"],
            "mlp.linear_fc1.layer_norm_weight": right[f"{layer}post_attention_layernorm.weight"],
        }.items():
            found.setdefault(f"decoder.layers.{name}", []).append(tensor)
    padding = torch.zeros(8, 16)
    state = {name: torch.stack(tensors) for name, tensors in found.items()}
    state["embedding.word_embeddings.weight"] = torch.cat([right["model.embed_tokens.weight"], padding])
    state["output_layer.weight"] = torch.cat([right["lm_head.weight"], padding])
    state["decoder.final_layernorm.weight"] = right["model.norm.weight"]
    save_dcp(state, "iter_0000010")
    assert_same(imported("iter_0000010", "--model", "model"), right)
    assert "padded from 24 to 32 rows" in capsys.readouterr().err


class Code:
    def __reduce__(self):
        return open, ("ran", "w")


def test_code_in_a_checkpoint_is_not_run(right, monkeypatch, capsys):
    litgpt(right)
    torch.save({"model": Code()}, "lit_model.pth")
    assert "cannot be read as plain tensors" in refused(capsys, "lit_model.pth")
    zero(right, monkeypatch, stage=2)
    torch.save({"optimizer_state_dict": Code()}, "ckpt/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert "cannot be read as plain tensors" in refused(capsys, "ckpt", "--model", "model")
    Path("step-10").mkdir()
    Path("step-10/.metadata").write_bytes(pickle.dumps(Code()))
    assert "which checkpoint metadata never needs" in refused(capsys, "step-10", "--model", "model")
    assert not Path("ran").exists()


MAKERS = Path(__file__).parent / "makers"


def made(name: str, *words: str) -> None:
    """Make another system write a checkpoint of `model/` on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(MAKERS / name), *words]
    with Path("maker.log").open("w") as log:
        maker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        status = maker.wait(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):  # Megatron-core's writers outlive their ranks
            os.killpg(maker.pid, signal.SIGKILL)
    assert status == 0, Path("maker.log").read_text()[-3000:]


@pytest.mark.engines
@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_s_own_checkpoints(right, stage):
    pytest.importorskip("deepspeed")
    made("deepspeed_checkpoint.py", "model", "ckpt", stage)
    from deepspeed.utils.zero_to_fp32 import (  # pyright: ignore[reportMissingImports]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    theirs = {name: tensor.contiguous() for name, tensor in get_fp32_state_dict_from_zero_checkpoint("ckpt").items()}
    found = imported("ckpt", "--model", "model")
    assert_same(found, theirs)
    assert not torch.equal(found["lm_head.weight"], right["lm_head.weight"])  # it has been trained


@pytest.mark.engines
def test_megatron_core_s_own_checkpoints(right):
    pytest.importorskip("megatron.core")
    Path("ckpt").mkdir()
    made("megatron_checkpoint.py", "model", "ckpt")
    assert_same(imported("ckpt", "--model", "model"), right)


@pytest.mark.engines
def test_litgpt_s_own_checkpoints(right):
    """LitGPT's converter of Hugging Face directories, and its own model's output."""
    pytest.importorskip("litgpt")
    from litgpt.config import Config  # pyright: ignore[reportMissingImports]
    from litgpt.model import GPT  # pyright: ignore[reportMissingImports]
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # pyright: ignore[reportMissingImports]
    from litgpt.utils import save_config  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    config = Config(**LITGPT | {"vocab_size": 24, "padding_multiple": 8})
    state: Tensors = {}
    copy_weights_hf_llama(config, {}, state, dict(right))
    model = GPT(config)
    model.load_state_dict(state)
    save_config(config, Path())
    torch.save({"model": model.state_dict()}, "lit_model.pth")
    assert_same(imported("lit_model.pth"), right)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        theirs, ours = model(tokens), AutoModelForCausalLM.from_pretrained("mine")(tokens).logits
    assert torch.allclose(theirs, ours, atol=1e-5)

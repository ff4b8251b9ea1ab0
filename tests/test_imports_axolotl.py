"""Configurations of axolotl and nanoGPT: every key is imported with its meaning, or named with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.claims import NoEffect
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

BASE = {"base_model": "gpt2", "micro_batch_size": 2, "learning_rate": 1e-4, "max_steps": 100}


class Imported:
    """A recipe from one file, and its report."""

    def __init__(self, folder: Path, name: str, content: str, ranks: int | None = 8) -> None:
        (folder / name).write_text(content)
        self.text, self.reading = import_files([folder / name], ranks=ranks)
        self.recipe = yaml.safe_load(self.text)

    def why(self, key: str) -> str:
        """The report's reasons for the keys without a counterpart whose origin contains `key`."""
        return "; ".join(why for origin, why in self.reading.without if key in origin)

    def tells(self, key: str) -> bool:
        """Whether the recipe or its report names the key."""
        return key in self.text


def axolotl(folder: Path, ranks: int | None = 8, **keys: Any) -> Imported:
    return Imported(folder, "a.yml", yaml.safe_dump({**BASE, **keys}, sort_keys=False), ranks)


def sources(folder: Path, *entries: dict[str, Any], **keys: Any) -> tuple[list[dict[str, Any]], Imported]:
    found = axolotl(folder, datasets=list(entries), **keys)
    return found.recipe["data"]["sources"], found


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"path": "tatsu-lab/alpaca"}, [{"path": "hub:tatsu-lab/alpaca"}]),
        ({"path": "teknium/OpenHermes-2.5"}, [{"path": "hub:teknium/OpenHermes-2.5"}]),
        ({"path": "data/mine.jsonl", "ds_type": "json", "split": "train"}, [{"path": "data/mine.jsonl"}]),
        ({"path": "json", "data_files": "mine.jsonl"}, [{"path": "mine.jsonl"}]),
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, [{"path": "a.jsonl"}, {"path": "b.jsonl"}]),
        ({"path": "./saved", "split": "dev"}, [{"path": "./saved", "split": "dev"}]),
        ({"path": "./folder", "data_files": "part.parquet", "ds_type": "parquet"}, [{"path": "part.parquet"}]),
        (
            {"path": "own/er", "name": ["a", "b"], "split": "train[:5]"},
            [{"path": "hub:own/er", "split": "train[:5]", "subset": name} for name in ("a", "b")],
        ),
    ],
)
def test_a_data_sets_place_is_the_sources(tmp_path: Path, entry: dict[str, Any], expected: list[Any]) -> None:
    found, told = sources(tmp_path, entry)
    assert found == expected
    assert not told.why("datasets")


def test_files_of_a_data_set_on_the_hub_are_not_files_here(tmp_path: Path) -> None:
    found, told = sources(tmp_path, {"path": "own/er", "data_files": ["a.jsonl", "b.jsonl"], "ds_type": "json"})
    assert found == [{"path": "hub:own/er"}]
    assert "read whole" in told.why("datasets.0.data_files=['a.jsonl', 'b.jsonl']")
    found, told = sources(tmp_path, {"path": "s3://bucket/x.jsonl"})
    assert "download" in told.why("datasets.0.path=s3://bucket/x.jsonl")


def test_what_a_local_file_does_not_have_is_named(tmp_path: Path) -> None:
    found, told = sources(tmp_path, {"path": "d.csv", "ds_type": "json", "split": "train[:9]", "name": "part"})
    assert found == [{"path": "d.csv"}]
    assert "the ending of d.csv tells what is in it: csv" in told.why("ds_type=json")
    assert "read whole" in told.why("split=train[:9]")
    assert "read whole" in told.why("name=part")


KEYS: dict[str, Any] = {
    "shards": 4, "shards_idx": 1, "preprocess_shards": 2, "conversation": "vicuna", "chat_template": "gemma",
    "chat_template_jinja": "{{ x }}", "input_format": "f", "input_transform": "t", "field": "f",
    "field_human": "h", "field_model": "m", "field_messages": "dialog", "field_tools": "uses",
    "field_thinking": "why", "template_thinking_key": "because", "message_field_role": "who",
    "message_field_content": "what", "message_property_mappings": {"role": "speaker"},
    "message_field_training": "learn", "message_field_training_detail": "spans",
    "split_thinking": True, "logprobs_field": "l", "temperature": 0.5,
    "roles_to_train": ["gpt"], "train_on_eos": "all", "train_on_eot": "last", "roles": {"user": ["customer"]},
    "drop_system_message": True, "trust_remote_code": True, "revision": "abc", "text_column": "t", "skip": 3,
    "field_chosen": "yes", "field_rejected": "no", "step_separator": "|", "max_completion_length": 9,
    "train_on_last_step_only": True, "weight": "2", "split": "dev", "name": "sub", "ds_type": "json",
}  # fmt: skip
"""Keys of a data set in axolotl's schemas, and one of none."""


@pytest.mark.parametrize("kind", ["chat_template", "alpaca", "completion", "elsewhere.load", None])
def test_every_key_of_a_data_set_is_imported_or_named(tmp_path: Path, kind: str | None) -> None:
    _, told = sources(tmp_path, {"path": "own/er", "type": kind, **KEYS})
    for key, value in KEYS.items():
        assert told.tells(f"datasets.0.{key}={value}"), key
    assert not [claimed for claimed in told.reading.already_so if "datasets" in claimed]
    assert ("a.yml: datasets.0.ds_type=json", NoEffect.UNREAD) in told.reading.no_effect  # which the Hub's tells


def test_a_key_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    for key, value in {"path": 3, "type": ["alpaca"], "data_files": 1, "roles": "x", "shards": "two"}.items():
        with pytest.raises(UserError, match=rf"a.yml: datasets.0.{key}=.* must be"):
            sources(tmp_path, {"path": "own/er", key: value})
    with pytest.raises(UserError, match="roles_to_train"):
        sources(tmp_path, {"path": "own/er", "roles_to_train": [["gpt"]]})
    with pytest.raises(UserError, match=r"a\.yml: datasets\.1\.path is missing"):
        sources(tmp_path, {"path": "own/er"}, {"type": "alpaca"})


def test_conversations_keep_columns_and_what_is_trained(tmp_path: Path) -> None:
    entry = {
        "path": "own/er", "type": "chat_template", "field_messages": "dialog", "field_tools": "uses",
        "message_property_mappings": {"role": "from", "content": "value"}, "roles_to_train": ["gpt", "tool"],
        "roles": {"assistant": ["gpt", "model"]}, "train_on_eos": "last", "chat_template": "chatml",
    }  # fmt: skip
    found, told = sources(tmp_path, entry)
    assert found == [{"path": "hub:own/er", "format": "messages", "columns": {"messages": "dialog", "tools": "uses"}}]
    assert told.recipe["data"]["chat"] == {
        "roles_to_train": ["assistant", "tool"],
        "train_on_eos": "last",
        "template": "chatml",
    }
    assert not told.why("datasets")
    _, told = sources(tmp_path, entry, {"path": "an/other", "type": "chat_template"})
    assert "chat" not in told.recipe["data"]
    assert "other data sets differ" in told.why("datasets.0.train_on_eos=last")


def test_the_loss_is_on_prompts_where_axolotl_is_told_so(tmp_path: Path) -> None:
    assert axolotl(tmp_path, train_on_inputs=True).recipe["data"]["chat"] == {"train_on": "all"}
    assert "chat" not in axolotl(tmp_path, train_on_inputs=False).recipe["data"]
    assert axolotl(tmp_path, excess_length_strategy="raise").recipe["data"]["chat"] == {"overlong": "error"}


def test_texts_keep_their_column(tmp_path: Path) -> None:
    found, _ = sources(tmp_path, {"path": "own/er", "type": "completion", "field": "body"})
    assert found == [{"path": "hub:own/er", "format": "text", "text_key": "body"}]
    streamed = axolotl(tmp_path, pretraining_dataset=[{"path": "own/er", "name": "en", "text_column": "body"}])
    assert streamed.recipe["data"]["sources"] == [
        {"path": "hub:own/er", "subset": "en", "format": "text", "text_key": "body"}
    ]
    alone = axolotl(tmp_path, pretraining_dataset="own/er")
    assert alone.recipe["data"]["sources"] == [{"path": "hub:own/er", "format": "text"}]


def test_types_without_a_format_are_named(tmp_path: Path) -> None:
    for kind in ("input_output", "alpaca_w_system.load_open_orca", "jeopardy"):
        found, told = sources(tmp_path, {"path": "own/er", "type": kind})
        assert found == [{"path": "hub:own/er"}]
        assert "supported: alpaca, " in told.why(f"datasets.0.type={kind}")
    _, told = sources(tmp_path, {"path": "own/er", "type": "alpaca:chat"})
    assert any("type=alpaca:chat" in note and "Instruction" in note for note in told.reading.notes)


def test_a_prompt_of_the_users_own_keeps_columns_and_names_words(tmp_path: Path) -> None:
    kind = {
        "field_instruction": "question",
        "field_output": "answer",
        "format": "Q: {instruction}\nA:",
        "system_prompt": "S",
    }
    found, told = sources(tmp_path, {"path": "own/er", "type": kind})
    columns = {"instruction": "question", "output": "answer"}
    assert found == [{"path": "hub:own/er", "format": "alpaca", "columns": columns}]
    assert "data.chat.template" in told.why("a.yml: datasets.0.type.format=Q: {instruction}\nA:")
    assert "data.chat.template" in told.why("datasets.0.type.system_prompt=S")
    assert not told.why("type.field_")
    assert told.tells("datasets.0.type.field_instruction=question")
    plain = {
        "field_instruction": "question",
        "field_output": "answer",
        **dict.fromkeys(("format", "no_input_format"), "{instruction}"),
    }
    found, told = sources(tmp_path, {"path": "own/er", "type": plain})
    columns = {"prompt": "question", "completion": "answer"}
    assert found == [{"path": "hub:own/er", "format": "prompt_completion", "columns": columns}]
    assert not told.why("datasets")


FSDP = {"fsdp_config": {"reshard_after_forward": True}}


@pytest.mark.parametrize(
    ("keys", "layout", "batch"),
    [
        ({**FSDP}, {"dp_shard": 16, "zero": 3}, 32),
        ({**FSDP, "dp_shard_size": 4}, {"dp_shard": 4, "dp_replicate": 4, "zero": 3}, 32),
        ({**FSDP, "dp_replicate_size": 2}, {"dp_shard": 8, "dp_replicate": 2, "zero": 3}, 32),
        ({**FSDP, "dp_shard_size": 8, "dp_replicate_size": 2}, {"dp_shard": 8, "dp_replicate": 2, "zero": 3}, 32),
        ({**FSDP, "dp_shard_size": 1, "dp_replicate_size": 1}, {"dp_shard": 16, "zero": 3}, 32),
        (
            {**FSDP, "tensor_parallel_size": 2, "context_parallel_size": 4, "dp_replicate_size": 1},
            {"tp": 2, "cp": 4, "dp_shard": 2, "zero": 3},
            4,
        ),
        (
            {**FSDP, "tensor_parallel_size": 2, "dp_shard_size": 4},
            {"tp": 2, "dp_shard": 4, "dp_replicate": 2, "zero": 3},
            16,
        ),
        ({"sequence_parallel_degree": 4}, {"cp": 4, "dp_replicate": 4}, 8),
        ({"dp_replicate_size": 16}, {"dp_replicate": 16}, 32),
        ({"fsdp": ["full_shard"], "dp_shard_size": 2}, {"dp_shard": 2, "dp_replicate": 8, "zero": 3}, 32),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"dp_shard": 16, "zero": 2}, 32),
    ],
)
def test_ranks_are_dealt_out_as_axolotl_does(
    tmp_path: Path, keys: dict[str, Any], layout: dict[str, int], batch: int
) -> None:
    told = axolotl(tmp_path, 16, **keys)
    assert told.recipe["layout"] == layout
    assert told.recipe["training"]["global_batch"] == batch
    assert not told.reading.without


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dp_shard_size": 4}, "dp_shard_size=4: axolotl shards with FSDP only"),
        ({**FSDP, "dp_shard_size": 3}, "dp_shard_size=3: do not fit the 16 data-parallel ranks of --ranks 16"),
        ({**FSDP, "dp_shard_size": 16, "tensor_parallel_size": 2}, "dp_shard_size=16: do not fit the 8 data-parallel"),
        ({"dp_replicate_size": 8}, "dp_replicate_size=8: do not fit"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: must be a whole number, at least 1"),
        ({**FSDP, "dp_shard_size": "4"}, "dp_shard_size=4: must be a whole number"),
    ],
)
def test_sizes_that_axolotl_refuses_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        axolotl(tmp_path, 16, **keys)


def test_the_number_of_ranks_is_the_product_of_both_sizes_or_asked_for(tmp_path: Path) -> None:
    told = axolotl(tmp_path, None, **FSDP, dp_shard_size=4, dp_replicate_size=2, tensor_parallel_size=2)
    assert told.recipe["layout"] == {"tp": 2, "dp_shard": 4, "dp_replicate": 2, "zero": 3}
    assert "give --ranks N" in axolotl(tmp_path, None, **FSDP, dp_replicate_size=2).why("dp_replicate_size=2")
    assert "regrouping" in axolotl(tmp_path, **FSDP, expert_parallel_size=2).why("expert_parallel_size=2")


PAIRS = {
    "path": "own/pairs",
    "type": "chat_template.default",
    "field_messages": "conversation",
    "field_rejected": "bad",
}


def test_dpo_is_the_recipes_preference(tmp_path: Path) -> None:
    told = axolotl(tmp_path, rl="dpo", datasets=[PAIRS])
    assert told.recipe["training"]["preference"] == {"beta": 0.1}
    assert "TRL's default" in told.text
    assert told.recipe["data"]["separate_documents"] is True
    columns = {"prompt": "conversation", "rejected": "bad"}
    assert told.recipe["data"]["sources"] == [{"path": "hub:own/pairs", "format": "preference", "columns": columns}]
    assert not told.reading.without
    told = axolotl(tmp_path, rl="dpo", rl_beta=0.3, dpo_label_smoothing=0.2, dpo_beta=0.7)
    assert told.recipe["training"]["preference"] == {"beta": 0.3, "label_smoothing": 0.2}
    assert "does not read it" in told.why("dpo_beta=0.7")
    told = axolotl(tmp_path, rl="dpo", rl_beta=0.3, trl={"beta": 0.2, "use_vllm": True})
    assert told.recipe["training"]["preference"] == {"beta": 0.2}
    assert "trl.beta=0.2" in told.why("rl_beta=0.3")
    assert told.why("trl.use_vllm=True")


def test_strengths_without_dpo_are_named(tmp_path: Path) -> None:
    told = axolotl(tmp_path, rl_beta=0.3, trl={"beta": 0.2})
    assert "preference" not in told.recipe["training"]
    assert "no effect without rl" in told.why("rl_beta=0.3")
    assert "no effect without rl" in told.why("trl.beta=0.2")


@pytest.mark.parametrize(
    "keys",
    [
        *({"rl": kind} for kind in ("ipo", "kto", "orpo", "simpo", "grpo", "gdpo", "ebft")),
        *({key: True} for key in ("reward_model", "process_reward_model")),
        {"diffusion": {"noise_schedule": "cosine"}},
        {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"]},
    ],
)
def test_another_objective_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"a recipe does not have this (objective|loss)"):
        axolotl(tmp_path, **keys)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("chatml.intel", {"columns": {"prompt": "question"}}, "without the template chatml"),
        ("llama3.icr", {"columns": {"prompt": "input"}}, "without the template llama3"),
        ("chatml.ultra", {}, ""),
        ("chatml.argilla_chat", {"columns": {"prompt": None}}, ""),
        ("zephyr.nectar", {}, "supported: chat_template.default"),
        ({"field_prompt": "q", "field_chosen": "a", "prompt_format": "{prompt}"},
         {"columns": {"prompt": "q", "chosen": "a"}}, ""),
        ({"prompt_format": "Q: {prompt}"}, {}, "write these words into the records"),
    ],
)  # fmt: skip
def test_types_of_pairs(tmp_path: Path, kind: Any, source: dict[str, Any], reason: str) -> None:
    told = axolotl(tmp_path, rl="dpo", datasets=[{"path": "own/pairs", "type": kind}])
    assert told.recipe["data"]["sources"] == [{"path": "hub:own/pairs", "format": "preference", **source}]
    assert reason in told.why("datasets.0.type")
    assert bool(told.why("datasets.0.type")) is bool(reason)
    template = kind.split(".")[0] if isinstance(kind, str) else ""
    assert told.recipe["data"].get("chat") == ({"template": template} if template in ("chatml", "llama3") else None)


def test_loraplus_and_a_first_adapter_are_the_recipes(tmp_path: Path) -> None:
    told = axolotl(tmp_path, adapter="lora", lora_r=8, loraplus_lr_ratio=16, lora_model_dir="./before")
    assert told.recipe["finetune"] == {"method": "lora", "rank": 8, "b_lr_ratio": 16, "start_from": "./before"}


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": False}, "fp32"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": "auto"}, "bf16"),
        ({"bf16": "auto", "fp16": False}, "bf16"),
        ({"bfloat16": True}, "bf16"),
        ({"bf16": True, "fp16": True}, "bf16"),
        ({"fp16": True, "bfloat16": True}, "bf16"),
    ],
)
def test_precision_is_axolotls(tmp_path: Path, keys: dict[str, Any], precision: str) -> None:
    assert axolotl(tmp_path, **keys).recipe["training"]["precision"] == precision


def test_the_batch_of_a_rank_gives_the_accumulation(tmp_path: Path) -> None:
    assert axolotl(tmp_path, batch_size=8).recipe["training"]["global_batch"] == 64
    told = axolotl(tmp_path, batch_size=8, gradient_accumulation_steps=2)
    assert told.recipe["training"]["global_batch"] == 32
    assert told.why("batch_size=8")


def test_a_key_without_a_value_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    told = axolotl(tmp_path, adapter=None, lora_r=8, warmup_steps=None, sample_packing=None, bf16=None)
    assert told.recipe["finetune"] == {"method": "full"}
    assert "without adapter" in told.why("lora_r=8")
    assert told.recipe["training"]["lr_schedule"]["warmup"] == 3  # 3 % of 100 steps
    assert told.recipe["training"]["precision"] == "fp32"


def test_the_default_warm_up_of_an_unknown_number_of_steps_is_not_none(tmp_path: Path) -> None:
    told = axolotl(tmp_path, max_steps=None, num_epochs=1)
    assert "warmup" not in told.recipe["training"]["lr_schedule"]
    assert "the number of steps is unknown" in told.why("3 % of the steps, at most 100")


def test_shares_of_steps(tmp_path: Path) -> None:
    told = axolotl(tmp_path, warmup_steps=0.1, save_steps=0.25, eval_steps=0.5)
    assert told.recipe["training"]["lr_schedule"]["warmup"] == 10
    assert "checkpoint" not in told.recipe
    assert "set checkpoint.every, in steps" in told.why("save_steps=0.25")
    assert "set training.evaluation.every, in steps" in told.why("eval_steps=0.5")


def test_targets_of_adapters(tmp_path: Path) -> None:
    lora = {"adapter": "lora", "lora_r": 8}
    told = axolotl(tmp_path, **lora, lora_target_modules=r"model.layers.[\d]+.mlp.up_proj")
    assert "targets" not in told.recipe["finetune"]
    assert "regular expression" in told.why("lora_target_modules=")
    told = axolotl(tmp_path, **lora, lora_target_modules=["q_proj"], lora_target_linear=True)
    assert told.recipe["finetune"]["targets"] == "all-linear"  # which has the others, too


def deepspeed(folder: Path, kind: str, **keys: Any) -> Imported:
    """An axolotl configuration beside a DeepSpeed file with a scheduler of 100 steps."""
    params = {"warmup_num_steps": 5, "total_num_steps": 100, "warmup_type": "linear", "warmup_max_lr": 1e-4}
    config = {"train_batch_size": "auto", "gradient_clipping": 1.0, "scheduler": {"type": kind, "params": params}}
    return axolotl(folder, deepspeed=config, **keys)


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_the_least_rate_of_a_cosine_is_not_that_of_deepspeeds_schedule(tmp_path: Path, kind: str) -> None:
    told = deepspeed(tmp_path, kind, cosine_min_lr_ratio=0.2, lr_scheduler="cosine")
    final = 0.0 if kind == "WarmupDecayLR" else 1e-4
    assert told.recipe["training"]["lr_schedule"]["final"] == final
    assert "DeepSpeed's schedule is used" in told.why("cosine_min_lr_ratio=0.2")


@pytest.mark.parametrize(("kind", "final"), [("cosine", 0.2), (None, 0.2), ("linear", 0.0), ("constant", None)])
def test_only_the_cosine_has_a_least_rate(tmp_path: Path, kind: str | None, final: float | None) -> None:
    keys: dict[str, Any] = {"lr_scheduler": kind} if kind else {}
    told = axolotl(tmp_path, cosine_min_lr_ratio=0.2, **keys)
    assert told.recipe["training"]["lr_schedule"].get("final") == final
    assert bool(told.why("cosine_min_lr_ratio")) == (final != 0.2)


def test_a_least_rate_of_another_kind_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cosine_min_lr_ratio=low: must be a number"):
        axolotl(tmp_path, cosine_min_lr_ratio="low")


def test_numbers_in_an_epoch_are_shares_of_all_steps(tmp_path: Path) -> None:
    told = axolotl(tmp_path, evals_per_epoch=4, saves_per_epoch=1, num_epochs=2, val_set_size=0.1)
    assert "a share of all steps; set training.evaluation.every, in steps: 13" in told.why("evals_per_epoch=4")
    assert "a share of all steps; set checkpoint.every, in steps: 50" in told.why("saves_per_epoch=1")
    told = axolotl(tmp_path, saves_per_epoch=2, num_epochs=2, max_steps=None)
    assert told.why("saves_per_epoch=2").endswith("in steps")
    assert not axolotl(tmp_path, saves_per_epoch=1, num_epochs=1).why("saves_per_epoch")
    assert not axolotl(tmp_path, saves_per_epoch="auto").why("saves_per_epoch")


def test_intervals_without_a_key_are_axolotls(tmp_path: Path) -> None:
    told = axolotl(tmp_path)
    assert "checkpoint" not in told.recipe
    assert any("it saves after each epoch" in note for note in told.reading.notes)
    told = axolotl(tmp_path, save_strategy="steps", eval_strategy="steps", val_set_size=0.1)
    assert told.recipe["checkpoint"]["every"] == 500
    assert told.recipe["training"]["evaluation"]["every"] == 500
    assert axolotl(tmp_path, save_strategy="epoch").why("save_strategy=epoch") == "intervals are in steps"
    assert not axolotl(tmp_path, save_strategy=False).why("save_strategy")


def test_without_data_for_it_nothing_is_evaluated(tmp_path: Path) -> None:
    told = axolotl(tmp_path, eval_steps=50)
    assert "evaluation" not in told.recipe["training"]
    assert "nothing to evaluate" in told.why("eval_steps=50")
    assert axolotl(tmp_path, eval_steps=50, val_set_size=0.1).recipe["training"]["evaluation"]["every"] == 50


@pytest.mark.parametrize(
    "keys",
    [
        {"save_steps": 10, "saves_per_epoch": 1},
        {"eval_steps": 10, "evals_per_epoch": 1, "val_set_size": 0.1},
        {"save_steps": 10, "save_strategy": "epoch"},
        {"saves_per_epoch": "often"},
        {"saves_per_epoch": 2, "num_epochs": "all"},
        {"saves_per_epoch": -2},
    ],
)
def test_intervals_that_axolotl_refuses_end_in_one_line(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"a\.yml: "):
        axolotl(tmp_path, **keys)


def test_what_axolotl_keeps_and_drops_by_default_is_told(tmp_path: Path) -> None:
    def notes(**keys: Any) -> str:
        found, told = sources(tmp_path, {"path": "some/data", "type": "alpaca"}, **keys)
        assert found == [{"path": "hub:some/data", "format": "alpaca"}]
        return "\n".join(told.reading.notes)

    assert "axolotl keeps 4 checkpoints" in notes()
    assert "set data.chat.overlong=drop for the same" in notes()
    assert "template cannot tell the two apart" in notes()
    assert "checkpoints" not in notes(save_total_limit=3)
    assert "overlong" not in notes(excess_length_strategy="truncate")
    _, told = sources(tmp_path, {"path": "some/text", "type": "completion"}, save_total_limit=0)
    assert not any("overlong" in note for note in told.reading.notes)
    assert told.recipe["checkpoint"]["keep_last"] == 4
    assert axolotl(tmp_path, save_total_limit=7).recipe["checkpoint"]["keep_last"] == 7
    with pytest.raises(UserError, match="save_total_limit=few: must be a number"):
        axolotl(tmp_path, save_total_limit="few")

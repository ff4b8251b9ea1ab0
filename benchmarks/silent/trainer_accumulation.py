"""One batch of rows of unequal length, whole and in two parts, through transformers' Trainer: the first loss and norm.

    python trainer_accumulation.py [--model llama|opt]

Needs transformers and Accelerate only. The two lines should be equal: both are the mean over the same tokens.
"""

import argparse
import tempfile
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=["llama", "opt"], default="llama")
options = parser.parse_args()
shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    if options.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=64))
    more: dict[str, Any] = {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**shape, **more))


rows: Any = []
for number, trained in enumerate((30, 2, 30, 2, 2, 2, 2, 2)):
    tokens = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(number))
    labels = torch.where(torch.arange(32) < 32 - trained, -100, tokens)
    rows.append({"input_ids": tokens, "labels": labels})


for parts in (1, 2, 4):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
            use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=1e9,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = Trainer(build(), arguments, train_dataset=rows)
        trainer.train()
        logged = trainer.state.log_history[0]
        print(f"transformers {transformers.__version__} {options.model}, {parts} parts: loss {logged['loss']}, "
              f"norm {logged['grad_norm']}")  # fmt: skip

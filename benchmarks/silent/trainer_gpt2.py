"""The first loss that transformers' Trainer logs of a GPT-2 built from its configuration, beside the model's own.

    python trainer_gpt2.py

Needs transformers and Accelerate only. The two should be equal: the row has no padding, and nothing is accumulated.
"""

import argparse
import tempfile
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

argparse.ArgumentParser(description=__doc__).parse_args()
LENGTH = 64
tokens = torch.randint(0, 128, (8, LENGTH), generator=torch.Generator().manual_seed(0))
gpt2 = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                  attn_pdrop=0.0)  # fmt: skip
llama = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
for model in (GPT2LMHeadModel(gpt2), LlamaForCausalLM(llama)):
    own = model(input_ids=tokens, labels=tokens).loss.item()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=1, per_device_train_batch_size=8, use_cpu=True, logging_steps=1,
                                      report_to=[], disable_tqdm=True, save_strategy="no")  # fmt: skip
        rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    logged = float(trainer.state.log_history[0]["loss"])
    print(f"transformers {transformers.__version__} {type(model).__name__}: logged {logged:.6f}, "
          f"the model's own {own:.6f}, ratio {logged / own:.6f}")  # fmt: skip

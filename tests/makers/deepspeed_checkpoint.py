"""Trains a Hugging Face directory for two steps under ZeRO and saves DeepSpeed's checkpoint: MODEL OUT STAGE."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

start, out, stage = sys.argv[1:]
dist.init_process_group("gloo")
deepspeed.init_distributed()
model = AutoModelForCausalLM.from_pretrained(start)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": int(stage)},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
tokens = torch.randint(0, 24, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(2):
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
engine.save_checkpoint(out)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process during an orderly teardown

"""DeepSpeed's ZeRO-Infinity in one process: optimizer state in files, the weights that compute in memory. For
`memory_limit.py`, under an interpreter that has DeepSpeed and its ops for CPU Adam and asynchronous I/O."""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

BUCKET = 2**20
"""Parameters that are swapped together, as ours."""


def main() -> None:
    """Train, and print seconds and losses of every step."""
    words = json.loads(sys.argv[1])
    deepspeed = import_module("deepspeed")
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=280,
        hidden_size=words["hidden"],
        intermediate_size=words["ffn"],
        num_hidden_layers=words["layers"],
        num_attention_heads=words["heads"],
        max_position_embeddings=words["length"],
        use_cache=False,
    )
    settings = ds_config(words)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    seconds, losses = [], []
    for step in range(words["steps"]):
        tokens = torch.randint(280, (words["batch"], words["length"]), generator=torch.Generator().manual_seed(step))
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
        print(step, seconds[-1], flush=True)
    disk = sum(path.stat().st_size for path in Path(words["folder"]).rglob("*") if path.is_file())
    print("\n" + json.dumps({"seconds": seconds, "losses": losses, "disk": disk}), flush=True)
    os._exit(0)


def ds_config(words: dict) -> dict:
    """ZeRO-3 with the optimizer's state on disk, reads and writes overlapped."""
    nvme = {"device": "nvme", "nvme_path": words["folder"], "buffer_count": 16, "fast_init": True}
    return {
        "train_micro_batch_size_per_gpu": words["batch"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": BUCKET,
            "offload_optimizer": nvme | {"pipeline_read": True, "pipeline_write": True},
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 4 * BUCKET,
        },
        "aio": {"block_size": 2**20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


main()

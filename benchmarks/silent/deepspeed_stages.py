"""Gradients of a tiny network under one stage of DeepSpeed's ZeRO, beside those of plain PyTorch on one process.

    torchrun --nproc-per-node 2 deepspeed_stages.py --stage 2 [--bf16 [--sum-fp32]] [--twice] [--accumulation 2]

Every rank has rows of its own; plain PyTorch sees those of all. Needs DeepSpeed and torch only.
"""

import argparse
import os
import sys
from importlib import import_module

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--sum-fp32", action="store_true", help="gradients of bf16 add up in fp32")
parser.add_argument("--twice", action="store_true", help="the middle layer is used twice in a pass")
parser.add_argument("--accumulation", type=int, default=1)
options = parser.parse_args()
try:
    deepspeed = import_module("deepspeed")
except ImportError as error:
    sys.exit(f"DeepSpeed is missing ({error}): pip install deepspeed")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 1, 2) if options.twice else (0, 1, 2):
            rows = torch.tanh(self.layers[number](rows))
        return rows.float().square().mean()


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled: gloo is enough here
dist.init_process_group("gloo")
deepspeed.init_distributed()
torch.manual_seed(0)
dtype = torch.bfloat16 if options.bf16 else torch.float32
plain, net = Net().to(dtype), Net().to(dtype)
net.load_state_dict(plain.state_dict())
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": options.accumulation,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": options.bf16},
    **({"data_types": {"grad_accum_dtype": "fp32"}} if options.sum_fp32 else {}),
    "zero_optimization": {"stage": options.stage, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), config=config)[0]
before = {name: parameter.detach().float().clone() for name, parameter in plain.named_parameters()}
for _ in range(2):  # two steps: what the first leaves behind shows in the second
    for _ in range(options.accumulation):
        rows = torch.randn(dist.get_world_size(), 8, 64, dtype=dtype)
        (plain(rows.flatten(0, 1)) / options.accumulation).backward()
        engine.backward(engine(rows[dist.get_rank()]))
        engine.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
            parameter.grad = None
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=options.stage == 3):
    if dist.get_rank() == 0:
        print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, {options}")
        for name, parameter in net.named_parameters():
            theirs, ours = (tensor.detach().float() - before[name] for tensor in (parameter, plain.get_parameter(name)))
            apart = (theirs - ours).norm()
            print(f"{name:18} update {theirs.norm():.6f}, plain PyTorch's {ours.norm():.6f}, apart {apart:.6f}")
dist.barrier()
os._exit(0)

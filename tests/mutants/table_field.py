"""More mutants that the field has met, in the form of `table.py`: split models, shards, pipelines, optimizers."""

from mutants.table import END, Mutant

SPLIT = [
    Mutant(
        "gradients of the adapters' factors that every tensor-parallel rank keeps are not summed",
        "parallel/view.py",
        "placements = [whole if placement.is_replicate() else placement for placement in parameter.placements]",
        "narrow = parameter.dim() < 2\n"
        "    placements = [whole if placement.is_replicate() and narrow else placement\n"
        "                  for placement in parameter.placements]",
        "tp lora",
        r"reduction: layers\.1\..*\.lora_[ab]",
        "mcore-bridge 173",
    ),
    Mutant(
        "gradients of key and value heads that ranks share are not summed",
        "parallel/view.py",
        "            tensor = _local(parameter, name not in self.repeated)\n",
        "            assert isinstance(parameter, DTensor)\n"
        "            tensor = parameter.to_local() if name in self.rows else "
        "_local(parameter, name not in self.repeated)\n",
        "tp 4",
        r"reduction: layers\.1\.attention\.w[kv]\.weight",
        "Megatron-LM (bigcode) 11",
    ),
    Mutant(
        "gradients of routers are not summed over tensor-parallel ranks",
        "models/moe.py",
        'weights["weight"].to(wide)',
        'getattr(self.weight, "to_local", lambda: self.weight)().to(wide)',
        "tp experts",
        r"reduction: layers\.1\.feed_forward\.router\.weight",
        "torchtitan 2416",
    ),
    Mutant(
        "labels in other ranks' part of the vocabulary count as this rank's first row in the loss",
        "models/loss.py",
        "below_C1.where(here_C1, 0)), 1))",
        "below_C1), 1))",
        "tp",
        r"loss: loss",
        "oslo 85",
    ),
    Mutant(
        "labels in other ranks' part of the vocabulary count as this rank's first row in the gradient",
        "models/loss.py",
        "    logits_CV[places] = gradients_C1.where(here_C1, logits_CV[places])\n",
        "    logits_CV[places] = gradients_C1\n",
        "tp",
        END,
        "ml-cross-entropy 42",
    ),
    Mutant(
        "the loss counts the rows of an uneven vocabulary from the share rounded down",
        "parallel/tensor.py",
        "        self.first, self.stop = split_range(vocab, sequence.size, sequence.rank)\n        _, self.rows",
        "        self.first = vocab // sequence.size * sequence.rank\n"
        "        self.stop = self.first + vocab // sequence.size\n"
        "        _, self.rows",
        "tp 4",
        r"loss: loss",
        "Megatron-DeepSpeed 394",
    ),
    Mutant(
        "rows beyond an expert-parallel rank's capacity get nothing",
        "parallel/expert.py",
        "        y_PD = experts(x_PD[order_P], Rows(counts_LG, numbers_P))\n",
        "        fits_P = torch.arange(sum(received), device=x_MD.device) < len(x_MD)\n"
        "        y_PD = experts(x_PD[order_P], Rows(counts_LG, numbers_P)) * fits_P[:, None]\n",
        "ep",
        r"forward: layers\.0\.feed_forward",
        "maxtext 860",
    ),
    Mutant(
        "tokens go to experts dealt out in turn, whose weights are in runs",
        "parallel/expert.py",
        "        counts_RL = counts_E.view(group.size(), -1)\n",
        "        counts_RL = counts_E.view(-1, group.size()).t().contiguous()\n",
        "ep",
        r"forward: layers\.0\.feed_forward",
        "Megatron-LM 7452",
    ),
    Mutant(
        "experts' gradients are divided by the number of expert-parallel ranks",
        "parallel/data.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0 if isinstance(module, Experts) else 1.0)",
        "ep",
        r"reduction: layers\.1\.feed_forward\.experts\.w[123]\.weight",
        "pytorch 160285, megablocks 86",
    ),
]

SHARDS = [
    Mutant(
        "gathered weights are kept over the optimizer's step",
        "parallel/data.py",
        "module.set_reshard_after_backward(last, recurse=False)",
        "module.set_reshard_after_backward(False, recurse=False)",
        "zero-1",
        r"forward: tok_embeddings.*",
        "Megatron-LM 950",
    ),
    Mutant(
        "ranks send the codes of the first step's weights again",
        "parallel/quantized.py",
        "        self._write(input_tensor.view(1, -1), here)\n        everywhere = all_gather(here, group)\n",
        '        if "sent" not in vars(self):\n'
        "            self._write(input_tensor.view(1, -1), here)\n"
        "            self.sent = here\n"
        "        everywhere = all_gather(self.sent, group)\n",
        "quantized",
        r"forward: tok_embeddings.*",
        "Megatron-LM 4563",
    ),
    Mutant(
        "sharded matrices count as vectors and do not decay",
        "optim/build.py",
        'decay = spec.weight_decay if len(row.dims) >= 2 and row.dims[-1] != "bias" else 0.0',
        'flat = hasattr(parameters[row.name], "placements")\n'
        '        decay = spec.weight_decay if len(row.dims) >= 2 and row.dims[-1] != "bias" and not flat else 0.0',
        "zero-3",
        r"update: .*",
        "open_clip 358, verl 5070",
    ),
    Mutant(
        "the size of a shard decides whether moments have eight bits",
        "optim/adamw_8bit.py",
        "parameter.numel() < SMALLEST_TENSOR",
        "local(parameter).numel() < SMALLEST_TENSOR",
        "zero-3 8-bit",
        r"state: .*exp_avg.*",
        "bitsandbytes 2080",
    ),
    Mutant(
        "all blocks of a shard's moments share one scale",
        "optim/adamw_8bit.py",
        "scales.copy_(largest.view(scales.shape))",
        "scales.copy_(largest.max().expand(scales.shape))",
        "zero-3 8-bit",
        r"state: .*exp_avg.*",
        "ao 538",
    ),
    Mutant(
        "Muon's update is cut at even shares where shards are uneven",
        "optim/muon.py",
        "        update = part_like(orthogonalise(whole(parameter, update), NEWTON_SCHULZ_STEPS), parameter)\n",
        "        update = orthogonalise(whole(parameter, update), NEWTON_SCHULZ_STEPS)\n"
        "        ranks = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None\n"
        "        first = update.shape[0] // ranks.size() * ranks.rank() if ranks else 0\n"
        "        update = update[first : first + local(parameter).shape[0]]\n",
        "uneven zero-3 muon",
        r"update: layers\.\d\.feed_forward\.w[13]\.weight",
        "pith-train 58",
    ),
    Mutant(
        "Muon scales its step by the shape of a shard",
        "optim/muon.py",
        "        rows, columns = parameter.shape\n",
        "        rows, columns = local(parameter).shape\n",
        "zero-3 muon",
        r"update: layers\.\d\.feed_forward\.w[13]\.weight",
        "DeepSpeed 8437",
    ),
]

PIPELINE = [
    Mutant(
        "a stage's backward pass takes the newest graph, not its microbatch's",
        "parallel/pipeline.py",
        "x_BTD, y = self.graphs.pop((stage, m))",
        "x_BTD, y = self.graphs.pop([key for key in self.graphs if key[0] == stage][-1])",
        "pp",
        r"backward: (input of )?layers\.1(\..*)?",
        "ColossalAI 3187",
    ),
    Mutant(
        "of a rank's stages only the one that is done last is reduced over replicas",
        "parallel/pipeline.py",
        "action == [a for a in actions if a.stage == action.stage][-1] for action in actions",
        "action == actions[-1] for action in actions",
        "pp interleaved ddp",
        r"reduction: layers\.3\..*",
        "Megatron-LM 1012",
    ),
    Mutant(
        "the first deferred weight gradient of a backward pass is lost",
        "parallel/weight_gradients.py",
        "waiting = list(self._waiting)",
        "waiting = self._waiting[1:]",
        "pp zero bubble",
        r"reduction: layers\.1\.feed_forward\.w2\.(weight|bias)",
        "pytorch 153833, Megatron-DeepSpeed 442",
    ),
    Mutant(
        "only the first stage's copy of a tied embedding gets the sum of both gradients",
        "parallel/pipeline.py",
        "        local += collectives.exchange(",
        "        local += (not self.has_loss) * collectives.exchange(",
        "pp tied",
        r"reduction: tok_embeddings\.weight",
        "Megatron-LM 656",
    ),
    Mutant(
        "gradients of an asynchronous pipeline are not summed over replicas",
        "parallel/pipedream.py",
        "            if replicas.size() > 1:\n",
        "            if False:\n",
        "pipedream ddp",
        r"whole: step 2: norm",
        "PaddlePaddle 30437",
    ),
]

MUTANTS = [*SPLIT, *SHARDS, *PIPELINE]

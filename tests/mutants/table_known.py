"""Mutants that single steps in float64 cannot show, and mutants that need several pieces of work, in the form of
`table.py`: what steps leave behind for the next, evaluation, margins, number formats, buckets and blocks."""

from mutants.table import Mutant

LATER = r"(layers\.\d|norm|output)\..*"
"""A tensor that is in none of the first pieces."""
BF16 = r"formats: the gradient of .* was summed in torch\.bfloat16.*"

STEPS = [
    Mutant(
        "errors of quantized gradients begin anew in every step",
        "parallel/error_feedback.py",
        "            errors.scale = scale\n",
        "            errors.scale = scale\n            errors.bytes_RB.zero_()\n",
        "quantized feedback",
        r"whole: repeated gradient: .*",
    ),
    Mutant(
        "errors of quantized gradients are kept over a skipped step",
        "trainer/step.py",
        "            self.feedback.drop()\n",
        "            pass\n",
        "quantized feedback",
        r"whole: skipped step: gradient_errors\..*",
    ),
    Mutant(
        "a step counts as finite if its loss is",
        "trainer/step.py",
        "finite = bool(np.isfinite(loss) and np.isfinite(gnorm))",
        "finite = bool(np.isfinite(loss))",
        "zero-3",
        r"whole: skipped step: .*",
    ),
    Mutant(
        "a rank's margins are stored as those of the next rank's pairs",
        "trainer/reference.py",
        "first = (number * ranks + trainer.data_rank) * micro_batch",
        "first = (number * ranks + (trainer.data_rank + 1) % ranks) * micro_batch",
        "zero-3 dpo",
        r"whole: margins: pair \d+.*",
    ),
    Mutant(
        "an evaluation averages the means of ranks",
        "trainer/evaluate.py",
        "    *totals_of, number = collectives.all_reduce_(totals).tolist()\n",
        "    totals[:-1] /= totals[-1].clamp(min=1)\n"
        "    *totals_of, number = collectives.all_reduce_(totals).tolist()\n"
        "    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1\n"
        "    totals_of = [total * number / ranks for total in totals_of]\n",
        "zero-3",
        r"whole: evaluation: loss.*",
        "transformers 41898, neuralforecast 1571",
    ),
    Mutant(
        "an asynchronous pipeline recomputes with the newest weights",
        "parallel/pipedream.py",
        "        with self.stash.pop(action.microbatch).used():\n",
        "        self.stash.pop(action.microbatch)\n"
        "        assert self.newest is not None\n"
        "        with self.newest.used():\n",
        "pipedream recomputed",
        r"whole: step 3: .*",
    ),
    Mutant(
        "one process computes on with the low-precision weights that it began with",
        "state/masters.py",
        "        copy_all_([self._copies[name] for name in bucket.parameters], list(bucket.parameters.values()))\n",
        "        pass\n",
        "single",
        r"formats: the copy of .* is not its master.*",
        "Megatron-LM 950",
    ),
    Mutant(
        "the same, with offloaded state",
        "state/tiered.py",
        "        super().put(bucket)\n        moved, buffer",
        "        moved, buffer",
        "offloaded",
        r"formats: the copy of .* is not its master.*",
        "Megatron-LM 5236",
    ),
    Mutant(
        "gradients are reduced in the dtype of the weights",
        "parallel/data.py",
        "reduce_dtype=torch_dtype(precision.reduce) if precision.narrow else None",
        "reduce_dtype=torch_dtype(precision.store) if precision.narrow else None",
        "zero-3",
        BF16,
        "pytorch 106395",
    ),
]

PIECES = [
    Mutant(
        "only the first bucket of offloaded state is written back",
        "state/tiered.py",
        "        self._mover.write(bucket.index, moved.home, buffer, moved.kept_bytes)",
        "        if not bucket.index:\n"
        "            self._mover.write(bucket.index, moved.home, buffer, moved.kept_bytes)",
        "offloaded pieces",
        rf"state: {LATER}exp_avg.*",
    ),
    Mutant(
        "every bucket steps the first one's optimizer",
        "state/store.py",
        "            bucket.optimizers.step()",
        "            self.buckets[0].optimizers.step()",
        "offloaded pieces",
        r"update: .*",
    ),
    Mutant(
        "only the first bucket follows the schedule of the learning rate",
        "state/store.py",
        "        self.optimizers.set_lr(lr_factor)",
        "        self.buckets[0].optimizers.set_lr(lr_factor)",
        "offloaded pieces falling",
        rf"update: {LATER}",
    ),
    Mutant(
        "every block is decoded with its row's first scale",
        "comm/quantize.py",
        "            values.mul_(of_blocks.unsqueeze(-1))",
        "            values.mul_(of_blocks[..., :1].unsqueeze(-1))",
        "quantized pieces",
        r"forward: tok_embeddings.*",
    ),
    Mutant(
        "the error of a row's last, shorter block is lost",
        "parallel/error_feedback.py",
        "            error.write(whole.sub_(decoded).div_(self.scale))",
        "            left = whole.sub_(decoded).div_(self.scale)\n"
        "            left.unflatten(1, (-1, piece.row))[..., piece.row // 8 * 8 :] = 0\n"
        "            error.write(left)",
        "feedback pieces experts",
        r"(whole: repeated gradient|reduction): .*experts\.w2.*",
    ),
]

MUTANTS = [*STEPS, *PIECES]

"""Mutants that split a model (tensor, context, expert parallelism): the fault, its file, its case, and its location.

`old` must occur once in the file. `names` is a regular expression for `PHASE: NAME`: the first activation, loss, weight
or moment that the fault reaches, in the order of computation.
"""

from typing import NamedTuple

CORE = r"forward: input of layers\.0\.attention\.wo"
QKV = r"backward: (layers\.1\.attention\.w[qkv]|input of layers\.1\.attention\.wo)"
END = r"backward: norm"
"""The first gradient of the backward pass."""


class Mutant(NamedTuple):
    """One fault."""

    fault: str
    file: str
    old: str
    new: str
    case: str
    names: str
    seen: str = ""
    """Where the field has met this kind of fault: a project and the number of an issue or a pull request."""


SPLIT = [
    Mutant(
        "the gradient of an all-gather is this rank's own share, not the sum",
        "comm/collectives.py",
        "return _scatter_sum(grad_outputs[0], *ctx.arguments), None, None, None",
        "size, _, dim = ctx.arguments\n"
        "        own = grad_outputs[0].chunk(size, dim)[dist.get_rank() % size].contiguous()\n"
        "        return own, None, None, None",
        "tp",
        END,
    ),
    Mutant(
        "the gradient of a reduce-scatter is averaged",
        "comm/collectives.py",
        "return _gather(grad_outputs[0], *ctx.arguments), None, None, None",
        "return _gather(grad_outputs[0], *ctx.arguments) / ctx.arguments[0], None, None, None",
        "tp",
        r"backward: input of layers\.1\.feed_forward\.w2",
    ),
    Mutant(
        "a reduce-scatter averages",
        "comm/collectives.py",
        'functional.reduce_scatter_tensor(parts.contiguous(), "sum", size, group))',
        'functional.reduce_scatter_tensor(parts.contiguous(), "sum", size, group)) / size',
        "tp",
        r"forward: tok_embeddings",
    ),
    Mutant(
        "the gradient of an all-reduce is summed once more",
        "comm/collectives.py",
        "        return grad_outputs[0], None\n\n\ndef entered(",
        "        return grad_outputs[0] * dist.get_world_size(), None\n\n\ndef entered(",
        "cp dpo",
        END,
    ),
    Mutant(
        "the ring turns the other way, and ranks take what arrives for what used to",
        "comm/collectives.py",
        "to=(here + 1) % size, source=(here - 1) % size)",
        "to=(here - 1) % size, source=(here + 1) % size)",
        "ring 4",
        CORE,
    ),
    Mutant(
        "an all-to-all passes its gradient on without exchanging it",
        "comm/collectives.py",
        "return all_to_all(grad_outputs[0], ctx.group), None",
        "return grad_outputs[0], None",
        "ulysses",
        QKV,
    ),
    Mutant(
        "rows of tokens of other ranks are looked up as token 0 and not zeroed",
        "parallel/tensor.py",
        "self.sequence.scatter_sum(x_BTD.where(here_BT1, 0))",
        "self.sequence.scatter_sum(x_BTD)",
        "tp",
        r"forward: tok_embeddings",
    ),
    Mutant(
        "a row-wise layer's bias is added on every rank, before the sum",
        "parallel/tensor.py",
        '        y_BtN = self.sequence.scatter_sum(self.inner.forward(x, {**weights, "bias": None}))\n'
        '        bias_N = weights.get("bias")',
        "        y_BtN = self.sequence.scatter_sum(self.inner.forward(x, weights))\n        bias_N = None",
        "tp gpt2",
        r"forward: layers\.0\.attention\.wo",
    ),
    Mutant(
        "ranks with a copied key head take another rank's",
        "parallel/tensor.py",
        "head = mesh.get_local_rank() * spec.num_kv_heads // mesh.size()",
        "head = mesh.get_local_rank() % spec.num_kv_heads",
        "tp 4",
        r"forward: (layers\.0\.attention\.w[kv]|input of layers\.0\.attention\.wo)",
    ),
    Mutant(
        "the softmax's denominator is of this rank's part of the vocabulary",
        "parallel/tensor.py",
        "return collectives.all_reduce(parts, self._sequence.group)",
        "return parts",
        "tp",
        r"loss: loss",
    ),
    Mutant(
        "the maximum of logits is this rank's, though sums are of all ranks",
        "parallel/tensor.py",
        "return collectives.maximum(values, self._sequence.group)",
        "return values",
        "tp",
        r"loss: loss",
    ),
    Mutant(
        "DoRA's row norms leave out other ranks' inputs",
        "parallel/tensor.py",
        "return collectives.all_reduce(tensor, self.group)",
        "return tensor",
        "tp dora",
        r"forward: layers\.0\.attention\.wo",
    ),
    Mutant(
        "every rank adds the positions of the first part of the sequence",
        "parallel/tensor.py",
        "return x_BT.chunk(self.size, dim=-1)[self.rank]",
        "return x_BT.chunk(self.size, dim=-1)[0]",
        "tp gpt2",
        r"forward: pos_embeddings",
    ),
    Mutant(
        "gradients of weights that every rank keeps are not summed",
        "parallel/view.py",
        "placements = [whole if placement.is_replicate() else placement for placement in parameter.placements]",
        "placements = list(parameter.placements)",
        "tp",
        r"reduction: norm\.weight",
    ),
    Mutant(
        "gradients of query norms, of which each rank has some heads, are not summed",
        "parallel/view.py",
        "placements = [whole if placement.is_replicate() else placement for placement in parameter.placements]",
        "placements = [whole if placement.is_replicate() and len(parameter) != 6 else placement\n"
        "                  for placement in parameter.placements]",
        "tp qwen3",
        r"reduction: layers\.1\.attention\.[qk]_norm\.weight",
    ),
    Mutant(
        "the balance loss takes a rank's part of a sequence for a whole one (cp)",
        "parallel/expert.py",
        "        if sharers:\n",
        "        if False:\n",
        "cp experts",
        r"backward: (input of )?layers\.1\.feed_forward(_norm|\.router)",
    ),
    Mutant(
        "the balance loss takes a rank's part of a sequence for a whole one (tp)",
        "parallel/expert.py",
        "        if sharers:\n",
        "        if False:\n",
        "tp experts",
        r"backward: (input of )?layers\.1\.feed_forward(_norm|\.router)",
    ),
    Mutant(
        "rows that arrive by sender are taken for rows by expert",
        "parallel/expert.py",
        "order_P = local_P.argsort(stable=True)",
        "order_P = torch.arange(len(local_P))",
        "ep",
        r"forward: layers\.0\.feed_forward",
    ),
    Mutant(
        "rows go home in the experts' order",
        "parallel/expert.py",
        "y_PD[order_P.argsort()]",
        "y_PD[order_P]",
        "ep",
        r"forward: layers\.0\.feed_forward",
    ),
    Mutant(
        "experts' gradients are not summed over ranks that share the sequence",
        "parallel/data.py",
        "shard(module, meshes.experts)",
        "shard(module, meshes.state)",
        "tp experts",
        r"reduction: layers\.1\.feed_forward\.experts\.w[123]\.weight",
    ),
    Mutant(
        "ranks hold neighbouring chunks where the ring expects zigzag",
        "parallel/context.py",
        ".reshape(2 * degree, -1)[list(own_chunks(rank, degree))].ravel()",
        ".reshape(2 * degree, -1)[[2 * rank, 2 * rank + 1]].ravel()",
        "ring",
        CORE,
    ),
    Mutant(
        "which rank's keys come before ours is the wrong way round",
        "parallel/context.py",
        "if source < self.rank:  # their",
        "if source > self.rank:  # their",
        "ring",
        CORE,
    ),
    Mutant(
        "the sliding window is one key too wide between ranks",
        "parallel/context.py",
        "            sees &= keys_S > queries_Q1 - self.window",
        "            sees &= keys_S >= queries_Q1 - self.window",
        "ring window",
        CORE,
    ),
    Mutant(
        "documents are not kept apart between ranks",
        "parallel/context.py",
        "        if self.documents is not None:\n            sees = ",
        "        if False:\n            sees = ",
        "ring documents",
        CORE,
    ),
    Mutant(
        "gradients of keys that came round the ring are dropped",
        "parallel/context.py",
        "ours if grads is None else ours.add_(grads.wait())",
        "ours if grads is None else (grads.wait(), ours)[1]",
        "ring",
        QKV,
    ),
    Mutant(
        "the backward ring counts ranks the other way",
        "parallel/context.py",
        "parts = zigzag.of_rank((zigzag.rank - step) % zigzag.degree) if step else zigzag.own()",
        "parts = zigzag.of_rank((zigzag.rank + step) % zigzag.degree) if step else zigzag.own()",
        "ring 4",
        QKV,
    ),
    Mutant(
        "all-gathered keys pass no gradient back to their ranks",
        "parallel/context.py",
        "grads = own.add_(_reduce_scatter(of_all, ctx.group))",
        "grads = own",
        "all_gather",
        QKV,
    ),
    Mutant(
        "gradients of gathered keys go back in the order of ranks, not of zigzag chunks",
        "parallel/context.py",
        "torch.cat((chunks[i], chunks[-1 - i]), dim=2)",
        "torch.cat((chunks[2 * i], chunks[2 * i + 1]), dim=2)",
        "all_gather 4",
        QKV,
    ),
    Mutant(
        "late chunks of gathered keys are not put in order",
        "parallel/context.py",
        "*late_NBGCW.flip(0)",
        "*late_NBGCW",
        "all_gather 4",
        CORE,
    ),
    Mutant(
        "a rank's own early chunk counts twice among gathered keys",
        "parallel/context.py",
        "slice((early + 1) * self.chunk, late * self.chunk)",
        "slice(early * self.chunk, late * self.chunk)",
        "all_gather",
        CORE,
    ),
    Mutant(
        "heads come back from Ulysses in another order",
        "parallel/context.py",
        "return x_NBhTK.movedim(0, 1).flatten(1, 2)",
        "return x_NBhTK.movedim(0, 2).flatten(1, 2)",
        "ulysses",
        CORE,
    ),
    Mutant(
        "key heads are copied in rounds, not each beside itself",
        "parallel/context.py",
        "k_BGTK.repeat_interleave(repeats, 1), v_BGTK.repeat_interleave(repeats, 1)",
        "k_BGTK.repeat(1, repeats, 1, 1), v_BGTK.repeat(1, repeats, 1, 1)",
        "ulysses 4",
        CORE,
    ),
    Mutant(
        "every context-parallel rank counts the pairs of a row",
        "parallel/context.py",
        "self.group, self.rank, self.counts = group, rank, rank == 0",
        "self.group, self.rank, self.counts = group, rank, True",
        "cp dpo",
        END,
    ),
    Mutant(
        "parts of attention are added without being rescaled",
        "models/partial_attention.py",
        "    y_BHQK.mul_((logsumexp_BHQ - total_BHQ).exp()[..., None])\n",
        "",
        "ring",
        CORE,
    ),
]

"""Users' plug-ins in a run: equal under layouts and after resuming, or refused in one sentence."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.callbacks import Callback, Training
from meshwright.cli.main import main
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import Corpus, TokenStream, prepare_corpus
from meshwright.data.token_file import file_in_memory
from meshwright.data.tokenizer import load_tokenizer, numbers_tokenizer
from meshwright.families import family_of, parameter_table, resolve_model
from meshwright.models import Block, FeedForward, Linear, Model, build_model
from meshwright.objectives import NextToken, Sums, build_objective
from meshwright.optim.build import build_optimizers
from meshwright.optim.schedule import lr_factor
from meshwright.predict.engine import engine_stack
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.plugins import plugged_in
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import largest_difference, whole_of_all
from meshwright.testing.ranks import RankPool
from meshwright.trainer.corpus import check_objective, with_datasets
from meshwright.trainer.metrics import History, read_journal
from meshwright.trainer.plugins import Plugins
from meshwright.trainer.rank import check_same
from meshwright.trainer.start import require_plugins
from sessions import train
from tiny import tiny_run

STEPS = 4
ALONE = LayoutSpec()
SPLIT = {
    "zero-3": LayoutSpec(dp_shard=2),
    "zero-1": LayoutSpec(dp_shard=2, zero=1),
    "tp": LayoutSpec(tp=2),
    "pp": LayoutSpec(pp=2),
    "zero-3-tp": LayoutSpec(dp_shard=2, tp=2),
}
EXACT = 1e-9
"""For weights after four steps: sums in another order, in float64."""


def plugged_run(plugins: Plugins, layout: LayoutSpec = ALONE, **training: Any) -> ResolvedRun:
    """A tiny run whose recipe names the plug-ins, with a checkpoint of step 2."""
    run = tiny_run(layout, steps=STEPS, optimizer={"lr": 1e-2}, evaluation={"batches": 0}, **training)
    named, model = plugins.named_in(run.run), run.model
    if plugins.model is not None:
        with plugged_in(plugins.objects()):
            model = resolve_model(named.model, base_dir=Path())
    checkpoint = CheckpointSpec(every=2, keep_last=9, asynchronous=False)
    return run.model_copy(update={"run": named.model_copy(update={"checkpoint": checkpoint}), "model": model})


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.found.append(record["loss"])


Trained = tuple[list[float], dict[str, torch.Tensor]]


def trained(run: ResolvedRun, plugins: Plugins, root: Path, resume: Path | None = None) -> Trained:
    """Train on random tokens: the losses of all steps, the weights at the end. Collective."""
    losses = Losses()
    with plugged_in(plugins.objects()):
        trainer = train(run, root, [losses], resume).trainer
        return losses.found, whole_of_all(trainer, trainer.parameters)


def as_one_process(ranks: RankPool, root: Path, plugins: Plugins, layouts: Sequence[str], **training: Any) -> Trained:
    """Compare every layout with one process, and with a run that resumes from the previous layout's checkpoint."""
    alone = ranks.run(1, trained, plugged_run(plugins, **training), plugins, root / "alone")[0]
    checkpoint = root / "alone/checkpoints/step-00000002"
    assert len(alone[0]) == STEPS
    for name in layouts:
        run = plugged_run(plugins, SPLIT[name], **training)
        world = run.run.layout.world_size
        whole = ranks.run(world, trained, run, plugins, root / name)
        again = ranks.run(world, trained, run, plugins, root / f"{name}-again", checkpoint)
        checkpoint = root / name / "checkpoints/step-00000002"
        for losses, weights in (*whole, *again):
            assert losses == pytest.approx(alone[0][-len(losses) :], rel=EXACT), name
            assert largest_difference(weights, alone[1])[0] < EXACT, name
        assert {len(losses) for losses, _ in again} == {STEPS - 2}
    return alone


# ---- learning-rate schedules


def staircase(step: int, steps: int, drop: float = 0.5) -> float:
    return drop ** (2 * (step - 1) // steps)


def of_step(step: int) -> float:
    return 1.0


def negative(step: int, steps: int) -> float:
    return 1.0 - step


@pytest.mark.slow
def test_a_schedule_is_the_whole_schedule_under_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    losses, _ = as_one_process(ranks, tmp_path, Plugins(lr_schedule=staircase), ["zero-3"])
    journal = History(read_journal(tmp_path / "zero-3/metrics.jsonl"))
    assert [record["lr"] for record in journal.of("step")] == [1e-2, 1e-2, 5e-3, 5e-3]
    steady, _ = ranks.run(1, trained, plugged_run(Plugins()), Plugins(), tmp_path / "steady")[0]
    assert losses[:3] == steady[:3]
    assert losses[3] != steady[3]


def test_what_is_no_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lr_schedule: test_plugins.of_step cannot be called with \(step, steps\)"):
        Plugins(lr_schedule=of_step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"lr_schedule: builtins.int is 3, which cannot be called"):
        Plugins(lr_schedule=3)  # pyright: ignore[reportArgumentType]
    plugins = Plugins(lr_schedule=negative)
    with pytest.raises(UserError, match=r"name=test_plugins.negative: returns -1.0 for step 2, but the factor"):
        trained(plugged_run(plugins), plugins, tmp_path)


# ---- optimizers


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023."""

    elementwise = True
    states = 1

    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["beta"])
                    # tanh instead of the sign, which turns a rounding into a whole step
                    p.data = p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * (9 * momentum).tanh()


class Whitened(torch.optim.Optimizer):
    """A one-sided Shampoo (Gupta et al., 2018): it stores a further matrix for each, and reads whole gradients."""

    elementwise = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad.reshape(len(p), -1)
                    gram = self.state[p].setdefault("gram", torch.eye(len(p), dtype=p.dtype))
                    gram += g @ g.T
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(torch.linalg.solve(gram, g).view_as(p), 0.5)
                    p.sub_(mean, alpha=group["lr"])


class Silent(torch.optim.SGD):
    """Does not say which tensors it reads, and is not one of torch's classes."""


class Counts(Lion):
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["steps"] = 1


class Late(Lion):
    def step(self) -> None:  # type: ignore[override]
        for state in self.state.values():
            if "momentum" in state:
                state["slow"] = torch.zeros_like(state["momentum"])
        super().step()


class Grouped(Lion):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Remembers(Lion):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1


class Liar(Whitened):
    elementwise = True


class Again(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def nothing(params: Any, lr: float) -> list[Any]:
    return []


OPTIMIZERS = {
    "elementwise": Lion,
    "torch's, with its state made at once": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "torch's, with momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "whole tensors": Whitened,
}


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_under_every_layout_as_in_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    layouts = {"elementwise": ["zero-3-tp", "pp"], "whole tensors": ["zero-3-tp", "tp"]}.get(name, ["zero-3"])
    as_one_process(ranks, tmp_path, Plugins(optimizer=OPTIMIZERS[name], lr_schedule=staircase), layouts)


def test_torch_s_adamw_plugged_in_is_the_recipe_s(tmp_path: Path) -> None:
    """Peak, schedule, weight decay and its exceptions are the recipe's."""
    adamw = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))
    ours, theirs = Plugins(lr_schedule=staircase), Plugins(lr_schedule=staircase, optimizer=adamw)
    expected, found = (trained(plugged_run(each), each, tmp_path / str(each is ours)) for each in (ours, theirs))
    assert found[0] == pytest.approx(expected[0], rel=EXACT)
    assert largest_difference(found[1], expected[1])[0] < EXACT


def refusal(run: ResolvedRun, plugins: Plugins, root: Path) -> str:
    try:
        trained(run, plugins, root)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (Silent, "test_plugins.Silent does not set elementwise, and ZeRO-3 x 2 splits"),
        (Liar, "has elementwise = True, but its state 'gram' has another shape than the parameter"),
        (Counts, "its state 'steps' is int, but checkpoints save only tensors"),
        (Late, "its state 'slow' is created after the first step"),
        (Grouped, "Grouped keeps 'k' in its parameter groups, which checkpoints do not save"),
        (Remembers, "Remembers keeps 'steps' in an attribute, which checkpoints do not save"),
        (Again, "needs a closure in its step"),
        (torch.optim.LBFGS, "cannot be constructed with parameter groups and .*: LBFGS doesn't support per-parameter"),
        (functools.partial(Lion, gamma=1), "cannot be constructed with parameter groups and {'lr': 0.01}: .*'gamma'"),
        (nothing, "returns a list, which is not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(ranks: RankPool, tmp_path: Path, optimizer: Any, why: str) -> None:
    plugins = Plugins(optimizer=optimizer)
    for found in ranks.run(2, refusal, plugged_run(plugins, SPLIT["zero-3"]), plugins, tmp_path):
        assert re.search(why, found), found


def test_an_optimizer_that_says_nothing_trains_where_all_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    plugins = Plugins(optimizer=Silent)
    assert refusal(plugged_run(plugins), plugins, tmp_path) == ""
    assert ranks.run(2, refusal, plugged_run(plugins, LayoutSpec(dp_replicate=2)), plugins, tmp_path / "b") == ["", ""]
    with pytest.raises(UserError, match="optimizer: SGD is not a class; pass the class"):
        Plugins(optimizer=torch.optim.SGD([torch.zeros(1)]))  # pyright: ignore[reportArgumentType]


def test_the_recipe_s_weight_decay_is_not_lost(tmp_path: Path) -> None:
    plugins, run = Plugins(optimizer=Whitened), tiny_run(LayoutSpec(), optimizer={"weight_decay": 0.2})
    run = run.model_copy(update={"run": plugins.named_in(run.run)})
    assert "weight_decay=0.2: test_plugins.Whitened has no weight_decay" in refusal(run, plugins, tmp_path)
    # The default's value, given explicitly: a saved run gives it too, so the recipe itself is checked.
    asked = Run.model_validate({"model": "gpt2", "training": {"optimizer": {"weight_decay": 0.1}}})
    with plugged_in(plugins.objects()):
        with pytest.raises(UserError, match=r"weight_decay=0.1: test_plugins.Whitened has no weight_decay"):
            require_plugins(plugins.named_in(asked))
        require_plugins(plugins.named_in(Run.model_validate({"model": "gpt2"})))


# ---- objectives


class ZLoss(NextToken):
    """Cross-entropy and the square of the softmax's normaliser (Chowdhery et al., 2022)."""

    metrics = ("z",)

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight

    def sums(self, hidden_BTD: torch.Tensor, head: Any, batch: Any) -> Sums:
        z_BT = head.token_terms(hidden_BTD, batch.labels, lambda logits, labels_C: logits.logsumexp() ** 2)
        return Sums(head.loss(hidden_BTD, batch.labels) + self.weight * z_BT.sum(), {"z": z_BT.detach().sum()})


class Mean(ZLoss):
    def sums(self, *args: Any) -> Any:
        return super().sums(*args).loss


class PerToken(ZLoss):
    def sums(self, hidden_BTD: torch.Tensor, head: Any, batch: Any) -> Sums:
        return Sums(head.token_losses(hidden_BTD, batch.labels))


class Forgets(ZLoss):
    def sums(self, *args: Any) -> Sums:
        return Sums(super().sums(*args).loss)


class Share(ZLoss):
    def count(self, batch: Any) -> Any:
        return 0.5


@pytest.mark.slow
def test_an_objective_trains_under_a_layout_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    plain, _ = ranks.run(1, trained, plugged_run(Plugins()), Plugins(), tmp_path / "plain")[0]
    found, _ = as_one_process(ranks, tmp_path, Plugins(objective=ZLoss(0.5)), ["zero-3-tp"])
    assert all(ours > theirs + 0.1 for ours, theirs in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (Mean(), r"test_plugins.Mean.sums returns Tensor; return meshwright.Sums\(loss, metrics\)"),
        (PerToken(), r"test_plugins.PerToken.sums: the loss is a shape \(12, 16\); return the sum over the batch's"),
        (Forgets(), "test_plugins.Forgets.sums returns no 'z', which test_plugins.Forgets.metrics lists"),
        (Share(), "test_plugins.Share.count returns 0.5; return the number of terms in the batch"),
    ],
)
def test_what_is_no_objective_is_refused(tmp_path: Path, objective: Any, why: str) -> None:
    plugins = Plugins(objective=objective)
    with pytest.raises(UserError, match=why):
        trained(plugged_run(plugins), plugins, tmp_path)


def test_an_objective_is_an_instance_that_fits_the_data() -> None:
    with pytest.raises(
        UserError, match=r"objective: the class test_plugins.ZLoss is not an Objective; pass an instance"
    ):
        Plugins(objective=ZLoss)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="objective and preference both set the training loss"):
        parse_spec("model: gpt2\ntraining: {objective: x, preference: {}}", Run)
    plugins = Plugins(objective=ZLoss())
    run = plugged_run(plugins).run
    with plugged_in(plugins.objects()):
        check_objective(run, {"a": False})
        with pytest.raises(
            UserError, match=r"data source b contains preferences, which test_plugins.ZLoss does not train on"
        ):
            check_objective(run, {"a": False, "b": True})


# ---- datasets


def numbers() -> Iterator[list[int]]:
    """An endless stream of counted tokens, in documents of three to seven."""
    for number in count():
        yield [(number + place) % 50 for place in range(3 + number % 5)]


def data_run(root: Path, dataset: Any, steps: int = 3, **data: Any) -> Run:
    """A recipe of three steps of four samples, with files in place of the dataset."""
    fields = {"sequence_length": 8, "cache_dir": str(root / "cache"), "held_out": 0.0, **data}
    model = {"family": "llama", "hidden": 16, "num_layers": 1, "num_heads": 2, "vocab": 50}
    run = Run.model_validate({"model": model, "data": fields, "training": {"steps": steps, "global_batch": 4}})
    plugins = Plugins(dataset=dataset)
    with plugged_in(plugins.objects()):
        return with_datasets(plugins.named_in(run), root)


def seen(run: Run) -> np.ndarray:
    """The inputs of every sample that the run sees, in order."""
    corpus = prepare_corpus(run.data, base_dir=Path())
    mixture = training_samples(corpus, run.data)
    return np.stack([mixture.sample(position, 0).inputs for position in range(4 * run.training.steps)])


def test_a_dataset_is_seen_in_its_own_order_and_read_no_further(tmp_path: Path) -> None:
    stream, expected = numbers(), list(chain.from_iterable(islice(numbers(), 99)))
    assert seen(data_run(tmp_path, stream)).ravel().tolist() == expected[: 12 * 8]
    assert next(stream) != next(numbers())
    assert len(next(stream)) < 99  # it has not ended either
    shuffled = seen(data_run(tmp_path, numbers(), order="shuffled"))
    assert sorted(map(tuple, shuffled)) != list(map(tuple, shuffled))
    padded = seen(data_run(tmp_path, [np.arange(1, 5), torch.arange(7, 12)], packing="padded"))
    assert padded[:3, :4].tolist() == [[1, 2, 3, 0], [7, 8, 9, 10], [1, 2, 3, 0]]  # it ended, and started again


def test_a_dataset_is_the_same_file_where_it_is_the_same(tmp_path: Path) -> None:
    """So a resumed run finds its position."""
    paths = [data_run(tmp_path, numbers()).data.sources[0].path for _ in range(2)]
    assert paths[0] == paths[1]
    assert len(list((tmp_path / "cache/datasets").glob("*.idx"))) == 1
    longer = data_run(tmp_path, numbers(), steps=6)
    assert longer.data.sources[0].path != paths[0]
    assert seen(longer)[:12].tolist() == seen(data_run(tmp_path, numbers())).tolist()


def test_texts_and_records_become_lines(tmp_path: Path) -> None:
    text = data_run(tmp_path, ["one", "two"]).data
    assert Path(text.sources[0].path).read_text() == '{"text": "one"}\n{"text": "two"}\n'
    assert text.tokenizer == "auto"
    record = data_run(tmp_path, [{"prompt": "p", "completion": "é", "extra": np.float32(1)}]).data
    assert Path(record.sources[0].path).read_text() == '{"prompt": "p", "completion": "é", "extra": 1.0}\n'
    tokens = data_run(tmp_path, [[1, 2, 3]]).data
    tokenizer = load_tokenizer(Path(tokens.tokenizer))
    assert (tokenizer.vocab_size, tokenizer.encode("3 14 49"), tokenizer.decode([3, 14])) == (50, [3, 14, 49], "3 14")


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([], "yields no item; an iterator can be read only once"),
        (numbers, "a function is not an iterable of items; call it"),
        ("x.txt", r"a str is not an iterable of items; pass a list of items \(set file paths in data.sources"),
        ([[1], "two"], "item 2 is text, but the first is tokens; pass items of one kind"),
        ([[1], [2, 50]], "item 2 has token 50, but the model's vocabulary is 0 to 49"),
        ([[1], [-100]], "item 2 has token -100"),
        ([[0.5]], "item 1 is a list; pass text, a record"),
        ([[1], []], "item 2 is an empty one; pass text"),
        ([b"bytes"], "item 1 is a bytes"),
        ([{"a": object()}], "item 1: cannot be written as JSON: it holds object"),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path: Path, items: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        data_run(tmp_path, items)
    assert not list(tmp_path.rglob("*.part"))


def other_data(first: int) -> str:
    file = file_in_memory([np.arange(first * dist.get_rank(), 9)])
    stream = TokenStream(name="a", train=file, held_out=None, weight=None)
    try:
        check_same(Corpus(tokenizer=numbers_tokenizer(50), streams=(stream,)))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_have_read_other_data_say_so(ranks: RankPool) -> None:
    assert ranks.run(2, other_data, 0) == ["", ""]
    for found in ranks.run(2, other_data, 1):
        assert found.startswith("rank 1 read different data from rank 0; a dataset must yield the same items")


# ---- models


class SquaredReLU(FeedForward):
    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)
        return self.w2(self.w1(x_BTD).relu() ** 2)


class GatedBlock(Block):
    """Squared ReLUs (So et al., 2021), and a gate on the attention's output, computed from its input."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.feed_forward = SquaredReLU(spec, spec.ffn)
        self.gate = Linear(spec.hidden, spec.hidden, bias=False)

    def compute(self, x_BTD: torch.Tensor, rope: Any = None, mask: Any = None, cache: Any = None) -> torch.Tensor:
        h_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.gate(h_BTD).sigmoid() * self.attention(h_BTD, rope, mask, cache)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Gated(Model):
    switches: ClassVar = {"activation": "gelu_tanh", "gated": False}
    dims: ClassVar = {"gate.weight": ("embed", "embed")}

    def block(self, spec: ModelSpec, layer: int) -> Block:
        return GatedBlock(spec, layer)


class Widened(Gated):
    dims: ClassVar = {"gate.weight": ("embed", "width")}


class Mistaken(Gated):
    dims: ClassVar = {"gate.weight": ("embed", "ffn")}


class Undescribed(Gated):
    dims: ClassVar = {}


class Based(Gated):
    base = "lama"


class Switched(Gated):
    switches: ClassVar = {"activate": "relu"}


class ScaledBlock(GatedBlock):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.gate = torch.nn.Linear(spec.hidden, spec.hidden, bias=False)  # type: ignore[assignment]


class Scaled(Gated):
    """One of torch's own layers: data-parallel ranks and pipelines train it, tensor parallelism cannot."""

    def block(self, spec: ModelSpec, layer: int) -> Block:
        return ScaledBlock(spec, layer)


@pytest.mark.slow
def test_a_model_trains_under_every_layout_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    as_one_process(ranks, tmp_path, Plugins(model=Gated), ["zero-3-tp", "pp"])
    run = plugged_run(Plugins(model=Gated))
    with plugged_in(Plugins(model=Gated).objects()):
        table = {row.name: row for row in parameter_table(run.model)}
    assert table["layers.1.gate.weight"].dims == ("embed", "embed")
    assert table["layers.1.feed_forward.w1.weight"].dims == ("ffn", "embed")
    assert "layers.1.feed_forward.w3.weight" not in table


@pytest.mark.slow
def test_layers_of_torch_s_own_train_where_nothing_splits_them(ranks: RankPool, tmp_path: Path) -> None:
    plugins = Plugins(model=Scaled)
    as_one_process(ranks, tmp_path, plugins, ["zero-3"])
    for found in ranks.run(2, refusal, plugged_run(plugins, SPLIT["tp"]), plugins, tmp_path):
        assert found.startswith("layout.tp=2: layers.0.gate is a Linear with its own parameters, which tensor")


def table_of(model: Any) -> None:
    plugins = Plugins(model=model)
    run = plugged_run(plugins)
    with plugged_in(plugins.objects()):
        parameter_table(run.model)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Widened, "layers.0.gate.weight has an unknown dim 'width'; known are vocab, embed, heads"),
        (Mistaken, "layers.0.gate.weight has 24 numbers along ffn, which is 40 in this model"),
        (Undescribed, r"layers.0.gate.weight has shape \[24, 24\] and no dims; name them, as in dims = {'gate.weight'"),
        (Based, "test_plugins.Based: base = 'lama' is not one of gpt2, llama"),
        (Switched, "switches has unknown 'activate'"),
        (GatedBlock, "model: test_plugins.GatedBlock is not a subclass of meshwright.Model; pass a class"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(model: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        table_of(model)


def test_a_model_that_is_not_here_is_told_of() -> None:
    given = "model: {family: my.Own, hidden: 8, num_layers: 1, num_heads: 2, vocab: 300}"
    with pytest.raises(
        UserError, match=r"model.family 'my.Own' is unknown; there are gpt2, .*; an object passed to train"
    ):
        resolve_model(parse_spec(given, Run).model, base_dir=Path())
    run = plugged_run(Plugins(model=Gated))
    with pytest.raises(UserError, match=r"models: no 'test_plugins.Gated' is installed"):
        parameter_table(run.model)
    with pytest.raises(UserError, match=r"test_plugins.Gated is not a Hugging Face family"):
        family_of(run.model)


# ---- names in recipes

MINE = """
import meshwright
import torch


class Plain(torch.optim.SGD):
    elementwise = True
    states = 0


def staircase(step, steps, drop=0.5):
    return drop ** (2 * (step - 1) // steps)


class Gated(meshwright.Model):
    base = "gpt2"

    def block(self, spec, layer):
        return meshwright.Block(spec, layer)


def counted(stop):
    return [list(range(number, number + 20)) for number in range(stop)]


class ZLoss(meshwright.Objective):
    def __init__(self, weight=1.0):
        self.weight = weight

    def count(self, batch):
        return 1

    def sums(self, hidden_BTD, head, batch):
        return meshwright.Sums(head.loss(hidden_BTD, batch.labels))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that declares plug-ins, as pip installs it in a folder of sys.path."""
    (tmp_path / "plugged_mine.py").write_text(MINE)
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = {"optimizers": "plain = plugged_mine:Plain", "lr_schedules": "stairs = plugged_mine:staircase"}
    groups |= {"models": "gated = plugged_mine:Gated"}
    groups |= {"datasets": "counted = plugged_mine:counted"}
    groups |= {"objectives": "z = plugged_mine:ZLoss\nnone = plugged_mine:staircase"}
    text = "\n".join(f"[meshwright.{kind}]\n{line}\n" for kind, line in groups.items())
    (folder / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


RECIPE = """\
model: gpt2
training:
  optimizer: {name: plain, lr: 0.1, options: {nesterov: true, momentum: 0.9, dampening: 0.0}}
  lr_schedule: {name: stairs, options: {drop: 0.1}}
"""


def test_a_recipe_names_an_optimizer_and_a_schedule(installed: Path) -> None:
    run = parse_spec(RECIPE, Run)
    require_plugins(run)
    assert parse_spec(dump_recipe(run), Run) == run
    assert lr_factor(run.training.lr_schedule, 900, run.training.steps) == pytest.approx(0.1)
    model = tiny_run(ALONE).model
    parameters = {row.name: torch.zeros(row.shape) for row in parameter_table(model)}
    (found,) = build_optimizers(run.training.optimizer, parameter_table(model), parameters).optimizers
    assert [group["lr"] for group in found.param_groups] == [0.1, 0.1]
    assert [group["nesterov"] for group in found.param_groups] == [True, True]
    own = engine_stack(run.training, alone=False).state_bytes
    assert own == engine_stack(Run(model=ModelFields(name="gpt2")).training, alone=False).state_bytes - 2 * 4
    options = run.training.lr_schedule.model_copy(update={"options": {"drip": 1}})
    with pytest.raises(UserError, match=r"name=stairs cannot be called with \(step, steps, drip\): .*'drip'"):
        lr_factor(options, 1, 10)


def test_a_recipe_names_a_model(installed: Path) -> None:
    text = "model: {family: gated, hidden: 16, num_layers: 1, num_heads: 2, vocab: 300}"
    spec = resolve_model(parse_spec(text, Run).model, base_dir=Path())
    assert (spec.family, spec.positions, parameter_table(spec)[0].shape) == ("gated", "learned", (300, 16))
    assert build_model(spec).table == parameter_table(spec)
    with pytest.raises(UserError, match=r"model.family 'gate' is unknown; did you mean 'gated'\?"):
        resolve_model(parse_spec(text.replace("gated", "gate"), Run).model, base_dir=Path())


def test_a_recipe_names_a_dataset(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = installed / "run.yaml"
    recipe.write_text(
        "model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, vocab: 64}\n"
        f"run_dir: {installed}/run\n"
        f"data:\n  sequence_length: 8\n  cache_dir: {installed}/cache\n"
        "  sources: [{path: dataset:counted, options: {stop: 40}}]\n"
    )
    assert main(["check", str(recipe)]) == 0
    told = capsys.readouterr().out
    assert "tokenizer  64 tokens, found" in told
    assert "| 1 2 3 4 5 6 7 8" in told
    assert main(["check", str(recipe), "data.sources=dataset:count"]) == 1
    told = capsys.readouterr().err
    assert "datasets: no 'count' is installed; there are counted" in told
    assert told.count("error") == 1  # not also that a file of the name is missing
    assert main(["check", str(recipe), "callbacks=[{name: ema, options: {decay: 2}}]"]) == 1
    assert "callbacks: EMA: decay=2 must be a number in [0, 1)" in capsys.readouterr().err


def test_a_recipe_names_an_objective(installed: Path) -> None:
    run = parse_spec("model: gpt2\ntraining: {objective: {name: z, options: {weight: 0.25}}}", Run)
    require_plugins(run)
    assert build_objective(run).weight == 0.25  # type: ignore[attr-defined]
    short = parse_spec("model: gpt2\ntraining: {objective: none}", Run)
    with pytest.raises(UserError, match=r"objectives: none does not take these options: .*'step'"):
        build_objective(short)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("optimizer: {name: plane}", "'plane' is not allowed: .* or a plug-in of the group meshwright.optimizers "
         r"\(installed: 'plain'\); did you mean 'plain'\?"),
        ("lr_schedule: {name: x}", r"'x' is not allowed: .* meshwright.lr_schedules \(installed: 'stairs'\)"),
        ("optimizer: {name: my.Own}", r"no 'my.Own' is installed; there are plain .*; an object passed to train"),
        ("objective: zz", r"objectives: no 'zz' is installed; there are none, z \(entry points"),
        ("optimizer: {name: plain, eps: 0.1}", r"optimizer.eps applies only to built-in optimizers; set plain's"),
        ("optimizer: {options: {a: 1}}", r"training.optimizer.options belong to plug-ins, not to adamw; remove them"),
    ],
)  # fmt: skip
def test_check_says_what_is_installed(installed: Path, given: str, refused: str) -> None:
    with pytest.raises(UserError, match=refused):
        require_plugins(parse_spec(f"model: gpt2\ntraining: {{{given}}}", Run))


def test_what_a_run_has_written_down_is_read_without_its_plug_ins() -> None:
    resolved = plugged_run(Plugins(optimizer=Lion, lr_schedule=staircase))
    again = parse_spec(dump_recipe(resolved, expanded=True), ResolvedRun)
    assert again.run.training.optimizer.name == "test_plugins.Lion"
    training = again.run.training.model_dump() | {"optimizer": {"name": "gone"}}
    elsewhere = again.model_dump(mode="json") | {"run": again.run.model_dump(mode="json") | {"training": training}}
    assert parse_spec(json.dumps(elsewhere), ResolvedRun).run.training.optimizer.name == "gone"

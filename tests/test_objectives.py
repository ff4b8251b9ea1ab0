"""Users' objectives: a file without ranks is right on every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from losses import logits_of
from meshwright.models import loss as loss_module
from meshwright.models.batch import to_device
from meshwright.models.loss import IGNORED
from meshwright.objectives import NextToken, Objective, Sums
from meshwright.spec.batch import Batch
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, build_here, loader_for, one_step
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.evaluate import Evaluation, evaluate
from test_equivalence import assert_equal
from tiny import tiny_run


class Smoothed(NextToken):
    """Cross-entropy with label smoothing and a z-loss (Chowdhery et al., 2022), and the share of likeliest labels."""

    metrics = ("certain",)

    def sums(self, hidden_BTD: torch.Tensor, head: Any, batch: Any) -> Sums:
        def terms(logits: Any, labels_C: torch.Tensor) -> torch.Tensor:
            normaliser_C = logits.logsumexp()
            smoothed_C = 0.9 * logits.of(labels_C) + 0.1 * logits.mean()
            return normaliser_C - smoothed_C + 0.01 * normaliser_C**2

        probabilities_BT = (-head.token_losses(hidden_BTD, batch.labels).detach()).exp()
        certain = ((probabilities_BT > 0.02) & (batch.labels != IGNORED)).sum()
        return Sums(head.token_terms(hidden_BTD, batch.labels, terms).sum(), {"certain": certain})


class OddsRatio(Objective):
    """ORPO's term alone (Hong et al., 2024): log odds of the chosen answer over the rejected one."""

    over, term, needs_pairs = "rows", "pair", True

    def count(self, batch: Batch[Any]) -> int:
        assert batch.pairs is not None
        return int((batch.pairs.reference_margins == batch.pairs.reference_margins).sum())

    def sums(self, hidden_BTD: torch.Tensor, head: Any, batch: Any) -> Sums:
        losses_BT, owners = head.token_losses(hidden_BTD, batch.labels), batch.pairs.owners.clamp(max=4)
        both_BST = torch.stack((-losses_BT, (batch.labels != IGNORED).to(losses_BT.dtype)))
        sums_BS = both_BST.new_zeros(2, len(owners), 5).scatter_add(2, owners.expand(2, -1, -1), both_BST)
        logs_BS, lengths_BS = head.row_sums(sums_BS)[..., :4]
        mean_BS = logs_BS / lengths_BS.clamp(min=1) - 1e-3
        odds_BS = mean_BS - torch.log1p(-mean_BS.exp())
        is_pair_BP = ~batch.pairs.reference_margins.isnan()
        return Sums((-F.logsigmoid(odds_BS[:, ::2] - odds_BS[:, 1::2])).where(is_pair_BP, 0).sum())


def by_whole_logits(trainer: Any, batch: Any) -> torch.Tensor:
    """`Smoothed`, from torch's own functions."""
    logits, labels = logits_of(trainer.model, batch.tokens).flatten(0, 1), batch.labels.flatten()
    smoothed = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.1, reduction="sum")
    return smoothed + 0.01 * (logits.logsumexp(-1).square() * (labels != IGNORED)).sum()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, logits are computed in several chunks."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", {"cpu": 128 * 8 * 7})


def test_terms_of_logits_are_those_of_whole_logits() -> None:
    trainer = build_here(tiny_run(LayoutSpec()), Smoothed())
    with loader_for(trainer) as loader:
        batch = to_device(loader.microbatches(0)[0], trainer.device)
    parameters = list(trainer.model.parameters())
    ours, wanted = trainer.model(batch, trainer.train_step.passes.loss), by_whole_logits(trainer, batch)
    torch.testing.assert_close(ours, wanted, rtol=1e-13, atol=0)
    found, expected = (torch.autograd.grad(loss, parameters) for loss in (ours, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def stepped(run: ResolvedRun, objective: Objective) -> tuple[Outcome | None, Evaluation]:
    """A training step's outcome and an evaluation before it. Collective."""
    trainer = build_here(run, objective)
    step = trainer.train_step
    with loader_for(trainer) as loader:
        batches = loader.microbatches(0) + loader.microbatches(1)
    found = evaluate(step.passes, batches, trainer.device, repeats_loss=step.repeats_loss)
    return one_step(run, objective=objective), found


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("objective", [Smoothed(), OddsRatio()], ids=lambda objective: type(objective).__name__)
@pytest.mark.parametrize("name", ["zero-3-tp", "cp-ring-tp", "pp-cp"])
def test_an_objective_of_ones_own_on_every_kind_of_layout(ranks: RankPool, name: str, objective: Objective) -> None:
    outcome, expected = stepped(tiny_run(LayoutSpec()), objective)
    assert outcome is not None
    plain = one_step(tiny_run(LayoutSpec()))
    assert plain is not None
    assert abs(outcome.loss - plain.loss) > 1e-3, "it is another objective"
    answers = ranks.run(LAYOUTS[name].world_size, stepped, tiny_run(LAYOUTS[name]), objective)
    assert_equal(answers[0][0], outcome)
    for _, found in answers:
        assert found.tokens == expected.tokens
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-12)


def read(run: ResolvedRun) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """(whether this rank has the head, log-probabilities of the labels here, their places in a row). Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        batch = to_device(loader.microbatches(0)[0], trainer.device)
    places = torch.arange(run.run.data.sequence_length) if trainer.places is None else torch.from_numpy(trainer.places)
    return trainer.train_step.passes.has_loss, trainer.train_step.passes.token_logprobs(batch), places


@pytest.mark.parametrize("name", ["tp", "pp-cp-tp"])
def test_log_probabilities_of_labels_are_the_same_on_every_layout(ranks: RankPool, name: str) -> None:
    trainer = build_here(tiny_run(LayoutSpec()))
    with loader_for(trainer) as loader:
        batch = to_device(loader.microbatches(0)[0], trainer.device)
    logprobs = logits_of(trainer.model, batch.tokens).log_softmax(-1)
    expected = logprobs.gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (batch.labels != IGNORED)
    for has_loss, found, places in ranks.run(LAYOUTS[name].world_size, read, tiny_run(LAYOUTS[name])):
        rows = found.shape[0]
        wanted = expected[:rows, places] if has_loss else torch.zeros(rows, len(places))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)

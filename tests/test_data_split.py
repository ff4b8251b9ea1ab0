"""The held-out split: stable, without copies on both sides, and never empty."""

import pytest

from meshwright.data.readers import Document
from meshwright.data.split import Census, likely_split, plan_split, text_hash


def corpus(texts):
    return [Document(f"{i}.txt", text, len(text)) for i, text in enumerate(texts)]


def sides(texts, share):
    split, census = plan_split(corpus(texts), share, where="here")
    assert census.suits(split)
    train, held_out = [], []
    for document in corpus(texts):
        for held, text in split.parts(document.text, text_hash(document.text)):
            (held_out if held else train).append(text)
    return train, held_out


def test_share_and_stability():
    texts = [f"document {i}" for i in range(4000)]
    train, held_out = sides(texts, 0.05)
    assert sorted(train + held_out) == sorted(texts)
    # 200 expected, standard deviation sqrt(4000 * 0.05 * 0.95) = 13.8
    assert abs(len(held_out) - 200) < 4 * 13.8
    more = [f"another {i}" for i in range(1000)]
    more_train, more_held_out = sides([*more, *reversed(texts)], 0.05)
    assert set(train) < set(more_train), "no document changes its side when others are added or order changes"
    assert set(held_out) < set(more_held_out)
    assert set(held_out) < set(sides(texts, 0.1)[1]), "a larger share holds out the same and more"


def test_copies_stay_together():
    train, held_out = sides([f"document {i % 50}" for i in range(500)], 0.2)
    assert held_out
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_small_share_of_few_documents_is_one(count):
    train, held_out = sides([f"document {i}" for i in range(count)], 0.001)
    assert (len(train), len(held_out)) == (count - 1, 1)


def test_nothing_held_out():
    assert sides(["only"], 0) == (["only"], [])
    assert not plan_split(corpus(["only"]), 0, where="here")[0].holds_out


def test_a_single_document_gives_its_last_lines():
    lines = [f"line {i:03}\n" for i in range(100)]
    train, held_out = sides(["".join(lines)], 0.096)  # the cut falls into line 90, and moves to its start
    assert train == ["".join(lines[:90])]
    assert held_out == ["".join(lines[90:])]
    assert sides(["x" * 100], 0.25) == (["x" * 75], ["x" * 25]), "without lines it is cut anywhere"


@pytest.mark.parametrize(("count", "share", "suits"), [(4000, 0.05, True), (20, 1e-6, False), (3, 0.999999, False)])
def test_the_likely_split_is_the_planned_one_where_it_suits(count, share, suits):
    census = Census()
    for i in range(count):
        census.add(1, text_hash(f"document {i}"))
    assert census.suits(likely_split(share)) == suits
    if suits:
        assert likely_split(share) == plan_split(corpus(f"document {i}" for i in range(count)), share, where="here")[0]
    assert not Census().suits(likely_split(0)), "nothing at all"


@pytest.mark.parametrize(
    ("texts", "share", "message"),
    [
        ([], 0.1, "here: every document is empty"),
        (["same"] * 5, 0.1, "no document is left to train on: all 5"),
        (["a", "b"], 0.999999, "no document is left to train on: all 2"),
        (["x"], 0.1, "the only document has 1 characters, too few"),
    ],
)
def test_empty_sides(texts, share, message):
    with pytest.raises(ValueError, match=message):
        plan_split(corpus(texts), share, where="here")

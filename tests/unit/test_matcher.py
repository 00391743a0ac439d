"""The index against a search through the texts, and what a reference is taken for."""

import math

import numpy as np
import pytest
from deepseek_flash.dspark import kernels
from deepseek_flash.dspark.drafts import Draft
from deepseek_flash.dspark.kernels import DECAY, NAMES, WINDOW
from deepseek_flash.dspark.matcher import ROOM, TAIL, Matcher, Source
from deepseek_flash.dspark.policy import make_scratch
from hypothesis import given
from hypothesis import strategies as st

SCRATCH = make_scratch()
tokens = st.lists(st.integers(0, 3), max_size=20)


def look(matcher):
    """Each candidate's features by name."""
    count = kernels.look(matcher.history, matcher.references, matcher.end, SCRATCH)
    rows = SCRATCH.features[:count].tolist()
    return {int(token): dict(zip(NAMES, row)) for token, row in zip(SCRATCH.ids, rows)}


def followers(text, begin, before):
    """Tokens of ``text`` from ``begin`` on, with how many before them end ``before``."""
    found = []
    for place in range(max(begin, 1), len(text)):
        length = 0
        while (
            length < min(place, len(before), WINDOW)
            and text[place - 1 - length] == before[-1 - length]
        ):
            length += 1
        if length:
            found.append((text[place], length))
    return found


def expected(prompt, answer, references):
    """Longest run and number of places of each follower, own and in references."""
    own = prompt + answer
    found = {}
    sides = [("history", own, 1)]
    sides += [("reference", prompt[-TAIL:] + it, len(prompt[-TAIL:])) for it in references]
    for side, text, begin in sides:
        for token, length in followers(text, begin, own):
            row = found.setdefault(token, {"history": [], "reference": []})
            row[side].append(length)
    return found


@given(tokens, tokens, st.lists(tokens, max_size=2))
def test_it_finds_what_a_search_finds(prompt, answer, references):
    matcher = Matcher(prompt)
    for token in answer:
        matcher.append([token], [0.5])
    for reference in references:
        matcher.add_reference(reference, Source.REFERENCE)
    found, wanted = look(matcher), expected(prompt, answer, references)
    assert found.keys() == wanted.keys()
    for token, sides in wanted.items():
        for side, lengths in sides.items():
            longest, count = found[token][f"match_{side}"], found[token][f"count_{side}"]
            assert 2**longest - 1 == pytest.approx(max(lengths, default=0))
            assert math.expm1(count) == pytest.approx(len(lengths), abs=0.01)


@given(tokens, st.lists(tokens, max_size=6), st.data())
def test_the_order_of_arrival_does_not_matter(prompt, parts, data):
    one, other = Matcher(prompt), Matcher(prompt)
    reference = data.draw(tokens)
    one.add_reference(reference, Source.REFERENCE, 0.5)
    one.append([token for part in parts for token in part], [0.5] * sum(map(len, parts)))
    for part in parts:
        other.append(part, [0.5] * len(part))
        look(other)  # indexes what is there
    other.add_reference(reference, Source.REFERENCE, 0.5)
    assert look(one) == look(other)


def test_long_texts_outgrow_the_first_arrays():
    period = list(range(1000))
    matcher = Matcher(period)
    for _ in range(3):
        for token in period:
            matcher.append([token], [0.5])
    for _ in range(20):  # more than there is room for at first, too
        matcher.add_reference(period, Source.REFERENCE)
    assert matcher.generated == 3000
    found = look(matcher)
    assert found.keys() == {0}
    assert found[0]["count_history"] == pytest.approx(math.log1p(3))
    assert found[0]["match_history"] == pytest.approx(math.log2(1 + WINDOW))
    assert len(matcher.history.tokens) > matcher.end + ROOM


def test_a_text_of_one_token_is_looked_at_in_few_places():
    matcher = Matcher([7] * 5000)
    assert math.expm1(look(matcher)[7]["count_history"]) == pytest.approx(
        kernels.HISTORY_PLACES, abs=0.01
    )


def test_a_reference_is_indexed_as_an_answer_to_this_prompt():
    matcher = Matcher([1, 2, 3])
    matcher.add_reference([4, 5], Source.CHAIN)
    found = look(matcher)
    assert found.keys() == {4}  # nothing else ever came after 3
    assert 2 ** found[4]["match_chain"] - 1 == pytest.approx(3)
    assert found[4]["match_reference"] == 0


def test_the_texts_do_not_run_into_one_another():
    matcher = Matcher([])
    for reference in ([1, 2], [3, 4]):
        matcher.add_reference(reference, Source.REFERENCE)
    matcher.append([2], [0.5])
    assert look(matcher) == {}


@pytest.mark.parametrize(("top1", "mean"), [(None, 0.0), ([0.5, 0.25, 0.75], 0.5)])
def test_how_surely_the_follower_came(top1, mean):
    matcher = Matcher([9])
    matcher.add_reference([1, 2, 3], Source.REFERENCE, 1.0, top1)
    matcher.add_reference([1, 2, 3], Source.REFERENCE, 1.0, top1 and [0.5, 0.75, 0.75])
    matcher.append([1], [0.5])
    found = look(matcher)[2]
    assert found["confidence"] == pytest.approx(mean)
    assert found["confidence_known"] == (top1 is not None)


def agreement(own, other):
    text, tokens = (np.array([-1, -1, *it], np.int32) for it in (own, other))
    return kernels._agreement(text, len(text) - 1, tokens, len(tokens) - 1)


LONG = list(range(40))
TOTAL = sum(DECAY**k for k in range(WINDOW))


@given(st.integers(1, WINDOW - 4))
def test_agreement_forgives_a_token(back):
    place = len(LONG) - 1 - back
    lost = DECAY**back / TOTAL
    other = [*LONG[:place], 99, *LONG[place + 1 :]]
    assert agreement(LONG, other) == pytest.approx(1 - lost, abs=1e-5)
    for more in ([99], [99, 98]):
        longer = [*LONG[:place], *more, *LONG[place:]]
        assert agreement(LONG, longer) == pytest.approx(
            1 - DECAY ** (back + 1) / TOTAL, abs=1e-5
        )  # fmt: skip
        assert agreement(longer, LONG) == agreement(LONG, longer)


def test_agreement_is_0_to_1():
    assert agreement(LONG, LONG) == pytest.approx(1)
    assert agreement([1, 2, 3], [4, 5, 6]) == 0
    assert agreement([3], LONG[:4]) == pytest.approx(1 / TOTAL)


def test_surprise_follows_what_came_of_the_drafts():
    matcher = Matcher([1])
    for _ in range(40):
        matcher.expect(Draft([2, 3], [0.75, 0.5], [Source.HISTORY] * 2))
        matcher.append([2], [0.5])
    assert matcher.surprise == pytest.approx(0.25, abs=0.01)
    matcher.expect(Draft())
    matcher.append([3], [0.5])
    assert matcher.surprise == pytest.approx(0.25, abs=0.01)  # nothing was expected
    assert matcher.confidence == 0.5 and math.isnan(Matcher([1]).confidence)

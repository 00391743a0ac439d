"""Scores against a guesser that searches the references anew for every token."""

from collections import Counter

import pytest
from deepseek_flash.dflash.references import Score, score
from hypothesis import given
from hypothesis import strategies as st

tokens = st.lists(st.integers(0, 3), max_size=24)


def naive_guess(references, before, longest):
    if not before:
        following = Counter(reference[0] for reference in references if reference)
        return following.most_common(1)[0][0] if following else None
    for length in range(min(longest, len(before)), 0, -1):
        following = Counter(
            reference[end]
            for reference in references
            for end in range(length, len(reference))
            if list(reference[end - length : end]) == before[-length:]
        )
        if following:  # most_common keeps equals in the order they came
            return following.most_common(1)[0][0]
    return None


@given(st.lists(tokens, max_size=4), tokens, st.integers(1, 9))
def test_it_guesses_as_a_search_would(references, answer, longest):
    guesses = [naive_guess(references, answer[:place], longest) for place in range(len(answer))]
    guessed = sum(guess is not None for guess in guesses)
    right = sum(guess == token for guess, token in zip(guesses, answer))
    assert score(references, answer, longest) == Score(guessed, right)


@given(st.lists(st.integers(0, 3), max_size=24))
def test_nothing_is_guessed_from_the_answer_itself(answer):
    assert score([], answer) == score([[]], answer) == Score(0, 0)


def test_the_answer_itself_as_reference_tells_everything_where_runs_are_unique():
    answer = list(range(100, 140))
    assert score([answer], answer) == Score(40, 40)
    assert score([answer], answer[5:]) == Score(35, 34)  # but for the first: 100 was guessed


@pytest.mark.parametrize(
    ("references", "answer", "expected"),
    [
        ([[1, 2], [1, 3], [1, 3]], [1, 3], Score(2, 2)),  # the most frequent
        ([[1, 2], [1, 3]], [1, 2], Score(2, 2)),  # among equals the first
        ([[1, 3], [1, 2]], [1, 2], Score(2, 1)),
        ([[9, 1, 2], [8, 1, 3], [8, 1, 3]], [9, 1, 2], Score(3, 2)),  # the longest match wins
        ([[5]], [6, 5, 5], Score(1, 0)),  # a beginning is guessed at the beginning only
    ],
)
def test_the_rules_one_by_one(references, answer, expected):
    assert score(references, answer) == expected


def test_no_match_is_longer_than_the_longest():
    references = [[9, 1, 2], [8, 1, 3], [8, 1, 3]]
    assert score(references, [9, 1, 2], longest=1) == Score(3, 1)  # after 1 mostly 3


def test_a_bad_length_is_refused():
    with pytest.raises(ValueError, match="longest"):
        score([], [], longest=0)

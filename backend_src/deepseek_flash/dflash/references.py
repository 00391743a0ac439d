"""How useful references would have been: what they would have guessed of a finished answer.

The guesser is the simplest of its kind: the longest run of the answer's last tokens that occurs in
a reference, and what followed it there most often. A matcher in the engine may do better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Score:
    """Of an answer's tokens: how many were guessed at all, and how many of these rightly."""

    guessed: int
    right: int


@dataclass(slots=True)
class _Run:
    """A run of tokens of the answer; its children are longer by one token to the left."""

    longer: dict[int, _Run] = field(default_factory=dict)
    following: dict[int, int] = field(default_factory=dict)  # in the references: token -> times
    guess: int | None = None

    def best(self) -> int:
        """The most frequent follower, among equals the one seen first."""
        if self.guess is None:
            self.guess = max(self.following, key=self.following.__getitem__)
        return self.guess


def score(references: Sequence[Sequence[int]], token_ids: Sequence[int], longest: int = 8) -> Score:
    """Guess each token of an answer from those before it and the references.

    The guess is what follows the longest match of the answer's last 1 to ``longest`` tokens; at
    the answer's beginning, how references begin. Among followers the most frequent wins, then the
    one that an earlier reference has first. The answer's own repetitions are not used.

    Time: linear in answer and references, at most ``longest`` steps a token. Only runs that occur
    in the answer are indexed; those of a reference that is unlike it end after a step.

    Raises:
        ValueError: longest under 1.
    """
    if longest < 1:
        raise ValueError(f"longest: must be at least 1, got {longest}")
    root = _runs(token_ids, longest)
    for reference in references:
        _count(root, reference, longest)
    guessed = right = 0
    for token, before in _contexts(token_ids, longest):
        run = root
        for earlier in before:
            longer = run.longer[earlier]
            if not longer.following:  # nor has any that is longer still
                break
            run = longer
        # The root's followers are beginnings, no guess for any later place.
        if run.following and (run is not root or not before):
            guessed += 1
            right += run.best() == token
    return Score(guessed, right)


def _contexts(token_ids: Sequence[int], longest: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Each token with at most ``longest`` before it, the nearest first."""
    backwards = token_ids[::-1]
    for position, token in enumerate(token_ids):
        start = len(token_ids) - position
        yield token, backwards[start : start + longest]


def _runs(token_ids: Sequence[int], longest: int) -> _Run:
    """Every run that ends before a token of the answer, still without followers."""
    root = _Run()
    for _, before in _contexts(token_ids, longest):
        run = root
        for earlier in before:
            run = run.longer.get(earlier) or run.longer.setdefault(earlier, _Run())
    return root


def _count(root: _Run, reference: Sequence[int], longest: int) -> None:
    for token, before in _contexts(reference, longest):
        run = root
        if not before:
            run.following[token] = run.following.get(token, 0) + 1
        for earlier in before:
            longer = run.longer.get(earlier)
            if longer is None:
                break
            run = longer
            run.following[token] = run.following.get(token, 0) + 1

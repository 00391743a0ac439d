"""Seeded draws that are the same on every machine and in every version of Python.

Of ``random`` only seeding by a string and ``random()`` are promised to stay as they are; ``choice``
and ``shuffle`` are not. So everything is drawn with ``random()``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from typing import TypeVar

Item = TypeVar("Item")
Words = Mapping[str, Sequence[str]]  # by slot: what can stand there


def pick(source: random.Random, items: Sequence[Item]) -> Item:
    return items[int(source.random() * len(items))]


def shuffled(source: random.Random, items: Iterable[Item]) -> list[Item]:
    deck = list(items)
    for last in range(len(deck) - 1, 0, -1):
        other = int(source.random() * (last + 1))
        deck[last], deck[other] = deck[other], deck[last]
    return deck


def dealt(source: random.Random, shares: Mapping[Item, float], total: int) -> list[Item]:
    """``total`` items in random order, as many of each as is its share, to within one.

    Shares need not add up to 1. What rounding leaves over goes to the largest remainders.
    """
    whole = sum(shares.values())
    exact = {item: total * share / whole for item, share in shares.items()}
    counts = {item: int(many) for item, many in exact.items()}
    remainders = sorted(exact, key=lambda item: counts[item] - exact[item])
    for item in remainders[: total - sum(counts.values())]:
        counts[item] += 1
    return shuffled(source, (item for item, many in counts.items() for _ in range(many)))


class Draws(dict[str, str]):
    """A word for every slot, drawn when it is first asked for and the same from then on."""

    def __init__(
        self, source: random.Random, words: Words, given: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(given or {})
        self._source, self._words = source, words

    def __missing__(self, slot: str) -> str:
        self[slot] = pick(self._source, self._words[slot])
        return self[slot]

    def fill(self, template: str) -> str:
        return Template(template).substitute(self)

"""What a layer costs: the same load through it and without it, in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.numbers import spread


@dataclass(frozen=True)
class Load:
    """What one measurement sends both ways."""

    name: str
    requests: int
    tokens: int
    concurrency: int


@dataclass(frozen=True)
class Leg:
    """One way's figures for one load."""

    first_token: float  # median, seconds
    seconds: float  # for all requests


@dataclass(frozen=True)
class Pair:
    load: Load
    without: Leg
    through: Leg

    @property
    def cost(self) -> float:
        """Seconds that the layer adds to a request of one token."""
        if self.load.concurrency == 1:
            return self.through.first_token - self.without.first_token
        # In company a request waits for others: what counts is the time of all, shared out.
        return (self.through.seconds - self.without.seconds) / self.load.requests

    @property
    def ratio(self) -> float:
        """Tokens per second, through the layer to without it."""
        return self.without.seconds / self.through.seconds

    def __str__(self) -> str:
        if self.load.tokens == 1:
            return f"{self.without.first_token * 1e3:.1f} ms, {self.cost * 1e3:+.2f} ms a request"
        tokens = self.load.requests * self.load.tokens
        return f"{tokens / self.without.seconds:.1f} tokens/s, x {self.ratio:.3f}"


def chosen(prompts: Sequence[Sequence[int]], number: int, load: Load) -> list[Sequence[int]]:
    """A pair's prompts, others each time."""
    return [prompts[(number * 7 + k) % len(prompts)] for k in range(load.requests)]


def judge(
    pairs: Sequence[Pair], loads: Sequence[Load], seconds: float, share: float
) -> tuple[bool, dict[str, Any]]:
    """Print medians over pairs (min to max); whether all are within, and the figures.

    Args:
        seconds: the most that a first token may cost.
        share: the most of the tokens/s that may be lost.
    """
    good, figures = True, {}
    for load in loads:
        found = [pair for pair in pairs if pair.load == load]
        if load.tokens == 1:
            costs = [pair.cost * 1e3 for pair in found]
            print(f"  {load.name}: + {spread(costs)} ms a request")
            good &= statistics.median(costs) < seconds * 1e3
        else:
            ratios = [pair.ratio for pair in found]
            print(f"  {load.name}: x {spread(ratios)}")
            good &= statistics.median(ratios) > 1 - share
        figures[load.name] = [asdict(pair) for pair in found]
    print("  within" if good else "  NOT within", f"{seconds * 1e3:g} ms and {share:.0%}")
    return good, figures

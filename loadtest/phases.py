"""The three phases: which legs each is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.player import Order
from loadtest.records import BURST, CLOSED, MIXED, OPEN, WARM_UP
from loadtest.scale import Scale
from loadtest.traffic import trace
from loadtest.traffic.trace import Entry, Recipe

PATIENCE = 4.0  # a leg may take so many times what it should, before it is ended
LEAST_SECONDS = 120.0
BURST_TOKENS = 64
PROFILED_REQUESTS, PROFILED_TOKENS = 8, 48  # a profile has thousands of lines a step


@dataclass(frozen=True)
class Traffic:
    """What is asked: made prompts, or the operator's own."""

    seed: int
    recipe: Recipe
    repeat_share: float
    log: Sequence[Entry] = ()  # empty: made prompts

    def warm_up(self, prompts: int, rounds: int) -> list[Entry]:
        if not self.log:
            return trace.warm_up(self.seed, self.recipe, prompts, rounds)
        return trace.in_rounds(self.seed, trace.sampled(self.seed, self.log, prompts), rounds)

    def mixed(self, requests: int, stretch: str = "") -> list[Entry]:
        """``stretch``: apart from others, so that nothing of them is known."""
        if not self.log:
            made = trace.mixed(self.seed, self.recipe, requests, self.repeat_share)
        else:
            made = list(itertools.islice(self.log, requests))
        salt = f"{stretch} {self.seed}".strip()
        return [replace(it, cache_salt=f"{salt} {it.cache_salt or ''}".strip()) for it in made]

    def burst(self, prompts: int) -> list[Entry]:
        return trace.burst(self.seed, prompts, BURST_TOKENS)


@dataclass(frozen=True)
class Sizes:
    """A scale, and what the server without DFlash and DSpark answers on this machine."""

    scale: Scale
    capacity: float  # requests/s of the mixed phase


def calibration(traffic: Traffic, scale: Scale, requests: int, name: str) -> Order:
    """Mixed traffic of its own seed: nothing of it comes again."""
    other = replace(traffic, seed=-1 - traffic.seed, repeat_share=0.0)
    entries = other.mixed(requests, f"calibration {name}")
    return _closed("calibration", 0, entries, scale.users, scale.calibration)


def phases(traffic: Traffic, sizes: Sizes) -> Iterator[Order]:
    """All legs in their order."""
    yield from warm_up(traffic, sizes)
    yield from mixed(traffic, sizes)
    yield from burst(traffic, sizes)


def warm_up(traffic: Traffic, sizes: Sizes) -> Iterator[Order]:
    """The last round is a leg of its own: its hit rate says whether the cache is warm."""
    scale = sizes.scale
    fitting = scale.requests(sizes.capacity, scale.warm_up) // scale.rounds
    entries = traffic.warm_up(min(scale.warm_up_prompts, fitting), scale.rounds)
    entries = trace.labelled(entries)
    last = len(entries) - len(entries) // scale.rounds
    for part, share in enumerate((entries[:last], entries[last:])):
        yield _closed(WARM_UP, part, share, scale.users, scale.warm_up)


def mixed(traffic: Traffic, sizes: Sizes, stretch: str = "") -> Iterator[Order]:
    """A closed loop for the tokens/s, an open one for the latencies; prompts of their own each."""
    scale = sizes.scale
    many = scale.requests(sizes.capacity, scale.closed)
    entries = traffic.mixed(many, f"{stretch} closed".strip())
    for part, share in _parts(entries, scale.parts):
        yield _closed(MIXED, part, share, scale.users, scale.closed)
    rate = scale.rate(sizes.capacity)
    entries = traffic.mixed(max(2, round(rate * scale.open)), f"{stretch} open".strip())
    for part, share in _parts(entries, scale.parts):
        sent = trace.poisson(traffic.seed + part, share, rate)
        yield Order(MIXED, OPEN, part, sent, scale.open_users, rate, _patience(scale.open))


def burst(traffic: Traffic, sizes: Sizes) -> Iterator[Order]:
    scale = sizes.scale
    entries = traffic.burst(scale.requests(sizes.capacity, scale.burst))
    for part, share in _parts(entries, scale.parts):
        yield _closed(BURST, part, share, scale.users, scale.burst)


def profiled(traffic: Traffic, scale: Scale) -> Order:
    """Some of the burst phase's, again and short, past what the cache knows of them."""
    entries = [
        replace(it, max_tokens=PROFILED_TOKENS, cache_salt="profiled")
        for it in traffic.burst(PROFILED_REQUESTS)
    ]
    return _closed("profiled burst", 0, entries, scale.users, LEAST_SECONDS)


def _closed(phase: str, part: int, entries: Sequence[Entry], users: int, seconds: float) -> Order:
    return Order(phase, CLOSED, part, trace.closed(entries), users, 0.0, _patience(seconds))


def _patience(seconds: float) -> float:
    return max(LEAST_SECONDS, PATIENCE * seconds)


def _parts(entries: Sequence[Entry], parts: int) -> Iterator[tuple[int, Sequence[Entry]]]:
    """About as many in each; at least one."""
    size = -(-len(entries) // parts)
    marked = trace.labelled(entries)
    for part, first in enumerate(range(0, len(entries), size)):
        yield part, marked[first : first + size]

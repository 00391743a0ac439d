"""Traces of a load test: which requests are sent in which order, and when.

Every trace is made from a seed: the same seed and tokenizer, the same trace, which ``digest``
proves. A file of ``lines`` is a log that ``traffic.log`` reads back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from clients.request import Request
from loadtest.traffic.burst import burst_prompts
from loadtest.traffic.draw import dealt, pick, shuffled
from loadtest.traffic.kinds import KINDS
from loadtest.traffic.prompts import LENGTHS, Count, Limits, write

SHARES: Mapping[str, float] = MappingProxyType({"short": 0.7, "medium": 0.2, "long": 0.1})


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. Exactly one of ``text`` and ``messages`` is given.

    The labels are for reports and are not sent: entries that ask for the same are equal.
    """

    text: str | None = None  # raw, without a chat template
    messages: tuple[tuple[str, str], ...] | None = None  # (role, content)
    max_tokens: int | None = None  # None: the server's default
    at: float | None = None  # seconds since the first of the trace; None: as soon as may be
    session_id: str | None = None
    cache_salt: str | None = None
    kind: str = field(default="", compare=False)  # "": not known
    length: str = field(default="", compare=False)
    repeat: bool = field(default=False, compare=False)  # asked before

    def request(self, **sampling: Any) -> Request:
        """As the clients send it; ``max_tokens`` of the entry counts."""
        own = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return Request(
            text=self.text,
            messages=self._chat(),
            sampling={**sampling, **own},
            session_id=self.session_id,
            cache_salt=self.cache_salt,
        )

    def line(self) -> str:
        """Canonical JSON of what is sent: names in order, no spaces, ASCII, without nulls."""
        values = {
            "prompt": self.text,
            "messages": self._chat(),
            "max_tokens": self.max_tokens,
            "at": self.at,
            "session_id": self.session_id,
            "cache_salt": self.cache_salt,
        }
        known = {name: value for name, value in values.items() if value is not None}
        return json.dumps(known, sort_keys=True, separators=(",", ":"))

    def _chat(self) -> list[dict[str, str]] | None:
        if self.messages is None:
            return None
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the prompts of a trace are written."""

    count: Count
    limits: Limits = field(default_factory=Limits)
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)  # of the length classes
    max_tokens: tuple[int, int] = (128, 128)  # least and most, drawn for every prompt


def warm_up(seed: int, recipe: Recipe, prompts: int = 1000, rounds: int = 5) -> list[Entry]:
    """Different prompts of all kinds and lengths, each of them once a round."""
    name = f"{seed}/warm-up"
    writers = _writers(name, recipe)
    lengths = dealt(random.Random(name), recipe.shares, prompts)
    return in_rounds(seed, [next(writers[length]) for length in lengths], rounds)


def in_rounds(seed: int, entries: Sequence[Entry], rounds: int) -> list[Entry]:
    """All entries in every round, in another order each time."""
    source = random.Random(f"{seed}/rounds")
    return [entry for _ in range(rounds) for entry in shuffled(source, entries)]


def mixed(seed: int, recipe: Recipe, requests: int, repeat_share: float = 0.6) -> list[Entry]:
    """Requests of all length classes, of which a share repeats an earlier one exactly.

    Every class has its share to within one request, and so have the repeats in every class, save
    that its first cannot be one. It is an earlier *request* that is drawn for a repeat: what was
    asked often is asked again, and popularity becomes a power law (Simon's process).
    """
    if not 0 <= repeat_share <= 1:
        raise ValueError(f"repeat_share must be from 0 to 1, not {repeat_share}")
    name = f"{seed}/mixed"
    source, writers = random.Random(name), _writers(name, recipe)
    lengths = dealt(source, recipe.shares, requests)
    is_repeat = {
        length: iter(_repeats(source, lengths.count(length), repeat_share)) for length in LENGTHS
    }
    sent: dict[str, list[Entry]] = {length: [] for length in LENGTHS}
    trace = []
    for length in lengths:
        again = next(is_repeat[length])
        entry = pick(source, sent[length]) if again else next(writers[length])
        sent[length].append(entry)
        trace.append(entry)
    return trace


def _repeats(source: random.Random, requests: int, share: float) -> list[bool]:
    """Which of the requests of a class repeat an earlier one."""
    if not requests:
        return []
    many = min(round(requests * share), requests - 1)
    return [False, *shuffled(source, [True] * many + [False] * (requests - 1 - many))]


def burst(seed: int, prompts: int, max_tokens: int = 128) -> list[Entry]:
    """Different prompts whose answers are hard to guess."""
    return [
        Entry(messages=(("user", text),), max_tokens=max_tokens, kind="burst")
        for text in burst_prompts(seed, prompts)
    ]


def _writers(name: str, recipe: Recipe) -> dict[str, Iterator[Entry]]:
    return {length: _written(f"{name}/{length}", length, recipe) for length in LENGTHS}


def _written(name: str, length: str, recipe: Recipe) -> Iterator[Entry]:
    """Different entries of a length class without end, the kinds taking turns."""
    source, lengths = random.Random(name), recipe.limits.range(length)
    least, most = recipe.max_tokens
    seen = set()
    for number, kind in enumerate(itertools.cycle(shuffled(source, KINDS))):
        text = write(f"{name}/{number}", kind, lengths, recipe.count)
        if text in seen:  # hardly ever, but it would be a repeat that nobody ordered
            continue
        seen.add(text)
        budget = least + int((most - least + 1) * source.random())
        yield Entry(messages=(("user", text),), max_tokens=budget, kind=kind, length=length)


def poisson(seed: int, trace: Sequence[Entry], rate: float) -> list[Entry]:
    """The trace as an open loop: each is sent at its time, whatever became of those before.

    Args:
        rate: requests per second in the mean; the gaps are exponential, the first comes at 0.
    """
    source = random.Random(f"{seed}/poisson")
    gaps = (-math.log(1 - source.random()) / rate for _ in trace[1:])
    # Microseconds: the last bits of a logarithm are not the same in every libm.
    return [
        replace(entry, at=round(at, 6))
        for entry, at in zip(trace, itertools.accumulate(gaps, initial=0.0))
    ]


def closed(trace: Sequence[Entry]) -> list[Entry]:
    """The trace as a closed loop: the next is sent when one of those before has ended."""
    return [replace(entry, at=None) for entry in trace]


def repeats(trace: Sequence[Entry]) -> list[bool]:
    """Which entries ask what their tenant asked before."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for entry in trace:
        key = entry.text, entry.messages, entry.cache_salt
        found.append(key in seen)
        seen.add(key)
    return found


def labelled(trace: Sequence[Entry]) -> list[Entry]:
    """The trace with its repeats marked."""
    return [replace(entry, repeat=again) for entry, again in zip(trace, repeats(trace))]


def sampled(seed: int, trace: Sequence[Entry], prompts: int) -> list[Entry]:
    """So many different prompts of a trace, or all that it has: a warm-up from a log."""
    different = [entry for entry, again in zip(trace, repeats(trace)) if not again]
    return shuffled(random.Random(f"{seed}/sampled"), different)[:prompts]


def lines(trace: Sequence[Entry]) -> Iterator[bytes]:
    """The trace as a log, line by line."""
    return (entry.line().encode() + b"\n" for entry in trace)


def digest(trace: Sequence[Entry]) -> str:
    """SHA-256 in hex of ``lines``: equal where the same was sent, and at the same times."""
    sha = hashlib.sha256()
    for line in lines(trace):
        sha.update(line)
    return sha.hexdigest()

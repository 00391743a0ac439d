"""What rounds on several servers say: speed against plain, the oracle's, answers that differ."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from deepseek_flash import metrics

from loadtest.bench.dflash_sides import Leg, joined
from loadtest.bench.dspark_replay import REFERENCES, ROW_COSTS, Tally, oracle, overall
from loadtest.bench.dspark_served_sides import OURS, PLAIN, WATCHED, Gains
from loadtest.bench.dspark_trace import Record
from loadtest.numbers import spread
from loadtest.scrape import summed

# Tokens/s of the whole round; and of a request: no batch is full while the last ones end.
ALL, EACH, ORACLE = "all", "each", "oracle"
Asked = Sequence[tuple[str, str]]  # kind and prompt, in the order of the stream


@dataclass(frozen=True)
class Play:
    """What one side made of a pair's prompts."""

    legs: tuple[Leg, ...]  # a round each
    gains: tuple[Gains, ...]  # as many
    first: int  # round that is measured; those before warm up

    @property
    def measured(self) -> tuple[Leg, ...]:
        return self.legs[self.first :]

    @property
    def gained(self) -> dict[str, dict[str, float]]:
        """The server's counts in the rounds that are measured."""
        gains = self.gains[self.first :]
        return {name: summed([each[name] for each in gains]) for name in WATCHED}


@dataclass(frozen=True)
class Pair:
    """The same prompts on every side."""

    asked: Asked
    plays: Mapping[str, Play]  # by side
    best: Mapping[str, float]  # the oracle's speed against plain, by kind; may be empty

    def rates(self, side: str) -> dict[str, float]:
        """Tokens/s of all requests together, and tokens a second of a request, also by kind."""
        legs = self.plays[side].measured
        kinds = [kind for kind, _ in self.asked]
        each = rates_by_kind([EACH] * len(kinds), legs)
        return {ALL: joined(legs).rate, **each, **rates_by_kind(kinds, legs)}

    def speeds(self, side: str) -> Mapping[str, float]:
        """Against plain, by kind."""
        if side == ORACLE:
            return self.best
        plain = self.rates(PLAIN)
        return {scope: rate / plain[scope] for scope, rate in self.rates(side).items()}

    def gain(self, side: str, scope: str = EACH) -> float:
        """The share of what the oracle gains, whose steps are counted for each request alone."""
        best = self.best[ALL] - 1.0
        return (self.speeds(side)[scope] - 1.0) / best if best > 0.0 else 0.0

    def different(self, side: str) -> list[tuple[str, int]]:
        """Prompts that were not answered as by plain, and from which token on."""
        return [
            (prompt, place)
            for mine, plains in zip(self.plays[side].legs, self.plays[PLAIN].legs, strict=True)
            for (_, prompt), one, other in zip(self.asked, mine.replies, plains.replies)
            if (place := first_difference(one.token_ids, other.token_ids)) is not None
        ]


def rates_by_kind(kinds: Sequence[str], legs: Sequence[Leg]) -> dict[str, float]:
    """Tokens over the sum of the requests' seconds."""
    tokens: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for leg in legs:
        for kind, reply in zip(kinds, leg.replies, strict=True):
            tokens[kind] += reply.tokens
            seconds[kind] += reply.total
    return {kind: tokens[kind] / seconds[kind] for kind in tokens}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """None: there is none. Where only the length differs, that of the shorter."""
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


# -- the oracle ------------------------------------------------------------------------------


def row_cost(concurrency: int, measured: Mapping[int, float] = ROW_COSTS) -> float:
    """A draft row's cost in steps, between those measured in proportion."""
    many = sorted(measured)
    return float(np.interp(concurrency, many, [measured[each] for each in many]))


def bare_record(kind: str, prompt: Sequence[int], output: Sequence[int]) -> Record:
    """All of a record that the oracle looks at."""
    unknown = np.full(len(output), np.nan, np.float32)
    return Record(
        kind, np.array(prompt, np.int32), np.array(output, np.int32), unknown, unknown, unknown,
        unknown, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float16), unknown,
    )  # fmt: skip


def oracle_speeds(
    records: Sequence[Record], earlier: Sequence[Record], cost: float, budget: int
) -> dict[str, float]:
    """Against plain, by kind, of one round.

    It copies from the latest outputs of the kind, those of requests that still run among them: no
    policy at a concurrency above 1 could have them all.

    Args:
        earlier: the stream before this round, where it is remembered.
        budget: the requests' max_tokens.
    """
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    seen: defaultdict[str, list[Record]] = defaultdict(list)
    for it in earlier:
        seen[it.kind].append(it)
    for it in records:
        near = [(other, 1.0) for other in seen[it.kind][-REFERENCES:][::-1]]
        tallies[it.kind].add(oracle(it, near, budget))
        seen[it.kind].append(it)
    total = overall(tallies)
    named = ((ALL, total), (EACH, total), *tallies.items())
    return {kind: tally.speed(cost) for kind, tally in named}


# -- what is shown ---------------------------------------------------------------------------


def table(pairs: Sequence[Pair]) -> str:
    """Speeds by side and kind, medians over pairs with minimum and maximum.

    A kind's tokens/s are those of one request: the kinds run beside each other.
    """
    sides = list(pairs[0].plays)
    scopes = list(pairs[0].rates(PLAIN))
    lines = [f"  {'':12} {'':10} {'tokens/s':>8}  x plain"]
    for side in [*sides, ORACLE] if pairs[0].best else sides:
        for scope in scopes:
            rate = ""
            if side != ORACLE:
                rate = f"{statistics.median(pair.rates(side)[scope] for pair in pairs):.1f}"
            speed = spread([pair.speeds(side)[scope] for pair in pairs]) if side != PLAIN else ""
            lines.append(f"  {side:12} {scope:10} {rate:>8}  {speed}".rstrip())
    if pairs[0].best:
        for side in sides[1:]:
            for scope in (EACH, ALL):
                share = spread([pair.gain(side, scope) for pair in pairs])
                lines.append(f"  {side}: share of the oracle's gain, {scope}: {share}")
        lines.append(
            f"  oracle: copies from the last {REFERENCES} outputs of the kind that come earlier in"
            " the stream, even if they still run, and as far as they are right"
        )
    return "\n".join(lines)


def drafts(gained: Gains) -> str:
    """Shares of the paths, and of the drafts that were right."""
    paths = gained[metrics.PATH_TOKENS.name]
    proposed, accepted = (
        gained[metric.name] for metric in (metrics.DRAFTS_PROPOSED, metrics.DRAFTS_ACCEPTED)
    )
    total = sum(paths.values()) or 1.0
    shares = ", ".join(f"{path} {count / total:.1%}" for path, count in sorted(paths.items()))
    right = ", ".join(
        f"{source} {accepted.get(source, 0.0):.0f} of {count:.0f}"
        f" ({accepted.get(source, 0.0) / count:.1%})"
        for source, count in sorted(proposed.items())
        if count
    )
    return f"tokens by path: {shares or 'none'}; drafts accepted: {right or 'none proposed'}"


def gained_by(side: str, pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """A side's counts in all pairs."""
    gains = [pair.plays[side].gained for pair in pairs]
    return {name: summed([each[name] for each in gains]) for name in WATCHED}


def replay_problems(pairs: Sequence[Pair], known: bool) -> list[str]:
    """Why ours did not do what is to be measured.

    Args:
        known: every prompt's continuation must have been found, and the engine run all the same.
    """
    if OURS not in pairs[0].plays:
        return []
    uses = gained_by(OURS, pairs)[metrics.REPLAYS.name]
    asked = sum(len(leg.replies) for pair in pairs for leg in pair.plays[OURS].measured)
    found = []
    if replayed := sum(uses.get(use, 0.0) for use in ("whole", "beginning")):
        found.append(f"{replayed:.0f} answers of ours were replayed, not generated")
    drafted = uses.get("nothing", 0.0)
    if drafted != (asked if known else 0):
        found.append(f"ours knew the continuation of {drafted:.0f} of {asked} requests")
    return found


def figures(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For the report."""
    return [
        {
            "requests": len(pair.asked),
            "oracle": dict(pair.best),
            "sides": {
                side: {
                    **joined(play.measured).figures(),
                    "rates": pair.rates(side),
                    "speeds": pair.speeds(side),
                    "gain": pair.gain(side) if pair.best else None,
                    "different": len(pair.different(side)),
                    "counts": play.gained,
                }
                for side, play in pair.plays.items()
            },
        }
        for pair in pairs
    ]

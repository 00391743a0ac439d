"""What DFlash and DSpark change, by how much the traffic repeats: the mixed phase for several
shares of repeats, and one leg of prompts near the end of the model's context.

Closed loops on two resident servers, as in the load test; nothing of one share is known in another.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from deepseek_flash import metrics

from loadtest import phases
from loadtest.numbers import quantile, spread
from loadtest.phases import Sizes, Traffic
from loadtest.player import LocustError, Order
from loadtest.records import CLOSED, OFF, ON, Leg
from loadtest.report.plots import curve
from loadtest.run import Options, Servers, command, new_folder, resident, traffic_of
from loadtest.scale import Scale
from loadtest.scrape import hit_rate, summed
from loadtest.traffic.prompts import Limits
from loadtest.traffic.trace import Recipe

SHARES = (0.0, 0.2, 0.5, 0.8)
PARTS = 5
SHORTER = 0.4  # than the load test, for each share
LEAST_AT_ZERO = 0.98
# Where prompts of the long leg end and begin, of what an answer leaves of the context.
LONG_TO, LONG_FROM = 0.98, 0.9
LONG_REQUESTS = 16


@dataclass(frozen=True)
class Point:
    """One share: a part's legs on both servers each."""

    share: float
    pairs: Sequence[tuple[Leg, Leg]]  # off, on

    @property
    def tokens(self) -> list[float]:
        """Tokens/s, on against off, of each part."""
        return [_rate(on) / _rate(off) for off, on in self.pairs]

    @property
    def first_token(self) -> list[float]:
        """The 95th percentile of all parts, on against off."""
        return [_first_token([on for _, on in self.pairs])
                / _first_token([off for off, _ in self.pairs])]  # fmt: skip

    @property
    def hits(self) -> float:
        return hit_rate(summed([on.counted.get(metrics.LOOKUPS.name, {}) for _, on in self.pairs]))

    def figures(self) -> dict[str, object]:
        return {
            "repeat_share": self.share,
            "requests": sum(off.planned for off, _ in self.pairs),
            "tokens_per_s": self.tokens,
            "tokens_per_s_median": statistics.median(self.tokens),
            "ttft_p95": self.first_token[0],
            "hit_rate": self.hits,
            "off": [_rate(off) for off, _ in self.pairs],
            "on": [_rate(on) for _, on in self.pairs],
            "errors": sum(
                bool(it.error) for pair in self.pairs for leg in pair for it in leg.records
            ),
        }

    def __str__(self) -> str:
        return (
            f"tokens/s x {spread(self.tokens)}, first token p95 x {self.first_token[0]:.3f},"
            f" hit rate {self.hits:.3f}"
        )


def _rate(leg: Leg) -> float:
    return sum(it.tokens for it in leg.records) / leg.seconds


def _first_token(legs: Sequence[Leg]) -> float:
    return quantile(
        [it.first_token for leg in legs for it in leg.records if it.first_token is not None], 0.95
    )


def measured(share: float, orders: Iterator[Order], servers: Servers) -> Point:
    pairs = []
    for order in orders:
        legs = {leg.side: leg for leg in servers.play(order)}
        for leg in legs.values():
            if not any(it.first is not None for it in leg.records):
                raise LocustError(f"{order.name}, {leg.side}: not one answer")
        pairs.append((legs[OFF], legs[ON]))
    return Point(share, pairs)


def closed_loop(traffic: Traffic, sizes: Sizes, share: float) -> Iterator[Order]:
    """The mixed phase's closed loop with another share."""
    orders = phases.mixed(replace(traffic, repeat_share=share), sizes, f"share {share:g}")
    return (order for order in orders if order.loop == CLOSED)


def long_context(traffic: Traffic, scale: Scale, context: int) -> Iterator[Order]:
    """Prompts near the end of the context, with the load test's share of repeats."""
    room = context - scale.max_tokens[1]
    limits = Limits(2, round(LONG_FROM * room), round(LONG_TO * room))
    recipe = Recipe(traffic.recipe.count, limits, {"long": 1.0}, scale.max_tokens)
    few = replace(scale, closed=float(LONG_REQUESTS))
    orders = phases.mixed(replace(traffic, recipe=recipe), Sizes(few, 1.0), "long")
    return (order for order in orders if order.loop == CLOSED)


def measure(options: Options) -> bool:
    """The whole curve; whether it is where it must be without repeats."""
    folder = new_folder("curve", datetime.now(UTC))
    with resident(options, folder) as servers:
        scale = replace(options.scale.fitted(servers.context), parts=PARTS)
        scale = replace(scale, closed=SHORTER * scale.closed)
        traffic = traffic_of(options, scale)
        sizes = Sizes(scale, options.capacity or servers.capacity(traffic, scale))
        points = []
        for share in SHARES:
            print(f"repeat share {share:g}:", flush=True)
            points.append(measured(share, closed_loop(traffic, sizes, share), servers))
            print(f"  {points[-1]}", flush=True)
            _write(folder, options, points, None)
        print("prompts near the end of the context:", flush=True)
        long = measured(
            options.repeat_share, long_context(traffic, scale, servers.context), servers
        )
        print(f"  {long} (the document: x 1.42 with 32K)", flush=True)
    _write(folder, options, points, long)
    print(f"report: {folder / 'curve.svg'}")
    least = statistics.median(points[0].tokens)
    good = least >= LEAST_AT_ZERO
    print(
        f"without repeats: x {least:.3f}, aim >= {LEAST_AT_ZERO:g}: {'met' if good else 'MISSED'}"
    )
    return good


def _write(folder: Path, options: Options, points: Sequence[Point], long: Point | None) -> None:
    """After each share: a long run that is interrupted leaves what it has."""
    found = {
        "model": options.model,
        "scale": options.scale.name,
        "seed": options.seed,
        "points": [it.figures() for it in points],
        "long_context": None if long is None else long.figures(),
    }
    (folder / "curve.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    drawn = [(it.share, statistics.median(it.tokens), it.first_token[0]) for it in points]
    (folder / "curve.svg").write_text(curve(drawn))


if __name__ == "__main__":
    sys.exit(command(measure))

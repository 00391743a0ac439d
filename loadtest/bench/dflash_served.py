"""What the DFlash cache gives and costs: a server with it against one without, both resident.

Load is on one server at a time, in alternating legs, so that the machine's drift hits both. Three
parts: traffic that repeats (what it gives), prompts that are alike (what their answers are good for
as references), and prompts that never repeat (what it costs).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from deepseek_flash import metrics

from loadtest.bench.dflash_sides import (
    CONCURRENCY,
    FLAGS,
    Leg,
    Side,
    Sides,
    flush,
    in_turns,
    joined,
    side,
    verdict,
)
from loadtest.bench.dflash_traffic import KINDS, TEMPLATES_A_KIND, novel, templated
from loadtest.bench.report import write_report
from loadtest.numbers import spread
from loadtest.scrape import drained, hit_rate, rise, settled, summed
from loadtest.served import exit_status

TOKENS = 96
ROUNDS, REPEATED_FILLINGS, NEAR_FILLINGS = 3, 2, 8  # of each template
LEAST_SPEEDUP, LEAST_HIT_RATE = 10.0, 0.95
MOST_FIRST_TOKEN_SHARE, FIRST_TOKEN_FLOOR = 0.1, 0.025  # the floor in seconds
NOVEL_PROMPTS, NOVEL_TOKENS, NOVEL_CONCURRENCIES = 24, 64, (1, 4)
LEAST_NOVEL_SPEED, MOST_NOVEL_FIRST_TOKEN = 0.98, 1.02
PAIRS = {"repeated": 3, "novel": 5}


# -- traffic that repeats --------------------------------------------------------------------


@dataclass(frozen=True)
class Repeated:
    """One server's rounds of the same prompts."""

    rounds: tuple[Leg, ...]
    lookups: tuple[Mapping[str, float], ...]  # by result, a round each
    texts: tuple[Mapping[str, str], ...]  # prompt → answer, a round each

    @property
    def later(self) -> Leg:
        return joined(self.rounds[1:])

    @property
    def later_hit_rate(self) -> float:
        return hit_rate(summed(self.lookups[1:]))

    def figures(self) -> list[dict[str, Any]]:
        return [
            {**leg.figures(), "lookups": lookups, "hit_rate": hit_rate(lookups)}
            for leg, lookups in zip(self.rounds, self.lookups, strict=True)
        ]


def repeated_leg(it: Side, rounds: Sequence[Sequence[str]]) -> Repeated:
    legs, lookups, texts = [], [], []
    before = settled(it.served)
    it.warm_up(CONCURRENCY)
    for number, prompts in enumerate(rounds, 1):
        leg = it.leg(prompts, CONCURRENCY, max_tokens=TOKENS)
        after = settled(it.served)
        gain = rise(before, after, metrics.LOOKUPS.name)
        print(f"    {it.name}, round {number}: {leg}, {hit_rate(gain):.1%} hits", flush=True)
        legs.append(leg)
        lookups.append(gain)
        texts.append(dict(zip(prompts, (reply.text for reply in leg.replies), strict=True)))
        before = after
    return Repeated(tuple(legs), tuple(lookups), tuple(texts))


def repeated_pair(sides: Sides, number: int) -> tuple[Repeated, Repeated]:
    """Other prompts in each pair, so that neither engine has seen them before."""
    source = random.Random(f"repeated {number}")
    prompts = [text for kind in KINDS for text in templated(kind, REPEATED_FILLINGS, source)]
    rounds = [source.sample(prompts, len(prompts)) for _ in range(ROUNDS)]
    print(f"  pair {number + 1}: {len(prompts)} prompts, {ROUNDS} rounds", flush=True)
    legs = {}
    for it in in_turns(sides, number):
        if it is sides[0]:
            flush(it.served)
        legs[it] = repeated_leg(it, rounds)
    return legs[sides[0]], legs[sides[1]]


def first_token_use(on: float, off: float) -> float:
    """The first token's seconds as a share of what the aim allows."""
    return on / max(MOST_FIRST_TOKEN_SHARE * off, FIRST_TOKEN_FLOOR)


def differing(on: Repeated, off: Repeated) -> int:
    """Answers that are not those of the server without the cache."""
    return sum(
        mine[prompt] != theirs[prompt]
        for mine, theirs in zip(on.texts, off.texts, strict=True)
        for prompt in mine
    )


def repeated(sides: Sides, pairs: int) -> bool:
    runs = [repeated_pair(sides, number) for number in range(pairs)]
    print("\nTraffic that repeats, with the cache against without, medians over pairs (min to max)")
    for index in range(ROUNDS):
        speed = [on.rounds[index].rate / off.rounds[index].rate for on, off in runs]
        first = [on.rounds[index].first_token / off.rounds[index].first_token for on, off in runs]
        print(f"  round {index + 1}: tokens/s x {spread(speed)}, first token x {spread(first)}")
    speed = [on.later.rate / off.later.rate for on, off in runs]
    first = [on.later.first_token * 1e3 for on, _ in runs]
    use = [first_token_use(on.later.first_token, off.later.first_token) for on, off in runs]
    hits = [on.later_hit_rate for on, _ in runs]
    different = sum(differing(on, off) for on, off in runs)
    allowed = f"<= {MOST_FIRST_TOKEN_SHARE:g} of without, or {FIRST_TOKEN_FLOOR * 1e3:g} ms"
    good = [
        verdict("rounds 2 and 3: tokens/s x", speed, f">= {LEAST_SPEEDUP:g}",
                statistics.median(speed) >= LEAST_SPEEDUP),
        verdict("rounds 2 and 3: first token, ms", first, allowed, statistics.median(use) <= 1),
        verdict("rounds 2 and 3: hit rate", hits, f">= {LEAST_HIT_RATE}",
                statistics.median(hits) >= LEAST_HIT_RATE),
        different == 0,
    ]  # fmt: skip
    print(f"  answers that differ: {different}")
    write_report("bench-dflash-repeated", {
        "speed": speed, "first_token_ms": first, "first_token_of_allowed": use, "hit_rate": hits,
        "different": different,
        "pairs": [{"on": on.figures(), "off": off.figures()} for on, off in runs],
    })  # fmt: skip
    return all(good)


# -- prompts that are alike ------------------------------------------------------------------


@dataclass(frozen=True)
class Near:
    """What the cache made of one kind's prompts, or of all."""

    tokens: float  # of the answers
    lookups: Mapping[str, float]  # by result
    references: Mapping[str, float]  # answers that had some, their tokens, guessed, right
    encoder: Mapping[str, float]  # runs, seconds

    def figures(self) -> dict[str, Any]:
        runs, known = self.encoder.get("runs", 0.0), self.references
        return {
            "tokens": self.tokens, "lookups": self.lookups, "reference_tokens": known,
            "right_of_tokens": known.get("right", 0.0) / (known.get("tokens", 0.0) or 1.0),
            "right_of_guessed": known.get("right", 0.0) / (known.get("guessed", 0.0) or 1.0),
            "encoder_runs": runs,
            "encoder_ms": self.encoder.get("seconds", 0.0) / (runs or 1.0) * 1e3,
        }  # fmt: skip

    def __str__(self) -> str:
        it = self.figures()
        found = ", ".join(f"{name} {count:.0f}" for name, count in sorted(self.lookups.items()))
        return (
            f"{found}; {self.references.get('answers', 0.0):.0f} answers had references:"
            f" {it['right_of_tokens']:.1%} of their tokens right ({it['right_of_guessed']:.1%} of"
            f" those guessed); encoder {it['encoder_ms']:.1f} ms x {it['encoder_runs']:.0f}"
        )


def near_kind(it: Side, kind: str, source: random.Random) -> Near:
    prompts = templated(kind, NEAR_FILLINGS, source)
    before = drained(it.served)
    leg = it.leg(prompts, CONCURRENCY, max_tokens=TOKENS)
    after = drained(it.served)
    encoder = metrics.ENCODER_SECONDS.name
    return Near(
        sum(reply.tokens for reply in leg.replies),
        rise(before, after, metrics.LOOKUPS.name),
        rise(before, after, metrics.REFERENCE_TOKENS.name),
        {"runs": sum(rise(before, after, f"{encoder}_count").values()),
         "seconds": sum(rise(before, after, f"{encoder}_sum").values())},
    )  # fmt: skip


def near(it: Side) -> bool:
    """One kind after another, so that the counters' rises are a kind's own; no aim yet."""
    flush(it.served)
    source = random.Random("near")
    print(f"\nPrompts that are alike: {TEMPLATES_A_KIND} templates x {NEAR_FILLINGS} a kind, once")
    found: dict[str, Near] = {}
    for kind in KINDS:
        found[kind] = near_kind(it, kind, source)
        print(f"  {kind}: {found[kind]}", flush=True)
    kinds = list(found.values())
    found["all"] = Near(
        sum(each.tokens for each in kinds), summed([each.lookups for each in kinds]),
        summed([each.references for each in kinds]), summed([each.encoder for each in kinds]),
    )  # fmt: skip
    print(f"  all: {found['all']}")
    write_report("bench-dflash-near", {name: each.figures() for name, each in found.items()})
    return found["all"].encoder["runs"] > 0


# -- prompts that never repeat ---------------------------------------------------------------


def novel_pair(sides: Sides, number: int, prompts: Sequence[str], many: int) -> tuple[Leg, Leg]:
    """The same prompts on both: neither engine has seen them before."""
    legs: dict[Side, Leg] = {}
    for it in in_turns(sides, number):
        if it is sides[0]:
            flush(it.served)
        it.warm_up(many)
        legs[it] = it.leg(prompts, many, max_tokens=NOVEL_TOKENS, ignore_eos=True)
    on, off = legs[sides[0]], legs[sides[1]]
    print(
        f"  pair {number + 1} at {many}: {off}; with the cache tokens/s x {on.rate / off.rate:.3f},"
        f" first token x {on.first_token / off.first_token:.3f}", flush=True,
    )  # fmt: skip
    return on, off


def novel_traffic(sides: Sides, pairs: int) -> bool:
    questions = novel(random.Random("novel"))
    before = settled(sides[0].served)
    runs: dict[int, list[tuple[Leg, Leg]]] = {many: [] for many in NOVEL_CONCURRENCIES}
    print(f"\nPrompts that never repeat: {NOVEL_PROMPTS} a leg, {NOVEL_TOKENS} tokens")
    for number in range(pairs):
        for many, found in runs.items():
            prompts = list(itertools.islice(questions, NOVEL_PROMPTS))
            found.append(novel_pair(sides, number, prompts, many))
    after = drained(sides[0].served)
    encoded = sum(rise(before, after, f"{metrics.ENCODER_SECONDS.name}_count").values())
    lookups = rise(before, after, metrics.LOOKUPS.name)
    figures: dict[str, Any] = {"encoder_runs": encoded, "lookups": lookups}
    # Without the encoder and with hits, the cost would not be the one that is asked for.
    good = [encoded > 0, hit_rate(lookups) == 0]
    print("Medians over pairs (min to max)")
    for many, found in runs.items():
        speed = [on.rate / off.rate for on, off in found]
        first = [on.first_token / off.first_token for on, off in found]
        good += [
            verdict(f"tokens/s at {many} x", speed, f">= {LEAST_NOVEL_SPEED}",
                    statistics.median(speed) >= LEAST_NOVEL_SPEED),
            verdict(f"first token at {many} x", first, f"<= {MOST_NOVEL_FIRST_TOKEN}",
                    statistics.median(first) <= MOST_NOVEL_FIRST_TOKEN),
        ]  # fmt: skip
        figures[f"at {many}"] = {
            "speed": speed, "first_token": first,
            "pairs": [{"on": on.figures(), "off": off.figures()} for on, off in found],
        }  # fmt: skip
    print(f"  lookups {lookups}, encoder runs {encoded:.0f}")
    write_report("bench-dflash-novel", figures)
    return all(good)


PARTS: Mapping[str, Callable[[Sides, int], bool]] = {
    "repeated": repeated,
    "near": lambda sides, pairs: near(sides[0]),
    "novel": novel_traffic,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument("--pairs", type=int, help=f"of legs; default {PAIRS}")
    parser.add_argument("--model", default="smollm2", help="must have a chat template")
    arguments = parser.parse_args()
    parts = [arguments.part] if arguments.part else list(PARTS)

    def measure() -> bool:
        good = True
        with ExitStack() as stack:
            on = stack.enter_context(
                side("on", arguments.model, [*FLAGS, "--dflash-semantic", "on"])
            )
            off = on
            if parts != ["near"]:  # that part has one server only
                off = stack.enter_context(
                    side("off", arguments.model, [*FLAGS, "--no-enable-dflash"])
                )
            for part in parts:
                good &= PARTS[part]((on, off), arguments.pairs or PAIRS.get(part, 1))
        return good

    return exit_status(measure)


if __name__ == "__main__":
    sys.exit(main())

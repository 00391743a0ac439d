"""What DSpark gives and costs through the served ensemble, against plain vLLM and its own ways.

All servers are resident, load is on one at a time, in alternating legs, so that the machine's drift
hits all. Three parts: a stream of five kinds in which no prompt repeats, prompts that have nothing
to do with each other, and prompts that repeat while the engine must run all the same. Wrong drafts
are not served: that is ``dspark_replay``'s and the integration tests' business.

The servers are started anew for each concurrency: a suffix tree of vLLM's remembers all it has
seen, whatever the cache_salt.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model

from loadtest.bench.dflash_sides import Side, in_turns, verdict
from loadtest.bench.dspark_prompts import KINDS, prompts
from loadtest.bench.dspark_replay import ROW_COSTS
from loadtest.bench.dspark_served_figures import (
    ALL,
    Asked,
    Pair,
    Play,
    bare_record,
    drafts,
    figures,
    gained_by,
    oracle_speeds,
    replay_problems,
    row_cost,
    table,
)
from loadtest.bench.dspark_served_sides import (
    OURS,
    PLAIN,
    SUFFIX,
    Sides,
    play_round,
    resident,
    side_flags,
)
from loadtest.bench.dspark_trace import Record
from loadtest.bench.report import write_report
from loadtest.served import exit_status

TOKENS, MODEL_LENGTH = 96, 2048
CONCURRENCIES, PAIRS, PROMPTS = (1, 4, 16), 3, 6
UNSEEN = 20  # of each kind: those before are what the network was trained on (dspark_train)
REPEATED, REPEATED_A_KIND = 16, 4
UNRELATED = "unrelated"
LEAST_NOVEL_SPEED = 0.98

Encode = Callable[[str], Sequence[int]]  # a prompt's token ids


# -- the parts -------------------------------------------------------------------------------


def mixed(number: int, each: int) -> Asked:
    """Another ``each`` of every kind in every pair, the kinds taking turns."""
    first = UNSEEN + number * each
    return prompts(first + each)[first * len(KINDS) :]


def novel(number: int, each: int) -> Asked:
    """As many, of the kind that has least in common; the same in every pair."""
    return [(UNRELATED, text) for text in KINDS[UNRELATED][: each * len(KINDS)]]


def repeats(number: int, each: int) -> Asked:
    return mixed(number, REPEATED_A_KIND)[:REPEATED]


@dataclass(frozen=True)
class Part:
    traffic: Callable[[int, int], Asked]  # of a pair by its number, and the prompts of a kind
    sides: tuple[str, ...] = (PLAIN, SUFFIX, OURS)
    rounds: int = 1  # of the same prompts
    measured_from: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    least: float = 0.0  # ours against plain

    @property
    def known(self) -> bool:
        """Whether the measured rounds ask what was asked before."""
        return self.measured_from > 0


PARTS: Mapping[str, Part] = {
    "mixed": Part(mixed),
    "novel": Part(novel, sides=(PLAIN, OURS), least=LEAST_NOVEL_SPEED),
    # Log-probabilities are not stored: the engine runs, with the stored answer as its draft.
    "repeats": Part(repeats, rounds=3, measured_from=1, sampling={"logprobs": 0}),
}


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    name: str
    part: Part
    sides: tuple[str, ...]
    model: str
    asked: tuple[Asked, ...]  # a pair each
    concurrencies: tuple[int, ...]
    costs: Mapping[int, float]  # of a draft row, in steps, by concurrency
    remember: bool


# -- the run ---------------------------------------------------------------------------------


def play(it: Side, plan: Plan, number: int, many: int) -> Play:
    """All rounds of a pair on one side."""
    # Fresh, so that no answer is known from an earlier pair; the same on all sides, as vLLM's
    # own prefix cache goes by it too.
    salt = f"dspark {plan.name} {many} {0 if plan.remember else number}"
    sampling = {"max_tokens": TOKENS, "cache_salt": salt, **plan.part.sampling}
    texts = [text for _, text in plan.asked[number]]
    legs, gains = [], []
    for turn in range(plan.part.rounds):
        leg, gain = play_round(it, texts, many, sampling)
        what = f"round {turn + 1}, " if plan.part.rounds > 1 else ""
        print(f"    {it.name}, {what}{leg}", flush=True)
        legs.append(leg)
        gains.append(gain)
    return Play(tuple(legs), tuple(gains), plan.part.measured_from)


def run_pair(
    sides: Sides, plan: Plan, number: int, many: int, encode: Encode, stream: list[Record]
) -> Pair:
    """``stream``: what was asked before and is remembered; this pair's is added."""
    asked = plan.asked[number]
    print(f"  pair {number + 1} of {len(plan.asked)} at {many}: {len(asked)} prompts", flush=True)
    played = {it.name: play(it, plan, number, many) for it in in_turns(sides, number)}
    plays = {it.name: played[it.name] for it in sides}
    if plan.part.known:  # the oracle would know every answer
        return Pair(asked, plays, {})
    records = [
        bare_record(kind, encode(text), reply.token_ids)
        for (kind, text), reply in zip(asked, plays[PLAIN].legs[0].replies, strict=True)
    ]
    best = oracle_speeds(records, stream, row_cost(many, plan.costs), TOKENS)
    if plan.remember:
        stream += records
    return Pair(asked, plays, best)


def show(plan: Plan, many: int, pairs: Sequence[Pair]) -> bool:
    """Print what was found; whether it is as it must be."""
    print(f"\n{plan.name} at {many}, {len(pairs)} pairs, medians (min to max)\n{table(pairs)}")
    good = True
    if OURS in plan.sides:
        print(f"  ours: {drafts(gained_by(OURS, pairs))}")
        if plan.part.least:
            speeds = [pair.speeds(OURS)[ALL] for pair in pairs]
            good = verdict("ours: tokens/s x", speeds, f">= {plan.part.least:g}",
                           statistics.median(speeds) >= plan.part.least)  # fmt: skip
    for problem in replay_problems(pairs, plan.part.known):
        print(f"  PROVES NOTHING: {problem}")
        good = False
    for side in plan.sides[1:]:
        different = [it for pair in pairs for it in pair.different(side)]
        if different:
            print(f"  !!! {side}: {len(different)} ANSWERS DIFFER FROM PLAIN'S !!!")
            for prompt, place in different[:5]:
                print(f"      {prompt!r} from token {place}")
        else:
            print(f"  {side}: 0 answers differ from plain's")
        good &= not different
    print(flush=True)
    return good


def run(plan: Plan, encode: Encode) -> bool:
    """All concurrencies; whether all is as it must be."""
    good, found = True, {}
    for many in plan.concurrencies:
        pairs: list[Pair] = []
        stream: list[Record] = []
        with resident(plan.sides, plan.model, many) as sides:
            for number in range(len(plan.asked)):
                pairs.append(run_pair(sides, plan, number, many, encode, stream))
        good &= show(plan, many, pairs)
        found[f"at {many}"] = {"row_cost": row_cost(many, plan.costs), "pairs": figures(pairs)}
        # After each: a long run that is interrupted leaves what it has.
        write_report(f"bench-dspark-{plan.name}", {
            "model": plan.model, "sides": plan.sides, "tokens": TOKENS, "remember": plan.remember,
            **found,
        })  # fmt: skip
    return good


# -- the command -----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--model", default="smollm2", help="must have a chat template")
    parser.add_argument("--sides", nargs="+", metavar="SIDE",
                        help="plain (always one), suffix or suffix:0.5 (vLLM's; its least token "
                        "probability, 0.1 where not given), ngram (vLLM's), ours")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each kind, a pair")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--cost", action="append", metavar="CONCURRENCY=R", default=[],
                        help="for the oracle: a row's cost at a concurrency, in steps")  # fmt: skip
    parser.add_argument("--remember", action="store_true",
                        help="one cache_salt for all pairs: ours and the oracle remember the "
                        "stream so far, as a suffix tree always does")  # fmt: skip
    given = parser.parse_args(argv)
    if min([given.pairs, given.prompts, *given.concurrency]) < 1:
        parser.error("--pairs, --prompts, --concurrency: at least 1")
    part = PARTS[given.part]
    sides = (PLAIN, *(it for it in dict.fromkeys(given.sides or part.sides) if it != PLAIN))
    try:
        for side in sides:
            side_flags(side)
        costs = {int(many): float(r) for many, r in (it.split("=") for it in given.cost)}
    except ValueError as error:
        parser.error(str(error))
    asked = tuple(part.traffic(number, given.prompts) for number in range(given.pairs))
    if len({len(it) for it in asked}) > 1 or not asked[0]:
        parser.error("--pairs, --prompts: there are only 20 unseen prompts of a kind")
    again = {text for _, text in asked[0]} & {text for it in asked[1:] for _, text in it}
    if again and (given.remember or any(side.startswith(SUFFIX) for side in sides)):
        parser.error(f"{given.part} asks the same in each pair: no suffix, no --remember")
    return Plan(
        given.part, part, sides, given.model, asked, tuple(given.concurrency), costs or ROW_COSTS,
        given.remember,
    )  # fmt: skip


def main() -> int:
    plan = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers as Ctrl-C does
    encoder = PromptEncoder(load_tokenizer(resolve_model(plan.model), None, False))

    def encode(text: str) -> Sequence[int]:
        messages = json.dumps([{"role": "user", "content": text}])
        return encoder.from_messages(messages, MODEL_LENGTH).ids

    return exit_status(lambda: run(plan, encode))


if __name__ == "__main__":
    sys.exit(main())

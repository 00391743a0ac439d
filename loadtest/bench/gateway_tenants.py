"""Whether a tenant can tell by the time of first tokens what another has asked (CB-45).

Each round, tenant A asks secrets of its own; then B asks for the first token of one of them, of one
with other last tokens, and of a prompt that A never asked. What B measures says nothing where the
AUC (the chance that a guess of A's comes before a prompt of nobody's) is one half. The control is A
itself, which does come to its answers sooner.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from deepseek_flash.gateway.keys import hashed

from loadtest.bench.gateway_side import NAME, serving_gateway
from loadtest.bench.report import write_report
from loadtest.served import Served, exit_status

KEYS = {"a": "key-of-tenant-a", "b": "key-of-tenant-b"}
SECRET, CHANGED = 600, 16  # tokens
IDS = (10, 500)  # of any vocabulary
FAIR = (0.45, 0.55)
SHOWN = 25  # rounds between two lines of progress


@dataclass
class Times:
    """Seconds to the first token."""

    same: list[float] = field(default_factory=list)  # B: what A asked
    changed: list[float] = field(default_factory=list)  # B: the same but for its last tokens
    new: list[float] = field(default_factory=list)  # B: what nobody asked
    own: list[float] = field(default_factory=list)  # A: what it asked before


def auc(sooner: Sequence[float], later: Sequence[float]) -> float:
    """The chance that one of ``sooner`` is below one of ``later``; a tie counts half."""
    wins = sum((a < b) + (a == b) / 2 for a in sooner for b in later)
    return wins / (len(sooner) * len(later))


class Prompts:
    """Token ids that were not asked before."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, tokens: int = SECRET) -> list[int]:
        return [self._random.randrange(*IDS) for _ in range(tokens)]

    def order(self, names: Sequence[str]) -> list[str]:
        return self._random.sample(names, len(names))


def first_token(client: httpx.Client, tenant: str, prompt: Sequence[int]) -> float:
    """Seconds, as this tenant measures them."""
    body = {"model": NAME, "prompt": list(prompt), "temperature": 0, "max_tokens": 2,
            "stream": True}  # fmt: skip
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    begin, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - begin
    return first


def run(served: Served, prompts: Prompts, rounds: int) -> Times:
    times = Times()
    with httpx.Client(base_url=served.gateway, timeout=120, trust_env=False) as client:
        for number in range(rounds + 2):
            for name in prompts.order(("same", "changed", "new")):
                secret = prompts.new()
                first_token(client, "a", secret)
                guess = {
                    "same": secret,
                    "changed": secret[:-CHANGED] + prompts.new(CHANGED),
                    "new": prompts.new(),
                }[name]
                seconds = first_token(client, "b", guess)
                if number > 1:  # the first rounds warm up
                    getattr(times, name).append(seconds)
            if number > 1:
                times.own.append(first_token(client, "a", secret))
                if len(times.own) % SHOWN == 0:
                    print(f"  {len(times.own)} of {rounds} rounds: {told(times)}", flush=True)
    return times


def told(times: Times) -> str:
    same, changed, own = (auc(those, times.new) for those in (times.same, times.changed, times.own))
    return f"AUC {same:.3f} same, {changed:.3f} changed at its end; A's own {own:.3f}"


def judge(model: str, times: Times) -> bool:
    print(f"{model}: B's guesses of A's prompts against new ones, {len(times.new)} each")
    print(f"  {told(times)}")
    write_report(f"gateway-tenants-{model.rsplit('/', 1)[-1]}", vars(times))
    fair = all(FAIR[0] <= auc(those, times.new) <= FAIR[1] for those in (times.same, times.changed))
    return fair and auc(times.own, times.new) > FAIR[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def measure() -> bool:
        keys = ",".join(hashed(name, key) for name, key in KEYS.items())
        with serving_gateway(arguments.model, "--gateway-keys", keys) as served:
            return judge(arguments.model, run(served, Prompts(arguments.seed), arguments.rounds))

    return exit_status(measure)


if __name__ == "__main__":
    sys.exit(main())

"""Replays recorded answers through drafting policies, step by step, without an engine.

Requests run ``concurrency`` at a time, as in the engine: the policy drafts for all that run, the
controller decides for all, one step verifies all. What a step takes is told by a cost model: either
a plain step takes 1 and each draft row ``row cost / concurrency``, or as an engine has measured it
(``--steps``, the line "milliseconds of a step" of its log). The oracle knows where the text is
repeated from, and how far.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepseek_flash.dflash.neighbours import RunningMoments
from deepseek_flash.dspark.controller import Batch
from deepseek_flash.dspark.cost import Sample, StepCost
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.policy import LEAST, DraftRequest

from loadtest.bench.dspark_contenders import (
    NOTHING,
    ORACLE,
    Contender,
    agreeing,
    contenders,
)
from loadtest.bench.dspark_trace import TRACES, Record, read
from loadtest.bench.report import write_report

ROW_COSTS = {1: 0.112, 4: 0.25, 16: 0.54}  # by concurrency: docs/platform.md
EACH, ALL = "each", "all"  # tokens a second of a request, and of the engine
REFERENCES, LONGEST = 12, 16  # neighbours of a request; draft tokens a step

Neighbours = Sequence[tuple[Record, float]]


@dataclass(slots=True)
class Tally:
    """What became of some requests."""

    tokens: int = 0
    steps: int = 0  # of each request
    rows: int = 0
    seconds: float = 0.0  # that the requests took, each for itself
    drafted: Counter[tuple[Source, int]] = field(default_factory=Counter)  # source, position
    accepted: Counter[tuple[Source, int]] = field(default_factory=Counter)

    def speed(self, row_cost: float) -> float:
        """Against plain decoding, where steps of these requests alone cost 1 and a row this."""
        return self.tokens / (self.steps + row_cost * self.rows)

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.rows += other.rows
        self.seconds += other.seconds
        self.drafted += other.drafted
        self.accepted += other.accepted


def linear(concurrency: int, row_cost: float) -> StepCost:
    """A plain step takes 1 whatever runs; a draft row its cost over the concurrency."""
    cost = StepCost()
    row = row_cost / concurrency
    cost.fit(
        Sample(requests, requests * (1 + drafts), 64.0, 1.0 + row * requests * drafts)
        for requests, drafts in product(sorted({1, concurrency}), (0, 1, LONGEST))
    )
    return cost


def measured(text: str) -> StepCost:
    """As ``StepCost`` tells itself: "1x1 35.0, 1x5 33.1, …", requests x rows each, milliseconds.

    Raises ValueError.
    """
    cost, samples = StepCost(), []
    for part in text.split(","):
        shape, milliseconds = part.split()
        requests, rows = map(int, shape.split("x"))
        samples.append(Sample(requests, requests * rows, 64.0, float(milliseconds) / 1e3))
    cost.fit(samples)
    return cost


def neighbours(
    records: Sequence[Record], most: int = REFERENCES, earlier: bool = False
) -> list[Neighbours]:
    """For each record the others whose prompts' states are nearest, as the DFlash cache does it.

    Args:
        earlier: only those before it.
    """
    states = torch.from_numpy(np.stack([record.state for record in records]))
    moments = RunningMoments(states.shape[1], states.device)
    for state in states:
        moments.add(state)
    rows = torch.nn.functional.normalize(moments.standardise(states), dim=1)
    cosines = rows @ rows.T - 2.0 * torch.eye(len(rows))
    if earlier:
        cosines -= 4.0 * torch.ones_like(cosines).triu()
    values, order = cosines.topk(min(most, len(records) - 1), dim=1)
    return [
        [(records[other], cosine) for other, cosine in zip(row, near) if cosine > 0.0]
        for row, near in zip(order.tolist(), values.tolist())
    ]


class Running:
    """A recorded request on its way. Its references are there once the first token is out."""

    def __init__(
        self, record: Record, near: Neighbours, budget: int, burst: int = LONGEST,
        chain: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            budget: the request's max_tokens.
            burst: most draft tokens from its own text, a step.
            chain: what the DFlash cache takes for its continuation.
        """
        self.record, self.place = record, 0
        self._budget, self._burst = budget, burst
        self.matcher = Matcher(record.prompt.tolist())
        if len(chain):
            self.matcher.add_reference(chain, Source.CHAIN)
        self.advance(1)
        for other, similarity in near:  # the cache keeps no probability of each token
            self.matcher.add_reference(other.output.tolist(), Source.REFERENCE, similarity)

    @property
    def truth(self) -> list[int]:
        """The tokens to come."""
        left: list[int] = self.record.output[self.place :].tolist()
        return left

    def request(self, least_chance: float = LEAST) -> DraftRequest:
        record, row = self.record, self.place - 1
        return DraftRequest(
            self.matcher,
            limit=min(LONGEST, self._budget - self.place - 1),
            burst_limit=self._burst,
            last_logprobs=lambda ids: record.logprobs(row, ids),
            entropy_ratio=float(record.entropy_ratio[row]),
            gap=float(record.gap[row]),
            attention_variance=float(record.attention_variance[row]),
            least_chance=least_chance,
        )

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.record.prompt) + self.place

    def advance(self, tokens: int) -> int:
        """That many more, or what is left; returns how many."""
        new = slice(self.place, min(self.place + tokens, len(self.record.output)))
        self.matcher.append(self.record.output[new].tolist(), self.record.top1[new].tolist())
        self.place = new.stop
        return new.stop - new.start


class Replay:
    """Requests that take turns on an engine which exists in its cost model only."""

    def __init__(
        self, contender: Contender, cost: StepCost, concurrency: int, overhead: float = 0.0
    ) -> None:
        """``overhead``: seconds that a step takes longer where anything is drafted at all."""
        self._drafter = contender.drafter() if contender.drafter else None
        self._controller = contender.controller(cost)
        self._cost, self._concurrency = cost, concurrency
        self._overhead = overhead if self._drafter else 0.0
        self.seconds = 0.0
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)

    def run(self, requests: Iterator[Running]) -> None:
        """All of them, in their order."""
        batch: list[Running] = []
        while True:
            batch = [it for it in batch if it.truth]
            while len(batch) < self._concurrency and (new := next(requests, None)):
                batch += [new] if new.truth else []
            if not batch:
                return
            self._step(batch)

    def _step(self, batch: Sequence[Running]) -> None:
        context = sum(it.tokens for it in batch) / len(batch)
        least = self._controller.least_chance(len(batch), context)
        asked = [it.request(least) for it in batch]
        drafts = [self._draft(request, it) for request, it in zip(asked, batch)]
        room = [request.limit for request in asked]
        burst = [request.burst_limit for request in asked]
        signals = np.array(
            [(it.entropy_ratio, it.gap, it.attention_variance) for it in asked], np.float32
        )
        lengths = self._controller.decide(drafts, Batch(context, room, burst, signals))
        accepted = [
            agreeing(draft.token_ids[:length], it.truth)
            for draft, length, it in zip(drafts, lengths, batch)
        ]
        rows = sum(lengths)
        seconds = float(self._cost.seconds(len(batch), len(batch) + rows, context))
        seconds += self._overhead
        self.seconds += seconds
        self._controller.verified(drafts, lengths, accepted, context)
        for it, draft, length, right in zip(batch, drafts, lengths, accepted):
            tally = Tally(it.advance(right + 1), 1, length, seconds)
            for position, source in enumerate(draft.sources[:length]):
                tally.drafted[source, position] += 1
                tally.accepted[source, position] += position < right
            self.tallies[it.record.kind].add(tally)

    def _draft(self, request: DraftRequest, running: Running) -> Draft:
        if self._drafter is None or request.limit <= 0:
            return Draft()
        return self._drafter(request, running.truth)


def oracle(record: Record, near: Neighbours, budget: int) -> Tally:
    """What the oracle makes of one request by itself."""
    replay = Replay(ORACLE, linear(1, 0.0), 1)
    replay.run(iter([Running(record, near, budget)]))
    return replay.tallies[record.kind]


@dataclass(frozen=True, slots=True)
class Found:
    """What a contender made of the stream.

    Tokens a second of the engine count the time until the last request has ended; those of a
    request leave out that the batch is not full any more then.
    """

    by_kind: Mapping[str, Tally]
    seconds: float  # of the engine

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second of a request by kind, and of all together."""
        total = overall(self.by_kind)
        by_kind = {kind: it.tokens / it.seconds for kind, it in self.by_kind.items()}
        return {**by_kind, EACH: total.tokens / total.seconds, ALL: total.tokens / self.seconds}


def compare(
    records: Sequence[Record], near: Sequence[Neighbours], many: Sequence[Contender],
    cost: StepCost, concurrency: int, burst: int, overhead: float = 0.0,
) -> dict[str, Found]:  # fmt: skip
    """By contender; those that are always there, nothing and the oracle, first and last."""
    budget = max(len(record.output) for record in records)
    found = {}
    for it in (NOTHING, *many, ORACLE):
        limit = LONGEST if it is ORACLE else burst
        replay = Replay(it, cost, concurrency, 0.0 if it is ORACLE else overhead)
        pairs = zip(records, near, strict=True)
        replay.run(Running(record, others, budget, limit) for record, others in pairs)
        found[it.name] = Found(replay.tallies, replay.seconds)
    return found


def overall(by_kind: Mapping[str, Tally]) -> Tally:
    total = Tally()
    for tally in by_kind.values():
        total.add(tally)
    return total


def halves(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The first and the second half of each kind."""
    seen: Counter[str] = Counter()
    count = Counter(record.kind for record in records)
    split: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        split[2 * seen[record.kind] >= count[record.kind]].append(record)
        seen[record.kind] += 1
    return split


def table(found: Mapping[str, Found]) -> tuple[str, dict[str, Any]]:
    """Speed by contender and kind, and the share of what the oracle gains."""
    plain, best = found[NOTHING.name].rates, found[ORACLE.name].rates
    columns = [*plain, f"gain {EACH}", f"gain {ALL}"]
    lines = [f"{'':24} " + " ".join(f"{column:>9}" for column in columns)]
    figures: dict[str, Any] = {}
    for name, it in found.items():
        total = overall(it.by_kind)
        speeds = {kind: rate / plain[kind] for kind, rate in it.rates.items()}
        for scope in (EACH, ALL):
            speeds[f"gain {scope}"] = (speeds[scope] - 1.0) / (best[scope] / plain[scope] - 1.0)
        figures[name] = {
            **speeds, "rows": total.rows, "accepted": total.accepted.total(), "steps": total.steps,
        }  # fmt: skip
        lines.append(f"{name:24} " + " ".join(f"{value:9.3f}" for value in speeds.values()))
    return "\n".join(lines), figures


def acceptance(tally: Tally) -> str:
    """Accepted of drafted, by source and position."""
    lines = []
    for source in Source:
        shares = [
            f"{tally.accepted[source, at] / tally.drafted[source, at]:.2f}"
            f"/{tally.drafted[source, at]}"
            for at in range(LONGEST) if tally.drafted[source, at]
        ]  # fmt: skip
        if shares:
            lines.append(f"  {source.name.lower()}: {' '.join(shares)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACES / "smollm2.npz")
    parser.add_argument("--networks", type=Path, default=TRACES / "networks",
                        help="a directory of other weights to compare with")  # fmt: skip
    parser.add_argument("--burst", type=int, default=LONGEST,
                        help="draft tokens from a request's own text a step")  # fmt: skip
    parser.add_argument("--references", type=int, default=REFERENCES)
    parser.add_argument("--first", type=int, metavar="N", help="requests of the stream only")
    parser.add_argument("--earlier", action="store_true",
                        help="references are answers from before in the stream only")  # fmt: skip
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(ROW_COSTS))
    parser.add_argument("--cost", action="append", metavar="CONCURRENCY=R", default=[],
                        help="a row's cost at a concurrency, in steps")  # fmt: skip
    parser.add_argument("--steps", help="milliseconds of steps, as the engine's log tells them")
    parser.add_argument("--overhead", type=float, default=0.0,
                        help="milliseconds that a step takes longer with speculation")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders that begin so")
    given = parser.parse_args()
    costs = {**ROW_COSTS, **{int(n): float(r) for n, r in (it.split("=") for it in given.cost)}}
    _, unseen = halves(read(given.trace))
    unseen = unseen[: given.first]
    near = neighbours(unseen, given.references, given.earlier)
    networks = {path.stem: path for path in sorted(given.networks.glob("*.json"))}
    chosen = [it for it in contenders(networks) if it.name.startswith(tuple(given.only or ("",)))]
    figures = {}
    for many in given.concurrency:
        cost = measured(given.steps) if given.steps else linear(many, costs[many])
        found = compare(unseen, near, chosen, cost, many, given.burst, given.overhead / 1e3)
        text, figures[str(many)] = table(found)
        print(f"\nconcurrency {many}, {given.steps or f'a row costs {costs[many]} steps'}\n{text}")
        if ours := found.get("ours"):
            print(f"accepted/drafted by source and position\n{acceptance(overall(ours.by_kind))}")
    write_report("dspark-replay", {"trace": str(given.trace), "speed": figures})


if __name__ == "__main__":
    main()

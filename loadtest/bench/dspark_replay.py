"""Replays recorded answers through drafting policies, step by step, without an engine.

A step of one request costs 1 + r for each draft row, where r is a row's cost times the concurrency
over the cost of a step without drafts. Plain decoding costs 1 a token. The oracle knows where the
text is repeated from, and how far.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepseek_flash.dflash.neighbours import RunningMoments
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.policy import DraftRequest

from loadtest.bench.dspark_contenders import Contender, Cut, Drafter, Flow, contenders
from loadtest.bench.dspark_trace import TRACES, Record, read
from loadtest.bench.report import write_report

ROW_COSTS = {1: 0.112, 4: 0.25, 16: 0.54}  # by concurrency: docs/platform.md
REFERENCES, LONGEST = 12, 16  # neighbours of a request; draft tokens a step

Neighbours = Sequence[tuple[Record, float]]


@dataclass(slots=True)
class Tally:
    """What became of some requests."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    drafted: Counter[tuple[Source, int]] = field(default_factory=Counter)  # source, position
    accepted: Counter[tuple[Source, int]] = field(default_factory=Counter)

    def speed(self, row_cost: float) -> float:
        """Against plain decoding."""
        return self.tokens / (self.steps + row_cost * self.rows)

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.rows += other.rows
        self.drafted += other.drafted
        self.accepted += other.accepted


def neighbours(records: Sequence[Record], most: int = REFERENCES) -> list[Neighbours]:
    """For each record the others whose prompts' states are nearest, as the DFlash cache does it."""
    states = torch.from_numpy(np.stack([record.state for record in records]))
    moments = RunningMoments(states.shape[1], states.device)
    for state in states:
        moments.add(state)
    rows = torch.nn.functional.normalize(moments.standardise(states), dim=1)
    cosines = rows @ rows.T - 2.0 * torch.eye(len(rows))
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

    def request(self) -> DraftRequest:
        record, row = self.record, self.place - 1
        return DraftRequest(
            self.matcher,
            limit=min(LONGEST, self._budget - self.place - 1),
            burst_limit=self._burst,
            last_logprobs=lambda ids: record.logprobs(row, ids),
            entropy_ratio=float(record.entropy_ratio[row]),
            gap=float(record.gap[row]),
            attention_variance=float(record.attention_variance[row]),
        )

    def advance(self, tokens: int) -> int:
        """That many more, or what is left; returns how many."""
        new = slice(self.place, min(self.place + tokens, len(self.record.output)))
        self.matcher.append(self.record.output[new].tolist(), self.record.top1[new].tolist())
        self.place = new.stop
        return new.stop - new.start


def replay(running: Running, drafter: Drafter | None, cut: Cut, flow: Flow, tally: Tally) -> None:
    """Run one request to its end."""
    while truth := running.truth:
        request = running.request()
        draft = drafter.draft(request) if drafter is not None else Draft()
        rows = min(cut(draft, request, flow), len(draft.token_ids))
        accepted = _agreeing(draft.token_ids[:rows], truth)
        for position, source in enumerate(draft.sources[:rows]):
            tally.drafted[source, position] += 1
            tally.accepted[source, position] += position < accepted
        tokens = running.advance(accepted + 1)
        tally.tokens, tally.steps, tally.rows = (
            tally.tokens + tokens, tally.steps + 1, tally.rows + rows,
        )  # fmt: skip
        flow.add(tokens, rows)


def _agreeing(draft: Sequence[int], truth: Sequence[int]) -> int:
    pairs = enumerate(zip(draft, truth))
    return next((at for at, (a, b) in pairs if a != b), min(len(draft), len(truth)))


def oracle(record: Record, near: Neighbours, budget: int) -> Tally:
    """The best place to copy from, exactly as far as it is right; never from nowhere."""
    places: dict[int, list[tuple[Sequence[int], int]]] = defaultdict(list)

    def see(text: Sequence[int], begin: int, end: int) -> None:
        for place in range(begin, end):
            places[text[place]].append((text, place + 1))

    own = [*record.prompt.tolist(), *record.output.tolist()]
    begin = len(record.prompt)
    for other, _ in near:
        text = [own[begin - 1], *other.output.tolist()]
        see(text, 0, len(text) - 1)
    see(own, 0, begin)
    tally, place = Tally(), begin + 1
    while place < len(own):
        most = min(LONGEST, budget - (place - begin) - 1)
        # Only what is already there may be copied, but a copy may run on into itself.
        rows = max(
            (_agreeing(text[at : at + most], own[place:]) for text, at in places[own[place - 1]]),
            default=0,
        )
        end = min(place + rows + 1, len(own))
        tally.add(Tally(end - place, 1, min(rows, end - place)))
        see(own, place - 1, end - 1)
        place = end
    return tally


def compare(
    records: Sequence[Record], near: Sequence[Neighbours], many: Sequence[Contender],
    row_cost: float, burst: int,
) -> dict[str, dict[str, Tally]]:  # fmt: skip
    """Tallies by policy and kind, and of the oracle."""
    budget = max(len(record.output) for record in records)
    found: dict[str, dict[str, Tally]] = {}
    for it in many:
        flow, by_kind = Flow(row_cost), defaultdict[str, Tally](Tally)
        for record, others in zip(records, near, strict=True):
            replay(Running(record, others, budget, burst), it.drafter, it.cut, flow,
                   by_kind[record.kind])  # fmt: skip
        found[it.name] = by_kind
    found["oracle"] = defaultdict(Tally)
    for record, others in zip(records, near, strict=True):
        found["oracle"][record.kind].add(oracle(record, others, budget))
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


def table(found: Mapping[str, Mapping[str, Tally]], row_cost: float) -> tuple[str, dict[str, Any]]:
    """Speed by policy and kind, and the share of what the oracle gains."""
    kinds = list(found["oracle"])
    lines = [f"{'':24} " + " ".join(f"{kind:>9}" for kind in (*kinds, "all", "gain"))]
    figures: dict[str, Any] = {}
    best = overall(found["oracle"]).speed(row_cost)
    for name, by_kind in found.items():
        total = overall(by_kind)
        speeds = {kind: by_kind[kind].speed(row_cost) for kind in kinds}
        speeds["all"] = total.speed(row_cost)
        speeds["gain"] = (speeds["all"] - 1.0) / (best - 1.0)
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
    parser.add_argument("--cost", action="append", metavar="CONCURRENCY=R", default=[],
                        help="a row's cost at a concurrency, in steps")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders that begin so")
    arguments = parser.parse_args()
    costs = {int(many): float(r) for many, r in (it.split("=") for it in arguments.cost)}
    _, unseen = halves(read(arguments.trace))
    near = neighbours(unseen, arguments.references)
    networks = {path.stem: path for path in sorted(arguments.networks.glob("*.json"))}
    chosen = [
        it for it in contenders(networks) if it.name.startswith(tuple(arguments.only or ("",)))
    ]
    figures = {}
    for concurrency, row_cost in (costs or ROW_COSTS).items():
        found = compare(unseen, near, chosen, row_cost, arguments.burst)
        text, figures[str(concurrency)] = table(found, row_cost)
        print(f"\nconcurrency {concurrency}, a row costs {row_cost} steps\n{text}")
        if ours := found.get("ours"):
            print(f"accepted/drafted by source and position\n{acceptance(overall(ours))}")
    write_report("dspark-replay", {"trace": str(arguments.trace), "speed": figures})


if __name__ == "__main__":
    main()

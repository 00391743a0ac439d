"""How many of the guessed tokens each request hands to the model: pure, for a whole batch at once.

All rows of a step share one base cost, so they compete with one another: whichever request a row
belongs to, it is worth the probability that it is accepted, S = the product of the probabilities
up to it. S falls along a draft; so the best k rows of the batch are always beginnings of drafts,
and the best set is among the K + 1 beginnings of the rows sorted by S, whatever a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepseek_flash.dspark.cost import StepCost
from deepseek_flash.dspark.decision_kernels import choose
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.paths import Path
from deepseek_flash.dspark.policy import LEAST
from deepseek_flash.dspark.trust import Trust

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Drafts = Sequence[Draft | None]  # one a running request; None or empty: nothing was found

MAX_DRAFT_TOKENS = 16
# A step. In simulation 0.998 gains 0.1 % on steady traffic and loses 9 % for 200 steps after
# repeats, while a second seems to be worth more than it is.
SPEEDUP_DECAY = 0.95
_BELIEVED = np.ones(len(Source))


@dataclass(slots=True)
class Batch:
    """What a decision must know of the running requests, in the order of their drafts."""

    context: float  # tokens, mean
    room: Sequence[int]  # most draft tokens that a request can take before its limits
    burst_steps: Sequence[int]  # most of them where they rest on the own history alone
    # [requests, 3]: entropy ratio, gap, attention variance; NaN where there is none.
    signals: NDArray[np.float32] | None = None


class LengthController(Protocol):
    """Decides, step by step, how many draft tokens to verify."""

    def least_chance(self, requests: int, context: float) -> float:
        """Chance that a draft's row is accepted, below which it cannot be chosen: so many requests
        run, with so many tokens each."""
        ...

    def decide(self, drafts: Drafts, batch: Batch) -> list[int]:
        """How many tokens of each draft go into the next step. Changes no draft."""
        ...

    def verified(
        self, drafts: Drafts, lengths: Sequence[int], accepted: Sequence[int], context: float
    ) -> None:
        """What became of a step: of each request's first ``lengths`` draft tokens, so many were
        ``accepted``. Requests without drafts count too; those that are gone are left out."""
        ...


class Controller:
    """Lengths that maximise the expected tokens per second of all steps, not of this one alone.

    A second is worth what it brings on average: plain steps' tokens times the running speedup. (To
    maximise each step's own tokens per second is up to 4 % slower in simulation.) It is never
    worth less than in plain steps, for whoever loses by guessing must not guess more.
    """

    def __init__(self, cost: StepCost, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> None:
        self.trust = Trust()
        self._cost = cost
        self._max_draft_tokens = max_draft_tokens
        self._plain_steps = self._spent = 1.0  # steps that the tokens were worth; that they took
        self._steps = 0

    @property
    def speedup(self) -> float:
        """Tokens per second against plain steps, running mean, at least 1."""
        return max(1.0, self._plain_steps / self._spent)

    def least_chance(self, requests: int, context: float) -> float:
        # Of the best k rows the last one pays for itself, or k - 1 would be better.
        return max(LEAST, self.speedup * self._cost.cheapest_row(requests, context))

    def decide(self, drafts: Drafts, batch: Batch) -> list[int]:
        self._steps += 1
        caps = [
            max(0, min(_usable(draft, steps), room, self._max_draft_tokens)) if draft else 0
            for draft, room, steps in zip(drafts, batch.room, batch.burst_steps)
        ]
        total = sum(caps)
        if not total or not self._cost.measured:
            return [0] * len(drafts)
        requests = len(drafts)
        seconds = self._cost.seconds(
            requests, np.arange(requests, requests + total + 1), batch.context
        )
        rate = self.speedup * requests / seconds[0]
        probabilities, sources = _joined(drafts, caps)
        lengths, limits = np.empty(requests, np.int64), np.array(caps, np.int64)
        choose(probabilities, sources, limits, self.trust.factor, seconds, rate, lengths)
        if self.trust.factor.min() < Trust.UNTRUSTED:
            believed = np.empty_like(lengths)
            choose(probabilities, sources, limits, _BELIEVED, seconds, rate, believed)
            self._probe(drafts, believed > 0, lengths, seconds)
        found: list[int] = lengths.tolist()
        return found

    def verified(
        self, drafts: Drafts, lengths: Sequence[int], accepted: Sequence[int], context: float
    ) -> None:
        if not lengths or not self._cost.measured:
            return
        requests, rows = len(lengths), sum(lengths)
        steps = 1.0
        if rows:
            plain, taken = self._cost.step(requests, requests + rows, context)
            steps = taken / plain
        self._plain_steps *= SPEEDUP_DECAY
        self._spent *= SPEEDUP_DECAY
        self._plain_steps += 1.0 + sum(accepted) / requests
        self._spent += steps
        claimed: list[float] = []
        sources: list[int] = []
        right: list[bool] = []
        for draft, length, good in zip(drafts, lengths, accepted):
            if draft and length:
                reached = min(good + 1, length)
                claimed += draft.probabilities[:reached]
                sources += draft.sources[:reached]
                right += [True] * good + [False] * (reached - good)
        if claimed:
            self.trust.judge(np.array(sources, np.int64), np.array(claimed), np.array(right))

    def _probe(
        self, drafts: Drafts, wanted: NDArray[np.bool_], lengths: Ints, seconds: Floats
    ) -> None:
        """Give a row to sources that get none, but would (``wanted``) if they were believed."""
        taken = int(lengths.sum())
        # There is room for them: a source without rows has left all of its own.
        for source in np.flatnonzero(self.trust.factor < Trust.UNTRUSTED):
            led = [
                (draft.probabilities[0], row)
                for row, draft in enumerate(drafts)
                if draft and draft.token_ids and draft.sources[0] == source
            ]
            rows = [row for _, row in led]
            if wanted[rows].any() and not lengths[rows].any():
                price = float((seconds[taken + 1] - seconds[taken]) / seconds[0])
                if self.trust.probe_due(Source(source), price, self._steps):
                    lengths[max(it for it in led if wanted[it[1]])[1]] = 1
                    taken += 1


def warm_up() -> None:
    """Compile, or load from numba's cache, what decisions need."""
    trust, lengths = Trust(), np.empty(1, np.int64)
    probabilities, sources = _joined([Draft([1], [0.5], [Source.HISTORY])], [1])
    trust.judge(sources, probabilities, np.array([True]))
    choose(probabilities, sources, np.ones(1, np.int64), trust.factor, np.ones(2), 1.0, lengths)


def _usable(draft: Draft, burst_steps: int) -> int:
    """A draft's length, cut where it goes on for too long on the own history alone."""
    return burst_steps if draft.own_run > burst_steps else len(draft.token_ids)


def _joined(drafts: Drafts, caps: Sequence[int]) -> tuple[Floats, Ints]:
    """Probabilities and sources of all drafts' usable tokens, one draft after the other."""
    flat: list[float] = []
    kinds: list[int] = []
    for draft, cap in zip(drafts, caps):
        if draft and cap:
            flat += draft.probabilities[:cap]
            kinds += draft.sources[:cap]
    return np.array(flat), np.array(kinds, np.int64)


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table: what the three signals must be for an action."""

    action: Path
    most_entropy_ratio: float
    least_gap: float
    most_attention_variance: float


# The source document names the signals and the actions, not the numbers. Certain: all of the
# draft; less so: a burst; otherwise one token at a time.
RULES = (
    Rule(Path.FAST, 1.0, 0.5, 0.02),
    Rule(Path.BURST, 2.0, 0.1, 0.03),
)


class ThresholdController:
    """The readable one: the first rule that holds decides, whatever the draft and the load.

    The fallback, and the baseline that ``Controller`` must beat.
    """

    def __init__(
        self, rules: Sequence[Rule] = RULES, max_draft_tokens: int = MAX_DRAFT_TOKENS
    ) -> None:
        self._rules = rules
        self._max_draft_tokens = max_draft_tokens

    def least_chance(self, requests: int, context: float) -> float:
        return LEAST

    def action(self, entropy_ratio: float, gap: float, attention_variance: float) -> Path:
        """Without signals (NaN) no rule holds."""
        for rule in self._rules:
            if (
                entropy_ratio <= rule.most_entropy_ratio
                and gap >= rule.least_gap
                and attention_variance <= rule.most_attention_variance
            ):
                return rule.action
        return Path.SLOW

    def decide(self, drafts: Drafts, batch: Batch) -> list[int]:
        if batch.signals is None:
            return [0] * len(drafts)
        lengths = []
        for draft, room, steps, signals in zip(
            drafts, batch.room, batch.burst_steps, batch.signals.tolist()
        ):
            action = self.action(*signals)
            if draft is None or action == Path.SLOW:
                lengths.append(0)
                continue
            most = self._max_draft_tokens if action == Path.FAST else steps
            lengths.append(max(0, min(_usable(draft, steps), room, most)))
        return lengths

    def verified(
        self, drafts: Drafts, lengths: Sequence[int], accepted: Sequence[int], context: float
    ) -> None:
        """Thresholds learn nothing."""

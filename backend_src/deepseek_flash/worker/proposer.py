"""What goes on between two passes of the model: learn from the one, guess for the next.

vLLM makes the proposer by name and knows nothing else of it; our runner tells it what a pass
brought. It knows no vLLM itself, so that another runner can have it too.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_flash.dspark import controller, policy
from deepseek_flash.dspark.controller import (
    Batch,
    Controller,
    LengthController,
    ThresholdController,
)
from deepseek_flash.dspark.cost import Sample, StepCost
from deepseek_flash.dspark.decision_log import DecisionLog
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.paths import Path, PathAccounting, path_of
from deepseek_flash.dspark.policy import DraftRequest, Policy
from deepseek_flash.dspark.rest import Rest
from deepseek_flash.worker.requests import MOST_RECORDS, Requests, RequestState

logger = logging.getLogger(__name__)

Lookup = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclass(slots=True)
class Step:
    """What a pass of the model brought, request by request in the order of the batch."""

    request_ids: Sequence[str]
    token_ids: Sequence[Sequence[int]]  # none: a part of a prompt
    lengths: Sequence[int]  # draft tokens that were verified
    facts: Sequence[NDArray[np.float32]]  # [tokens, 3]: top-1 probability, entropy, gap
    variances: NDArray[np.float32] | None  # attention variance at the last token, now and then
    lookup: Callable[
        [int], Lookup
    ]  # of a request that got tokens: its last row's log-probabilities
    decodes_only: bool  # no request computed a prompt
    began: float  # the pass, by time.perf_counter
    done: float  # when its tokens were known

    @property
    def seconds(self) -> float:
        """That the pass took."""
        return self.done - self.began


class SparkProposer:
    """vLLM's ``custom_class`` proposer. Lives in the worker that samples."""

    def __init__(self, vllm_config: Any) -> None:
        self.requests = Requests()
        self.paths = PathAccounting()
        self.cost = StepCost()
        self.max_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._policy = self.make_policy()
        self._controller = self.make_controller()
        self._rest = Rest()
        self._looked = False  # for the drafts of the pass that runs
        self._log = DecisionLog()
        self._records: deque[dict[str, Any]] = deque(maxlen=MOST_RECORDS)
        self._steps = 0
        self._decision_seconds = self._step_seconds = 0.0
        self._signal_sums, self._signal_counts = np.zeros(3), np.zeros(3)  # one a signal

    def make_policy(self) -> Policy:
        return Policy()

    def make_controller(self) -> LengthController:
        return Controller(self.cost, self.max_draft_tokens)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM once the model is loaded: nothing of ours may compile later."""
        policy.warm_up()
        controller.warm_up()

    def start(self, samples: Sequence[Sample]) -> None:
        """Before the first request: steps were measured, if this engine lets us."""
        if samples:
            self.cost.fit(samples)
            logger.info("DSpark: milliseconds of a step: %s", self.cost)
        else:
            logger.warning("DSpark: this engine's steps cannot be measured; thresholds decide")
            self._controller = ThresholdController(max_draft_tokens=self.max_draft_tokens)
        self.drain()

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own way of asking, which does not say for which requests."""
        raise RuntimeError("SparkProposer needs the worker_cls of deepseek_flash.worker.worker")

    def bursts(self, drafted: Mapping[str, Sequence[int]]) -> int:
        """How many requests of a pass guess from their own history alone.

        Args:
            drafted: draft tokens that the pass verifies, by request.
        """
        states = [(self.requests.get(name), len(ids)) for name, ids in drafted.items()]
        paths = [path_of(state.draft, length) for state, length in states if state]
        return paths.count(Path.BURST)

    def lacks_variance(self, request_ids: Sequence[str]) -> bool:
        """Whether the attention variance of one of them was never measured: it is new."""
        states = map(self.requests.get, request_ids)
        return any(state and math.isnan(state.attention_variance) for state in states)

    # -- between two passes ------------------------------------------------------------------------

    def step(self, step: Step) -> list[list[int]]:
        """Take in what a pass brought; the tokens to verify in the next, request by request."""
        states = [self.requests.get(name) for name in step.request_ids]
        self._learn(step, states)
        signals = self._signals(step, states)
        self._signal_counts += len(signals) - np.isnan(signals).sum(axis=0)
        self._signal_sums += np.nansum(signals, axis=0)
        running = [
            row for row, state in enumerate(states)
            if state is not None and step.token_ids[row] and not state.ended
        ]  # fmt: skip
        found: list[list[int]] = [[] for _ in states]
        self._looked = bool(running) and self._looks()
        if self._looked:
            begin = time.perf_counter()
            found = self._decide(step, states, running, signals)
            self._rest.looked(time.perf_counter() - begin)
        self._steps += 1
        self._step_seconds += step.seconds
        self._decision_seconds += time.perf_counter() - step.done
        return found

    def _learn(self, step: Step, states: Sequence[RequestState | None]) -> None:
        drafts: list[Draft | None] = []
        lengths: list[int] = []
        accepted: list[int] = []
        contexts: list[int] = []
        for row, state in enumerate(states):
            token_ids = step.token_ids[row]
            if state is None or not token_ids:
                continue
            right, facts = len(token_ids) - 1, step.facts[row]
            if state.generated:  # otherwise it was the end of the prompt
                drafts.append(state.draft)
                lengths.append(step.lengths[row])
                accepted.append(right)
                contexts.append(state.tokens)
            state.count(step.lengths[row], right)
            self._note_savings(step, state, step.lengths[row], right)
            taken = state.take(token_ids, facts[:, 0].tolist(), facts[:, 1].tolist())
            self.paths.record(state.request_id, state.draft, step.lengths[row], right, taken)
            state.draft = None
            if state.ended:
                self._close(state)
        if contexts:
            context = sum(contexts) / len(contexts)
            rows = len(contexts) + sum(lengths)
            if step.decodes_only and len(contexts) == len(states):
                self.cost.observe(len(contexts), rows, context, step.seconds)
            self._controller.verified(drafts, lengths, accepted, context)
            if self._looked and self.cost.measured:
                plain, with_drafts = self.cost.step(len(contexts), rows, context)
                worth = sum(accepted) * plain / len(contexts)
                self._rest.saved(worth - (with_drafts - plain))

    def _looks(self) -> bool:
        """Whether it is worth the time to look for drafts."""
        return self._rest.looks()

    def _note_savings(self, step: Step, state: RequestState, length: int, accepted: int) -> None:
        """What a draft brought, in seconds of the engine, to the source that led it."""
        if not length or state.draft is None or not self.cost.measured:
            return
        requests, rows = len(step.lengths), sum(step.lengths)
        plain, taken = self.cost.step(requests, requests + rows, state.tokens)
        worth = accepted * plain / requests - (taken - plain) * length / rows
        state.seconds_saved[state.draft.sources[0]] += worth

    def _signals(self, step: Step, states: Sequence[RequestState | None]) -> NDArray[np.float32]:
        """[requests, 3]: entropy ratio, gap, attention variance; NaN where there is none."""
        signals = np.full((len(states), 3), np.nan, np.float32)
        for row, (state, facts) in enumerate(zip(states, step.facts)):
            if state is not None and len(facts):
                signals[row, 0] = state.entropy_ratio
                signals[row, 1] = facts[-1, 2]
                if step.variances is not None:
                    state.attention_variance = float(step.variances[row])
                signals[row, 2] = state.attention_variance
        return signals

    def _decide(
        self,
        step: Step,
        states: Sequence[RequestState | None],
        rows: Sequence[int],
        signals: NDArray[np.float32],
    ) -> list[list[int]]:
        """Drafts for the requests of these rows, cut to what pays."""
        running = [state for row in rows if (state := states[row]) is not None]
        context = sum(state.tokens for state in running) / len(running)
        room = [min(it.room(self._max_model_len), self.max_draft_tokens) for it in running]
        least = self._controller.least_chance(len(running), context)
        drafts = [
            self._draft(state, limit, step.lookup(row), signals[row], least) if limit else None
            for row, state, limit in zip(rows, running, room)
        ]
        burst_steps = [state.wishes.burst_steps for state in running]
        lengths = self._controller.decide(drafts, Batch(context, room, burst_steps, signals[rows]))
        found: list[list[int]] = [[] for _ in states]
        for row, state, draft, length in zip(rows, running, drafts, lengths):
            if draft is not None and length:
                state.draft = draft
                found[row] = draft.token_ids[:length]
        self._log.step([step.request_ids[row] for row in rows], drafts, lengths, signals[rows])
        return found

    def _draft(
        self, state: RequestState, limit: int, lookup: Lookup, signals: NDArray[np.float32],
        least_chance: float,
    ) -> Draft | None:  # fmt: skip
        if state.matcher is None:
            return None
        ratio, gap, variance = signals.tolist()
        return self._policy.draft(
            DraftRequest(
                state.matcher, limit, state.wishes.burst_steps, lookup, ratio, gap, variance,
                least_chance,
            )
        )  # fmt: skip

    # -- the life of a request ---------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """A request's first step."""
        self.requests.add(state)
        if state.wishes.chain:
            self._rest.wake()

    def remove(self, request_id: str) -> None:
        """A request is gone: it ended, was aborted or failed."""
        state = self.requests.remove(request_id)
        if state is not None and not state.recorded:
            self._close(state)

    def _close(self, state: RequestState) -> None:
        state.recorded = True
        self._records.append(state.record(self.paths.finish(state.request_id)))

    def drain(self, ended: Sequence[str] = ()) -> dict[str, Any]:
        """What was learned since the last call, in plain values.

        Args:
            ended: plans whose answers the caller saw end (by a stop string, say). The worker hears
                of that one step later; their records are told now.
        """
        for plan_id in ended:
            for state in self.requests.of_plan(plan_id):
                if not state.recorded:
                    self._close(state)
        records = list(self._records)
        self._records.clear()
        counts = self.paths.drain()
        found = {
            "requests": records,
            "tokens": {str(path): n for path, n in counts.tokens.items()},
            "passes": {str(path): n for path, n in counts.passes.items()},
            "proposed": _by_source(counts.proposed),
            "accepted": _by_source(counts.accepted),
            "burst_tokens": counts.burst_tokens,
            "steps": self._steps,
            "step_seconds": self._step_seconds,
            "decision_seconds": self._decision_seconds,
            "cost_error": self.cost.relative_error,
            "signals": [
                float(total / count) if count else None
                for total, count in zip(self._signal_sums, self._signal_counts)
            ],
            "live": len(self.requests),
        }
        self._steps, self._step_seconds, self._decision_seconds = 0, 0.0, 0.0
        self._signal_sums[:] = self._signal_counts[:] = 0.0
        return found


class ThresholdProposer(SparkProposer):
    """With the readable table of thresholds instead of costs and chances."""

    def make_controller(self) -> LengthController:
        return ThresholdController(max_draft_tokens=self.max_draft_tokens)

    def _looks(self) -> bool:
        return True


def _by_source(counts: Counter[tuple[Source, int]]) -> dict[str, list[int]]:
    """Tokens of each source by their place in the draft."""
    found: dict[str, list[int]] = {}
    for (source, place), count in counts.items():
        places = found.setdefault(source.name.lower(), [])
        places += [0] * (place + 1 - len(places))
        places[place] += count
    return found

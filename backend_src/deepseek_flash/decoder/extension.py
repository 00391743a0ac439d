"""More of a one-token answer than its client asked for, made for the cache while nobody waits.

Editors send requests with ``max_tokens`` 1, and soon after them the same prompt in earnest. Such a
probe is answered as it was asked. Then, if the engine has nothing else to do, it goes on behind the
answer's back, so that the request in earnest finds its beginning in the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from deepseek_flash import metrics
from deepseek_flash.contract import Continuation, Lookup, LookupResult, RequestPlan
from deepseek_flash.decoder.output import Outputs
from deepseek_flash.decoder.replay import reaches_the_end
from deepseek_flash.decoder.result import Result

log = logging.getLogger("deepseek_flash")

Extend = Callable[[RequestPlan, Lookup], Coroutine[Any, Any, None]]


class Probe:
    """A request, and what becomes known of its answer. Whatever is no probe passes untouched."""

    def __init__(self, plan: RequestPlan, lookup: Lookup) -> None:
        self.plan = plan
        self._lookup = lookup
        self._result = Result(plan)
        self._cut = False  # by max_tokens: a model that has ended has no more to say

    def watch(self, outputs: Outputs) -> Outputs:
        """The same outputs."""
        return self._watched(outputs) if self.plan.extend_to else outputs

    async def _watched(self, outputs: Outputs) -> Outputs:
        async with aclosing(outputs):
            async for output in outputs:
                self._result.add(output)
                self._cut |= any(piece.finish_reason == "length" for piece in output.pieces)
                yield output

    def known(self) -> tuple[Continuation, ...]:
        """What the cache could go on from; nothing where it has nothing to gain."""
        if not (self._cut and self._result.complete) or self._lookup.result is LookupResult.OFF:
            return ()
        exact = self._lookup.result is LookupResult.EXACT
        known = self._lookup.replays if exact else self._result.continuations()
        enough = all(reaches_the_end(choice, self.plan.extend_to) for choice in known)
        return () if enough else known


class Extension:
    """At most one runs, and whoever comes goes first. Lives on the engine's loop."""

    def __init__(
        self, extend: Extend, is_idle: Callable[[], bool], recorder: metrics.Recorder
    ) -> None:
        """``extend``: generates for the cache, and stores nothing where it is cancelled."""
        self._extend = extend
        self._is_idle = is_idle
        self._recorder = recorder
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None

    def follow(self, probe: Probe) -> None:
        """Go on behind a request that has ended, if that is of use and disturbs nobody."""
        known = probe.known()
        if not known or self.running or not self._is_idle():
            return
        plan = _extended(probe.plan)
        lookup = Lookup(plan.plan_id, plan.namespace, LookupResult.EXACT, known)
        self._task = asyncio.create_task(self._extend(plan, lookup))
        # Not within the task: one that is cancelled before it began never gets there.
        self._task.add_done_callback(self._ended)

    def abort(self) -> None:
        """Make way. What was made so far is lost: the cache takes answers that have ended."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            result = "aborted"
        elif (error := task.exception()) is not None:
            result = "failed"
            log.warning("a one-token answer was not extended: %s", error)
        else:
            result = "done"
        self._recorder.count(metrics.PROBE_EXTENSIONS, labels=(("result", result),))


def _extended(plan: RequestPlan) -> RequestPlan:
    """The plan of what goes on behind a probe: nobody reads it, cancels it or waits for it.

    It has an id of its own, since DSpark may still be asked about the probe, and no session, since
    the probe was that turn. Text, stop strings and log-probabilities decide no token; without
    stop strings the entry serves requests with any.
    """
    sampling = replace(
        plan.sampling, max_tokens=plan.extend_to, stop=(), detokenize=False, logprobs=None
    )
    return replace(
        plan, plan_id=f"{plan.plan_id}-more", deadline=None, session_id="", cancel_key="",
        sampling=sampling, extend_to=0,
    )  # fmt: skip

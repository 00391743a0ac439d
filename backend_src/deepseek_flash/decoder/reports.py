"""What DSpark's worker tells: of every request that ended, and its counts. On the engine's loop.

A call of the worker waits for the step that it is in, so those who ask meanwhile share the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_flash import metrics

log = logging.getLogger("deepseek_flash")

Drain = Callable[[Sequence[str]], Awaitable[Mapping[str, Any] | None]]

KEPT = 256  # plans that ended in the worker before anybody asked; of aborted ones nobody will


@dataclass(frozen=True, slots=True)
class Learned:
    """Of one plan that ended."""

    confidence: Mapping[int, tuple[float, ...]]  # by choice: of each token
    drafts_accepted: bool
    seconds_saved: float  # by references; less than nothing where they were wrong
    signature: bytes = b""  # see Outcome


class Reports:
    """Asks the worker for its reports, gives each to whom it concerns, and counts the rest."""

    def __init__(self, drain: Drain, recorder: metrics.Recorder) -> None:
        self._drain = drain
        self._recorder = recorder
        self._bursts = metrics.Rolling()
        self._ended: list[str] = []  # plans to ask for with the next call
        self._records: OrderedDict[str, list[Mapping[str, Any]]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def learned(self, plan_id: str) -> Learned | None:
        """Once a plan's answer has ended: what the worker knows of it; None: nothing."""
        self._ended.append(plan_id)
        await self.refresh()
        records = self._records.pop(plan_id, None)
        if not records:
            return None
        return Learned(
            {record["choice"]: tuple(record["top1"]) for record in records},
            any(sum(record["accepted"].values()) for record in records),
            sum(record["seconds_saved"].get("reference", 0.0) for record in records),
            records[0]["signature"],
        )

    async def refresh(self) -> None:
        """Fetch what is new. Never raises: what is not learned costs no answer."""
        waiting = len(self._ended)
        async with self._lock:
            if waiting and not self._ended:
                return  # a call that began later than this one has asked for all
            ended, self._ended = self._ended, []
            try:
                found = await self._drain(ended)
            except Exception as error:  # the engine is going down, or has died
                log.debug("DSpark's worker does not answer: %s", error)
                return
        if found is not None:
            self._take(found)

    def set_gauges(self) -> None:
        """The rolling ones, before metrics are published."""
        rate = self._bursts.rate(time.monotonic())
        self._recorder.gauge(metrics.BURSTS_PER_SECOND, rate)

    def _take(self, found: Mapping[str, Any]) -> None:
        for record in found["requests"]:
            self._records.setdefault(record["plan_id"], []).append(record)
        while len(self._records) > KEPT:
            self._records.popitem(last=False)
        count, gauge = self._recorder.count, self._recorder.gauge
        for path, tokens in found["tokens"].items():
            count(metrics.PATH_TOKENS, tokens, (("path", path),))
        for path, passes in found["passes"].items():
            count(metrics.PASSES, passes, (("path", path),))
        for metric, name in (
            (metrics.DRAFTS_PROPOSED, "proposed"),
            (metrics.DRAFTS_ACCEPTED, "accepted"),
        ):
            for source, by_place in found[name].items():
                count(metric, sum(by_place), (("source", source),))
        count(metrics.BURST_TOKENS, found["burst_tokens"])
        count(metrics.STEPS, found["steps"])
        count(metrics.STEP_SECONDS, found["step_seconds"])
        count(metrics.DECISION_SECONDS, found["decision_seconds"])
        if found["steps"]:
            gauge(metrics.COST_ERROR, found["cost_error"])
        for metric, value in zip(metrics.SIGNALS, found["signals"]):
            if value is not None:
                gauge(metric, value)
        if bursts := found["passes"].get("burst"):
            self._bursts.add(bursts, time.monotonic())

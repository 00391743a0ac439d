"""The cache at work: lookups at once, everything else on two threads behind them.

The *updater* alone changes the cache. The *encoder* runs the checkpoint's first layers, which
takes as long as hundreds of updates; its queue is short, and what finds no place goes without a
state.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from deepseek_flash.background import BackgroundWorker
from deepseek_flash.contract import (
    CacheOrder,
    CacheReport,
    InvalidField,
    Lookup,
    LookupResult,
    Neighbours,
    NeighboursQuery,
    Outcome,
    RequestPlan,
)
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.observer import Observer
from deepseek_flash.dflash.payoff import Payoff
from deepseek_flash.dflash.windows import Policy

QUEUED_UPDATES = 1024
QUEUED_ENCODINGS = 16
REMEMBERED_STATES = 64  # of questions whose outcome is still to come

log = logging.getLogger("deepseek_flash")


class Encoder(Protocol):
    """What is used of a PrefixEncoder, or of one in another process."""

    cost: float  # seconds that the last encoding took from others

    def encode(self, token_ids: Sequence[int]) -> torch.Tensor: ...
    def close(self) -> None: ...


Message = Outcome | NeighboursQuery | CacheOrder
Answer = Neighbours | CacheReport | Exception
Reply = Callable[[Answer], None]


class CacheService:
    """One cache and its threads. ``submit`` replies from one of them, exactly once."""

    def __init__(
        self,
        cache: DFlashCache,
        observer: Observer,
        encoder: Encoder | None = None,
        semantic: str = "off",
    ) -> None:
        """``semantic``: on, off or auto; without an encoder it is off."""
        # A lookup that wants the interpreter must not wait 5 ms for an update to yield it.
        sys.setswitchinterval(0.0002)
        self.cache = cache
        self.payoff = Payoff(semantic if encoder else "off")
        self._observer = observer
        self._encoder = encoder
        self._states: OrderedDict[str, torch.Tensor] = OrderedDict()  # the encoder thread's
        self._updates = BackgroundWorker("updater", QUEUED_UPDATES, self._tidy)
        self._encodings = BackgroundWorker("encoder", QUEUED_ENCODINGS)

    def lookup(self, plan: RequestPlan) -> Lookup:
        """What the cache knows. Never raises: what cannot be looked up is a miss."""
        begin = time.perf_counter()
        try:
            lookup = self.cache.lookup(plan)
        except Exception:
            log.exception("a lookup failed")
            lookup = Lookup(plan.plan_id, plan.namespace, LookupResult.MISS)
        if lookup.result in (LookupResult.MISS, LookupResult.WINDOW):
            self.payoff.missed()
            if self.payoff.active and not self._encodings.full:
                lookup = replace(lookup, ask_neighbours=True)
        self._observer.looked_up(lookup, time.perf_counter() - begin)
        return lookup

    def submit(self, message: Message, reply: Reply) -> None:
        """Take in a message. Returns at once."""
        if isinstance(message, NeighboursQuery):
            self._ask(message.plan, reply)
        elif isinstance(message, Outcome):
            self._tell(message, reply)
        else:
            self._update(lambda: self._obey(message), reply)

    def set_gauges(self) -> None:
        """Called before metrics are published."""
        self._observer.set_gauges(self.cache, self.payoff.active)

    def close(self) -> None:
        """Forget what is queued and stop."""
        if self._encoder is not None:
            self._encoder.close()  # first: its thread may be waiting for an answer
        self._encodings.close()
        self._updates.close()

    def _ask(self, plan: RequestPlan, reply: Reply) -> None:
        def encode() -> None:
            state = self._state(plan)
            if state is None:
                reply(Neighbours(plan.plan_id, ()))
            else:
                self._states[plan.plan_id] = state
                while len(self._states) > REMEMBERED_STATES:
                    self._states.popitem(last=False)
                self._update(lambda: self._neighbours(plan, state), reply)

        if not self._encodings.put(encode):
            self._observer.dropped("question")
            reply(Neighbours(plan.plan_id, ()))

    def _tell(self, outcome: Outcome, reply: Reply) -> None:
        plan = outcome.plan

        def encode() -> None:
            state = self._states.pop(plan.plan_id, None)
            state = self._state(plan) if state is None else state
            self._update(lambda: self._record(outcome, state), reply)

        by_topic = self.cache.windows.policy is Policy.SEMANTIC
        wanted = self.payoff.active or (bool(plan.session_id) and by_topic)
        if self._encoder is None or not wanted or not self._encodings.put(encode):
            self._update(lambda: self._record(outcome, None), reply)

    def _update(self, job: Callable[[], Answer], reply: Reply) -> None:
        def run() -> None:
            try:
                answer = job()
            except Exception as error:
                log.exception("an update of the cache failed")
                answer = error
            reply(answer)

        if not self._updates.put(run):
            self._observer.dropped("update")
            reply(CacheReport("dropped"))

    # -- the encoder's thread ----------------------------------------------------------------

    def _state(self, plan: RequestPlan) -> torch.Tensor | None:
        if self._encoder is None:
            return None
        try:
            # The turn's own tokens tell its topic better than the whole conversation (docs/log.md).
            turn = plan.turn_starts[-1] if plan.turn_starts else 0
            state = self._encoder.encode(plan.prompt_token_ids[turn:])
        except Exception:
            log.exception("the prefix encoder failed")
            return None
        self.payoff.spent(self._encoder.cost)
        self._observer.encoded(self._encoder.cost)
        return state

    # -- the updater's thread ----------------------------------------------------------------

    def _record(self, outcome: Outcome, state: torch.Tensor | None) -> CacheReport:
        self._observer.offered(self.cache.record(outcome, state))
        if outcome.seconds_saved is not None:
            self.payoff.saved(outcome.seconds_saved)
        return CacheReport("recorded")

    def _neighbours(self, plan: RequestPlan, state: torch.Tensor) -> Neighbours:
        found = self.cache.neighbours(plan, state)
        self._observer.found(found)
        return found

    def _obey(self, order: CacheOrder) -> Answer:
        if order.action == "flush":
            return CacheReport(str(self.cache.flush(order.cache_salt)))
        if order.action == "stats":
            return CacheReport(self._observer.stats(self.cache, self.payoff.active))
        return InvalidField("order", f"unknown action {order.action!r}")

    def _tidy(self) -> None:
        self.cache.note_uses()
        self.cache.expire()


class NullService:
    """DFlash switched off: every request runs alone, and nothing is remembered."""

    def lookup(self, plan: RequestPlan) -> Lookup:
        return Lookup(plan.plan_id, plan.namespace, LookupResult.OFF)

    def submit(self, message: Message, reply: Reply) -> None:
        reply(InvalidField("enable_dflash", "is off"))

    def set_gauges(self) -> None:
        pass

    def close(self) -> None:
        pass

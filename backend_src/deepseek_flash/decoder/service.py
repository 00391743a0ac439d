"""All requests of one decoder: starts sessions, cancels them, and keeps the books."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from deepseek_flash import metrics
from deepseek_flash.contract import (
    CancelPlan,
    Control,
    Delta,
    InvalidField,
    Lookup,
    Neighbours,
    RequestError,
    RequestPlan,
    Returns,
)
from deepseek_flash.decoder.engine import Engine
from deepseek_flash.decoder.extension import Extension, Probe
from deepseek_flash.decoder.feedback import Feedback
from deepseek_flash.decoder.generation import Generations
from deepseek_flash.decoder.reports import Learned, Reports
from deepseek_flash.decoder.sender import Reply, Sender, TritonReply
from deepseek_flash.decoder.session import Session
from deepseek_flash.runtime import Runtime

REMEMBERED_CANCELS = 4096
PROFILE = ("start_profile", "stop_profile")
REMEMBER_SECONDS = 60.0
REPORT_SECONDS = 0.5


class DecoderService:
    """Sessions live on the engine's loop; only ``submit`` and ``close`` are called elsewhere."""

    def __init__(
        self, engine: Engine, runtime: Runtime, recorder: metrics.Recorder, feedback: Feedback
    ) -> None:
        self._engine = engine
        self._reports = Reports(engine.drain, recorder) if engine.guesses else None
        self._generations = Generations(
            engine.generate, engine.text, feedback, recorder, engine.soon,
            _DSpark(engine, self._reports) if self._reports else None,
        )  # fmt: skip
        self._extension = Extension(self._generations.extend, self._is_idle, recorder)
        self._runtime = runtime
        self._recorder = recorder
        self._first_tokens, self._tokens = metrics.Rolling(), metrics.Rolling()
        self._sender = Sender()
        self._steps_seen = self._preemptions_seen = 0
        self._sessions: set[Session] = set()
        self._by_cancel_key: dict[str, Session] = {}
        # Cancels that came before their request (another connection): key -> when.
        self._early_cancels: OrderedDict[str, float] = OrderedDict()
        runtime.board.reset()
        runtime.publish(engine.facts)

    def submit(
        self, plan: RequestPlan | CancelPlan | Control, lookup: Lookup | None, response_sender: Any
    ) -> None:
        """Start what the plan says; answers go to ``response_sender``. Returns at once."""
        if isinstance(plan, RequestPlan):
            reply = TritonReply(self._sender, response_sender, plan.returns)
            self._engine.run(self._serve(plan, lookup, reply))
        else:
            reply = TritonReply(self._sender, response_sender, Returns(finish_reason=True))
            self._engine.run(self._order(plan, reply))

    def refuse(self, error: Exception, response_sender: Any) -> None:
        """Answer with an error."""
        metrics.count_error(self._recorder, "decoder", error)
        TritonReply(self._sender, response_sender, Returns()).fail(error)

    def close(self) -> None:
        """Cancel what runs and stop the engine."""
        self._engine.run(self._abort_all("by the server's shutdown")).result(timeout=5)
        self._sender.close()
        self._engine.close()

    def set_gauges(self) -> None:
        """Called before metrics are published."""
        now = time.monotonic()
        if (steps := self._engine.steps) != self._steps_seen:
            self._steps_seen = steps
            self._runtime.board.note_progress()
            if self._reports is not None:
                # While it waits for a long step, the counts come with the next round.
                with suppress(TimeoutError):
                    self._engine.run(self._reports.refresh()).result(REPORT_SECONDS)
            preemptions = self._engine.preemptions
            self._recorder.count(metrics.PREEMPTIONS, preemptions - self._preemptions_seen)
            self._preemptions_seen = preemptions
        if self._reports is not None:
            self._reports.set_gauges()
        # What runs for the cache alone is no request; where it runs, nothing else does.
        running, waiting = (0, 0) if self._extension.running else self._engine.load
        self._recorder.gauge(metrics.RUNNING, running)
        self._recorder.gauge(metrics.WAITING, waiting)
        self._recorder.gauge(metrics.KV_CACHE_USAGE, self._engine.kv_cache_usage)
        self._recorder.gauge(metrics.P95_FIRST_TOKEN, self._first_tokens.quantile(0.95, now))
        self._recorder.gauge(metrics.TOKENS_PER_SECOND, self._tokens.rate(now))

    async def _serve(self, plan: RequestPlan, lookup: Lookup | None, reply: Reply) -> None:
        try:
            lookup = self._check(plan, lookup)
        except RequestError as error:
            metrics.count_error(self._recorder, "decoder", error)
            reply.fail(error)
            return
        self._extension.abort()
        probe = Probe(plan, lookup)
        session = Session(
            plan,
            lambda plan: probe.watch(self._generations.outputs(plan, lookup)),
            reply,
            self._recorder,
            self._first_tokens,
            self._tokens,
        )
        self._sessions.add(session)
        if plan.cancel_key:
            self._by_cancel_key[plan.cancel_key] = session
            if self._early_cancels.pop(plan.cancel_key, 0.0) > time.monotonic() - REMEMBER_SECONDS:
                session.cancel("by its cancel_token")
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._by_cancel_key.pop(plan.cancel_key, None)
            self._runtime.board.release(plan.slot, plan.generation)
        self._extension.follow(probe)

    def _is_idle(self) -> bool:
        board = self._runtime.board
        return not (board.in_flight or board.draining or any(self._engine.load))

    def _check(self, plan: RequestPlan, lookup: Lookup | None) -> Lookup:
        if lookup is None or lookup.plan_id != plan.plan_id:
            raise InvalidField("lookup", "belongs to another plan")
        if not self._engine.facts.namespace == plan.namespace == lookup.namespace:
            raise InvalidField("plan", "was made for another model")
        if not self._runtime.board.start(plan.slot, plan.generation):
            raise InvalidField("plan", "was used before, or came too late")
        if plan.cancel_key in self._by_cancel_key:
            self._runtime.board.release(plan.slot, plan.generation)
            raise InvalidField("cancel_token", "a running request has the same one")
        return lookup

    async def _order(self, order: CancelPlan | Control, reply: Reply) -> None:
        if isinstance(order, CancelPlan):
            done = "cancelled" if self._cancel(order.cancel_key) else "not_found"
        elif order.action == "abort_all":
            done = "cancelled" if await self._abort_all("by the operator") else "not_found"
        elif order.action in PROFILE:
            try:
                await self._engine.profile(order.action == PROFILE[0])
            except Exception as error:  # vLLM's, without a kind of its own: no profiler configured
                reply.fail(InvalidField("control", f"{order.action}: {error}"))
                return
            done = "stop"
        else:
            reply.fail(InvalidField("control", f"there is no action {order.action!r}"))
            return
        reply.send(_done(done), last=True)

    def _cancel(self, key: str) -> bool:
        session = self._by_cancel_key.get(key)
        if session is not None:
            session.cancel("by its cancel_token")
            return True
        self._early_cancels[key] = time.monotonic()
        while len(self._early_cancels) > REMEMBERED_CANCELS:
            self._early_cancels.popitem(last=False)
        return False

    async def _abort_all(self, by: str) -> int:
        self._extension.abort()
        for session in (sessions := list(self._sessions)):
            session.cancel(by)
        return len(sessions)


class _DSpark:
    """The engine's guesses, as generations see them."""

    def __init__(self, engine: Engine, reports: Reports) -> None:
        self._engine = engine
        self.learned: Callable[[str], Coroutine[Any, Any, Learned | None]] = reports.learned

    def add_references(self, plan_id: str, neighbours: Neighbours) -> None:
        self._engine.run(self._engine.add_references(plan_id, neighbours.references))


def _done(reason: str) -> Delta:
    return Delta(
        texts=("",), finish_reasons=(reason,), token_ids=((),), cumulative_logprobs=(None,),
        logprobs=(None,), num_input_tokens=0, num_cached_tokens=0,
    )  # fmt: skip

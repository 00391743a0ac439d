"""The decoder's service over ``stack``'s cache and engine, on the loop of a test."""

from __future__ import annotations

import asyncio

from deepseek_flash.contract import Cancelled
from deepseek_flash.decoder import service as module
from deepseek_flash.decoder.service import DecoderService
from deepseek_flash.runtime import Runtime

from tests.unit.fakes import FACTS
from tests.unit.stack import FakeText, Stack, plan_for
from tests.unit.test_reports import NOTHING, record


class Client:
    """What one request got."""

    def __init__(self) -> None:
        self.deltas, self.error = [], None
        self.ended = asyncio.Event()

    def send(self, delta, last):
        self.deltas.append(delta)
        if last:
            self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()

    @property
    def cancelled(self):
        return isinstance(self.error, Cancelled)

    @property
    def answer(self):
        """Text, tokens, reason and cost."""
        assert self.error is None, self.error
        (last,) = self.deltas
        return last.texts, last.token_ids, last.finish_reasons, last.num_cached_tokens


class _Engine:
    """``stack``'s engine, as the service wants it. Guesses, so that DSpark is asked."""

    facts, guesses = FACTS, True
    steps = preemptions = 0
    kv_cache_usage = 0.0
    text = staticmethod(FakeText)

    def __init__(self, scripted):
        self.generate = scripted.generate
        self.load = (0, 0)
        self.ended = []  # plans that DSpark was asked about

    def run(self, coroutine):
        return asyncio.ensure_future(coroutine)

    def soon(self, function):
        function()

    async def drain(self, ended=()):
        self.ended += ended
        return {**NOTHING, "requests": [record(plan_id) for plan_id in ended]}


class Decoder:
    """To be made within a running loop."""

    def __init__(self, path, monkeypatch, stack=None):
        # Whoever submits is the reply: nothing of Triton's comes between.
        monkeypatch.setattr(module, "Sender", lambda: None)
        monkeypatch.setattr(module, "TritonReply", lambda sender, reply, returns: reply)
        self.stack = stack or Stack()
        self.scripted, self.feedback = self.stack.engine, self.stack.feedback
        self.recorder = self.stack.recorder
        self.engine = _Engine(self.scripted)
        self.runtime = Runtime(path / "runtime", b"k" * 32)
        self.board = self.runtime.board
        self.service = DecoderService(self.engine, self.runtime, self.recorder, self.feedback)
        self.counts = {}

    def plan(self, *where, **changes):
        """A plan that holds a place."""
        claim = self.board.claim("", 4096, 0)
        return plan_for(*where, slot=claim.slot, generation=claim.generation, **changes)

    def submit(self, plan):
        client, lookup = Client(), None
        if hasattr(plan, "prompt_token_ids"):
            lookup = self.stack.lookup(plan)
        self.service.submit(plan, lookup, client)
        return client

    async def ask(self, plan):
        """The answer of a request that is alone; what follows on it has then begun."""
        client = self.submit(plan)
        await client.ended.wait()
        return client

    async def settle(self):
        """Until nothing moves any more."""
        for _ in range(500):
            await asyncio.sleep(0)

    def counted(self, metric, **labels):
        """All that a metric has counted so far."""
        for series, value in self.recorder.take().items():
            key = series.name, series.labels
            self.counts[key] = self.counts.get(key, 0) + value
        return self.counts.get((metric.name, tuple(labels.items())), 0)

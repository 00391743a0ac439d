"""Identical deterministic requests in flight are one run of the engine.

The run is a task of its own: whoever asked first may leave, and it goes on for the rest; when all
have left, it is cancelled. Each reader keeps its own place, so nobody waits for a slow one. A run
that ended well stays until the cache knows its outcome: in between, a twin would find neither.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import msgspec

from deepseek_flash.contract import RequestPlan
from deepseek_flash.decoder.output import Output, Outputs
from deepseek_flash.dspark.paths import Path


def twin_key(plan: RequestPlan) -> bytes:
    """Equal for requests of one tenant that must get the same answer, piece by piece."""
    parts = (
        plan.namespace, plan.cache_salt, plan.use_dspark, plan.burst_steps,
        plan.prompt_token_ids, plan.sampling,
    )  # fmt: skip
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()


class _Run:
    """One generation and what it brought so far."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.counted = 0  # of the outputs: these went out as what they are, once
        self.readers = 0
        self.ended = False
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()  # those who wait have the old one

    async def news(self) -> None:
        await self._news.wait()


class SharedRuns:
    """The runs in flight, by ``twin_key``. Lives on the engine's loop."""

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def has(self, key: bytes) -> bool:
        return key in self._runs

    async def outputs(
        self, key: bytes, start: Callable[[], Outputs], told: Callable[[Callable[[], None]], None]
    ) -> Outputs:
        """The outputs of the run of ``key``, from its first; starts it where there is none.

        Args:
            start: makes the generation, for the first who asks.
            told: called once a run has ended well, with what to call when its outcome has reached
                the cache (or never will): only then the run is forgotten.
        """
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run()
            run.task = asyncio.create_task(self._pump(key, run, start, told))
        run.readers += 1
        place = 0
        try:
            while True:
                while place < len(run.outputs):
                    output = run.outputs[place]
                    if place < run.counted:  # another reader had it: no model pass made it for us
                        output = replace(output, path=Path.FAST)
                    place += 1
                    run.counted = max(run.counted, place)
                    yield output
                if run.ended:
                    if run.error is not None:
                        raise run.error
                    return
                await run.news()
        finally:
            run.readers -= 1
            if not run.readers and not run.ended:
                self._forget(key, run)  # at once: a newcomer must not join a run that is ending
                assert run.task is not None
                run.task.cancel()

    async def _pump(
        self, key: bytes, run: _Run, start: Callable[[], Outputs],
        told: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        try:
            async with aclosing(start()) as outputs:
                async for output in outputs:
                    run.outputs.append(output)
                    run.tell()
        except BaseException as error:  # CancelledError too: the readers' to know
            run.error = error if isinstance(error, Exception) else RuntimeError("cancelled")
            self._forget(key, run)
        else:
            told(lambda: self._forget(key, run))
        finally:
            run.ended = True
            run.tell()

    def _forget(self, key: bytes, run: _Run) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]

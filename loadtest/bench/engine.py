"""vLLM without Triton, in this process: the baseline of every comparison."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_flash.contract import RequestPlan, Returns, Sampling
from deepseek_flash.decoder.engine import Engine, start_engine


@dataclass(frozen=True)
class Run:
    """One generation as it was seen by whoever asked."""

    token_ids: tuple[int, ...]
    text: str
    first_token: float  # seconds from the request
    total: float


class PlainEngine:
    """The same AsyncLLM with the same arguments as the decoder's."""

    def __init__(self, model: str, **engine_args: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self._engine: Engine = start_engine({"model": model, **engine_args}, os.environ)
        self._count = 0

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrency: int
    ) -> list[Run]:
        """Generate for every prompt, at most ``concurrency`` at a time, in order of the list."""
        return self._engine.run(self._all(prompts, sampling, concurrency)).result()

    def close(self) -> None:
        self._engine.close()

    async def _all(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrency: int
    ) -> list[Run]:
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Sequence[int]) -> Run:
            async with gate:
                return await self._one(prompt, sampling)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def _one(self, prompt: Sequence[int], sampling: Sampling) -> Run:
        self._count += 1
        plan = _plan(f"bench-{self._count}", prompt, sampling)
        begin = time.perf_counter()
        first = 0.0
        ids: list[int] = []
        text = ""
        async for output in self._engine.generate(plan):
            first = first or time.perf_counter() - begin
            ids.extend(output.pieces[0].token_ids)
            text += output.pieces[0].text
        return Run(tuple(ids), text, first, time.perf_counter() - begin)


def _plan(name: str, prompt: Sequence[int], sampling: Sampling) -> RequestPlan:
    return RequestPlan(
        plan_id=name, slot=-1, generation=0, namespace="", arrival=0.0, deadline=None,
        prompt_token_ids=tuple(prompt), prepended_text="", stream=True, sampling=sampling,
        returns=Returns(), turn_starts=(), session_id="", cache_salt="", cancel_key="",
        burst_steps=1, use_dflash=False, use_dspark=False,
    )  # fmt: skip

"""vLLM without Triton, in this process: the baseline of every comparison."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_flash.config import DecoderConfig
from deepseek_flash.contract import RequestPlan, Returns, Sampling
from deepseek_flash.decoder.engine import Engine, start_engine

BURST_STEPS = 3


@dataclass(frozen=True)
class Run:
    """One generation as it was seen by whoever asked."""

    token_ids: tuple[int, ...]
    text: str
    first_token: float  # seconds from the request
    total: float


class PlainEngine:
    """The same AsyncLLM with the same arguments as the decoder's; ``dspark``: with DSpark."""

    def __init__(self, model: str, dspark: DecoderConfig | None = None, **engine_args: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self.engine: Engine = start_engine({"model": model, **engine_args}, os.environ, dspark)
        self._count = 0

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrency: int,
        chains: Sequence[Sequence[int]] | None = None,
    ) -> list[Run]:  # fmt: skip
        """Generate for every prompt, at most ``concurrency`` at a time, in order of the list.

        Args:
            chains: for DSpark, what is taken for each prompt's continuation.
        """
        chains = [()] * len(prompts) if chains is None else chains
        return self.engine.run(self._all(prompts, sampling, concurrency, chains)).result()

    def close(self) -> None:
        self.engine.close()

    async def _all(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrency: int,
        chains: Sequence[Sequence[int]],
    ) -> list[Run]:  # fmt: skip
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Sequence[int], chain: Sequence[int]) -> Run:
            async with gate:
                return await self._one(prompt, sampling, chain)

        pairs = zip(prompts, chains, strict=True)
        return list(await asyncio.gather(*(one(prompt, chain) for prompt, chain in pairs)))

    async def _one(self, prompt: Sequence[int], sampling: Sampling, chain: Sequence[int]) -> Run:
        self._count += 1
        plan = _plan(f"bench-{self._count}", prompt, sampling)
        begin = time.perf_counter()
        first = 0.0
        ids: list[int] = []
        text = ""
        async for output in self.engine.generate(plan, chain):
            first = first or time.perf_counter() - begin
            ids.extend(output.pieces[0].token_ids)
            text += output.pieces[0].text
        return Run(tuple(ids), text, first, time.perf_counter() - begin)


def _plan(name: str, prompt: Sequence[int], sampling: Sampling) -> RequestPlan:
    return RequestPlan(
        plan_id=name, slot=-1, generation=0, namespace="", arrival=0.0, deadline=None,
        prompt_token_ids=tuple(prompt), prepended_text="", stream=True, sampling=sampling,
        returns=Returns(), turn_starts=(), session_id="", cache_salt="", cancel_key="",
        burst_steps=BURST_STEPS, use_dflash=False, use_dspark=True,
    )  # fmt: skip

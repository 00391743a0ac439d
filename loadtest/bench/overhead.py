"""What the ensemble costs: against the same engine called in-process, in alternating pairs.

Both engines are resident and load is on one at a time, so that the machine's drift hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import tritonclient.grpc.aio as grpcclient
from deepseek_flash.contract import Sampling
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model

from clients.grpc_client import tensor
from clients.request import MODEL
from loadtest.bench.engine import PlainEngine, Run
from loadtest.bench.prompts import PROMPTS
from loadtest.bench.report import spread, write_report
from loadtest.bench.served import serving

MODEL_LENGTH = 2048
# An engine that was idle while the other worked is slower at first; that is not the ensemble's.
WARM_UP_TOKENS = 8
MOST_OVERHEAD_SECONDS, MOST_OVERHEAD_SHARE = 0.005, 0.03


@dataclass(frozen=True)
class Leg:
    """One engine's figures for one batch of requests."""

    first_token: float  # median, seconds
    tokens_per_second: float


@dataclass(frozen=True)
class Pair:
    concurrency: int
    plain: Leg
    ensemble: Leg

    @property
    def first_token_cost(self) -> float:
        """Seconds that the ensemble adds to the first token."""
        return self.ensemble.first_token - self.plain.first_token

    @property
    def throughput_ratio(self) -> float:
        return self.ensemble.tokens_per_second / self.plain.tokens_per_second


def measure(run: Callable[[], list[Run]]) -> Leg:
    """Time a batch."""
    begin = time.perf_counter()
    runs = run()
    seconds = time.perf_counter() - begin
    return Leg(
        statistics.median(each.first_token for each in runs),
        sum(len(each.token_ids) for each in runs) / seconds,
    )


class EnsembleClient:
    """Streams over one connection that stays open, as a gateway or a load test keeps it."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = self._run(self._connect(url))

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int) -> list[Run]:
        """Generate for every prompt, at most ``concurrency`` at a time."""
        runs: list[Run] = self._run(self._all(prompts, tokens, concurrency))
        return runs

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connect(self, url: str) -> Any:
        client = grpcclient.InferenceServerClient(url)
        await client.is_server_live()
        return client

    async def _all(
        self, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int
    ) -> list[Run]:
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Sequence[int]) -> Run:
            async with gate:
                return await self._one(prompt, tokens)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def _one(self, prompt: Sequence[int], tokens: int) -> Run:
        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "use_dflash": False}
        fields = {
            "input_ids": list(prompt), "stream": True, "sampling_parameters": json.dumps(sampling)
        }  # fmt: skip
        request = {
            "model_name": MODEL,
            "inputs": [tensor(name, value) for name, value in fields.items()],
        }

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        begin = time.perf_counter()
        first, text, responses = 0.0, b"", 0
        async for result, error in self._client.stream_infer(requests()):
            if error is not None:
                raise RuntimeError(str(error))
            first = first or time.perf_counter() - begin
            text += result.as_numpy("text_output")[0]
            responses += 1
        # One response a token: the final flag rides on the last.
        return Run((0,) * responses, text.decode(), first, time.perf_counter() - begin)


def idle_share(process: psutil.Process, seconds: float = 3.0) -> float:
    """Cores that a process tree uses while it should be idle."""

    def used() -> float:
        family = [process, *process.children(recursive=True)]
        return sum(sum(member.cpu_times()[:2]) for member in family)

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    encoder = PromptEncoder(load_tokenizer(path, None, False))
    sampling = Sampling(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    pairs: list[Pair] = []
    with serving(arguments.model, ["--engine-args", f'{{"max_model_len": {MODEL_LENGTH}}}']) as it:
        engine = PlainEngine(path, max_model_len=MODEL_LENGTH)
        try:
            idle = idle_share(psutil.Process(it.process.pid))
            print(f"idle server: {idle:.3f} cores", flush=True)
            client = EnsembleClient(it.grpc)
            for number in range(arguments.pairs + 1):
                for many in (1, 8):
                    chosen = PROMPTS[number * 4 % 40 :][: 5 * many if many == 1 else 16]
                    prompts = [encoder.from_text(prompt, 2048) for prompt in chosen]
                    pair = one_pair(engine, client, prompts, sampling, many, number % 2 == 1)
                    if number == 0:
                        continue  # warm-up
                    pairs.append(pair)
                    print(
                        f"  pair {number} at {many}: first token "
                        f"{pair.plain.first_token * 1e3:.1f} ms + "
                        f"{pair.first_token_cost * 1e3:.1f} ms, tokens/s "
                        f"{pair.plain.tokens_per_second:.1f} x {pair.throughput_ratio:.3f}",
                        flush=True,
                    )
        finally:
            engine.close()
    return summarise(arguments.model, pairs, idle)


def one_pair(
    engine: PlainEngine,
    client: EnsembleClient,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    many: int,
    plain_first: bool,
) -> Pair:
    """Both legs on the same prompts; who goes first alternates."""

    tokens = sampling.max_tokens

    def through_ensemble() -> Leg:
        client.run(prompts[:many], WARM_UP_TOKENS, many)
        return measure(lambda: client.run(prompts, tokens, many))

    def directly() -> Leg:
        engine.run(prompts[:many], replace(sampling, max_tokens=WARM_UP_TOKENS), many)
        return measure(lambda: engine.run(prompts, sampling, many))

    if plain_first:
        plain, ensemble = directly(), through_ensemble()
    else:
        ensemble, plain = through_ensemble(), directly()
    return Pair(many, plain, ensemble)


def summarise(model: str, pairs: Sequence[Pair], idle: float) -> int:
    good = True
    print(f"\n{model}: the ensemble against vLLM in-process, medians over pairs")
    figures = {}
    for many in (1, 8):
        chosen = [pair for pair in pairs if pair.concurrency == many]
        costs = [pair.first_token_cost * 1e3 for pair in chosen]
        ratios = [pair.throughput_ratio for pair in chosen]
        print(f"  at {many}: first token + {spread(costs)} ms, tokens/s x {spread(ratios)}")
        cost, ratio = statistics.median(costs), statistics.median(ratios)
        good &= cost < MOST_OVERHEAD_SECONDS * 1e3 and ratio > 1 - MOST_OVERHEAD_SHARE
        figures[str(many)] = {
            "first_token_cost_ms": cost,
            "throughput_ratio": ratio,
            "pairs": [asdict(pair) for pair in chosen],
        }
    write_report(f"overhead-{model.rsplit('/', 1)[-1]}", {"idle_cores": idle, **figures})
    print("  within" if good else "  NOT within", "5 ms and 3 %")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

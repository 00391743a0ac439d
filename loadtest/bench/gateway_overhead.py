"""What the gateway costs: against gRPC straight to the same ensemble, in alternating pairs."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.gateway.triton import Generation, TritonClient
from deepseek_flash.launcher.environment import resolve_model

from loadtest.bench.gateway_side import MODEL_LENGTH, NAME, serving_gateway
from loadtest.bench.overhead_pairs import Leg, Load, Pair, chosen, judge
from loadtest.bench.prompts import PROMPTS
from loadtest.bench.report import write_report

WARM_UP_TOKENS = 8
MOST_SECONDS, MOST_SHARE = 0.005, 0.05

Ask = Callable[[Sequence[int], int], Awaitable[float]]  # a prompt, tokens → seconds to the first


LOADS = (
    Load("first token at 1", requests=24, tokens=1, concurrency=1),
    Load("first token at 16", requests=64, tokens=1, concurrency=16),
    Load("tokens/s at 1", requests=5, tokens=32, concurrency=1),
    Load("tokens/s at 16", requests=32, tokens=32, concurrency=16),
)


def straight(client: TritonClient) -> Ask:
    async def ask(prompt: Sequence[int], tokens: int) -> float:
        begin, first = time.perf_counter(), 0.0
        async for _ in client.stream(Generation(prompt, _sampling(tokens))):
            first = first or time.perf_counter() - begin
        return first

    return ask


def through(port: int, name: str) -> Ask:
    """By a connection of its own that stays open; what a client makes of events is not counted."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(prompt: Sequence[int], tokens: int) -> float:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        fields = {"model": name, "prompt": list(prompt), "stream": True, **_sampling(tokens)}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        begin, first, data = time.perf_counter(), 0.0, b""
        writer.write(head.encode() + body)
        while not data.endswith(b"0\r\n\r\n"):
            news = await reader.read(65536)
            data += news
            if not news or not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode(errors="replace")[:500])
            if not first and b"data: {" in data:
                first = time.perf_counter() - begin
        if b"[DONE]" not in data:
            raise RuntimeError("a stream ended with an error")
        idle.append((reader, writer))
        return first

    return ask


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "use_dflash": False}


async def measure(ask: Ask, prompts: Sequence[Sequence[int]], load: Load) -> Leg:
    """Ask for all, at most ``concurrency`` at a time, after a warm-up."""
    await asyncio.gather(*(ask(prompt, WARM_UP_TOKENS) for prompt in prompts[: load.concurrency]))
    waiting, firsts = list(prompts), []

    async def one_after_another() -> None:
        while waiting:
            firsts.append(await ask(waiting.pop(), load.tokens))

    begin = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(load.concurrency)))
    return Leg(statistics.median(firsts), time.perf_counter() - begin)


async def run(grpc: str, port: int, name: str, ids: list[list[int]], pairs: int) -> list[Pair]:
    client = TritonClient(grpc)
    ways = straight(client), through(port, name)
    found = []
    for number in range(pairs + 1):
        for load in LOADS:
            prompts = chosen(ids, number, load)
            legs: list[Leg | None] = [None, None]
            for which in (0, 1) if number % 2 else (1, 0):
                legs[which] = await measure(ways[which], prompts, load)
            direct, gateway = legs
            assert direct is not None and gateway is not None
            if number > 0:  # the first round warms up
                found.append(Pair(load, direct, gateway))
                print(f"  pair {number}, {load.name}: {found[-1]}", flush=True)
    await client.close()
    return found


def summarise(model: str, pairs: Sequence[Pair]) -> int:
    print(f"{model}: the gateway against gRPC straight to the ensemble, medians (min to max)")
    good, figures = judge(pairs, LOADS, MOST_SECONDS, MOST_SHARE)
    write_report(f"gateway-overhead-{model.rsplit('/', 1)[-1]}", figures)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    encoder = PromptEncoder(load_tokenizer(path, None, False))
    ids = [encoder.from_text(prompt, MODEL_LENGTH) for prompt in PROMPTS]
    with serving_gateway(arguments.model) as served:
        port = int(served.gateway.rsplit(":", 1)[1])
        pairs = asyncio.run(run(served.grpc, port, NAME, ids, arguments.pairs))
    return summarise(arguments.model, pairs)


if __name__ == "__main__":
    sys.exit(main())

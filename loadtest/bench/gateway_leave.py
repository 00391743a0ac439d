"""How soon the engine stops when a client leaves the gateway.

The engine's tokens tell it, to a step: how many it made after the client had left, times the pace
at which they came. Clients leave streams, and answers that are not streamed (what those had made by
then is told by the stream before), alone and in company.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from loadtest.bench.report import write_report
from loadtest.numbers import spread
from loadtest.scrape import Metrics, read_metrics, rise, settled
from loadtest.served import Served, exit_status, serving

MODEL_LENGTH = 2048
TOKENS = "vllm:generation_tokens_total"
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "deepseek_flash_in_flight")
STAY, MOST_SECONDS, IDLE_SECONDS = 1.5, 1.0, 60.0
COMPANY, THEIRS = 7, 100  # others, and the tokens of each

ROUTE = "/v1/completions"


@dataclass(frozen=True)
class Pace:
    """How an answer came."""

    first: float  # seconds
    step: float  # seconds a token

    def made(self, seconds: float) -> float:
        """Tokens by then."""
        return max(0.0, 1 + (seconds - self.first) / self.step)


@dataclass(frozen=True)
class Left:
    """One client that left."""

    stream: bool
    company: int
    seconds: float  # until the engine stopped


class Leaver:
    """A client that leaves, and the engine it leaves."""

    def __init__(self, served: Served, client: httpx.AsyncClient) -> None:
        self._served = served
        self._client = client
        self._asked = 0

    async def round(self, company: int) -> list[Left]:
        """A stream, then an answer that is not streamed."""
        found = []
        pace = Pace(0.0, 1.0)
        for stream in (True, False):
            before = await self._settled()
            others = [asyncio.create_task(self._other()) for _ in range(company)]
            if stream:
                made, pace = await self._leave_stream()
            else:
                made = await self._leave_whole(pace)
            await asyncio.gather(*others)
            of_both = _sum(rise(before, await self._settled(), TOKENS))
            after = of_both - company * THEIRS - made
            found.append(Left(stream, company, max(0.0, after) * pace.step))
        return found

    async def _leave_stream(self) -> tuple[float, Pace]:
        begin, made, times = time.perf_counter(), 0, []
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = self._body(MODEL_LENGTH) | {"stream": True, "stream_options": options}
        async with self._client.stream("POST", ROUTE, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    made = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                    times.append((time.perf_counter() - begin, made))
                    if times[-1][0] - times[0][0] > STAY:
                        break
        (first, had), (last, made) = times[0], times[-1]
        return made, Pace(first, (last - first) / (made - had))

    async def _leave_whole(self, pace: Pace) -> float:
        begin = time.perf_counter()
        stay = pace.first + STAY
        try:
            await asyncio.wait_for(self._client.post(ROUTE, json=self._body(MODEL_LENGTH)), stay)
        except TimeoutError:
            return pace.made(time.perf_counter() - begin)
        raise RuntimeError("the answer came before it could be left")

    async def _other(self) -> None:
        (await self._client.post(ROUTE, json=self._body(THEIRS))).raise_for_status()

    def _body(self, tokens: int) -> dict[str, Any]:
        self._asked += 1
        return {
            "model": "model", "prompt": f"Question {self._asked} of many.", "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True, "use_dflash": False, "use_dspark": False,
        }  # fmt: skip

    async def _settled(self) -> Metrics:
        deadline = time.monotonic() + IDLE_SECONDS
        while any(_sum(read_metrics(self._served.metrics).get(name, {})) for name in BUSY):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is still busy after {IDLE_SECONDS:g} s")
            await asyncio.sleep(0.2)
        return await asyncio.to_thread(settled, self._served)


def _sum(values: Any) -> float:
    return float(sum(values.values()))


async def run(served: Served, rounds: int) -> list[Left]:
    found: list[Left] = []
    async with httpx.AsyncClient(base_url=served.gateway, timeout=120, trust_env=False) as client:
        leaver = Leaver(served, client)
        for number in range(rounds + 1):
            for company in (0, COMPANY):
                left = await leaver.round(company)
                if number > 0:  # the first round warms up
                    found += left
                    told = ", ".join(f"{one.seconds * 1e3:.0f} ms" for one in left)
                    print(f"  round {number}, with {company} others: {told}", flush=True)
    return found


def judge(model: str, found: list[Left]) -> bool:
    """Print medians (min to max); whether all stayed within."""
    print(f"{model}: milliseconds until the engine stops after its client left, medians")
    for company in (0, COMPANY):
        for stream in (True, False):
            those = [one.seconds * 1e3 for one in found
                     if (one.stream, one.company) == (stream, company)]  # fmt: skip
            name = "stream" if stream else "not streamed"
            print(f"  {name}, {company} others: {spread(those)}")
    write_report(f"gateway-leave-{model.rsplit('/', 1)[-1]}", {"left": [asdict(o) for o in found]})
    return max(one.seconds for one in found) < MOST_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    def measure() -> bool:
        flags = ["--engine-args", json.dumps({"max_model_len": MODEL_LENGTH}),
                 "--gateway-model-names", "model"]  # fmt: skip
        with serving(arguments.model, flags, gateway=True) as served:
            found = asyncio.run(run(served, arguments.rounds))
        return judge(arguments.model, found)

    return exit_status(measure)


if __name__ == "__main__":
    sys.exit(main())

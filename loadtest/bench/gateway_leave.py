"""How soon the engine stops when a client leaves the gateway.

The server admits as many requests as run, and no more. So a question of one token is refused until
the engine has let go of the request that its client left: that is the time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from loadtest.bench.gateway_side import MODEL_LENGTH, NAME, serving_gateway
from loadtest.bench.report import write_report
from loadtest.numbers import spread
from loadtest.served import Served, exit_status

COMPANY = 7  # others that run meanwhile
STAY, MOST_SECONDS, IDLE_SECONDS = 1.5, 1.0, 60.0
ROUTE, FULL = "/v1/completions", 429


@dataclass(frozen=True)
class Left:
    """One client that left."""

    stream: bool
    company: int
    seconds: float  # until the engine had let go of its request


class Leaver:
    """Clients of a server that admits ``places`` requests."""

    def __init__(self, client: httpx.AsyncClient, places: int) -> None:
        self._client = client
        self._places = places
        self._asked = 0

    async def leave(self, stream: bool) -> float:
        """Fill all places; one client leaves: seconds until its place is free."""
        await self._all_free()
        everybody = [asyncio.create_task(self._stay(stream)) for _ in range(self._places)]
        try:
            await asyncio.sleep(STAY)
            if await self._admitted():
                raise RuntimeError("there was a place free before anybody left")
            begin = time.perf_counter()
            everybody[0].cancel()
            while not await self._admitted():
                if time.perf_counter() - begin > IDLE_SECONDS:
                    raise TimeoutError(f"no place is free after {IDLE_SECONDS:g} s")
            return time.perf_counter() - begin
        finally:
            for one in everybody:
                one.cancel()
            await asyncio.gather(*everybody, return_exceptions=True)

    async def _stay(self, stream: bool) -> None:
        body = self._body(MODEL_LENGTH) | {"stream": stream}
        async with self._client.stream("POST", ROUTE, json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_lines():
                pass

    async def _admitted(self) -> bool:
        """Whether a question is admitted; it leaves again at once."""
        async with self._client.stream("POST", ROUTE, json=self._body(1)) as response:
            if response.status_code != FULL:
                response.raise_for_status()
            return response.status_code != FULL

    async def _all_free(self) -> None:
        """Nobody is there any more: all places can be taken."""
        async with asyncio.timeout(IDLE_SECONDS):
            while True:
                asked = [self._client.post(ROUTE, json=self._body(1)) for _ in range(self._places)]
                if all(response.is_success for response in await asyncio.gather(*asked)):
                    return

    def _body(self, tokens: int) -> dict[str, Any]:
        self._asked += 1
        return {
            "model": NAME, "prompt": f"Question {self._asked} of many.", "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True, "use_dflash": False, "use_dspark": False,
        }  # fmt: skip


async def run(served: Served, company: int, rounds: int) -> list[Left]:
    found: list[Left] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=served.gateway, timeout=120, trust_env=False, limits=limits
    ) as client:
        leaver = Leaver(client, company + 1)
        for number in range(rounds + 1):
            left = [Left(stream, company, await leaver.leave(stream)) for stream in (True, False)]
            if number > 0:  # the first round warms up
                found += left
                told = ", ".join(f"{one.seconds * 1e3:.0f} ms" for one in left)
                print(f"  with {company} others, round {number}: {told}", flush=True)
    return found


def judge(model: str, found: list[Left]) -> bool:
    """Print medians (min to max); whether all stayed within."""
    print(f"{model}: milliseconds until the engine lets go after its client left, medians")
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
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()

    def measure() -> bool:
        found = []
        for company in (0, COMPANY):
            # No probes of the launcher's own: they would take a place.
            flags = "--queue-limit", str(company + 1), "--probe-interval", "86400"
            with serving_gateway(arguments.model, *flags) as served:
                found += asyncio.run(run(served, company, arguments.rounds))
        return judge(arguments.model, found)

    return exit_status(measure)


if __name__ == "__main__":
    sys.exit(main())

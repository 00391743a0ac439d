"""Two resident servers, with the DFlash cache and without: load on them, and what they tell."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from deepseek_flash.contract import CacheOrder
from deepseek_flash.launcher.probe import send_cache_order
from deepseek_flash.operate import TIMEOUT_SECONDS, server_secret

from loadtest.bench.dflash_traffic import Client, Reply, chat_request, novel
from loadtest.numbers import quantile, spread
from loadtest.served import Served, serving

# No probes of the launcher's own: they would run beside the load.
FLAGS = ("--engine-args", '{"max_model_len": 2048}', "--probe-interval", "86400")
CONCURRENCY = 4  # most at a time


def flush(served: Served) -> None:
    """Make the server's cache forget everything."""
    secret = server_secret(served.port)
    send_cache_order(served.grpc, CacheOrder("flush"), secret, TIMEOUT_SECONDS)


@dataclass(frozen=True)
class Leg:
    """What one server made of a batch of requests; times in seconds."""

    replies: Sequence[Reply]
    seconds: float  # for all of them

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(reply.tokens for reply in self.replies) / self.seconds

    @property
    def first_token(self) -> float:
        return statistics.median(reply.first_token for reply in self.replies)

    def figures(self) -> dict[str, float]:
        return {
            "seconds": self.seconds, "tokens_per_second": self.rate,
            "first_token_p50": self.first_token,
            "first_token_p95": quantile([reply.first_token for reply in self.replies], 0.95),
            "end_to_end_p50": statistics.median(reply.total for reply in self.replies),
        }  # fmt: skip

    def __str__(self) -> str:
        it = {name: value * 1e3 for name, value in self.figures().items()}
        return (
            f"{self.rate:.1f} tokens/s, first token {it['first_token_p50']:.0f} ms"
            f" (p95 {it['first_token_p95']:.0f}), whole {it['end_to_end_p50']:.0f} ms"
        )


def joined(legs: Sequence[Leg]) -> Leg:
    replies = [reply for leg in legs for reply in leg.replies]
    return Leg(replies, sum(leg.seconds for leg in legs))


class Side:
    """One of the resident servers."""

    def __init__(self, name: str, served: Served, connections: int = CONCURRENCY) -> None:
        self.name, self.served = name, served
        self.client = Client(served.http, connections)
        self._warm_ups = novel(random.Random(f"warm-up of {name}"))

    def warm_up(self, concurrency: int, use_dflash: bool = False) -> None:
        """An engine that was idle while the other worked is slower at first."""
        prompts = itertools.islice(self._warm_ups, concurrency)
        requests = [chat_request(it, max_tokens=8, use_dflash=use_dflash) for it in prompts]
        self.client.send(requests, concurrency)

    def leg(self, prompts: Sequence[str], concurrency: int, **sampling: Any) -> Leg:
        requests = [chat_request(prompt, **sampling) for prompt in prompts]
        return Leg(*self.client.send(requests, concurrency))


Sides = tuple[Side, Side]  # with the cache, without


@contextmanager
def side(
    name: str, model: str, flags: Sequence[str], connections: int = CONCURRENCY
) -> Iterator[Side]:
    print(f"starting {name}: {' '.join(flags)}", flush=True)
    with serving(model, flags) as served:
        it = Side(name, served, connections)
        with closing(it.client):
            it.warm_up(connections, use_dflash=True)  # the encoder's first run too
            yield it


def in_turns(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """A B C, then C B A: what drifts meanwhile is shared out."""
    return sides if number % 2 == 0 else sides[::-1]


def verdict(name: str, values: Sequence[float], aim: str, good: bool) -> bool:
    """Print a figure with what it should be; passes ``good`` on."""
    print(f"  {name}: {spread(values)}, aim {aim}: {'met' if good else 'MISSED'}", flush=True)
    return good

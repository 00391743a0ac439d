"""What a number of entries is worth: hit rates of one request stream, and of other policies on it.

The source document claims rates without saying on what traffic; here the traffic is stated.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from deepseek_flash.contract import LookupResult
from deepseek_flash.dflash.cache import DFlashCache

from loadtest.bench.dflash_workload import answered, make_cache, make_plan

CAPACITIES = (256, 512, 1024, 1536, 2048, 3000)
CLAIMED = {1024: 0.72, 1536: 0.89, 2048: 0.91}  # by the source document
PROTECTED_SHARE = 0.8  # the table's


@dataclass(frozen=True)
class Traffic:
    """Prompts that come again, the k-th with a weight of k ** -zipf, and prompts that do not.

    Round numbers, chosen once: most of these prompts come again within the stream, so that the
    hit rate still rises between 1,024 and 2,048 entries.
    """

    requests: int = 20_000
    prompts: int = 2_000
    zipf: float = 0.8
    novel_share: float = 0.05
    warm_up: int = 5_000  # requests that are not counted
    seed: int = 1

    def stream(self) -> list[int]:
        """One number a prompt; from ``prompts`` on they are the novel ones."""
        source, novel = random.Random(self.seed), itertools.count(self.prompts)
        ranks = range(1, self.prompts + 1)
        weights = list(itertools.accumulate(rank**-self.zipf for rank in ranks))
        return [
            next(novel) if source.random() < self.novel_share
            else source.choices(range(self.prompts), cum_weights=weights)[0]
            for _ in range(self.requests)
        ]  # fmt: skip


def lru(stream: Sequence[int], capacity: int) -> list[bool]:
    """Which requests hit a cache that evicts the least recently used."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for prompt in stream:
        hits.append(prompt in kept)
        kept[prompt] = None
        kept.move_to_end(prompt)
        if len(kept) > capacity:
            kept.popitem(last=False)
    return hits


def segmented_lru(
    stream: Sequence[int], capacity: int, share: float = PROTECTED_SHARE
) -> list[bool]:
    """As the table's two segments, if every hit moved its entry into the protected one.

    Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, Computer 27(3),
    1994.
    """
    probation: OrderedDict[int, None] = OrderedDict()
    protected: OrderedDict[int, None] = OrderedDict()
    hits = []
    for prompt in stream:
        hits.append(prompt in probation or prompt in protected)
        if hits[-1]:
            probation.pop(prompt, None)
            protected[prompt] = None
            protected.move_to_end(prompt)
            if len(protected) > int(capacity * share):
                probation[protected.popitem(last=False)[0]] = None
            continue
        if len(probation) + len(protected) == capacity:
            (probation or protected).popitem(last=False)
        probation[prompt] = None
    return hits


def belady(stream: Sequence[int], capacity: int) -> list[bool]:
    """The most hits that any policy has which takes in every miss, the future being known.

    It evicts what is wanted again last (Belady, IBM Systems J. 5(2), 1966).
    """
    never = len(stream)
    next_use, last = [never] * len(stream), dict[int, int]()
    for place in reversed(range(len(stream))):
        next_use[place] = last.get(stream[place], never)
        last[stream[place]] = place
    kept: dict[int, int] = {}  # prompt -> its next use
    latest: list[tuple[int, int]] = []  # heap of (-next use, prompt), with outdated ones
    hits = []
    for place, prompt in enumerate(stream):
        hits.append(prompt in kept)
        if not hits[-1] and len(kept) == capacity:
            while True:
                use, victim = heapq.heappop(latest)
                if kept.get(victim) == -use:
                    del kept[victim]
                    break
        kept[prompt] = next_use[place]
        heapq.heappush(latest, (-next_use[place], prompt))
    return hits


def through(cache: DFlashCache, stream: Sequence[int]) -> list[bool]:
    """Which requests the cache answers; what it does not is recorded. One entry a prompt.

    Raises AssertionError for an answer that is not the prompt's.
    """
    hits = []
    for number in stream:
        plan = make_plan((number, *range(15)))
        answer = tuple(range(number, number + 16))
        lookup = cache.lookup(plan)
        hits.append(lookup.result is LookupResult.EXACT)
        if not hits[-1]:
            cache.record(answered(plan, answer))
        elif lookup.replays[0].token_ids != answer:
            raise AssertionError(f"prompt {number} got another one's answer")
    return hits


def rate(hits: Sequence[bool], warm_up: int) -> float:
    return sum(hits[warm_up:]) / len(hits[warm_up:])


def measure(device: torch.device, traffic: Traffic) -> dict[str, Any]:
    """Hit rate by capacity and policy; prints a table."""
    stream, infinite = traffic.stream(), rate(lru(traffic.stream(), 10**9), traffic.warm_up)
    print(f"\nCapacity. {traffic}: {len(set(stream)):,} different prompts; infinite {infinite:.1%}")
    print("  entries  device MB   cache     LRU  LRU segmented by hits  optimal  document")
    rows: dict[int, Any] = {}
    for capacity in CAPACITIES:
        cache = make_cache(device, capacity)
        found = through(cache, stream)
        cache.table.check_integrity()
        row: dict[str, Any] = {
            "bytes_on_device": cache.table.bytes_on_device,
            "cache": rate(found, traffic.warm_up),
            "lru": rate(lru(stream, capacity), traffic.warm_up),
            "segmented_lru": rate(segmented_lru(stream, capacity), traffic.warm_up),
            "optimal": rate(belady(stream, capacity), traffic.warm_up),
            "claimed": CLAIMED.get(capacity),
            "evictions": {str(reason): n for reason, n in cache.table.evictions.items()},
        }
        rows[capacity] = row
        claimed = f"{row['claimed']:.0%}" if row["claimed"] else "-"
        print(
            f"  {capacity:7} {row['bytes_on_device'] / 1e6:10.2f} {row['cache']:7.1%}"
            f" {row['lru']:7.1%} {row['segmented_lru']:22.1%} {row['optimal']:8.1%} {claimed:>9}",
            flush=True,
        )
    return {"traffic": asdict(traffic), "infinite": infinite, "capacities": rows}

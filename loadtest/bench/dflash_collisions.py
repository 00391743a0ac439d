"""Fingerprints that meet: how many, against the birthday expectation, and what it costs."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from deepseek_flash.contract import LookupResult, RequestPlan
from deepseek_flash.dflash.fingerprint import IDENTITY_BYTES, Fingerprint, FingerprintKey, identity

from loadtest.bench.dflash_workload import ENTRIES, SECRET, answered, make_cache, make_plan

CONTEXTS = {1_000: 10, 10_000: 10, 100_000: 10, 1_000_000: 3}  # how many, under how many secrets
CLAIMED = 0.007  # of requests, by the source document, at 32 bits and high concurrency
PROMPTS = 300_000  # of which some meet at 32 bits: 10 pairs are expected


def colliding_pairs(values: Iterable[int]) -> int:
    """Pairs of equal numbers, each an int64."""
    counts = np.unique(np.array(values, dtype=np.int64), return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def expected_pairs(number: int, bits: int) -> float:
    """Of so many numbers, drawn at random."""
    return math.ldexp(number * (number - 1) / 2, -bits)


def fingerprints(key: FingerprintKey, number: int) -> array[int]:
    """Of so many different contexts: as many prompts as generated tokens after each."""
    return array("q", islice(_contexts(key, math.isqrt(number - 1) + 1), number))


def _contexts(key: FingerprintKey, side: int) -> Iterator[int]:
    for prompt in range(side):
        context = Fingerprint(key, bytes(IDENTITY_BYTES), (prompt, 1, 2, 3))
        for place in range(side):
            yield context.value
            context.append((prompt * 31 + place * 17) % 1000)


def colliding_prompts(key: FingerprintKey, number: int) -> list[tuple[RequestPlan, RequestPlan]]:
    """Two plans whose contexts are different and whose fingerprints are the same."""
    own = identity(make_plan(()), key)
    values = array("q", (Fingerprint(key, own, (prompt,)).value for prompt in range(number)))
    doubled = {value for value, count in Counter(values).items() if count > 1}
    first: dict[int, int] = {}
    pairs = []
    for prompt, value in enumerate(values):
        if value in doubled and value in first:
            pairs.append((make_plan((first[value],)), make_plan((prompt,))))
        first.setdefault(value, prompt)
    return pairs


def cost(device: torch.device, pairs: Iterable[tuple[RequestPlan, RequestPlan]]) -> Counter[str]:
    """What a cache of 32 bits makes of colliding prompts: the second of a pair is looked up while
    the first is stored, and then recorded.
    """
    cache = make_cache(device, bits=32)
    results: Counter[str] = Counter()
    for one, other in pairs:
        for plan in one, other:
            before = cache.lookup(plan)
            results["answers to another prompt"] += before.result is not LookupResult.MISS
            cache.record(answered(plan, (*plan.prompt_token_ids, 1, 2)))
            (own,) = cache.lookup(plan).replays or (None,)
            results["own answers"] += own is not None and own.token_ids[:1] == plan.prompt_token_ids
        results["pairs"] += 1
    results["collisions counted"] = cache.collisions
    cache.table.check_integrity()
    return results


def measure(device: torch.device) -> dict[str, Any]:
    """Prints a table. ``sound``: no collision gave an answer, and each was counted."""
    print("\nCollisions. Contexts: generated tokens after prompts; the mean over several secrets")
    print("  contexts  bits  secrets  colliding pairs     expected  of all contexts")
    rows = []
    for number, secrets in CONTEXTS.items():
        for bits in (32, 64):
            keys = [FingerprintKey.derive(b"%d" % seed, bits) for seed in range(secrets)]
            found = [colliding_pairs(fingerprints(key, number)) for key in keys]
            mean, expected = sum(found) / secrets, expected_pairs(number, bits)
            rows.append({"contexts": number, "bits": bits, "pairs": found, "expected": expected})
            print(
                f"  {number:8}  {bits:4}  {secrets:7} {mean:16.2f} {expected:12.4g}"
                f" {2 * mean / number:16.4%}",
                flush=True,
            )
    print(
        f"  A context that is not in a table of {ENTRIES} meets one that is with a probability of"
        f" {ENTRIES / 2**32:.1e} at 32 bits, {ENTRIES / 2**64:.1e} at 64.\n"
        f"  The document's {CLAIMED:.1%} at 32 bits would need {CLAIMED * 2**32 / 1e6:.0f} million"
        f" entries, or is the chance of any pair among {math.sqrt(CLAIMED * 2**33):,.0f} contexts."
    )
    pairs = colliding_prompts(FingerprintKey.derive(SECRET, 32), PROMPTS)
    results = cost(device, pairs)
    print(f"  Prompts that meet at 32 bits, through a cache: {dict(results)}", flush=True)
    sound = not results["answers to another prompt"] and bool(pairs)
    sound &= results["collisions counted"] == len(pairs)
    sound &= results["own answers"] == 2 * len(pairs)
    return {"rows": rows, "through_a_cache": dict(results), "sound": sound}

"""What the cache's operations take when it is full, alone and beside its own threads."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from deepseek_flash import metrics
from deepseek_flash.contract import LookupResult, RequestPlan
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.encoder import PrefixEncoder
from deepseek_flash.dflash.entry import Offer
from deepseek_flash.dflash.observer import Observer
from deepseek_flash.dflash.service import QUEUED_ENCODINGS, CacheService

from loadtest.bench.dflash_workload import ENTRIES, answered, make_cache, make_plan

PROMPTS, ANSWERS, ENCODED = (64, 512, 4096), (96, 1024), (16, 64, 256, 512)  # tokens
TARGET = 500.0  # microseconds of a lookup
ROUNDS, PLANS = 7, 8
LOOKUPS = 1000  # beside busy threads
PAUSE = 0.001  # seconds between two of them
WAITING = 16  # updates that are kept waiting, besides those that wait for the encoder

# Which lookup: its result, and whether it is of a session. Outside of one a single window is tried
# after the prompt; in one, four of them, of which the last is found: the most that is ever hashed.
KINDS = {
    "hit": (LookupResult.EXACT, False),
    "window hit": (LookupResult.WINDOW, False),
    "miss": (LookupResult.MISS, False),
    "window hit, session": (LookupResult.WINDOW, True),
    "miss, session": (LookupResult.MISS, True),
}

Run = Callable[[], object]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):5.0f} ({min(values):.0f} to {max(values):.0f})"


def timed(rounds: Sequence[Sequence[Run]], device: torch.device) -> list[float]:
    """Microseconds a call, one figure a round."""
    found = []
    for calls in rounds:
        begin = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - begin) / len(calls) * 1e6)
    return found


def chat(number: int, length: int, history: int = 0, session: str = "") -> RequestPlan:
    """Four turns of equal length; the last is ``number``'s alone, the others ``history``'s too."""
    quarter, own = length // 4, (number % 1000, number // 1000)  # below any vocabulary's size
    before = [history, *own, *range(3 * quarter - 3)]
    turns = tuple(range(0, length, quarter))
    ids = [*before, *own, *range(quarter - 2)]
    return make_plan(ids, turn_starts=turns, session_id=session)


def lookups(cache: DFlashCache, device: torch.device) -> list[dict[str, Any]]:
    """Prints a table. ``cache`` has semantic windows, and none of these sessions."""
    print(f"\nLookup, microseconds, {len(cache.table)} entries on {device}")
    print("  prompt  answer  " + "  ".join(f"{name:20}" for name in KINDS))
    rows = []
    for length in PROMPTS:
        for tokens in ANSWERS:
            numbers = range(length * tokens, length * tokens + PLANS)
            for number in numbers:
                cache.record(answered(chat(number, length), range(number, number + tokens)))
            row: dict[str, Any] = {"prompt": length, "answer": tokens}
            for name, (result, in_session) in KINDS.items():
                session, history = "s" * in_session, int(result is LookupResult.WINDOW)
                first = PLANS if result is LookupResult.MISS else 0
                plans = [chat(number + first, length, history, session) for number in numbers]
                assert {cache.lookup(plan).result for plan in plans} == {result}
                row[name] = timed(
                    [[partial(cache.lookup, plan) for plan in plans * 5]] * ROUNDS, device
                )
                cache.note_uses()
            rows.append(row)
            cells = "  ".join(f"{spread(row[name]):20}" for name in KINDS)
            print(f"  {length:6}  {tokens:6}  {cells}", flush=True)
    return rows


def updates(cache: DFlashCache, device: torch.device) -> dict[str, list[float]]:
    """Records with their states into a full table, and a search; prints microseconds."""
    states = list(torch.randn((64, cache.table.hidden.shape[1])).to(device))

    def records(offer: Offer, base: int, share: int, complete: bool) -> list[list[Run]]:
        def record(number: int) -> None:
            outcome = answered(chat(number, 512), range(number, number + share), complete)
            offers = cache.record(outcome, states[number % 64])
            assert offers == {offer: 1}, offers

        rounds = [range(base + k * 64, base + k * 64 + 64) for k in range(ROUNDS)]
        return [[partial(record, number) for number in numbers] for numbers in rounds]

    base = 10**7
    found = {"stored": timed(records(Offer.STORED, base, 48, False), device)}
    found["extended"] = timed(records(Offer.EXTENDED, base, 96, True), device)
    found["known"] = timed(records(Offer.KNOWN, base, 96, True), device)
    search = [partial(cache.neighbours, chat(0, 64), state) for state in states[:16]]
    found["neighbours"] = timed([search] * ROUNDS, device)
    print(
        "\nUpdates, microseconds, prompts of 512 tokens, answers of 48 (stored) and 96, one block"
    )
    for name, values in found.items():
        print(f"  {name:10} {spread(values):24} {1e6 / statistics.median(values):8,.0f} a second")
    return found


def encodings(encoder: PrefixEncoder, device: torch.device) -> dict[int, list[float]]:
    found = {}
    print("\nEncoder, microseconds")
    for length in ENCODED:
        calls = [partial(encoder.encode, range(length))] * 3
        timed([calls[:1]], device)
        found[length] = timed([calls] * ROUNDS, device)
        print(f"  {length:4} tokens  {spread(found[length])}", flush=True)
    return found


def beside_threads(
    device: torch.device, encoder: PrefixEncoder | None, updating: bool
) -> dict[str, Any]:
    """Lookups of a service whose queues are kept filled.

    ``lookup_us``: as its caller waits for it. ``late_us``: what the caller was late before it, by
    the machine's timer and by waiting for the interpreter.
    """
    cache = make_cache(device, windows="semantic")
    known = [chat(number, 512) for number in range(ENTRIES)]
    for number, plan in enumerate(known):
        cache.record(answered(plan, range(number, number + 96)))
    observer = Observer(metrics.Recorder())
    before = sys.getswitchinterval()
    service = CacheService(cache, observer, encoder, "on")
    most = WAITING + (QUEUED_ENCODINGS if encoder else 0)
    replies: list[object] = []
    submitted, hits, took, late = 0, 0, [], []
    begin = time.perf_counter()
    for number in range(LOOKUPS):
        while updating and submitted - len(replies) < most:
            plan = chat(10**6 + submitted, 512)
            service.submit(answered(plan, range(submitted, submitted + 96)), replies.append)
            submitted += 1
        asleep = time.perf_counter()
        time.sleep(PAUSE)
        awake = time.perf_counter()
        # So few that what is stored meanwhile does not push them out.
        lookup = service.lookup(known[-1 - number % 64])
        took.append((time.perf_counter() - awake) * 1e6)
        late.append((awake - asleep - PAUSE) * 1e6)
        hits += lookup.result is LookupResult.EXACT
    seconds = time.perf_counter() - begin
    service.close()
    sys.setswitchinterval(before)  # the service had set it for the process
    encoded = json.loads(observer.stats(cache, True))["encoder"].get("count", 0)
    figures = {
        "lookup_us": np.percentile(took, (50, 99, 100)).tolist(),
        "late_us": np.percentile(late, (50, 99, 100)).tolist(),
        "hits": hits / LOOKUPS, "updates_per_second": len(replies) / seconds,
        "encodings_per_second": encoded / seconds,
    }  # fmt: skip
    cache.table.check_integrity()
    return figures


def measure(device: torch.device, encoder: PrefixEncoder | None) -> dict[str, Any]:
    """Prints tables. ``fast``: every lookup's median is below the target."""
    cache = make_cache(device, windows="semantic")
    for number in range(ENTRIES):
        cache.record(answered(make_plan((number,), turn_starts=(0,)), range(96)))
    looked_up = lookups(cache, device)
    figures: dict[str, Any] = {"lookups": looked_up, "updates": updates(cache, device)}
    cache.table.check_integrity()
    medians = [statistics.median(row[name]) for row in looked_up for name in KINDS]
    figures["slowest_lookup"], figures["fast"] = max(medians), max(medians) < TARGET
    print(f"  slowest lookup: {max(medians):.0f} microseconds (target: below {TARGET:.0f})")
    modes: dict[str, tuple[PrefixEncoder | None, bool]] = {
        "idle": (None, False),
        "updater busy": (None, True),
    }
    if encoder:
        figures["encoder"] = encodings(encoder, device)
        modes["updater and encoder busy"] = (encoder, True)
    print("\nLookups (exact, 512 tokens) beside the service's threads, microseconds")
    print(
        "                             p50    p99    max   late by p50, p99, max   hits  per second"
    )
    figures["beside_threads"] = {}
    for name, (own, updating) in modes.items():
        row = figures["beside_threads"][name] = beside_threads(device, own, updating)
        took, late = ([f"{value:6.0f}" for value in row[key]] for key in ("lookup_us", "late_us"))
        print(
            f"  {name:24} {' '.join(took)}   {' '.join(late)}  {row['hits']:6.0%}"
            f"  {row['updates_per_second']:.0f} updates,"
            f" {row['encodings_per_second']:.0f} encodings",
            flush=True,
        )
    return figures

"""What is counted of the cache, for the metrics and for ``make dflash-stats``."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepseek_flash import metrics
from deepseek_flash.contract import Lookup, LookupResult, Neighbours
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.entry import Offer

HITS = (LookupResult.EXACT, LookupResult.WINDOW)


class Observer:
    """Counts lookups and updates in a Recorder. Safe to call from any thread."""

    def __init__(self, recorder: metrics.Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._lookups: Counter[str] = Counter()
        self._encodings: Counter[str] = Counter()
        self._recent, self._recent_hits = metrics.Rolling(), metrics.Rolling()
        self._published: dict[str, Counter[Any]] = {}  # metric → what was counted up to now

    def looked_up(self, lookup: Lookup, seconds: float) -> None:
        if lookup.result is LookupResult.OFF:
            return
        self._count_lookup(lookup.result)
        self._recorder.observe(metrics.LOOKUP_SECONDS, seconds)
        now = time.monotonic()
        self._recent.add(1.0, now)
        self._recent_hits.add(float(lookup.result in HITS), now)

    def found(self, neighbours: Neighbours) -> None:
        """A miss for which similar prompts were found; it was counted as a miss before."""
        if neighbours.references:
            self._count_lookup("semantic")

    def encoded(self, seconds: float) -> None:
        self._recorder.observe(metrics.ENCODER_SECONDS, seconds)
        with self._lock:
            self._encodings["count"] += 1
            self._encodings["microseconds"] += int(seconds * 1e6)

    def offered(self, offers: Counter[Offer]) -> None:
        for offer, count in offers.items():
            self._recorder.count(metrics.OFFERS, count, (("result", offer.value),))

    def dropped(self, what: str) -> None:
        self._recorder.count(metrics.UPDATES_DROPPED, labels=(("kind", what),))

    def set_gauges(self, cache: DFlashCache, encoder_active: bool) -> None:
        """Called before metrics are published."""
        now = time.monotonic()
        looked_up = self._recent.rate(now)
        hit_rate = self._recent_hits.rate(now) / looked_up if looked_up else 0.0
        self._recorder.gauge(metrics.HIT_RATE, hit_rate)
        self._recorder.gauge(metrics.ENTRIES, len(cache.table))
        self._recorder.gauge(metrics.DEVICE_BYTES, cache.table.bytes_on_device)
        self._recorder.gauge(metrics.ENCODER_ACTIVE, float(encoder_active))
        self._publish(metrics.EVICTIONS, "reason", cache.table.evictions)
        self._publish(metrics.COLLISIONS, "", Counter({"": cache.collisions}))
        self._publish(metrics.REFERENCE_TOKENS, "result", cache.guessed)

    def stats(self, cache: DFlashCache, encoder_active: bool) -> str:
        """A JSON object about the cache as it is now. The updater's thread calls it."""
        table = cache.table
        with self._lock:
            lookups, encodings = dict(self._lookups), dict(self._encodings)
        return json.dumps({
            "entries": len(table),
            "capacity": table.capacity,
            "complete": int((table.complete != 0).sum()),
            "tokens": int(table.length.sum()),
            "tenants": table.tenant_count,
            "sessions": len(cache.windows),
            "windows": table.window_count,
            "window_policy": cache.windows.policy.value,
            "device": str(table.tokens.device),
            "bytes_on_device": table.bytes_on_device,
            "oldest_entry_seconds": cache.oldest_age(),
            "lookups": lookups,
            "offers": _plain(table.offers),
            "evictions": _plain(table.evictions),
            "collisions": cache.collisions,
            "encoder": {"active": encoder_active, **encodings},
            "reference_tokens": dict(cache.guessed),
        })  # fmt: skip

    def _count_lookup(self, result: str) -> None:
        self._recorder.count(metrics.LOOKUPS, labels=(("result", result),))
        with self._lock:
            self._lookups[str(result)] += 1

    def _publish(self, metric: metrics.Metric, label: str, totals: Counter[Any]) -> None:
        """The rise of counters that are kept elsewhere."""
        now, before = totals.copy(), self._published.get(metric.name, Counter())
        self._published[metric.name] = now
        for value, count in (now - before).items():
            self._recorder.count(metric, count, ((label, str(value)),) if label else ())


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}

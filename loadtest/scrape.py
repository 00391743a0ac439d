"""What a server publishes: its metrics at a moment, and by how much they rose."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import httpx
from deepseek_flash import metrics

from loadtest.served import Served

STAGES = ("dspark_scheduler", "dflash_cache", "deepseek_decoder")
SETTLE_SECONDS = 30.0

Metrics = Mapping[str, Mapping[str, float]]  # name → its labels' values, joined by commas → value


# Not prometheus_client: it renames counters that do not end in _total, as our histograms' series.
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'\w+="((?:[^"\\]|\\.)*)"')


def read_metrics(url: str) -> Metrics:
    """All metrics of a server."""
    response = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status()
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in _SAMPLE.findall(response.text):
        found.setdefault(name, {})[",".join(_LABEL.findall(labels))] = float(value)
    return found


def settled(served: Served) -> Metrics:
    """The metrics once all that happened so far is in them.

    Raises:
        TimeoutError: a stage does not publish.
    """

    def rounds(found: Metrics) -> list[float]:
        return [found.get(metrics.HEARTBEAT.name, {}).get(stage, 0.0) for stage in STAGES]

    before = rounds(read_metrics(served.metrics))
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        found = read_metrics(served.metrics)
        # One round may have been on its way already.
        if all(now >= then + 2 for now, then in zip(rounds(found), before, strict=True)):
            return found
        time.sleep(0.2)
    raise TimeoutError(f"no two rounds of metrics within {SETTLE_SECONDS:g} s")


def drained(served: Served) -> Metrics:
    """As ``settled``, once the cache has done what it does behind the answers."""
    work = (f"{metrics.ENCODER_SECONDS.name}_count", metrics.OFFERS.name)
    before, found = settled(served), settled(served)
    while any(rise(before, found, name) for name in work):
        before, found = found, settled(served)
    return found


def rise(before: Metrics, after: Metrics, name: str) -> dict[str, float]:
    """By how much a metric's series rose; those that did not are left out."""
    old = before.get(name, {})
    gains = {label: value - old.get(label, 0.0) for label, value in after.get(name, {}).items()}
    return {label: gain for label, gain in gains.items() if gain}


def hit_rate(lookups: Mapping[str, float]) -> float:
    """Exact and window hits among all lookups; "semantic" are some of the misses again."""
    total = sum(count for result, count in lookups.items() if result != "semantic")
    return (lookups.get("exact", 0.0) + lookups.get("window", 0.0)) / total if total else 0.0


def summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    labels = sorted({label for each in counts for label in each})
    return {label: sum(each.get(label, 0.0) for each in counts) for label in labels}

"""What a server counted in some legs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepseek_flash import metrics
from deepseek_flash.metrics import Kind, Metric

from loadtest.records import Leg
from loadtest.scrape import Metrics

_OURS = (*metrics.SCHEDULER_METRICS, *metrics.CACHE_METRICS, *metrics.DECODER_METRICS)
_GAUGES = frozenset(metric.name for metric in _OURS if metric.kind is Kind.GAUGE)
_TRITON_GAUGES = ("nv_cpu_", "nv_gpu_", "nv_pinned_", "nv_inference_pending_")


def points(leg: Leg) -> Iterator[tuple[float, Metrics]]:
    """The server's metrics at all moments that are known, with seconds from the beginning."""
    yield 0.0, leg.before
    end = leg.seconds
    for moment in leg.moments:
        yield moment.at, moment.metrics
        end = max(end, moment.at)
    yield end, leg.after


def rises(before: Metrics, *later: Metrics) -> dict[str, dict[str, float]]:
    """By how much each series rose, as Prometheus sees it: one that fell began anew at 0.

    A series that is not there keeps its value: it appears with its first increment.
    """
    last = {name: dict(series) for name, series in before.items()}
    gains: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for point in later:
        for name, series in point.items():
            old = last.setdefault(name, {})
            for label, value in series.items():
                then = old.get(label, 0.0)
                gains[name][label] += value - then if value >= then else value
                old[label] = value
    return {name: dict(series) for name, series in gains.items()}


@dataclass(frozen=True)
class Counts:
    """By how much counters rose."""

    gains: Mapping[str, Mapping[str, float]]  # name → labels → value
    known: bool  # whether the server published: then a counter that is not there is at 0

    @classmethod
    def of(cls, legs: Sequence[Leg]) -> Counts:
        total: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for leg in legs:
            for name, series in rises(*(found for _, found in points(leg))).items():
                for label, gain in series.items():
                    total[name][label] += gain  # type: ignore[assignment]
        known = bool(legs) and all(metrics.HEARTBEAT.name in leg.after for leg in legs)
        return cls(total, known)

    def series(self, metric: Metric) -> Mapping[str, float]:
        return self.gains.get(metric.name, {})

    def count(self, metric: Metric, label: str | None = None) -> float | None:
        """One series, or all together; None: not known."""
        if not self.known:
            return None
        series = self.series(metric)
        return sum(series.values()) if label is None else series.get(label, 0.0)


def restarts(legs: Sequence[Leg]) -> float | None:
    """How often a heartbeat fell, from leg to leg too; None: there is none."""
    last: dict[str, float] = {}
    found = 0
    for leg in legs:
        for _, point in points(leg):
            now = point.get(metrics.HEARTBEAT.name, {})
            # Of a whole server they fall together.
            found += any(beats < last.get(stage, 0.0) for stage, beats in now.items())
            last |= now
    return float(found) if last else None


def asked(lookups: Mapping[str, float]) -> float:
    """Lookups by result → all; "semantic" are some of the misses again."""
    return sum(count for result, count in lookups.items() if result != "semantic")


# -- for the report --------------------------------------------------------------------------


def is_gauge(name: str) -> bool:
    return name in _GAUGES or name.startswith(_TRITON_GAUGES)


def labelled(name: str, label: str) -> str:
    return f"{name}{{{label}}}" if label else name


def counters(legs: Sequence[Leg]) -> dict[str, float]:
    """By how much every counter rose that did; histograms without their buckets."""
    return {
        labelled(name, label): gain
        for name, series in Counts.of(legs).gains.items()
        for label, gain in series.items()
        if gain and not is_gauge(name) and not name.endswith("_bucket")
    }


def gauges(legs: Sequence[Leg]) -> dict[str, float]:
    """The mean of every gauge that moved, over all moments."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for leg in legs:
        for moment in leg.moments:
            for name, series in moment.metrics.items():
                if is_gauge(name):
                    for label, value in series.items():
                        found[labelled(name, label)].append(value)
    return {name: sum(all_) / len(all_) for name, all_ in found.items() if len(set(all_)) > 1}

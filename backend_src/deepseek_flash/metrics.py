"""Metric names, kinds and buckets as data, and the recorder that adds them up in the process.

Publishing one value to Triton is a call to another process, so nothing is published where it
happens: a recorder adds up, and a thread (``triton_metrics``) publishes what changed. Histograms
are kept as their ``_bucket``/``_sum``/``_count`` series, so that a thousand observations cost no
more calls than one.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, product

from deepseek_flash.contract import Expired, InvalidField, Refused, RequestError


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    buckets: tuple[float, ...] = ()  # upper bounds in the metric's unit, ascending
    # Label → its values, as far as they are known beforehand: their series are there with 0 from
    # the start, so that a query need not know what has happened yet.
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

# Named as vLLM names them, where the meaning is the same.
FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds", Kind.HISTOGRAM,
    "Seconds from a request's arrival to its first token", _LATENCY,
)  # fmt: skip
INTER_TOKEN = Metric(
    "vllm:inter_token_latency_seconds", Kind.HISTOGRAM,
    "Seconds between responses of one request, per token", _LATENCY,
)  # fmt: skip
END_TO_END = Metric(
    "vllm:e2e_request_latency_seconds", Kind.HISTOGRAM,
    "Seconds from a request's arrival to its last token", _LATENCY,
)  # fmt: skip
PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", Kind.COUNTER, "Prompt tokens of all requests")
GENERATION_TOKENS = Metric("vllm:generation_tokens_total", Kind.COUNTER, "Tokens generated")
SUCCESSES = Metric(
    "vllm:request_success_total", Kind.COUNTER, "Finished requests by finished_reason",
    labels={"finished_reason": ("stop", "length")},
)  # fmt: skip
RUNNING = Metric("vllm:num_requests_running", Kind.GAUGE, "Requests in the engine's batch")
WAITING = Metric("vllm:num_requests_waiting", Kind.GAUGE, "Requests waiting in the engine")
KV_CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc", Kind.GAUGE, "Share of the KV cache that running requests hold"
)
PREEMPTIONS = Metric(
    "vllm:num_preemptions_total", Kind.COUNTER, "Requests put off for want of KV cache"
)

_REASONS = tuple(kind.reason for kind in (InvalidField, Refused, Expired, RequestError))
ERRORS = Metric(
    "deepseek_flash_errors_total", Kind.COUNTER, "Requests that failed, by stage and reason",
    labels={"reason": _REASONS, "stage": ("scheduler", "cache", "decoder")},
)  # fmt: skip
CANCELLED = Metric(
    "deepseek_flash_cancelled_total", Kind.COUNTER, "Requests cancelled by token or operator"
)
IN_FLIGHT = Metric(
    "deepseek_flash_in_flight", Kind.GAUGE, "Requests between admission and last response"
)
_PATH = {"path": ("fast", "burst", "slow")}
PATH_TOKENS = Metric(
    "dspark_tokens_total", Kind.COUNTER, "Tokens by the path that made them; each counted once",
    labels=_PATH,
)  # fmt: skip
PASSES = Metric(
    "dspark_passes_total", Kind.COUNTER, "A request's part in a model pass, by its path",
    labels=_PATH,
)  # fmt: skip
_SOURCE = {"source": ("history", "reference", "chain")}
DRAFTS_PROPOSED = Metric(
    "dspark_drafts_proposed_total", Kind.COUNTER, "Draft tokens that the model verified, by source",
    labels=_SOURCE,
)  # fmt: skip
DRAFTS_ACCEPTED = Metric(
    "dspark_drafts_accepted_total", Kind.COUNTER, "Those of them that were right, by source",
    labels=_SOURCE,
)  # fmt: skip
BURST_TOKENS = Metric(
    "dspark_burst_tokens_total", Kind.COUNTER, "Draft tokens from a request's own text in bursts"
)
BURSTS_PER_SECOND = Metric(
    "burst_count_per_second", Kind.GAUGE, "Passes on the burst path per second, over a minute"
)
STEPS = Metric("dspark_steps_total", Kind.COUNTER, "Model passes that DSpark has looked at")
STEP_SECONDS = Metric("dspark_step_seconds_total", Kind.COUNTER, "Seconds of these passes")
DECISION_SECONDS = Metric(
    "dspark_decision_seconds_total", Kind.COUNTER, "Seconds DSpark took between them, all in all"
)
COST_ERROR = Metric(
    "dspark_cost_error", Kind.GAUGE, "Mean relative error of the predicted seconds of a pass"
)
SIGNALS = (
    Metric(
        "dspark_entropy_ratio", Kind.GAUGE,
        "Entropy of the last tokens against the 32 before each, mean of the last second",
    ),
    Metric("dspark_gap", Kind.GAUGE, "(p1 - p2) / p1 of the last tokens, mean of the last second"),
    Metric(
        "dspark_attention_variance", Kind.GAUGE,
        "Variance across the last layer's heads over 32 positions, mean of the last second",
    ),
)  # fmt: skip
REPLAYS = Metric(
    "deepseek_flash_replays_total",
    Kind.COUNTER,
    "Exact hits by what they were good for",
    labels={"use": ("whole", "beginning", "nothing")},
)
COALESCED = Metric(
    "deepseek_flash_coalesced_total",
    Kind.COUNTER,
    "Requests answered by the run of an identical one",
)
REFERENCES = Metric(
    "dflash_references_total", Kind.COUNTER, "Continuations of similar prompts, as the cache gave"
)
FEEDBACK_DROPPED = Metric(
    "dflash_feedback_dropped_total",
    Kind.COUNTER,
    "Outcomes and questions that did not reach the cache, by reason",
    labels={"reason": ("outcome_queue_full", "neighbours_queue_full", "error")},
)
ENGINE_RUNS = Metric(
    "deepseek_flash_engine_runs_total", Kind.COUNTER, "Generations started for requests"
)
PROBE_EXTENSIONS = Metric(
    "deepseek_flash_probe_extensions_total", Kind.COUNTER,
    "Generations behind one-token answers, for the cache alone, by how they ended",
    labels={"result": ("done", "aborted", "failed")},
)  # fmt: skip
HEARTBEAT = Metric(
    "deepseek_flash_heartbeat_total",
    Kind.COUNTER,
    "Rounds of publishing metrics, by model; stands still when the model's process is dead",
    labels={"model": ()},  # the publisher's own
)
CONFIG_INFO = Metric(
    "deepseek_flash_config_info", Kind.GAUGE, "The settings in force, one series a key; always 1",
    labels={"key": (), "model": (), "value": ()},
)  # fmt: skip

# -- the cache's -----------------------------------------------------------------------------

LOOKUPS = Metric(
    "dflash_lookups_total",
    Kind.COUNTER,
    "Lookups by result; 'semantic' counts those misses for which similar prompts were found",
    labels={"result": ("exact", "window", "miss", "semantic")},
)
LOOKUP_SECONDS = Metric(
    "dflash_lookup_seconds", Kind.HISTOGRAM, "Seconds of a lookup, inside the cache",
    (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)  # fmt: skip
ENTRIES = Metric("dflash_entries", Kind.GAUGE, "Entries in the cache")
DEVICE_BYTES = Metric("dflash_device_bytes", Kind.GAUGE, "Bytes of the cache on its device")
OFFERS = Metric(
    "dflash_offers_total",
    Kind.COUNTER,
    "Blocks offered to the cache by result",
    labels={"result": ("stored", "extended", "known", "diverged", "collided")},
)
EVICTIONS = Metric(
    "dflash_evictions_total", Kind.COUNTER, "Entries that went, by reason",
    labels={"reason": ("capacity", "window", "quota", "ttl", "flush", "collision")},
)  # fmt: skip
COLLISIONS = Metric("dflash_collisions_total", Kind.COUNTER, "Entries that their MAC did not prove")
UPDATES_DROPPED = Metric(
    "dflash_updates_dropped_total", Kind.COUNTER, "Updates and questions that found no place",
    labels={"kind": ("update", "question")},
)  # fmt: skip
ENCODER_ACTIVE = Metric(
    "dflash_encoder_active", Kind.GAUGE, "1 while similar prompts are looked for"
)
ENCODER_SECONDS = Metric(
    "dflash_encoder_seconds", Kind.HISTOGRAM, "Processor seconds of an encoding",
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)  # fmt: skip
REFERENCE_TOKENS = Metric(
    "dflash_reference_tokens_total",
    Kind.COUNTER,
    "Answers that had references, their tokens, and those guessed at all and rightly",
    labels={"result": ("answers", "tokens", "guessed", "right")},
)

# The source document's rolling gauges.
HIT_RATE = Metric(
    "dflash_hit_rate", Kind.GAUGE, "Exact and window hits among the last minute's lookups"
)
P95_FIRST_TOKEN = Metric(
    "p95_first_token_latency", Kind.GAUGE, "95th percentile of the last minute, seconds"
)
TOKENS_PER_SECOND = Metric(
    "avg_tokens_per_second", Kind.GAUGE, "Tokens generated per second over the last minute"
)


def errors_of(stage: str) -> Metric:
    """``ERRORS`` as the process of one stage publishes it."""
    return replace(ERRORS, labels={**ERRORS.labels, "stage": (stage,)})


SCHEDULER_METRICS = (errors_of("scheduler"), IN_FLIGHT, CONFIG_INFO, HEARTBEAT)
CACHE_METRICS = (
    errors_of("cache"), CONFIG_INFO, HEARTBEAT, LOOKUPS, LOOKUP_SECONDS, ENTRIES, DEVICE_BYTES,
    OFFERS, EVICTIONS, COLLISIONS, UPDATES_DROPPED, ENCODER_ACTIVE, ENCODER_SECONDS,
    REFERENCE_TOKENS, HIT_RATE,
)  # fmt: skip
DECODER_METRICS = (
    FIRST_TOKEN, INTER_TOKEN, END_TO_END, PROMPT_TOKENS, GENERATION_TOKENS, SUCCESSES, RUNNING,
    WAITING, KV_CACHE_USAGE, PREEMPTIONS, errors_of("decoder"), CANCELLED, ENGINE_RUNS, CONFIG_INFO,
    P95_FIRST_TOKEN, TOKENS_PER_SECOND, HEARTBEAT, PATH_TOKENS, REPLAYS, COALESCED, REFERENCES,
    FEEDBACK_DROPPED, PASSES, DRAFTS_PROPOSED, DRAFTS_ACCEPTED, BURST_TOKENS, BURSTS_PER_SECOND,
    STEPS, STEP_SECONDS, DECISION_SECONDS, COST_ERROR, *SIGNALS, PROBE_EXTENSIONS,
)  # fmt: skip

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the exposition. ``name`` differs from the metric's for histograms."""

    name: str
    kind: Kind  # COUNTER or GAUGE
    help: str
    labels: Labels


def plain_series(metric: Metric, labels: Labels = ()) -> Series:
    return Series(metric.name, metric.kind, metric.help, labels)


def histogram_series(metric: Metric) -> tuple[list[Series], Series, Series]:
    """Bucket series (the last is +Inf), sum and count."""
    bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
    buckets = [
        Series(f"{metric.name}_bucket", Kind.COUNTER, metric.help, (("le", bound),))
        for bound in bounds
    ]
    total = Series(f"{metric.name}_sum", Kind.COUNTER, metric.help, ())
    return buckets, total, Series(f"{metric.name}_count", Kind.COUNTER, metric.help, ())


def known_series(metric: Metric) -> list[Series]:
    """Those that are there from the start, before anything happened."""
    if metric.kind is Kind.HISTOGRAM:
        buckets, total, count = histogram_series(metric)
        return [*buckets, total, count]
    # Without labels that is one; where a label's values are not known, none.
    return [
        plain_series(metric, tuple(zip(metric.labels, values)))
        for values in product(*metric.labels.values())
    ]


class _Histogram:
    """Observations since the last ``take``, each counted in one bucket only."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts = [0] * (len(metric.buckets) + 1)
        self.total = 0.0

    def changes(self) -> Mapping[Series, float]:
        """As the exposition has it: a bucket holds all those below it too."""
        buckets, total, count = histogram_series(self.metric)
        so_far = list(accumulate(self.counts))
        rising = {series: float(n) for series, n in zip(buckets, so_far) if n}
        return {**rising, total: self.total, count: float(so_far[-1])}


class Recorder:
    """Adds up what happens in one process. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Keyed by plain strings: this runs for every token.
        self._plain: dict[tuple[str, Labels], tuple[Metric, float]] = {}
        self._histograms: dict[str, _Histogram] = {}

    def count(self, metric: Metric, amount: float = 1.0, labels: Labels = ()) -> None:
        key = (metric.name, labels)
        with self._lock:
            before = self._plain.get(key)
            self._plain[key] = (metric, amount if before is None else before[1] + amount)

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        with self._lock:
            self._plain[(metric.name, labels)] = (metric, value)

    def observe(self, metric: Metric, value: float, times: int = 1) -> None:
        """Add ``times`` observations of ``value`` to a histogram."""
        bucket = bisect_left(metric.buckets, value)
        with self._lock:
            histogram = self._histograms.get(metric.name)
            if histogram is None:
                histogram = self._histograms[metric.name] = _Histogram(metric)
            histogram.counts[bucket] += times
            histogram.total += value * times

    def take(self) -> Mapping[Series, float]:
        """What changed since the last call: increments of counters, values of gauges."""
        with self._lock:
            plain, self._plain = self._plain, {}
            histograms, self._histograms = self._histograms, {}
        changes = {
            plain_series(metric, labels): value for (_, labels), (metric, value) in plain.items()
        }
        for histogram in histograms.values():
            changes.update(histogram.changes())
        return changes


def count_error(recorder: Recorder, stage: str, error: Exception) -> None:
    """Count a request that ``stage`` failed, under the error's own reason; others are internal."""
    reason = error.reason if isinstance(error, RequestError) else RequestError.reason
    recorder.count(ERRORS, labels=(("reason", reason), ("stage", stage)))


class Rolling:
    """Events of the last ``seconds``: (time, value) pairs."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._events: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()
        self._since = time.monotonic()

    def add(self, value: float, now: float) -> None:
        with self._lock:
            self._events.append((now, value))
            self._forget(now)

    def quantile(self, q: float, now: float) -> float:
        """The q-quantile of the values (nearest rank); 0 when there were none."""
        with self._lock:
            self._forget(now)
            values = sorted(value for _, value in self._events)
        return values[max(0, math.ceil(q * len(values)) - 1)] if values else 0.0

    def rate(self, now: float) -> float:
        """Sum of the values per second."""
        with self._lock:
            self._forget(now)
            total = sum(value for _, value in self._events)
        return total / max(1.0, min(self._seconds, now - self._since))

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] < now - self._seconds:
            self._events.popleft()

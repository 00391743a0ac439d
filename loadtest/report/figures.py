"""The figures of a summary: names, how they are shown, what they mean, what the document has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepseek_flash.dspark.drafts import Source
from deepseek_flash.dspark.paths import Path

from loadtest.records import OFF, ON

RATIO = "ratio"
COLUMNS = (OFF, ON, RATIO)
PATHS = tuple(path.value for path in Path)
SOURCES = tuple(source.name.lower() for source in Source)
LATE_SECONDS = 0.05
ABSENT = "–"

Value = float | None  # None: not known, or not defined


def _decimal(value: float) -> str:
    return f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    name: str  # in summary.json
    title: str  # with its unit
    format: Callable[[float], str]
    meaning: str
    document: str = ""  # what the source document has

    def show(self, column: str, value: Value) -> str:
        if value is None:
            return ABSENT
        return f"{value:.2f}x" if column == RATIO else self.format(value)


def _latency(name: str, title: str, meaning: str, p95: str = "") -> tuple[Figure, ...]:
    return tuple(
        Figure(f"{name}_p{q}", f"{title} p{q}, s", _seconds, meaning, p95 if q == 95 else "")
        for q in (50, 95, 99)
    )


_LOOKUP = "Share of the cache's lookups"
_DOCUMENT_PATHS = {"fast": "63%", "burst": "12%", "slow": "25%"}

FIGURES = (
    Figure(
        "tokens_per_s", "tokens/s", _decimal,
        "Tokens of the answers without an error over the seconds of the closed loops.",
        "128 → 215 (1.68x)",
    ),
    *_latency(
        "ttft", "first token",
        "From when a request was due to its first token, in the open loops if the phase has any.",
        "37% lower (0.63x)",
    ),
    *_latency("e2e", "end to end", "From when a request was due to its last token, likewise."),
    Figure(
        "tail", "tail p99/p50", _times,
        "p99 over p50 of seconds per output token, of requests for which the engine ran.",
        "4.2 → 1.8",
    ),
    Figure(
        "itl_p95", "inter-token p95, s", _seconds,
        "Seconds between two responses, shared out over the tokens of the second.",
    ),
    Figure(
        "hit_rate", "hit rate", _percent,
        f"{_LOOKUP} that were exact or window hits; in the warm-up, of its last round.",
        "85% or more, warm",
    ),
    Figure("hit_exact", "  exact", _percent, f"{_LOOKUP} that found this very context."),
    Figure("hit_window", "  window", _percent, f"{_LOOKUP} that found the same turns elsewhere."),
    Figure(
        "hit_semantic", "  similar", _percent,
        f"{_LOOKUP} that missed and for which similar prompts were found; no hits.",
    ),
    *(
        Figure(
            f"path_{path}", f"{path} path", _percent,
            "Share of the tokens that this path made, of all loops.",
            _DOCUMENT_PATHS[path],
        )
        for path in PATHS
    ),
    Figure(
        "drafts_accepted", "drafts accepted", _percent,
        "Share of the draft tokens that were right, of those that the model verified.",
    ),
    *(
        Figure(f"drafts_accepted_{it}", f"  {it}", _percent, f"The same for the source “{it}”.")
        for it in SOURCES
    ),
    Figure("drafts_proposed", "drafts proposed", _whole, "Draft tokens that the model verified."),
    *(
        Figure(f"drafts_proposed_{it}", f"  {it}", _whole, f"The same for the source “{it}”.")
        for it in SOURCES
    ),
    Figure(
        "replayed_whole", "replayed whole", _whole, "Requests whose answer the cache gave alone."
    ),
    Figure(
        "replayed_beginning", "replayed beginning", _whole,
        "Requests whose answer the cache began and the engine ended.",
    ),
    Figure("requests", "requests", _whole, "Requests that ended, of all loops."),
    Figure("errors", "errors", _whole, "Requests that failed; they have no latencies."),
    Figure(
        "late", "late sends", _whole,
        f"Requests of open loops sent over {LATE_SECONDS * 1000:.0f} ms after they were due.",
    ),
    Figure(
        "late_p95", "late by p95, s", _seconds,
        "Seconds by which requests of open loops were sent late; latencies include them.",
    ),
    Figure("preemptions", "preemptions", _whole, "Requests put off for want of KV cache."),
    Figure(
        "restarts", "restarts", _whole,
        "How often a process of the server began anew, out of memory or otherwise.",
    ),
    Figure(
        "memory_peak", "memory peak, GiB", _gib,
        "Most memory of the server's processes together; in bytes in the files.",
    ),
    Figure("locust_cpu", "Locust CPU", _percent, "Most of one core that a leg's clients took."),
    Figure(
        "idle_cpu", "idle server CPU", _percent,
        "Share of one core that the other server took meanwhile.",
    ),
)  # fmt: skip

BY_NAME = {figure.name: figure for figure in FIGURES}

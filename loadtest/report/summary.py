"""The figures of a run: the content of summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepseek_flash import metrics

from loadtest.numbers import quantile
from loadtest.records import CLOSED, OFF, ON, OPEN, PHASES, WARM_UP, Leg, Record, Run
from loadtest.report.counts import Counts, asked, restarts
from loadtest.report.figures import FIGURES, LATE_SECONDS, PATHS, RATIO, SOURCES, Value
from loadtest.scrape import hit_rate

Figures = dict[str, Value]


def summarise(run: Run) -> dict[str, Any]:
    """Seconds, bytes and shares of 1; None: not known, or not defined."""
    return {
        "scale": run.scale,
        "model": run.model,
        "seed": run.seed,
        "repeat_share": run.repeat_share,
        "prompts": run.prompts,
        "doors": list(run.doors),
        "capacity": run.capacity,
        "traces": _traces(run.legs),
        "bursts": dict(run.bursts),
        "phases": {phase: _columns(_of(run.legs, phase=phase)) for phase in PHASES},
    }


def legs_with_latencies(legs: Sequence[Leg]) -> list[Leg]:
    """Those of open loops; where there is none, of closed ones."""
    return _of(legs, loop=OPEN) or _of(legs, loop=CLOSED)


def answered(legs: Sequence[Leg]) -> list[Record]:
    return [record for leg in legs for record in leg.records if not record.error]


def _of(legs: Sequence[Leg], **wanted: str) -> list[Leg]:
    return [leg for leg in legs if all(getattr(leg, name) == it for name, it in wanted.items())]


def _traces(legs: Sequence[Leg]) -> dict[str, str]:
    """Phase, loop and part → digest; two of them where the sides differ, which is a fault."""
    found: dict[str, dict[str, None]] = {}
    for leg in legs:
        found.setdefault(f"{leg.phase}/{leg.loop}/{leg.part}", {})[leg.digest] = None
    return {name: " != ".join(digests) for name, digests in found.items()}


def _columns(legs: Sequence[Leg]) -> dict[str, Figures]:
    off, on = (_figures(_of(legs, side=side)) for side in (OFF, ON))
    return {OFF: off, ON: on, RATIO: {name: _over(on[name], off[name]) for name in off}}


def _over(part: Value, whole: Value) -> Value:
    return None if part is None or not whole else part / whole


def _figures(legs: Sequence[Leg]) -> Figures:
    """Of one side in one phase."""
    if not legs:
        return {figure.name: None for figure in FIGURES}
    found = {
        **_throughput(legs), **_latencies(legs), **_hits(legs), **_tokens(legs), **_health(legs)
    }  # fmt: skip
    return {figure.name: found[figure.name] for figure in FIGURES}


# -- what the clients saw --------------------------------------------------------------------


def _quantile(values: Sequence[float], q: float) -> Value:
    return quantile(values, q) if values else None


def _throughput(legs: Sequence[Leg]) -> Figures:
    closed = _of(legs, loop=CLOSED)
    tokens = sum(record.tokens for record in answered(closed))
    return {"tokens_per_s": _over(tokens, sum(leg.seconds for leg in closed))}


def _latencies(legs: Sequence[Leg]) -> Figures:
    records = answered(legs_with_latencies(legs))
    seconds = {
        "ttft": [record.first_token for record in records if record.first_token is not None],
        "e2e": [record.total for record in records],
    }
    # A replay takes next to nothing for a token: among them the spread would say only how many.
    per_token = [record.total / record.tokens for record in records if record.ran and record.tokens]
    return {
        **{
            f"{name}_p{q}": _quantile(values, q / 100)
            for name, values in seconds.items()
            for q in (50, 95, 99)
        },
        "tail": _over(_quantile(per_token, 0.99), _quantile(per_token, 0.5)),
        "itl_p95": _quantile([gap for record in records for gap in record.gaps], 0.95),
    }


# -- what the server counted -----------------------------------------------------------------


def _hits(legs: Sequence[Leg]) -> Figures:
    if legs[0].phase == WARM_UP:  # a part is a round, and the last one tells whether it is warm
        last = max(leg.part for leg in legs)
        legs = [leg for leg in legs if leg.part == last]
    lookups = Counts.of(legs).series(metrics.LOOKUPS)
    total = asked(lookups)
    return {
        "hit_rate": hit_rate(lookups) if total else None,
        **{
            f"hit_{result}": _over(lookups.get(result, 0.0), total)
            for result in ("exact", "window", "semantic")
        },
    }


def _tokens(legs: Sequence[Leg]) -> Figures:
    """Where the tokens came from."""
    counts = Counts.of(legs)
    by_path = counts.series(metrics.PATH_TOKENS)
    found = {f"path_{path}": _over(by_path.get(path, 0.0), sum(by_path.values())) for path in PATHS}
    for source in (None, *SOURCES):
        proposed, accepted = (
            counts.count(metric, source)
            for metric in (metrics.DRAFTS_PROPOSED, metrics.DRAFTS_ACCEPTED)
        )
        suffix = f"_{source}" if source else ""
        found[f"drafts_proposed{suffix}"] = proposed
        found[f"drafts_accepted{suffix}"] = _over(accepted, proposed)
    for use in ("whole", "beginning"):
        found[f"replayed_{use}"] = counts.count(metrics.REPLAYS, use)
    return found


def _health(legs: Sequence[Leg]) -> Figures:
    """Whether the figures can be trusted."""
    records = [record for leg in legs for record in leg.records]
    late = [record.late for leg in _of(legs, loop=OPEN) for record in leg.records]
    memory = [moment.memory for leg in legs for moment in leg.moments]
    seconds = sum(leg.seconds for leg in legs)
    return {
        "requests": float(len(records)),
        "errors": float(sum(bool(record.error) for record in records)),
        "late": float(sum(each > LATE_SECONDS for each in late)) if late else None,
        "late_p95": _quantile(late, 0.95),
        "preemptions": Counts.of(legs).count(metrics.PREEMPTIONS),
        "restarts": restarts(legs),
        "memory_peak": float(max(memory)) if memory else None,
        "locust_cpu": max(leg.locust_cpu for leg in legs),
        # The mean: of a leg of seconds, the system's clock ticks tell little.
        "idle_cpu": _over(sum(leg.idle_cpu * leg.seconds for leg in legs), seconds),
    }

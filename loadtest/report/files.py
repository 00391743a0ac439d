"""What a run leaves on the disk."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.records import PHASES, Leg, Record, Run
from loadtest.report.counts import labelled
from loadtest.report.figures import COLUMNS
from loadtest.report.html import report
from loadtest.report.verdict import Check
from loadtest.scrape import Metrics

LATEST = "latest"
RECORD_FIELDS = tuple(field.name for field in fields(Record))


def write(
    run: Run, summary: Mapping[str, Any], checks: Sequence[Check], out: Path, when: datetime
) -> Path:
    """Write all files of a run to a new directory in ``out``, and point ``latest`` at it.

    Args:
        summary: that of ``summarise``.
        when: with its time zone; it gives the directory's name.
    """
    directory = _new_directory(out, when)
    moment = when.astimezone(UTC).isoformat(timespec="seconds")
    whole = {"time": moment, **summary, "checks": [asdict(check) for check in checks]}
    _write_json(directory / "summary.json", whole, indent=2)
    _write_csv(directory / "summary.csv", _summary_rows(summary))
    _write_csv(directory / "requests.csv", _request_rows(run))
    _write_json(directory / "metrics.json", [_metrics_of(leg) for leg in run.legs])
    page = report(run, summary, checks, moment)
    (directory / "report.html").write_text(page, encoding="utf-8")
    _point(out / LATEST, directory)
    return directory


def _new_directory(out: Path, when: datetime) -> Path:
    """Of its own, even if another run ended in the same second."""
    out.mkdir(parents=True, exist_ok=True)
    name = when.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    number = 1
    while True:
        directory = out / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return directory


def _point(link: Path, directory: Path) -> None:
    """Whoever follows the link finds the old directory or the new one."""
    fresh = link.with_name(f".{link.name}-{directory.name}")
    fresh.symlink_to(directory.name)
    os.replace(fresh, link)


# -- tables ----------------------------------------------------------------------------------


def _summary_rows(summary: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    yield "phase", "side", "figure", "value"
    for phase in PHASES:
        for column in COLUMNS:
            for figure, value in summary["phases"][phase][column].items():
                yield phase, column, figure, value  # None: empty


def _request_rows(run: Run) -> Iterator[Sequence[Any]]:
    yield "phase", "loop", "side", "part", *RECORD_FIELDS
    for leg in run.legs:
        for record in leg.records:
            values = {name: getattr(record, name) for name in RECORD_FIELDS}
            values["gaps"] = " ".join(f"{gap:.6g}" for gap in record.gaps)
            yield leg.phase, leg.loop, leg.side, leg.part, *values.values()


def _write_csv(path: Path, rows: Iterator[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


# -- metrics ---------------------------------------------------------------------------------


def _metrics_of(leg: Leg) -> dict[str, Any]:
    """Columns: at full scale there are thousands of moments, and the names would be most of it."""
    moments = [_flat(moment.metrics) for moment in leg.moments]
    names = sorted({name for moment in moments for name in moment if "_bucket{" not in name})
    return {
        "phase": leg.phase, "loop": leg.loop, "side": leg.side, "part": leg.part,
        "users": leg.users, "rate": leg.rate, "digest": leg.digest, "planned": leg.planned,
        "seconds": leg.seconds, "locust_cpu": leg.locust_cpu, "idle_cpu": leg.idle_cpu,
        "before": _flat(leg.before), "after": _flat(leg.after),
        "at": [moment.at for moment in leg.moments],
        "memory": [moment.memory for moment in leg.moments],
        "moments": {name: [moment.get(name) for moment in moments] for name in names},
    }  # fmt: skip


def _flat(metrics: Metrics) -> dict[str, float]:
    return {
        labelled(name, label): value
        for name, series in metrics.items()
        for label, value in series.items()
    }


def _write_json(path: Path, value: Any, indent: int | None = None) -> None:
    text = json.dumps(_strict(value), indent=indent, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _strict(value: Any) -> Any:
    """JSON has no NaN, and a gauge may be one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return value

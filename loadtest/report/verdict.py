"""Whether a run is good: the limits of a file, and what must hold in any case."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.records import OFF, ON, PHASES, Run
from loadtest.report.figures import BY_NAME, COLUMNS, Value

SLO = Path(__file__).resolve().parents[1] / "slo.toml"
ANY = "any"
MIN, MAX, WARN = "min", "max", "warn"
NOT_MEASURED = "not measured"


class SloError(ValueError):
    """The file of limits says what cannot be meant."""


@dataclass(frozen=True, slots=True)
class Limit:
    section: str  # any, or phase.column
    figure: str
    bound: str  # min, max
    value: float
    warn: bool = False  # a miss is shown and does not count

    def check(self, summary: Mapping[str, Any]) -> Check:
        name = f"{self.section}.{self.figure}"
        limit = f"{'≥' if self.bound == MIN else '≤'} {self.value:g}"
        values = self._values(summary["phases"])
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return Check(name, None, limit, False, self.warn, NOT_MEASURED)
        worst = min(known) if self.bound == MIN else max(known)
        good = worst >= self.value if self.bound == MIN else worst <= self.value
        return Check(name, worst, limit, good, self.warn)

    def _values(self, phases: Mapping[str, Any]) -> list[Value]:
        if self.section == ANY:
            return [phases[phase][side][self.figure] for phase in PHASES for side in (OFF, ON)]
        phase, column = self.section.split(".")
        return [phases[phase][column][self.figure]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    name: str
    value: Value
    limit: str
    good: bool
    warn: bool = False  # not good, and yet no failure
    reason: str = ""


def passed(checks: Sequence[Check]) -> bool:
    return all(check.good or check.warn for check in checks)


def check_all(run: Run, summary: Mapping[str, Any], limits: Sequence[Limit]) -> list[Check]:
    """All checks of a run; ``summary`` is that of ``summarise``."""
    return [
        *(limit.check(summary) for limit in limits),
        _all_sent(run), _same_sent(run), *([_bursts(run.bursts)] if run.bursts else []),
    ]  # fmt: skip


# -- what must hold in any case --------------------------------------------------------------


def _all_sent(run: Run) -> Check:
    short = [
        f"{leg.phase}/{leg.loop}/{leg.part} {leg.side}: {len(leg.records)} of {leg.planned}"
        for leg in run.legs
        if len(leg.records) != leg.planned
    ]
    return Check("legs without all their requests", len(short), "0", not short, False,
                 "; ".join(short))  # fmt: skip


def _same_sent(run: Run) -> Check:
    """Or the two servers cannot be compared."""
    digests: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for leg in run.legs:
        digests[f"{leg.phase}/{leg.loop}/{leg.part}"].add((leg.side, leg.digest))
    odd = [
        part
        for part, sent in digests.items()
        if {side for side, _ in sent} != {OFF, ON} or len({digest for _, digest in sent}) != 1
    ]
    return Check("parts without the same trace on both sides", len(odd), "0", not odd, False,
                 "; ".join(odd))  # fmt: skip


def _bursts(bursts: Mapping[str, float]) -> Check:
    """A profile shows as many bursts as the counter counts, and some."""
    ranges, counter = (bursts.get(name) for name in ("ranges", "counter"))
    limit = "the counter's, over 0" if counter is None else f"{counter:g}, over 0"
    good = bool(ranges) and ranges == counter
    return Check("burst ranges in a profile", ranges, limit, good, False,
                 NOT_MEASURED if ranges is None or counter is None else "")  # fmt: skip


# -- the file --------------------------------------------------------------------------------


def read_limits(path: Path = SLO) -> list[Limit]:
    """The limits of a TOML file.

    Raises:
        SloError: it is none, or has a section, key or value that means nothing.
    """
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no TOML, no UTF-8
        raise SloError(f"{path}: {error}") from error
    try:
        return list(_limits(sections))
    except SloError as error:
        raise SloError(f"{path}: {error}") from None


def _limits(sections: Mapping[str, Any]) -> Iterator[Limit]:
    for section, content in sections.items():
        if section == ANY:
            yield from _section(ANY, content)
            continue
        _refuse_unless(section in PHASES, section, f"no section; there are {ANY}, {_list(PHASES)}")
        for column, figures in _table(section, content).items():
            name = f"{section}.{column}"
            _refuse_unless(column in COLUMNS, name, f"no column; there are {_list(COLUMNS)}")
            yield from _section(name, figures)


def _section(section: str, content: Any) -> Iterator[Limit]:
    for figure, bounds in _table(section, content).items():
        name = f"{section}.{figure}"
        _refuse_unless(figure in BY_NAME, name, f"no figure; there are {_list(BY_NAME)}")
        values = dict(_table(name, bounds))
        warn = values.pop(WARN, False)
        _refuse_unless(isinstance(warn, bool), f"{name}.{WARN}", "must be true or false")
        _refuse_unless(bool(values), name, f"needs {MIN} or {MAX}")
        for bound, value in values.items():
            key = f"{name}.{bound}"
            _refuse_unless(bound in (MIN, MAX), key, f"no bound; there are {MIN}, {MAX}, {WARN}")
            _refuse_unless(_is_number(value), key, "must be a number")
            yield Limit(section, figure, bound, float(value), warn)


def _table(name: str, content: Any) -> Mapping[str, Any]:
    _refuse_unless(isinstance(content, dict), name, "must be a table")
    return dict(content)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_unless(good: bool, name: str, why: str) -> None:
    if not good:
        raise SloError(f"{name}: {why}")


def _list(names: Any) -> str:
    return ", ".join(names)

"""Seconds of a model step: measured at start, corrected while it runs.

A step with ``requests`` running requests has one row each and as many more as there are draft
tokens. What a row costs depends on how many there are (memory-bound steps have them almost free),
on the context (MLA on a CPU computes its keys anew for a pass with drafts), and the first one may
cost more than all others (another kernel). No formula holds for all of it, so the measurements
themselves are the model: a grid, interpolated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A step's deviation from the model is a log ratio, cut at OUTLIER: a single step, however slow,
# moves the machine's speed by 1 % and the price of drafts by less than 0.3 %.
OUTLIER = 0.25
SPEED_RATE = 0.05  # the machine's load changes within seconds; it does not change decisions
DRAFT_RATE = 0.01  # what drafts cost against a plain step does
DRAFT_LIMIT = math.log(3.0)  # a price further off than that is a fault of the measurement
ERROR_RATE = 0.02
FAR = 1e6  # draft rows per request
_CONTEXTS = 25  # tokens: contexts that differ by less cost the same
_MOST_CURVES = 1024  # kept


class Sample(NamedTuple):
    """One measured step."""

    requests: int
    rows: int  # in all: requests + draft rows
    context: float  # tokens, mean of the requests
    seconds: float


class Axes(NamedTuple):
    """Where the grid was measured, each ascending."""

    requests: list[int]
    contexts: list[float]
    drafts: list[float]  # draft rows per request, from 0


def measuring_points(
    max_requests: int, contexts: Sequence[int], max_drafts: int
) -> list[tuple[int, int, int]]:
    """The (requests, rows, context) of steps to measure, a full grid."""
    requests = sorted({min(4**power, max_requests) for power in range(8)})
    drafts = sorted({0, *(min(4**power, max_drafts) for power in range(4))})
    return [
        (count, count * (1 + draft), context)
        for count, context, draft in itertools.product(requests, sorted(contexts), drafts)
    ]


class _Curve(NamedTuple):
    """Steps of as many requests in such a context."""

    plain: float  # seconds without drafts
    drafts: list[float]  # rows per request, ascending
    added: list[float]  # seconds that so many add; the first is the limit from above

    @property
    def cheapest(self) -> float:
        """Least share of a plain step that one draft row more for each request adds anywhere."""
        x, y = self.drafts, self.added
        slopes = ((y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1))
        return min(slopes) / self.plain


class StepCost:
    """Predicts the seconds of a step.

    Among the measured points, more rows, more context or more requests with as many drafts each
    never cost less. Before ``fit``, a plain step costs 1 and any draft row is beyond price.
    """

    def __init__(self) -> None:
        self._axes: Axes | None = None
        self._curves: dict[tuple[int, int], _Curve] = {}
        self._table = np.empty(0)  # [requests, contexts, drafts] seconds
        self._speed = 0.0  # log of what a step takes against the table
        self._drafts = 0.0  # log of what draft rows take against the table, beside that
        self._error: float | None = None

    @property
    def measured(self) -> bool:
        return self._axes is not None

    @property
    def relative_error(self) -> float:
        """Mean of |predicted - taken| / taken over the last steps, at most 1 each."""
        return self._error or 0.0

    def fit(self, samples: Iterable[Sample]) -> None:
        """Take over measurements: a full grid, several of each point.

        What disturbs a measurement makes it longer. So the shortest of each point counts, and no
        point may take longer than one with more rows, context or requests.

        Draft rows are the same number for each request. Raises ValueError where a point is missing
        or there is none with or without drafts.
        """
        cells = defaultdict(list)
        for requests, rows, context, seconds in samples:
            cells[requests, context, rows / requests - 1].append(seconds)
        axes = Axes(*(sorted(set(axis)) for axis in zip(*cells))) if cells else Axes([], [], [])
        if len(axes.drafts) < 2 or axes.drafts[0] != 0 or axes.requests[0] < 1:
            raise ValueError("steps with and without drafts must be measured")
        missing = set(itertools.product(*axes)) - set(cells)
        if missing:
            raise ValueError(f"not measured (requests, context, drafts each): {sorted(missing)}")
        shortest = [min(cells[point]) for point in itertools.product(*axes)]
        if min(shortest) <= 0:
            raise ValueError("a step cannot take no time")
        table = np.array(shortest).reshape([len(axis) for axis in axes])
        for axis in range(3):
            table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis=axis), axis)
        self._axes, self._table = axes, table
        self._curves.clear()
        self._speed = self._drafts = 0.0
        self._error = None

    def __str__(self) -> str:
        """What was measured, in milliseconds: requests x rows each, at the shortest context."""
        if self._axes is None:
            return "not measured"
        return ", ".join(
            f"{requests}x{1 + int(drafts)} {self._table[place, 0, column] * 1e3:.1f}"
            for place, requests in enumerate(self._axes.requests)
            for column, drafts in enumerate(self._axes.drafts)
        )

    def seconds(self, requests: int, rows: ArrayLike, context: float) -> NDArray[np.float64]:
        """Predicted seconds of steps with ``rows`` rows in all (any shape, each >= requests)."""
        rows = np.asarray(rows, dtype=np.float64)
        if not self.measured:
            return np.where(rows > requests, np.inf, 1.0)
        curve = self._curve(requests, context)
        added = np.interp(rows / requests - 1, curve.drafts, curve.added)
        extra = math.exp(self._drafts) * np.where(rows > requests, added, 0.0)
        found: NDArray[np.float64] = math.exp(self._speed) * (curve.plain + extra)
        return found

    def step(self, requests: int, rows: int, context: float) -> tuple[float, float]:
        """Predicted seconds of one without drafts, and of one with ``rows`` rows in all.

        Only once it is measured.
        """
        plain, extra = self._parts(requests, rows, context)
        speed = math.exp(self._speed)
        return speed * plain, speed * (plain + extra)

    def cheapest_row(self, requests: int, context: float) -> float:
        """What a draft row adds to a step at least, in plain steps' time for one token."""
        if not self.measured:
            return math.inf
        return math.exp(self._drafts) * self._curve(requests, context).cheapest

    def observe(self, requests: int, rows: int, context: float, seconds: float) -> None:
        """A step took so long. Only steps without prefill: its rows are not counted here."""
        if not self.measured or seconds <= 0:
            return
        plain, extra = self._parts(requests, rows, context)
        predicted = math.exp(self._speed) * (plain + extra)
        error = min(1.0, abs(predicted - seconds) / seconds)
        self._error = error if self._error is None else self._moved(self._error, error)
        # One observation, two unknowns: each moves by its share in the prediction, the speed
        # faster, so that a change of load is not taken for a change of what drafts cost.
        deviation = max(-OUTLIER, min(OUTLIER, math.log(seconds / predicted)))
        self._speed += SPEED_RATE * deviation
        moved = self._drafts + DRAFT_RATE * deviation * extra / (plain + extra)
        self._drafts = max(-DRAFT_LIMIT, min(DRAFT_LIMIT, moved))

    @staticmethod
    def _moved(average: float, value: float) -> float:
        return average + ERROR_RATE * (value - average)

    def _parts(self, requests: int, rows: int, context: float) -> tuple[float, float]:
        """Seconds of a plain step at the table's speed, and what the draft rows add to it."""
        curve = self._curve(requests, context)
        if rows <= requests:
            return curve.plain, 0.0
        x, y, each = curve.drafts, curve.added, rows / requests - 1
        at = min(max(bisect_right(x, each), 1), len(x) - 1)
        slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
        return curve.plain, math.exp(self._drafts) * (y[at - 1] + (each - x[at - 1]) * slope)

    def _curve(self, requests: int, context: float) -> _Curve:
        """By draft rows per request. Of a step's time it takes too much to be made anew in each."""
        key = requests, int(context) // _CONTEXTS
        if key not in self._curves:
            if len(self._curves) == _MOST_CURVES:
                self._curves.clear()
            self._curves[key] = self._made(requests, key[1] * _CONTEXTS)
        return self._curves[key]

    def _made(self, requests: int, context: float) -> _Curve:
        assert self._axes is not None
        line, scale = self._line(self._axes, requests, context)
        # What the first draft row costs by itself shows where the line of the measured ones
        # starts; a request's fraction of a row (few drafts in a large batch) lies on it.
        x, y = [0.0, *self._axes.drafts[1:]], list(line)
        if len(x) > 2:
            y[0] = max(y[0], y[1] - x[1] * (y[2] - y[1]) / (x[2] - x[1]))
        x.append(FAR)
        y.append(y[-1] + (FAR - x[-2]) * (y[-1] - y[-2]) / (x[-2] - x[-3]))
        return _Curve(scale * line[0], x, [scale * (value - line[0]) for value in y])

    def _line(self, axes: Axes, requests: int, context: float) -> tuple[list[float], float]:
        """Seconds by drafts per request, and a factor: more requests than measured cost in
        proportion, more context goes on as it did."""
        most = axes.requests[-1]
        at, weight = _place(axes.requests, min(requests, most))
        low, high = self._table[at], self._table[min(at + 1, len(axes.requests) - 1)]
        by_context = low + weight * (high - low)
        at, weight = _place(axes.contexts, context)
        low, high = by_context[at], by_context[min(at + 1, len(axes.contexts) - 1)]
        line = np.maximum.accumulate(low + max(0.0, weight) * (high - low))
        return line.tolist(), max(1.0, requests / most)


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Where a value lies: the point before it, and how far to the next (above 1 beyond all)."""
    if len(axis) == 1:
        return 0, 0.0
    at = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])

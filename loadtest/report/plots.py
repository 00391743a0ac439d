"""The report's plots as SVG. The only module that needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from deepseek_flash import metrics
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.records import OFF, ON, PHASES, Leg
from loadtest.report.counts import asked, points, rises
from loadtest.report.figures import PATHS, Value
from loadtest.report.summary import answered, legs_with_latencies
from loadtest.scrape import Metrics, hit_rate

# Told apart without colour too: by the line, and by the numbers in the bars.
SIDES: Mapping[str, Mapping[str, Any]] = {
    OFF: {"color": "#767676", "linestyle": "--"},
    ON: {"color": "#0072b2", "linestyle": "-"},
}
PATH_COLOURS = {"fast": "#0072b2", "burst": "#e69f00", "slow": "#bdbdbd"}
TEXT_COLOURS = {"fast": "white", "burst": "black", "slow": "black"}
MOST_POINTS = 500  # of a curve: more are not seen, and make the report large
LEAST_STEP = 5.0  # seconds
styled = rc_context(
    {"svg.fonttype": "none", "svg.hashsalt": "loadtest", "font.size": 9.0, "axes.grid": True,
     "grid.alpha": 0.3}
)  # fmt: skip
Points = tuple[list[float], list[float]]  # x, y
Gains = Mapping[str, Mapping[str, float]]  # name → labels → value
Rate = Callable[[Gains, float], Value]  # of what was counted in so many seconds


@styled
def curve(points: Sequence[tuple[float, Value, Value]]) -> str:
    """On against off by the share of repeats: (share, ratio of tokens/s, ratio of first token)."""
    figure, (axes,) = _figure(1)
    shares = [share for share, _, _ in points]
    for name, ratios, marker, colour in (
        ("tokens/s", [tokens for _, tokens, _ in points], "o", "#0072b2"),
        ("first token p95", [first for _, _, first in points], "s", "#d55e00"),
    ):
        axes.plot(shares, list(map(_drawn, ratios)), marker=marker, color=colour, label=name)
    axes.axhline(1.0, color="#767676", linestyle=":", linewidth=1.0)
    axes.set(title="What repeats are worth", xlabel="share of requests that repeat an earlier one",
             ylabel="on / off", ylim=(0.0, None))  # fmt: skip
    axes.legend()
    return _svg(figure)


@styled
def latencies(phase: str, legs: Sequence[Leg]) -> str:
    """Which share of a phase's requests had their first token, and their last, after how long."""
    figure, both = _figure(2)
    for axes, name in zip(both, ("first token", "end to end"), strict=True):
        for side, style in SIDES.items():
            records = answered(legs_with_latencies(_of_side(legs, side)))
            seconds = [it.first_token if name == "first token" else it.total for it in records]
            axes.plot(*_shares([value for value in seconds if value is not None]), label=side,
                      **style)  # fmt: skip
        axes.set(title=f"{phase}: {name}", xlabel="seconds", ylabel="share of requests",
                 xscale="log", ylim=(0.0, 1.0))  # fmt: skip
        axes.legend(loc="lower right")
    return _svg(figure)


@styled
def over_time(name: str, legs: Sequence[Leg]) -> str:
    """Tokens/s and hit rate over the legs of a loop, one after the other."""
    figure, (speed, hits) = _figure(2)
    for side, style in SIDES.items():
        mine = _of_side(legs, side)
        speed.plot(*_in_a_row(mine, _tokens_per_s), label=side, **style)
        hits.plot(*_in_a_row(mine, _hit_rate), label=side, **style)
    time = "seconds of load on this server"
    speed.set(title=f"{name}: throughput", xlabel=time, ylabel="tokens/s", ylim=(0.0, None))
    hits.set(title=f"{name}: hit rate", xlabel=time, ylabel="share of lookups", ylim=(0.0, 1.05))
    for axes in (speed, hits):
        axes.legend(loc="lower right")
    return _svg(figure)


@styled
def paths(phases: Mapping[str, Any]) -> str:
    """Shares of the paths, by phase and side."""
    figure, (axes,) = _figure(1)
    bars = [(phase, side) for phase in PHASES for side in (OFF, ON)]
    places = range(len(bars))
    ends = [0.0] * len(bars)
    for path in PATHS:
        shares = [phases[phase][side][f"path_{path}"] or 0.0 for phase, side in bars]
        drawn = axes.barh(places, shares, left=ends, label=path, color=PATH_COLOURS[path])
        axes.bar_label(drawn, [f"{it:.0%}" if it >= 0.04 else "" for it in shares],
                       label_type="center", color=TEXT_COLOURS[path])  # fmt: skip
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.set(title="Paths", xlabel="share of tokens", xlim=(0.0, 1.0))
    axes.set_yticks(places, [f"{phase}, {side}" for phase, side in bars])
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _svg(figure)


# -- data ------------------------------------------------------------------------------------


def _of_side(legs: Sequence[Leg], side: str) -> list[Leg]:
    return [leg for leg in legs if leg.side == side]


def _shares(values: Sequence[float]) -> Points:
    """The cumulative distribution."""
    ordered = sorted(values)
    many = len(ordered)
    # From the end: the largest is there in any case.
    chosen = range(many - 1, -1, -max(1, math.ceil(many / MOST_POINTS)))[::-1]
    return [ordered[at] for at in chosen], [(at + 1) / many for at in chosen]


def _in_a_row(legs: Sequence[Leg], rate: Rate) -> Points:
    """A step for each stretch of a leg, and a gap between legs."""
    x, y, begin = [], [], 0.0
    for leg in legs:
        spaced = _spaced(leg)
        for (since, before), (until, after) in pairwise(spaced):
            value = rate(rises(before, after), until - since)
            x += [begin + since, begin + until]
            y += [_drawn(value)] * 2
        begin += spaced[-1][0]
        x.append(begin)
        y.append(math.nan)
    return x, y


def _spaced(leg: Leg) -> list[tuple[float, Metrics]]:
    """Moments far enough apart that it does not matter when in a second a server publishes."""
    first, *between, last = points(leg)
    step = max(LEAST_STEP, leg.seconds / MOST_POINTS)
    kept = [first]
    for point in between:
        if point[0] - kept[-1][0] >= step and last[0] - point[0] >= step:
            kept.append(point)
    return [*kept, last] if last[0] > first[0] else kept


def _tokens_per_s(gains: Gains, seconds: float) -> Value:
    return sum(gains.get(metrics.GENERATION_TOKENS.name, {}).values()) / seconds


def _hit_rate(gains: Gains, seconds: float) -> Value:
    lookups = gains.get(metrics.LOOKUPS.name, {})
    return hit_rate(lookups) if asked(lookups) else None


# -- drawing ---------------------------------------------------------------------------------


def _drawn(value: Value) -> float:
    """A gap in the line, where it is not known."""
    return math.nan if value is None else value


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.2 * columns if columns > 1 else 7.0, 3.2), layout="constrained")
    return figure, [figure.add_subplot(1, columns, 1 + at) for at in range(columns)]


def _svg(figure: Figure) -> str:
    """Without what goes before the element: it stands inside HTML."""
    found = io.StringIO()
    figure.savefig(found, format="svg", metadata={"Date": None})
    text = found.getvalue()
    return text[text.index("<svg") :]

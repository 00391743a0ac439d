"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from loadtest.records import CLOSED, OFF, ON, OPEN, PHASES, Run
from loadtest.report import plots
from loadtest.report.counts import counters, gauges
from loadtest.report.figures import ABSENT, COLUMNS, FIGURES
from loadtest.report.table import cells, shown_value, verdict_of
from loadtest.report.verdict import Check

TEXT = ' class="text"'
MOST_ERRORS = 50  # different messages

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
         overflow-wrap: anywhere; }
th:first-child, td:first-child, td.text { text-align: left; white-space: pre-wrap; }
.good { color: #00632b; } .warning { color: #7a5200; } .MISSED { color: #b00020; font-weight: 700; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.5rem; }
"""

Cells = Sequence[Any]


def report(run: Run, summary: Mapping[str, Any], checks: Sequence[Check], when: str) -> str:
    """The whole document."""
    title = f"Load test {when}"
    parts = [
        f"<h1>{escape(title)}</h1>", *_head(summary), *_verdict(checks), *_figures(summary),
        *_plots(run, summary), *_errors(run), *_legs(run), *_server(run), *_notes(),
    ]  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


# -- parts -----------------------------------------------------------------------------------


def _head(summary: Mapping[str, Any]) -> Iterator[str]:
    made = "made, from the seed"
    rows = [
        ("scale", summary["scale"]),
        ("model", summary["model"]),
        ("seed", summary["seed"]),
        ("repeat share", summary["repeat_share"]),
        ("prompts", summary["prompts"] or made),
        ("doors", ", ".join(summary["doors"])),
        ("capacity with the switches off", f"{summary['capacity']:.3g} requests/s"),
        *((f"trace {name}", digest) for name, digest in summary["traces"].items()),
    ]
    yield _table("The run", ("", ""), rows, text=(1,))


def _verdict(checks: Sequence[Check]) -> Iterator[str]:
    yield "<h2>Verdict</h2>"
    missed = sum(not check.good and not check.warn for check in checks)
    yield (
        f'<p class="MISSED">{missed} missed.</p>' if missed else '<p class="good">None missed.</p>'
    )
    rows = [
        (check.name, shown_value(check), check.limit, verdict_of(check), check.reason)
        for check in checks
    ]
    yield _table("Checks", ("check", "value", "limit", "", "reason"), rows, text=(4,),
                 classes=[row[3] for row in rows])  # fmt: skip


def _figures(summary: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    head = [f"{phase} {column}" for phase in PHASES for column in COLUMNS]
    rows = [cells(summary, figure) for figure in FIGURES]
    yield _table("Off, on, and on / off", ("", *head, "document"), rows)


def _plots(run: Run, summary: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Plots</h2>"
    for phase in PHASES:
        legs = [leg for leg in run.legs if leg.phase == phase]
        if not legs:
            continue
        yield _plot(f"Latencies, {phase}", plots.latencies(phase, legs))
        for loop in (CLOSED, OPEN):
            if stretch := [leg for leg in legs if leg.loop == loop]:
                name = f"{phase}, {loop} loop"
                yield _plot(f"Over time, {name}", plots.over_time(name, stretch))
    yield _plot("Shares of the paths", plots.paths(summary["phases"]))


def _errors(run: Run) -> Iterator[str]:
    yield "<h2>Errors</h2>"
    found = Counter(
        (leg.phase, leg.side, record.error)
        for leg in run.legs
        for record in leg.records
        if record.error
    )
    if not found:
        yield "<p>None.</p>"
        return
    rows = [(error, phase, side, count)
            for (phase, side, error), count in found.most_common(MOST_ERRORS)]  # fmt: skip
    yield _table("What the server said", ("", "phase", "side", "requests"), rows)
    if (more := len(found) - MOST_ERRORS) > 0:
        yield f"<p>And {more} messages more, in requests.csv.</p>"


def _legs(run: Run) -> Iterator[str]:
    head = ("leg", "side", "requests", "of", "at most at a time", "requests/s", "seconds",
            "Locust CPU", "idle server CPU")  # fmt: skip
    rows = [
        (f"{leg.phase}, {leg.loop} loop, {leg.part}", leg.side, len(leg.records), leg.planned,
         leg.users, f"{leg.rate:.3g}" if leg.rate else ABSENT, f"{leg.seconds:.1f}",
         f"{leg.locust_cpu:.1%}", f"{leg.idle_cpu:.1%}")
        for leg in run.legs
    ]  # fmt: skip
    yield "<h2>Legs</h2>"
    yield _table("In the order in which they were played", head, rows)


def _server(run: Run) -> Iterator[str]:
    """What the servers' own metrics say, phase by phase."""
    yield "<h2>Metrics of the servers</h2>"
    for phase in PHASES:
        off, on = ([leg for leg in run.legs if (leg.phase, leg.side) == (phase, side)]
                   for side in (OFF, ON))  # fmt: skip
        if off or on:
            for caption, read in (("what was counted", counters), ("means of gauges", gauges)):
                yield _side_by_side(f"{phase}: {caption}", read(off), read(on))


def _notes() -> Iterator[str]:
    yield "<h2>What the figures mean</h2>"
    yield (
        f"<p>Quantiles are by nearest rank. Ratios are on / off. “{ABSENT}”: not measured, or not"
        " defined. The document's figures are of A100s and another model; it does not say of which"
        " quantile its 37% are, nor of which traffic its shares of the paths.</p>"
    )
    yield "<dl>"
    for figure in FIGURES:
        yield f"<dt>{escape(figure.title.strip())} <code>{figure.name}</code></dt>"
        yield f"<dd>{escape(figure.meaning)}</dd>"
    yield "</dl>"


# -- elements --------------------------------------------------------------------------------


def _side_by_side(caption: str, off: Mapping[str, float], on: Mapping[str, float]) -> str:
    rows = [
        (name, *(f"{side[name]:.6g}" if name in side else ABSENT for side in (off, on)))
        for name in sorted(off.keys() | on.keys())
    ]
    return _table(caption, ("", OFF, ON), rows)


def _table(
    caption: str, head: Cells, rows: Iterable[Cells], text: Sequence[int] = (),
    classes: Sequence[str] = (),
) -> str:  # fmt: skip
    """All cells are escaped: errors, paths and labels come from outside.

    Args:
        text: columns of text, at the left as the first one.
        classes: of the rows, or none.
    """
    lines = [_line("th", head), *(
        _line("td", row, text, name) for row, name in zip_longest(rows, classes, fillvalue="")
    )]  # fmt: skip
    body = "\n".join(lines)
    return f"<table>\n<caption>{escape(caption)}</caption>\n{body}\n</table>"


def _line(element: str, row: Cells, text: Sequence[int] = (), name: str = "") -> str:
    cells = (
        f"<{element}{TEXT if column in text else ''}>{escape(str(cell))}</{element}>"
        for column, cell in enumerate(row)
    )
    return f'<tr class="{name}">{"".join(cells)}</tr>'


def _plot(caption: str, svg: str) -> str:
    name = escape(caption)
    return f'<figure role="img" aria-label="{name}">\n{svg}</figure>'

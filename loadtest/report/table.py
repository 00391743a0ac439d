"""The figures and the verdict for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.records import PHASES
from loadtest.report.figures import ABSENT, COLUMNS, FIGURES, Figure
from loadtest.report.verdict import Check

WIDTH = 132  # of what the figures need; a line that is cut tells nothing


def cells(summary: Mapping[str, Any], figure: Figure) -> list[str]:
    """A row of the table: the figure's title, three columns a phase, the document's figure."""
    phases = summary["phases"]
    shown = (
        figure.show(column, phases[phase][column][figure.name])
        for phase in PHASES
        for column in COLUMNS
    )
    return [figure.title, *shown, figure.document]


def figures_table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for phase in PHASES:
        for number, column in enumerate(COLUMNS):
            head = Text(f"{'' if number else phase}\n{column}")
            table.add_column(head, justify="right", no_wrap=True)
    table.add_column("\ndocument", no_wrap=True)
    for figure in FIGURES:
        table.add_row(*map(Text, cells(summary, figure)))
    return table


def verdict_of(check: Check) -> str:
    if check.good:
        return "good"
    return "warning" if check.warn else "MISSED"


def shown_value(check: Check) -> str:
    return ABSENT if check.value is None else f"{check.value:.4g}"


def checks_table(checks: Sequence[Check]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("check", "value", "limit", "", "reason"):
        table.add_column(head, justify="right" if head in ("value", "limit") else "left")
    styles = {"good": "green", "warning": "yellow", "MISSED": "bold red"}
    for check in checks:
        verdict = verdict_of(check)
        # Texts: brackets in a reason are no markup.
        cells = (check.name, shown_value(check), check.limit, check.reason)
        name, value, limit, reason = map(Text, cells)
        table.add_row(name, value, limit, Text(verdict, styles[verdict]), reason)
    return table


def show(summary: Mapping[str, Any], checks: Sequence[Check], file: IO[str] | None = None) -> None:
    """Print both tables, on a narrow terminal with broken lines."""
    console = Console(file=file)
    console.width = max(console.width, WIDTH)
    console.print(figures_table(summary), checks_table(checks))

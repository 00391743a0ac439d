"""A live view of a running server, from its metrics: ``python -m clients.watch``.

Counters become rates between two readings; Ctrl-C ends it. Where the output is no terminal, one
reading is printed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

PATHS = ("fast", "burst", "slow")
SOURCES = ("history", "reference", "chain")
LOOKUP_RESULTS = ("exact", "window", "miss", "semantic")

TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 5.0  # for a model that publishes nothing new: its process may be dead
ABSENT = "–"

Figure = float | None  # None: the server does not tell, or nothing can be concluded

# -- what the server says ----------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The metrics at one moment: name → (labels, value) of each series."""

    at: float  # seconds, monotonic
    series: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    @classmethod
    def parse(cls, text: str, at: float) -> Reading:
        """Read Prometheus' text format.

        Raises:
            ValueError: it is none.
        """
        series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    # By the sample's name: a counter's family has lost its "_total".
                    series.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at, series)

    def value(self, name: str, **labels: str) -> Figure:
        """The sum over all series that carry these labels, whatever else they carry."""
        values = [
            value for found, value in self.series.get(name, ()) if labels.items() <= found.items()
        ]
        return sum(values) if values else None

    def renews(self, before: Reading) -> bool:
        """Say whether every model has published since ``before``.

        They do it about once a second, each in its own time: a rate between two readings that saw
        the same publication would be 0 on a busy server.
        """
        if self.at - before.at >= PATIENCE_SECONDS:
            return True
        name = "deepseek_flash_heartbeat_total"
        models = [labels.get("model", "") for labels, _ in self.series.get(name, ())]
        return all(self.value(name, model=m) != before.value(name, model=m) for m in models)


@dataclass(frozen=True)
class Unreachable:
    """There is no reading."""

    url: str
    reason: str

    def __str__(self) -> str:
        return f"{self.url} gives no metrics ({self.reason}); trying again"


# -- what follows from two readings ------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """From one reading to the next. Without a first one there are no rates."""

    before: Reading | None
    after: Reading

    @property
    def seconds(self) -> Figure:
        return None if self.before is None else self.after.at - self.before.at

    def rate(self, name: str, **labels: str) -> Figure:
        """A counter's increase per second. None where it fell: the server was restarted."""
        now = self.after.value(name, **labels)
        if self.before is None or now is None:
            return None
        # A series that was not there yet was 0: a server's come one by one in its first seconds.
        increase = now - (self.before.value(name, **labels) or 0.0)
        return None if increase < 0 else ratio(increase, self.seconds)


def ratio(part: Figure, whole: Figure) -> Figure:
    """None where either is unknown, and of nothing."""
    return part / whole if part is not None and whole else None


@dataclass(frozen=True)
class Drafts:
    """Of one source, in tokens per second."""

    proposed: Figure
    accepted: Figure

    @property
    def acceptance(self) -> Figure:
        return ratio(self.accepted, self.proposed)


@dataclass(frozen=True)
class Steps:
    """The model's passes; ``seconds`` and ``decision_seconds`` are of one."""

    rate: Figure
    seconds: Figure
    decision_seconds: Figure
    cost_error: Figure

    @property
    def decision_share(self) -> Figure:
        return ratio(self.decision_seconds, self.seconds)


@dataclass(frozen=True)
class View:
    """What is shown. Rates are per second, shares of 1, times in seconds."""

    seconds: Figure  # between the two readings; None: there is one only
    tokens: Figure
    tokens_last_minute: Figure
    running: Figure
    waiting: Figure
    first_token_p95: Figure
    path_shares: Mapping[str, Figure]
    bursts: Figure
    drafts: Mapping[str, Drafts]
    signals: Mapping[str, Figure]
    steps: Steps
    hit_rate: Figure
    entries: Figure
    lookups: Mapping[str, Figure]


def compare(before: Reading | None, after: Reading) -> View:
    """Conclude what is shown from two readings, or from the first alone."""
    interval = Interval(before, after)
    rate, gauge = interval.rate, after.value
    paths = {path: rate("dspark_tokens_total", path=path) for path in PATHS}
    all_paths = sum(tokens for tokens in paths.values() if tokens is not None)
    steps = rate("dspark_steps_total")
    return View(
        seconds=interval.seconds,
        tokens=rate("vllm:generation_tokens_total"),
        tokens_last_minute=gauge("avg_tokens_per_second"),
        running=gauge("vllm:num_requests_running"),
        waiting=gauge("vllm:num_requests_waiting"),
        first_token_p95=gauge("p95_first_token_latency"),
        path_shares={path: ratio(tokens, all_paths) for path, tokens in paths.items()},
        bursts=gauge("burst_count_per_second"),
        drafts={
            source: Drafts(
                proposed=rate("dspark_drafts_proposed_total", source=source),
                accepted=rate("dspark_drafts_accepted_total", source=source),
            )
            for source in SOURCES
        },
        signals={
            "entropy ratio": gauge("dspark_entropy_ratio"),
            "gap": gauge("dspark_gap"),
            "attention variance": gauge("dspark_attention_variance"),
        },
        steps=Steps(
            rate=steps,
            seconds=ratio(rate("dspark_step_seconds_total"), steps),
            decision_seconds=ratio(rate("dspark_decision_seconds_total"), steps),
            cost_error=gauge("dspark_cost_error"),
        ),
        hit_rate=gauge("dflash_hit_rate"),
        entries=gauge("dflash_entries"),
        lookups={result: rate("dflash_lookups_total", result=result) for result in LOOKUP_RESULTS},
    )


# -- how it looks: 18 lines of 80 columns ------------------------------------------------------


GAP = (0, 1, 0, 0)  # between columns


def show(figure: Figure, form: str = ".1f", unit: str = "", scale: float = 1.0) -> str:
    return ABSENT if figure is None else f"{figure * scale:{form}}{unit}"


def milliseconds(figure: Figure) -> str:
    return show(figure, ".2f", " ms", 1e3)


def share(figure: Figure) -> str:
    return show(figure, ".1%")


def draw(frame: View | Unreachable, url: str) -> Group:
    if isinstance(frame, Unreachable):
        return Group(Text(str(frame), style="red", no_wrap=True, overflow="ellipsis"))
    middle = _side_by_side(
        (33, Panel(_paths(frame), title="tokens by path", height=6)),
        (47, Panel(_drafts(frame), title="drafts by source", height=6)),
    )
    bottom = _side_by_side(
        (32, Panel(_signals(frame), title="signals", height=8)),
        (24, Panel(_steps(frame.steps), title="steps", height=8)),
        (24, Panel(_cache(frame), title="cache", height=8)),
    )
    # The address is text: in a title's markup, brackets (of IPv6) would be styles.
    title = Text(f"{url}, last {show(frame.seconds, unit=' s')}")
    return Group(Panel(_requests(frame), title=title), middle, bottom)


def _side_by_side(*panels: tuple[int, Panel]) -> Table:
    grid = Table.grid(expand=True)
    for width, _ in panels:
        grid.add_column(ratio=width)
    grid.add_row(*(panel for _, panel in panels))
    return grid


def _requests(view: View) -> Table:
    table = Table(box=None, expand=True, padding=0, header_style="dim")
    for name in ("tokens/s", "over a minute", "running", "waiting", "first token p95"):
        table.add_column(name, justify="center", style="bold", ratio=1)
    table.add_row(
        show(view.tokens), show(view.tokens_last_minute), show(view.running, ".0f"),
        show(view.waiting, ".0f"), milliseconds(view.first_token_p95),
    )  # fmt: skip
    return table


def _paths(view: View) -> Table:
    grid = Table.grid(expand=True, padding=GAP)
    grid.add_column()
    grid.add_column(ratio=1)
    grid.add_column(justify="right", style="bold")
    for path, part in view.path_shares.items():
        grid.add_row(path, Bar(1.0, 0.0, part or 0.0, color="cyan"), share(part))
    grid.add_row("bursts/s", "", show(view.bursts))
    return grid


def _drafts(view: View) -> Table:
    table = Table(box=None, expand=True, padding=GAP, pad_edge=False, header_style="dim")
    table.add_column("source")
    for name in ("proposed/s", "accepted/s", "acceptance"):
        table.add_column(name, justify="right", style="bold")
    for source, drafts in view.drafts.items():
        rates = show(drafts.proposed), show(drafts.accepted)
        table.add_row(source, *rates, share(drafts.acceptance))
    return table


def _signals(view: View) -> Table:
    return _pairs((name, show(value, ".3g")) for name, value in view.signals.items())


def _steps(steps: Steps) -> Table:
    rows = [
        ("steps/s", show(steps.rate)),
        ("a step", milliseconds(steps.seconds)),
        ("decision", milliseconds(steps.decision_seconds)),
        ("of the step", share(steps.decision_share)),
        ("cost error", share(steps.cost_error)),
    ]
    return _pairs(rows)


def _cache(view: View) -> Table:
    rows = [("hit rate", share(view.hit_rate)), ("entries", show(view.entries, ".0f"))]
    rows += [(f"{result}/s", show(rate)) for result, rate in view.lookups.items()]
    return _pairs(rows)


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(expand=True, padding=GAP)
    grid.add_column()
    grid.add_column(justify="right", style="bold")
    for row in rows:
        grid.add_row(*row)
    return grid


# -- the loop ----------------------------------------------------------------------------------


def fetch(client: httpx.Client, url: str) -> Reading:
    """Read the server's metrics now.

    Raises:
        httpx.HTTPError, httpx.InvalidURL, ValueError: it has none to give.
    """
    response = client.get(url)
    response.raise_for_status()
    return Reading.parse(response.text, time.monotonic())


def frames(
    url: str, interval: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[View | Unreachable]:
    """What to show, one a reading, for ever."""
    before: Reading | None = None
    view: View | None = None
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        while True:
            try:
                after = fetch(client, url)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                before = view = None  # whoever answers next may be another server
                reason = str(error).partition("\n")[0] or type(error).__name__
                yield Unreachable(url, reason)
            else:
                if view is None or before is None or after.renews(before):
                    view, before = compare(before, after), after
                yield view
            wait(interval)


def watch(found: Iterator[View | Unreachable], url: str, console: Console) -> None:
    """Draw each frame over the one before."""
    # Redrawn by us alone: a thread that does it too would take time from the server.
    with Live(console=console, auto_refresh=False) as live:
        for frame in found:
            live.update(draw(frame, url), refresh=True)


def print_once(found: Iterator[View | Unreachable], url: str, console: Console) -> int:
    """Print the first frame that has rates; an exit status."""
    for frame in found:
        if isinstance(frame, Unreachable):
            print(f"error: {frame.url}: {frame.reason}", file=sys.stderr)
            return 1
        if frame.seconds is not None:
            console.print(draw(frame, url))
            break
    return 0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="clients.watch", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8002", help="of the metrics port")
    parser.add_argument("--interval", type=_positive, default=1.0, help="seconds")
    arguments = parser.parse_args(argv)
    url = f"{arguments.url.rstrip('/')}/metrics"
    console = Console()
    found = frames(url, arguments.interval)
    try:
        # Not the console's own word alone: FORCE_COLOR makes a terminal of any pipe.
        if not (console.is_interactive and sys.stdout.isatty()):
            return print_once(found, url, console)
        watch(found, url, console)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())

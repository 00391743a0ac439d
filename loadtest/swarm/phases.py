"""The load's shape over time: the legs of a plan, each until its last answer.

Locally or over many processes: whoever runs the shape tells the others which leg is on, and they
report their records to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from locust import LoadTestShape

from loadtest.records import Record
from loadtest.swarm.doors import FEED, LISTENERS
from loadtest.swarm.plan import PlannedLeg, read_plan
from loadtest.traffic.log import read_log
from loadtest.traffic.trace import Entry

PLAY = "play-leg"  # the message
MOST_SPAWNED = 100  # users a second: Locust warns above


class Stage:
    """The leg that is on, and how much of it is done."""

    def __init__(self, legs: Sequence[PlannedLeg], traces: Sequence[Sequence[Entry]]) -> None:
        self.legs, self.traces = legs, traces
        self._number = 0
        self._began: float | None = None
        self._done = 0

    @property
    def leg(self) -> PlannedLeg | None:
        """None: all are over."""
        return self.legs[self._number] if self._number < len(self.legs) else None

    def tick(self, users: int, play: Callable[[int], None], now: float) -> PlannedLeg | None:
        """Once a second: begin the leg as soon as its users are there, go on when it is over."""
        leg = self.leg
        if leg is None:
            return None
        if self._began is None:
            if users == leg.users:
                self._began = now
                play(self._number)
        elif self._done >= len(self.traces[self._number]) or now > self._began + leg.seconds:
            self._number, self._done, self._began = self._number + 1, 0, None
        return self.leg

    def add(self, leg: int, records: int) -> None:
        if leg == self._number:
            self._done += records


class Reporter:
    """Keeps records until they are reported, and writes those that arrive: a line each."""

    def __init__(self, out: Path | None) -> None:
        self._out = None if out is None else out.open("ab")
        self._waiting: list[dict[str, Any]] = []

    def keep(self, leg: int, record: Record, worker: int, cpu: float) -> None:
        line = {"leg": leg, "worker": worker, "cpu": cpu, "record": dataclasses.asdict(record)}
        self._waiting.append(line)

    def take(self) -> list[dict[str, Any]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        if self._out is not None:
            self._out.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
            self._out.flush()


def install(environment: Any, plan: Path, out: Path | None) -> None:
    """Make a Locust environment play the plan.

    Raises:
        ValueError, OSError: the plan or one of its traces cannot be read.
    """
    legs = read_plan(plan)
    stage = Stage(legs, [read_log(Path(leg.trace)) for leg in legs])
    runner, reporter = environment.runner, Reporter(out)
    playing = 0

    def play(environment: Any, msg: Any) -> None:
        nonlocal playing
        playing = msg.data["leg"]
        FEED.begin(stage.traces[playing], max(0, runner.worker_index), msg.data["workers"])

    def arrived(lines: Sequence[dict[str, Any]]) -> None:
        reporter.write(lines)
        for line in lines:
            stage.add(line["leg"], 1)

    def made(record: Record) -> None:
        reporter.keep(playing, record, runner.worker_index, FEED.cpu())
        if not distributed:
            arrived(reporter.take())

    distributed = type(runner).__name__ != "LocalRunner"
    LISTENERS.append(made)
    if type(runner).__name__ != "MasterRunner":
        runner.register_message(PLAY, play)
    environment.events.report_to_master.add_listener(
        lambda client_id, data: data.update(records=reporter.take())
    )
    environment.events.worker_report.add_listener(
        lambda client_id, data: arrived(data.get("records", ()))
    )
    if environment.shape_class is not None:
        environment.shape_class.stage = stage


class Phases(LoadTestShape):  # type: ignore[misc]
    """Users over time: those of the leg that is on."""

    stage: Stage

    def tick(self) -> tuple[int, float] | None:
        runner = self.runner
        workers = max(1, getattr(runner, "worker_count", 1))
        leg = self.stage.tick(
            self.get_current_user_count(),
            lambda number: runner.send_message(PLAY, {"leg": number, "workers": workers}),
            time.monotonic(),
        )
        return None if leg is None else (leg.users, min(leg.users, MOST_SPAWNED))

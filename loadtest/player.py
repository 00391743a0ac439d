"""Plays one leg on one server: Locust beside it, and what the server publishes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec

from loadtest.processes import CpuMeter, memory
from loadtest.records import Leg, Moment, Record
from loadtest.scrape import drained, read_metrics
from loadtest.served import ROOT, Served, free_ports
from loadtest.swarm.plan import PlannedLeg, write_plan
from loadtest.traffic.trace import Entry, digest, lines

OPENAI = "openai"  # the only one that needs a gateway
DOORS = {"grpc": "GrpcUser", "generate_stream": "GenerateStreamUser", OPENAI: "OpenAIUser"}
SAMPLE_SECONDS = 2.0
PROGRESS_SECONDS = 10.0
END_SECONDS = 60.0  # for Locust itself, beyond the leg's own limit


@dataclass(frozen=True)
class Order:
    """A leg that is to be played."""

    phase: str
    loop: str
    part: int
    trace: Sequence[Entry]
    users: int
    rate: float  # requests/s, 0 in a closed loop
    seconds: float  # at most

    @property
    def name(self) -> str:
        return f"{self.phase}, {self.loop} loop, part {self.part + 1}"


class LocustError(RuntimeError):
    """Locust itself failed; the message says where its output is."""


@dataclass
class Player:
    """Gives load to one server at a time. ``folder``: for plans, traces and Locust's output."""

    folder: Path
    doors: Sequence[str]
    workers: int = 0  # Locust processes beside a master; 0: one process does all
    say: Callable[[str], None] = field(default=lambda text: print(text, flush=True))
    _played: int = 0

    def play(self, order: Order, side: str, active: Served, idle: Sequence[Served]) -> Leg:
        """Raises:
        LocustError: Locust ended before the leg did.
        TimeoutError: a model of the server does not publish any more.
        """
        self._played += 1
        stem = (
            self.folder / f"{self._played:02d}-{order.phase}-{order.loop}-{order.part + 1}-{side}"
        )
        before = drained(active)
        meters = [CpuMeter(it.process.pid) for it in idle]
        locust = _Locust(stem, order, self.doors, active, self.workers)
        try:
            with _Watch(active) as watch:
                locust.wait(lambda done: self._progress(order, side, done))
            idle_cpu = max((meter.share() for meter in meters), default=0.0)
        finally:
            locust.stop()
        records, cpu = locust.records()
        return Leg(
            phase=order.phase,
            loop=order.loop,
            side=side,
            part=order.part,
            users=order.users,
            rate=order.rate,
            digest=digest(order.trace),
            planned=len(order.trace),
            seconds=_seconds(records),
            records=records,
            before=before,
            after=drained(active),
            moments=watch.moments,
            locust_cpu=cpu,
            idle_cpu=idle_cpu,
        )

    def _progress(self, order: Order, side: str, done: int) -> None:
        self.say(f"    {order.name}, {side}: {done} of {len(order.trace)} requests")


def _seconds(records: Sequence[Record]) -> float:
    """From the first request to the end of the last answer."""
    if not records:
        return 0.0
    return max(it.ended for it in records) - min(it.due for it in records)


class _Watch:
    """Reads a server's metrics and memory while it works; a server that is gone gives none."""

    def __init__(self, served: Served) -> None:
        self.moments: list[Moment] = []
        self._served = served
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            try:
                found = read_metrics(self._served.metrics)
            except httpx.HTTPError:
                continue
            at = time.perf_counter() - self._began
            self.moments.append(Moment(at, found, memory(self._served.process.pid)))


class _Locust:
    """Locust with a plan of one leg. Its output and its records are files beside the plan."""

    def __init__(
        self, stem: Path, order: Order, doors: Sequence[str], served: Served, workers: int
    ) -> None:
        self._trace, self._limit = order.trace, order.seconds
        self._records, self._log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        self._records.touch()
        trace, plan = stem.with_suffix(".trace.jsonl"), stem.with_suffix(".plan.json")
        trace.write_bytes(b"".join(lines(order.trace)))
        write_plan(plan, [PlannedLeg(order.name, str(trace), order.users, order.seconds)])
        command = [
            sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"),
            "--host", served.http, "--grpc", served.grpc, "--plan", str(plan),
            *(["--openai", served.gateway] if served.gateway else []),
        ]  # fmt: skip
        roles: list[list[str]] = [["--headless", "--only-summary", "--exit-code-on-error", "0"]]
        if workers:
            port = str(free_ports(1)[0])
            roles[0] += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port,
                         "--expect-workers", str(workers)]  # fmt: skip
            roles += [["--worker", "--master-host", "127.0.0.1", "--master-port", port]] * workers
        roles[0] += ["--records", str(self._records)]
        classes = [DOORS[door] for door in doors]
        with self._log.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    [*command, *role, *classes], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
                )
                for role in roles
            ]

    def wait(self, progress: Callable[[int], None]) -> None:
        """Until all is sent and answered, or the leg's time is over."""
        master = self._processes[0]
        deadline = time.monotonic() + self._limit + END_SECONDS
        while True:
            try:
                master.wait(PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                progress(self._records.read_bytes().count(b"\n"))
            if time.monotonic() > deadline:
                raise LocustError(f"Locust does not end; see {self._log}")
        if master.returncode != 0:
            raise LocustError(f"Locust ended with status {master.returncode}; see {self._log}")

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def records(self) -> tuple[list[Record], float]:
        """In the trace's order, with what the trace knows; and the use of a core, of that Locust
        process which used most.
        """
        found = [msgspec.json.decode(line, type=_Line) for line in self._records.open("rb")]
        records = []
        for it in sorted((line.record for line in found), key=lambda record: record.number):
            entry = self._trace[it.number]
            known = replace(it, kind=entry.kind, length=entry.length, repeat=entry.repeat)
            records.append(known)
        # So far, with every record: the last of each process is of the whole leg.
        whole = {line.worker: line.cpu for line in found}
        return records, max(whole.values(), default=0.0)


class _Line(msgspec.Struct):
    """A line of the records' file, as the swarm writes it."""

    leg: int
    worker: int
    cpu: float
    record: Record

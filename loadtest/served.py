"""A real server for the length of a benchmark or test, on free ports."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 300.0
PORTS = (10_000, 32_000)


@dataclass(frozen=True)
class Served:
    """A running server."""

    http: str  # URLs: http://host:port, host:port, http://host:port
    grpc: str
    metrics: str
    process: subprocess.Popen[bytes]  # the launcher
    output: Path  # what the launcher printed
    gateway: str = ""  # its URL; "": there is none

    @property
    def port(self) -> int:
        """Of HTTP: it names the server's directory."""
        return int(self.http.rsplit(":", 1)[1])

    @property
    def log(self) -> Path:
        """Triton's log."""
        return ROOT / "build" / "run" / str(self.port) / "triton.log"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different.

    Below those that the system gives to outgoing connections: a client's would take one in between.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*PORTS)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def start(
    model: str, flags: Sequence[str] = (), ready: bool = True, gateway: bool = False
) -> Served:
    """Start the launcher; with ``ready``, wait until it says that the server is.

    Raises:
        RuntimeError: it ended or was too slow; the message has what it printed.
    """
    http, grpc, metrics, front = free_ports(4)
    descriptor, name = tempfile.mkstemp(prefix="deepseek-flash-serve-", suffix=".log")
    command = [
        sys.executable, "-m", "deepseek_flash.serve", "--model", model, "--http-port", str(http),
        "--grpc-port", str(grpc), "--metrics-port", str(metrics), *flags,
        *(["--gateway-port", str(front)] if gateway else []),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "backend_src"), "PYTHONUNBUFFERED": "1"}
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT
        )
    served = Served(
        f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"http://127.0.0.1:{metrics}", process,
        Path(name), f"http://127.0.0.1:{front}" if gateway else "",
    )  # fmt: skip
    if ready:
        wait_ready(served)
    return served


def wait_ready(served: Served, times: int = 1) -> None:
    """Wait until the launcher has said ``times`` times that the server is ready."""
    deadline = time.monotonic() + START_SECONDS
    while served.output.read_text().count("ready after") < times:
        ended = served.process.poll() is not None
        if ended or time.monotonic() > deadline:
            served.process.kill()
            raise RuntimeError(f"the server did not start:\n{served.output.read_text()}")
        time.sleep(0.2)


def stop(served: Served, number: int = signal.SIGTERM, timeout: float = 40.0) -> float:
    """Stop the server; how many seconds it took."""
    begin = time.monotonic()
    served.process.send_signal(number)
    try:
        served.process.wait(timeout)
    finally:
        served.process.kill()
    served.output.unlink(missing_ok=True)
    return time.monotonic() - begin


def exit_status(measure: Callable[[], bool]) -> int:
    """Of a benchmark: 0 if all is as it should be, 1 if not, 130 if it was interrupted."""
    try:
        return 0 if measure() else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


@contextmanager
def serving(model: str, flags: Sequence[str] = (), gateway: bool = False) -> Iterator[Served]:
    """A server that is stopped at the end, be that in the middle of its start."""
    served = start(model, flags, ready=False, gateway=gateway)
    try:
        wait_ready(served)
        yield served
    finally:
        stop(served)

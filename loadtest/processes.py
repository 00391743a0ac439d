"""What the processes of a server use of the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil


def _tree(pid: int) -> Iterator[psutil.Process]:
    """A launcher and all that it started."""
    try:
        launcher = psutil.Process(pid)
        yield launcher
        yield from launcher.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def memory(pid: int) -> int:
    """Bytes that are a server's own: what its processes share is left out."""
    total = 0
    for process in _tree(pid):
        try:
            it = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += it.rss - it.shared
    return total


class CpuMeter:
    """A server's processor time between two moments."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._before = time.perf_counter(), self._seconds()

    def share(self) -> float:
        """Of one core, since the meter was made."""
        seconds = time.perf_counter() - self._began
        return max(0.0, self._seconds() - self._before) / max(seconds, 1e-9)

    def _seconds(self) -> float:
        total = 0.0
        for process in _tree(self._pid):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            # Those of its dead children count: what a short process used is not forgotten.
            total += times.user + times.system + times.children_user + times.children_system
        return total

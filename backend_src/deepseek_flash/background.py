"""Work that nobody waits for: a thread with a bounded queue."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]

TIDY_SECONDS = 1.0

log = logging.getLogger("deepseek_flash")


class BackgroundWorker:
    """Runs jobs one after another, at most ``most`` of them waiting. A job's error is logged.

    Args:
        tidy: called between jobs, about once a second.
    """

    def __init__(self, name: str, most: int, tidy: Job = lambda: None) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(most)
        self._stopping = False
        self._tidy = tidy
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._jobs.full()

    def put(self, job: Job) -> bool:
        """Queue a job. False where there is no place, or no more work: it is never run."""
        if self._stopping:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Stop after the running job. What is still queued is never run."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # full: it looks at the flag after its job
            self._jobs.put_nowait(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        tidied = time.monotonic()
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                self._do(self._jobs.get(timeout=TIDY_SECONDS))
            if time.monotonic() - tidied >= TIDY_SECONDS:
                tidied = time.monotonic()
                self._do(self._tidy)

    def _do(self, job: Job | None) -> None:
        try:
            if job is not None:
                job()
        except Exception:
            log.exception("%s: a job failed", self._thread.name)

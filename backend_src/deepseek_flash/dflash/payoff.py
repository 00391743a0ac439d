"""Whether looking for similar prompts pays for its time."""

from __future__ import annotations

from collections import deque

TRIAL = 64  # answers that a judgement is made from
TRY_AGAIN_AFTER = 2048  # misses without it; a trial then costs a thirtieth of what was saved


class Payoff:
    """Weighs the seconds that references saved against the encoder's. For one thread's writes.

    ``mode``: on and off decide; auto is active during a trial, and afterwards while it pays.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._spent: deque[float] = deque(maxlen=TRIAL)
        self._saved: deque[float] = deque(maxlen=TRIAL)
        self._idle_misses = 0

    @property
    def active(self) -> bool:
        if self.mode != "auto":
            return self.mode == "on"
        return len(self._saved) < TRIAL or sum(self._saved) > sum(self._spent)

    def spent(self, seconds: float) -> None:
        """The encoder ran."""
        self._spent.append(seconds)

    def saved(self, seconds: float) -> None:
        """An answer with references ended."""
        self._saved.append(seconds)

    def missed(self) -> None:
        """A lookup found nothing. After many of them, traffic may have changed: a new trial."""
        self._idle_misses = 0 if self.active else self._idle_misses + 1
        if self._idle_misses >= TRY_AGAIN_AFTER:
            self._spent.clear()
            self._saved.clear()

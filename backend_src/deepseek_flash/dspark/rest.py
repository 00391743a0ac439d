"""Whether it pays to look for drafts at all: at high load, or on new text, it may not."""

from __future__ import annotations

# Of the running means, in a step in which drafts were looked for. What a step saves is mostly
# noise: to rest by chance where drafts pay loses more than to look on where they do not.
PACE, RESTING_PACE = 0.01, 0.03
EVERY = 4  # steps: how often they are still looked for while it does not pay


class Rest:
    """Compares what drafts have saved with the time it took to find them, as running means."""

    def __init__(self) -> None:
        self.resting = False
        self._steps = 0
        self._saved: float | None = None  # seconds a step, None: nothing known, so worth a try
        self._took = 0.0

    def looks(self) -> bool:
        """Whether drafts are to be looked for in this step. Called once a step."""
        self._steps += 1
        return not self.resting or self._steps % EVERY == 0

    def looked(self, took: float) -> None:
        """It took so many seconds to look."""
        self._took += self._pace * (took - self._took) if self._took else took

    def saved(self, seconds: float) -> None:
        """What became of it: seconds of the engine that were saved, less than nothing where the
        drafts were wrong."""
        if self._saved is None:
            self._saved = 2.0 * self._took  # time to prove itself
        self._saved += self._pace * (seconds - self._saved)
        self.resting = self._saved < self._took

    @property
    def _pace(self) -> float:
        return RESTING_PACE if self.resting else PACE

    def wake(self) -> None:
        """Something new is known that may be worth much."""
        self.resting, self._saved = False, None

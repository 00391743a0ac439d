"""How far the probabilities of each source can be believed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepseek_flash.dspark.decision_kernels import judge
from deepseek_flash.dspark.drafts import Source

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Trust:
    """What the probabilities of a source are worth: accepted over expected of its last tokens.

    Two tests (CUSUM) notice when that has changed: whether the tokens speak for HOSTILE times what
    was believed, or for the full claim, rather than for what was believed. An alarm forgets what
    was before: a source that turned bad starts with DISTRUST, one that turned good as new.

    What is not trusted gets no rows, and what gets no rows could never regain trust. So it is
    probed with single rows, each for at most PROBE_SHARE of the time since the last one, and half
    of that for every failure that no success made good. Some successes in a row bring it back.
    """

    WINDOW = 512  # tokens
    PRIOR = 2.0  # tokens taken as right: a new source is believed, but not for long
    DISTRUST = 18.0  # tokens taken as wrong after an alarm
    HOSTILE = 0.25
    ALARM = 7.0  # log likelihood ratio: 4 tokens of 0.9 wrong, by chance 2 times in 64,000 tokens
    # Below it a source that gets no rows is probed. Where rows are dear, a factor of 0.6 already
    # leaves it none: with 0.5 here, a source that had been overconfident never came back.
    UNTRUSTED = 0.8
    PROBE_SHARE = 0.04
    MAX_FAILURES = 3
    _OPTIONS = (HOSTILE, float(WINDOW), PRIOR, DISTRUST, ALARM)

    def __init__(self) -> None:
        kinds = len(Source)
        self.factor: Floats = np.ones(kinds)  # by which probabilities are multiplied
        self.alarms: Ints = np.zeros(kinds, dtype=np.int64)  # that a source turned bad
        # Accepted and expected tokens, log likelihood ratios of worse and of better.
        self._state: Floats = np.zeros((4, kinds))
        self._probed: set[int] = set()  # sources of which a probe is out
        self._failures = [0] * kinds
        self._last_probe = [0] * kinds  # number of the step

    def probe_due(self, source: Source, price: float, step: int) -> bool:
        """Whether a source that got no rows may have one in this step, for ``price`` plain steps.

        ``step`` counts up, with every step.
        """
        wait = price / self.PROBE_SHARE * 2.0 ** self._failures[source]
        if step - self._last_probe[source] < wait:
            return False
        self._last_probe[source] = step
        self._probed.add(source)
        return True

    def judge(self, sources: Ints, claimed: Floats, accepted: NDArray[np.bool_]) -> None:
        """[n] tokens that were reached, the probabilities as the policy gave them, and whether."""
        if self._probed:
            proved = set(sources[accepted])
            for source in self._probed & set(sources.tolist()):
                failures = self._failures[source] + (-1 if source in proved else 1)
                self._failures[source] = min(max(failures, 0), self.MAX_FAILURES)
                self._probed.remove(source)
        judge(sources, claimed, accepted, self._state, self.factor, self.alarms, self._OPTIONS)

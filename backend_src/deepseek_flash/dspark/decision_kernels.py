"""The arithmetic of a decision, compiled: between two passes a dozen array operations take longer
than all the numbers in them, above all where the model has just swept the processor's caches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from deepseek_flash.dspark.kernels import compiled


@compiled
def best_row_count(gains: Any, seconds: Any, rate: Any) -> Any:
    """How many rows to take for the most tokens beyond what their seconds are worth.

    Args:
        gains: [K] tokens expected of each row, falling.
        seconds: [K + 1] of a step with 0..K of them.
        rate: tokens that a second is worth.
    Returns:
        The k that maximises the sum of the first k gains - rate * seconds[k], the smallest such.
    """
    best, most, total = 0, -rate * seconds[0], 0.0
    for count in range(len(gains)):
        total += gains[count]
        worth = total - rate * seconds[count + 1]
        if worth > most:
            best, most = count + 1, worth
    return best


@compiled
def choose(
    probabilities: Any, sources: Any, caps: Any, factor: Any, seconds: Any, rate: Any, lengths: Any
) -> Any:
    """Fill in ``lengths`` [requests]: how much of each draft to take.

    Args:
        probabilities, sources: [K] of all drafts, one after the other.
        caps: [requests] tokens of each.
        factor: [sources] by which probabilities are multiplied.
        seconds: [K + 1] of a step with 0..K draft rows.
        rate: tokens that a second is worth.
    """
    total = len(probabilities)
    survival, owner = np.empty(total), np.empty(total, np.int64)
    at = 0
    for request in range(len(caps)):
        chance = 1.0
        for _ in range(caps[request]):
            chance *= probabilities[at] * factor[sources[at]]
            survival[at], owner[at] = chance, request
            at += 1
    order = np.argsort(-survival, kind="mergesort")  # stable: then a draft's own order
    lengths[:] = 0
    for place in range(best_row_count(survival[order], seconds, rate)):
        lengths[owner[order[place]]] += 1


@compiled
def judge(
    sources: Any, claimed: Any, accepted: Any, state: Any, factor: Any, alarms: Any, options: Any
) -> Any:
    """See ``Trust.judge``. Changes ``state``, ``factor`` and ``alarms``.

    Args:
        state: [4, sources]: accepted, expected, and the two tests' log likelihood ratios.
        options: HOSTILE, WINDOW, PRIOR, DISTRUST, ALARM of ``Trust``.
    """
    hostile, window, prior, distrust, alarm = options
    for kind in range(len(factor)):
        good = bad = 0.0
        count = 0
        right = expected = 0.0
        for place in range(len(sources)):
            if sources[place] != kind:
                continue
            claim = min(max(claimed[place], 0.01), 0.99)
            believed = claim * factor[kind]
            count += 1
            right += accepted[place]
            expected += claim
            if accepted[place]:
                bad += math.log(hostile)
                good += math.log(claim / believed)
            else:
                bad += math.log((1.0 - hostile * believed) / (1.0 - believed))
                good += math.log((1.0 - claim) / (1.0 - believed))
        keep = (1.0 - 1.0 / window) ** count
        state[0, kind] = state[0, kind] * keep + right
        state[1, kind] = state[1, kind] * keep + expected
        state[2, kind] = max(0.0, state[2, kind] + bad)
        state[3, kind] = max(0.0, state[3, kind] + good)
        turned_bad, turned_good = state[2, kind] > alarm, state[3, kind] > alarm
        if turned_bad or turned_good:
            alarms[kind] += turned_bad
            state[:, kind] = 0.0
            if turned_bad:
                state[1, kind] = distrust
        factor[kind] = min(1.0, (state[0, kind] + prior) / (state[1, kind] + prior))

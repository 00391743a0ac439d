"""One line per decision, for whoever wants to see why a request guesses or does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepseek_flash.dspark.drafts import Draft
from deepseek_flash.dspark.paths import path_of

SAMPLE_EVERY = 1000  # decisions a line at info


class DecisionLog:
    """All decisions at debug, every ``every``-th at info (0: none). Costs nothing when off.

    ``[DSpark] <request id> action=… entropy=… gap=… attn_var=… draft=<taken>/<found> p=…``, where
    p is the probability that the first token found is accepted.
    """

    def __init__(self, logger: logging.Logger | None = None, *, every: int = SAMPLE_EVERY) -> None:
        self._logger = logger or logging.getLogger(__name__)
        self._every = every
        self._decisions = 0

    def step(
        self,
        request_ids: Sequence[str],
        drafts: Sequence[Draft | None],
        lengths: Sequence[int],
        signals: NDArray[np.float32] | None,
    ) -> None:
        """The decisions of one step. ``signals``: [requests, 3], as the controller got them."""
        first = self._decisions
        self._decisions += len(request_ids)
        if self._logger.isEnabledFor(logging.DEBUG):
            level, rows = logging.DEBUG, range(len(request_ids))
        elif self._every and self._logger.isEnabledFor(logging.INFO):
            # The next decision whose number is a multiple, and so on.
            level, rows = logging.INFO, range(-first % self._every, len(request_ids), self._every)
        else:
            return
        for row in rows:
            draft = drafts[row]
            probabilities = draft.probabilities if draft else []
            entropy, gap, variance = (np.nan,) * 3 if signals is None else signals[row]
            self._logger.log(
                level,
                "[DSpark] %s action=%s entropy=%.3f gap=%.3f attn_var=%.5f draft=%d/%d p=%s",
                request_ids[row], path_of(draft, lengths[row]), entropy, gap, variance,
                lengths[row], len(probabilities),
                f"{probabilities[0]:.2f}" if probabilities else "-",
            )  # fmt: skip

"""Tells the cache how generations ended, and asks it for neighbours, without anybody waiting.

Calls between Triton models (BLS) block, so each kind has a thread and a bounded queue. What does
not fit is dropped and counted: the cache learns less, and no stream is late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from deepseek_flash import metrics
from deepseek_flash.background import BackgroundWorker
from deepseek_flash.contract import CacheReport, Neighbours, NeighboursQuery, Outcome

QUEUED = 256  # outcomes or questions that may wait

log = logging.getLogger("deepseek_flash")

Ask = Callable[[Outcome | NeighboursQuery], Neighbours | CacheReport]


class Feedback(Protocol):
    """What generations need of it. ``then`` is called from another thread, exactly once."""

    def tell(self, outcome: Outcome, then: Callable[[], None]) -> None: ...
    def ask(
        self, query: NeighboursQuery, then: Callable[[Neighbours], None], wanted: Callable[[], bool]
    ) -> None: ...


class BackgroundFeedback:
    """Feedback by a blocking call ``ask``, which is given one message at a time and thread."""

    def __init__(self, ask: Ask, recorder: metrics.Recorder) -> None:
        self._ask = ask
        self._recorder = recorder
        self._outcomes = BackgroundWorker("outcomes", QUEUED)
        self._questions = BackgroundWorker("neighbours", QUEUED)

    def tell(self, outcome: Outcome, then: Callable[[], None]) -> None:
        def job() -> None:
            try:
                self._call(outcome)
            finally:
                then()

        if not self._outcomes.put(job):
            self._dropped("outcome")
            then()

    def ask(
        self, query: NeighboursQuery, then: Callable[[Neighbours], None], wanted: Callable[[], bool]
    ) -> None:
        """``then`` is not called where there is no answer: a guess less.

        Args:
            wanted: whether the answer is still of use; asked when the question's turn has come.
        """

        def job() -> None:
            if not wanted():
                return
            answer = self._call(query)
            if isinstance(answer, Neighbours):
                then(answer)

        if not self._questions.put(job):
            self._dropped("neighbours")

    def close(self) -> None:
        """Forget what is queued and stop."""
        self._outcomes.close()
        self._questions.close()

    def _call(self, message: Outcome | NeighboursQuery) -> Neighbours | CacheReport | None:
        try:
            return self._ask(message)
        except Exception as error:  # the cache's fault is nobody's answer
            log.warning("dflash_cache did not take a message: %s", error)
            self._recorder.count(metrics.FEEDBACK_DROPPED, labels=(("reason", "error"),))
            return None

    def _dropped(self, what: str) -> None:
        self._recorder.count(metrics.FEEDBACK_DROPPED, labels=(("reason", f"{what}_queue_full"),))

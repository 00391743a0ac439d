"""Hands a leg's requests to the users of one process, and measures what becomes of them.

It knows nothing of Locust, whose users are greenlets: what blocks here is patched by gevent there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clients.request import Chunk, Request
from loadtest.records import Record
from loadtest.traffic.trace import Entry

SAMPLING = {"temperature": 0}
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that a user is to send."""

    number: int
    entry: Entry
    begin: float  # of the leg, by the feed's clock

    def request(self) -> Request:
        return self.entry.request(**SAMPLING)


class Feed:
    """The leg that is played now. In a closed loop who is free takes the next; in an open loop
    each request has its moment, and who takes it waits for that.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._there_is_more = threading.Event()
        self._turns: Iterator[Turn] = iter(())
        self._cpu = self._begin = 0.0

    def begin(self, trace: Sequence[Entry], worker: int = 0, workers: int = 1) -> None:
        """Start a leg. Of several processes each plays every ``workers``-th request."""
        self._begin, self._cpu = self._clock(), time.process_time()
        turns = [Turn(number, entry, self._begin) for number, entry in enumerate(trace)]
        with self._lock:
            self._turns = iter(turns[worker::workers])
        self._there_is_more.set()

    def take(self, patience: float = 1.0) -> Turn | None:
        """The next request; None: for ``patience`` seconds there was none."""
        with self._lock:
            turn = next(self._turns, None)
            if turn is None:
                self._there_is_more.clear()
        if turn is None:
            self._there_is_more.wait(patience)
        return turn

    def play(self, turn: Turn, door: str, send: Callable[[Request], Iterator[Chunk]]) -> Record:
        """Wait until the request is due, send it and read the answer to its end.

        ``send`` may raise whatever its client does: a failed request is a record too.
        """
        if turn.entry.at is not None:
            time.sleep(max(0.0, turn.begin + turn.entry.at - self._clock()))
        sent = self._now(turn)
        due = sent if turn.entry.at is None else turn.entry.at
        chunks: list[tuple[float, Chunk]] = []
        error = ""
        try:
            for chunk in send(turn.request()):
                chunks.append((self._now(turn), chunk))
            if not chunks or chunks[-1][1].finish_reason is None:
                error = "the stream ended without a finish reason"
        except Exception as problem:  # any: the server's refusal, a broken connection, a timeout
            error = f"{type(problem).__name__}: {problem}"
        return _record(turn, door, due, sent, self._now(turn), chunks, error)

    def cpu(self) -> float:
        """This process's use of a core since the leg's beginning."""
        return (time.process_time() - self._cpu) / max(1e-9, self._clock() - self._begin)

    def _now(self, turn: Turn) -> float:
        return self._clock() - turn.begin


def _record(
    turn: Turn,
    door: str,
    due: float,
    sent: float,
    ended: float,
    chunks: Sequence[tuple[float, Chunk]],
    error: str,
) -> Record:
    full = [(at, len(chunk.token_ids)) for at, chunk in chunks if chunk.token_ids]
    gaps: list[float] = []
    for (before, _), (at, tokens) in itertools.pairwise(full):
        gaps += [(at - before) / tokens] * tokens
    last = chunks[-1][1] if chunks else None
    return Record(
        number=turn.number,
        door=door,
        due=due,
        sent=sent,
        first=full[0][0] if full else None,
        ended=ended,
        tokens=sum(tokens for _, tokens in full),
        prompt_tokens=last.num_input_tokens if last else 0,
        cached_tokens=last.num_cached_tokens if last else 0,
        gaps=tuple(gaps),
        error=error,
    )

"""The rows of logits that a step's tokens came from, and what they say. Knows no vLLM.

A step computes a row of logits for each token that it samples or verifies. Only those that a
token came from are looked at: not the rows after a rejected draft, not those of a prompt's middle,
and no padding, however many rows the tensor has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepseek_flash.dspark.signals import row_facts

ROWS_AT_ONCE = 32  # bounds the memory that the probabilities of a large vocabulary take
CPU_ROWS_AT_ONCE = 2  # on a CPU they stay in the cache


class Rows:
    """A step's logits.

    Args:
        logits: [rows or more, vocabulary]; row by row those of the first request, of the second…
        lengths: draft tokens of each request; it has one row more than that.
    """

    def __init__(self, logits: torch.Tensor, lengths: Sequence[int]) -> None:
        self._logits = logits
        self._starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1].tolist()
        self._last: dict[int, tuple[int, float]] = {}  # request → last row, its log-normaliser

    def describe(self, counts: Sequence[int]) -> list[NDArray[np.float32]]:
        """Each request's [tokens, 3]: top-1 probability, entropy (nats) and gap of its tokens.

        Args:
            counts: tokens that each request got from the step.
        """
        wanted = [
            row for start, count in zip(self._starts, counts) for row in range(start, start + count)
        ]
        if not wanted:
            return [np.empty((0, 3), np.float32) for _ in counts]
        size = CPU_ROWS_AT_ONCE if self._logits.device.type == "cpu" else ROWS_AT_ONCE
        parts = [self._facts(wanted[at : at + size]) for at in range(0, len(wanted), size)]
        facts = torch.cat(parts).cpu().numpy()  # the one copy to the host
        found, at = [], 0
        for request, count in enumerate(counts):
            found.append(facts[at : at + count, :3])
            at += count
            if count:
                self._last[request] = wanted[at - 1], float(facts[at - 1, 3])
        return found

    def _facts(self, rows: list[int]) -> torch.Tensor:
        # A slice is a view, where an index would be a copy.
        run = rows[-1] - rows[0] + 1 == len(rows)
        logits = self._logits[rows[0] : rows[-1] + 1] if run else self._logits[rows]
        return row_facts(logits)

    def lookup(self, request: int) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Log-probabilities of tokens in the row of the request's last token (after ``describe``).

        The row is read when asked, so the logits must still be what they were.
        """
        row, normaliser = self._last[request]

        def logprobs(token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
            wanted = torch.from_numpy(token_ids).to(self._logits.device)
            found: NDArray[np.float32] = self._logits[row, wanted].float().cpu().numpy()
            return found - np.float32(normaliser)

        return logprobs

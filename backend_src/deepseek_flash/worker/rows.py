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

from deepseek_flash.dspark.signals import is_plain, row_facts, verify


class Rows:
    """A step's logits.

    Args:
        logits: [rows or more, vocabulary]; row by row those of the first request, of the second…
        lengths: draft tokens of each request; it has one row more than that.
    """

    def __init__(self, logits: torch.Tensor, lengths: Sequence[int]) -> None:
        self._logits = logits
        self._starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1].tolist()
        self._lengths = lengths
        self._facts: NDArray[np.float32] | None = None  # of the rows that gave a token, if known
        self._last: dict[int, tuple[int, float]] = {}  # request → last row, its log-normaliser

    def verify(self, draft_token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """What greedy sampling of unedited logits gives, [requests, longest + 1], -1 behind.

        On a CPU one pass over the vocabulary does it, which describes the rows as well; vLLM's
        samplers take several. None where that cannot be.

        Args:
            draft_token_ids: of all requests, one after the other.
        """
        if not is_plain(self._logits):
            return None
        found = verify(self._logits, self._lengths, draft_token_ids)
        if found is None:
            return None
        tokens, self._facts = found
        return tokens

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
        facts = self._facts[wanted] if self._facts is not None else row_facts(self._logits, wanted)
        found, at = [], 0
        for request, count in enumerate(counts):
            found.append(facts[at : at + count, :3])
            at += count
            if count:
                self._last[request] = wanted[at - 1], float(facts[at - 1, 3])
        return found

    def lookup(self, request: int) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Log-probabilities of tokens in the row of the request's last token (after ``describe``).

        The row is read when asked, so the logits must still be what they were.
        """
        row, normaliser = self._last[request]
        logits = self._logits[row]
        if is_plain(logits):
            here: NDArray[np.float32] = logits.numpy()
            return lambda token_ids: here[token_ids] - np.float32(normaliser)

        def logprobs(token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
            wanted = torch.from_numpy(token_ids).to(logits.device)
            found: NDArray[np.float32] = logits[wanted].float().cpu().numpy()
            return found - np.float32(normaliser)

        return logprobs

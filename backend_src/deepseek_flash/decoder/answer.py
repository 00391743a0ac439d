"""Collects outputs into the responses of one request."""

from __future__ import annotations

from typing import Any

from deepseek_flash.contract import Delta
from deepseek_flash.decoder.output import Output, Piece

LOWEST_LOGPROB = -9999.0  # for minus infinity, which JSON cannot say; vLLM's own choice


class Answer:
    """One request's choices. They come one at a time; a response carries all of them.

    A response's ``num_cached_tokens`` is what holds by then: all of the prompt while everything was
    replayed, then the engine's figure, the smallest of the choices'. So it never rises, and the
    last response's is the answer's.

    Args:
        choices: how many the engine generates.
        copies: how often each is told: ``n`` greedy choices are one generation.
    """

    def __init__(
        self, choices: int, num_input_tokens: int, prepended_text: str = "", copies: int = 1
    ) -> None:
        self._num_input_tokens = self._num_cached_tokens = num_input_tokens
        self._copies = copies
        self._texts = [prepended_text] * choices
        self._token_ids: list[list[int]] = [[] for _ in range(choices)]
        self._logprobs: list[list[dict[int, Any]] | None] = [None] * choices
        self._sums: list[float | None] = [None] * choices
        self._reasons: list[str | None] = [None] * choices
        self.num_output_tokens = 0

    def add(self, output: Output) -> int:
        """Take in a delta; how many tokens it brought."""
        new = 0
        for piece in output.pieces:
            index = piece.index
            self._texts[index] += piece.text
            self._token_ids[index].extend(piece.token_ids)
            self._sums[index] = piece.cumulative_logprob
            self._reasons[index] = piece.finish_reason
            if piece.logprobs is not None:
                self._logprobs[index] = (self._logprobs[index] or []) + _plain(piece)
            new += len(piece.token_ids)
        self.num_output_tokens += new
        if output.num_cached_tokens is not None:
            # Behind a replayed beginning the engine's prompt is longer than ours, and all of ours
            # may be in its cache. But it ran, and "all" is what an answer without it says.
            self._num_cached_tokens = min(
                self._num_cached_tokens, output.num_cached_tokens, self._num_input_tokens - 1
            )
        return new

    @property
    def finish_reasons(self) -> tuple[str | None, ...]:
        return tuple(self._reasons) * self._copies

    def take(self) -> Delta:
        """What came in since the last call."""
        delta = Delta(
            texts=tuple(self._texts) * self._copies,
            finish_reasons=tuple(self._reasons) * self._copies,
            token_ids=tuple(map(tuple, self._token_ids)) * self._copies,
            cumulative_logprobs=tuple(self._sums) * self._copies,
            logprobs=tuple(self._logprobs) * self._copies,
            num_input_tokens=self._num_input_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )
        self._texts = [""] * len(self._texts)
        self._token_ids = [[] for _ in self._token_ids]
        self._logprobs = [None if item is None else [] for item in self._logprobs]
        return delta


def _plain(piece: Piece) -> list[dict[int, Any]]:
    return [
        {
            token: {
                "logprob": max(entry.logprob, LOWEST_LOGPROB),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in piece.logprobs or ()
    ]

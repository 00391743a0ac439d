"""Where a request's last tokens were seen before: in its own text, and in texts like it.

The index is the one of LZ77 compressors: for runs of 1, 2, 4 and 8 tokens, a table of hash buckets
that name the newest place, and for each place the one before it in its bucket. To append a token
is four stores, to look up walks a bounded number of places, longest runs first. A run is compared
with the tokens themselves, so a shared bucket costs time, never truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.kernels import ORDERS, Texts, index

ROOM = 64  # behind the history's end: the longest draft
TAIL = 32  # tokens of the prompt that a reference is thought to follow
PACE = 0.2  # of the running mean of surprises

__all__ = ["ROOM", "Matcher", "Source"]


class Matcher:
    """The texts of one request: its own, and references. Only its tenant's texts may enter.

    Not for several threads at once. Memory: about 60 bytes a token.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._history = _Store(len(prompt_token_ids) + ROOM)
        self._history.begin(Source.HISTORY, 0.0)
        self._history.extend(prompt_token_ids)
        self._answer = self._history.size
        self._references = _Store(0)
        self._tail = list(prompt_token_ids[-TAIL:])
        self._expected: Draft | None = None
        self.surprise = 0.0  # running mean of (accepted - expected), of first draft tokens

    @property
    def generated(self) -> int:
        """Tokens appended since the prompt."""
        return self._history.size - self._answer

    @property
    def end(self) -> int:
        """Place of the last token in ``history``."""
        return self._history.size - 1

    @property
    def confidence(self) -> float:
        """Top-1 probability of the last token; NaN where it is the prompt's."""
        return float(self._history.texts.top1[self.end])

    @property
    def history(self) -> Texts:
        """With room for ``ROOM`` tokens behind ``end``, which are anybody's to overwrite."""
        return self._history.indexed()

    @property
    def references(self) -> Texts:
        return self._references.indexed()

    def append(self, token_ids: Sequence[int], top1: Sequence[float]) -> None:
        """Tokens that the model has generated, with the probability of the best token at each.

        ``top1`` is as long as ``token_ids``; NaN where it is not known.
        """
        if self._expected is not None and len(token_ids):
            accepted = token_ids[0] == self._expected.token_ids[0]
            surprise = accepted - self._expected.probabilities[0]
            self.surprise += PACE * (surprise - self.surprise)
            self._expected = None
        self._history.extend(token_ids, top1)

    def add_reference(
        self,
        token_ids: Sequence[int],
        source: Source,
        similarity: float = 1.0,
        top1: Sequence[float] | None = None,
    ) -> None:
        """A text that the answer may repeat, indexed as if it answered this request's prompt.

        Args:
            similarity: of its prompt to this one, 0 to 1.
            top1: probability of the best token at each of its tokens; None: not known.
        """
        self._references.begin(source, similarity)
        self._references.extend(self._tail[:-1], is_context=True)
        self._references.extend(self._tail[-1:])  # the place before the text's first token
        self._references.extend(token_ids, top1)

    def expect(self, draft: Draft) -> None:
        """What the next token appended is compared with."""
        self._expected = draft if draft.token_ids else None


class _Store:
    """Texts one behind the other, with their chains, in arrays that grow."""

    def __init__(self, tokens: int) -> None:
        """``tokens``: how many to have room for at first."""
        self.size = 0
        self._indexed = 0
        self._count = 0  # of texts
        self.texts = _allocate(max(256, tokens), 8)

    def begin(self, source: Source, similarity: float) -> None:
        """A new text follows."""
        if self._count == len(self.texts.sources):
            self._grow(len(self.texts.tokens), 2 * self._count)
        self.texts.sources[self._count] = source
        self.texts.similarity[self._count] = similarity
        self._count += 1
        self.extend((-1, -1), is_context=True)

    def extend(
        self,
        token_ids: Sequence[int],
        top1: Sequence[float] | None = None,
        *,
        is_context: bool = False,
    ) -> None:
        """``is_context``: nothing is to be guessed from what follows these tokens."""
        begin, end = self.size, self.size + len(token_ids)
        if end + ROOM > len(self.texts.tokens):
            self._grow(2 * (end + ROOM), len(self.texts.sources))
        texts, owner = self.texts, -1 if is_context else self._count - 1
        # One by one: numpy takes longer for a short slice than for some numbers.
        if end - begin < 8:
            for place, token in enumerate(token_ids, begin):
                texts.tokens[place], texts.owner[place] = token, owner
                texts.top1[place] = math.nan if top1 is None else top1[place - begin]
        else:
            texts.tokens[begin:end], texts.owner[begin:end] = token_ids, owner
            texts.top1[begin:end] = math.nan if top1 is None else top1
        self.size = end

    def indexed(self) -> Texts:
        """With every place chained that has a successor."""
        if self._indexed < self.size - 1:
            index(self.texts, self._indexed, self.size - 1)
            self._indexed = self.size - 1
        return self.texts

    def _grow(self, tokens: int, texts: int) -> None:
        old, self.texts = self.texts, _allocate(tokens, texts)
        for name in ("tokens", "top1", "owner"):
            getattr(self.texts, name)[: self.size] = getattr(old, name)[: self.size]
        for name in ("sources", "similarity"):
            getattr(self.texts, name)[: self._count] = getattr(old, name)[: self._count]
        self._indexed = 0  # more buckets: every place is chained anew


def _allocate(tokens: int, texts: int) -> Texts:
    buckets = 1 << tokens.bit_length()
    return Texts(
        tokens=np.full(tokens, -1, np.int32),
        top1=np.empty(tokens, np.float32),
        owner=np.empty(tokens, np.int32),
        links=np.empty((tokens, len(ORDERS)), np.int32),
        heads=np.full((len(ORDERS), buckets), -1, np.int32),
        sources=np.empty(texts, np.int32),
        similarity=np.empty(texts, np.float32),
    )

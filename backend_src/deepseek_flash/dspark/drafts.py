"""What the proposer hands to the controller: guessed tokens, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile


class Source(IntEnum):
    """Where a draft token was found."""

    HISTORY = 0  # in the request's own tokens
    REFERENCE = 1  # in the continuation of a similar prompt
    CHAIN = 2  # in the DFlash cache, as the continuation of these very turns


@dataclass(slots=True)
class Draft:
    """Tokens guessed for one request. The three lists have one element a token."""

    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)  # accepted, if those before were
    sources: list[Source] = field(default_factory=list)

    @property
    def own_run(self) -> int:
        """Leading tokens that rest on the request's own history alone."""
        return sum(1 for _ in takewhile(lambda source: source == Source.HISTORY, self.sources))

"""Which path made each token, and what became of the drafts. Each token counts once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from deepseek_flash.dspark.drafts import Draft, Source


class Path(StrEnum):
    """How tokens came about: label of the metric."""

    FAST = "fast"  # replayed or shared without the model, or a pass verified what DFlash knew
    BURST = "burst"  # a pass verified what the request's own history led to
    SLOW = "slow"  # a pass had nothing to verify: one token


def path_of(draft: Draft | None, length: int) -> Path:
    """The path of a pass that verifies a draft's first ``length`` tokens: the first one leads."""
    if draft is None or length == 0:
        return Path.SLOW
    return Path.BURST if draft.sources[0] == Source.HISTORY else Path.FAST


@dataclass(slots=True)
class PathCounts:
    """What happened since the last ``drain``."""

    tokens: Counter[Path] = field(default_factory=Counter)
    passes: Counter[Path] = field(default_factory=Counter)
    proposed: Counter[tuple[Source, int]] = field(default_factory=Counter)  # by place in the draft
    accepted: Counter[tuple[Source, int]] = field(default_factory=Counter)
    burst_tokens: int = 0  # guessed from the own history alone: at most burst_steps a pass


class PathAccounting:
    """Counts the passes of all requests. For one thread."""

    def __init__(self) -> None:
        self._counts = PathCounts()
        self._requests: dict[str, Counter[Path]] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def record(
        self, request_id: str, draft: Draft | None, length: int, accepted: int, tokens: int
    ) -> Path:
        """A pass has verified a draft's first ``length`` tokens.

        Args:
            accepted: how many of them were right.
            tokens: how many the request got from the pass: usually accepted + 1, fewer where it
                ended among them, 0 where it is gone.
        """
        path = path_of(draft, length)
        counts = self._counts
        counts.passes[path] += 1
        counts.tokens[path] += tokens
        if tokens:
            self._requests.setdefault(request_id, Counter())[path] += tokens
        if draft is not None:
            for place, source in enumerate(draft.sources[:length]):
                counts.proposed[source, place] += 1
                if place < accepted:
                    counts.accepted[source, place] += 1
            if path == Path.BURST:
                counts.burst_tokens += min(length, draft.own_run)
        return path

    def finish(self, request_id: str) -> Counter[Path]:
        """The tokens of a request that has ended, by path. It is forgotten."""
        return self._requests.pop(request_id, Counter())

    def drain(self) -> PathCounts:
        """What was counted since the last call."""
        counts, self._counts = self._counts, PathCounts()
        return counts

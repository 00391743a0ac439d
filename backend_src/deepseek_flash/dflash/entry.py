"""One entry of the table, and the words for what becomes of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, StrEnum

SHARED = -1  # in the column ``window``: used by several windows, so it outlives each


class Segment(IntEnum):
    """A row's place in the order of eviction: the first segment goes first, oldest use first."""

    FREE = 0
    CLOSED = 1  # entries of closed windows; the window that closed first goes first
    PROBATION = 2
    PROTECTED = 3


class Eviction(StrEnum):
    """Why an entry went: label of the metric."""

    CAPACITY = "capacity"
    WINDOW = "window"  # capacity too, but the entry's window was closed
    QUOTA = "quota"
    TTL = "ttl"
    FLUSH = "flush"
    COLLISION = "collision"  # its MAC does not prove it
    REMOVED = "removed"


class Offer(StrEnum):
    """What became of an offered entry. STORED and EXTENDED wrote it; the others kept the first."""

    STORED = "stored"
    EXTENDED = "extended"  # replaced an incomplete entry that it goes on from
    KNOWN = "known"  # said nothing new
    DIVERGED = "diverged"  # the same context, another continuation (casebook CB-18)
    COLLIDED = "collided"  # surely another context with the same fingerprint


@dataclass(frozen=True, slots=True)
class WindowKey:
    """What finds and proves an entry by the last turns of its prompt alone."""

    fingerprint: int  # int64
    mac: tuple[int, int]  # 2 x int64, over the window's context and the entry's continuation


@dataclass(frozen=True, slots=True)
class Entry:
    """One row, but for its hidden state."""

    fingerprint: int  # int64
    mac: tuple[int, int]  # 2 x int64
    tenant: int  # int64 digest
    tokens: tuple[int, ...]  # at most ``block``
    complete: bool  # the answer ends with these tokens
    window: int  # semantic window, or SHARED
    confidence: tuple[float, float] = (0.0, 0.0)  # min and mean of the top-1 probability, float32
    created: float = 0.0  # seconds, the caller's clock
    window_key: WindowKey | None = None

    def pack(self, block: int) -> array[int]:
        """The tokens as int32. Raises ValueError, OverflowError for a field out of range."""
        if len(self.tokens) > block or not (self.tokens or self.complete):
            raise ValueError(f"tokens: must be 1 to {block}, or none of a complete entry")
        if self.window < 0:
            raise ValueError("window: must be at least 0")
        key = self.window_key
        array("q", [self.fingerprint, *self.mac, self.tenant, self.window])  # raises, if any
        array("q", [key.fingerprint, *key.mac] if key else [])
        return array("i", self.tokens)

    def compare(self, offered: Entry) -> Offer:
        """What becomes of another entry of the same fingerprint while this one is stored."""
        if self.tenant != offered.tenant:
            return Offer.COLLIDED
        old, new = self.tokens, offered.tokens
        if (old, self.complete) == (new, offered.complete):
            return Offer.KNOWN if self.mac == offered.mac else Offer.COLLIDED
        if not self.complete and new[: len(old)] == old:
            return Offer.EXTENDED
        if not offered.complete and old[: len(new)] == new:
            return Offer.KNOWN
        return Offer.DIVERGED

"""What a kind of made prompts is written from: questions, documents and words.

A question stands alone. A document is given to work on: a head and a foot, one of which says what
to do, around pieces that go on for as long as is wished. ``$slots`` are filled with words; a slot
that appears twice in a text has the same word in both places.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from loadtest.traffic.draw import Words


@dataclass(frozen=True, slots=True)
class Document:
    """A form of document."""

    head: str
    pieces: tuple[str, ...]  # each ends its line; ``$index`` counts them from 1
    foot: str = ""
    kept: tuple[str, ...] = ()  # slots with one word throughout the document


@dataclass(frozen=True, slots=True)
class Genre:
    """A kind of prompt."""

    questions: tuple[str, ...]
    documents: tuple[Document, ...]
    words: Words


def _numbers(first: int, last: int, digits: int = 1) -> tuple[str, ...]:
    return tuple(f"{number:0{digits}}" for number in range(first, last + 1))


NUMBERS: Words = {
    "n": _numbers(2, 99), "m": _numbers(2, 99), "big": _numbers(1000, 9999),
    "other_big": _numbers(1000, 9999), "cents": _numbers(0, 99, 2), "year": _numbers(2016, 2025),
    "month": _numbers(1, 12, 2), "day": _numbers(1, 28, 2), "hour": _numbers(7, 19, 2),
    "minute": _numbers(0, 59, 2), "second": _numbers(0, 59, 2), "code": tuple(
        map("".join, itertools.product("ABCEFHKLMNPRSTX", repeat=2))
    ),
}  # fmt: skip
NOUNS = (
    "order", "invoice", "payment", "shipment", "customer", "ticket", "sensor", "session", "booking",
    "account", "message", "document", "product", "vehicle", "patient", "contract", "event",
    "comment", "warehouse", "refund", "coupon", "flight", "meter", "article", "device", "voucher",
    "supplier", "parcel", "lesson", "playlist",
)  # fmt: skip
OTHERS = (
    "driver", "region", "tenant", "project", "batch_run", "member", "agent", "station", "teacher",
    "branch_office", "carrier", "campaign", "machine", "owner", "shift", "editor", "contact",
)  # fmt: skip
ADJECTIVES = (
    "pending", "recent", "stale", "nested", "partial", "daily", "remote", "cached", "sorted",
    "merged", "duplicate", "archived", "invalid", "foreign", "shared", "late", "signed", "local",
    "empty", "priced",
)  # fmt: skip
STATES = (
    "open", "paid", "shipped", "cancelled", "returned", "on_hold", "draft", "expired", "approved",
)  # fmt: skip

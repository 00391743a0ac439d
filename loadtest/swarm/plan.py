"""What Locust is to play: legs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True)
class PlannedLeg:
    """A trace and how many users play it together."""

    name: str
    trace: str  # path of a log (traffic.log); with times it is an open loop
    users: int  # most requests at a time
    seconds: float  # after so long it ends, whatever is still to be sent


def write_plan(path: Path, legs: Sequence[PlannedLeg]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(legs))))


def read_plan(path: Path) -> list[PlannedLeg]:
    """Raises ValueError: not a plan; the message names the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[PlannedLeg])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None

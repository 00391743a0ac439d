"""How large a load test is: the document's own size, or one that this machine can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from loadtest.traffic.prompts import Limits


@dataclass(frozen=True)
class Scale:
    """Durations are those of the server without DFlash and DSpark, in seconds; from them and its
    measured capacity follows how many requests are sent, the same to both servers.
    """

    name: str
    limits: Limits  # of the length classes, in tokens
    max_tokens: tuple[int, int]  # of an answer, least and most
    users: int  # of a closed loop
    open_users: int  # most at a time in an open loop
    warm_up_prompts: int  # at most, if they fit into the time
    warm_up: float
    closed: float
    open: float
    burst: float
    parts: int  # of a loop: each is played on both servers before the next
    calibration: float
    most_rate: float | None = None  # requests/s in the open loop
    rounds: int = 5  # of the warm-up
    load: float = 0.7  # of the capacity, in the open loop

    def requests(self, capacity: float, seconds: float) -> int:
        """As many as the server without answers in so long; at least one a part and user."""
        return max(self.parts * self.users, round(capacity * seconds))

    def fitted(self, context: int) -> Scale:
        """With length classes that leave room for an answer in the model's context.

        Raises:
            ValueError: the context is too short for three classes.
        """
        longest = context - self.max_tokens[1]
        if longest >= self.limits.long:
            return self
        short, medium = (
            longest * each // self.limits.long for each in (self.limits.short, self.limits.medium)
        )
        try:
            limits = Limits(short, medium, longest)
        except ValueError:
            raise ValueError(f"a context of {context} tokens is too short for this scale") from None
        return replace(self, limits=limits)

    def rate(self, capacity: float) -> float:
        """Of the open loop, in requests/s."""
        wanted = self.load * capacity
        return wanted if self.most_rate is None else min(wanted, self.most_rate)


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "full": Scale(
            name="full",
            limits=Limits(),
            max_tokens=(64, 512),
            users=64,
            open_users=1024,
            warm_up_prompts=1000,
            warm_up=900.0,
            closed=1800.0,
            open=1800.0,
            burst=600.0,
            parts=4,
            calibration=60.0,
            most_rate=50.0,
        ),
        # All of it takes less than 20 minutes on two cores, the servers' start included.
        "cpu": Scale(
            name="cpu",
            limits=Limits(short=128, medium=512, long=1536),
            max_tokens=(24, 64),
            users=4,
            open_users=64,
            warm_up_prompts=1000,
            warm_up=110.0,
            closed=120.0,
            open=140.0,
            burst=50.0,
            parts=2,
            calibration=30.0,
        ),
    }
)

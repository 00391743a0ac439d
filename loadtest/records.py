"""What a load test leaves behind: one record a request, one a leg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.scrape import Metrics, rise

OFF, ON = "off", "on"  # the two servers: plain vLLM, and with DFlash and DSpark
WARM_UP, MIXED, BURST = "warmup", "mixed", "burst"
PHASES = (WARM_UP, MIXED, BURST)
CLOSED, OPEN = "closed", "open"  # loops


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its client saw it. Moments are seconds from the beginning of the leg."""

    number: int  # place in the leg's trace
    door: str
    due: float  # when it was to be sent; in a closed loop, when it was
    sent: float
    first: float | None  # when the first token came
    ended: float
    tokens: int = 0  # of the answer
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: not computed for this answer
    # Seconds a token, for every token after the first response: the gap between two responses,
    # shared out over the tokens of the second.
    gaps: tuple[float, ...] = ()
    error: str = ""  # what the server said; such a request has no latencies
    # Of the prompt, as its trace knows it.
    kind: str = ""
    length: str = ""
    repeat: bool = False  # asked before in this phase

    @property
    def ran(self) -> bool:
        """Whether the engine ran: it computes the last token of a prompt in any case."""
        return not self.error and self.cached_tokens < self.prompt_tokens

    @property
    def first_token(self) -> float | None:
        """Seconds from when it was due: a client that is late does not flatter the server."""
        return None if self.first is None else self.first - self.due

    @property
    def total(self) -> float:
        return self.ended - self.due

    @property
    def late(self) -> float:
        return self.sent - self.due


@dataclass(frozen=True)
class Moment:
    """The server in the middle of a leg."""

    at: float  # seconds from the leg's beginning
    metrics: Metrics
    memory: int  # bytes of its processes


@dataclass(frozen=True)
class Leg:
    """One stretch of load on one server."""

    phase: str
    loop: str
    side: str
    part: int  # of the phase's loop: each is played on both sides before the next
    users: int  # most requests at a time
    rate: float  # requests/s offered in an open loop; 0 in a closed one
    digest: str  # of the trace: equal where the same was sent
    planned: int  # requests in it
    seconds: float  # from the first request to the end of the last answer
    records: Sequence[Record]
    before: Metrics  # once all that happened earlier is in them
    after: Metrics  # once all of this leg is in them
    moments: Sequence[Moment]
    locust_cpu: float  # of one core
    idle_cpu: float  # of one core: the other server meanwhile

    @property
    def counted(self) -> Mapping[str, Mapping[str, float]]:
        """By how much each of the server's series rose that did: name → labels → value."""
        return {name: rise(self.before, self.after, name) for name in self.after}


@dataclass(frozen=True)
class Run:
    """A whole load test."""

    scale: str  # full, cpu
    model: str
    seed: int
    repeat_share: float
    prompts: str  # the operator's log, or "": made prompts
    doors: Sequence[str]
    capacity: float  # requests/s of the server without, measured first
    legs: Sequence[Leg]  # in the order in which they were played
    bursts: Mapping[str, float]  # the profiler check: "ranges", "counter"; empty: not made

"""What is done to the DFlash cache in its benchmarks: caches, plans, and a mix of operations.

No engine: prompts and answers are numbers that follow from a number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepseek_flash.contract import Continuation, Outcome, RequestPlan, Returns, Sampling
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.fingerprint import FingerprintKey
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import SemanticWindows

SECRET = b"the benchmark's"
ENTRIES, BLOCK = 1536, 256  # the defaults
HIDDEN = 576  # of SmolLM2
SAMPLING = Sampling(temperature=0.0, max_tokens=4096)


def make_cache(
    device: torch.device,
    capacity: int = ENTRIES,
    *,
    bits: int = 64,
    windows: str = "none",
    hidden_size: int = HIDDEN,
    ttl: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DFlashCache:
    table = Table(capacity, device, block=BLOCK, hidden_size=hidden_size)
    key = FingerprintKey.derive(SECRET, bits)
    return DFlashCache(key, table, SemanticWindows(windows), ttl=ttl, clock=clock)


def make_plan(prompt: Iterable[int], **changes: Any) -> RequestPlan:
    values: dict[str, Any] = {
        "plan_id": "plan", "slot": 0, "generation": 1, "namespace": "benchmark",
        "arrival": 0.0, "deadline": None, "prepended_text": "", "stream": False,
        "sampling": SAMPLING, "returns": Returns(), "turn_starts": (), "session_id": "",
        "cache_salt": "", "cancel_key": "", "burst_steps": 3, "use_dflash": True,
        "use_dspark": True,
    }  # fmt: skip
    return RequestPlan(prompt_token_ids=tuple(prompt), **(values | changes))


def answered(plan: RequestPlan, tokens: Sequence[int], complete: bool = True) -> Outcome:
    return Outcome(plan, (Continuation(tuple(tokens), complete),))


WEIGHTS = {"lookup": 5000, "record": 4585, "neighbours": 400, "expire": 15}
OPERATIONS = (*WEIGHTS, "flush")
TENANTS, FLUSH_EVERY, TTL = 5, 2000, 6000.0  # operations


class Mix:
    """A cache under everything that can happen to it, the same for the same seed.

    Request ``n`` is turn n % 3 of session n // 3, and the session belongs to one of a few tenants.
    A turn is one of 997 questions, so the same turn also comes after other histories. Its state
    points at one of four topics, so a session's window closes now and then. Time counts operations.
    """

    def __init__(self, device: torch.device, capacity: int = ENTRIES, seed: int = 1) -> None:
        self.now = 1.0
        self.cache = make_cache(
            device, capacity, windows="semantic", ttl=TTL, clock=lambda: self.now
        )
        self._random = random.Random(seed)
        self._newest = 0
        generator = torch.Generator().manual_seed(seed)
        topics = torch.randn((4, 1, HIDDEN), generator=generator)
        self._states = (topics + torch.randn((4, 16, HIDDEN), generator=generator)).to(device)

    def step(self) -> tuple[str, object]:
        """One operation: its name, and what came of it, comparable over devices."""
        self.now += 1.0
        # In turn, so that what a flush forgets has the same size again soon.
        if self.now % FLUSH_EVERY == 0:
            return "flush", self.cache.flush(f"tenant {self.now // FLUSH_EVERY % TENANTS:.0f}")
        name = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        result: object
        if name == "expire":
            result = self.cache.expire()
        elif name == "lookup":
            result = self.cache.lookup(self._plan(self._number()))
        elif name == "record":
            result = self._record(self._number())
        else:
            number = self._number()
            found = self.cache.neighbours(self._plan(number), self._state(number))
            result = [reference.token_ids for reference in found.references]
        return name, result

    def _number(self) -> int:
        """Every fourth is a new request, the others were most likely seen not long ago."""
        if self._random.random() < 0.25:
            self._newest += 1
            return self._newest
        return max(0, self._newest - int(self._random.expovariate(1 / 500)))

    def _record(self, number: int) -> object:
        length = 1 + number * 37 % 400
        tokens = range(number, number + length)
        fate = self._random.random()
        if fate < 0.1:  # a short budget: another time it is extended
            tokens = tokens[: length // 2 + 1]
        elif fate < 0.12:
            tokens = range(number + 1, number + 1 + length)  # a divergence
        complete = fate >= 0.1 and number % 4 > 0
        state = self._state(number) if number % 5 else None
        return self.cache.record(answered(self._plan(number), tokens, complete), state)

    def _plan(self, number: int) -> RequestPlan:
        session, turns = number // 3, number % 3 + 1
        questions = [_question(session * 3 + turn) for turn in range(turns)]
        prompt = [question * 16 + i for question in questions for i in range(16)]
        return make_plan(
            prompt, plan_id=str(number), arrival=self.now, session_id=f"session {session}",
            turn_starts=tuple(range(0, len(prompt), 16)), cache_salt=f"tenant {session % TENANTS}",
        )  # fmt: skip

    def _state(self, number: int) -> torch.Tensor:
        question = _question(number)
        return self._states[question % 4, question % 16]


def _question(number: int) -> int:
    return number * 2654435761 % 2**32 % 997

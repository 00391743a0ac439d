"""What the worker knows of each request, from its first step to its last. Knows no vLLM."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.signals import EntropyWindow

EXTRA_ARG = "deepseek_flash"  # our place in vLLM's ``extra_args``
MOST_RECORDS = 4096  # of requests that ended, until somebody drains them


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the decoder tells the worker of a request. Travels in ``extra_args``."""

    plan_id: str
    burst_steps: int
    use_dspark: bool
    chain: tuple[int, ...] = ()  # the DFlash cache's continuation, as far as it is only a guess
    # vLLM refuses these two beside speculation; our runner applies them.
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None

    def as_extra_args(self) -> dict[str, Any]:
        return {EXTRA_ARG: asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Wishes | None:
        """None for a request that did not come from our decoder."""
        values = (extra_args or {}).get(EXTRA_ARG)
        if values is None:
            return None
        return cls(**{**values, "chain": tuple(values["chain"])})


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a request ends, and whether drafts leave its answer what it is."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    draftable: bool


class RequestState:
    """One request: how far it is, what it may repeat, and what was learned from it."""

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], limits: Limits, wishes: Wishes
    ) -> None:
        self.request_id = request_id
        self.wishes = wishes
        self.generated = 0
        self.ended = False
        self.recorded = False  # what was learned is told already
        self.entropy_ratio = math.nan  # of the last token, to the mean of the window before it
        self.attention_variance = math.nan  # as last measured
        self.draft: Draft | None = None  # the last one found
        self.matcher = Matcher(prompt_token_ids) if limits.draftable else None
        if self.matcher and wishes.chain:
            self.matcher.add_reference(wishes.chain, Source.CHAIN)
        self.signature: bytes = b""  # float32, last layer's state at the prompt's end
        self.top1: list[float] = []  # of every generated token
        self._limits = limits
        self._prompt_tokens = len(prompt_token_ids)
        self._entropies = EntropyWindow()
        self._proposed: Counter[Source] = Counter()
        self._accepted: Counter[Source] = Counter()
        # By the source that led a draft; less than nothing where it was wrong.
        self.seconds_saved: defaultdict[Source, float] = defaultdict(float)

    @property
    def tokens(self) -> int:
        """Prompt and answer together."""
        return self._prompt_tokens + self.generated

    def room(self, max_model_len: int) -> int:
        """Most draft tokens that the next step can take.

        A step brings one token more than it accepts, and none may lie behind the last one that the
        request or the model allows. Until ``min_tokens`` are there, vLLM forbids the token after a
        draft to be a stop token by the length before the draft: so the step stays below them.
        """
        limits = self._limits
        if self.matcher is None or self.ended:
            return 0
        ends = [limits.max_tokens - self.generated, max_model_len - self.tokens]
        if self.generated < limits.min_tokens:
            ends.append(limits.min_tokens - self.generated)
        return max(0, min(ends) - 1)

    def take(
        self, token_ids: Sequence[int], top1: Sequence[float], entropies: Sequence[float]
    ) -> int:
        """New tokens, at least one, with the facts of the rows they came from.

        Returns:
            How many of them belong to the answer: what follows its end is nobody's.
        """
        count = self._until_end(token_ids)
        token_ids, top1, entropies = token_ids[:count], top1[:count], entropies[:count]
        self.generated += count
        self.top1 += top1
        if self.matcher:
            self.matcher.append(token_ids, top1)
        if count:
            self.entropy_ratio = self._entropies.ratio(entropies)
        return count

    def count(self, length: int, accepted: int) -> None:
        """A step has verified the first ``length`` tokens of the draft."""
        if self.draft:
            self._proposed.update(self.draft.sources[:length])
            self._accepted.update(self.draft.sources[:accepted])

    def _until_end(self, token_ids: Sequence[int]) -> int:
        if self.ended:
            return 0
        left = self._limits.max_tokens - self.generated
        for place, token in enumerate(token_ids, 1):
            if token in self._limits.stop_token_ids or place == left:
                self.ended = True
                return place
        return len(token_ids)

    def record(self, paths: Mapping[Any, int]) -> dict[str, Any]:
        """What was learned, in values that any serialiser takes."""
        return {
            "plan_id": self.wishes.plan_id,
            "choice": _choice(self.request_id, self.wishes.plan_id),
            "tokens": self.generated,
            "top1": self.top1,
            "signature": self.signature,
            "proposed": {source.name.lower(): n for source, n in self._proposed.items()},
            "accepted": {source.name.lower(): n for source, n in self._accepted.items()},
            "seconds_saved": {source.name.lower(): s for source, s in self.seconds_saved.items()},
            "paths": {str(path): n for path, n in paths.items()},
        }


def _choice(request_id: str, plan_id: str) -> int:
    """vLLM names the choices of a request <index>_<id>-<random>, a single one <id>-<random>."""
    index, _, rest = request_id.partition("_")
    return int(index) if index.isdigit() and rest.startswith(plan_id) else 0


@dataclass(slots=True)
class Requests:
    """All requests that the worker has seen and that have not ended, by vLLM's request id."""

    _states: dict[str, RequestState] = field(default_factory=dict)
    _by_plan: dict[str, set[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def add(self, state: RequestState) -> None:
        """A request's first step. Preempted and resumed requests are not added again."""
        self._states[state.request_id] = state
        self._by_plan.setdefault(state.wishes.plan_id, set()).add(state.request_id)

    def remove(self, request_id: str) -> RequestState | None:
        """A request is gone, however it ended."""
        state = self._states.pop(request_id, None)
        if state is not None:
            siblings = self._by_plan[state.wishes.plan_id]
            siblings.discard(request_id)
            if not siblings:
                del self._by_plan[state.wishes.plan_id]
        return state

    def of_plan(self, plan_id: str) -> list[RequestState]:
        """The choices of a plan that have not ended."""
        return [self._states[name] for name in sorted(self._by_plan.get(plan_id, ()))]

    def add_references(
        self, plan_id: str, references: Iterable[tuple[Sequence[int], float]]
    ) -> int:
        """Answers to similar prompts of the same tenant, with their similarity, -1 to 1.

        Returns how many requests took them: none where the plan's have ended.
        """
        takers = [state.matcher for state in self.of_plan(plan_id) if state.matcher]
        for token_ids, similarity in references:
            for matcher in takers:
                matcher.add_reference(token_ids, Source.REFERENCE, max(0.0, similarity))
        return len(takers)

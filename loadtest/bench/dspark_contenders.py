"""The drafting policies that the replay compares: who guesses, and who decides how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from deepseek_flash.dspark import kernels
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.policy import DraftRequest, Policy, load_network

FADING = 0.998  # of the running tokens per cost
CUTS = (0.1, 0.3, 0.5, 0.7)
DEPTH = 24  # of the suffix trees, vLLM's default


class Drafter(Protocol):
    def draft(self, request: DraftRequest) -> Draft: ...


@dataclass(slots=True)
class Flow:
    """Tokens and costs of the last steps: what a unit of cost is worth just now."""

    row_cost: float
    tokens: float = 1.0
    cost: float = 1.0

    def add(self, tokens: int, rows: int) -> None:
        self.tokens = FADING * self.tokens + tokens
        self.cost = FADING * self.cost + 1.0 + self.row_cost * rows

    @property
    def price(self) -> float:
        """What a draft row must bring, in tokens."""
        return self.row_cost * self.tokens / self.cost


Cut = Callable[[Draft, DraftRequest, Flow], int]


def pays(draft: Draft, request: DraftRequest, flow: Flow) -> int:
    """The prefix rule: a row while the chance that it and all before it are right pays for it."""
    survival = 1.0
    for length, probability in enumerate(draft.probabilities):
        survival *= probability
        if survival <= flow.price:
            return length
    return len(draft.probabilities)


def fixed(length: int) -> Cut:
    return lambda draft, request, flow: length


def sure(least: float) -> Cut:
    """While the product of the drafter's own probabilities is at least this."""

    def cut(draft: Draft, request: DraftRequest, flow: Flow) -> int:
        return int((np.cumprod(draft.probabilities) >= least).sum())

    return cut


def thresholds(draft: Draft, request: DraftRequest, flow: Flow) -> int:
    """By the signals alone, as a scheduler without a model would."""
    return 3 if request.entropy_ratio < 1.0 and request.gap > 0.8 else 0


class SuffixDrafter:
    """The follower that PPM, or the longest run alone, thinks most probable."""

    def __init__(self, column: int) -> None:
        """``column``: the feature that ranks, ``kernels.PPM`` or ``kernels.SHARE``."""
        self._column = column
        self._policy = Policy()

    def draft(self, request: DraftRequest) -> Draft:
        draft, matcher = Draft(), request.matcher
        history, scratch = matcher.history, self._policy.scratch
        for place in range(request.limit):
            end = matcher.end + place
            count = kernels.look(history, matcher.references, end, scratch)
            if count == 0:
                break
            values = scratch.features[:count, self._column]
            best = int(values.argmax())
            history.tokens[end + 1] = scratch.ids[best]
            chance = float(values[best])
            draft.token_ids.append(int(scratch.ids[best]))
            draft.probabilities.append(
                chance if self._column == kernels.SHARE else 1.0 / (1.0 + math.exp(-chance))
            )
            draft.sources.append(Source(int(scratch.sources[best])))
        return draft


class ArcticDrafter:
    """arctic-inference's suffix trees, which vLLM's method "suffix" uses."""

    def __init__(self, least: float) -> None:
        """``least``: its ``min_token_prob``."""
        self._least = least
        self._matcher: Matcher | None = None
        self._end = 0

    def draft(self, request: DraftRequest) -> Draft:
        matcher = request.matcher
        if matcher is not self._matcher:
            self._start(matcher)
        new = matcher.history.tokens[self._end + 1 : matcher.end + 1]
        self._trees.add_active_response(0, new)
        self._end = matcher.end
        found = self._trees.speculate(
            0, matcher.history.tokens[2 : matcher.end + 1][-DEPTH:].copy(),
            max_spec_tokens=request.limit, min_token_prob=self._least,
        )  # fmt: skip
        ids = list(found.token_ids)
        return Draft(ids, list(found.probs), [Source.REFERENCE] * len(ids))

    def _start(self, matcher: Matcher) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._matcher, self._trees = matcher, SuffixDecodingCache(DEPTH)
        texts = matcher.references
        for owner in range(int(texts.owner.max(initial=-1)) + 1):
            self._trees.start_request(owner + 1, np.zeros(0, np.int32))
            self._trees.add_active_response(owner + 1, texts.tokens[texts.owner == owner][1:])
            self._trees.stop_request(owner + 1)
        prompt = matcher.end - matcher.generated
        self._trees.start_request(0, matcher.history.tokens[2 : prompt + 1])
        self._end = prompt


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    drafter: Drafter | None
    cut: Cut


def contenders(networks: Mapping[str, Path]) -> list[Contender]:
    """The policies compared; ``networks``: weights of others by name."""
    longest, ppm = SuffixDrafter(kernels.SHARE), SuffixDrafter(kernels.PPM)
    arctic = CUTS if find_spec("arctic_inference") else ()
    return [
        Contender("none", None, fixed(0)),
        Contender("fixed 3", ppm, fixed(3)),
        Contender("fixed 16", ppm, fixed(16)),
        Contender("thresholds", ppm, thresholds),
        *(Contender(f"suffix tree {least}", ArcticDrafter(least), fixed(16)) for least in arctic),
        *(Contender(f"longest run {least}", longest, sure(least)) for least in CUTS),
        *(Contender(f"ppm {least}", ppm, sure(least)) for least in CUTS),
        Contender("ours", Policy(), pays),
        *(
            Contender(name, Policy(load_network(path.read_text())), pays)
            for name, path in networks.items()
        ),
    ]

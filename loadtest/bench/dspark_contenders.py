"""The policies that the replay compares: who drafts, and who decides how much of it is verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from deepseek_flash.dspark import kernels
from deepseek_flash.dspark.controller import (
    Batch,
    Controller,
    Drafts,
    LengthController,
    ThresholdController,
)
from deepseek_flash.dspark.cost import StepCost
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.policy import LEAST, DraftRequest, Policy, load_network

CUTS = (0.1, 0.3, 0.5, 0.7)
DEPTH = 24  # of the suffix trees, vLLM's default
NGRAM_TOKENS, NGRAM_LONGEST = 3, 4  # as dspark_served_sides has it

# A request before its next step, and the tokens that really come: for the oracle alone.
Drafter = Callable[[DraftRequest, Sequence[int]], Draft]


# -- who drafts ------------------------------------------------------------------------------------


def policy(network: kernels.Network | None = None) -> Drafter:
    """Ours."""
    drafts = Policy(network).draft
    return lambda request, truth: drafts(request)


def whole_policy() -> Drafter:
    """Ours, as long as there are candidates: nothing is left to the chances."""
    drafts = Policy().draft
    return lambda request, truth: drafts(replace(request, least_chance=0.0))


def suffix(column: int) -> Drafter:
    """The follower that PPM, or the longest run alone, thinks most probable.

    Args:
        column: the feature that ranks, ``kernels.PPM`` or ``kernels.SHARE``.
    """
    scratch = Policy().scratch

    def drafts(request: DraftRequest, truth: Sequence[int]) -> Draft:
        draft, matcher = Draft(), request.matcher
        history = matcher.history
        for place in range(request.limit):
            end = matcher.end + place
            count = kernels.look(history, matcher.references, end, scratch)
            if count == 0:
                break
            values = scratch.features[:count, column]
            best = int(values.argmax())
            history.tokens[end + 1] = scratch.ids[best]
            chance = float(values[best])
            draft.token_ids.append(int(scratch.ids[best]))
            draft.probabilities.append(
                chance if column == kernels.SHARE else 1.0 / (1.0 + math.exp(-chance))
            )
            draft.sources.append(Source(int(scratch.sources[best])))
        return draft

    return drafts


def arctic(least: float) -> Drafter:
    """arctic-inference's suffix trees, which vLLM's method "suffix" uses.

    Args:
        least: its ``min_token_prob``.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    trees: WeakKeyDictionary[Matcher, tuple[Any, list[int]]] = WeakKeyDictionary()

    def start(matcher: Matcher) -> tuple[Any, list[int]]:
        made, texts = SuffixDecodingCache(DEPTH), matcher.references
        for owner in range(int(texts.owner.max(initial=-1)) + 1):
            made.start_request(owner + 1, np.zeros(0, np.int32))
            made.add_active_response(owner + 1, texts.tokens[texts.owner == owner][1:])
            made.stop_request(owner + 1)
        prompt = matcher.end - matcher.generated
        made.start_request(0, matcher.history.tokens[2 : prompt + 1])
        return made, [prompt]

    def drafts(request: DraftRequest, truth: Sequence[int]) -> Draft:
        matcher = request.matcher
        if matcher not in trees:
            trees[matcher] = start(matcher)
        made, end = trees[matcher]
        tokens = matcher.history.tokens
        made.add_active_response(0, tokens[end[0] + 1 : matcher.end + 1])
        end[0] = matcher.end
        found = made.speculate(
            0, tokens[2 : matcher.end + 1][-DEPTH:].copy(), max_spec_tokens=request.limit,
            min_token_prob=least,
        )  # fmt: skip
        ids = list(found.token_ids)
        return Draft(ids, list(found.probs), [Source.REFERENCE] * len(ids))

    return drafts


def ngram(request: DraftRequest, truth: Sequence[int]) -> Draft:
    """vLLM's: what followed the longest run of the request's own text that ends it too."""
    matcher = request.matcher
    own = matcher.history.tokens[2 : matcher.end + 1].tolist()
    for length in range(NGRAM_LONGEST, 0, -1):
        last = own[-length:]
        for at in range(len(own) - length):  # the first such place
            if own[at : at + length] == last:
                ids = own[at + length :][: min(NGRAM_TOKENS, request.limit)]
                return Draft(ids, [1.0] * len(ids), [Source.HISTORY] * len(ids))
    return Draft()


def oracle(request: DraftRequest, truth: Sequence[int]) -> Draft:
    """The best place to copy from, exactly as far as it is right; never from nowhere.

    A copy may run on into itself.
    """
    matcher, references = request.matcher, request.matcher.references
    own, last = matcher.history.tokens[: matcher.end + 1], int(
        matcher.history.tokens[matcher.end]
    )  # fmt: skip
    texts = [
        (np.concatenate([own, np.array(truth, np.int32)]), np.flatnonzero(own[:-1] == last)),
        (
            references.tokens,
            np.flatnonzero((references.tokens[:-1] == last) & (references.owner[:-1] >= 0)),
        ),
    ]
    length = max(
        (agreeing(text[at + 1 :][: request.limit], truth) for text, places in texts
         for at in places.tolist()), default=0,
    )  # fmt: skip
    return Draft(list(truth[:length]), [1.0] * length, [Source.REFERENCE] * length)


def agreeing(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = enumerate(zip(draft, truth))
    return next((at for at, (a, b) in pairs if a != b), min(len(draft), len(truth)))


# -- who decides -----------------------------------------------------------------------------------


class _Simple:
    """What those need that neither look at costs nor learn."""

    def least_chance(self, requests: int, context: float) -> float:
        return LEAST

    def verified(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Always(_Simple):
    """So many, as far as they are there."""

    length: int

    def decide(self, drafts: Drafts, batch: Batch) -> list[int]:
        return [min(len(it.token_ids), self.length) if it else 0 for it in drafts]


@dataclass(frozen=True)
class Sure(_Simple):
    """While the product of the drafter's own probabilities is at least this."""

    least: float

    def decide(self, drafts: Drafts, batch: Batch) -> list[int]:
        return [
            int((np.cumprod(it.probabilities) >= self.least).sum()) if it else 0 for it in drafts
        ]


# -- the contenders --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    drafter: Callable[[], Drafter] | None  # anew for each run
    controller: Callable[[StepCost], LengthController]


NOTHING = Contender("always 0", None, lambda cost: Always(0))
ORACLE = Contender("oracle", lambda: oracle, lambda cost: Always(10**6))


def contenders(networks: Mapping[str, Path]) -> list[Contender]:
    """The policies compared; ``networks``: weights of others by name."""
    longest, ppm = (partial(suffix, column) for column in (kernels.SHARE, kernels.PPM))
    found = [
        *(Contender(f"always {n}", whole_policy, _always(n)) for n in (3, 16)),
        Contender("thresholds", policy, lambda cost: ThresholdController()),
        Contender("ngram", lambda: ngram, _always(NGRAM_TOKENS)),
    ]
    for least in CUTS:
        if find_spec("arctic_inference"):
            found.append(Contender(f"suffix tree {least}", partial(arctic, least), _always(16)))
        found += [
            Contender(f"{name} {least}", drafter, _sure(least))
            for name, drafter in (("longest run", longest), ("ppm", ppm))
        ]
    found.append(Contender("ours", policy, Controller))
    for name, path in networks.items():
        network = load_network(path.read_text())
        found.append(Contender(name, partial(policy, network), Controller))
    return found


def _always(length: int) -> Callable[[StepCost], LengthController]:
    return lambda cost: Always(length)


def _sure(least: float) -> Callable[[StepCost], LengthController]:
    return lambda cost: Sure(least=least)

"""Which tokens to guess next, and how likely each is to be right.

Candidates come from the matcher: what followed where the last tokens were seen before. A small
network scores each by how often, how exactly, in which texts and how surely it was seen, and by
what the last pass thought of it; the best is appended to the draft, and so on. How much of the
draft pays is not decided here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch

from deepseek_flash.dspark import kernels
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.kernels import FEATURES, NAMES, Network, Scratch
from deepseek_flash.dspark.matcher import ROOM, Matcher
from deepseek_flash.dspark.signals import row_facts, verify

__all__ = ["Draft", "DraftRequest", "Policy", "Source", "load_network", "warm_up"]

LEAST = 0.02  # chance that all of a draft is accepted; below it nothing pays anywhere
WEIGHTS = "weights.json"

Lookup = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]


@dataclass(slots=True)
class DraftRequest:
    """One running request, before its next pass."""

    matcher: Matcher
    limit: int  # most draft tokens now; 0: none
    burst_limit: int  # most draft tokens that rest on the request's own history alone
    last_logprobs: Lookup  # the last pass's log-probabilities of these tokens, NaN: not known
    entropy_ratio: float = math.nan  # the three signals of the last pass, NaN: not known
    gap: float = math.nan
    attention_variance: float = math.nan
    # That all of a draft is accepted, below which it goes on for no more.
    least_chance: float = LEAST


class Policy:
    """Drafts for one request after another. Not for several threads at once."""

    def __init__(self, network: Network | None = None) -> None:
        """``network``: None: the one in this package."""
        self._network = load_network() if network is None else network
        self.scratch = make_scratch()

    def draft(self, request: DraftRequest) -> Draft:
        """As long as it may pay at all, at most ``request.limit``."""
        limit = min(request.limit, ROOM)
        count = self._look(request) if limit > 0 else 0
        if count == 0:
            return Draft()
        matcher, drafted = request.matcher, self.scratch.draft
        length = kernels.extend(
            matcher.history, matcher.references, matcher.end, self._network, self.scratch,
            count, limit, request.burst_limit, request.least_chance,
        )  # fmt: skip
        draft = Draft(
            [int(token) for token in drafted[:length, 0]],
            drafted[:length, 1].tolist(),
            [Source(int(source)) for source in drafted[:length, 2]],
        )
        matcher.expect(draft)
        return draft

    def follow(
        self, request: DraftRequest, truth: Sequence[int]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Candidates and their features at each place of the draft, while the best is right.

        For training: what ``draft`` sees, the first wrong place included. Sources do not count.

        Returns:
            [candidates] and [candidates, features] of each place.
        """
        matcher, scratch, seen = request.matcher, self.scratch, []
        survival = 1.0
        count = self._look(request)
        before = float(scratch.context[kernels.BEFORE])
        for place, token in enumerate(truth[: request.limit]):
            if place:
                matcher.history.tokens[matcher.end + place] = truth[place - 1]
                end = matcher.end + place
                count = kernels.look(matcher.history, matcher.references, end, scratch)
            if count == 0:
                break
            kernels.complete(scratch, count, place, survival, before)
            kernels.score(scratch, self._network, count)
            ids = scratch.ids[:count].copy()
            seen.append((ids, scratch.features[:count].copy()))
            best = int(scratch.chances[:count].argmax())
            if ids[best] != token:
                break
            before = float(scratch.chances[best])
            survival *= before
        return seen

    def _look(self, request: DraftRequest) -> int:
        """Candidates of the first place, with all that is known of them and of the request."""
        matcher, scratch = request.matcher, self.scratch
        count: int = kernels.look(matcher.history, matcher.references, matcher.end, scratch)
        if not count:
            return 0
        context = scratch.context
        context[kernels.GENERATED] = math.log1p(matcher.generated)
        context[kernels.RESIDUAL] = matcher.surprise
        context[kernels.BEFORE] = _known(matcher.confidence, 0.5)
        # Their usual values where they are not known.
        ratio = min(_known(request.entropy_ratio, 1.0), 8.0)
        context[kernels.SIGNALS] = ratio
        context[kernels.SIGNALS + 1] = _known(request.gap, 0.5)
        context[kernels.SIGNALS + 2] = _known(request.attention_variance, 0.0) * 100.0
        # One by one: numpy takes longer for a few numbers.
        logprobs = request.last_logprobs(scratch.ids[:count]).tolist()
        for row, logprob in enumerate(logprobs):
            known = not math.isnan(logprob)
            scratch.features[row, kernels.LOGPROB] = max(logprob, kernels.NEVER) if known else 0.0
            scratch.features[row, kernels.LOGPROB + 1] = known
        return count


def _known(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def make_scratch() -> Scratch:
    places = kernels.HISTORY_PLACES + kernels.REFERENCE_PLACES
    return Scratch(
        numbers=np.zeros((places, 4), np.int32),
        values=np.zeros((places, 3), np.float32),
        context=np.zeros(FEATURES, np.float32),
        ids=np.zeros(kernels.CANDIDATES, np.int64),
        sources=np.zeros(kernels.CANDIDATES, np.int32),
        features=np.zeros((kernels.CANDIDATES, FEATURES), np.float32),
        chances=np.zeros(kernels.CANDIDATES, np.float32),
        draft=np.zeros((ROOM, 3), np.float64),
    )


def load_network(text: str | None = None) -> Network:
    """The weights of a JSON text; None: those of this package.

    Raises ValueError: they were made for other features than these.
    """
    if text is None:
        text = files(__package__).joinpath(WEIGHTS).read_text(encoding="utf-8")
    weights = json.loads(text)
    if tuple(weights["features"]) != NAMES:
        raise ValueError(f"{WEIGHTS}: made for other features; train again")
    arrays = {name: np.array(weights[name], np.float32) for name in Network._fields}
    arrays["inner"] = arrays["inner"].reshape(FEATURES, -1)
    return Network(**arrays)


def warm_up() -> float:
    """Compile, or load from numba's cache, all that the first request needs; returns seconds."""
    begin = time.perf_counter()
    matcher = Matcher(range(8))
    matcher.append([3, 4], [0.5, 0.5])
    matcher.add_reference([3, 4, 5, 6], Source.REFERENCE)
    Policy().draft(DraftRequest(matcher, 4, 4, lambda ids: np.zeros(len(ids), np.float32)))
    row_facts(torch.zeros(1, 128), [0])
    verify(torch.zeros(1, 128), [0], [])
    return time.perf_counter() - begin

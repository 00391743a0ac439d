"""The compiled part of the drafting policy: hash chains, features, network, greedy extension.

All in one file: numba's cache of a function knows the time of that function's own file only, and
would keep code that was inlined from another one and has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from deepseek_flash.dspark.drafts import Source

Function = TypeVar("Function", bound=Callable[..., Any])
Integers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

ORDERS = (1, 2, 4, 8)  # lengths of the runs that have chains
WINDOW = 32  # tokens that a place is compared over
DECAY = 0.93  # weight of the token before, against 1 for the token itself
HISTORY_PLACES, REFERENCE_PLACES = 24, 48  # looked at, at most
DISTINCT, CANDIDATES = 24, 6  # next tokens told apart, and those of them that are scored
LONGEST, DISCOUNT = 8, 0.6  # of PPM
SHARPNESS = 8.0  # of the vote by agreement
NEVER = -10.0  # log-probability below which differences say nothing

GROUPS = {
    "ppm": ("ppm", "ppm_margin"),
    "match": ("match_history", "match_reference", "match_chain"),
    "counts": ("count_history", "count_reference", "share", "distinct"),
    "support": ("owners", "owner_share", "similarity"),
    "agreement": ("agreement_history", "agreement_reference", "vote", "agreement_margin"),
    "confidence": ("confidence", "confidence_known", "confidence_before"),
    "previous": ("logprob", "logprob_known"),
    "position": ("repeats", "position", "survival", "generated"),
    "entropy_ratio": ("entropy_ratio",),
    "gap": ("gap",),
    "attention_variance": ("attention_variance",),
    "feedback": ("residual",),
}
NAMES = tuple(name for group in GROUPS.values() for name in group)
FEATURES = len(NAMES)
# Columns that are the same for all candidates of a position; the caller fills ``Scratch.context``.
GENERATED, SIGNALS = NAMES.index("generated"), NAMES.index("entropy_ratio")
RESIDUAL, BEFORE = NAMES.index("residual"), NAMES.index("confidence_before")
LOGPROB, REPEATS = NAMES.index("logprob"), NAMES.index("repeats")
PPM, SHARE = NAMES.index("ppm"), NAMES.index("share")

_HISTORY, _REFERENCE, _CHAIN = int(Source.HISTORY), int(Source.REFERENCE), int(Source.CHAIN)
_NEXT, _MATCHED, _SOURCE, _OWNER = range(4)  # columns of Scratch.numbers
_AGREED, _CONFIDENCE, _SIMILARITY = range(3)  # columns of Scratch.values


class Texts(NamedTuple):
    """Tokens and their chains. Two of -1 stand before each text, so that no look back leaves it."""

    tokens: Integers  # [n]
    top1: Floats  # [n], probability of the best token when this one came; NaN: unknown
    owner: Integers  # [n], row of ``sources`` and ``similarity``; -1: context only
    links: Integers  # [n, orders], the place before in the same bucket, or -1
    heads: Integers  # [orders, 2^k], the newest place of each bucket, or -1
    sources: Integers  # [texts]
    similarity: Floats  # [texts]


class Network(NamedTuple):
    """score = x.skip + relu(x.inner + inner_bias).outer + bias; no inner units: a regression."""

    skip: Floats  # [features]
    inner: Floats  # [features, hidden]
    inner_bias: Floats  # [hidden]
    outer: Floats  # [hidden]
    bias: Floats  # [1]


class Scratch(NamedTuple):
    """What the kernels write. One a thread."""

    numbers: Integers  # [places, 4]
    values: Floats  # [places, 3]
    context: Floats  # [features]
    ids: npt.NDArray[np.int64]  # [candidates]
    sources: Integers  # [candidates]
    features: Floats  # [candidates, features]
    chances: Floats  # [candidates]
    draft: npt.NDArray[np.float64]  # [limit, 3]: token, probability, source


def compiled(function: Function, **options: Any) -> Function:
    """``numba.njit``, cached on disk where there is a place for it."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither this directory nor the user's home can be written
        made = numba.njit(**options)(function)
    return cast(Function, made)


# -- hash chains as in LZ77: a bucket names its newest place, each place the one before it ---------


@compiled
def _buckets(tokens: Any, end: Any, mask: Any, found: Any) -> Any:
    """Fill in the buckets of the runs that end at ``end``; returns how many there are."""
    mixed = np.uint64(0)
    order = 0
    for length in range(1, ORDERS[-1] + 1):
        if length >= end:
            break
        mixed += np.uint64(tokens[end - length + 1] + 2)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        if length == ORDERS[order]:
            found[order] = np.int64(mixed & np.uint64(mask))
            order += 1
    return order


@compiled
def index(texts: Any, begin: Any, end: Any) -> Any:
    """Chain the places ``begin`` to ``end`` - 1 that have an owner and a successor."""
    found = np.empty(len(ORDERS), np.int64)
    for place in range(begin, end):
        if texts.owner[place] < 0 or texts.tokens[place + 1] < 0:
            continue
        for order in range(_buckets(texts.tokens, place, texts.heads.shape[1] - 1, found)):
            bucket = found[order]
            texts.links[place, order] = texts.heads[order, bucket]
            texts.heads[order, bucket] = place


@compiled
def _same(text: Any, here: Any, tokens: Any, there: Any) -> Any:
    return text[here] == tokens[there] and text[here] >= 0


@compiled
def _matched(text: Any, here: Any, tokens: Any, there: Any, most: Any) -> Any:
    length = 0
    while length < most and _same(text, here - length, tokens, there - length):
        length += 1
    return length


@compiled
def _agreement(text: Any, here: Any, tokens: Any, there: Any) -> Any:
    """0 to 1: how well the tokens up to here and there agree, the near ones counting most.

    One that differs, or up to two that only one side has, cost their weight and nothing more.
    """
    score, weight, total = 0.0, 1.0, (1.0 - DECAY**WINDOW) / (1.0 - DECAY)
    for _ in range(WINDOW):
        if text[here] < 0 or tokens[there] < 0:
            break
        if text[here] == tokens[there]:
            score += weight
            here, there = here - 1, there - 1
        elif _same(text, here - 1, tokens, there - 1):
            here, there = here - 1, there - 1
        elif _same(text, here - 1, tokens, there):
            here -= 1
        elif _same(text, here, tokens, there - 1):
            there -= 1
        elif _same(text, here - 2, tokens, there):
            here -= 2
        elif _same(text, here, tokens, there - 2):
            there -= 2
        else:
            here, there = here - 1, there - 1
        weight *= DECAY
    return score / total


@compiled
def _gather(texts: Any, text: Any, end: Any, scratch: Any, begin: Any, most: Any) -> Any:
    """Places where the last tokens up to ``end`` were seen before, the longest runs first."""
    found = np.empty(len(ORDERS), np.int64)
    count = begin
    above = WINDOW + 1
    for order in range(_buckets(text, end, texts.heads.shape[1] - 1, found) - 1, -1, -1):
        place = texts.heads[order, found[order]]
        steps = 0
        while place >= 0 and count < begin + most and steps < 2 * most:
            length = _matched(text, end, texts.tokens, place, min(above, WINDOW))
            if ORDERS[order] <= length < above:
                owner = texts.owner[place]
                scratch.numbers[count, _NEXT] = texts.tokens[place + 1]
                scratch.numbers[count, _MATCHED] = length
                scratch.numbers[count, _SOURCE] = texts.sources[owner]
                scratch.numbers[count, _OWNER] = owner
                scratch.values[count, _AGREED] = _agreement(text, end, texts.tokens, place)
                scratch.values[count, _CONFIDENCE] = texts.top1[place + 1]
                scratch.values[count, _SIMILARITY] = texts.similarity[owner]
                count += 1
            place = texts.links[place, order]
            steps += 1
        above = ORDERS[order]
    return count


# -- candidates and their features -----------------------------------------------------------------


@compiled
def _distinct(numbers: Any, places: Any, tokens: Any, of_place: Any) -> Any:
    """The different next tokens, and which of them each place names (-1: one too many)."""
    count = 0
    for place in range(places):
        token = numbers[place, _NEXT]
        which = 0
        while which < count and tokens[which] != token:
            which += 1
        if which == count and count < DISTINCT:
            tokens[count] = token
            count += 1
        of_place[place] = which if which < count else -1
    return count


@compiled
def _ppm(numbers: Any, places: Any, of_place: Any, count: Any, p: Any) -> Any:
    """Probabilities by partial matching, with absolute discounting, over runs of 1 to LONGEST.

    Returns the share of each token among the longest runs, in the second row of ``p``.
    """
    seen = np.zeros((LONGEST + 1, count), np.float32)
    for place in range(places):
        if of_place[place] >= 0:
            seen[min(numbers[place, _MATCHED], LONGEST), of_place[place]] += 1.0
    for length in range(LONGEST - 1, 0, -1):
        seen[length] += seen[length + 1]
    p[:, :count] = 0.0
    for length in range(1, LONGEST + 1):
        total = seen[length].sum()
        if total == 0.0:
            break
        escape = DISCOUNT * np.count_nonzero(seen[length]) / total
        for which in range(count):
            kept = max(seen[length, which] - DISCOUNT, 0.0) / total
            p[0, which] = kept + escape * p[0, which]
            p[1, which] = seen[length, which] / total


@compiled
def _logit(p: Any) -> Any:
    return math.log(max(p, 1e-4) / max(1.0 - p, 1e-4))


@compiled
def _bits(mask: Any) -> Any:
    count = 0
    while mask:
        mask &= mask - np.uint64(1)
        count += 1
    return count


@compiled
def look(history: Any, references: Any, end: Any, scratch: Any) -> Any:
    """Find the candidates to follow the token at ``end``, and describe them.

    Fills ``ids``, ``sources`` and ``features`` of the scratch, but for what the caller knows;
    returns how many candidates there are.
    """
    text = history.tokens
    places = _gather(history, text, end, scratch, 0, HISTORY_PLACES)
    places = _gather(references, text, end, scratch, places, REFERENCE_PLACES)
    tokens, of_place = np.empty(DISTINCT, np.int64), np.empty(places, np.int64)
    p = np.empty((2, DISTINCT), np.float32)
    distinct = _distinct(scratch.numbers, places, tokens, of_place)
    _ppm(scratch.numbers, places, of_place, distinct, p)
    sums = _sums(scratch, places, of_place, distinct)
    order = np.argsort(-p[0, :distinct])
    count = min(distinct, CANDIDATES)
    for rank in range(count):
        which = order[rank]
        scratch.ids[rank] = tokens[which]
        scratch.sources[rank] = np.int32(sums[which, _BEST_SOURCE])
        _describe(scratch.features[rank], sums, p, which, order, distinct)
        scratch.features[rank, REPEATS] = tokens[which] == text[end]
    return count


_COUNT, _LONGEST, _BEST, _VOTE = 0, 3, 6, 9  # of Source 0, 1, 2; _VOTE alone
_KNOWN, _CONFIDENT, _SIMILAR, _OWNERS, _BEST_SOURCE = 10, 11, 12, 13, 14


@compiled
def _sums(scratch: Any, places: Any, of_place: Any, distinct: Any) -> Any:
    """What the places of each candidate have in common; all of them in the last row."""
    sums = np.zeros((distinct + 1, 15), np.float32)
    owners = np.zeros(distinct + 1, np.uint64)
    strongest = np.zeros(distinct, np.float32)
    for place in range(places):
        which = of_place[place]
        if which < 0:
            continue
        matched, source, owner = scratch.numbers[place, 1:]
        agreed, confidence, similarity = scratch.values[place]
        vote = math.exp(SHARPNESS * agreed)
        for row in (which, distinct):
            sums[row, _COUNT + source] += 1.0
            sums[row, _LONGEST + source] = max(sums[row, _LONGEST + source], matched)
            sums[row, _BEST + source] = max(sums[row, _BEST + source], agreed)
            sums[row, _VOTE] += vote
            if confidence == confidence:
                sums[row, _KNOWN] += vote
                sums[row, _CONFIDENT] += vote * confidence
            if source != _HISTORY:
                sums[row, _SIMILAR] = max(sums[row, _SIMILAR], similarity)
                owners[row] |= np.uint64(1) << np.uint64(owner & 63)
        strength = matched + agreed
        if strength > strongest[which] or (
            strength == strongest[which] and source > sums[which, _BEST_SOURCE]
        ):
            strongest[which] = strength
            sums[which, _BEST_SOURCE] = source
    for row in range(distinct + 1):
        sums[row, _OWNERS] = _bits(owners[row])
    return sums


@compiled
def _describe(x: Any, sums: Any, p: Any, which: Any, order: Any, distinct: Any) -> Any:
    """One candidate's features, in the order of NAMES; the caller adds what all have in common."""
    mine, total = sums[which], sums[distinct]
    rival, rival_agreed = 0.0, 0.0
    for other in range(distinct):
        if other != which:
            rival = max(rival, p[0, other])
            rival_agreed = max(rival_agreed, sums[other, _BEST : _BEST + 3].max())
    x[0] = _logit(p[0, which])
    x[1] = x[0] - _logit(rival)
    for source in range(3):
        x[2 + source] = math.log2(1.0 + mine[_LONGEST + source])
    x[5] = math.log1p(mine[_COUNT])
    x[6] = math.log1p(mine[_COUNT + 1] + mine[_COUNT + 2])
    x[7] = p[1, which]
    x[8] = math.log1p(distinct)
    x[9] = math.log1p(mine[_OWNERS])
    x[10] = mine[_OWNERS] / max(total[_OWNERS], 1.0)
    x[11] = mine[_SIMILAR]
    x[12] = mine[_BEST]
    x[13] = max(mine[_BEST + 1], mine[_BEST + 2])
    x[14] = mine[_VOTE] / total[_VOTE]
    x[15] = max(x[12], x[13]) - rival_agreed
    x[16] = mine[_CONFIDENT] / mine[_KNOWN] if mine[_KNOWN] > 0.0 else 0.0
    x[17] = mine[_KNOWN] / mine[_VOTE]


# -- scoring and extension -------------------------------------------------------------------------


@compiled
def score(scratch: Any, network: Any, count: Any) -> Any:
    """Fill ``chances``: a softmax over the candidates and "none of them", which scores 0."""
    hidden = np.empty_like(network.inner_bias)
    total = 1.0
    for row in range(count):
        x = scratch.features[row]
        value = network.bias[0]
        hidden[:] = network.inner_bias
        for feature in range(FEATURES):
            value += x[feature] * network.skip[feature]
            for unit in range(len(hidden)):
                hidden[unit] += x[feature] * network.inner[feature, unit]
        for unit in range(len(hidden)):
            value += max(hidden[unit], np.float32(0.0)) * network.outer[unit]
        scratch.chances[row] = math.exp(min(value, np.float32(30.0)))
        total += scratch.chances[row]
    for row in range(count):
        scratch.chances[row] /= total


@compiled
def complete(scratch: Any, count: Any, position: Any, survival: Any, before: Any) -> Any:
    """Fill in the features that all candidates of a position share."""
    for row in range(count):
        x = scratch.features[row]
        x[REPEATS + 1] = position
        x[REPEATS + 2] = math.log(survival)
        x[GENERATED] = scratch.context[GENERATED]
        x[SIGNALS : SIGNALS + 3] = scratch.context[SIGNALS : SIGNALS + 3]
        x[RESIDUAL] = scratch.context[RESIDUAL]
        x[BEFORE] = before
        if position > 0:
            x[LOGPROB : LOGPROB + 2] = 0.0


@compiled
def extend(
    history: Any, references: Any, end: Any, network: Any, scratch: Any,
    count: Any, limit: Any, burst_limit: Any, least: Any,
) -> Any:  # fmt: skip
    """Draft greedily after the token at ``end``, from the candidates that ``look`` has left.

    Stops where the chance that all is accepted falls below ``least``, but not before the first
    token: whether that would have been right is a feature of later ones. The history's tokens must
    have room for ``limit`` more behind ``end``. Returns the draft's length.
    """
    survival, before = 1.0, scratch.context[BEFORE]
    for position in range(limit):
        if position > 0:
            count = look(history, references, end, scratch)
        complete(scratch, count, position, survival, before)
        score(scratch, network, count)
        best = -1
        for row in range(count):
            allowed = scratch.sources[row] != _HISTORY or burst_limit > 0
            if allowed and (best < 0 or scratch.chances[row] > scratch.chances[best]):
                best = row
        if best < 0 or (position > 0 and survival * scratch.chances[best] < least):
            return position
        before = scratch.chances[best]
        survival *= before
        burst_limit -= scratch.sources[best] == _HISTORY
        end += 1
        history.tokens[end] = scratch.ids[best]
        scratch.draft[position, 0] = scratch.ids[best]
        scratch.draft[position, 1] = before
        scratch.draft[position, 2] = scratch.sources[best]
    return limit

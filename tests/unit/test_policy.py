"""Drafts: their limits, their probabilities, and what is asked of the last pass."""

import functools
import json
import math
from importlib.resources import files

import numpy as np
import pytest
from deepseek_flash.dspark import kernels
from deepseek_flash.dspark.kernels import CANDIDATES, FEATURES, GROUPS, NAMES
from deepseek_flash.dspark.matcher import ROOM, Matcher, Source
from deepseek_flash.dspark.policy import (
    WEIGHTS,
    DraftRequest,
    Policy,
    load_network,
    make_scratch,
    warm_up,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st

POLICY = Policy()
tokens = st.lists(st.integers(0, 5), min_size=1, max_size=30)


def nothing_known(ids):
    return np.full(len(ids), np.nan, np.float32)


def request(
    matcher, limit=16, burst_limit=16, last_logprobs=nothing_known, least_chance=0.0, **signals
):
    return DraftRequest(
        matcher, limit, burst_limit, last_logprobs, least_chance=least_chance, **signals
    )


def sure_matcher():
    """After 1 to 30 in the prompt and two references, 1 to 10 again."""
    text = list(range(1, 31))
    matcher = Matcher(text)
    matcher.add_reference(text, Source.REFERENCE, 0.9, [0.9] * 30)
    matcher.add_reference(text, Source.CHAIN)
    matcher.append(text[:10], [0.9] * 10)
    return matcher


@given(tokens, tokens, tokens, st.integers(0, 20), st.integers(0, 20))
def test_a_draft_keeps_its_limits(prompt, answer, reference, limit, burst_limit):
    matcher = Matcher(prompt)
    matcher.append(answer, [0.5] * len(answer))
    matcher.add_reference(reference, Source.REFERENCE, 0.5)
    draft = POLICY.draft(request(matcher, limit, burst_limit))
    assert len(draft.token_ids) == len(draft.probabilities) == len(draft.sources) <= limit
    assert draft.sources.count(Source.HISTORY) <= burst_limit
    assert all(0 < p <= 1 for p in draft.probabilities)
    assert set(draft.token_ids) <= {*prompt, *answer, *reference}
    assert all(type(token) is int for token in draft.token_ids)


@given(tokens, tokens)
def test_a_draft_leaves_no_trace(prompt, answer):
    matcher = Matcher(prompt)
    matcher.append(answer, [0.5] * len(answer))
    first = POLICY.draft(request(matcher))
    assert POLICY.draft(request(matcher)) == first
    matcher.append([6], [0.5])
    other = Matcher(prompt)
    other.append([*answer, 6], [0.5] * (len(answer) + 1))
    matcher.surprise = 0.0
    assert POLICY.draft(request(matcher)) == POLICY.draft(request(other))


def test_what_is_sure_is_drafted_to_the_limit():
    draft = Policy().draft(request(sure_matcher()))
    assert draft.token_ids == list(range(11, 27))
    assert min(draft.probabilities) > 0.7
    assert len(Policy().draft(request(sure_matcher(), limit=5)).token_ids) == 5


def test_sources_tell_where_a_token_was_found():
    text = list(range(1, 31))
    for source in (Source.REFERENCE, Source.CHAIN):
        matcher = Matcher([40])
        matcher.add_reference(text, source)
        matcher.append([1, 2], [0.9] * 2)
        assert set(POLICY.draft(request(matcher, burst_limit=0)).sources) == {source}
    own = Matcher(text)
    own.append([1, 2], [0.9] * 2)
    assert POLICY.draft(request(own, burst_limit=0)).token_ids == []
    assert POLICY.draft(request(own, burst_limit=3)).sources == [Source.HISTORY] * 3


def test_a_draft_stops_where_nothing_would_pay():
    zeros = functools.partial(np.zeros, dtype=np.float32)
    even = kernels.Network(  # one candidate comes or does not: 0.5
        zeros(FEATURES), zeros((FEATURES, 0)), zeros(0), zeros(0), zeros(1)
    )
    for least, tokens in ((0.6, 1), (0.5, 1), (0.2, 2), (0.1, 3)):
        draft = Policy(even).draft(request(sure_matcher(), limit=ROOM, least_chance=least))
        assert draft.probabilities == [0.5] * tokens


def test_without_candidates_or_limit_nothing_is_asked():
    def unasked(ids):
        raise AssertionError

    assert POLICY.draft(request(Matcher([1, 2, 3]), last_logprobs=unasked)).token_ids == []
    assert POLICY.draft(request(sure_matcher(), 0, last_logprobs=unasked)).token_ids == []
    assert POLICY.draft(request(Matcher([]), last_logprobs=unasked)).token_ids == []


def test_the_last_pass_is_asked_once_for_the_candidates_and_decides():
    asked = []

    def favouring(favourite):
        def logprobs(ids):
            asked.append(ids.tolist())
            return np.where(ids == favourite, -0.1, -9.0).astype(np.float32)

        return logprobs

    matcher = Matcher([1, 2, 8, 1, 3, 8, 1])
    drafts = [POLICY.draft(request(matcher, last_logprobs=favouring(t))) for t in (2, 3)]
    assert [sorted(ids) for ids in asked] == [[2, 3]] * 2
    assert [draft.token_ids[0] for draft in drafts] == [2, 3]


def test_a_matcher_learns_what_came_of_its_draft():
    matcher = sure_matcher()
    expected = POLICY.draft(request(matcher)).probabilities[0]
    matcher.append([99], [0.9])
    assert matcher.surprise == pytest.approx(-0.2 * expected)


def test_unknown_signals_are_as_good_as_usual_ones():
    usual = {"entropy_ratio": 1.0, "gap": 0.5, "attention_variance": 0.0}
    known = POLICY.draft(request(sure_matcher(), **usual))
    assert POLICY.draft(request(sure_matcher())) == known
    wild = POLICY.draft(request(sure_matcher(), entropy_ratio=math.inf, gap=0.0))
    assert all(0 < p <= 1 for p in wild.probabilities)


@given(st.data())
def test_the_kernel_scores_as_written_down(data):
    count = data.draw(st.integers(1, CANDIDATES))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    hidden = data.draw(st.sampled_from((0, 1, 7)))
    network = kernels.Network(
        *(generator.normal(size=shape).astype(np.float32)
          for shape in (FEATURES, (FEATURES, hidden), hidden, hidden, 1))
    )  # fmt: skip
    scratch = make_scratch()
    scratch.features[:] = generator.normal(size=scratch.features.shape)
    kernels.score(scratch, network, count)
    x = scratch.features[:count].astype(np.float64)
    scores = x @ network.skip + network.bias
    scores += np.maximum(x @ network.inner + network.inner_bias, 0) @ network.outer
    odds = np.exp(np.minimum(scores, 30))
    assert scratch.chances[:count] == pytest.approx(odds / (1 + odds.sum()), rel=1e-3)


def test_the_network_is_small_and_made_for_these_features():
    network = load_network()
    assert 0 < sum(array.size for array in network) < 50_000
    assert all(np.isfinite(array).all() for array in network)
    weights = json.loads(
        files("deepseek_flash.dspark").joinpath(WEIGHTS).read_text(encoding="utf-8")
    )
    weights["features"][0] = "another"
    with pytest.raises(ValueError, match="other features"):
        load_network(json.dumps(weights))


def test_every_feature_is_in_one_group():
    assert len(set(NAMES)) == len(NAMES) == sum(map(len, GROUPS.values()))


def test_warm_up_says_how_long_it_took():
    assert warm_up() > 0

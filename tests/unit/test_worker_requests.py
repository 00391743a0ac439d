"""The worker's books of its requests, and the rows of logits that their tokens came from."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.worker.requests import Limits, Requests, RequestState, Wishes
from deepseek_flash.worker.rows import Rows
from hypothesis import given
from hypothesis import strategies as st

EOS = 2
PROMPT = [5, 6, 7, 8]


def wishes(plan_id="plan", **values):
    defaults = {"burst_steps": 3, "use_dspark": True}
    return Wishes(plan_id=plan_id, **{**defaults, **values})


def state(request_id="plan-x", max_tokens=100, min_tokens=0, draftable=True, **values):
    limits = Limits(max_tokens, min_tokens, frozenset({EOS}), draftable)
    return RequestState(request_id, PROMPT, limits, wishes(**values))


def take(request, tokens, entropies=None):
    return request.take(tokens, [0.5] * len(tokens), entropies or [1.0] * len(tokens))


# -- what the decoder tells ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, {7: -1.5, 0: 2.0}])
def test_wishes_survive_the_way_through_vllm(bias):
    import msgspec

    told = wishes(chain=(1, 2, 3), min_p=0.1, logit_bias=bias)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(told.as_extra_args()))
    assert Wishes.from_extra_args(travelled) == told


def test_a_request_of_somebody_else_has_no_wishes():
    assert Wishes.from_extra_args(None) is None
    assert Wishes.from_extra_args({"other": 1}) is None


# -- how long a draft may be -----------------------------------------------------------------------


@given(
    max_tokens=st.integers(1, 30), min_tokens=st.integers(0, 30), context=st.integers(6, 40),
    generated=st.integers(1, 30),
)  # fmt: skip
def test_no_step_goes_beyond_what_the_request_or_the_model_allows(
    max_tokens, min_tokens, context, generated
):
    request = state(max_tokens=max_tokens, min_tokens=min_tokens)
    take(request, [9] * generated)
    room = request.room(context)
    most = room + 1  # a step brings the token after the draft, too
    if room:
        assert generated + most <= max_tokens
        assert len(PROMPT) + generated + most <= context
        if generated < min_tokens:  # its last token still is one that may not be a stop token
            assert generated + most <= min_tokens
        # and one more would break one of them
        assert (
            generated + most == max_tokens
            or len(PROMPT) + generated + most == context
            or (generated < min_tokens and generated + most == min_tokens)
        )


def test_no_drafts_where_they_would_change_the_answer():
    request = state(draftable=False)
    take(request, [9])
    assert request.matcher is None and request.room(1000) == 0


def test_no_drafts_after_the_end():
    request = state()
    take(request, [9, EOS])
    assert request.ended and request.room(1000) == 0


# -- where an answer ends --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "counted"),
    [
        ([9, 9, 9], 100, 3),
        ([9, EOS, 9], 100, 2),  # EOS inside a draft: what follows is nobody's
        ([EOS], 100, 1),
        ([9, 9, 9], 2, 2),
        ([9, 9], 2, 2),
    ],
)
def test_tokens_behind_the_end_do_not_count(tokens, max_tokens, counted):
    request = state(max_tokens=max_tokens)
    assert take(request, tokens) == counted
    assert request.generated == counted == len(request.top1) == request.matcher.generated
    assert request.ended == (EOS in tokens or counted == max_tokens)
    assert take(request, [9]) == (0 if request.ended else 1)


def test_history_grows_once_by_each_token():
    request = state()
    for token in (11, 12, 13):
        take(request, [token])
    tokens = request.matcher.history.tokens[: request.matcher.end + 1]
    assert tokens[tokens >= 0].tolist() == [*PROMPT, 11, 12, 13]


def test_the_entropy_ratio_compares_with_the_tokens_before():
    request = state(max_tokens=10**6)
    for entropies, ratio in (([2.0], 1.0), ([4.0], 2.0), ([3.0, 6.0], 2.0)):
        take(request, [9] * len(entropies), entropies)
        assert request.entropy_ratio == pytest.approx(ratio)


# -- the books -------------------------------------------------------------------------------------


def test_nothing_is_left_of_requests_that_are_gone():
    requests, names = Requests(), []
    random.seed(0)
    for number in range(200):
        name = f"{number % 3}_plan{number // 3}-r"
        requests.add(state(name, plan_id=f"plan{number // 3}"))
        names.append(name)
        if random.random() < 0.6:
            gone = names.pop(random.randrange(len(names)))
            assert requests.remove(gone).request_id == gone
            assert requests.remove(gone) is None  # twice is harmless
    assert len(requests) == len(names)
    for name in names:
        requests.remove(name)
    assert len(requests) == 0 and not requests._by_plan


def test_references_reach_every_choice_that_still_runs():
    requests = Requests()
    first, second = state("0_plan-a"), state("1_plan-a")
    requests.add(first)
    requests.add(second)
    requests.add(state("other-a", plan_id="other"))
    requests.remove("0_plan-a")
    assert requests.add_references("plan", [([1, 2, 3], 0.9), ([4, 5], -0.5)]) == 1
    assert requests.add_references("gone", [([1], 0.5)]) == 0
    found = second.matcher.references.tokens
    assert {1, 2, 3, 4, 5} <= set(found[found >= 0].tolist())
    assert 1 not in first.matcher.references.tokens


def test_the_chain_is_there_from_the_beginning():
    request = state(chain=(31, 32, 33))
    assert 32 in request.matcher.references.tokens


@pytest.mark.parametrize(
    ("name", "choice"), [("plan-1a2b", 0), ("0_plan-1a", 0), ("12_plan-1", 12)]
)
def test_a_record_names_plan_and_choice(name, choice):
    request = state(name)
    request.draft = Draft([1, 2, 3], [0.5] * 3, [Source.CHAIN, Source.CHAIN, Source.HISTORY])
    request.count(length=3, accepted=1)
    take(request, [1, 9])
    record = request.record(Counter({"fast": 2}))
    assert (record["plan_id"], record["choice"], record["tokens"]) == ("plan", choice, 2)
    assert record["proposed"] == {"chain": 2, "history": 1} and record["accepted"] == {"chain": 1}
    assert record["paths"] == {"fast": 2} and record["top1"] == [0.5, 0.5]


# -- rows ------------------------------------------------------------------------------------------


def softmax(row):
    p = np.exp(row - row.max())
    return p / p.sum()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_only_rows_that_a_token_came_from_are_looked_at(requests, padding):
    lengths = [length for length, _ in requests]
    counts = [min(count, length + 1) for length, count in requests]
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(sum(lengths) + len(lengths) + padding, 11)).astype(np.float32)
    used = np.zeros(len(logits), bool)
    start = 0
    for length, count in zip(lengths, counts):
        used[start : start + count] = True
        start += length + 1
    logits[~used] = np.nan  # would spoil whatever they enter
    rows = Rows(torch.from_numpy(logits), lengths)
    described = rows.describe(counts)
    start = 0
    for request, (length, count) in enumerate(zip(lengths, counts)):
        assert described[request].shape == (count, 3)
        for row, (top1, entropy, gap) in zip(logits[start : start + count], described[request]):
            p = np.sort(softmax(row))[::-1]
            assert top1 == pytest.approx(p[0], abs=1e-5)
            assert entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
            assert gap == pytest.approx((p[0] - p[1]) / p[0], abs=1e-4)
        if count:
            ids = np.array([3, 0, 10])
            expected = np.log(softmax(logits[start + count - 1]))[ids]
            assert rows.lookup(request)(ids) == pytest.approx(expected, abs=1e-4)
        start += length + 1


def test_a_step_without_tokens_has_no_facts():
    described = Rows(torch.full((2, 4), math.nan), [0, 0]).describe([0, 0])
    assert [facts.shape for facts in described] == [(0, 3), (0, 3)]

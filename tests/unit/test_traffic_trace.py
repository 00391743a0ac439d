"""The load test's traces: what is sent in which order and when."""

import hashlib
import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.traffic.kinds import KINDS
from loadtest.traffic.prompts import LENGTHS, Limits
from loadtest.traffic.trace import (
    SHARES,
    Entry,
    Recipe,
    burst,
    closed,
    digest,
    in_rounds,
    lines,
    mixed,
    poisson,
    repeats,
    sampled,
    warm_up,
)


def quarters(text):
    return (len(text.encode()) + 3) // 4


RECIPE = Recipe(quarters, Limits(64, 128, 256), max_tokens=(4, 16))
ENTRIES = [Entry(text=f"{number}") for number in range(10)]


def tokens(entry):
    [(role, content)] = entry.messages
    assert role == "user"
    return quarters(content)


# -- warm-up ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "rounds"), [(40, 5), (7, 2), (1, 3), (0, 5)])
def test_a_warm_up_repeats_every_prompt_once_a_round(prompts, rounds):
    trace = warm_up(1, RECIPE, prompts, rounds)
    assert len(trace) == prompts * rounds
    turns = [trace[start : start + prompts] for start in range(0, len(trace), prompts or 1)]
    assert all(set(turn) == set(trace) and len(set(turn)) == prompts for turn in turns)
    assert repeats(trace) == [False] * prompts + [True] * prompts * (rounds - 1)


def test_a_warm_up_is_of_all_kinds_and_lengths_and_no_round_like_another():
    trace = warm_up(1, RECIPE, 80, 3)
    first = trace[:80]
    assert Counter(entry.length for entry in first) == {"short": 56, "medium": 16, "long": 8}
    assert Counter(entry.kind for entry in first) == dict.fromkeys(KINDS, 20)
    assert len({tuple(trace[start : start + 80]) for start in (0, 80, 160)}) == 3


def test_a_warm_up_from_a_log_has_each_of_its_prompts_once():
    log = [Entry(text="a", max_tokens=1), Entry(text="b"), Entry(text="a"), Entry(text="c")]
    assert sorted(entry.text for entry in sampled(1, log, 9)) == ["a", "b", "c"]
    assert len(sampled(1, log, 2)) == 2
    assert Counter(entry.text for entry in in_rounds(1, sampled(1, log, 9), 4)) == {
        "a": 4, "b": 4, "c": 4,
    }  # fmt: skip


# -- mixed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("requests", [0, 1, 3, 10, 333])
def test_lengths_and_repeats_are_as_ordered(requests, share):
    trace = mixed(3, RECIPE, requests, share)
    assert len(trace) == requests
    again = repeats(trace)
    for length in LENGTHS:
        flags = [flag for entry, flag in zip(trace, again) if entry.length == length]
        assert len(flags) == pytest.approx(requests * SHARES[length], abs=1)
        expected = min(len(flags) * share, max(len(flags) - 1, 0))
        assert sum(flags) == pytest.approx(expected, abs=0.5)
    assert all(tokens(entry) in RECIPE.limits.range(entry.length) for entry in trace)


def test_lengths_and_repeats_are_spread_evenly_over_time():
    trace = mixed(4, RECIPE, 3000)
    again = repeats(trace)
    for start in range(0, 3000, 1000):
        part = slice(start, start + 1000)
        lengths = Counter(entry.length for entry in trace[part])
        assert lengths["short"] == pytest.approx(700, abs=70)
        assert lengths["long"] == pytest.approx(100, abs=45)
        assert sum(again[part]) == pytest.approx(600, abs=75)


def test_a_repeat_is_exact_and_of_no_kind_in_particular():
    trace = mixed(5, RECIPE, 1500)
    by_prompt = {}
    for entry in trace:
        assert by_prompt.setdefault(entry.messages, entry) is entry
    kinds = Counter(entry.kind for entry, again in zip(trace, repeats(trace)) if again)
    assert all(kinds[kind] > 100 for kind in KINDS)


def test_some_prompts_are_popular():
    asked = sorted(Counter(entry.messages for entry in mixed(6, RECIPE, 2000)).values())
    assert asked[-1] > 20 and asked[len(asked) // 2] == 1


def test_shares_can_be_others():
    recipe = replace(RECIPE, shares={"short": 1, "medium": 1})
    assert Counter(it.length for it in mixed(1, recipe, 20)) == {"short": 10, "medium": 10}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_none_and_all(share):
    with pytest.raises(ValueError, match="repeat_share"):
        mixed(1, RECIPE, 10, share)


def test_answers_are_as_long_as_ordered():
    budgets = {entry.max_tokens for entry in mixed(7, RECIPE, 600, 0.0)}
    assert budgets == set(range(4, 17))
    fixed = mixed(7, replace(RECIPE, max_tokens=(9, 9)), 20)
    assert {entry.max_tokens for entry in fixed} == {9}
    assert {entry.max_tokens for entry in burst(7, 20, 11)} == {11}


def test_no_prompt_of_a_long_trace_comes_back_by_accident():
    trace = mixed(8, replace(RECIPE, shares={"short": 1}), 5000, 0.0)
    assert len({entry.messages for entry in trace}) == 5000


def test_phases_share_no_prompt():
    phases = warm_up(1, RECIPE, 100, 1), mixed(1, RECIPE, 100, 0.0), burst(1, 100)
    assert len({entry.messages for entry in itertools.chain(*phases)}) == 300


# -- arrivals --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 50.0])
def test_arrivals_are_poisson(rate):
    times = [entry.at for entry in poisson(1, [Entry(text="a")] * 4001, rate)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / 4000
    assert times[0] == 0 and min(gaps) >= 0
    assert mean * rate == pytest.approx(1, abs=0.06)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / 4000) ** 0.5
    assert deviation * rate == pytest.approx(1, abs=0.08)  # as large as the mean: exponential
    assert sum(gap * rate > 1 for gap in gaps) / 4000 == pytest.approx(0.368, abs=0.03)


@given(st.integers(0, 2**32), st.integers(0, 10), st.floats(0.01, 1e4))
def test_arrivals_change_nothing_but_the_times(seed, many, rate):
    trace = poisson(seed, ENTRIES[:many], rate)
    assert trace == poisson(seed, ENTRIES[:many], rate)
    assert closed(trace) == ENTRIES[:many]
    times = [entry.at for entry in trace]
    assert times == sorted(times) and times == [round(at, 6) for at in times]


# -- the same again --------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_trace():
    """On every machine and Python: if this fails, results before and after cannot be compared."""
    trace = [*warm_up(1, RECIPE, 6, 2), *poisson(1, mixed(1, RECIPE, 12), 5.0), *burst(1, 4)]
    assert digest(trace) == "7e370859614a6103ab37f937bd3726ff9421ba33dde31494a4c9e2413b9de1f0"


def test_other_seeds_make_other_traces():
    assert len({digest(mixed(seed, RECIPE, 5)) for seed in range(5)}) == 5
    assert len({digest(warm_up(seed, RECIPE, 5, 2)) for seed in range(5)}) == 5
    assert len({digest(poisson(seed, ENTRIES, 1.0)) for seed in range(5)}) == 5


def test_a_digest_is_that_of_the_written_lines():
    trace = [
        Entry(text="é", max_tokens=3, at=0.5, session_id="s", cache_salt="c"),
        Entry(messages=(("system", "a"), ("user", "b")), kind="code", length="short"),
    ]
    written = (
        b'{"at":0.5,"cache_salt":"c","max_tokens":3,"prompt":"\\u00e9","session_id":"s"}\n'
        b'{"messages":[{"content":"a","role":"system"},{"content":"b","role":"user"}]}\n'
    )
    assert b"".join(lines(trace)) == written
    assert digest(trace) == hashlib.sha256(written).hexdigest()


ENTRY = Entry(text="a", max_tokens=1, at=0.0, session_id="s", cache_salt="c")


@pytest.mark.parametrize(
    "change",
    [
        {"text": "b"}, {"text": None, "messages": (("user", "a"),)}, {"max_tokens": 2},
        {"max_tokens": None}, {"at": 0.1}, {"at": None}, {"session_id": "t"}, {"cache_salt": ""},
    ],
)  # fmt: skip
def test_a_digest_tells_whatever_is_sent_apart(change):
    assert digest([replace(ENTRY, **change)]) != digest([ENTRY])
    assert digest([ENTRY, replace(ENTRY, **change)]) != digest([replace(ENTRY, **change), ENTRY])


def test_labels_are_not_sent():
    assert digest([replace(ENTRY, kind="sql", length="long")]) == digest([ENTRY])


def test_an_entry_becomes_a_request():
    request = ENTRY.request(temperature=0, max_tokens=99)
    assert request.text == "a" and request.messages is None
    assert request.sampling == {"temperature": 0, "max_tokens": 1}
    assert (request.session_id, request.cache_salt) == ("s", "c")
    chat = Entry(messages=(("user", "a"),)).request(max_tokens=99)
    assert chat.messages == [{"role": "user", "content": "a"}] and chat.text is None
    assert chat.sampling == {"max_tokens": 99} and chat.session_id is None


def test_tenants_do_not_repeat_each_other():
    salted = [Entry(text="a", cache_salt=salt) for salt in ("x", None, "x", "y", None)]
    assert repeats(salted) == [False, False, True, False, True]

"""The replay's arithmetic, and the policy against others on a few recorded answers."""

from pathlib import Path

import numpy as np
import pytest
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.matcher import Matcher
from deepseek_flash.dspark.policy import DraftRequest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench import dspark_contenders
from loadtest.bench.dspark_contenders import (
    NOTHING,
    ORACLE,
    Always,
    Contender,
    Sure,
    contenders,
    ngram,
)
from loadtest.bench.dspark_replay import (
    ROW_COSTS,
    Replay,
    Running,
    acceptance,
    compare,
    halves,
    linear,
    measured,
    neighbours,
    oracle,
    overall,
    table,
)
from loadtest.bench.dspark_trace import Record, read, shortened, write
from loadtest.bench.dspark_train import auc

SAMPLE = Path(__file__).with_name("dspark_trace.npz")


def make_record(output, prompt=(7, 8, 9), kind="kind", state=(1.0, 0.0)):
    n = len(output)
    ones = np.ones(n, np.float32)
    ids = np.array([[token, token + 1, token + 2] for token in output], np.int32).reshape(n, 3)
    return Record(
        kind, np.array(prompt, np.int32), np.array(output, np.int32), 0.5 * ones, ones, 0.25 * ones,
        0.125 * ones, ids, np.tile(np.array([-0.5, -1.0, -2.0], np.float16), (n, 1)),
        np.array(state, np.float32),
    )  # fmt: skip


def scripted(length, wrong, tokens=33, requests=1, concurrency=1, row_cost=0.25, overhead=0.0):
    """Drafts what comes, with the ``wrong``-th token changed."""

    def drafts(request, truth):
        ids = [token + (at == wrong) for at, token in enumerate(truth[: request.limit])]
        return Draft(ids, [0.9] * len(ids), [Source.REFERENCE] * len(ids))

    contender = Contender("scripted", lambda: drafts, lambda cost: Always(length))
    replay = Replay(contender, linear(concurrency, row_cost), concurrency, overhead)
    replay.run(Running(make_record(range(tokens)), [], tokens) for _ in range(requests))
    return replay, replay.tallies["kind"]


def test_without_drafts_a_step_brings_a_token():
    replay, tally = scripted(0, 99)
    assert (tally.tokens, tally.steps, tally.rows) == (32, 32, 0)
    assert replay.seconds == tally.seconds == 32.0 and tally.speed(0.5) == 1.0
    assert scripted(0, 99, overhead=0.5)[0].seconds == 48.0


def test_right_drafts_bring_their_tokens_and_one_more():
    replay, tally = scripted(3, 99)
    assert (tally.tokens, tally.steps) == (32, 8)
    assert tally.rows == tally.accepted.total() == 8 * 3
    assert tally.speed(0.25) == 32 / (8 + 0.25 * tally.rows) == 32 / replay.seconds


def test_wrong_drafts_cost_their_rows():
    _, tally = scripted(3, 0)
    assert (tally.tokens, tally.steps) == (32, 32)
    assert tally.accepted.total() == 0 and tally.rows == 32 * 3 - 6  # none beyond max_tokens
    _, halfway = scripted(3, 1)
    assert halfway.tokens == 32 and halfway.steps == 16
    assert halfway.accepted[Source.REFERENCE, 0] == 16
    assert halfway.accepted[Source.REFERENCE, 1] == 0
    assert acceptance(halfway).startswith("  reference: 1.00/16 0.00/")


def test_requests_share_their_steps():
    replay, tally = scripted(0, 99, requests=6, concurrency=4)
    assert replay.seconds == 64.0, "four, then two"
    assert tally.seconds == 6 * 32.0 and tally.tokens == 6 * 32
    replay, tally = scripted(3, 99, requests=4, concurrency=4, row_cost=0.5)
    assert replay.seconds == 8 + 0.5 / 4 * tally.rows


def test_step_times_are_read_as_the_engine_tells_them():
    text = "1x1 30.0, 1x5 40.0, 4x1 35.0, 4x5 80.0"
    cost = measured(text)
    assert str(cost) == text
    assert cost.seconds(4, 12, 64.0) == pytest.approx(0.0575)
    with pytest.raises(ValueError):
        measured("4x1 35.0")


def request_of(prompt, answer, reference=(), limit=16):
    matcher = Matcher(prompt)
    matcher.append(answer, [0.5] * len(answer))
    if reference:
        matcher.add_reference(reference, Source.REFERENCE)
    return DraftRequest(matcher, limit, limit, lambda ids: np.zeros(len(ids), np.float32))


def test_ngram_copies_what_followed_the_longest_run():
    asked = request_of([1, 2, 3, 4, 9, 3, 5, 6], [2, 3])
    assert ngram(asked, []).token_ids == [4, 9, 3]
    assert ngram(request_of([1, 2], [3]), []).token_ids == []


def test_the_cuts_of_the_others():
    drafts = [Draft([1, 2, 3], [0.9, 0.8, 0.5], [Source.HISTORY] * 3), None]
    assert Always(2).decide(drafts, None) == [2, 0]
    assert Sure(least=0.7).decide(drafts, None) == [2, 0]
    assert Sure(least=0.1).decide(drafts, None) == [3, 0]


def test_the_oracle_is_right_as_far_as_something_can_be_copied():
    truth = [5, 6, 7, 8, 9]
    asked = request_of([1, 5, 6, 2], [1], reference=[1, 5, 6, 7, 3])
    assert dspark_contenders.oracle(asked, truth).token_ids == [5, 6, 7]
    asked = request_of([1, 5, 6, 2], [1])
    assert dspark_contenders.oracle(asked, truth).token_ids == [5, 6]
    looped = request_of([1, 2], [1], limit=4)
    assert dspark_contenders.oracle(looped, [2, 1, 2, 1, 2]).token_ids == [2, 1, 2, 1]
    assert dspark_contenders.oracle(request_of([1], [2]), truth).token_ids == []


def test_the_oracle_copies_the_best_place_exactly():
    text = list(range(20, 40))
    near = [(make_record([20, 21, 50]), 1.0), (make_record(text), 1.0)]
    tally = oracle(make_record(text), near, 20)
    assert (tally.tokens, tally.steps, tally.rows) == (19, 2, 17)  # 16 and one, then two
    alone = oracle(make_record(text), [], 20)
    assert (alone.tokens, alone.steps, alone.rows) == (19, 19, 0)
    looped = oracle(make_record([20, 21] * 10), [], 20)
    assert looped.tokens == 19 and looped.steps < 8


def test_a_request_ends_with_its_record():
    running = Running(make_record(range(5)), [], 10)
    assert running.truth == [1, 2, 3, 4]
    asked = running.request()
    assert asked.limit == 8 and asked.gap == 0.25
    assert running.advance(3) == 3 and running.advance(3) == 1 and running.truth == []


def test_log_probabilities_of_what_was_not_kept_are_below_those_that_were():
    record = make_record([5, 6])
    assert record.logprobs(1, np.array([8, 6, 100])).tolist() == [-2.0, -0.5, -3.0]


def test_neighbours_are_the_nearest_others():
    states = [(1, 0), (2, 0), (0, 1), (0, 2)]
    records = [make_record([index], state=state) for index, state in enumerate(states)]
    found = [[int(other.output[0]) for other, _ in near] for near in neighbours(records, 1)]
    assert found == [[1], [0], [3], [2]]


def test_neighbours_from_before_only():
    records = [make_record([index], state=(1, index)) for index in range(3)]
    found = [[int(other.output[0]) for other, _ in near] for near in neighbours(records, 2, True)]
    assert found[0] == [] and set(found[1]) <= {0} and set(found[2]) <= {0, 1}


def test_halves_are_of_each_kind():
    records = [make_record([i], kind="ab"[i % 2]) for i in range(8)]
    first, second = halves(records)
    assert [int(it.output[0]) for it in first] == [0, 1, 2, 3]
    assert [it.kind for it in second] == ["a", "b", "a", "b"]


def test_a_trace_comes_back_as_it_was_written(tmp_path):
    records = [make_record([1, 2, 3], kind="a"), make_record([4], prompt=[1], kind="b")]
    write(tmp_path / "x" / "trace.npz", records)
    for one, other in zip(read(tmp_path / "x" / "trace.npz"), records, strict=True):
        for name in Record.__dataclass_fields__:
            assert np.array_equal(getattr(one, name), getattr(other, name))
    short = shortened(records[0], 2, 1)
    assert short.output.tolist() == [1, 2] and short.top_ids.tolist() == [[1], [2]]
    assert short.gap.shape == (2,) and short.prompt.tolist() == [7, 8, 9]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_auc_counts_pairs(values):
    good = [value for value, right in values if right]
    bad = [value for value, right in values if not right]
    if good and bad:
        pairs = sum((a > b) + 0.5 * (a == b) for a in good for b in bad)
        found = auc(*(np.array(it) for it in zip(*values)))
        assert found == pytest.approx(pairs / (len(good) * len(bad)))


@pytest.fixture(scope="module")
def sample():
    records = read(SAMPLE)
    return records, neighbours(records)


@pytest.mark.parametrize(("concurrency", "row_cost"), ROW_COSTS.items())
def test_on_recorded_answers_the_policy_beats_fixed_lengths(sample, concurrency, row_cost):
    records, near = sample
    names = ("always 3", "always 16", "ours")
    chosen = [it for it in contenders({}) if it.name in names]
    cost = linear(concurrency, row_cost)
    found = compare(records, near, chosen, cost, concurrency, 16)
    speeds = {name: it["all"] for name, it in table(found)[1].items()}
    assert speeds["always 0"] == 1.0
    assert max(speeds["always 0"], speeds["always 3"], speeds["always 16"]) < speeds["ours"]
    assert speeds["ours"] < speeds["oracle"]
    tokens = {overall(it.by_kind).tokens for it in found.values()}
    assert tokens == {sum(len(record.output) - 1 for record in records)}
    _, figures = table(found)
    assert figures[ORACLE.name]["gain all"] == pytest.approx(1.0)
    assert figures[NOTHING.name]["gain each"] == 0.0


def test_both_oracles_find_the_same(sample):
    records, near = sample
    found = compare(records, near, [], linear(1, 0.1), 1, 16)[ORACLE.name]
    budget = max(len(record.output) for record in records)
    for kind, tally in found.by_kind.items():
        pairs = [
            oracle(record, others, budget)
            for record, others in zip(records, near) if record.kind == kind
        ]  # fmt: skip
        assert tally.steps == sum(it.steps for it in pairs)
        assert tally.rows == sum(it.rows for it in pairs)

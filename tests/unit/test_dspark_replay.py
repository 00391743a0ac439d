"""The replay's arithmetic, and the policy against others on a few recorded answers."""

from pathlib import Path

import numpy as np
import pytest
from deepseek_flash.dspark.drafts import Draft, Source
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.dspark_contenders import Contender, Flow, contenders, fixed, pays, sure
from loadtest.bench.dspark_replay import (
    ROW_COSTS,
    Running,
    Tally,
    acceptance,
    compare,
    halves,
    neighbours,
    oracle,
    overall,
    replay,
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


class Scripted:
    """Drafts what comes, with the ``wrong``-th token changed."""

    def __init__(self, running, wrong=99):
        self._running, self._wrong = running, wrong

    def draft(self, request):
        ids = self._running.truth[: request.limit]
        ids = [token + (at == self._wrong) for at, token in enumerate(ids)]
        return Draft(ids, [0.9] * len(ids), [Source.REFERENCE] * len(ids))


def scripted(length, wrong, tokens=33, row_cost=0.25):
    running, tally = Running(make_record(range(tokens)), [], tokens), Tally()
    replay(running, Scripted(running, wrong), fixed(length), Flow(row_cost), tally)
    return tally


def test_without_drafts_a_step_brings_a_token():
    tally = scripted(0, 99)
    assert (tally.tokens, tally.steps, tally.rows) == (32, 32, 0)
    assert tally.speed(0.5) == 1.0


def test_right_drafts_bring_their_tokens_and_one_more():
    tally = scripted(3, 99)
    assert (tally.tokens, tally.steps) == (32, 8)
    assert tally.rows == tally.accepted.total() == 8 * 3
    assert tally.speed(0.25) == 32 / (8 + 0.25 * tally.rows)


def test_wrong_drafts_cost_their_rows():
    tally = scripted(3, 0)
    assert (tally.tokens, tally.steps) == (32, 32)
    assert tally.accepted.total() == 0 and tally.rows == 32 * 3 - 6  # none beyond max_tokens
    halfway = scripted(3, 1)
    assert halfway.tokens == 32 and halfway.steps == 16
    assert halfway.accepted[Source.REFERENCE, 0] == 16
    assert halfway.accepted[Source.REFERENCE, 1] == 0
    assert acceptance(halfway).startswith("  reference: 1.00/16 0.00/")


@given(st.lists(st.floats(0.01, 1.0), max_size=8), st.floats(0.05, 1.0))
def test_a_row_pays_while_its_chance_is_worth_its_cost(chances, row_cost):
    flow = Flow(row_cost)
    draft = Draft([1] * len(chances), chances, [Source.HISTORY] * len(chances))
    length = pays(draft, None, flow)
    survival = np.cumprod(chances)
    assert all(survival[:length] > flow.price)
    assert length == len(chances) or survival[length] <= flow.price
    assert sure(0.5)(draft, None, flow) == sum(survival >= 0.5)


def test_a_row_is_dearer_where_steps_bring_more():
    flow = Flow(0.25)
    assert flow.price == 0.25
    for _ in range(5000):
        flow.add(5, 4)
    assert flow.price == pytest.approx(0.25 * 5 / 2, rel=1e-3)


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


@pytest.mark.parametrize("row_cost", ROW_COSTS.values())
def test_on_recorded_answers_the_policy_beats_fixed_lengths(sample, row_cost):
    records, near = sample
    chosen = [it for it in contenders({}) if it.name in ("none", "fixed 3", "fixed 16", "ours")]
    found = compare(records, near, chosen, row_cost, 16)
    speeds = {name: overall(by_kind).speed(row_cost) for name, by_kind in found.items()}
    assert speeds["none"] == 1.0
    assert max(speeds["none"], speeds["fixed 3"], speeds["fixed 16"]) < speeds["ours"]
    assert speeds["ours"] < speeds["oracle"]
    tokens = {overall(by_kind).tokens for by_kind in found.values()}
    assert tokens == {sum(len(record.output) - 1 for record in records)}
    _, figures = table(found, row_cost)
    assert figures["oracle"]["gain"] == pytest.approx(1.0) and figures["none"]["gain"] == 0.0


def test_a_policy_of_nothing_is_plain(sample):
    records, near = sample
    found = compare(records[:3], near[:3], [Contender("x", None, fixed(5))], 0.5, 16)
    assert overall(found["x"]).speed(0.5) == 1.0

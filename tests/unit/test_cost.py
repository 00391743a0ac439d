"""The step-cost model: what it must be able to say, and what must not disturb it."""

import itertools
import math
import random

import numpy as np
import pytest
from deepseek_flash.dspark.cost import Sample, StepCost, measuring_points
from hypothesis import given
from hypothesis import strategies as st

REQUESTS, CONTEXTS, DRAFTS = (1, 4, 16), (100.0, 900.0), (0, 1, 16)


def dense(requests, rows, context):
    """Seconds like those of a small dense model on a CPU: all rows are equal."""
    return 0.075 + 0.0083 * rows + 1e-6 * requests * context


def measured(model=dense, times=1):
    cost = StepCost()
    cost.fit(
        Sample(n, n * (1 + d), c, model(n, n * (1 + d), c))
        for n, c, d, _ in itertools.product(REQUESTS, CONTEXTS, DRAFTS, range(times))
    )
    return cost


def seconds(cost, requests, rows, context):
    return float(cost.seconds(requests, rows, context))


def test_nothing_measured_nothing_guessed():
    cost = StepCost()
    cost.observe(1, 1, 100.0, 0.1)
    assert not cost.measured and cost.relative_error == 0.0
    assert cost.seconds(4, [4, 5, 68], 100.0).tolist() == [1.0, math.inf, math.inf]


def test_what_was_measured_comes_back():
    cost = measured()
    assert cost.measured
    for n, c, d in itertools.product(REQUESTS, CONTEXTS, DRAFTS):
        rows = n * (1 + d)
        assert seconds(cost, n, rows, c) == pytest.approx(dense(n, rows, c))


def test_a_disturbed_measurement_makes_no_draft_dear():
    """One point was slow each time it was measured: those that do more say what it can take."""

    def disturbed(n, rows, context):
        slow = 3.0 if (n, rows, context) == (1, 2, 100.0) else 1.0
        return dense(n, rows, context) * slow

    cost = measured(disturbed)
    assert seconds(cost, 1, 2, 100.0) <= seconds(cost, 1, 17, 100.0)
    assert seconds(cost, 1, 17, 100.0) == pytest.approx(dense(1, 17, 100.0))


def test_between_and_beyond_the_points_a_linear_model_is_exact():
    cost = measured()
    for n, rows, c in [(1, 9, 100.0), (2, 2, 500.0), (10, 55, 100.0), (4, 5, 3000.0), (1, 30, 100)]:
        assert seconds(cost, n, rows, c) == pytest.approx(dense(n, rows, c))
    assert seconds(cost, 1, 1, 0.0) == seconds(cost, 1, 1, 100.0), "never below what was measured"
    assert seconds(cost, 32, 64, 100.0) == pytest.approx(2 * dense(16, 32, 100.0))


def test_mla_on_a_cpu_pays_for_the_first_draft_row():
    # platform.md: at 800-950 tokens of context 3 drafts lose even when all of them are right.
    cost = StepCost()
    points = {(1, 120): 14, (17, 120): 39, (4, 120): 20, (1, 875): 17, (4, 875): 69, (17, 875): 71}
    cost.fit(Sample(1, rows, c, ms / 1000) for (rows, c), ms in points.items())
    one, four = cost.seconds(1, [1, 4], 875.0)
    assert four > 4 * one
    # Most of it is the first row's: the second costs next to nothing.
    first, second = np.diff(cost.seconds(1, [1, 2, 3], 875.0))
    assert first > 0.05 and second < 0.001
    one, four = cost.seconds(1, [1, 4], 120.0)
    assert four < 2 * one
    assert one < seconds(cost, 1, 1, 500.0) < seconds(cost, 1, 1, 2000.0)


def test_measurements_may_contain_a_slow_one():
    cost = StepCost()
    points = measuring_points(16, [100, 900], 16)
    samples = [Sample(*point, dense(*point)) for point in points for _ in range(3)]
    samples[::3] = [Sample(n, rows, c, s * 50) for n, rows, c, s in samples[::3]]
    cost.fit(samples)
    for point in points:
        assert seconds(cost, *point) == pytest.approx(dense(*point))


def test_measuring_points_are_a_full_grid():
    points = measuring_points(20, [50, 500], 16)
    assert {n for n, _, _ in points} == {1, 4, 16, 20}
    assert {rows for n, rows, _ in points if n == 4} == {4, 8, 20, 68}
    assert len(points) == len(set(points)) == 4 * 2 * 4
    assert {rows for _, rows, _ in measuring_points(1, [50], 3)} == {1, 2, 4}


TIMES = st.lists(st.floats(1e-4, 10.0), min_size=18, max_size=18)


@given(TIMES, st.integers(1, 20), st.integers(0, 320), st.floats(0, 5000))
def test_more_never_costs_less(times, requests, drafts, context):
    drafts = min(drafts, requests * DRAFTS[-1])
    cost, left = StepCost(), iter(times)
    cost.fit(
        Sample(n, n * (1 + d), c, next(left))
        for n, c, d in itertools.product(REQUESTS, CONTEXTS, DRAFTS)
    )
    here = seconds(cost, requests, requests + drafts, context)
    slack = 1 - 1e-9
    assert 0 < here < math.inf
    assert seconds(cost, requests, requests + drafts + 1, context) >= here * slack
    assert seconds(cost, requests, requests + drafts, context + 100) >= here * slack
    if context <= CONTEXTS[-1]:
        each = 1 + drafts // requests
        more = [seconds(cost, n, n * each, context) for n in (requests, requests + 1)]
        assert more[1] >= more[0] * slack


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample(1, 1, 100, 0.1)],
        [Sample(1, 2, 100, 0.1), Sample(1, 3, 100, 0.1)],
        [Sample(1, 1, 100, 0.1), Sample(1, 2, 100, 0.1), Sample(4, 4, 100, 0.1)],
        [Sample(1, 1, 100, 0.0), Sample(1, 2, 100, 0.1)],
    ],
)
def test_half_a_grid_is_refused(samples):
    cost = StepCost()
    with pytest.raises(ValueError):
        cost.fit(samples)
    assert not cost.measured


def test_a_single_outlier_does_not_count():
    cost = measured()
    before = cost.seconds(4, [4, 20], 100.0)
    cost.observe(4, 4, 100.0, 100.0)
    cost.observe(4, 20, 100.0, 100.0)
    after = cost.seconds(4, [4, 20], 100.0)
    assert np.all(after < before * 1.03)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.003)


def test_a_slower_machine_is_noticed_and_decisions_stay():
    cost, shape = measured(), measured()
    for step in range(400):
        rows = 4 if step % 2 else 20
        cost.observe(4, rows, 100.0, 2 * dense(4, rows, 100.0))
    found, expected = cost.seconds(4, [4, 20], 100.0), 2 * shape.seconds(4, [4, 20], 100.0)
    assert found == pytest.approx(expected, rel=0.02)
    assert cost.relative_error < 0.02


def test_a_slower_machine_is_not_taken_for_dear_drafts_where_there_are_only_those():
    cost = measured()
    before = cost.seconds(4, [4, 20], 100.0)
    for _ in range(400):
        cost.observe(4, 20, 100.0, 2 * dense(4, 20, 100.0))
    after = cost.seconds(4, [4, 20], 100.0)
    assert after[1] == pytest.approx(2 * before[1], rel=0.01)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.06)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_wrong_price_of_drafts_is_corrected(factor):
    cost, noise = measured(), random.Random(1)

    def truth(requests, rows, context):
        plain = dense(requests, requests, context)
        return plain + factor * (dense(requests, rows, context) - plain)

    for step in range(6000):
        rows = 4 if step % 2 else 40
        cost.observe(4, rows, 100.0, truth(4, rows, 100.0) * noise.uniform(0.9, 1.1))
    for rows in (4, 20, 40):
        assert seconds(cost, 4, rows, 100.0) == pytest.approx(truth(4, rows, 100.0), rel=0.05)


def test_the_error_is_that_of_the_prediction():
    cost = measured()
    cost.observe(1, 1, 100.0, dense(1, 1, 100.0) / 1.2)
    assert cost.relative_error == pytest.approx(0.2)
    for _ in range(300):
        cost.observe(1, 1, 100.0, dense(1, 1, 100.0))
    assert cost.relative_error < 0.01

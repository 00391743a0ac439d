"""The controller: best lengths by brute force, and what it loses to drafts that deserve nothing.

The simulations draw from a seeded generator and count seconds by the cost model: nothing in them
depends on the machine.
"""

import itertools
import math
import random

import numpy as np
import pytest
from deepseek_flash.dspark.controller import (
    MAX_DRAFT_TOKENS,
    Batch,
    Controller,
    Rule,
    ThresholdController,
)
from deepseek_flash.dspark.cost import Sample, StepCost
from deepseek_flash.dspark.decision_kernels import best_row_count
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.paths import Path
from deepseek_flash.dspark.policy import LEAST
from hypothesis import assume, given
from hypothesis import strategies as st

HISTORY, REFERENCE, CHAIN = Source
BIG = (1, 4, 16)


def draft(*probabilities, source=REFERENCE):
    return Draft([7] * len(probabilities), list(probabilities), [source] * len(probabilities))


def batch_of(drafts, room=MAX_DRAFT_TOKENS, burst_steps=3, context=100.0, signals=None):
    return Batch(context, [room] * len(drafts), [burst_steps] * len(drafts), signals)


def measured(model, contexts=(100.0, 900.0)):
    cost = StepCost()
    cost.fit(
        Sample(n, n * (1 + d), c, model(n, n * d, c))
        for n, c, d in itertools.product(BIG, contexts, (0, 1, 4, 16))
    )
    return cost


def small_model(requests, drafts, context):
    """SmolLM2 on 2 cores (platform.md): a row costs 0.11, 0.25, 0.54 of a request's share."""
    return 0.075 + 0.0083 * requests + {1: 0.0093, 4: 0.00675, 16: 0.007}[requests] * drafts


def graphics(requests, drafts, context):
    """Rows are almost free."""
    return 0.02 + 2.5e-5 * (requests + drafts)


def mla(requests, drafts, context):
    """MLA on a CPU: any draft row costs a pass over the context."""
    grown = context / 900
    return 0.0135 + 0.0035 * grown + (0.004 + 0.04 * grown if drafts else 0) + 0.0014 * drafts


MODELS = [small_model, graphics, mla]


# -- one step --------------------------------------------------------------------------------

PROBABILITIES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), max_size=4)
BATCHES = st.lists(PROBABILITIES, min_size=1, max_size=3)
COSTS = st.lists(st.floats(0, 2), min_size=13, max_size=13)


def tokens(drafts, lengths):
    return len(drafts) + sum(
        math.prod(d[: j + 1]) for d, length in zip(drafts, lengths) for j in range(length)
    )


def all_lengths(drafts):
    return itertools.product(*(range(len(d) + 1) for d in drafts))


@given(BATCHES, COSTS)
def test_no_other_lengths_are_worth_more(drafts, times):
    cost = StepCost()
    cost.fit(
        Sample(n, n * (1 + d), 100.0, 1 + sum(times[: 1 + d]))
        for n, d in itertools.product((1, 2, 3), (0, 1, 2, 4))
    )
    given_drafts = [draft(*d) if d else None for d in drafts]
    found = Controller(cost).decide(given_drafts, batch_of(drafts))
    n = len(drafts)
    plain = float(cost.seconds(n, n, 100.0))

    def worth(lengths):  # beyond what the seconds are worth in plain steps
        return tokens(drafts, lengths) - n / plain * float(cost.seconds(n, n + sum(lengths), 100.0))

    assert all(length <= len(d) for length, d in zip(found, drafts))
    assert worth(found) >= max(map(worth, all_lengths(drafts))) - 1e-9
    least = Controller(cost).least_chance(n, 100.0)
    for length, d in zip(found, drafts):
        stopped = least > LEAST and math.prod(d[:length]) <= least - 1e-9
        assert not stopped or not length, "the policy would have stopped there"


@given(BATCHES, st.lists(st.floats(0, 2), min_size=13, max_size=13))
def test_at_the_best_rate_the_steps_own_tokens_per_second_are_the_most(drafts, added):
    # Any cost of k rows at all: the rows sorted by survival are enough.
    seconds = 1.0 + np.cumsum([0.0, *added])
    gains = sorted((math.prod(d[: j + 1]) for d in drafts for j in range(len(d))), reverse=True)
    seconds = seconds[: len(gains) + 1]

    def per_second(lengths):
        return tokens(drafts, lengths) / seconds[sum(lengths)]

    best, rate = max(map(per_second, all_lengths(drafts))), 0.0
    for _ in range(20):  # Dinkelbach
        count = best_row_count(np.array(gains), seconds, rate)
        rate = (len(drafts) + sum(gains[:count])) / seconds[count]
    assert rate == pytest.approx(best)


def test_rows_compete_over_the_whole_batch():
    cost = measured(small_model)
    drafts = [draft(0.9, 0.9), draft(0.2, 0.9), None, draft(*[0.99] * 16)]
    found = Controller(cost).decide(drafts, batch_of(drafts))
    assert found[1] == 0 and found[2] == 0 and found[0] == 2 and found[3] == 16


@pytest.mark.parametrize(("requests", "least"), [(1, 0.11), (4, 0.25), (16, 0.54)])
def test_a_row_pays_from_the_probability_that_was_measured(requests, least):
    cost = measured(small_model)
    for p, taken in ((least - 0.02, 0), (least + 0.02, 1)):
        drafts = [draft(p)] + [None] * (requests - 1)
        assert sum(Controller(cost).decide(drafts, batch_of(drafts))) == taken


def test_nothing_is_guessed_before_the_cost_is_measured():
    controller = Controller(StepCost())
    drafts = [draft(1.0, 1.0)] * 2
    assert controller.decide(drafts, batch_of(drafts)) == [0, 0]
    controller.verified(drafts, [0, 0], [0, 0], 100.0)
    assert controller.speedup == 1.0


def test_an_empty_batch_and_empty_drafts():
    controller = Controller(measured(small_model))
    assert controller.decide([], batch_of([])) == []
    controller.verified([], [], [], 100.0)
    assert controller.decide([None, Draft()], batch_of([None, None])) == [0, 0]


CONTROLLERS = [lambda: Controller(measured(graphics)), lambda: ThresholdController([SURE])]
SURE = Rule(Path.FAST, math.inf, 0.0, math.inf)


@pytest.mark.parametrize("make", CONTROLLERS)
def test_caps(make):
    own, known = draft(*[1.0] * 20, source=HISTORY), draft(*[1.0] * 20)
    mixed = draft(*[1.0] * 20, source=HISTORY)
    mixed.sources[3] = REFERENCE  # rests on more than the own history, but for its beginning
    late = draft(*[1.0] * 20, source=HISTORY)
    late.sources[4] = CHAIN
    drafts = [own, known, mixed, late, draft(1.0, 1.0, source=HISTORY), known, known]
    batch = Batch(100.0, [16, 16, 16, 16, 16, 5, -1], [3] * 7, np.zeros((7, 3), np.float32))
    assert make().decide(drafts, batch) == [3, 16, 16, 3, 2, 5, 0]


# -- many steps ------------------------------------------------------------------------------


def wrong(generator):
    return draft(*[0.9] * 16), [0.0] * 16


def calibrated(generator, share=1.0):
    """Drafts for every second request; acceptance is ``share`` of what is claimed."""
    if generator.random() < 0.5:
        return None, []
    claimed = [generator.uniform(0.05, 0.99)] * generator.randint(1, 16)
    return draft(*claimed), [share * p for p in claimed]


def overconfident(generator):
    return calibrated(generator, share=0.25)


def unlikely(generator):
    p = generator.uniform(0.0, 0.2)
    return draft(p, p), [p, p]


def run(controller, cost, requests, steps, traffic, seed=1, context=100.0):
    """Speed against plain steps."""
    generator, spent, made = random.Random(seed), 0.0, 0
    for _ in range(steps):
        drafts, truths = zip(*(traffic(generator) for _ in range(requests)))
        lengths = controller.decide(drafts, batch_of(drafts, context=context))
        accepted = [
            next((place for place in range(n) if generator.random() >= truth[place]), n)
            for n, truth in zip(lengths, truths)
        ]
        controller.verified(drafts, lengths, accepted, context)
        spent += float(cost.seconds(requests, requests + sum(lengths), context))
        made += requests + sum(accepted)
    return made / requests * float(cost.seconds(requests, requests, context)) / spent


@pytest.mark.parametrize("requests", BIG)
@pytest.mark.parametrize("model", MODELS)
def test_hostile_drafts_cost_at_most_3_percent(model, requests):
    cost = measured(model)
    assert run(Controller(cost), cost, requests, 300, wrong) >= 0.97


@pytest.mark.parametrize("requests", BIG)
@pytest.mark.parametrize("model", [small_model, graphics])
def test_a_source_that_turns_hostile_costs_at_most_3_percent(model, requests):
    cost = measured(model)
    controller = Controller(cost)
    assert run(controller, cost, requests, 200, calibrated) > 1.05
    assert run(controller, cost, requests, 300, wrong) >= 0.97
    assert controller.trust.alarms[REFERENCE] >= 1


@pytest.mark.parametrize("traffic", [overconfident, unlikely])
@pytest.mark.parametrize("requests", BIG)
@pytest.mark.parametrize("model", MODELS)
def test_novel_traffic_costs_at_most_2_percent(model, requests, traffic):
    cost = measured(model)
    assert run(Controller(cost), cost, requests, 500, traffic) >= 0.98


@pytest.mark.parametrize("before", [wrong, overconfident])
@pytest.mark.parametrize("requests", BIG)
@pytest.mark.parametrize("model", [small_model, graphics])
def test_a_source_that_was_not_believed_comes_back(model, requests, before):
    cost = measured(model)
    fresh = run(Controller(cost), cost, requests, 100, calibrated)
    controller = Controller(cost)
    run(controller, cost, requests, 100, before, seed=2)
    assert controller.trust.factor[REFERENCE] < 0.5
    run(controller, cost, requests, 200, calibrated, seed=2)
    assert run(controller, cost, requests, 100, calibrated) - 1 > 0.8 * (fresh - 1)


def test_a_source_that_is_half_believed_is_not_stuck_where_rows_are_dear():
    cost = measured(small_model)
    controller = Controller(cost)
    drafts = [draft(*[0.8] * 4)] * 16
    for _ in range(40):  # right in 5 of 8 cases, where 4 of 5 were claimed
        controller.verified(drafts, [1] * 16, [1, 0, 1, 0, 1, 0, 1, 1] * 2, 100.0)
    assert 0.7 < controller.trust.factor[REFERENCE] < 0.8
    controller.verified(drafts, [1] * 16, [0] * 2 + [1] * 14, 100.0)
    run(controller, cost, 16, 100, lambda g: (draft(*[0.7] * 2), [1.0] * 2))
    assert controller.trust.factor[REFERENCE] > 0.9


def test_where_a_probe_is_dear_a_closed_source_comes_back_later():
    cost = measured(mla)
    controller = Controller(cost)
    run(controller, cost, 1, 300, wrong)
    run(controller, cost, 1, 800, calibrated)
    assert run(controller, cost, 1, 200, calibrated, seed=2) > 1.2


def test_a_hostile_source_closes_none_of_the_others():
    cost = measured(small_model)
    controller = Controller(cost)
    own = draft(0.9, 0.9, source=HISTORY)
    run(controller, cost, 4, 100, lambda g: g.choice([wrong(g), (own, [0.9, 0.9])]))
    assert controller.trust.factor[REFERENCE] < 0.2 < 0.9 < controller.trust.factor[HISTORY]


def test_the_price_rises_with_what_a_second_is_worth():
    cost = measured(small_model)
    controller = Controller(cost)
    drafts = [draft(0.15)]
    assert controller.decide(drafts, batch_of(drafts)) == [1]
    run(controller, cost, 1, 100, lambda g: (draft(*[0.99] * 16), [0.99] * 16))
    assert controller.speedup > 3
    assert controller.decide(drafts, batch_of(drafts)) == [0]
    run(controller, cost, 1, 150, lambda g: (None, []))
    assert controller.speedup == pytest.approx(1.0, abs=0.03)


def test_who_loses_does_not_guess_more():
    cost = measured(small_model)
    controller = Controller(cost)
    for _ in range(50):
        controller.verified([draft(0.5)], [1], [0], 100.0)
    assert controller.speedup == 1.0


def test_only_what_was_reached_is_judged():
    controller = Controller(measured(small_model))
    controller.trust.judge = lambda *given: calls.append([list(each) for each in given])
    calls = []
    drafts = [draft(0.9, 0.8, 0.7), None, draft(0.6, 0.5, source=CHAIN), draft(0.4)]
    controller.verified(drafts, [3, 0, 2, 0], [1, 0, 2, 0], 100.0)
    assert calls == [
        [[REFERENCE] * 2 + [CHAIN] * 2, [0.9, 0.8, 0.6, 0.5], [True, False, True, True]]
    ]


# -- the table of thresholds -----------------------------------------------------------------


def test_thresholds():
    controller = ThresholdController()
    assert controller.action(0.5, 0.9, 0.001) == Path.FAST
    assert controller.action(1.5, 0.9, 0.001) == Path.BURST
    assert controller.action(0.5, 0.3, 0.001) == Path.BURST
    assert controller.action(0.5, 0.9, 0.025) == Path.BURST
    assert controller.action(3.0, 0.9, 0.001) == Path.SLOW
    assert controller.action(0.5, 0.0, 0.001) == Path.SLOW
    assert controller.action(0.5, 0.9, 0.5) == Path.SLOW
    assert controller.action(0.5, math.nan, 0.001) == Path.SLOW


def test_thresholds_decide_lengths():
    controller = ThresholdController()
    signals = np.array([[0.5, 0.9, 0.0], [1.5, 0.9, 0.0], [9.0, 0.9, 0.0]] * 2, np.float32)
    drafts = [draft(*[0.1] * 16)] * 3 + [None] * 3
    assert controller.decide(drafts, batch_of(drafts, signals=signals)) == [16, 3, 0, 0, 0, 0]
    assert controller.decide(drafts, batch_of(drafts)) == [0] * 6, "no signals"


@given(BATCHES, st.integers(0, 5), st.integers(1, 4))
def test_lengths_never_exceed_draft_or_room(drafts, room, steps):
    assume(any(drafts))
    given_drafts = [draft(*d, source=HISTORY) for d in drafts]
    signals = np.tile(np.array([0.5, 0.9, 0.0], np.float32), (len(drafts), 1))
    batch = batch_of(drafts, room=room, burst_steps=steps, signals=signals)
    for controller in (Controller(measured(graphics)), ThresholdController()):
        for length, d in zip(controller.decide(given_drafts, batch), drafts):
            assert 0 <= length <= min(len(d), room, steps)

"""What a source's probabilities are worth: quickly lost, found again, never by chance."""

import itertools

import numpy as np
import pytest
from deepseek_flash.dspark.drafts import Source
from deepseek_flash.dspark.trust import Trust

HISTORY, REFERENCE, CHAIN = Source


def judge(trust, *outcomes, p=0.9, source=CHAIN):
    for outcome in outcomes:
        trust.judge(np.array([source]), np.array([p]), np.array([outcome]))


@pytest.mark.parametrize("spread", [(0.05, 0.3), (0.3, 0.95), (0.9, 1.0)])
def test_a_calibrated_source_is_believed(spread):
    trust, generator, factors = Trust(), np.random.default_rng(1), []
    for _ in range(2500):
        p = generator.uniform(*spread, 8)
        trust.judge(np.full(8, CHAIN), p, generator.random(8) < p)
        factors.append(trust.factor[CHAIN])
    assert trust.alarms[CHAIN] <= 1, "of 20,000 tokens"
    assert np.mean(factors) > 0.93


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_overconfidence_is_measured(share):
    trust, generator = Trust(), np.random.default_rng(1)
    for _ in range(500):
        p = generator.uniform(0.3, 0.9, 8)
        trust.judge(np.full(8, CHAIN), p, generator.random(8) < share * p)
    assert trust.factor[CHAIN] == pytest.approx(share, abs=0.1)


def test_trust_is_lost_within_some_tokens_and_found_again_within_some_more():
    trust = Trust()
    judge(trust, *[True] * 500)
    assert trust.factor[CHAIN] == 1.0
    judge(trust, *[False] * 6)
    assert trust.factor[CHAIN] < 0.2 and trust.factor[HISTORY] == 1.0
    judge(trust, True, True)
    assert trust.factor[CHAIN] < 0.3, "two in a row may be luck"
    judge(trust, *[True] * 8)
    assert trust.factor[CHAIN] > 0.8


def test_probes_grow_rarer_with_failures_and_more_frequent_with_successes():
    trust, steps = Trust(), itertools.count(1)

    def wait():
        begin = next(steps)
        return next(step for step in steps if trust.probe_due(CHAIN, 0.2, step)) - begin + 1

    waits = []
    for success in [False] * 5 + [True] * 4:
        waits.append(wait())
        judge(trust, success)
    assert waits == [5, 10, 20, 40, 40, 40, 20, 10, 5]
    judge(trust, False, source=HISTORY)  # says nothing of this one's probes
    judge(trust, False)  # nor does what came without being a probe
    assert wait() == 5


def test_a_dear_probe_waits_longer():
    trust = Trust()
    assert not trust.probe_due(CHAIN, 4.0, 99)
    assert trust.probe_due(CHAIN, 4.0, 100)
    assert not trust.probe_due(CHAIN, 4.0, 199)
    assert trust.probe_due(CHAIN, 4.0, 200)

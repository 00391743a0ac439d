"""The three signals, and the three ways in which they were wrong before (document, section 5.2)."""

import math

import pytest
import torch
from deepseek_flash.dspark.signals import (
    ENTROPY_WINDOW,
    EntropyAverage,
    attention_variance,
    entropy_and_gap,
)
from hypothesis import given
from hypothesis import strategies as st

LOGITS = st.lists(st.floats(-20, 20), min_size=3, max_size=9)


@given(LOGITS, st.floats(-50, 50))
def test_entropy_and_gap_by_their_definitions(row, shift):
    total = sum(math.exp(x) for x in row)
    p = sorted((math.exp(x) / total for x in row), reverse=True)
    entropy, gap = entropy_and_gap(torch.tensor([row]) + shift)
    assert entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-3)
    # Divided by top-1, not by the sum of all (which is 1 and would change nothing else).
    assert gap.item() == pytest.approx((p[0] - p[1]) / p[0], abs=1e-3)


def test_the_gap_of_a_flat_distribution_is_not_lost_in_a_large_vocabulary():
    logits = torch.zeros(1, 50_000)
    logits[0, 7] = math.log(2)  # twice as likely as the rest: p1 - p2 is only 2e-5
    assert entropy_and_gap(logits)[1].item() == pytest.approx(0.5, abs=1e-6)


def test_tokens_that_cannot_come_have_no_entropy():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    entropy, gap = entropy_and_gap(logits)
    assert entropy.item() == pytest.approx(math.log(2)) and gap.item() == 0.0


def test_certainty():
    entropy, gap = entropy_and_gap(torch.tensor([[1000.0, 0.0, 0.0]]))
    assert entropy.item() == 0.0 and gap.item() == 1.0


def test_entropies_are_compared_with_the_requests_own_last_tokens():
    average = EntropyAverage(2, torch.device("cpu"))
    slot, other = torch.tensor([0]), torch.tensor([1])
    assert average.ratio(slot, torch.tensor([5.0])).item() == 1.0, "nothing to compare with"
    assert average.ratio(slot, torch.tensor([10.0])).item() == pytest.approx(2.0)
    assert average.ratio(slot, torch.tensor([7.5])).item() == pytest.approx(1.0)
    assert average.ratio(other, torch.tensor([99.0])).item() == 1.0
    average.reset(slot)
    assert average.ratio(slot, torch.tensor([3.0])).item() == 1.0, "another request's slot"


@given(st.lists(st.floats(0.1, 5.0), min_size=2, max_size=3 * ENTROPY_WINDOW))
def test_the_window_slides(values):
    average, slot = EntropyAverage(1, torch.device("cpu")), torch.tensor([0])
    for place, value in enumerate(values):
        found = average.ratio(slot, torch.tensor([value])).item()
        window = values[max(0, place - ENTROPY_WINDOW) : place]
        expected = value * len(window) / sum(window) if window else 1.0
        assert found == pytest.approx(expected, rel=1e-4)


def heads(scale_of_second):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 4, generator=generator)
    keys = torch.randn(1, 6, 1, 4, generator=generator).expand(-1, -1, 2, -1).clone()
    keys[:, :, 1] *= scale_of_second
    return query, keys


def test_the_variance_is_bounded_whatever_the_scale_of_a_head():
    for scale in (1.0, 10.0, 1000.0):
        value = attention_variance(*heads(scale), 0.5).item()
        assert 0.0 < value <= 0.25, "softmaxed weights: no head counts for more than another"


def test_heads_that_look_alike_have_no_variance():
    query, keys = heads(1.0)
    query[:, 1] = query[:, 0]
    assert attention_variance(query, keys, 0.5).item() == pytest.approx(0.0, abs=1e-12)


def test_places_before_the_beginning_do_not_count():
    query, keys = heads(1.0)
    padded = torch.cat([torch.zeros(1, 26, 2, 4), keys], dim=1)
    short, long = (attention_variance(query, k, 0.5).item() for k in (keys, padded))
    assert short == pytest.approx(long)
    assert attention_variance(query, torch.zeros(1, 32, 2, 4), 0.5).item() == 0.0


def test_grouped_queries_use_their_groups_keys():
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(3, 6, 4, generator=generator)
    keys = torch.randn(3, 5, 2, 4, generator=generator)
    spread = keys.repeat_interleave(3, dim=2)
    assert torch.allclose(
        attention_variance(query, keys, 0.5), attention_variance(query, spread, 0.5)
    )


def test_rows_do_not_mix():
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3, 2, 4, generator=generator)
    keys = torch.randn(3, 5, 2, 4, generator=generator)
    together = attention_variance(query, keys, 0.5)
    alone = [attention_variance(query[i : i + 1], keys[i : i + 1], 0.5) for i in range(3)]
    assert torch.allclose(together, torch.cat(alone))

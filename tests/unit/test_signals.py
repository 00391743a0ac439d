"""The three signals, and the three ways in which they were wrong before (document, section 5.2)."""

import math

import numpy as np
import pytest
import torch
from deepseek_flash.dspark.signals import (
    ENTROPY_WINDOW,
    EntropyWindow,
    attention_variance,
    row_facts,
    row_facts_tensor,
    verify,
)
from hypothesis import given
from hypothesis import strategies as st

LOGITS = st.lists(st.floats(-20, 20), min_size=3, max_size=9)


def strided(logits):
    """The same as one finds them where a vocabulary is padded."""
    return torch.nn.functional.pad(logits, (0, 3), value=99.0)[:, : logits.shape[1]]


BOTH = pytest.mark.parametrize(
    "facts_of",
    [
        lambda logits: row_facts(logits, range(len(logits))),
        lambda logits: row_facts(strided(logits), range(len(logits))),
        lambda logits: row_facts_tensor(logits).numpy(),  # what a GPU does
    ],
    ids=["compiled", "strided", "tensor"],
)


@BOTH
@given(LOGITS, st.floats(-50, 50))
def test_facts_by_their_definitions(facts_of, row, shift):
    total = sum(math.exp(x) for x in row)
    p = sorted((math.exp(x) / total for x in row), reverse=True)
    ((top1, entropy, gap, normaliser),) = facts_of(torch.tensor([row]) + shift)
    assert top1 == pytest.approx(p[0], abs=1e-3)
    assert entropy == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-3)
    # Divided by top-1, not by the sum of all (which is 1 and would change nothing else).
    assert gap == pytest.approx((p[0] - p[1]) / p[0], abs=1e-3)
    assert normaliser == pytest.approx(math.log(total) + shift, abs=1e-3)


@pytest.mark.parametrize("vocabulary", [2, 63, 64, 65, 128, 1000, 49_152])
def test_the_compiled_facts_are_those_of_the_tensors(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(40, vocabulary, generator=generator) * torch.logspace(-2, 2, 40)[:, None]
    logits[3, vocabulary // 2 :] = -math.inf
    rows = [0, 3, 1, 2, *range(5, 40)]
    expected = row_facts_tensor(logits.double().float())[rows].numpy()
    assert row_facts(logits, rows) == pytest.approx(expected, rel=2e-5, abs=2e-5)
    # Another type of logits goes the way of the GPU, 32 rows at a time.
    half = row_facts(logits.bfloat16(), rows)
    expected = row_facts_tensor(logits.bfloat16().float())[rows].numpy()
    assert half == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 10**6), st.sampled_from([3, 64, 65, 500]))
def test_greedy_verification_is_that_of_argmax(seed, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    requests = 1 + seed % 5
    lengths = torch.randint(0, 5, (requests,), generator=generator).tolist()
    rows = requests + sum(lengths)
    # Few different values: many are equal, and the first of the best counts.
    logits = torch.randint(0, 4, (rows, vocabulary), generator=generator).float()
    best = logits.argmax(dim=-1).tolist()
    drafts, expected, row = [], [], 0
    for length in lengths:
        right = best[row : row + length + 1]
        wrong = int(torch.randint(0, length + 1, (), generator=generator))
        drafts += [token if at != wrong else token + 1 for at, token in enumerate(right[:length])]
        expected.append([*right[: wrong + 1], *[-1] * (max(lengths) - wrong)])
        row += length + 1
    tokens, facts = verify(strided(logits), lengths, drafts)
    assert tokens.tolist() == expected
    starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1]
    reached = [s + at for s, row in zip(starts, expected) for at, t in enumerate(row) if t >= 0]
    assert facts[reached] == pytest.approx(row_facts(logits, reached))


@pytest.mark.parametrize("at", [0, 7, 64, 99])
def test_what_is_not_a_number_is_not_verified(at):
    logits = torch.zeros(2, 100)
    assert verify(logits, [1], [0]) is not None
    logits[1, at] = math.nan
    assert verify(logits, [1], [1]) is not None, "a row that is not reached does not matter"
    assert verify(logits, [1], [0]) is None


@BOTH
def test_the_gap_of_a_flat_distribution_is_not_lost_in_a_large_vocabulary(facts_of):
    logits = torch.zeros(1, 50_000)
    logits[0, 7] = math.log(2)  # twice as likely as the rest: p1 - p2 is only 2e-5
    assert facts_of(logits)[0, 2] == pytest.approx(0.5, abs=1e-6)


@BOTH
def test_tokens_that_cannot_come_have_no_entropy(facts_of):
    _, entropy, gap, _ = facts_of(torch.tensor([[0.0, 0.0, -math.inf, -math.inf]]))[0]
    assert entropy == pytest.approx(math.log(2)) and gap == 0.0


@BOTH
def test_certainty(facts_of):
    top1, entropy, gap, normaliser = facts_of(torch.tensor([[1000.0, 0.0, 0.0]]))[0]
    assert (top1, gap, normaliser) == (1.0, 1.0, 1000.0)
    assert entropy == pytest.approx(0.0, abs=1e-30)


def test_entropies_are_compared_with_the_requests_own_last_tokens():
    window = EntropyWindow()
    assert window.ratio([5.0]) == 1.0, "nothing to compare with"
    assert window.ratio([10.0]) == pytest.approx(2.0)
    assert window.ratio([7.5]) == pytest.approx(1.0)
    assert EntropyWindow().ratio([99.0]) == 1.0, "another request's"


@given(st.lists(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=5), min_size=1, max_size=40))
def test_the_window_slides(steps):
    window, values = EntropyWindow(), []
    for new in steps:
        found = window.ratio(new)
        values += new
        before = values[-1 - ENTROPY_WINDOW : -1]
        expected = values[-1] * len(before) / sum(before) if before else 1.0
        assert found == pytest.approx(expected)


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

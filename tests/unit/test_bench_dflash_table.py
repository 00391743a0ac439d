"""The pure parts of ``make bench-dflash``: what counts hits, collisions and growth."""

import itertools
from collections import Counter
from functools import cache as memoise

import pytest
import torch
from deepseek_flash.dflash.fingerprint import Fingerprint, FingerprintKey
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.dflash_capacity import Traffic, belady, lru, rate, segmented_lru, through
from loadtest.bench.dflash_collisions import (
    colliding_pairs,
    colliding_prompts,
    cost,
    expected_pairs,
    fingerprints,
)
from loadtest.bench.dflash_table import compare, growth
from loadtest.bench.dflash_workload import Mix, make_cache

CPU = torch.device("cpu")
STREAMS = st.lists(st.integers(0, 4), max_size=12)
CAPACITIES = st.integers(1, 4)


def most_hits(stream, capacity):
    """Of every choice of victims."""

    @memoise
    def best(place, kept):
        if place == len(stream):
            return 0
        if (prompt := stream[place]) in kept:
            return 1 + best(place + 1, kept)
        if len(kept) < capacity:
            return best(place + 1, kept | {prompt})
        return max(best(place + 1, kept - {victim} | {prompt}) for victim in kept)

    return best(0, frozenset())


@given(STREAMS, CAPACITIES)
def test_belady_has_the_most_hits_that_there_are(stream, capacity):
    assert sum(belady(stream, capacity)) == most_hits(tuple(stream), capacity)


@given(STREAMS, CAPACITIES)
def test_lru_hits_what_came_again_soon_enough(stream, capacity):
    expected = []
    for place, prompt in enumerate(stream):
        before = stream[:place]
        since = before[len(before) - before[::-1].index(prompt) :] if prompt in before else None
        expected.append(since is not None and len(set(since)) < capacity)
    assert lru(stream, capacity) == expected


@given(STREAMS, CAPACITIES)
def test_segments_without_a_protected_one_are_lru(stream, capacity):
    assert segmented_lru(stream, capacity, share=0.0) == lru(stream, capacity)


@given(STREAMS, CAPACITIES)
def test_no_policy_beats_the_optimum_nor_hits_what_is_new(stream, capacity):
    first = [prompt not in stream[:place] for place, prompt in enumerate(stream)]
    for policy in (lru, segmented_lru, belady):
        hits = policy(stream, capacity)
        assert sum(hits) <= sum(belady(stream, capacity))
        assert not any(hit and new for hit, new in zip(hits, first, strict=True))


def test_a_hit_protects_from_a_scan():
    stream = [1, 1, *range(2, 12), 1]
    assert segmented_lru(stream, 5)[-1] and not lru(stream, 5)[-1]


@pytest.mark.parametrize("capacity", [3, 100])
def test_a_stream_through_the_cache(capacity):
    traffic = Traffic(requests=120, prompts=12, zipf=0.8, novel_share=0.2)
    stream = traffic.stream()
    cache = make_cache(CPU, capacity, hidden_size=0)
    hits = through(cache, stream)
    assert sum(hits) <= sum(belady(stream, capacity))
    assert len(cache.table) == min(capacity, len(set(stream)))
    if capacity >= len(set(stream)):
        assert hits == lru(stream, capacity)


def test_traffic_is_reproducible_and_what_it_says():
    traffic = Traffic(requests=4000, prompts=10, zipf=1.0, novel_share=0.25)
    stream = traffic.stream()
    assert stream == traffic.stream()
    counts = Counter(stream)
    novel = [prompt for prompt in counts if prompt >= 10]
    assert all(counts[prompt] == 1 for prompt in novel)
    assert 0.2 < len(novel) / 4000 < 0.3
    assert 1.6 < counts[0] / counts[1] < 2.4
    assert rate([False, True, True, False], 1) == pytest.approx(2 / 3)


@given(st.lists(st.integers(-3, 3)))
def test_colliding_pairs(values):
    assert colliding_pairs(values) == sum(a == b for a, b in itertools.combinations(values, 2))


def test_expected_pairs():
    assert expected_pairs(2, 32) == 2**-32
    assert expected_pairs(10**6, 64) == pytest.approx(2.71e-8, rel=1e-3)


@pytest.mark.parametrize("number", [1, 2, 10, 1000])
def test_fingerprints_are_of_different_contexts(number):
    found = fingerprints(FingerprintKey.derive(b"secret"), number)
    assert len(found) == len(set(found)) == number


def test_colliding_prompts_cost_a_counted_miss(monkeypatch):
    true = Fingerprint.value.fget
    monkeypatch.setattr(Fingerprint, "value", property(lambda self: true(self) % 64))
    pairs = colliding_prompts(FingerprintKey.derive(b"the benchmark's", 32), 40)
    assert pairs and all(a.prompt_token_ids != b.prompt_token_ids for a, b in pairs)
    one = pairs[:1]
    assert cost(CPU, one) == {
        "pairs": 1, "collisions counted": 1, "own answers": 2, "answers to another prompt": 0
    }  # fmt: skip


def test_growth_sees_a_leak_and_passes_over_peaks():
    def leaking(per_sample):
        return [100.0 + per_sample * place for place in range(100)]

    rise, slope = growth(leaking(0.5), every=1000)
    assert rise == pytest.approx(15.0) and slope == pytest.approx(50.0)
    peaks = [100.0 + 60.0 * (place % 7 == 0 or place > 95) for place in range(100)]
    assert growth(peaks, every=1000)[0] == 0.0
    warming = [min(place, 40) * 9.0 for place in range(100)]
    assert growth(warming, every=1000) == (0.0, 0.0)


def test_the_mix_is_the_same_twice_and_a_difference_shows():
    found = compare(Mix(CPU, 24), Mix(CPU, 24), 300)
    assert found["lookup"] > 100 and found["record"] > 100
    assert not sum(count for name, count in found.items() if name.startswith("different"))
    other = Mix(CPU, 24)
    other.cache.table.find = lambda fingerprint: None
    assert compare(Mix(CPU, 24), other, 300)["different lookup"]

"""The ring of the last layer's keys, against attention over all keys that were ever accepted."""

import random

import numpy as np
import pytest
import torch
from deepseek_flash.dspark.signals import ATTENTION_WINDOW, attention_variance
from deepseek_flash.worker.attention import Geometry, LastLayer, Pass, Slots
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, KEY_HEADS, DIM, DRAFTS, SLOTS = 4, 2, 3, 5, 3
GEOMETRY = Geometry((HEADS, DIM), (KEY_HEADS, DIM), 0.7, lambda query: query)


class Model:
    """Requests whose true keys and queries are known."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.layer = LastLayer(GEOMETRY, SLOTS, DRAFTS, 256, torch.empty(0))
        self.keys, self.queries, self.computed = {}, {}, {}
        self.prompts = {}

    def add(self, name):
        self.prompts[name] = self.random.randrange(1, 80)
        self.keys[name] = torch.empty(0, KEY_HEADS, DIM)
        self.queries[name] = torch.empty(0, HEADS, DIM)
        self.computed[name] = 0

    def preempt(self, name):
        """Everything is computed anew when it comes back."""
        self.prompts[name] = max(self.prompts[name], len(self.keys[name]))
        self.computed[name] = 0

    def step(self, names, padding):
        """A pass over these requests; returns (told, true) variances of those that got a token."""
        scheduled, lengths = [], []
        for name in names:
            left = self.prompts[name] - self.computed[name]
            if left > 0:
                scheduled.append(self.random.randint(1, left))
                lengths.append(0)
            else:
                lengths.append(self.random.randint(0, DRAFTS))
                scheduled.append(1 + lengths[-1])
        computed = [self.computed[name] for name in names]
        wanted = self.random.random() < 0.7
        self.layer.expect(names, Pass(scheduled, computed, lengths), wanted)
        keys, queries = [], []
        for name, count, before in zip(names, scheduled, computed):
            # Tokens that were there before have the keys they had before.
            known = self.keys[name][before : before + count]
            fresh = torch.randn(count - len(known), KEY_HEADS, DIM, generator=self.torch)
            keys.append(torch.cat([known, fresh]))
            queries.append(torch.randn(count, HEADS, DIM, generator=self.torch))
        passed = torch.cat([*keys, torch.full((padding, KEY_HEADS, DIM), torch.nan)])
        asked = torch.cat([*queries, torch.full((padding, HEADS, DIM), torch.nan)])
        self.layer.overhear(asked, lambda rows: passed[rows])
        accepted = [self.random.randint(0, length) for length in lengths]
        told = self.layer.variance(accepted)
        if self.random.random() < 0.3:  # vLLM runs a pass of its own
            junk = torch.full((7, HEADS, DIM), torch.nan)
            self.layer.overhear(junk, lambda rows: junk[rows, :KEY_HEADS])
        assert (told is not None) == wanted
        pairs = []
        for row, name in enumerate(names):
            kept = scheduled[row] - lengths[row] + accepted[row]
            end = computed[row] + kept
            self.keys[name] = torch.cat(
                [self.keys[name][: computed[row]], keys[row][:kept], self.keys[name][end:]]
            )
            self.computed[name] = end
            if end >= self.prompts[name] and told is not None:
                window = torch.zeros(1, ATTENTION_WINDOW, KEY_HEADS, DIM)
                last = self.keys[name][max(0, end - ATTENTION_WINDOW) : end]
                window[0, ATTENTION_WINDOW - len(last) :] = last
                query = queries[row][kept - 1][None]
                true = attention_variance(query, window, GEOMETRY.scale).item()
                pairs.append((float(told[row]), true))
        return pairs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_as_if_all_keys_were_at_hand(seed, padding):
    model, names = Model(seed), []
    compared = 0
    for number in range(40):
        if len(names) < SLOTS and (not names or model.random.random() < 0.5):
            names.append(f"request{number}")
            model.add(names[-1])
        model.random.shuffle(names)  # the batch is reordered
        if model.random.random() < 0.1:
            model.preempt(names[0])
        for told, true in model.step(names, padding):
            assert told == pytest.approx(true, rel=1e-4, abs=1e-7)
            compared += 1
        if model.random.random() < 0.1:
            model.layer.release(names.pop())
    assert compared > 5
    for name in names:
        model.layer.release(name)
    assert len(model.layer) == 0


def test_more_requests_than_slots_take_turns():
    slots = Slots(2)
    assert slots.take(["a", "b"])[1] != []
    taken, fresh = slots.take(["b", "c"])  # "a" is not in the batch and loses its slot
    assert len(set(taken)) == 2 and fresh == [taken[1]]
    assert slots.take(["b", "c"])[1] == []
    assert slots.take(["a", "b"]) == ([slots._of["a"], slots._of["b"]], [slots._of["a"]])
    assert len(slots.take(["c", "b"])[1]) == 1
    assert slots.take(["a", "b"])[1] == [slots._of["a"]]  # not "b", though unused for longer
    for name in "abc":
        slots.release(name)
    assert len(slots) == 0 and len(slots._free) == 2


def test_a_slot_forgets_whom_it_belonged_to():
    layer, keys = LastLayer(GEOMETRY, 1, DRAFTS, 64, torch.empty(0)), torch.ones(9, KEY_HEADS, DIM)
    for name, count, computed in (("first", 9, 30), ("second", 1, 40)):  # from a prefix cache
        layer.expect([name], Pass([count], [computed], [0]))
        layer.overhear(torch.ones(count, HEADS, DIM), lambda rows: keys[rows])
        layer.variance([0])
        window = layer._ring.window(np.array([0]), np.array([computed + count - 1]))
        assert int(window.flatten(2).any(dim=2).sum()) == count
        layer.release(name)

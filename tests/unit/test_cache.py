"""The cache over its table: what is found, what is kept apart, what goes."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from deepseek_flash.contract import Continuation, LookupResult, Outcome
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.entry import Eviction, Offer
from deepseek_flash.dflash.fingerprint import Fingerprint, FingerprintKey, identity
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import SemanticWindows
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fakes import Clock
from tests.unit.stack import plan_for

KEY = FingerprintKey.derive(b"secret")
LONG = 10_000  # a budget that no answer here reaches


def make(capacity=16, block=4, hidden_size=2, quota=None, key=KEY, windows=None, **options):
    windows = SemanticWindows("none") if windows is None else windows
    device = torch.device("cpu")
    table = Table(capacity, device, block=block, hidden_size=hidden_size, tenant_quota=quota)
    return DFlashCache(key, table, windows, **options)


def ask(prompt=(1, 2, 3), budget=LONG, **changes):
    return plan_for(prompt, {"max_tokens": budget}, **changes)


def store(cache, tokens=(5, 6, 7), complete=True, state=None, signature=b"", **changes):
    made = Continuation(tuple(tokens), complete)
    offers = cache.record(Outcome(ask(**changes), (made,), signature=signature), state)
    cache.table.check_integrity()
    return offers


def found(cache, **changes):
    """The exact continuation's tokens, or None."""
    lookup = cache.lookup(ask(**changes))
    return lookup.replays[0].token_ids if lookup.result is LookupResult.EXACT else None


# -- blocks ----------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=14).map(tuple), complete=st.booleans(),
    budget=st.integers(1, 20), block=st.integers(1, 6),
)  # fmt: skip
def test_a_long_answer_is_a_chain_of_blocks(tokens, complete, budget, block):
    cache = make(block=block)
    store(cache, tokens, complete)
    assert len(cache.table) == -(-len(tokens) // block)
    (known,) = cache.lookup(ask(budget=budget)).replays
    assert tokens[: len(known.token_ids)] == known.token_ids
    assert len(known.token_ids) >= min(budget, len(tokens))
    assert known.complete == (complete and known.token_ids == tokens)


@given(
    answer=st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple),
    cuts=st.lists(st.integers(1, 12), max_size=6), complete=st.booleans(),
)  # fmt: skip
def test_longer_outcomes_extend_shorter_ones(answer, cuts, complete):
    cache = make()
    for cut in cuts:
        store(cache, answer[:cut], complete=False)
    store(cache, answer, complete)
    assert cache.lookup(ask()).replays == (Continuation(answer, complete),)
    assert not cache.table.offers[Offer.DIVERGED] and not cache.collisions


def test_a_divergence_keeps_the_first_and_stops_there():
    cache = make()
    store(cache, (1, 2, 3, 4, 5, 6))
    assert store(cache, (1, 2, 3, 4, 9, 9)) == {Offer.KNOWN: 1, Offer.DIVERGED: 1}
    assert store(cache, (1, 2, 3, 9, 5, 6, 7, 8, 9)) == {Offer.DIVERGED: 1}
    assert found(cache) == (1, 2, 3, 4, 5, 6) and len(cache.table) == 2


def test_without_its_middle_a_chain_is_a_beginning():
    cache = make()
    store(cache, range(1, 11))
    context = Fingerprint(KEY, identity(ask(), KEY), (1, 2, 3))
    context.extend((1, 2, 3, 4))
    cache.table.remove(cache.table.find(context.value))
    (known,) = cache.lookup(ask()).replays
    assert known == Continuation((1, 2, 3, 4), complete=False)


# -- tenants (CB-44, CB-47) ------------------------------------------------------------------


def test_tenants_share_nothing():
    cache = make()
    store(cache, cache_salt="a", turn_starts=(0,), state=torch.ones(2))
    assert found(cache, cache_salt="a") == (5, 6, 7)
    for other in ("", "b", "a\0", "A"):
        plan = ask(cache_salt=other, turn_starts=(0,))
        assert cache.lookup(plan).result is LookupResult.MISS
        assert not cache.neighbours(plan, torch.ones(2)).references


def test_a_session_id_is_its_tenants_own():
    cache = make(windows=SemanticWindows("semantic"))
    for salt, start in (("a", 1), ("b", 2)):
        store(cache, cache_salt=salt, session_id="s", turn_starts=(start,))
    tenants = {key[0] for key in cache.windows._sessions}
    assert len(tenants) == 2


@pytest.mark.parametrize("quota", [None, 50])
def test_a_flood_of_one_tenant_leaves_the_other_its_place(quota):
    cache = make(capacity=200, quota=quota)
    hot = [(1, number) for number in range(50)]
    for prompt in hot:
        store(cache, prompt=prompt, cache_salt="a")
    memory = cache.table.bytes_on_device
    for number in range(2000):
        plan = ask(prompt=(2, number), cache_salt="b")
        cache.record(Outcome(plan, (Continuation((5,), True),)))
    cache.table.check_integrity()
    assert sum(found(cache, prompt=prompt, cache_salt="a") is not None for prompt in hot) >= 45
    assert cache.table.bytes_on_device == memory


def test_one_tenant_alone_has_it_all():
    cache = make(capacity=20)
    for number in range(20):
        store(cache, prompt=(number,))
    assert len(cache.table) == 20


# -- windows ---------------------------------------------------------------------------------


def test_the_same_turn_after_another_history_drafts_and_never_replays():
    cache = make()
    store(cache, prompt=(1, 2, 8, 9), turn_starts=(2,))
    lookup = cache.lookup(ask(prompt=(3, 4, 5, 8, 9), turn_starts=(3,)))
    assert lookup.result is LookupResult.WINDOW
    assert lookup.drafts == (5, 6, 7) and not lookup.replays
    alone = cache.lookup(ask(prompt=(8, 9)))
    assert alone.result is LookupResult.MISS, "not the answer to a prompt of these turns alone"


def test_window_drafts_are_chained_and_cut_to_the_budget():
    cache = make()
    store(cache, range(1, 11), prompt=(1, 8, 9), turn_starts=(1,))
    plan = ask(prompt=(2, 8, 9), turn_starts=(1,))
    assert cache.lookup(plan).drafts == tuple(range(1, 11))
    short = ask(prompt=(2, 8, 9), turn_starts=(1,), budget=4)
    assert cache.lookup(short).drafts == (1, 2, 3, 4)


def test_without_semantic_windows_each_turn_is_one():
    cache = make()
    session = {"session_id": "s"}
    store(cache, prompt=(1, 2), turn_starts=(1,), **session)
    store(cache, (7, 7), prompt=(1, 2, 3, 4), turn_starts=(1, 3), **session)
    assert cache.lookup(ask(prompt=(9, 4), turn_starts=(1,))).drafts == (7, 7)


def test_drafts_serve_whatever_settings_made_them():
    cache = make()
    store(cache, prompt=(1, 8, 9), turn_starts=(1,))
    sampled = plan_for((2, 8, 9), {"temperature": 1.0, "seed": None}, turn_starts=(1,))
    assert cache.lookup(sampled).drafts == (5, 6, 7)


def test_a_lookup_tries_the_turns_from_the_last_boundary_on():
    windows = SemanticWindows("semantic", threshold=0.0)
    cache = make(windows=windows)
    session = {"session_id": "s", "cache_salt": "t"}

    def current():
        ((tenant, name),) = windows._sessions
        return windows.current(tenant, name)

    # Two topics: after enough of both, standardised states tell them apart.
    topics = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])
    for number in range(4):
        store(cache, prompt=(number,), state=topics[number % 2], cache_salt="t")
    store(cache, prompt=(1, 2, 3, 4), turn_starts=(1, 3), state=topics[0], **session)
    before = current()
    prompt = (1, 2, 3, 4, 5, 6)
    store(cache, prompt=prompt, turn_starts=(1, 3, 5), state=topics[1], **session)
    after = current()
    assert after.id != before.id and after.start == 5
    # Its key is the new window's turns alone, so another history finds it.
    other = ask(prompt=(9, 9, 6), turn_starts=(2,), cache_salt="t")
    assert cache.lookup(other).result is LookupResult.WINDOW


def test_without_an_encoder_windows_are_told_apart_by_what_the_engine_saw():
    windows = SemanticWindows("semantic", threshold=0.0)
    cache = make(windows=windows)
    topics = [np.array(it, np.float32).tobytes() for it in ([1, 1, 1], [-1, -1, -1])]
    for number in range(4):
        store(cache, prompt=(number,), signature=topics[number % 2])
    session, found = {"session_id": "s"}, []
    for topic, prompt in enumerate([(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)]):
        turns = tuple(range(1, len(prompt), 2))
        store(cache, prompt=prompt, turn_starts=turns, signature=topics[topic // 2], **session)
        ((tenant, name),) = windows._sessions
        found.append(windows.current(tenant, name))
    assert found[0].id == found[1].id != found[2].id and found[2].start == 5
    # Another model's states are another size: they begin anew.
    store(cache, prompt=(8, 9), signature=np.ones(5, np.float32).tobytes())


# -- time and orders -------------------------------------------------------------------------


def test_old_entries_are_not_used_even_before_they_are_removed():
    clock = Clock()
    cache = make(ttl=10.0, clock=clock.monotonic)
    store(cache, prompt=(1, 8), turn_starts=(1,))
    plan = ask(prompt=(2, 8), turn_starts=(1,))
    clock.now += 9.9
    assert found(cache, prompt=(1, 8)) and cache.lookup(plan).drafts
    clock.now += 0.1
    assert not found(cache, prompt=(1, 8)) and not cache.lookup(plan).drafts
    assert cache.expire() == 1 and not len(cache.table)


def test_an_old_entry_makes_way_for_the_same_answer():
    clock = Clock()
    cache = make(ttl=10.0, clock=clock.monotonic)
    store(cache)
    clock.now += 10
    store(cache)
    assert found(cache) == (5, 6, 7) and cache.table.evictions == {Eviction.TTL: 1}


@pytest.mark.parametrize("salt", [None, "a"])
def test_flush(salt):
    clock = Clock()
    cache = make(clock=clock.monotonic)
    before, after = clock.now - 1, clock.now + 1
    for tenant in ("a", "b"):
        store(cache, cache_salt=tenant)
    assert cache.flush(salt) == (2 if salt is None else 1)
    assert found(cache, cache_salt="a") is None
    assert (found(cache, cache_salt="b") is None) == (salt is None)
    store(cache, cache_salt="a", arrival=before)
    assert found(cache, cache_salt="a") is None, "what ran at the flush is not stored after it"
    store(cache, cache_salt="a", arrival=after)
    assert found(cache, cache_salt="a")


def test_an_engine_that_is_gone_leaves_nothing_and_cannot_come_back():
    cache = make()
    store(cache, arrival=10.0)
    store(cache, arrival=20.0, namespace="new", prompt=(9,))
    assert len(cache.table) == 1
    assert not store(cache, arrival=15.0), "a late outcome of the old engine"
    assert found(cache, namespace="new", prompt=(9,))


def test_use_dflash_false_is_off():
    cache = make()
    store(cache)
    assert cache.lookup(ask(use_dflash=False)).result is LookupResult.OFF


# -- proofs (CB-46) --------------------------------------------------------------------------


def collide(monkeypatch):
    monkeypatch.setattr(Fingerprint, "value", property(lambda self: 42))


def test_colliding_contexts_are_a_miss_and_counted(monkeypatch):
    collide(monkeypatch)
    cache = make()
    store(cache, prompt=(1,))
    assert found(cache, prompt=(1,)) == (5, 6, 7)
    assert found(cache, prompt=(2,)) is None
    store(cache, (8, 9), prompt=(2,))
    assert cache.collisions == 1 and cache.table.evictions == {Eviction.COLLISION: 1}
    assert found(cache, prompt=(2,)) == (8, 9), "the newer one, and never the other's"
    assert found(cache, prompt=(1,)) is None


def test_colliding_windows_draft_nothing(monkeypatch):
    collide(monkeypatch)
    cache = make()
    store(cache, prompt=(1, 8), turn_starts=(1,))
    assert not cache.lookup(ask(prompt=(1, 9), turn_starts=(1,))).drafts


@pytest.mark.parametrize("column", ["tokens", "length", "complete", "mac", "tenant"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(column):
    cache = make()
    store(cache)
    row = cache.table._index[next(iter(cache.table._index))]
    damaged = getattr(cache.table, column)[row]
    if column == "tokens":
        damaged[1] += 1
    elif column == "mac":
        damaged[0] += 1
    else:
        getattr(cache.table, column)[row] = 2 if column == "length" else 1 - damaged
    assert found(cache) is None
    if column != "tenant":  # of that the host keeps a copy of its own
        assert cache.record(Outcome(ask(), (Continuation((5, 6, 7), True),))) == {Offer.STORED: 1}
        assert found(cache) == (5, 6, 7) and cache.collisions == 1


def test_uses_that_come_while_uses_are_noted_wait_for_the_next_time(monkeypatch):
    cache = make()
    store(cache)
    calls = []

    def find(fingerprint):
        calls.append(fingerprint)
        assert len(calls) < 10, "the updater follows its lookups without an end"
        cache._uses.append((fingerprint, 0))

    assert found(cache)
    monkeypatch.setattr(cache.table, "find", find)
    cache.note_uses()
    assert len(calls) == len(cache._uses) == 1


@pytest.fixture
def often_switched():
    """Threads take turns every 20 us instead of every 5 ms: more places to tear, less waiting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


def test_lookups_beside_a_busy_updater_tell_the_truth_or_nothing(monkeypatch, often_switched):
    """Torn reads: rows are reused under the eyes of lookups that take no lock. They never pause,
    so they use entries faster than the updater can note it: it must not wait for an end of that.
    """
    monkeypatch.setattr("deepseek_flash.dflash.cache.MOST_USES", 8)
    cache = make(capacity=4, block=16)
    wrong, stop = [], threading.Event()

    def answer(number):
        return tuple(number * 100 + place for place in range(1, 16))

    def look():
        while not stop.is_set():
            for number in range(8):
                tokens = found(cache, prompt=(number,))
                if tokens not in (None, answer(number)):
                    wrong.append((number, tokens))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(400):
        number = turn % 8
        plan = ask(prompt=(number,))
        cache.record(Outcome(plan, (Continuation(answer(number), True),)))
    stop.set()
    for thread in threads:
        thread.join()
    cache.table.check_integrity()
    assert not wrong


# -- neighbours and references ---------------------------------------------------------------


def test_neighbours_are_found_by_the_state_and_scored_by_the_outcome():
    cache = make()
    near, far = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    store(cache, (1, 2, 3), prompt=(1,), state=near)
    store(cache, (7, 8, 9), prompt=(2,), state=far)
    plan = ask(prompt=(3,))
    (reference,) = cache.neighbours(plan, near).references
    assert reference.token_ids == (1, 2, 3) and reference.similarity > 0.9
    cache.record(Outcome(plan, (Continuation((1, 2, 4), True),)), near)
    assert cache.guessed == {"answers": 1, "tokens": 3, "guessed": 3, "right": 2}
    assert not cache._references


def test_a_state_belongs_to_the_context_and_outlives_a_longer_answer():
    cache = make()
    store(cache, (1,), complete=False, state=torch.tensor([3.0, 4.0]))
    store(cache, (1, 2), complete=True)
    assert cache.table.hidden.abs().sum() == 7.0


def test_what_lookups_used_goes_last():
    cache = make(capacity=3)
    for number in range(3):
        store(cache, prompt=(number,))
    assert found(cache, prompt=(0,))
    store(cache, prompt=(3,))
    assert found(cache, prompt=(0,)) and not found(cache, prompt=(1,))
    for number in range(4, 20):  # passing traffic, each asked once
        store(cache, prompt=(number,))
    assert found(cache, prompt=(0,)), "what was used again is protected"


def test_a_lookup_changes_nothing():
    cache = make()
    store(cache, prompt=(1, 8), turn_starts=(1,))
    before = [tensor.clone() for tensor in cache.table.tensors]
    for plan in (ask(prompt=(1, 8)), ask(prompt=(2, 8), turn_starts=(1,)), ask(prompt=(7,))):
        cache.lookup(plan)
        cache.lookup(replace(plan, use_dflash=False))
    assert all(map(torch.equal, before, cache.table.tensors))

"""The table's rules one by one, on every device there is."""

import random
from dataclasses import replace

import pytest
import torch
from deepseek_flash.dflash.entry import SHARED, Entry, Eviction, Offer, Segment, WindowKey
from deepseek_flash.dflash.table import Table

CUDA = torch.cuda.is_available()


@pytest.fixture(params=["cpu", "cuda"] if CUDA else ["cpu"])
def device(request):
    return request.param


@pytest.fixture
def make(device):
    def make(capacity=4, **options):
        options = {"block": 8, "hidden_size": 3, **options}
        return Table(capacity, torch.device(device), **options)

    return make


def entry(fingerprint, tokens=(1, 2), complete=False, tenant=7, window=0, **more):
    # Stands for a MAC: another one for another continuation, and only then.
    mac = more.pop("mac", (hash((fingerprint, tokens, complete)), 5))
    return Entry(fingerprint, mac, tenant, tokens, complete, window, **more)


def fill(table, *fingerprints, **more):
    return [table.insert(entry(fingerprint, **more)) for fingerprint in fingerprints]


def stored(table):
    table.check_integrity()
    return {int(f) for f, s in zip(table.fingerprint, table.segment) if s != Segment.FREE}


def row_of(table, fingerprint):
    row = table.find(fingerprint)
    assert row is not None
    return row


def test_what_goes_in_comes_out(make):
    table = make()
    given = entry(
        -(2**63), tokens=(0, 2**31 - 1, 3), complete=True, tenant=2**63 - 1, window=9,
        mac=(-1, 2**63 - 1), confidence=(0.25, 0.5), created=1e9 + 1 / 3,
        window_key=WindowKey(2**63 - 1, (-(2**63), 0)),
    )  # fmt: skip
    assert table.insert(given, torch.tensor([1.0, 2.0, 3.0])) is None
    row = row_of(table, given.fingerprint)
    assert table.read(row) == given and table.find_window(2**63 - 1) == row
    assert table.hidden[row].tolist() == [1.0, 2.0, 3.0]
    table.remove(row)
    assert table.find(given.fingerprint) is None and table.read(row) is None
    assert table.find_window(2**63 - 1) is None
    assert not any(tensor.any() for tensor in table.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", [0, 2])
def test_the_state_may_be_narrow_or_absent(make, dtype, hidden_size):
    table = make(hidden_size=hidden_size, hidden_dtype=dtype)
    table.insert(entry(1), torch.ones(hidden_size))
    assert table.hidden.dtype == dtype and table.hidden.sum() == hidden_size
    table.insert(entry(1, tokens=(1, 2, 3)))  # of the same context: its state is known already
    assert table.hidden.sum() == hidden_size
    table.remove(row_of(table, 1))
    table.insert(entry(2))
    assert table.hidden.sum() == 0


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA here"))],
)
def test_every_device_does_the_same(device):
    tables = [Table(6, torch.device(d), block=8, hidden_size=3) for d in ("cpu", device)]
    source = random.Random(3)
    for step in range(200):
        fingerprint, length = source.randrange(12), source.randint(1, 8)
        key = WindowKey(step % 5 - 2, (step, -step)) if step % 3 else None
        offered = entry(
            fingerprint, (fingerprint,) * length, length > 6, window=step // 50, created=step / 3,
            window_key=key,
        )  # fmt: skip
        hidden, action, gone = torch.rand(3), source.randrange(4), step % 67 == 66
        for table in tables:
            table.insert(offered, hidden, protected=action == 1)
            if action == 2:
                table.remove(row_of(table, fingerprint))
            if gone:
                table.close_window(step // 50)
                table.expire(step / 3, 15.0)
    one, other = tables
    assert all(torch.equal(a, b.cpu()) for a, b in zip(one.tensors, other.tensors))
    assert one.window_key[:, 0].any()
    assert one.offers == other.offers and one.evictions == other.evictions
    assert len(one) and all(one.evictions[reason] for reason in ("capacity", "window", "ttl"))
    other.check_integrity()


def test_bytes_are_what_the_design_says(make):
    table = make(1536, block=256, hidden_size=576)
    assert table.bytes_on_device == 1536 * (13 * 8 + 256 * 4 + 576 * 4 + 2 * 4 + 8)


def test_nothing_is_allocated_after_construction(make, device):
    table = make(8)
    before = [tensor.data_ptr() for tensor in table.tensors]
    views = [table.fingerprint, table.mac, table.tenant, table.length, table.complete,
             table.window, table.last_use, table.segment, table.window_key]  # fmt: skip
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    hidden = torch.ones(3)
    for step in range(100):
        key = WindowKey(step % 3, (step, 1))
        table.insert(entry(step % 13, tokens=(1,) * (1 + step % 8), window_key=key), hidden)
        table.promote(row_of(table, step % 13))
        table.close_window(0)
    table.expire(1.0, 0.0)
    assert [tensor.data_ptr() for tensor in table.tensors] == before
    assert all(view.data_ptr() - before[0] < 13 * 8 for view in views)
    assert device == "cpu" or torch.cuda.memory_allocated() == held


@pytest.mark.parametrize(
    ("first", "second", "offer"),
    [
        (((1, 2), False), ((1, 2), False), Offer.KNOWN),
        (((1, 2), False), ((1, 2, 3), False), Offer.EXTENDED),
        (((1, 2), False), ((1, 2), True), Offer.EXTENDED),
        (((1, 2), False), ((1, 2, 3), True), Offer.EXTENDED),
        (((1, 2), False), ((1,), False), Offer.KNOWN),  # CB-40: the smaller budget comes later
        (((1, 2), False), ((1,), True), Offer.DIVERGED),
        (((1, 2), False), ((1, 3, 4), False), Offer.DIVERGED),
        (((1, 2), True), ((1, 2), False), Offer.KNOWN),
        (((1, 2), True), ((1,), False), Offer.KNOWN),
        (((1, 2), True), ((1, 2, 3), True), Offer.DIVERGED),
        (((1, 2), True), ((3,), True), Offer.DIVERGED),
        (((), True), ((), True), Offer.KNOWN),
    ],
)
def test_the_first_entry_stays_unless_it_is_extended(make, first, second, offer):
    table = make()
    table.insert(entry(1, *first))
    table.insert(entry(1, *second))
    assert table.offers == {Offer.STORED: 1, offer: 1}
    kept = table.read(row_of(table, 1))
    assert kept == entry(1, *(second if offer is Offer.EXTENDED else first))
    table.check_integrity()


@pytest.mark.parametrize("change", [{"tenant": 8}, {"mac": (0, 0)}])
def test_a_collision_is_counted_and_keeps_the_first(make, change):
    table = make()
    table.insert(entry(1))
    table.insert(replace(entry(1), **change))
    assert table.offers[Offer.COLLIDED] == 1 and table.read(row_of(table, 1)) == entry(1)


@pytest.mark.parametrize(
    "bad",
    [
        entry(1, tokens=(1,) * 9), entry(1, tokens=()), entry(1, tokens=(2**31,)),
        entry(2**63), entry(1, mac=(2**63, 0)), entry(1, window=SHARED),
        entry(1, window_key=WindowKey(2**63, (0, 0))),
        entry(1, window_key=WindowKey(0, (0, -(2**63) - 1))),
    ],
)  # fmt: skip
def test_a_bad_entry_changes_nothing(make, bad):
    table = make(1)
    table.insert(entry(5))
    with pytest.raises((ValueError, OverflowError)):
        table.insert(bad)
    with pytest.raises(ValueError, match="hidden"):
        table.insert(entry(6), torch.ones(4))
    assert stored(table) == {5} and table.offers == {Offer.STORED: 1}


KEY = WindowKey(0, (3, 4))  # 0 is a fingerprint like any other


def test_the_last_written_takes_a_windows_fingerprint_for_good(make):
    table = make()
    table.insert(entry(1, window_key=KEY))
    assert table.find_window(0) == row_of(table, 1) and table.find_window(1) is None
    table.insert(entry(2, window_key=replace(KEY, mac=(5, 6))))
    assert table.find_window(0) == row_of(table, 2)
    assert table.read(row_of(table, 1)) == entry(1)
    table.check_integrity()
    table.insert(entry(1, window_key=KEY))  # known: writes nothing, so it takes nothing back
    assert table.find_window(0) == row_of(table, 2)
    table.remove(row_of(table, 2))
    assert table.find_window(0) is None and stored(table) == {1}
    table.insert(entry(3, window_key=KEY))
    table.insert(entry(1, tokens=(1, 2, 3), window_key=KEY))
    assert table.find_window(0) == row_of(table, 1) and stored(table) == {1, 3}
    assert table.read(row_of(table, 3)) == entry(3)


@pytest.mark.parametrize("key", [None, KEY, WindowKey(0, (5, 6)), WindowKey(9, (3, 4))])
def test_an_extension_brings_its_own_window_key(make, key):
    table = make()
    table.insert(entry(1, window_key=KEY))
    longer = entry(1, tokens=(1, 2, 3), window_key=key)
    table.insert(longer)  # KEY's MAC is over the shorter continuation
    row = row_of(table, 1)
    assert table.read(row) == longer
    for fingerprint in (0, 9):
        found = key is not None and key.fingerprint == fingerprint
        assert table.find_window(fingerprint) == (row if found else None)
    table.check_integrity()


@pytest.mark.parametrize("stored_key", [None, KEY])
@pytest.mark.parametrize(
    ("change", "offer"),
    [({}, Offer.KNOWN), ({"tokens": (1,)}, Offer.KNOWN), ({"tokens": (2,)}, Offer.DIVERGED),
     ({"mac": (0, 0)}, Offer.COLLIDED), ({"tenant": 8}, Offer.COLLIDED)],
)  # fmt: skip
def test_what_is_not_written_leaves_the_window_key(make, stored_key, change, offer):
    table = make()
    table.insert(entry(1, window_key=stored_key))
    table.insert(replace(entry(1, window_key=WindowKey(9, (5, 6))), **change))
    assert table.offers == {Offer.STORED: 1, offer: 1}
    row = row_of(table, 1)
    assert table.read(row) == entry(1, window_key=stored_key)
    assert table.find_window(0) == (row if stored_key else None) and table.find_window(9) is None
    table.check_integrity()


def test_the_least_recently_used_goes_first(make):
    table = make(3)
    fill(table, 1, 2, 3)
    table.touch(row_of(table, 1))
    assert fill(table, 4) == [Eviction.CAPACITY]
    assert stored(table) == {1, 3, 4}


def test_the_protected_go_last_and_are_limited(make):
    table = make(5)
    fill(table, 1, 2, 3, 4)
    table.insert(entry(5), protected=True)
    fill(table, 6, 7, 8, 9, 10)
    assert stored(table) == {5, 7, 8, 9, 10}
    for fingerprint in (5, 7, 8, 9, 10):
        table.promote(row_of(table, fingerprint))
    fill(table, 11)
    assert stored(table) == {7, 8, 9, 10, 11}  # 0.8 of five: the first protected was pushed out


def test_a_closed_windows_entries_go_first_unless_shared(make):
    table = make(4)
    fill(table, 1, 2, 3, window=1)
    fill(table, 4, window=2)
    table.promote(row_of(table, 1))  # of no avail once its window is closed
    table.touch(row_of(table, 2), window=2)
    assert table.close_window(1) == 2 and table.close_window(1) == 2
    assert fill(table, 5, 6, 7) == [Eviction.WINDOW, Eviction.WINDOW, Eviction.CAPACITY]
    assert stored(table) == {2, 5, 6, 7}
    assert table.window[row_of(table, 2)] == SHARED


def test_a_closed_entry_comes_back_when_another_window_uses_it(make):
    table = make(2)
    fill(table, 1, window=1)
    table.close_window(1)
    fill(table, 2, window=2)
    table.touch(row_of(table, 1), window=2)
    assert fill(table, 3) == [Eviction.CAPACITY] and stored(table) == {1, 3}


def test_a_tenant_at_its_quota_evicts_its_own(make):
    table = make(110, tenant_quota=100)  # CB-47
    fill(table, *range(10), tenant=1)
    assert set(fill(table, *range(1000, 1100), tenant=2)) == {None}
    assert set(fill(table, *range(2000, 2500), tenant=2)) == {Eviction.QUOTA}
    assert stored(table) == {*range(10), *range(2400, 2500)}
    assert table.flush(2) == 100 and stored(table) == set(range(10))
    assert table.evictions == {Eviction.QUOTA: 500, Eviction.FLUSH: 100}


def test_entries_expire_by_the_time_they_were_written(make):
    table = make()
    table.insert(entry(1, created=10.0))
    table.insert(entry(2, created=11.0))
    table.insert(entry(1, tokens=(1, 2, 3), created=12.0))  # written again
    assert table.expire(20.0, 9.0) == 1 and stored(table) == {1}
    assert table.flush() == 1 and len(table) == 0


def test_a_free_row_is_refused(make):
    table = make()
    for operation in (table.touch, table.promote, table.remove):
        for row in (0, -1, 4):
            with pytest.raises(KeyError):
                operation(row)


@pytest.mark.parametrize(
    "options",
    [{"capacity": 0}, {"block": 0}, {"hidden_size": -1}, {"tenant_quota": 0},
     {"protected_share": 1.1}],
)  # fmt: skip
def test_bad_sizes_are_refused(make, options):
    with pytest.raises(ValueError, match=r"capacity|quota"):
        make(**options)


@pytest.mark.parametrize("column", ["fingerprint", "length", "segment", "tenant", "last_use"])
def test_damage_is_noticed(make, column):
    table = make()
    fill(table, 1, 2)
    getattr(table, column)[row_of(table, 1)] = 0
    with pytest.raises(AssertionError):
        table.check_integrity()


@pytest.mark.parametrize("column", range(4))
def test_damage_to_a_window_key_is_noticed(make, column):
    table = make()
    table.insert(entry(1, window_key=KEY))
    table.insert(entry(2))
    for fingerprint in (1, 2):
        cell = table.window_key[row_of(table, fingerprint), column]
        cell += 1
        with pytest.raises(AssertionError):
            table.check_integrity()
        cell -= 1
        table.check_integrity()


def test_a_wrong_window_index_is_noticed(make):
    table = make()
    table.insert(entry(1, window_key=KEY))
    table.insert(entry(2))
    row, other = row_of(table, 1), row_of(table, 2)
    for index in ({}, {0: other}, {0: 0}, {0: row, 9: row}, {0: row, 9: other}, {0: row, 9: 0}):
        table._window_index = index
        with pytest.raises(AssertionError, match="window index"):
            table.check_integrity()

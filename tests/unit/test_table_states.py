"""Random life of a table, against the reference model in dictionaries and lists."""

import torch
from deepseek_flash.dflash.entry import Entry, Segment, WindowKey
from deepseek_flash.dflash.table import Table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.table_reference import ReferenceTable

CAPACITY, QUOTA, BLOCK, WIDTH = 5, 3, 4, 2
FINGERPRINTS = st.integers(0, 9).map(lambda number: number * 2**60 - 2**62)
TENANTS, WINDOWS, PICKS = st.integers(1, 3), st.integers(0, 3), st.integers(0, 99)
WINDOW_FINGERPRINTS = -(2**63), 0, 5  # few, so that they clash
WINDOW_KEYS = st.none() | st.builds(
    WindowKey, st.sampled_from(WINDOW_FINGERPRINTS), st.tuples(st.integers(0, 1), st.just(-1))
)
TOKENS = st.lists(st.integers(0, 1), max_size=BLOCK).map(tuple)


class TableMachine(RuleBasedStateMachine):
    quota = QUOTA

    def __init__(self):
        super().__init__()
        device = torch.device("cpu")
        sizes = {"block": BLOCK, "hidden_size": WIDTH, "tenant_quota": self.quota}
        self.table = Table(CAPACITY, device, **sizes)
        quota = self.quota or CAPACITY + 1
        self.reference = ReferenceTable(CAPACITY, quota, self.table.order.protected_limit)
        self.memory = [tensor.data_ptr() for tensor in self.table.tensors]
        self.now = 0.0

    def pick(self, pick):
        fingerprint = list(self.reference.entries)[pick % len(self.reference.entries)]
        return fingerprint, self.table.find(fingerprint)

    def offer(self, fingerprint, tenant, tokens, complete, window, window_key, mac=0, **options):
        self.now += 1
        entry = Entry(
            fingerprint, (len(tokens), mac), tenant, tokens, complete or not tokens, window,
            (0.25, 0.5), self.now, window_key,
        )  # fmt: skip
        hidden = torch.tensor([float(len(tokens)), float(entry.complete)])
        evicted = self.table.insert(entry, hidden, **options)
        assert evicted == self.reference.insert(entry, **options)

    @rule(
        fingerprint=FINGERPRINTS, tenant=TENANTS, tokens=TOKENS, complete=st.booleans(),
        window=WINDOWS, window_key=WINDOW_KEYS, mac=st.sampled_from([0, 0, 0, 1]),
        protected=st.booleans(),
    )  # fmt: skip
    def insert(self, **fields):
        self.offer(**fields)

    @precondition(lambda self: self.reference.entries)
    @rule(
        pick=PICKS, cut=st.integers(0, BLOCK), more=TOKENS, complete=st.booleans(),
        window=WINDOWS, window_key=WINDOW_KEYS,
    )  # fmt: skip
    def insert_again(self, pick, cut, more, **fields):
        """What is stored, cut or continued: by chance alone that is rare."""
        fingerprint, row = self.pick(pick)
        stored = self.table.read(row)
        self.offer(fingerprint, stored.tenant, (stored.tokens[:cut] + more)[:BLOCK], **fields)

    @precondition(lambda self: self.reference.entries)
    @rule(pick=PICKS, window=st.none() | WINDOWS)
    def touch(self, pick, window):
        fingerprint, row = self.pick(pick)
        self.table.touch(row, window)
        self.reference.touch(fingerprint, window)

    @precondition(lambda self: self.reference.entries)
    @rule(pick=PICKS)
    def promote(self, pick):
        fingerprint, row = self.pick(pick)
        self.table.promote(row)
        self.reference.promote(fingerprint)

    @precondition(lambda self: self.reference.entries)
    @rule(pick=PICKS)
    def remove(self, pick):
        fingerprint, row = self.pick(pick)
        self.table.remove(row)
        self.reference.remove(fingerprint)

    @rule(window=WINDOWS)
    def close_window(self, window):
        assert self.table.close_window(window) == self.reference.close_window(window)

    @rule(tenant=st.none() | TENANTS)
    def flush(self, tenant):
        assert self.table.flush(tenant) == self.reference.flush(tenant)

    @rule(ttl=st.integers(3, 20))
    def expire(self, ttl):
        assert self.table.expire(self.now, ttl) == self.reference.expire(self.now, ttl)

    @invariant()
    def both_hold_the_same(self):
        table, reference = self.table, self.reference
        table.check_integrity()
        rows = {fingerprint: table.find(fingerprint) for fingerprint in reference.entries}
        assert {f: table.read(row) for f, row in rows.items()} == reference.entries
        assert len(table) == len(rows)
        for window in WINDOW_FINGERPRINTS:
            assert table.find_window(window) == rows.get(reference.find_window(window))
        segments, uses = table.segment.tolist(), table.last_use.tolist()
        for fingerprint, row in rows.items():
            entry = reference.entries[fingerprint]
            assert segments[row] == reference.segment_of(fingerprint) != Segment.FREE
            assert table.hidden[row].tolist() == [len(entry.tokens), entry.complete]
        assert sorted(rows, key=lambda fingerprint: uses[rows[fingerprint]]) == reference.uses
        for segment, expected in reference.order.items():  # who goes first
            assert list(table.order.segments[segment]) == [
                rows[fingerprint] for fingerprint in expected
            ]
        assert {r: n for r, n in reference.evictions.items() if n} == table.evictions
        assert {o: n for o, n in reference.offers.items() if n} == table.offers
        assert [tensor.data_ptr() for tensor in table.tensors] == self.memory


class FairMachine(TableMachine):
    """Without a quota: what a tenant may hold depends on how many there are."""

    quota = None


TestTableMachine = TableMachine.TestCase
TestFairMachine = FairMachine.TestCase
TestTableMachine.settings = TestFairMachine.settings = settings(
    max_examples=50, stateful_step_count=30
)

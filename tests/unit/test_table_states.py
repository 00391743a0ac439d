"""Random life of a table, against the reference model in dictionaries and lists."""

import torch
from deepseek_flash.dflash.entry import Entry, Segment
from deepseek_flash.dflash.table import Table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.table_reference import ReferenceTable

CAPACITY, QUOTA, BLOCK, WIDTH = 5, 3, 4, 2
FINGERPRINTS = st.integers(0, 9).map(lambda number: number * 2**60 - 2**62)
TENANTS, WINDOWS, PICKS = st.integers(1, 3), st.integers(0, 3), st.integers(0, 99)
TOKENS = st.lists(st.integers(0, 1), max_size=BLOCK).map(tuple)


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        device = torch.device("cpu")
        sizes = {"block": BLOCK, "hidden_size": WIDTH, "tenant_quota": QUOTA}
        self.table = Table(CAPACITY, device, **sizes)
        self.reference = ReferenceTable(CAPACITY, QUOTA, self.table.protected_limit)
        self.memory = [tensor.data_ptr() for tensor in self.table.tensors]
        self.now = 0.0

    def pick(self, pick):
        fingerprint = list(self.reference.entries)[pick % len(self.reference.entries)]
        return fingerprint, self.table.find(fingerprint)

    @rule(
        fingerprint=FINGERPRINTS, tenant=TENANTS, tokens=TOKENS, complete=st.booleans(),
        window=WINDOWS, other_mac=st.sampled_from([0, 0, 0, 1]), protected=st.booleans(),
    )  # fmt: skip
    def insert(self, fingerprint, tenant, tokens, complete, window, other_mac, protected):
        self.now += 1
        entry = Entry(fingerprint, (len(tokens), other_mac), tenant, tokens,
                      complete or not tokens, window, (0.25, 0.5), self.now)  # fmt: skip
        hidden = torch.tensor([float(len(tokens)), float(entry.complete)])
        evicted = self.table.insert(entry, hidden, protected=protected)
        assert evicted == self.reference.insert(entry, protected)

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
        segments, uses = table.segment.tolist(), table.last_use.tolist()
        for fingerprint, row in rows.items():
            entry = reference.entries[fingerprint]
            assert segments[row] == reference.segment_of(fingerprint) != Segment.FREE
            assert table.hidden[row].tolist() == [len(entry.tokens), entry.complete]
        assert sorted(rows, key=lambda fingerprint: uses[rows[fingerprint]]) == reference.uses
        for segment, expected in reference.order.items():  # who goes first
            assert list(table._order[segment]) == [rows[fingerprint] for fingerprint in expected]
        assert {r: n for r, n in reference.evictions.items() if n} == table.evictions
        assert {o: n for o, n in reference.offers.items() if n} == table.offers
        assert [tensor.data_ptr() for tensor in table.tensors] == self.memory


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=50, stateful_step_count=30)

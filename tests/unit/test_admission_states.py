"""Random life on the board, seen by two processes, against a model in plain dictionaries."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from deepseek_flash import admission
from deepseek_flash.admission import CLAIM_SECONDS, AdmissionBoard, Claim
from deepseek_flash.contract import Refused
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.fakes import Clock

LIMIT, TENANT_LIMIT = 4, 2
TENANTS = st.sampled_from(["", "a", "é"])
PICKS = st.integers(0, 30)


def counts(board):
    return board.in_flight, board.running, board.progress


class BoardMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.patch = patch.object(admission, "time", self.clock)
        self.patch.start()
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "board"
        self.scheduler, self.decoder = AdmissionBoard(path), AdmissionBoard(path)
        self.tickets: list[Claim] = []
        self.claimed: dict[Claim, tuple[str, float]] = {}
        self.running: dict[Claim, str] = {}
        self.worked, self.draining = 0, False

    def teardown(self):
        self.patch.stop()
        self.directory.cleanup()

    @rule(tenant=TENANTS, tenant_limit=st.sampled_from([0, TENANT_LIMIT]))
    def claim(self, tenant, tenant_limit):
        if not self.draining:
            oldest = self.clock.now - CLAIM_SECONDS
            self.claimed = {t: c for t, c in self.claimed.items() if c[1] >= oldest}
        tenants = [name for name, _ in self.claimed.values()] + list(self.running.values())
        full = len(tenants) >= LIMIT or (tenant_limit and tenants.count(tenant) >= tenant_limit)
        if self.draining or full:
            with pytest.raises(Refused):
                self.scheduler.claim(tenant, LIMIT, tenant_limit)
            return
        ticket = self.scheduler.claim(tenant, LIMIT, tenant_limit)
        assert ticket not in self.tickets
        assert ticket.slot not in {other.slot for other in (*self.claimed, *self.running)}
        self.tickets.append(ticket)
        self.claimed[ticket] = tenant, self.clock.now

    @precondition(lambda self: self.tickets)
    @rule(pick=PICKS)
    def start(self, pick):
        ticket = self.tickets[pick % len(self.tickets)]
        started = self.decoder.start(ticket.slot, ticket.generation)
        assert started == (ticket in self.claimed)
        if started:
            self.running[ticket] = self.claimed.pop(ticket)[0]

    @precondition(lambda self: self.tickets)
    @rule(pick=PICKS)
    def release(self, pick):
        ticket = self.tickets[pick % len(self.tickets)]
        self.decoder.release(ticket.slot, ticket.generation)
        self.running.pop(ticket, None)

    @rule()
    def work(self):
        self.decoder.note_progress()
        self.worked += 1

    @precondition(lambda self: self.tickets)
    @rule(pick=PICKS)
    def abandon(self, pick):
        ticket = self.tickets[pick % len(self.tickets)]
        self.scheduler.abandon(ticket)
        self.claimed.pop(ticket, None)

    @rule(seconds=st.sampled_from([1.0, 20.0, CLAIM_SECONDS + 1]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def drain(self):
        self.decoder.drain()
        self.draining = True

    @rule()
    def reset(self):
        self.decoder.reset()
        self.running.clear()
        self.draining = False

    @invariant()
    def both_count_the_same(self):
        expected = len(self.claimed) + len(self.running), len(self.running), self.worked
        assert counts(self.scheduler) == counts(self.decoder) == expected


TestBoardMachine = BoardMachine.TestCase
TestBoardMachine.settings = settings(max_examples=50, stateful_step_count=30)

"""The board of requests in flight: limits hold, a plan runs once, nothing stays for ever."""

import pytest
from deepseek_flash import admission
from deepseek_flash.admission import CAPACITY, CLAIM_SECONDS, AdmissionBoard, Claim
from deepseek_flash.contract import Refused

from tests.unit.fakes import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


@pytest.fixture
def board(tmp_path):
    return AdmissionBoard(tmp_path / "board")


def claim(board, tenant="", limit=8, tenant_limit=0):
    return board.claim(tenant, limit, tenant_limit)


def counts(board):
    return board.in_flight, board.running, board.progress


def test_a_request_from_claim_to_release(board):
    assert counts(board) == (0, 0, 0)
    ticket = claim(board)
    assert counts(board) == (1, 0, 0)
    assert board.start(ticket.slot, ticket.generation)
    assert counts(board) == (1, 1, 0)
    board.release(ticket.slot, ticket.generation)
    assert counts(board) == (0, 0, 0)


def test_only_the_engines_work_is_progress(board):
    """The launcher's own probe ends by its deadline in a hung engine: that proves nothing."""
    ticket = claim(board)
    board.start(ticket.slot, ticket.generation)
    board.release(ticket.slot, ticket.generation)
    assert board.progress == 0
    board.note_progress()
    assert board.progress == 1


def test_an_abandoned_claim_is_free_and_not_finished(board):
    ticket = claim(board)
    board.abandon(ticket)
    assert counts(board) == (0, 0, 0)
    assert not board.start(ticket.slot, ticket.generation)


def test_a_running_request_cannot_be_abandoned(board):
    ticket = claim(board)
    board.start(ticket.slot, ticket.generation)
    board.abandon(ticket)
    assert board.running == 1


def test_a_plan_is_usable_once(board):
    ticket = claim(board)
    assert board.start(ticket.slot, ticket.generation)
    assert not board.start(ticket.slot, ticket.generation)
    board.release(ticket.slot, ticket.generation)
    assert not board.start(ticket.slot, ticket.generation)
    board.release(ticket.slot, ticket.generation)
    assert counts(board) == (0, 0, 0)


def test_a_used_slot_ignores_its_earlier_plan(board):
    first = claim(board)
    board.abandon(first)
    second = claim(board)
    assert second.slot == first.slot and second.generation != first.generation
    assert not board.start(first.slot, first.generation)
    board.abandon(first)
    assert board.start(second.slot, second.generation)
    board.release(first.slot, first.generation)
    assert board.running == 1


@pytest.mark.parametrize("slot", [-1, CAPACITY, 10**12])
def test_a_slot_that_there_is_not(board, slot):
    assert not board.start(slot, 1)
    board.release(slot, 1)
    board.abandon(Claim(slot, 1))


def test_generations_wrap_around(board):
    board._slots["generation"][0] = 0xFFFFFFFF
    ticket = claim(board)
    assert ticket.generation == 0
    assert board.start(ticket.slot, 0)


# -- limits ----------------------------------------------------------------------------------


def test_limit(board):
    claim(board, limit=2)
    running = claim(board, limit=2)
    board.start(running.slot, running.generation)
    with pytest.raises(Refused, match=r"^queue_limit of 2 "):
        claim(board, limit=2)
    board.release(running.slot, running.generation)
    claim(board, limit=2)


def test_no_limit_exceeds_the_board(board):
    board._slots["state"] = admission.RUNNING
    with pytest.raises(Refused, match=f"queue_limit of {CAPACITY} "):
        claim(board, limit=10**6)


def test_tenant_limit(board):
    claim(board, "a", tenant_limit=1)
    with pytest.raises(Refused, match="tenant_queue_limit of 1 "):
        claim(board, "a", tenant_limit=1)
    claim(board, "b", tenant_limit=1)
    claim(board, "a", tenant_limit=0)
    assert board.in_flight == 3


def test_a_free_slot_counts_for_no_tenant(board):
    board.abandon(claim(board, "a", tenant_limit=1))
    claim(board, "a", tenant_limit=1)


def test_draining_refuses_new_requests_and_lets_the_others_end(board):
    ticket = claim(board)
    board.drain()
    assert board.draining
    with pytest.raises(Refused, match="shutting down"):
        claim(board)
    assert board.start(ticket.slot, ticket.generation)


# -- what gets lost --------------------------------------------------------------------------


def test_a_lost_claim_is_reaped(board, clock):
    lost = claim(board, limit=1)
    clock.now += CLAIM_SECONDS
    with pytest.raises(Refused):
        claim(board, limit=1)
    clock.now += 1
    again = claim(board, limit=1)
    assert not board.start(lost.slot, lost.generation)
    assert board.start(again.slot, again.generation)


def test_a_running_request_is_never_reaped(board, clock):
    ticket = claim(board, limit=1)
    board.start(ticket.slot, ticket.generation)
    clock.now += 1e6
    with pytest.raises(Refused):
        claim(board, limit=1)


def test_reset_forgets_what_an_engine_that_is_gone_ran(board):
    running, waiting = claim(board), claim(board)
    board.start(running.slot, running.generation)
    board.drain()
    board.reset()
    assert counts(board) == (1, 0, 0) and not board.draining
    assert board.start(waiting.slot, waiting.generation)


def test_two_boards_on_one_file_see_each_other(tmp_path):
    scheduler, decoder = (AdmissionBoard(tmp_path / "board") for _ in range(2))
    ticket = claim(scheduler)
    assert decoder.in_flight == 1
    assert decoder.start(ticket.slot, ticket.generation)
    decoder.drain()
    assert scheduler.draining and scheduler.running == 1
    decoder.release(ticket.slot, ticket.generation)
    assert counts(scheduler) == counts(decoder) == (0, 0, 0)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600

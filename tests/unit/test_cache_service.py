"""The cache's two threads, whether the encoder pays, and what is shown of it all."""

import json
import threading

import pytest
import torch
from deepseek_flash import metrics, operate
from deepseek_flash.contract import (
    CacheOrder,
    CacheReport,
    Continuation,
    InvalidField,
    LookupResult,
    Neighbours,
    NeighboursQuery,
    Outcome,
)
from deepseek_flash.dflash import payoff as payoff_module
from deepseek_flash.dflash.observer import Observer
from deepseek_flash.dflash.payoff import Payoff
from deepseek_flash.dflash.service import QUEUED_ENCODINGS, CacheService, NullService
from deepseek_flash.dflash.windows import SemanticWindows

from tests.unit.stack import plan_for
from tests.unit.test_cache import make

DEADLINE = 5.0


class FakeEncoder:
    """A prompt's state is its first token's; ``gate`` holds it up."""

    def __init__(self):
        self.calls, self.gate, self.error = [], None, None

    cost = 0.001

    def close(self):
        pass

    def encode(self, token_ids):
        self.calls.append(tuple(token_ids))
        if self.gate is not None:
            assert self.gate.wait(DEADLINE)
        if self.error:
            raise self.error
        return torch.tensor([1.0, 0.0]) if token_ids[0] % 2 else torch.tensor([-1.0, 0.5])


class Harness:
    def __init__(self, encoder=None, semantic="on", windows="none"):
        self.recorder = metrics.Recorder()
        self.cache = make(windows=SemanticWindows(windows))
        self.encoder = encoder
        self.service = CacheService(self.cache, Observer(self.recorder), encoder, semantic)

    def send(self, message):
        """The reply; the test fails where there is none."""
        replies, done = [], threading.Event()

        def reply(answer):
            replies.append(answer)
            done.set()

        self.service.submit(message, reply)
        assert done.wait(DEADLINE)
        assert len(replies) == 1
        return replies[0]

    def tell(self, prompt=(1, 2), tokens=(5, 6), **changes):
        changes = {"seconds_saved": None, **changes}
        seconds = changes.pop("seconds_saved")
        outcome = Outcome(plan_for(prompt, **changes), (Continuation(tokens, True),),
                          seconds_saved=seconds)  # fmt: skip
        assert self.send(outcome) == CacheReport("recorded")
        return outcome

    def counts(self):
        self.service.set_gauges()
        return {(s.name, *(v for _, v in s.labels)): n for s, n in self.recorder.take().items()}


@pytest.fixture
def harness():
    made = []

    def make_harness(*arguments, **options):
        made.append(Harness(*arguments, **options))
        return made[-1]

    yield make_harness
    for item in made:
        item.service.close()


def test_an_outcome_is_found_once_it_was_acknowledged(harness):
    h = harness()
    assert h.service.lookup(plan_for((1, 2))).result is LookupResult.MISS
    h.tell((1, 2))
    assert h.service.lookup(plan_for((1, 2))).result is LookupResult.EXACT
    counts = h.counts()
    assert counts["dflash_lookups_total", "miss"] == counts["dflash_lookups_total", "exact"] == 1
    assert counts["dflash_hit_rate",] == 0.5 and counts["dflash_entries",] == 1
    assert counts["dflash_offers_total", "stored"] == 1
    assert counts["dflash_lookup_seconds_count",] == 2


def test_a_lookup_waits_neither_for_the_encoder_nor_for_an_update(harness):
    encoder = FakeEncoder()
    encoder.gate = threading.Event()
    h = harness(encoder)
    h.service.submit(NeighboursQuery(plan_for((1,))), lambda answer: None)
    blocked, release = threading.Event(), threading.Event()

    def block():
        blocked.set()
        assert release.wait(DEADLINE)

    h.service._updates.put(block)
    assert blocked.wait(DEADLINE)
    assert h.service.lookup(plan_for((1, 2))).result is LookupResult.MISS  # returns at all
    release.set()
    encoder.gate.set()


def test_a_lookup_never_raises(harness, monkeypatch):
    h = harness()
    monkeypatch.setattr(h.cache, "lookup", lambda plan: 1 / 0)
    assert h.service.lookup(plan_for()).result is LookupResult.MISS


def test_neighbours_and_the_outcome_share_one_encoding(harness):
    encoder = FakeEncoder()
    h = harness(encoder)
    for prompt in ((1, 1), (2, 2)):
        h.tell(prompt)
    plan = plan_for((3, 3))
    assert h.service.lookup(plan).ask_neighbours
    answer = h.send(NeighboursQuery(plan))
    assert [r.token_ids for r in answer.references] == [(5, 6)]
    h.send(Outcome(plan, (Continuation((5, 6), True),)))
    assert encoder.calls == [(1, 1), (2, 2), (3, 3)]
    counts = h.counts()
    assert counts["dflash_lookups_total", "semantic"] == 1
    assert counts["dflash_reference_tokens_total", "right"] == 2
    assert counts["dflash_encoder_active",] == 1 and counts["dflash_encoder_seconds_count",] == 3


def test_without_an_encoder_nobody_is_asked(harness):
    h = harness(None)
    assert not h.service.lookup(plan_for()).ask_neighbours
    assert h.send(NeighboursQuery(plan_for())).references == ()


def test_an_encoder_that_fails_costs_only_its_state(harness):
    encoder = FakeEncoder()
    encoder.error = RuntimeError("out of memory")
    h = harness(encoder)
    h.tell()
    assert h.service.lookup(plan_for((1, 2))).result is LookupResult.EXACT
    plan = plan_for((4,))
    assert h.send(NeighboursQuery(plan)) == Neighbours(plan.plan_id, ())


def test_questions_that_find_no_place_are_answered_at_once(harness):
    encoder = FakeEncoder()
    encoder.gate = threading.Event()
    h = harness(encoder)
    answers = []
    for number in range(40):
        h.service.submit(NeighboursQuery(plan_for((number,))), answers.append)
    # One is with the encoder at most, and QUEUED_ENCODINGS wait.
    assert len(answers) >= 40 - 1 - QUEUED_ENCODINGS
    assert h.counts()["dflash_updates_dropped_total", "question"] == len(answers)
    assert not h.service.lookup(plan_for((99,))).ask_neighbours
    h.tell((7,))  # goes without a state
    encoder.gate.set()


def test_a_session_is_encoded_for_its_windows_even_when_neighbours_do_not_pay(harness):
    encoder = FakeEncoder()
    h = harness(encoder, semantic="off", windows="semantic")
    h.tell((1,))
    assert not encoder.calls and not h.service.lookup(plan_for((2,))).ask_neighbours
    h.tell((9, 8, 2), session_id="s", turn_starts=(0, 2))
    assert encoder.calls == [(2,)], "the turn alone"
    plain = harness(encoder := FakeEncoder(), semantic="off")
    plain.tell((2,), session_id="s", turn_starts=(0,))
    assert not encoder.calls


def test_orders(harness):
    h = harness()
    h.tell((1,), cache_salt="a")
    h.tell((2,), cache_salt="b")
    assert h.send(CacheOrder("flush", "a")) == CacheReport("1")
    assert h.send(CacheOrder("flush")) == CacheReport("1")
    assert h.counts()["dflash_evictions_total", "flush"] == 2
    refused = h.send(CacheOrder("explode"))
    assert isinstance(refused, InvalidField) and "explode" in str(refused)


def test_statistics_are_readable(harness):
    h = harness(FakeEncoder())
    empty = operate.render(json.loads(h.send(CacheOrder("stats")).text))
    assert "none yet" in empty and "0 of 16" in empty
    h.tell((1,))
    h.service.lookup(plan_for((1,)))
    h.service.lookup(plan_for((9,)))
    text = operate.render(json.loads(h.send(CacheOrder("stats")).text))
    assert "1 of 16, 1 complete" in text and "2, 50.0% hits" in text and "cpu" in text
    assert "stored 1" in text


def test_no_server_on_that_port(capsys):
    assert operate.main(["stats", "--http-port", "1"]) == 1
    assert "HTTP_PORT=1" in capsys.readouterr().err


def test_switched_off():
    service, answers = NullService(), []
    assert service.lookup(plan_for()).result is LookupResult.OFF
    service.submit(CacheOrder("flush"), answers.append)
    assert "enable_dflash" in str(answers[0])
    service.set_gauges()
    service.close()


# -- whether it pays -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "active"), [("on", True), ("off", False)])
def test_a_fixed_mode_is_not_judged(mode, active):
    payoff = Payoff(mode)
    for _ in range(200):
        payoff.spent(1.0)
        payoff.saved(0.0)
    assert payoff.active is active


@pytest.mark.parametrize(("saved", "active"), [(0.02, True), (0.005, False)])
def test_auto_goes_on_while_it_pays(saved, active):
    payoff = Payoff("auto")
    for _ in range(payoff_module.TRIAL):
        assert payoff.active, "a trial first"
        payoff.spent(0.01)
        payoff.saved(saved)
    assert payoff.active is active


def test_after_many_misses_auto_tries_again():
    payoff = Payoff("auto")
    for _ in range(payoff_module.TRIAL):
        payoff.spent(0.01)
        payoff.saved(0.0)
    for _ in range(payoff_module.TRY_AGAIN_AFTER):
        assert not payoff.active
        payoff.missed()
    assert payoff.active

"""The thread with a bounded queue, and what feeds the cache through one."""

import threading

import pytest
from deepseek_flash import metrics
from deepseek_flash.background import BackgroundWorker
from deepseek_flash.contract import CacheReport, Neighbours, NeighboursQuery, Outcome, Reference
from deepseek_flash.decoder import feedback as feedback_module
from deepseek_flash.decoder.feedback import BackgroundFeedback

from tests.unit.stack import plan_for

DEADLINE = 5.0  # seconds; only a failing test waits so long


class Gate:
    """Holds a worker until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *ignored):
        self.entered.set()
        assert self.opened.wait(DEADLINE)


def wait(event):
    assert event.wait(DEADLINE)


def test_jobs_run_in_order_and_an_error_stops_nothing():
    worker, done, seen = BackgroundWorker("test", 8), threading.Event(), []
    assert worker.put(lambda: seen.append(1))
    assert worker.put(lambda: 1 / 0)
    assert worker.put(lambda: seen.append(2))
    assert worker.put(done.set)
    wait(done)
    assert seen == [1, 2]
    worker.close()
    assert not worker.put(done.clear)


def test_a_full_queue_takes_nothing():
    worker, gate = BackgroundWorker("test", 2), Gate()
    worker.put(gate)
    wait(gate.entered)
    assert [worker.put(lambda: None) for _ in range(3)] == [True, True, False]
    assert worker.full
    gate.opened.set()
    worker.close()


def test_it_tidies_between_jobs():
    tidied = threading.Event()
    worker = BackgroundWorker("test", 2, tidied.set)
    wait(tidied)
    worker.close()


# -- feedback to the cache -------------------------------------------------------------------


class Feedback:
    def __init__(self, ask):
        self.recorder = metrics.Recorder()
        self.feedback = BackgroundFeedback(ask, self.recorder)

    def __enter__(self):
        return self.feedback

    def __exit__(self, *exception):
        self.feedback.close()

    def dropped(self):
        return {
            dict(series.labels)["reason"]: count
            for series, count in self.recorder.take().items()
            if series.name == metrics.FEEDBACK_DROPPED.name
        }


def outcome():
    return Outcome(plan_for(), ())


def test_an_outcome_is_told_and_then_acknowledged():
    told, then = [], threading.Event()

    def ask(message):
        assert not then.is_set()
        told.append(message)
        return CacheReport("recorded")

    with Feedback(ask) as feedback:
        message = outcome()
        feedback.tell(message, then.set)
        wait(then)
    assert told == [message]


def test_a_cache_that_fails_is_counted_and_acknowledged_all_the_same():
    then = threading.Event()

    def ask(message):
        raise RuntimeError("gone")

    with (harness := Feedback(ask)) as feedback:
        feedback.tell(outcome(), then.set)
        wait(then)
        asked = []
        feedback.ask(NeighboursQuery(plan_for()), asked.append, lambda: True)
        feedback.close()
    assert harness.dropped()["error"] >= 1 and not asked


def test_what_finds_no_place_is_dropped_counted_and_never_waited_for(monkeypatch):
    monkeypatch.setattr(feedback_module, "QUEUED", 1)
    gate, acknowledged = Gate(), []
    with (harness := Feedback(gate)) as feedback:
        feedback.tell(outcome(), lambda: acknowledged.append("first"))
        wait(gate.entered)
        feedback.tell(outcome(), lambda: acknowledged.append("second"))
        feedback.tell(outcome(), lambda: acknowledged.append("third"))
        assert acknowledged == ["third"], "a twin must not wait for what nobody will hear of"
        assert harness.dropped() == {"outcome_queue_full": 1}
        gate.opened.set()


def test_a_question_that_came_too_late_is_not_asked():
    calls, done = [], threading.Event()

    def ask(message):
        calls.append(message)
        done.set()

    with Feedback(ask) as feedback:
        feedback.ask(NeighboursQuery(plan_for((1,))), calls.append, lambda: False)
        feedback.ask(last := NeighboursQuery(plan_for((2,))), calls.append, lambda: True)
        wait(done)
    assert calls == [last]


@pytest.mark.parametrize("answer", [Neighbours("plan", (Reference((1, 2), 0.5),)), None])
def test_a_question_waits_for_no_outcome(answer):
    gate, answers, done = Gate(), [], threading.Event()

    def ask(message):
        if isinstance(message, Outcome):
            gate()
            return CacheReport("recorded")
        done.set()
        return answer

    with Feedback(ask) as feedback:
        feedback.tell(outcome(), lambda: None)
        wait(gate.entered)
        feedback.ask(NeighboursQuery(plan_for()), answers.append, lambda: True)
        wait(done)
        gate.opened.set()
    assert answers == ([answer] if answer else [])

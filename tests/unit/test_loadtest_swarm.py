"""What a load test sends and measures, with clients and clocks that are made up."""

from types import SimpleNamespace

import msgspec
import pytest

from clients.request import Chunk, GenerationError
from loadtest.swarm import feed as feeds
from loadtest.swarm.feed import Feed
from loadtest.swarm.plan import PlannedLeg, read_plan, write_plan
from loadtest.traffic.trace import Entry


class Clock:
    """Time passes only when somebody sleeps, or by ``now``."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    time = SimpleNamespace(sleep=clock.sleep, process_time=lambda: clock.now / 4, perf_counter=None)
    monkeypatch.setattr(feeds, "time", time)
    return clock


def trace(count, **fields):
    return [Entry(text=f"prompt {number}", **fields) for number in range(count)]


def chunk(tokens, reason=None, prompt=7, cached=0):
    return Chunk("x", reason, tuple(range(tokens)), prompt, cached)


def answering(clock, *steps):
    """A client whose answer takes its time: (seconds, chunk or error) one after the other."""

    def send(request):
        for seconds, what in steps:
            clock.now += seconds
            if isinstance(what, Exception):
                raise what
            yield what

    return send


# -- who sends what --------------------------------------------------------------------------


def test_each_request_is_handed_out_once_in_order(clock):
    feed = Feed(clock)
    feed.begin(trace(3))
    assert [feed.take().number for _ in range(3)] == [0, 1, 2]
    assert feed.take(patience=0) is None
    feed.begin(trace(1))  # the next leg
    assert feed.take().entry.text == "prompt 0"


def test_before_the_first_leg_there_is_nothing(clock):
    assert Feed(clock).take(patience=0) is None


def test_processes_share_a_trace(clock):
    shares = []
    for worker in range(3):
        feed = Feed(clock)
        feed.begin(trace(8), worker, workers=3)
        numbers = iter(lambda feed=feed: getattr(feed.take(patience=0), "number", None), None)
        shares.append(list(numbers))
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


# -- what is measured ------------------------------------------------------------------------


def played(clock, send, **fields):
    feed = Feed(clock)
    feed.begin(trace(1, **fields))
    return feed.play(feed.take(), "grpc", send)


def test_moments_of_a_request(clock):
    steps = ((0.5, chunk(0)), (0.5, chunk(1)), (0.3, chunk(3)), (0.2, chunk(1, "stop", 7, 3)))
    record = played(clock, answering(clock, *steps))
    assert (record.due, record.sent, record.first, record.ended) == (0.0, 0.0, 1.0, 1.5)
    assert (record.tokens, record.prompt_tokens, record.cached_tokens) == (5, 7, 3)
    assert record.gaps == pytest.approx((0.1, 0.1, 0.1, 0.2))
    assert record.ran and not record.error


def test_an_open_loop_waits_for_the_moment(clock):
    record = played(clock, answering(clock, (1.0, chunk(1, "stop"))), at=2.5)
    assert clock.slept == [2.5]
    assert (record.due, record.sent, record.first_token, record.late) == (2.5, 2.5, 1.0, 0.0)


def test_who_is_late_counts_from_when_it_was_due(clock):
    feed = Feed(clock)
    feed.begin(trace(1, at=2.0))
    clock.now += 3.0  # all users were busy
    record = feed.play(feed.take(), "grpc", answering(clock, (1.0, chunk(1, "stop"))))
    assert (record.due, record.sent, record.late) == (2.0, 3.0, 1.0)
    assert (record.first_token, record.total) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (((0.1, GenerationError("no room")),), "GenerationError: no room"),
        (((0.1, chunk(1)), (0.1, ConnectionError("gone"))), "ConnectionError: gone"),
        (((0.1, chunk(1)),), "the stream ended without a finish reason"),
        ((), "the stream ended without a finish reason"),
    ],
)
def test_what_fails_is_a_record_too(clock, steps, error):
    record = played(clock, answering(clock, *steps))
    assert record.error == error and not record.ran


def test_a_replayed_answer_did_not_run(clock):
    record = played(clock, answering(clock, (0.1, chunk(4, "stop", prompt=7, cached=7))))
    assert not record.ran and not record.error


def test_the_use_of_a_core_is_since_the_legs_beginning(clock):
    feed = Feed(clock)
    feed.begin(trace(1))
    clock.now += 8.0
    assert feed.cpu() == pytest.approx(0.25)


def test_answers_do_not_depend_on_chance(clock):
    feed = Feed(clock)
    feed.begin(trace(1, max_tokens=5))
    assert dict(feed.take().request().sampling) == {"temperature": 0, "max_tokens": 5}


# -- plans -----------------------------------------------------------------------------------


def test_plans_are_read_as_they_were_written(tmp_path):
    legs = [PlannedLeg("a", "a.jsonl", 4, 60.0), PlannedLeg("b", "b.jsonl", 1, 1.5)]
    write_plan(tmp_path / "plan.json", legs)
    assert read_plan(tmp_path / "plan.json") == legs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "plan.json"),
        ('[{"name": "a", "trace": "t", "users": "4", "seconds": 1}]', "users"),
        ('[{"name": "a", "trace": "t", "users": 4}]', "seconds"),
    ],
)
def test_a_plan_that_is_none(tmp_path, content, said):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        read_plan(tmp_path / "plan.json")


def test_records_survive_their_file():
    from loadtest.player import _Line
    from loadtest.records import Record

    record = Record(3, "grpc", 0.0, 0.0, 0.5, 1.0, 2, 7, 1, (0.25,), "")
    line = msgspec.json.encode({"leg": 0, "worker": 0, "cpu": 0.1, "record": record})
    assert msgspec.json.decode(line, type=_Line).record == record

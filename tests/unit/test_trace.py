"""Traces: what is made is as it was ordered, and a log is read or refused by line and field."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.trace import (
    FOLLOW_UPS,
    SLOTS,
    TEMPLATES,
    TOPICS,
    Event,
    TraceError,
    generate,
    read_jsonl,
    write_jsonl,
)

USER = {"role": "user", "content": "a"}


def by_session(events):
    sessions = {}
    for event in events:
        sessions.setdefault((event.tenant, event.session), []).append(event)
    return sessions


@given(
    st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1),
    st.integers(1, 3), st.integers(1, 4),
)  # fmt: skip
def test_a_trace_is_what_was_ordered(seed, sessions, turns, switching, repeating, tenants, active):
    def make():
        return generate(seed, sessions, turns, switching, repeating, tenants=tenants, active=active)

    events = make()
    assert events == make()
    talks = by_session(events)
    assert len(talks) == sessions and len({tenant for tenant, _ in talks}) == min(tenants, sessions)
    opened, ended = set(), set()
    for event in events:
        opened.add(event.session)
        assert len(opened - ended) <= active
        if event.turn == turns - 1:
            ended.add(event.session)
    for talk in talks.values():
        assert [event.turn for event in talk] == list(range(turns))
        topics = [event.topic for event in talk]
        assert set(topics) <= set(TOPICS)
        changes = [a != b for a, b in itertools.pairwise(topics)]
        assert [event.is_switch for event in talk] == [False, *changes]
        assert switching or not any(changes)
        assert switching < 1 or all(changes)


def test_other_seeds_other_traces():
    assert len({tuple(generate(seed, 3, 4)) for seed in range(5)}) == 5


def test_sessions_are_interleaved():
    order = [event.session for event in generate(1, 8, 10)]
    assert sum(a == b for a, b in itertools.pairwise(order)) < len(order) / 3


def counted(share, zipf=1.0):
    events = generate(2, 60, 20, 0.2, share, follow_up_share=0.0, zipf=zipf)
    return sorted(Counter(event.text for event in events).values())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_questions_repeat_as_often_as_was_ordered(share):
    by_chance = 1 - len(counted(0.0)) / 1200  # there are only so many texts
    repeats = 1 - len(counted(share)) / 1200
    assert repeats == pytest.approx(share + (1 - share) * by_chance, abs=0.1)


def test_some_questions_are_popular():
    assert sum(counted(0.5, zipf=1.0)[-10:]) > 2 * sum(counted(0.5, zipf=0.0)[-10:])


def test_topics_switch_as_often_as_was_ordered():
    events = [event for event in generate(3, 100, 11, 0.3) if event.turn]
    assert sum(event.is_switch for event in events) / len(events) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_its_texts(topic):
    assert len(set(TEMPLATES[topic])) >= 8 and FOLLOW_UPS[topic] and SLOTS[topic]
    texts = {event.text for event in generate(4, 80, 20, repeat_share=0.0) if event.topic == topic}
    assert len(texts) > 40 and not any("$" in text for text in texts)
    chinese = {any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in texts}
    assert chinese == {topic == "chinese"}
    assert any("```" in text for text in texts) is (topic == "code")


def test_what_was_written_is_read_back(tmp_path):
    events = [
        *generate(5, 4, 3, tenants=2),
        Event("alone"),
        Event("asked on", "s", 0, history=(("system", "be kind"), ("user", "a"), ("tool", "b"))),
        Event("\u2028 and \x85 are no ends of a line", "s", 1, history=()),
    ]
    write_jsonl(tmp_path / "trace", events)
    assert read_jsonl(tmp_path / "trace") == events


def test_a_log_has_more_than_we_need(tmp_path):
    lines = [
        {"text": "hello", "time": 3.5, "session": None},
        {"session": "s", "messages": [{**USER, "content": [{"type": "text", "text": "a"}]}]},
        {"session": "s", "text": "b", "topic": "code", "is_switch": True},
        {"session": "s", "text": "c", "tenant": "other"},
    ]  # fmt: skip
    path = tmp_path / "log"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_jsonl(path) == [
        Event("hello"), Event("a", "s", history=()), Event("b", "s", 1, "", "code", True),
        Event("c", "s", 0, "other"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "line"), ("[]", "line"), ('"text"', "line"), ("[" * 100_000, "line"),
        ({}, "text"), ({"text": None}, "text"), ({"text": 1}, "text"), ({"text": ""}, "text"),
        ({"text": "a", "messages": [USER]}, "text"), ({"text": "\ud800"}, "text"),
        ({"messages": None}, "messages"), ({"messages": []}, "messages"),
        ({"messages": [{**USER, "content": ""}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"messages": [USER, {"role": "robot", "content": "b"}]}, "messages[1].role"),
        ({"text": "a", "session": 3}, "session"), ({"text": "a", "tenant": []}, "tenant"),
        ({"text": "a", "topic": True}, "topic"), ({"text": "a", "is_switch": 1}, "is_switch"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, field):
    bad = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "log"
    path.write_text(f'{{"text": "good"}}\n\n{bad}\n{{"text": "good"}}\n')
    with pytest.raises(TraceError) as raised:
        read_jsonl(path)
    assert str(raised.value).startswith(f"{path}, line 3: {field}: ")


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "log").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(TraceError, match="line 1: line: "):
        read_jsonl(tmp_path / "log")

"""Traces as they are made, read and replayed."""

import dataclasses
import itertools
import json
from collections import Counter

import pytest
import torch
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
from loadtest.bench.trace_detector import (
    IN_CONTEXT,
    area,
    detect,
    detection,
    generate_in_context,
    lay_out,
)
from loadtest.bench.trace_windows import FIXED, LRU, replay, variants, verdict

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


# -- the simulator ---------------------------------------------------------------------------


def encode(text):
    return list(text.encode())


def test_a_prompt_goes_on_where_the_sessions_last_answer_ended():
    latest = {}
    for turn in lay_out(generate(6, 5, 12, tenants=2), encode):
        ids, starts = turn.plan.prompt_token_ids, turn.plan.turn_starts
        before = latest.get(turn.event.session)
        if before:
            told = before.plan.prompt_token_ids + before.answer
            assert ids[: len(told)] == told
            assert set(starts[:-1]) <= set(before.plan.turn_starts)
        assert len(starts) == min(turn.event.turn + 1, 8)  # what a real prompt tells
        assert bytes(turn.own_ids).decode() == (
            f"<|im_start|>user\n{turn.event.text}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert 20 <= len(turn.answer) <= 120
        latest[turn.event.session] = turn


def test_a_known_history_is_taken_as_it_is_and_a_question_has_one_answer():
    history = (("system", "s"), ("user", "a"), ("assistant", "b"))
    with_history, alone = lay_out([Event("q", "x", history=history), Event("q")], encode)
    ids, (first, last) = with_history.plan.prompt_token_ids, with_history.plan.turn_starts
    assert bytes(ids[:last]).count(b"<|im_start|>") == 3 and b"user\na" in bytes(ids[first:last])
    assert with_history.answer == alone.answer and with_history.own_ids == alone.own_ids
    assert len(alone.plan.turn_starts) == 1


@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(1, 8))
def test_as_many_turns_follow_up_as_was_ordered(seed, share, turns):
    shares = share, share, 0.0
    events, again, alone = (generate_in_context(seed, it, sessions=4, turns=turns) for it in shares)
    assert events == again
    able = [event.turn > 0 and not event.is_switch for event in alone]
    changed = [event.text != before.text for event, before in zip(events, alone, strict=True)]
    assert sum(changed) == min(sum(able), round(share * len(events)))
    for event, before, change, may in zip(events, alone, changed, able, strict=True):
        assert (may or not change) and (event.text in IN_CONTEXT[event.topic]) is change
        assert dataclasses.replace(event, text=before.text) == before


def answers(*texts, session="s"):
    return [turn.answer for turn in lay_out([Event(text, session) for text in texts], encode)]


def test_a_follow_ups_answer_depends_on_all_that_it_follows():
    first, second = IN_CONTEXT["code"][:2]
    q, after_q, both, again, r, after_r = answers("q", first, second, "q", "r", first)
    assert q == again and len({q, after_q, both, r, after_r}) == 5
    assert answers("r", "q", first)[-1] == after_q  # but not on what was before
    assert answers("q", second, first)[-1] not in (after_q, both)
    (alone,) = answers(first)
    assert alone == answers("q", first, session="")[-1] != after_q
    history = (("user", "q"), ("assistant", "a"))
    assert lay_out([Event(first, history=history)], encode)[0].answer == after_q


LABELS = "semantic, by labels"
KEYS, CLOSING = LABELS + ": keys, nothing closed", LABELS + ": turn keys, closing"


def replayed(context_share, capacity=24):
    events = generate_in_context(7, context_share, sessions=10, switch_probability=0.3)
    turns = lay_out(events, encode)
    return turns, {kind.name: replay(turns, kind, capacity) for kind in variants(turns, [])}


def test_each_kind_of_windows_does_what_its_name_says():
    turns, rows = replayed(0.0)
    lru, labelled, keys, closing = (rows[name] for name in (LRU.name, LABELS, KEYS, CLOSING))
    for kept in (lru, keys):
        assert kept["invalidated"] == 0 and set(kept["evictions"]) == {"capacity"}
    # The very first state deviates from nothing, so the switch after it may go unseen.
    switches = sum(turn.event.is_switch for turn in turns)
    assert lru["windows_closed"] == 0 and switches - 1 <= labelled["windows_closed"] <= switches
    assert labelled["precision"] == 1.0 and labelled["recall"] > 0.95
    for closed in (labelled, closing):
        assert closed["windows_closed"] == keys["windows_closed"]
        assert closed["invalidated"] > 0 < closed["evictions"]["window"]
    closed = [rows[variant.name]["windows_closed"] for variant in FIXED]
    assert closed == sorted(closed, reverse=True) and closed[0] > 0
    for row in rows.values():
        assert row["hits"] == pytest.approx(row["exact"] + row["window"])
        assert row["useful"] == row["hits"] and row["draft_tokens_right"] == 1.0


def test_where_nothing_is_evicted_keys_alone_decide():
    _, rows = replayed(0.3, 256)
    assert not any(row["evictions"] for row in rows.values())
    assert rows[LRU.name]["hits"] == rows[CLOSING]["hits"] > rows[KEYS]["hits"]
    assert rows[KEYS]["hits"] == rows[LABELS]["hits"] > 0


def test_the_last_turn_alone_misleads_where_turns_follow_up():
    _, rows = replayed(0.5)
    for row in (rows[LRU.name], rows[CLOSING]):
        assert row["exact"] <= row["useful"] < row["hits"] and row["draft_tokens_right"] < 0.9
    # Where the windows are the topics, no turn follows up on what is not in its key.
    assert rows[LABELS]["useful"] == rows[LABELS]["hits"] > 0


def test_drafts_are_counted_by_hits_and_by_tokens():
    follow_up = IN_CONTEXT["code"][0]
    texts = [("a", "q"), ("a", follow_up), ("b", "r"), ("b", follow_up), ("c", "q")]
    turns = lay_out([Event(text, session) for session, text in texts], encode)
    row = replay(turns, LRU, 8)  # the last is exact, and so no draft
    assert (row["exact"], row["window"], row["useful"]) == (0.2, 0.2, 0.2)
    draft, answer = turns[1].answer, turns[3].answer
    assert row["draft_tokens_right"] == sum(a == b for a, b in zip(draft, answer)) / len(draft) < 1


def test_the_verdict_compares_at_the_same_capacity():
    small, middle, large = (variant.name for variant in FIXED)
    useful = {LRU.name: 0.5, small: 0.1, middle: 0.2, large: 0.4,
              LABELS: 0.3, KEYS: 0.4, CLOSING: 0.6}  # fmt: skip
    one = {name: {"useful": value, "invalidated": 10} for name, value in useful.items()}
    one[LABELS]["invalidated"] = 5
    lru, best, worst, _ = verdict({8: one, 16: {**one, small: {"useful": 0.6, "invalidated": 0}}})
    assert "useful hits -40% to -40%" in lru
    assert "keys alone -10.0 to -10.0, by closing alone +10.0 to +10.0" in lru
    assert f"the best ({large}; {small}): useful hits -50% to -25%" in best
    assert "invalidations -50% to -50%" in best  # nothing to compare with at 16
    assert f"the worst ({small}; {middle}): useful hits +50% to +200%" in worst
    assert verdict({8: {LRU.name: one[LRU.name]}})[0].startswith("No verdict")


def test_a_detector_is_judged_by_the_labels():
    turns = lay_out(generate(8, 6, 10, 0.3), encode)
    knowing = torch.eye(5)[[TOPICS.index(turn.event.topic) for turn in turns]]
    sessions = {turn.event.session for turn in turns}
    assert area(turns, list(knowing)) == 1.0
    assert detect(list(zip(turns, knowing)), 0.5, sessions)["f1"] == 1.0
    assert area(turns, [torch.zeros(5)] * len(turns)) == 0.5
    ignorant = torch.ones(len(turns), 5)
    assert detect(list(zip(turns, ignorant)), 0.5, sessions)["recall"] == 0.0
    everywhere = detection(turns, [True] * len(turns))
    share = sum(turn.event.is_switch for turn in turns) / len(turns)
    assert (everywhere["precision"], everywhere["recall"]) == (share, 1.0)
    assert everywhere["f1"] == pytest.approx(2 * share / (share + 1))

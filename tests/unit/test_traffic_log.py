"""The operator's own log as a trace."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.traffic.log import LogError, read_log
from loadtest.traffic.prompts import Limits
from loadtest.traffic.trace import Entry, Recipe, burst, closed, lines, mixed, poisson

USER = {"role": "user", "content": "a"}
ROUGHLY = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


def read(tmp_path, *lines):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(it if isinstance(it, str) else json.dumps(it) for it in lines))
    return read_log(path)


def test_a_log_is_read_in_its_order(tmp_path):
    assert read(
        tmp_path,
        {"prompt": "b", "max_tokens": 7, "user": "ignored", "session_id": None},
        {"messages": [USER, {"role": "assistant", "content": "b"}, USER], "session_id": "s"},
        {"prompt": "a\u2028b", "messages": None, "cache_salt": "c"},
    ) == [
        Entry(text="b", max_tokens=7),
        Entry(messages=(("user", "a"), ("assistant", "b"), ("user", "a")), session_id="s"),
        Entry(text="a\u2028b", cache_salt="c"),
    ]  # fmt: skip


def test_blank_lines_and_foreign_line_ends_are_ignored(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n\n{"prompt": "b"}\n\n')
    assert read_log(path) == [Entry(text="a"), Entry(text="b")]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([100, 100, 103.5], [0, 0, 3.5]),
        ([1764500000.25, 1764500000.5], [0, 0.25]),
        (["2026-11-30T11:00:00Z", "2026-11-30T12:00:01.5+01:00"], [0, 1.5]),
        (["2026-11-30 11:00:00", "2026-12-01 11:00:00.000001"], [0, 86400.000001]),
        ([-5, 0], [0, 5]),
        ([None, None], [None, None]),
    ],
)
def test_times_count_from_the_first(tmp_path, times, expected):
    entries = read(tmp_path, *({"prompt": "a", "at": at} for at in times))
    assert [entry.at for entry in entries] == expected


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "line"), ("[]", "line"), ('"prompt"', "line"), ("[" * 100_000, "line"),
        ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": 1}, "prompt"),
        ({"prompt": ""}, "prompt"), ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"), ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"), ({"messages": [USER, "b"]}, "messages[1]"),
        ({"messages": [{**USER, "role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "session_id": 3}, "session_id"),
        ({"prompt": "a", "cache_salt": "\udc00"}, "cache_salt"),
        ({"prompt": "a", "at": "yesterday"}, "at"), ({"prompt": "a", "at": True}, "at"),
        ({"prompt": "a", "at": []}, "at"), ({"prompt": "a", "at": float("nan")}, "at"),
        ({"prompt": "a", "at": 10**400}, "at"), ({"prompt": "a", "at": None}, "at"),
        ({"prompt": "a", "at": 1}, "at"), ({"prompt": "a", "at": "2026-11-30T11:00:00"}, "at"),
        ({"prompt": "a", "at": "2026-11-30T10:59:59Z"}, "at"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path, line, field):
    good = {"prompt": "a", "at": "2026-11-30T11:00:00Z"}
    with pytest.raises(LogError) as caught:
        read(tmp_path, good, "", line, good)
    assert str(caught.value).startswith(f"{tmp_path / 'log.jsonl'}, line 3: {field}: ")


def test_a_log_without_requests_is_refused(tmp_path):
    with pytest.raises(LogError, match="no request"):
        read(tmp_path, "", " ")


@given(st.binary(max_size=40))
def test_no_line_breaks_the_reader(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(raw)
    with pytest.raises(LogError):
        read_log(path)


@given(
    st.lists(
        st.builds(
            Entry,
            messages=st.lists(
                st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), ROUGHLY),
                min_size=1,
                max_size=3,
            ).map(tuple),
            max_tokens=st.none() | st.integers(1, 2**40),
            session_id=st.none() | ROUGHLY,
            cache_salt=st.none() | ROUGHLY,
        )
        | st.builds(Entry, text=ROUGHLY),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_what_was_written_is_read_back(tmp_path_factory, trace, is_open):
    if is_open:
        trace = poisson(1, trace, 3.0)
    path = tmp_path_factory.getbasetemp() / "written"
    path.write_bytes(b"".join(lines(trace)))
    assert read_log(path) == trace


def test_a_made_trace_is_a_log(tmp_path):
    recipe = Recipe(lambda text: len(text) // 4, Limits(64, 128, 256))
    trace = poisson(1, [*mixed(1, recipe, 20), *burst(1, 5)], 10.0)
    (tmp_path / "log").write_bytes(b"".join(lines(trace)))
    assert read_log(tmp_path / "log") == trace
    assert closed(read_log(tmp_path / "log")) == closed(trace)

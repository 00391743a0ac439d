"""Casebook: tool calls (CB-42, CB-52 to CB-55, CB-57, CB-75)."""

import json
from dataclasses import replace

import pytest

from tests.unit.gateway import USAGE
from tests.unit.gateway_model import CALL_BEGIN, CALL_END, SEP, TOOLS_BEGIN, TOOLS_END

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read_file", "parameters": PATH}}
READ_ANTHROPIC = {"name": "read_file", "input_schema": PATH}


def call(name, *arguments):
    return [CALL_BEGIN, name, SEP, *arguments, CALL_END]


ONE = [TOOLS_BEGIN, *call("read_file", '{"pa', 'th": "/da', 'ta/x"', "}"), TOOLS_END]
TWO = [TOOLS_BEGIN, *call("f", '{"x":', "1}"), *call("g", '{"y":2', "}"), TOOLS_END]
NONE = [TOOLS_BEGIN, *call("f", "{}"), TOOLS_END]
FG = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in "fg"]


def deltas(answer):
    return [c["delta"] for c in answer.choices if c["delta"].get("tool_calls")]


def calls(answer):
    """Name and arguments of every call of a stream, as a client joins them."""
    found = {}
    for delta in deltas(answer):
        for part in delta["tool_calls"]:
            one = found.setdefault(part["index"], {"name": "", "arguments": ""})
            one["name"] += part["function"].get("name", "")
            one["arguments"] += part["function"].get("arguments") or ""
    return [(one["name"], json.loads(one["arguments"])) for _, one in sorted(found.items())]


def test_id_and_name_come_once(door):
    """CB-52"""
    door.says(*ONE)
    answer = door.chat(tools=[READ], stream=True)
    parts = [part for delta in deltas(answer) for part in delta["tool_calls"]]
    assert all("content" not in delta for delta in deltas(answer))
    first, *later = parts
    assert first["id"] and first["type"] == "function" and first["function"]["name"] == "read_file"
    assert later
    for part in later:
        assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
    assert calls(answer) == [("read_file", {"path": "/data/x"})]
    assert answer.reasons() == ["tool_calls"]
    whole = door.chat(tools=[READ])
    (made,) = whole.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"path": "/data/x"}
    assert whole.reasons() == ["tool_calls"]


def test_parallel_calls_do_not_interleave(door):
    """CB-53"""
    door.says(*TWO)
    answer = door.chat(tools=FG, stream=True)
    order = [part["index"] for delta in deltas(answer) for part in delta["tool_calls"]]
    assert order == sorted(order) and set(order) == {0, 1}
    assert calls(answer) == [("f", {"x": 1}), ("g", {"y": 2})]
    assert answer.reasons() == ["tool_calls"]


@pytest.mark.parametrize("stream", [True, False])
def test_no_tool_calls_is_no_key(door, stream):
    """CB-54, CB-55"""
    door.says("A ", "GitHub ", "action")
    answer = door.chat(tools=[READ], tool_choice="auto", stream=stream)
    assert "tool_calls" not in answer.raw.decode() and answer.text() == "A GitHub action"
    if stream:
        for choice in answer.choices[1:-1]:
            assert choice["delta"].get("content")


@pytest.mark.parametrize("route", ["chat", "message"])
def test_ids_are_fresh_on_replay(door, route):
    """CB-42"""
    door.says(*ONE)
    seen = set()
    for stream in (True, False, True):
        if route == "chat":
            answer = door.chat(tools=[READ], stream=stream)
            found = (deltas(answer)[0] if stream else answer.json["choices"][0]["message"])[
                "tool_calls"
            ][0]["id"]
        else:
            answer = door.message(tools=[READ_ANTHROPIC], stream=stream)
            blocks = (
                [e["content_block"] for e in answer.events if e["type"] == "content_block_start"]
                if stream
                else answer.json["content"]
            )
            (found,) = [block["id"] for block in blocks if block["type"] == "tool_use"]
            assert found.startswith("toolu_")
        seen.add(found)
    assert len(seen) == 3 and door.ensemble.runs == 1


def test_a_conversation_with_the_same_id_twice(door):
    """CB-42"""
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"}]  # fmt: skip
    assert door.chat([{"role": "user", "content": "go"}, *turn, *turn], tools=FG).status == 200


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "read_file"}}], ids=str
)
def test_a_forced_call_is_a_grammar_for_the_engine(door, choice, thinking):
    """CB-57: a real forced call. What the model then says is the engine's to hold to it."""
    door.says('[{"name": "read_file", "parameters": {"path": "/x"}}]')
    door.chat(tools=[READ], tool_choice=choice, thinking={"type": thinking})
    assert '"path"' in str(door.plan.sampling.structured_outputs)  # the parameters' schema


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_forced_call_in_messages_is_a_grammar_too(door, kind):
    """CB-57"""
    choice = {"type": kind, **({"name": "read_file"} if kind == "tool" else {})}
    door.message(tools=[READ_ANTHROPIC], tool_choice=choice)
    assert '"path"' in str(door.plan.sampling.structured_outputs)


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_call_that_is_not_forced_is_not_held(door, choice):
    """CB-57: nor one whose schema does not hold, by the client's own word."""
    door.says(*ONE)
    door.chat(tools=[READ], tool_choice=choice)
    assert not door.plan.sampling.structured_outputs
    loose = {"type": "function", "function": {**READ["function"], "strict": False}}
    door.chat(tools=[loose], tool_choice="required")
    assert '"path"' not in str(door.plan.sampling.structured_outputs)


def test_a_model_without_calls_is_offered_no_tools(door, monkeypatch):
    """CB-57: refused by name, not by the library's flags."""
    app = door.gateway.app
    monkeypatch.setattr(app, "_rules", replace(app._rules, tools=False))
    for answer in (door.chat(tools=[READ]), door.chat(tools=[READ], tool_choice="required")):
        assert answer.status == 400 and answer.error["param"] == "tools"
        assert "gateway_tool_parser" in answer.error["message"]
    answer = door.message(tools=[READ_ANTHROPIC])
    assert answer.status == 400 and "gateway_tool_parser" in answer.error["message"]
    assert door.chat(tools=[READ], tool_choice="none").status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_no_calls_where_none_are_wanted(door, stream):
    """CB-57"""
    door.says(*ONE)
    answer = door.chat(tools=[READ], tool_choice="none", stream=stream)
    assert "tool_calls" not in [c.get("finish_reason") for c in answer.choices]
    assert '"tool_calls":' not in answer.raw.decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [READ], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [1]}, "tools"),
    ],
    ids="CB-57 {}".format,
)  # fmt: skip
def test_tools_that_there_are_not(door, fields, param):
    answer = door.chat(**fields)
    assert answer.status == 400 and answer.error["param"] == param


def test_empty_tools_are_none(door):
    """CB-68"""
    assert door.chat(tools=[], tool_choice="auto").status == 200


def test_five_turns_of_tools(door):
    """Quirk 15"""
    turns = [{"role": "user", "content": "go"}]
    for number in range(5):
        door.says(TOOLS_BEGIN, *call("read_file", f'{{"path": "/{number}"}}'), TOOLS_END)
        message = door.chat(turns, tools=[READ]).json["choices"][0]["message"]
        turns += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"],
                            "content": f"text {number}"}]  # fmt: skip
    door.says("done")
    answer = door.chat(turns, tools=[READ], stream=True, **USAGE)
    assert answer.text() == "done" and door.prompt.count("text ") == 5


# -- Anthropic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "arguments"),
    [(ONE, [{"path": "/data/x"}]), (TWO, [{"x": 1}, {"y": 2}]), (NONE, [{}])],
    ids=["CB-75 one", "CB-53 two", "CB-75 none"],
)  # fmt: skip
def test_tool_use_blocks_come_with_their_arguments(door, steps, arguments):
    door.says(*steps)
    tools = [{"name": n, "input_schema": {"type": "object"}} for n in ("f", "g", "read_file")]
    streamed = door.message(tools=tools, stream=True)
    joined, open_block = {}, None
    for event in streamed.events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            assert event["content_block"]["input"] == {} and open_block is None
            open_block = event["index"]
            joined[open_block] = ""
        elif event["type"] == "content_block_delta" and open_block is not None:
            assert event["index"] == open_block
            joined[open_block] += event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop":
            open_block = None
    assert [json.loads(text) for text in joined.values()] == arguments
    assert streamed.events[-2]["delta"]["stop_reason"] == "tool_use"
    whole = door.message(tools=tools).json
    assert [b["input"] for b in whole["content"] if b["type"] == "tool_use"] == arguments
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize("content", ["done", [{"type": "text", "text": "done"}], None])
def test_tool_results_are_taken(door, content):
    """CB-75"""
    used = {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "/a"}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    if content is not None:
        result["content"] = content
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [used]},
             {"role": "user", "content": [result]}]  # fmt: skip
    assert door.message(turns, tools=[READ_ANTHROPIC]).status == 200

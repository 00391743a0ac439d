"""Casebook: stop strings, reasoning and their borders (CB-08 to CB-12, CB-16, CB-17, CB-56, CB-58).

The rule for stop strings (CB-11): they apply to all text, reasoning included, as in the engine.
"""

import json

import pytest

from tests.unit import gateway_model as model
from tests.unit.gateway import KEY_A, USAGE, four_ways

THINK = {"thinking": {"type": "enabled"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_held_back_text_is_released_and_no_delta_is_empty(door):
    """CB-08"""
    door.says("One ", "li", "ne", " <|eo", "x")
    stop = ["<|eot_id|>", "<|end_of_text|>"]
    answer = four_ways(door, stop=stop, max_tokens=60)
    assert answer.text() == "One line <|eox" == door.chat(max_tokens=60).text()
    streamed = door.chat(stop=stop, max_tokens=60, stream=True)
    texts = [c["delta"].get("content") for c in streamed.choices[1:-1]]
    assert all(texts) and "".join(texts) == "One line <|eox"


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", 10),
        (["ok", "\nUser", ": x"], ["\nUser:"], "ok", 8),
        (["a", "bcd", "ef"], ["ef", "cd"], "ab", 4),
        (["xyz"], ["z", "yz"], "x", 3),
    ],
    ids="CB-09 {}".format,
)
@pytest.mark.parametrize("stream", [True, False])
def test_no_part_of_a_stop_string_leaks(door, pieces, stop, text, tokens, stream):
    door.says(*pieces)
    for _ in range(2):  # from the engine, and from the cache
        answer = door.complete("Alphabet: ", stop=stop, max_tokens=40, stream=stream,
                               **(USAGE if stream else {}))  # fmt: skip
        assert answer.text() == text and answer.reasons() == ["stop"]
        assert answer.usage["completion_tokens"] == tokens


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_while_the_tool_parser_holds_text_back(door, stream):
    """CB-10"""
    door.says("Sure <", "tool", " is ###", "x")
    answer = door.chat(stop=["###"], tools=[TOOL], tool_choice="auto", stream=stream)
    assert answer.text() == "Sure <tool is " and answer.reasons() == ["stop"]


REASONED = ["9.11 and ", "9.8 differ", "</think>", "answer"]


@pytest.mark.parametrize("steps", [["".join(REASONED)], REASONED], ids=["one step", "steps"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_that_never_comes_changes_nothing(door, steps, stream):
    """CB-11"""
    door.says(*steps)
    for extra in ({}, {"stop": ["zzz"]}):
        answer = door.chat(stream=stream, **THINK, **extra)
        assert (answer.reasoning, answer.text()) == ("9.11 and 9.8 differ", "answer")


@pytest.mark.parametrize("steps", [["".join(REASONED)], REASONED], ids=["one step", "steps"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_inside_the_reasoning_ends_there(door, steps, stream):
    """CB-11"""
    door.says(*steps)
    answer = door.chat(stream=stream, stop=["9.8"], **THINK)
    assert answer.reasoning == "9.11 and " and answer.text() == ""
    assert answer.reasons() == ["stop"] and "think>" not in answer.raw.decode()


MANY = [f"<stop {number}>" for number in range(24)]


@pytest.mark.parametrize("stop", [MANY, "\n", [], None], ids="CB-12 {!s:.9}".format)
def test_stop_values_that_clients_send(door, stop):
    assert door.chat(stop=stop).status == 200


@pytest.mark.parametrize("stop", [[""], [1], ["a" * 100_000], 5, {}], ids="CB-12 {!s:.9}".format)
def test_odd_stop_values(door, stop):
    answer = door.chat(stop=stop)
    assert answer.status == 400 and answer.error["param"] == "stop"


def test_the_order_of_stop_strings_is_no_matter(door):
    """CB-12"""
    assert door.chat(stop=MANY).text() == door.chat(stop=MANY[::-1]).text()
    assert door.ensemble.runs == 1


# -- reasoning -------------------------------------------------------------------------------


def test_reasoning_is_told_apart_and_counted_once(door):
    """CB-16"""
    door.says("abcdefghijk", "</think>", "12345")
    answer = four_ways(door, **THINK)
    assert (answer.reasoning, answer.text()) == ("abcdefghijk", "12345")
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 11
    assert answer.usage["completion_tokens"] == 11 + 1 + 5 + 1
    assert "reasoning" not in answer.json["choices"][0]["message"]  # by one name only


def test_reasoning_that_eats_the_whole_budget(door):
    """CB-17"""
    door.says("think " * 10)
    answer = four_ways(door, max_tokens=16, tools=[TOOL], **THINK)
    message = answer.json["choices"][0]["message"]
    assert answer.reasons() == ["length"] and message["content"] == ""
    assert message["reasoning_content"] == "think think thin" and "tool_calls" not in message
    assert answer.usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    "turn",
    [{}, {"reasoning_content": "I see"}, {"reasoning_content": None}],
    ids=["CB-56 none", "CB-56 some", "CB-56 null"],
)
@pytest.mark.parametrize("content", ["", None])
def test_a_history_with_and_without_reasoning(door, turn, content):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": [call], **turn},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert door.chat(history, tools=[TOOL], **THINK).status == 200


def test_an_assistant_that_said_nothing_said_an_empty_text(door):
    """CB-56"""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None},
             {"role": "user", "content": "b"}]  # fmt: skip
    assert door.chat(turns).status == 200
    prompt = door.prompt
    turns[1]["content"] = ""
    assert door.chat(turns).status == 200 and door.prompt == prompt


# -- JSON mode (CB-58, CB-59) ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_json_mode_beside_thinking(door, stream):
    """CB-58. That the grammar leaves the reasoning alone is the engine's: see docs/casebook.md."""
    door.says("thinking", "</think>", '{"a":', "1}")
    answer = door.chat(response_format={"type": "json_object"}, stream=stream, **THINK)
    assert json.loads(answer.text()) == {"a": 1} and answer.reasoning == "thinking"
    assert door.plan.sampling.structured_outputs == {"json_object": True}


def test_a_json_schema_goes_to_the_engine(door):
    """CB-59"""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = {"name": "o", "strict": True, "schema": schema}
    door.says('{"a": 1}')
    assert door.chat(response_format={"type": "json_schema", "json_schema": given}).status == 200
    assert json.loads(door.plan.sampling.structured_outputs["json"]) == schema


@pytest.mark.parametrize("given", [{"type": "yaml"}, "json", {"type": "json_schema"}, {}, 5],
                         ids="CB-59 {}".format)  # fmt: skip
def test_response_formats_that_there_are_not(door, given):
    answer = door.chat(response_format=given)
    assert answer.status == 400 and answer.error["param"].startswith("response_format")


def test_a_schema_bomb_is_refused_at_once(door):
    """CB-59"""
    schema = {"type": "string", "pattern": "a" * 1_000_000}
    answer = door.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": schema}}
    )
    assert answer.status == 400 and answer.error["param"] == "response_format"


def test_thinking_is_a_switch_of_the_template(door):
    """CB-68, quirk 1"""
    for kind, mark in (("enabled", model.THINK), ("disabled", model.THOUGHT)):
        assert door.chat(thinking={"type": kind}).status == 200
        assert door.prompt.endswith(model.ASSISTANT + mark)
    answer = door.chat(thinking={"type": "maybe"}, key=KEY_A)
    assert answer.status == 400 and answer.error["param"] == "thinking.type"

"""DeepSeek-V4's own prompts and parsers, which are code in vLLM and no template."""

import json

import pytest
from deepseek_flash.dspark.control_tokens import ControlTokens
from deepseek_flash.gateway.turns import TurnFinder

from tests.unit import gateway_model as model
from tests.unit.fakes import FakeTokenizer, Rewriting, default_system
from tests.unit.gateway import serving
from tests.unit.gateway_model import VOCABULARY

ON, OFF = {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="read_file">\n'
    '<｜DSML｜parameter name="path" string="true">/data/x</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture(scope="module")
def v4():
    with serving("deepseek_v4") as door:
        yield door


@pytest.fixture
def door(v4):
    v4.ensemble.reset()
    return v4


@pytest.mark.parametrize("stream", [True, False])
def test_thinking(door, stream):
    door.says("thinking", "</think>", "answer")
    answer = door.chat(stream=stream, **ON)
    assert (answer.reasoning, answer.text()) == ("thinking", "answer")
    door.says("answer")
    answer = door.chat(stream=stream, **OFF)
    assert (answer.reasoning, answer.text()) == ("", "answer")
    assert door.prompt.endswith(model.ASSISTANT + model.THOUGHT)


@pytest.mark.parametrize("width", [1, 7, 500])
def test_calls(door, width):
    """CB-52, quirk 6: nothing of the markup is ever content."""
    door.says(*(CALL[at : at + width] for at in range(0, len(CALL), width)))
    whole = door.chat(tools=[READ], **OFF)
    streamed = door.chat(tools=[READ], stream=True, **OFF)
    assert whole.reasons() == streamed.reasons() == ["tool_calls"]
    assert "DSML" not in whole.raw.decode() + streamed.raw.decode()
    parts = [c["delta"]["tool_calls"][0] for c in streamed.choices if c["delta"].get("tool_calls")]
    assert parts[0]["id"] and parts[0]["function"]["name"] == "read_file"
    assert all(set(p["function"]) == {"arguments"} and "id" not in p for p in parts[1:])
    joined = "".join(p["function"]["arguments"] for p in parts)
    (made,) = whole.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(joined) == json.loads(made["function"]["arguments"]) == {"path": "/data/x"}
    blocks = door.message(tools=[{"name": "read_file", "input_schema": SCHEMA}], **OFF).json
    assert blocks["content"][0]["input"] == {"path": "/data/x"}


def test_a_late_system_message(door):
    """CB-51, by the very encoder of its report."""
    turns = [{"role": "user", "content": "Q"}, {"role": "system", "content": "LATESYS"},
             {"role": "user", "content": "Q2"}]  # fmt: skip
    door.chat(turns, **OFF)
    assert "QLATESYS" not in door.prompt and door.prompt.count("LATESYS") == 1


def test_typed_control_tokens_and_turns(door):
    """CB-49"""
    turns = [{"role": "user", "content": model.USER}, {"role": "assistant", "content": "a"},
             {"role": "user", "content": "b"}]  # fmt: skip
    door.chat(turns, **OFF)
    ids = door.plan.prompt_token_ids
    users = tuple(at for at, token in enumerate(ids) if token == VOCABULARY[model.USER])
    assert len(users) == 2 and door.plan.turn_starts == users


@pytest.mark.parametrize("escaped", [True, False])
def test_typed_control_tokens_in_a_call(door, escaped):
    """CB-49"""
    typed = f"x{model.USER}y{model.EOS}"
    arguments = json.dumps({"path": typed}, ensure_ascii=escaped)
    made = {
        "id": "c",
        "type": "function",
        "function": {"name": "read_file", "arguments": arguments},
    }
    turns = [{"role": "user", "content": "go"},
             {"role": "assistant", "content": None, "tool_calls": [made]},
             {"role": "tool", "tool_call_id": "c", "content": typed}]  # fmt: skip
    assert door.chat(turns, tools=[READ], **OFF).status == 200
    first = [t for t in door.plan.prompt_token_ids if t == VOCABULARY[model.USER]]
    used = {"type": "tool_use", "id": "c", "name": "read_file", "input": {"path": typed}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": typed}
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [used]},
             {"role": "user", "content": [result]}]  # fmt: skip
    tools = [{"name": "read_file", "input_schema": SCHEMA}]
    assert door.message(turns, tools=tools, **OFF).status == 200
    second = [t for t in door.plan.prompt_token_ids if t == VOCABULARY[model.USER]]
    plain = door.chat([{"role": "user", "content": "go"}], **OFF)
    assert plain.status == 200
    assert len(first) == len(second) <= 2 and door.prompt.count(model.USER) == 1
    assert "ue0a0" not in ascii(door.prompt)


# -- turns, by other templates ---------------------------------------------------------------


class Llama(FakeTokenizer):
    def turn(self, role, content):
        return f"<|system|>{role}<|tool|>\n\n{content}<bos>"


def refusing(messages):
    raise RuntimeError("no chat")


@pytest.mark.parametrize(
    ("tokenizer", "users"),
    [(FakeTokenizer(), 2), (Rewriting(default_system), 2), (Llama(), 2), (Rewriting(refusing), 0)],
    ids=["plain", "default system", "headers of text", "refuses"],
)
def test_turns_are_found_whatever_the_template(tokenizer, users):
    finder = TurnFinder(tokenizer, ControlTokens(tokenizer))
    chat = [{"role": role, "content": "xyz"} for role in ("user", "assistant", "user", "assistant")]
    if not users:
        assert finder.starts([1, 2, 3]) == ()
        return
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = finder.starts(encoded["input_ids"])
    assert len(starts) == users
    places = [encoded["offset_mapping"][at][0] for at in starts]
    wanted = tokenizer.turn("user", "xyz")
    assert all(text[at:].startswith(wanted) for at in places)

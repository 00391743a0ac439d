"""Casebook: Anthropic's Messages API (CB-72 to CB-74, CB-76)."""

import pytest

from tests.unit.ensemble import HANG
from tests.unit.gateway import COUNT, KEY_A, MESSAGES, MODEL, message_body
from tests.unit.streams import drive, wait_for


def test_the_first_event_has_real_usage(door):
    """CB-72"""
    for _ in range(2):  # also on a replay
        answer = door.message("hi", max_tokens=32, stream=True)
        names = [name for name, _ in answer.frames]
        assert names == [event["type"] for event in answer.events]
        start, delta, stop = answer.events[0], answer.events[-2], answer.events[-1]
        usage = start["message"]["usage"]
        assert set(usage) == {"input_tokens", "output_tokens", "cache_creation_input_tokens",
                              "cache_read_input_tokens"}  # fmt: skip
        assert usage["input_tokens"] > 0 and start["message"]["id"].startswith("msg_")
        count = door.post(COUNT, {"model": MODEL, "messages": message_body("hi")["messages"]})
        told = delta["usage"]
        assert count.json["input_tokens"] == told["input_tokens"] + told["cache_read_input_tokens"]
        assert {**told, "output_tokens": 0} == usage
        assert delta["usage"]["output_tokens"] == 3 and stop["type"] == "message_stop"
        assert not answer.done


def test_blocks_come_one_after_another(door):
    door.says("thinking", "</think>", "text")
    answer = door.message(stream=True, thinking={"type": "enabled", "budget_tokens": 1024})
    started = [e["content_block"]["type"] for e in answer.events if e["type"].endswith("k_start")]
    assert started == ["thinking", "text"]
    indices = [e["index"] for e in answer.events if "index" in e]
    assert indices == sorted(indices)
    assert door.message(thinking={"type": "enabled", "budget_tokens": 9}).status == 200


def test_counting_is_asking_without_an_answer(door):
    """CB-73"""
    body = {
        "model": MODEL,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a;"},
                   {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }  # fmt: skip
    headers = {"anthropic-beta": "token-counting-2024-11-01", "anthropic-version": "2099-01-01"}
    found = door.post(COUNT + "?beta=true", body, headers=headers)
    assert found.status == 200 and door.ensemble.runs == 0
    asked = door.post(MESSAGES, {**body, "max_tokens": 9}).json["usage"]["input_tokens"]
    assert found.json["input_tokens"] == asked == len(door.plan.prompt_token_ids)
    assert door.post(COUNT, body, key=None).status == 401


def test_what_newer_clients_send(door):
    """CB-74"""
    turns = [
        {"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "search_result", "content": []}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "foreign"},
            {"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "yes"}]},
        {"role": "user", "content": "go"}, {"role": "system", "content": "<reminder>"},
    ]  # fmt: skip
    schema = {"type": "object"}
    tools = [{"name": "f", "input_schema": schema, "cache_control": {}, "type": "custom"},
             {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]  # fmt: skip
    extra = {"thinking": {"type": "adaptive"}, "context_management": {"edits": []},
             "metadata": {"user_id": "u"}, "output_config": {"effort": "high"}, "foo": {},
             "tool_choice": {"type": "auto"}, "service_tier": "auto"}  # fmt: skip
    answer = door.message(turns, tools=tools, **extra)
    assert answer.status == 200, answer.raw
    assert door.prompt.count("<reminder>") == 1 and "web_search" not in door.prompt
    plain = [{**t, "content": t["content"] if isinstance(t["content"], str) else [
        {k: v for k, v in block.items() if k != "cache_control"} for block in t["content"]]}
        for t in turns]  # fmt: skip
    door.message(plain, tools=tools[:1], **{**extra, "metadata": {"user_id": "v"}})
    assert door.ensemble.runs == 1  # cache_control, metadata and the rest are no part of a prompt


FAILURES = [RuntimeError("a path /srv/models/x"), "abort"]


@pytest.mark.parametrize("step", FAILURES, ids=["CB-76 error", "CB-76 abort"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token(door, step, stream):
    door.says(step)
    answer = door.message(stream=stream)
    assert answer.status == 503 and answer.json["type"] == "error"
    assert answer.error["type"] == "overloaded_error" and "/srv" not in answer.raw.decode()
    assert answer.json["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("step", FAILURES, ids=["CB-76 error", "CB-76 abort"])
def test_a_failure_after_three_tokens(door, step):
    door.says("a", "b", "c", step)
    answer = door.message(stream=True)
    name, _ = answer.frames[-1]
    assert answer.status == 200 and name == "error"
    assert answer.events[-1]["error"]["type"] == "overloaded_error"
    assert all(event["type"] != "message_stop" for event in answer.events)
    assert "pydantic" not in answer.raw.decode() and "/srv" not in answer.raw.decode()


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": None}, {"messages": []}, {"messages": [{"role": "wizard", "content": "x"}]},
     {"messages": [{"role": "user", "content": 5}]},
     {"messages": [{"role": "system", "content": "x"}]},
     {"stop_sequences": [""]}, {"system": 5}, {"system": ["x"]}, {"tools": "x"}, {"tools": [1]},
     {"thinking": {"type": "x"}}, {"temperature": 3}, {"top_k": "x"},
     {"cache_salt": 5}],
    ids=str,
)  # fmt: skip
def test_refusals_have_anthropics_form(door, fields):
    answer = door.post(MESSAGES, {**message_body(), **fields})
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert next(iter(fields)) in answer.error["message"]


def test_other_ways_in_are_refused_in_anthropics_form(door):
    assert door.post(MESSAGES, message_body(), key=None).error["type"] == "authentication_error"
    assert door.post("/messages", message_body(model="gpt-5")).error["type"] == "not_found_error"
    big = message_body("a" * 3_000_000)
    assert door.post(MESSAGES, big).error["type"] == "request_too_large"
    assert door.get("/v1/messages/batches").json["type"] == "error"


def test_who_leaves_a_message_cancels(door):
    """CB-31"""
    door.says("a", "b", HANG)
    body = message_body(stream=True)
    door.run(drive(door.gateway.app, MESSAGES, body, KEY_A, leave_after=2))
    wait_for(lambda: door.engine.running == 0, 10)

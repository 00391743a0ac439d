"""Casebook: how an answer streams, and how it ends (CB-01 to CB-07, CB-13, CB-14, CB-31 to CB-33).

CB-06 is about comments of a backend: ours speaks gRPC, so nothing but our own frames can be sent.
"""

import asyncio
import json

import pytest

from tests.unit import gateway_model
from tests.unit.ensemble import HANG
from tests.unit.gateway import CHAT, KEY_A, MODEL, USAGE, chat_body, four_ways, serving
from tests.unit.streams import drive, wait_for

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip


@pytest.mark.parametrize("hit", [False, True], ids=["CB-01 miss", "CB-01 hit"])
def test_one_usage_chunk_before_done(door, hit):
    door.says("Hello ", "world")
    for _ in range(1 + hit):
        answer = door.chat(stream=True, max_tokens=20, **USAGE)
    *earlier, finish, usage = answer.events
    assert answer.done and usage["choices"] == []
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert all(event.get("usage") is None for event in (*earlier, finish))
    counts = usage["usage"]
    assert counts["prompt_tokens"] + counts["completion_tokens"] == counts["total_tokens"]


def test_no_usage_chunk_unasked(door):
    """CB-01"""
    assert all("usage" not in event for event in door.chat(stream=True).events)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_the_finish_reason_is_null_until_the_end(door, path):
    """CB-02"""
    door.says("one ", "two ", "three")
    answer = getattr(door, path)(stream=True, max_tokens=6)
    reasons = [choice["finish_reason"] for choice in answer.choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == "length"


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["CB-03", "CB-03 tools"])
def test_every_stream_ends_with_a_reason(door, tools):
    door.says("O", "K", "!")
    extra = {"tools": tools} if tools else {}
    for _ in range(200):
        assert door.chat(stream=True, max_tokens=500, **extra).reasons() == ["stop"]
    assert door.chat(stream=True, max_tokens=2, **extra).reasons() == ["length"]


def test_the_last_text_and_the_reason_come_apart(door):
    """CB-04"""
    door.says("I am ", "a model")
    answer = door.chat(stream=True, max_tokens=10, max_completion_tokens=10)
    *texts, last = answer.choices
    assert last["delta"] == {} and last["finish_reason"] == "length"
    assert "".join(c["delta"].get("content", "") for c in texts) == "I am a mod"
    assert answer.text() == door.chat(max_tokens=10).text()


def test_two_different_limits_are_refused(door):
    """CB-04"""
    answer = door.chat(max_tokens=10, max_completion_tokens=11)
    assert answer.status == 400 and "max_completion_tokens" in answer.error["message"]
    assert "max_tokens:" in answer.error["message"]


@pytest.mark.parametrize("path", ["chat", "complete", "message"])
def test_keep_alives_are_comments_and_nothing_else(door, path):
    """CB-05, CB-06"""
    door.engine.pause = 1.3  # longer than the keep-alive interval of a second
    door.says("ab")
    lines = getattr(door, path)(stream=True).raw.decode().split("\n")
    assert lines.count(": keep-alive") >= 1
    for line in lines:
        assert line == "" or line.startswith((":", "data: ", "event: "))
        if line.startswith("data: ") and line != "data: [DONE]":
            assert isinstance(json.loads(line[6:]), dict)


def test_an_sdk_reads_a_stream_with_comments(door):
    """CB-05"""
    import httpx
    import openai

    door.engine.pause = 1.2
    door.says("a", "b")
    raw = door.chat(stream=True, **USAGE).raw
    transport = httpx.MockTransport(
        lambda request: httpx.Response(
            200, content=raw, headers={"content-type": "text/event-stream"}
        )
    )
    client = openai.OpenAI(
        api_key="x", base_url="http://x/v1", http_client=httpx.Client(transport=transport)
    )
    chunks = list(client.chat.completions.create(**chat_body(stream=True)))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ab"
    assert chunks[-1].usage.completion_tokens == 3


FAILURES = {"CB-07 abort": "abort", "CB-33 error": RuntimeError("the disk is full: /srv/x")}


@pytest.mark.parametrize("step", FAILURES.values(), ids=FAILURES)
def test_a_stream_that_fails_ends_with_an_error(door, step):
    door.says("a", "b", "c", "d", step)
    answer = door.chat(stream=True)
    assert answer.status == 200 and not answer.done
    assert answer.events[-1]["error"]["type"] == "server_error"
    assert 'abort"' not in answer.raw.decode() and "/srv" not in answer.raw.decode()
    door.says("the whole answer")
    assert door.chat().text() == "the whole answer"  # and nothing of it was stored


@pytest.mark.parametrize("step", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_its_first_token_has_a_status(door, step, stream):
    door.says(step)
    answer = door.chat(stream=stream)
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.error["type"] == "server_error" and "/srv" not in answer.raw.decode()
    door.says("right")
    assert door.chat(stream=stream).text() == "right"


TEXT = "ďábel 相思那得夢硯來 👩‍👩‍👧 😊"


@pytest.mark.parametrize("piece", [1, 2, 3, 5], ids="CB-13 {} bytes".format)
def test_characters_are_never_cut(door, piece):
    ids = gateway_model.ids_of(TEXT)
    door.says(*(ids[place : place + piece] for place in range(0, len(ids), piece)))
    assert four_ways(door, max_tokens=100).text() == TEXT
    answer = door.chat(stream=True, max_tokens=100)
    for _, data in answer.frames:
        assert "�" not in data
    streamed = door.message(stream=True)
    parts = [e["delta"]["text"] for e in streamed.events if e["type"] == "content_block_delta"]
    assert "".join(parts) == TEXT == door.message().json["content"][0]["text"]


def test_an_answer_that_ends_inside_a_character(door):
    """CB-14"""
    door.says([*gateway_model.ids_of("😊")])
    cut = [door.complete("x", max_tokens=1, stream=stream) for stream in (False, True, False)]
    assert {answer.text() for answer in cut} <= {"", "�"} and len({a.text() for a in cut}) == 1
    assert all(answer.reasons() == ["length"] for answer in cut)
    assert cut[0].usage["completion_tokens"] == 1
    assert door.complete("x", max_tokens=4).text() == "😊"


# -- leaving (CB-31, CB-32) -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [["a"] * 9 + [HANG], [HANG]], ids=["running", "before"])
def test_who_leaves_cancels(door, stream, steps, caplog):
    """CB-31"""
    door.says(*steps)
    body = chat_body(stream=stream, max_tokens=400)
    chunks = 3 if stream and steps[0] == "a" else 0
    door.run(drive(door.gateway.app, CHAT, body, KEY_A, leave_after=chunks, when=0.3))
    wait_for(lambda: door.engine.running == 0, 1.0)
    wait_for(lambda: door.ensemble.runtime.board.in_flight == 0, 1.0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    door.says("a" * 20)
    assert door.chat(max_tokens=400).text() == "a" * 20  # CB-32: a part is no answer


def test_other_streams_go_on_when_one_leaves(door):
    """CB-31"""
    door.engine.pause = 0.02
    door.says(*"abcdefghij")

    async def both():
        app = door.gateway.app
        gone = drive(app, CHAT, chat_body("one", stream=True), KEY_A, leave_after=2)
        stays = door.send("POST", CHAT, json=chat_body("two", stream=True))
        return (await asyncio.gather(gone, stays))[1]

    answer = door.run(both())
    assert answer.text() == "abcdefghij" and answer.reasons() == ["stop"]


def test_a_server_that_is_gone_is_unavailable():
    """CB-07"""
    with serving() as door:
        door.ensemble._server.stop(0).wait()
        answer = door.chat(stream=True)
        assert answer.status == 503 and "retry-after" in answer.headers
        assert door.get("/health").status == 503
        assert door.get("/v1/models").json["data"][0]["id"] == MODEL

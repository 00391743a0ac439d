"""The gateway's own decisions, apart from the casebook's."""

import asyncio
import time

import pytest
from deepseek_flash.gateway.errors import from_ensemble

from tests.unit.ensemble import HANG
from tests.unit.gateway import CHAT, KEY_A, KEY_B, MESSAGES, chat_body, serving
from tests.unit.streams import drive, wait_for


@pytest.fixture(scope="module")
def keyless():
    with serving(gateway_keys="") as door:
        yield door


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "[::1]:9000", "[::1]"])
def test_without_keys_this_machine_may_ask(keyless, host):
    answer = keyless.post(CHAT, chat_body(cache_salt="mine"), key=None, headers={"host": host})
    assert answer.status == 200 and keyless.plan.cache_salt == "mine"
    assert keyless.post(CHAT, chat_body(), key="any", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9000", "127.0.0.1.evil.example", ""]
)
def test_without_keys_nobody_else_may(keyless, host):
    assert keyless.post(CHAT, chat_body(), key=None, headers={"host": host}).status == 403


def test_a_tenants_own_limit():
    with serving(gateway_tenant_limit=2) as door:
        door.says(HANG)
        waiting = [
            asyncio.run_coroutine_threadsafe(
                drive(door.gateway.app, CHAT, chat_body(f"{n}"), KEY_A, when=0.7), door.loop
            )
            for n in range(2)
        ]
        wait_for(lambda: door.engine.running == 2, 2)
        refused = door.chat("third")
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        door.says("ok")
        assert door.chat("other tenant", key=KEY_B).status == 200
        assert door.get("/v1/models").status == 200
        for one in waiting:
            one.result(5)
        assert door.chat("again").text() == "ok"


def test_health_needs_no_key_and_metrics_do(door):
    assert door.get("/health", key=None).status == 200
    assert door.get("/metrics", key=None).status == 401
    door.chat(stream=True)
    door.says("a", RuntimeError("x"))
    door.chat("fails", stream=True)
    door.get("/nowhere")
    text = door.get("/metrics").raw.decode()
    for label in (
        'route="/v1/chat/completions",status="200"',
        'status="401"',
        'route="/v1/chat/completions",status="500"',
        'route="other",status="404"',
    ):
        assert label in text  # fmt: skip


def test_names_that_clients_make_up_are_no_labels(door):
    door.get("/v1/models/made-up")
    assert "made-up" not in door.get("/metrics").raw.decode()


def test_a_final_flag_of_its_own_is_not_needed(door):
    """A Triton may tell the end apart from the last tokens, or by the stream's end only."""
    door.ensemble.tells_the_end = False
    try:
        for stream in (False, True):
            assert door.chat(stream=stream).reasons() == ["stop"]
        assert door.engine.running == 0
    finally:
        door.ensemble.tells_the_end = True


def test_a_server_that_comes_back_is_found_at_once():
    with serving() as door:
        ensemble = door.ensemble
        ensemble._server.stop(0).wait()
        assert door.chat().status == 503
        time.sleep(3)  # for long enough that gRPC would be patient by now
        ensemble.serve(ensemble.port)
        wait_for(lambda: door.chat().status == 200, 3)


def test_an_id_of_the_callers_is_told_back_if_it_is_one(door):
    for asked, told in (("my-id.1", True), ("a b", False), ("x" * 200, False), ("", False)):
        answer = door.post(CHAT, chat_body(), headers={"x-request-id": asked})
        assert (answer.headers["x-request-id"] == asked) is told
        assert (answer.json["id"] == f"chatcmpl-{asked}") is told


def test_what_could_steer_the_library_does_not_reach_it(door):
    headers = {"x-vllm-priority": "-5", "x-data-parallel-rank": "7", "x-session-id": "s"}
    assert door.post(CHAT, chat_body(), headers=headers).status == 200
    assert door.plan.session_id == "s"


def test_the_beginning_of_an_answer_is_not_held_back(door):
    """Only the status waits for the first event."""
    door.says("a", "b", HANG)
    drive_it = drive(door.gateway.app, CHAT, chat_body(stream=True), KEY_A, when=2)
    bodies = [m["body"] for m in door.run(drive_it) if m["type"] == "http.response.body"]
    said = [body for body in bodies if b'"content":"' in body]  # not the comments between
    assert b'"content":"a"' in said[1] and b'"content":"b"' in said[2]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_answers_say_that_they_are_not_to_be_buffered(door, path):
    answer = door.post(path, {**chat_body(stream=True), "max_tokens": 5})
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "server" not in answer.headers


MESSAGES_OF_STAGES = {
    "queue_limit of 5 requests in flight is reached": 429,
    "tenant_queue_limit of 5 requests in flight is reached": 429,
    "the engine is still starting": 503,
    "the server is shutting down and takes no new requests": 503,
    "the engine has died; the server must be restarted": 503,
    "the request's deadline passed after 3 tokens": 504,
    "cancelled by the operator": 503,
    "the engine failed (ValueError); the server's log says more": 503,
    "internal error while planning; the server's log has the details": 500,
    "plan: was used before, or came too late": 400,
    "temperature: must be in [0, 2], got 3": 400,
    "logit_bias[5]: must be a number, got 'queue_limit of 5'": 400,
    "Traceback (most recent call last)": 500,
    "": 500,
}


@pytest.mark.parametrize(("message", "status"), MESSAGES_OF_STAGES.items())
@pytest.mark.parametrize("prefix", ["", "in ensemble 'deepseek_flash', "])
def test_what_stages_say_has_a_status(prefix, message, status):
    error = from_ensemble(prefix + message)
    assert error.status == status and "ensemble" not in error.message
    assert (error.retry_after is not None) == (status in (429, 503))

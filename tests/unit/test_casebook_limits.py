"""Casebook: what is refused, by which status and name (CB-21, CB-23, CB-24, CB-26 to CB-30, CB-62,
CB-65 to CB-69), and that the server goes on after it."""

import json
import time

import pytest

from tests.unit import gateway_model as model
from tests.unit.gateway import CHAT, COMPLETIONS, COUNT, KEY_A, MESSAGES, MODEL, chat_body
from tests.unit.streams import drive

LENGTH = model.CONTEXT


def refused(answer, param, status=400):
    assert answer.status == status, answer.raw
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    if status < 500:
        assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
        assert param.split(".")[0].split("[")[0] in error["message"]
    assert "Traceback" not in error["message"] and "/site-packages" not in error["message"]
    return error["message"]


@pytest.fixture(autouse=True)
def alive(door):
    """After each of these the server still answers, and holds no place."""
    yield
    door.says("fine")
    assert door.chat("are you there?").text() == "fine"
    assert door.ensemble.runtime.board.in_flight == 0


# -- seeds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -1, None], ids="CB-21 {}".format)
def test_seeds_in_range(door, seed):
    assert door.chat(seed=seed, temperature=0.9).status == 200
    # Absent and -1 are the configured default: such a request is a function of itself, too.
    assert door.plan.sampling.seed == (42 if seed in (-1, None) else seed)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -2, 1.5, "42", True], ids="CB-21 {!r}".format)
def test_seeds_that_are_none(door, seed):
    refused(door.chat(seed=seed, temperature=0.9), "seed")


# -- how much to answer ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 3.7, "16", True], ids="CB-23 {!r}".format)
@pytest.mark.parametrize("path", ["chat", "complete", "message"])
def test_max_tokens(door, path, value):
    answer = getattr(door, path)(max_tokens=value)
    if path == "message":
        assert answer.status == 400 and "max_tokens" in answer.error["message"]
    else:
        refused(answer, "max_tokens")


def test_echo_without_an_answer(door):
    """CB-23: not supported, and says so."""
    refused(door.complete("abc", echo=True, max_tokens=0), "max_tokens")
    door.says("def")
    assert door.complete("abc", echo=True, max_tokens=3).text() == "abcdef"


def test_more_than_the_context_is_the_context(door):
    """CB-24"""
    door.says("a" * 2 * LENGTH)
    answer = door.chat("hi", max_tokens=256_000, stream=True,
                       stream_options={"include_usage": True})  # fmt: skip
    assert answer.reasons() == ["length"]
    assert answer.usage["total_tokens"] == LENGTH
    assert door.plan.sampling.max_tokens == LENGTH - len(door.plan.prompt_token_ids)


def test_without_a_limit_a_chat_goes_to_the_end_and_a_completion_to_sixteen(door):
    door.says("a" * 2 * LENGTH)
    assert door.chat("hi").usage["total_tokens"] == LENGTH
    assert door.complete("hi").usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("complete", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("complete", {"logprobs": 10**9}, "logprobs"),
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 10**9}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "logprobs"),
    ],
    ids="CB-26 {}".format,
)
@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_without_bounds(door, path, fields, param, stream):
    refused(getattr(door, path)(**fields, stream=stream), param)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], None, 5, [[1], "a"]],
                         ids="CB-27 {!r}".format)  # fmt: skip
def test_empty_prompts(door, prompt):
    refused(door.complete(prompt), "prompt")


@pytest.mark.parametrize("messages", [[], None, "hi", [1], {"role": "user"}], ids="CB-27 {}".format)
def test_messages_that_are_none(door, messages):
    body = {"model": MODEL, "messages": messages}
    assert refused(door.post(CHAT, body), None).startswith("messages")


def test_an_empty_turn_is_a_turn(door):
    """CB-27"""
    assert door.chat([{"role": "user", "content": ""}]).status == 200
    turn = [{"role": "user", "content": None}]
    refused(door.chat(turn), "messages[0].content")


# -- the context -----------------------------------------------------------------------------


def text_of(tokens):
    """A user's text with which the whole prompt of a chat has so many tokens."""
    return "x" * (tokens - 4)


@pytest.mark.parametrize("tokens", [LENGTH, LENGTH + 10, 4 * LENGTH], ids="CB-28 {}".format)
@pytest.mark.parametrize("stream", [True, False])
def test_prompts_beyond_the_context(door, tokens, stream):
    for answer in (
        door.chat(text_of(tokens), max_tokens=8, stream=stream),
        door.complete("x" * tokens, max_tokens=8, stream=stream),
    ):
        message = refused(answer, None)
        assert answer.error["code"] == "context_length_exceeded"
        assert f"This model's maximum context length is {LENGTH} tokens" in message
    answer = door.message(text_of(tokens), stream=stream)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["message"].startswith("prompt is too long: ")


def test_the_last_place_in_the_context(door):
    """CB-28"""
    door.says("ab")
    answer = door.chat(text_of(LENGTH - 1))
    assert answer.text() == "a" and answer.reasons() == ["length"]


def test_tokens_are_counted_beyond_the_context(door):
    """CB-28, CB-73"""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text_of(2 * LENGTH)}]}
    assert door.post(COUNT, body).json["input_tokens"] == 2 * LENGTH
    assert door.post("/tokenize", body).json["count"] == 2 * LENGTH


# -- bodies ----------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large(door):
    """CB-29"""
    headers = {"content-length": str(200 * 10**6), "content-type": "application/json"}
    refused(door.post(CHAT, content=b"{}", headers=headers), None, 413)


def test_a_body_that_never_ends(door):
    """CB-29"""

    async def endless():
        while True:
            yield b" " * 65_536

    headers = {"content-type": "application/json"}
    begin = time.monotonic()
    refused(door.post(CHAT, content=endless(), headers=headers), None, 413)
    assert time.monotonic() - begin < 1


HOSTILE = {
    "nested": b'{"model":"served","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many messages": json.dumps(
        chat_body([{"role": "user", "content": "a"}] * 20_000)
    ).encode(),
    "one long text": json.dumps(chat_body("a" * 1_500_000)).encode(),
    "a long number": b'{"model":"served","messages":[],"seed":' + b"9" * 10_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=["CB-29 " + name for name in HOSTILE])
def test_hostile_bodies(door, data):
    begin = time.monotonic()
    assert refused(door.raw(CHAT, data), None)
    assert time.monotonic() - begin < 1


def test_a_compressed_body_is_not_unpacked(door):
    """CB-29"""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(door.post(CHAT, content=b"\x1f\x8b", headers=headers), None, 415)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 5_000_000}, "n"), ({"n": 17}, "n"), ({"n": 0}, "n"), ({"n": -1}, "n"),
     ({"prompt": ["a"] * 100_000}, "n"), ({"prompt": ["a"] * 20, "n": 10}, "n"),
     ({"best_of": 3}, "best_of")],
    ids="CB-30 {!s:.30}".format,
)  # fmt: skip
def test_amplifiers(door, fields, param):
    refused(door.complete(**{"prompt": "a", "max_tokens": 1, **fields}), param)


# -- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", v) for v in (0, -1, 1e9, "1.1")] + [("presence_penalty", 2.01)]
    + [("temperature", v) for v in (-0.5, 999_999.0, "0", True)]
    + [("top_p", v) for v in (-1, 0, 1.0001)] + [("top_k", -5), ("min_p", 1.5)],
    ids=lambda v: f"CB-62 CB-65 {v}",
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_values_out_of_range(door, field, value, stream):
    refused(door.chat(**{field: value, "stream": stream}), field)


@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1e999"], ids="CB-65 {}".format
)
@pytest.mark.parametrize("field", ["temperature", "min_p"])
def test_numbers_that_are_none(door, literal, field):
    data = json.dumps(chat_body())[:-1] + f', "top_k": 1, "{field}": {literal}}}'
    data = data.replace('"temperature": 0, ', "")
    refused(door.raw(CHAT, data.encode()), None)


def test_minus_zero_and_null_are_nothing_new(door):
    """CB-62, CB-65"""
    for fields in ({}, {"temperature": -0.0}, {"frequency_penalty": None, "top_k": 0}):
        assert door.chat("z", **fields).status == 200
    assert door.ensemble.runs == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"prompt": [0, 0, len(model.VOCABULARY)]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [5279552648203111001]}, None),
        ({"prompt": [[1, 2], [3, len(model.VOCABULARY)]]}, None),
    ],
    ids="CB-66 {}".format,
)
@pytest.mark.parametrize("stream", [True, False])
def test_tokens_outside_the_vocabulary(door, fields, param, stream):
    refused(door.complete(**{"prompt": "a", "stream": stream, **fields}), param)


# -- malformed requests (CB-67) --------------------------------------------------------------

BODIES = {
    "cut off": b'{"model":"served",', "a list": b"[]", "null": b"null", "empty": b"",
    "a key twice": b'{"model":"served","messages":[],"temperature":0,"temperature":1}',
    "byte order mark": b"\xef\xbb\xbf{}", "UTF-16": '{"model":"served"}'.encode("utf-16"),
    "half a character": json.dumps(chat_body("\ud83d")).encode(),
    "a role": json.dumps(chat_body([{"role": "wizard", "content": "x"}])).encode(),
    "a number for a text": json.dumps(chat_body([{"role": "user", "content": 5}])).encode(),
    "a text for a switch": json.dumps(chat_body(stream="true")).encode(),
}  # fmt: skip


@pytest.mark.parametrize("data", BODIES.values(), ids=["CB-67 " + name for name in BODIES])
def test_malformed_bodies(door, data):
    answer = door.raw(CHAT, data)
    refused(answer, None)
    assert answer.headers["content-type"] == "application/json"


def test_other_media_and_methods(door):
    """CB-67"""
    refused(door.raw(CHAT, b"{}", "text/plain"), None, 415)
    refused(door.get(CHAT), None, 405)
    refused(door.get("/nowhere"), None, 404)


def test_a_client_that_leaves_while_it_asks(door):
    """CB-67"""
    got = door.run(drive(door.gateway.app, CHAT, {}, KEY_A, when=0.01))
    assert got[0]["status"] == 400


@pytest.mark.parametrize("path", ["/chat/completions", CHAT, CHAT + "/"], ids="CB-68 {}".format)
def test_the_nulls_of_deepseek_harness(door, path):
    fields = {"max_tokens": 8, "thinking": {"type": "disabled"}}
    nulls = {"tool_choice": None, "tools": None, "seed": None, "stop": None}
    for extra in ({}, nulls):
        answer = door.post(path, chat_body("Reply with the literal word OK.", **fields, **extra))
        assert answer.status == 200
    assert door.ensemble.runs == 1


# -- models (CB-69) --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/models?limit=1000"])
def test_the_list_of_models(door, path):
    found = door.get(path).json
    assert [m["id"] for m in found["data"]] == [MODEL, "other-name"]
    assert all(m["object"] == "model" and m["owned_by"] and m["created"] for m in found["data"])
    assert (found["object"], found["has_more"], found["first_id"]) == ("list", False, MODEL)
    assert "/tmp" not in json.dumps(found)
    assert door.get(path, key=None).status == 401


def test_one_model(door):
    """CB-69"""
    assert door.get(f"/v1/models/{MODEL}").json["max_model_len"] == LENGTH
    refused(door.get("/v1/models/nope"), "model", 404)


@pytest.mark.parametrize("name", ["gpt-5", "../etc", "DeepSeek-V4-Flash"], ids="CB-69 {}".format)
def test_unknown_models(door, name):
    answer = door.chat(model=name)
    refused(answer, "model", 404)
    assert answer.error["code"] == "model_not_found" and MODEL in answer.error["message"]


@pytest.mark.parametrize("name", ["", None, 5])
def test_no_model(door, name):
    """CB-69"""
    refused(door.chat(model=name), "model")


@pytest.mark.parametrize("name", ["deepseek-chat", "claude-opus-4-8", "other-name"])
def test_aliases_are_told_by_the_models_own_name(door, name):
    """CB-38, CB-69"""
    for stream in (False, True):
        answer = door.chat(model=name, stream=stream)
        assert {e["model"] for e in (answer.events if stream else [answer.json])} == {MODEL}
    assert door.message(model=name).json["model"] == MODEL
    assert door.ensemble.runs == 1


def test_paths_that_the_library_has_and_we_do_not(door):
    for path in (
        "/v1/responses",
        "/invocations",
        "/v1/chat/completions/batch",
        "/v2/chat",
        "/inference/v1/generate",
        "/v1/load_lora_adapter",
        "/generative_scoring",
        "/v1/chat/completions/render",
        "/ping",
        "/version",
        "/docs",
        "/openapi.json",
    ):
        assert door.post(path, {}).status == 404 and door.get(path).status == 404  # fmt: skip


def test_the_other_routes_errors_have_their_protocols_shape(door):
    answer = door.post(MESSAGES, {"model": "nope", "max_tokens": 1, "messages": []})
    assert answer.status == 404 and answer.json["type"] == "error"
    assert answer.error["type"] == "not_found_error" and answer.json["request_id"]
    assert door.post(COMPLETIONS, {}, key="wrong").error["code"] == "invalid_api_key"

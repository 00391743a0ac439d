"""A thousand malformed requests: each is refused by name, none reaches the engine."""

import json
import random

import httpx

from clients.grpc_client import GrpcClient
from clients.request import Request
from tests.integration.raw import Stream, generate, infer, metric, settled, wait_idle

NUMBERS = ["abc", [], {}, True, "1e999", [1], {"a": 1}]
OUT_OF_RANGE = {
    "n": [0, -1, 17, 5_000_000, 1.5],
    "presence_penalty": [2.01, -2.01],
    "frequency_penalty": [3, -9],
    "repetition_penalty": [0, -1, 1e9],
    "temperature": [-0.5, 999999.0, 2.01],
    "top_p": [-1, 0, 1.0001],
    "top_k": [-5, 2.5],
    "min_p": [-0.1, 1.1],
    "seed": [-2, 18446744073709551615, 1.5],
    "max_tokens": [0, -1, 3.7],
    "min_tokens": [-1, 1.5],
    "logprobs": [-1, 21, 10**9],
    "thinking_token_budget": [-1],
}
NOT_NUMBERS = {
    "stop": [[""], [1], "a" * 100_000, {"a": 1}, 5],
    "stop_token_ids": [[-1], [10**9], ["x"], 5, [1.5]],
    "bad_words": [[""], [" "], [1], 7],
    "include_stop_str_in_output": ["yes", 1, []],
    "ignore_eos": ["maybe", 0],
    "detokenize": [2],
    "skip_special_tokens": ["x"],
    "spaces_between_special_tokens": [None.__class__.__name__],
    "logit_bias": [{"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": "x"}, [1], 3],
    "allowed_token_ids": [[], [-1], [99999], "x"],
    "structured_outputs": [{}, {"json": 5}, {"regex": "a", "json": "{}"}, "x", {"choice": []}],
    "use_dflash": ["x", 1],
    "use_dspark": [[]],
    "prompt_logprobs": [1, -1],
    "lora_name": ["x"],
    "tempreture": [0],
    "extra_args": [{}],
}
RAW = ["{", "[]", "null", "5", '"x"', '{"temperature": NaN}', '{"top_p": Infinity}', "\ufeff{}",
       '{"seed": 1, "seed": 2}', "[" * 10_000]  # fmt: skip


def malformed_requests(count, seed=11):
    """(fields, the name that the error must have), generated over every field."""
    chooser = random.Random(seed)
    makers = [_bad_sampling, _bad_raw, _bad_prompt, _bad_extra]
    return [chooser.choices(makers, [6, 1, 2, 2])[0](chooser) for _ in range(count)]


def _bad_sampling(chooser):
    values = {**OUT_OF_RANGE, **NOT_NUMBERS}
    name = chooser.choice(list(values))
    bad = [*values[name], *(NUMBERS if name in OUT_OF_RANGE else [])]
    good = {"max_tokens": 4} if name not in ("max_tokens", "min_tokens") else {}
    fields = {
        "text_input": "x",
        "sampling_parameters": json.dumps({**good, name: chooser.choice(bad)}),
    }
    return fields, name


def _bad_raw(chooser):
    raw = chooser.choice(RAW)
    name = "seed" if "seed" in raw else "sampling_parameters"
    return {"text_input": "x", "sampling_parameters": raw}, name


def _bad_prompt(chooser):
    return chooser.choice(
        [
            ({"text_input": ""}, "text_input"),
            ({"text_input": b"\xff\xfe"}, "text_input"),
            ({"stream": True}, "text_input"),
            ({"input_ids": [-1]}, "input_ids"),
            ({"input_ids": [5, 512]}, "input_ids"),
            ({"input_ids": [7] * 2048}, "input_ids"),
            ({"text_input": "long " * 4096}, "text_input"),
            ({"text_input": "a", "input_ids": [5]}, "input_ids"),
            ({"messages": "{"}, "messages"),
            ({"messages": "[]"}, "messages"),
            ({"messages": '{"role": "user"}'}, "messages"),
            ({"messages": "[1]"}, "messages[0]"),
            ({"messages": '[{"role": "wizard", "content": "x"}]'}, "messages[0].role"),
            ({"messages": '[{"role": "user", "content": 5}]'}, "messages[0].content"),
            ({"messages": '[{"role": "user"}]'}, "messages[0].content"),
            ({"messages": b"\xff"}, "messages"),
        ]
    )


def _bad_extra(chooser):
    extra, name = chooser.choice(
        [
            ({"request_timeout_ms": 0}, "request_timeout_ms"),
            ({"request_timeout_ms": -7}, "request_timeout_ms"),
            ({"cancel_token": "short"}, "cancel_token"),
            ({"cancel_token": "x" * 600}, "cancel_token"),
            ({"session_id": b"\xff"}, "session_id"),
            ({"cache_salt": "x" * 600}, "cache_salt"),
            ({"cache_salt": b"\xc3"}, "cache_salt"),
            ({"turn_starts": [0]}, "turn_starts"),
            ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ]
    )
    return {"text_input": "x", **extra}, name


def test_a_thousand_malformed_requests(served):
    wait_idle(served)
    runs = settled(served, "deepseek_flash_engine_runs_total")
    refused = metric(served, "deepseek_flash_errors_total", reason="invalid_argument")
    requests = malformed_requests(1000)
    with Stream(served.grpc) as stream:
        for fields, name in requests:
            stream.send("deepseek_flash", fields)
            outputs, error, _ = stream.next()
            assert outputs is None, f"answered: {fields}"
            problem = error.removeprefix("in ensemble 'deepseek_flash', ")
            assert problem.startswith(name), f"{name} not named for {fields}: {error}"
    wait_idle(served)
    invalid = settled(served, "deepseek_flash_errors_total", reason="invalid_argument")
    assert invalid == refused + 1000
    assert metric(served, "deepseek_flash_engine_runs_total") == runs
    assert GrpcClient(served.grpc).generate(Request(text="x", sampling={"max_tokens": 2})).token_ids


def test_http_says_400_and_the_name(served):
    for body, name in (
        ({"text_input": "x", "temperature": "abc"}, "temperature"),
        ({"text_input": "x", "tempreture": 0}, "tempreture"),
        ({"max_tokens": 3}, "text_input"),
        ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters"),
    ):
        status, answer = generate(served, body)
        assert status == 400
        assert f"{name}:" in answer["error"]


def test_wrong_shapes_and_types_are_triton_s_to_refuse(served):
    for fields in ({"text_input": ["a", "b"]}, {"text_input": 5}, {"stream": "yes"}):
        _, error = infer(served.grpc, fields)
        assert error
    url = f"{served.http}/v2/models/deepseek_flash/generate"
    for body in (b"{", b"[]", b"", b'{"text_input": ["a", "b"]}', b"\xff\xfe{\x00}\x00"):
        assert httpx.post(url, content=body, trust_env=False).status_code in (400, 500)
    wait_idle(served)


def test_a_grammar_that_does_not_compile(served):
    values = json.dumps({"structured_outputs": {"regex": "["}})
    _, error = infer(served.grpc, {"text_input": "x", "sampling_parameters": values})
    assert "regex" in error
    wait_idle(served)

"""The vLLM backend's tensor contract, as its public sample client and documents use it.

The answers compared are the engine's own; ``test_dflash`` has the replayed ones.
"""

import json

import httpx
import pytest

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import Answer, Request
from loadtest.bench.prompts import PROMPTS
from tests.integration.raw import Stream, generate, infer

ENGINE = {"use_dflash": False}
GREEDY = {"temperature": 0, "max_tokens": 8, **ENGINE}
ALL_RETURNS = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_cached_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": True,
}


def sampling(**values):
    return json.dumps({**GREEDY, **values})


@pytest.mark.parametrize("stream", [False, True])
def test_public_sample_request(served, stream):
    """NVIDIA's sample client: string-typed values, as tensor and as parameters."""
    values = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "40"}
    fields = {"text_input": "Hello, my name is", "stream": stream}
    fields["sampling_parameters"] = json.dumps(values)
    responses, error = infer(served.grpc, fields, request_id="7", parameters=values)
    assert error is None
    assert all(set(response) == {"text_output"} for response in responses)
    texts = [response["text_output"] for response in responses]
    assert all(text.shape == (1,) for text in texts)
    joined = b"".join(text[0] for text in texts).decode()
    if stream:
        assert len(responses) > 1
    else:
        assert len(responses) == 1
        assert joined.startswith("Hello, my name is")  # prepended unless excluded


def test_every_return_flag_not_streaming(served):
    fields = {"text_input": "Why?", "exclude_input_in_output": True, **ALL_RETURNS}
    fields["sampling_parameters"] = sampling(logprobs=2)
    (response,), error = infer(served.grpc, fields)
    assert error is None
    assert response["finish_reason"].tolist() == [b"length"]
    assert response["num_output_tokens"].tolist() == [8]
    assert response["num_input_tokens"].shape == response["num_cached_tokens"].shape == (1,)
    assert response["num_cached_tokens"][0] < response["num_input_tokens"][0]  # the engine ran
    assert response["token_ids"].shape == (8,)
    logprobs = json.loads(response["logprobs"][0])
    assert len(logprobs) == 8
    chosen = [
        position[str(token)]["logprob"]
        for position, token in zip(logprobs, response["token_ids"], strict=True)
    ]
    assert response["cumulative_logprob"][0] == pytest.approx(sum(chosen), abs=1e-3)


def test_every_return_flag_streaming(served):
    fields = {"text_input": "Why?", "stream": True, **ALL_RETURNS}
    fields["sampling_parameters"] = sampling(logprobs=0)
    responses, error = infer(served.grpc, fields)
    assert error is None
    reasons = [response["finish_reason"][0] for response in responses]
    assert reasons == [b"None"] * (len(responses) - 1) + [b"length"]
    assert sum(int(response["num_output_tokens"][0]) for response in responses) == 8
    assert sum(response["token_ids"].size for response in responses) == 8
    assert sum(len(json.loads(response["logprobs"][0])) for response in responses) == 8


def test_flags_that_are_not_asked_for_cost_nothing(served):
    (response,), _ = infer(
        served.grpc, {"text_input": "a", "sampling_parameters": sampling(), "stream": False}
    )
    assert set(response) == {"text_output"}


def test_logprobs_not_requested_are_null(served):
    fields = {"text_input": "a", "sampling_parameters": sampling(), "return_logprobs": True}
    (response,), _ = infer(served.grpc, fields)
    assert response["logprobs"].tolist() == [b"null"]


def test_parameters_are_sampling_parameters(served):
    by_tensor, _ = infer(
        served.grpc, {"text_input": "abc", "sampling_parameters": sampling(max_tokens=5)}
    )
    by_parameters, error = infer(
        served.grpc, {"text_input": "abc"}, parameters={"temperature": 0, "max_tokens": 5}
    )
    assert error is None
    assert by_tensor[0]["text_output"] == by_parameters[0]["text_output"]
    status, answer = generate(served, {"text_input": "abc", "temperature": 0, "max_tokens": 5})
    assert status == 200
    assert answer["text_output"].encode() == by_tensor[0]["text_output"][0]


def test_tensor_wins_over_parameters(served):
    fields = {"text_input": "abc", "sampling_parameters": sampling(max_tokens=3), **ALL_RETURNS}
    (response,), error = infer(served.grpc, fields, parameters={"max_tokens": 9, "bogus": 1})
    assert error is None
    assert response["num_output_tokens"].tolist() == [3]


def test_reserved_parameters_are_ignored(served):
    body = {"text_input": "a", "max_tokens": 2, "id": "x", "priority": 1, "sequence_id": 3}
    status, answer = generate(served, body)
    assert status == 200
    assert answer["id"] == "x"


def test_choices(served):
    fields = {"text_input": "a", "exclude_input_in_output": True, **ALL_RETURNS}
    fields["sampling_parameters"] = json.dumps(
        {"n": 3, "temperature": 1, "max_tokens": 6, **ENGINE}
    )
    (first,), error = infer(served.grpc, fields)
    assert error is None
    assert first["text_output"].shape == (3,)
    assert first["num_output_tokens"].tolist() == [6, 6, 6] or first["finish_reason"].size == 3
    assert len(set(first["text_output"])) > 1  # seed + index: not clones
    (again,), _ = infer(served.grpc, fields)
    assert again["text_output"].tolist() == first["text_output"].tolist()  # default_seed


def test_greedy_choices_are_equal(served):
    fields = {"text_input": "a", "exclude_input_in_output": True}
    fields["sampling_parameters"] = sampling(n=3)
    (response,), error = infer(served.grpc, fields)
    assert error is None
    assert response["text_output"].shape == (3,)
    assert len(set(response["text_output"])) == 1


def test_streamed_choices(served):
    fields = {"text_input": "a", "stream": True, "return_finish_reason": True}
    fields["sampling_parameters"] = json.dumps({"n": 2, "max_tokens": 6, "seed": 7, **ENGINE})
    streamed, error = infer(served.grpc, fields)
    assert error is None
    assert all(response["text_output"].shape == (2,) for response in streamed)
    texts = [b"".join(r["text_output"][i] for r in streamed) for i in range(2)]
    (whole,), _ = infer(served.grpc, {**fields, "stream": False, "exclude_input_in_output": True})
    assert texts == whole["text_output"].tolist()


def test_seeded_sampling_repeats(served):
    client = GrpcClient(served.grpc)
    answers = [
        client.generate(
            Request(text="x", sampling={"seed": seed, "max_tokens": 16, **ENGINE})
        ).token_ids
        for seed in (5, 5, 6)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_messages_are_rendered_with_the_template(served, reference):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]
    ids = reference.encoder.from_messages(json.dumps(messages), 2048).ids
    client = GrpcClient(served.grpc)
    by_messages = client.generate(Request(messages=messages, sampling=GREEDY))
    by_ids = client.generate(Request(input_ids=ids, sampling=GREEDY, turn_starts=[0, 3]))
    assert by_messages.num_input_tokens == len(ids)
    assert by_messages.token_ids == by_ids.token_ids


def test_two_requests_interleave_on_one_stream(served):
    with Stream(served.grpc) as stream:
        for name, prompt in (("one", "first"), ("two", "second")):
            fields = {"text_input": prompt, "stream": True, **ALL_RETURNS}
            fields["sampling_parameters"] = sampling(max_tokens=24)
            stream.send("deepseek_flash", fields, request_id=name)
        texts = {"one": b"", "two": b""}
        finals = 0
        while finals < 2:
            result, error = stream.answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            if response.outputs:
                texts[response.id] += result.as_numpy("text_output")[0]
            finals += response.parameters["triton_final_response"].bool_param
    client = GrpcClient(served.grpc)
    for name, prompt in (("one", "first"), ("two", "second")):
        alone = client.generate(Request(text=prompt, sampling={**GREEDY, "max_tokens": 24}))
        assert alone.text == texts[name].decode()


def test_streams_never_split_a_character(served):
    """Every event is UTF-8 on its own and the pieces are the whole (CB-13)."""
    client = HttpClient(served.http)
    split = 0
    for prompt in PROMPTS[::4]:
        request = Request(text=prompt, sampling={**GREEDY, "max_tokens": 60})
        whole = client.generate(request)
        url = f"{served.http}/v2/models/deepseek_flash/generate_stream"
        with httpx.stream("POST", url, json=request.fields(), timeout=60, trust_env=False) as r:
            lines = [line for line in b"".join(r.iter_raw()).split(b"\n") if line]
        events = [json.loads(line.decode("utf-8").removeprefix("data: ")) for line in lines]
        assert "".join(event["text_output"] for event in events) == whole.text
        split += sum(event["text_output"] == "" for event in events)
        assert Answer.of(list(client.stream(request))) == whole
    assert split > 0  # some characters did take several tokens


def test_stop_strings_do_not_leak(served):
    """The answer ends before the stop string, streamed or not (CB-09, CB-12)."""
    client = GrpcClient(served.grpc)
    free = client.generate(Request(text="Hello", sampling={**GREEDY, "max_tokens": 40}))
    stop = free.text[10:13]
    values = {**GREEDY, "max_tokens": 40, "stop": ["\u0000never", stop]}
    stopped = client.generate(Request(text="Hello", sampling=values))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert client.generate(Request(text="Hello", sampling=values, stream=False)) == stopped


def test_long_budget_is_clamped_to_the_context(served):
    """CB-24: a client that asks for 256,000 tokens gets what the context holds."""
    ids = [65] * 2040
    answer = GrpcClient(served.grpc).generate(
        Request(input_ids=ids, sampling={"max_tokens": 256000, "ignore_eos": True})
    )
    assert len(answer.token_ids) == 8
    assert answer.finish_reason == "length"

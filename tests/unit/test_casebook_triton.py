"""Casebook: Triton's own door (CB-70, CB-71), over gRPC. What Triton itself does, such as answering
``/generate`` with ``stream: true``, is for the real one: tests/integration/test_contract.py."""

import pytest

from clients.grpc_client import GrpcClient
from clients.request import GenerationError, Request
from tests.unit.gateway import KEY_A
from tests.unit.gateway_model import BOS


@pytest.fixture
def triton(door):
    return GrpcClient(f"127.0.0.1:{door.ensemble.port}")


def test_sampling_parameters_as_strings(door, triton):
    """CB-70"""
    door.says("ML is", " what?")
    texts, numbers = (
        {"temperature": "0", "top_p": "0.95", "max_tokens": "16"},
        {"temperature": 0, "top_p": 0.95, "max_tokens": 16},
    )
    for sampling in (texts, numbers):
        answer = triton.generate(Request(text="what is ML?", sampling=sampling, stream=False))
        assert answer.text == "ML is what?"
    assert door.ensemble.runs == 1


@pytest.mark.parametrize(
    "sampling", [{"temperature": "abc"}, {"tempreture": 0}, {"top_p": "nan"}, {"top_k": 1.5}],
    ids="CB-70 {}".format,
)  # fmt: skip
def test_bad_sampling_parameters_are_named(triton, sampling):
    with pytest.raises(GenerationError, match=next(iter(sampling))):
        triton.generate(Request(text="x", sampling=sampling))


def test_both_doors_give_one_answer_and_share_it(door, triton):
    """CB-70"""
    door.says("the same")
    chat = door.chat("Q", key=KEY_A)
    ids, salt = list(door.plan.prompt_token_ids), door.plan.cache_salt
    request = Request(input_ids=ids, sampling={"temperature": 0, "max_tokens": 99}, cache_salt=salt)
    assert triton.generate(request).text == chat.text() == "the same"
    assert door.ensemble.runs == 1


def test_a_stream_is_deltas_and_a_final_flag(door, triton):
    """CB-71"""
    door.says("a", "b", "c")
    request = Request(text=BOS + "x", sampling={"temperature": 0, "max_tokens": 9})
    chunks = list(triton.stream(request))
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "stop"]
    whole = triton.generate(Request(text=BOS + "x", sampling=request.sampling, stream=False))
    assert (whole.text, len(whole.token_ids), whole.num_input_tokens) == ("abc", 4, 2)


@pytest.mark.parametrize("request_", [Request(text=""), Request(input_ids=[])], ids=["text", "ids"])
def test_an_empty_prompt(triton, request_):
    """CB-27, CB-71"""
    with pytest.raises(GenerationError, match=r"the prompt is empty|empty tensor"):
        triton.generate(request_)

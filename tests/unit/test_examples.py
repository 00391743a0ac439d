"""The example for deepseek-harness, against the gateway."""

import httpx
import pytest

from examples import vllm_flash_wrapper
from tests.unit.gateway import KEY_A


@pytest.fixture
def client(door, monkeypatch):
    monkeypatch.setattr(vllm_flash_wrapper, "KEY", KEY_A)

    def forward(request):
        headers = {k: v for k, v in request.headers.items() if k != "content-length"}
        answer = door.post(request.url.path, content=request.read(), headers=headers)
        return httpx.Response(answer.status, content=answer.raw)

    return httpx.Client(transport=httpx.MockTransport(forward))


def test_the_wrapper_streams_and_leaves_the_harness_speculation_out(door, client):
    door.says("Hel", "lo")
    turns = [{"role": "user", "content": "hi"}]
    extra = {"speculative_decoding": True, "draft_model": "x", "temperature": 0, "max_tokens": 9}
    assert "".join(vllm_flash_wrapper.generate(turns, client, **extra)) == "Hello"
    assert door.plan.use_dflash and door.plan.sampling.max_tokens == 9


def test_the_wrapper_raises_what_went_wrong(door, client):
    with pytest.raises(RuntimeError, match="temperature"):
        list(vllm_flash_wrapper.generate([{"role": "user", "content": "x"}], client, temperature=9))
    door.says("a", RuntimeError("x"))
    with pytest.raises(RuntimeError, match="the engine failed"):
        list(vllm_flash_wrapper.generate([{"role": "user", "content": "y"}], client))

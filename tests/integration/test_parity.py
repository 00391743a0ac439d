"""Greedy answers through the ensemble are vLLM's own, token by token."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtest.bench.parity import differences, doors
from loadtest.bench.prompts import PROMPTS
from tests.integration.conftest import TOKENS


def test_vllm_agrees_with_itself(reference):
    """The yardstick: plain against plain, alone against in company."""
    alone, together = reference.runs[1], reference.runs[8]
    assert [run.token_ids for run in alone] == [run.token_ids for run in together]


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("door", ["gRPC stream", "generate_stream", "generate"])
def test_greedy_tokens_are_equal(served, reference, door, concurrency):
    ask = doors(served)[door]
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(ask, PROMPTS, [TOKENS] * len(PROMPTS)))
    assert differences(reference.runs[concurrency], answers, PROMPTS) == []

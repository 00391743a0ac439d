"""Greedy answers through the ensemble are vLLM's own, token by token."""

import pytest

from loadtest.bench.parity import differences
from loadtest.bench.prompts import PROMPTS
from tests.integration.tenant import in_company


def test_vllm_agrees_with_itself(reference):
    """The yardstick: plain against plain, alone against in company."""
    alone, together = reference.runs[1], reference.runs[8]
    assert [run.token_ids for run in alone] == [run.token_ids for run in together]


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("door", ["gRPC stream", "generate_stream", "generate"])
def test_greedy_tokens_are_equal(tenant, reference, door, concurrency):
    """Cold, then warm: the engine's answers, then what the cache made of them."""
    runs = reference.runs[concurrency]
    asked = [tenant.request(prompt) for prompt in PROMPTS]
    for known in (0, len(PROMPTS)):
        before = tenant.cache.stats()["lookups"].get("exact", 0)
        answers = in_company(lambda request: tenant.ask(request, door), asked, concurrency)
        assert tenant.cache.stats()["lookups"].get("exact", 0) == before + known
        assert differences(runs, answers, PROMPTS) == []
        for request, run in zip(asked, runs):
            tenant.wait_until_known(request, len(run.token_ids))

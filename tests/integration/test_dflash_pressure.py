"""A cache that is far too small, on a server of its own: entries come and go under load."""

import pytest
from deepseek_flash.contract import LookupResult

from loadtest.bench.parity import differences
from loadtest.bench.prompts import PROMPTS
from loadtest.served import serving
from tests.integration.conftest import MODEL
from tests.integration.raw import metric, settled, wait_for
from tests.integration.tenant import Cache, EngineRuns, Tenant, in_company

CAPACITY = 8
BLOCK = 16  # tokens of an entry: an answer takes two
TTL = 3  # seconds
FLAGS = (
    "--engine-args", '{"max_model_len": 2048}', "--probe-interval", "86400",
    "--dflash-cache-size", str(CAPACITY), "--dflash-block-tokens", str(BLOCK),
    "--dflash-semantic", "on", "--dflash-ttl-seconds", str(TTL),
)  # fmt: skip


@pytest.fixture(scope="module")
def crowded(reference):
    with serving(MODEL, FLAGS) as served:
        yield Tenant(served, Cache(served, reference.encoder), "crowded", EngineRuns(served))


def test_eviction_under_load_changes_no_token(crowded, reference):
    prompts, runs = PROMPTS[:48:2], reference.runs[8][:48:2]
    sizes = []

    def ask(prompt):
        answer = crowded.ask(crowded.request(prompt))
        sizes.append(crowded.cache.stats()["entries"])
        return answer

    # The second time in pairs: one finds the other's run, the whole, the beginning or nothing.
    for times in (1, 2):
        asked = [prompt for prompt in prompts for _ in range(times)]
        expected = [run for run in runs for _ in range(times)]
        assert differences(expected, in_company(ask, asked), asked) == []
    assert max(sizes) == CAPACITY
    assert crowded.cache.stats()["evictions"]["capacity"] > len(prompts)
    assert crowded.cache.stats()["collisions"] == 0


def test_similar_prompts_are_looked_for(crowded):
    served = crowded.served
    assert settled(served, "dflash_encoder_active") == 1
    assert metric(served, "dflash_lookups_total", result="semantic") > 0
    assert metric(served, "dflash_references_total") > 0
    assert metric(served, "dflash_entries") <= CAPACITY


def test_what_is_too_old_is_gone(crowded):
    request = crowded.request("soon forgotten")
    answer = crowded.learn(request)
    assert crowded.ask(request) == answer
    wait_for(
        lambda: crowded.cache.lookup(request).result is LookupResult.MISS, TTL + 5, "it is too old"
    )
    wait_for(lambda: crowded.cache.stats()["entries"] == 0, 5, "nothing is kept beyond its age")
    assert crowded.learn(request) == answer

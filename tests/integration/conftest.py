"""One shared server for all tests that do not stop or break one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from deepseek_flash.contract import Sampling
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model

from loadtest.bench.engine import PlainEngine, Run
from loadtest.bench.prompts import PROMPTS
from loadtest.served import Served, serving
from tests.integration.gateway import Gateway, serving_gateway
from tests.integration.tenant import TOKENS, Cache, EngineRuns, Tenant

MODEL = "tiny-deepseek"
SPECIAL = {
    "sampled": {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "seed": 7, "min_p": 0.2},
    "logit_bias": {"logit_bias": {10: 4.0, 20: 5.0, 30: -100.0}},
    "both": {"temperature": 1.2, "seed": 7, "min_p": 0.1, "logit_bias": {10: 4.0, 20: 5.0}},
}


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.integration)


@dataclass(frozen=True)
class Reference:
    """What vLLM answers when it is called directly."""

    encoder: PromptEncoder
    runs: dict[int, list[Run]]  # concurrency → one run a prompt of PROMPTS
    special: dict[str, tuple[dict[str, Any], list[Run]]]  # sampling, and a run a prompt of some


@pytest.fixture(scope="session")
def reference() -> Reference:
    path = resolve_model(MODEL)
    encoder = PromptEncoder(load_tokenizer(path, None, False))
    engine = PlainEngine(path, max_model_len=2048)
    try:
        ids = [encoder.from_text(prompt, 2048) for prompt in PROMPTS]
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS)
        runs = {many: engine.run(ids, sampling, many) for many in (1, 8)}
        special = {}
        for name, values in SPECIAL.items():
            values = {"temperature": 0.0, "max_tokens": TOKENS, **values}
            special[name] = values, engine.run(ids[:8], Sampling(**values), 1)
    finally:
        engine.close()
    return Reference(encoder, runs, special)


@pytest.fixture(scope="session")
def served(reference: Reference) -> Iterator[Served]:
    """After the reference: two engines at once would starve each other."""
    # No probes of the launcher's own: tests count what the engine ran.
    flags = ["--engine-args", '{"max_model_len": 2048}', "--probe-interval", "86400"]
    with serving(MODEL, flags) as server:
        yield server


@pytest.fixture(scope="module")
def engine_runs(served: Served) -> EngineRuns:
    return EngineRuns(served)


@pytest.fixture
def tenant(
    served: Served, reference: Reference, engine_runs: EngineRuns, request: pytest.FixtureRequest
) -> Tenant:
    return Tenant(served, Cache(served, reference.encoder), request.node.name, engine_runs)


@pytest.fixture(scope="session")
def gateway_server() -> Iterator[Gateway]:
    with serving_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(gateway_server: Gateway, request: pytest.FixtureRequest) -> Gateway:
    return replace(gateway_server, salt=request.node.name[:100])

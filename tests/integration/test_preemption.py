"""DSpark where the KV cache is too small for the load: requests lose theirs and begin anew."""

import pytest
from deepseek_flash.config import DecoderConfig
from deepseek_flash.contract import Sampling
from deepseek_flash.launcher.environment import resolve_model

from loadtest.bench.engine import PlainEngine
from loadtest.bench.prompts import PROMPTS
from tests.integration.conftest import MODEL
from tests.integration.test_dspark_engine import drain, spoiled

BLOCK, BLOCKS = 16, 48  # tokens; half of what eight such requests need
LENGTH, CONCURRENCY = 160, 8
SAMPLING = Sampling(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def pressed():
    engine = PlainEngine(
        resolve_model(MODEL), DecoderConfig(dspark_controller="thresholds"), max_model_len=512,
        block_size=BLOCK, num_gpu_blocks_override=BLOCKS, enable_prefix_caching=False,
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(reference):
    return [reference.encoder.from_text(prompt, 512)[:200] for prompt in PROMPTS[:CONCURRENCY]]


@pytest.fixture(scope="module")
def answers(pressed, prompts):
    """One at a time, without drafts to speak of: nobody is put off."""
    runs = pressed.run(prompts, SAMPLING, 1)
    assert pressed.engine.preemptions == 0
    return [run.token_ids for run in runs]


@pytest.mark.parametrize("how", ["right", "every fourth wrong"])
def test_answers_survive_preemption(pressed, prompts, answers, how):
    before = pressed.engine.preemptions
    drain(pressed)
    chains = [spoiled(tokens, how) for tokens in answers]
    runs = pressed.run(prompts, SAMPLING, CONCURRENCY, chains)
    assert [run.token_ids for run in runs] == answers
    assert pressed.engine.preemptions > before, "the cache was not too small"
    told = drain(pressed)
    assert sum(told["accepted"]["chain"]) > 0
    pressed.run(prompts[:1], SAMPLING, 1)
    assert drain(pressed)["live"] <= 1, "of those that have ended nothing is left"

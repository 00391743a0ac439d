"""DSpark in vLLM's worker, whatever it guesses: right, wrong, and to the borders.

The controller of thresholds drafts more than pays, so that much is verified.
"""

import gzip
import json
import random
from collections import Counter

import pytest
from deepseek_flash.config import DecoderConfig
from deepseek_flash.contract import Sampling
from deepseek_flash.launcher.environment import resolve_model

from loadtest.bench.engine import BURST_STEPS, PlainEngine
from loadtest.bench.prompts import PROMPTS
from tests.integration.conftest import MODEL, SPECIAL
from tests.integration.tenant import TOKENS

MAX_MODEL_LEN = 2048
WRONG = 7
SAMPLES = 400
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}
BORDERS = {
    **{f"max_tokens {n}": {"max_tokens": n} for n in (1, 2, 3, 17, 18)},
    "min_tokens": {"min_tokens": 20},
    "stop tokens": {"stop_token_ids": list(range(100, 140))},
    "stop string": {"stop": ("a", "e")},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "bad words": {"bad_words": ("the", " a")},
    "allowed": {"allowed_token_ids": list(range(3, 200))},
    "json": {"structured_outputs": {"json": {"type": "object"}}},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def dspark(reference, traces):
    engine = PlainEngine(
        resolve_model(MODEL), DecoderConfig(dspark_controller="thresholds"),
        max_model_len=MAX_MODEL_LEN,
        profiler_config={
            "profiler": "torch", "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False, "ignore_frontend": True,
        },
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(reference):
    return [reference.encoder.from_text(prompt, MAX_MODEL_LEN) for prompt in PROMPTS]


def sampling(**values):
    return Sampling(**{**GREEDY, **values})


def drain(engine):
    return engine.engine.run(engine.engine.drain()).result()


def spoiled(tokens, how):
    tokens = list(tokens)
    if how == "wrong":
        return [WRONG] * len(tokens)
    if how == "every fourth wrong":
        return [WRONG if place % 4 == 3 else token for place, token in enumerate(tokens)]
    return tokens


@pytest.mark.parametrize("how", ["right", "wrong", "every fourth wrong", "none"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_do_not_depend_on_the_drafts(dspark, reference, prompts, how, concurrency):
    plain = reference.runs[concurrency]
    chains = [() if how == "none" else spoiled(run.token_ids, how) for run in plain]
    drain(dspark)
    found = dspark.run(prompts, sampling(), concurrency, chains)
    assert [run.token_ids for run in found] == [run.token_ids for run in plain]
    assert [run.text for run in found] == [run.text for run in plain]
    told = drain(dspark)
    proposed, accepted = (sum(told[what].get("chain", ())) for what in ("proposed", "accepted"))
    if how == "none":
        assert proposed == 0
    else:
        assert proposed > 0 and (accepted == proposed) == (how == "right")
    assert told["live"] == 0, "a request was leaked"


@pytest.mark.parametrize("name", BORDERS)
def test_ends_and_rules_hold_within_drafts(dspark, prompts, name):
    """Against the same engine without guesses, which is plain vLLM's own (test_dspark.py)."""
    values = sampling(**BORDERS[name])
    asked = prompts[:8]
    plain = dspark.run(asked, values, 1)
    long = dspark.run(asked, sampling(**{**BORDERS[name], "max_tokens": TOKENS}), 1)
    drain(dspark)
    found = dspark.run(asked, values, 8, [run.token_ids for run in long])
    assert [(run.token_ids, run.text) for run in found] == [
        (run.token_ids, run.text) for run in plain
    ]
    if values.max_tokens > 3:
        assert sum(drain(dspark)["accepted"]["chain"]) > 0


@pytest.mark.parametrize("back", [1, 2, 3, 17, 18, 30])
def test_no_draft_leads_over_the_end_of_the_context(dspark, back):
    draw = random.Random(back)
    asked = [[draw.randrange(3, 500) for _ in range(MAX_MODEL_LEN - back)]]
    plain = dspark.run(asked, sampling(max_tokens=back), 1)
    chains = [[*plain[0].token_ids, *[WRONG] * 16]]
    found = dspark.run(asked, sampling(max_tokens=back), 1, chains)
    assert found[0].token_ids == plain[0].token_ids and len(found[0].token_ids) == back


@pytest.mark.parametrize("name", SPECIAL)
def test_seeds_min_p_and_logit_bias_beside_drafts_of_others(dspark, reference, prompts, name):
    """A seeded request itself gets none: its generator must not notice its neighbours' drafts."""
    values, plain = reference.special[name]
    greedy = reference.runs[1]
    chains = [run.token_ids for run in plain]
    drain(dspark)
    found = dspark.run(prompts[: len(plain)], Sampling(**values), 8, chains)
    assert [run.token_ids for run in found] == [run.token_ids for run in plain]
    proposed = drain(dspark)["proposed"]
    assert bool(proposed) == ("seed" not in values)
    assert dspark.run(prompts[:1], sampling(), 1)[0].token_ids == greedy[0].token_ids


def test_drafts_do_not_change_what_is_likely(dspark, reference, prompts):
    """Sampled without a seed: the same distribution of tokens with drafts and without."""
    asked, values = [prompts[0]] * SAMPLES, sampling(temperature=1.0, top_k=8, max_tokens=4)
    greedy = dspark.run(prompts[:1], sampling(max_tokens=8), 1)[0].token_ids
    drain(dspark)
    plain = dspark.run(asked, values, 16)
    assert not drain(dspark)["proposed"].get("chain")
    guided = dspark.run(asked, values, 16, [greedy] * SAMPLES)
    told = drain(dspark)
    proposed, accepted = (sum(told[what]["chain"]) for what in ("proposed", "accepted"))
    assert 0 < accepted < proposed, "some are taken, some are not"
    for place in (1, 2, 3):
        counts = [Counter(run.token_ids[place] for run in runs) for runs in (plain, guided)]
        assert two_samples_differ(*counts) < 5.0, f"token {place}: {counts}"


def two_samples_differ(one, other):
    """Pearson's chi square of two equally large samples, in deviations from its mean.

    Tokens that are too rare for it count together.
    """
    rare = [token for token in one | other if one[token] + other[token] < 10]
    common = (one | other).keys() - set(rare)
    pairs = [(one[token], other[token]) for token in common]
    pairs.append((sum(one[token] for token in rare), sum(other[token] for token in rare)))
    square = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = max(1, len(pairs) - 1)
    return (square - freedom) / (2 * freedom) ** 0.5


def test_a_profile_shows_a_range_for_each_burst(dspark, traces):
    """Texts that repeat themselves, so that there are bursts."""
    asked = [[20, 21, 22, 23, first] * 12 for first in range(30, 34)]
    llm = dspark.engine._llm
    drain(dspark)
    dspark.engine.run(llm.start_profile()).result()
    dspark.run(asked, sampling(max_tokens=12, ignore_eos=True), 4)
    dspark.engine.run(llm.stop_profile()).result()
    told = drain(dspark)
    bursts = told["passes"].get("burst", 0)
    assert 0 < told["burst_tokens"] <= BURST_STEPS * bursts
    ranges = 0
    for path in traces.rglob("*.json*"):
        text = path.read_bytes()
        events = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["traceEvents"]
        ranges += sum(event.get("name") == "dspark: burst" for event in events)
    assert ranges == bursts

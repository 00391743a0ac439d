"""DSpark guesses, and no answer changes by it: on the real stack."""

from dataclasses import replace

import pytest

from loadtest.bench.prompts import PROMPTS
from tests.integration.raw import metric, settled
from tests.integration.tenant import in_company, without_cache

DECODER = ("deepseek_decoder",)


def drafts(served, source=None):
    """Draft tokens (proposed, accepted) so far."""
    labels = {} if source is None else {"source": source}
    proposed = settled(served, "dspark_drafts_proposed_total", DECODER, **labels)
    return proposed, metric(served, "dspark_drafts_accepted_total", **labels)


def with_logprobs(asked):
    """Logprobs are not stored: the engine runs, and what is known is only a draft."""
    return replace(asked, sampling={**asked.sampling, "logprobs": 1})


def without_dspark(asked):
    return replace(asked, sampling={**asked.sampling, "use_dspark": False})


def test_a_known_answer_is_the_draft_where_it_cannot_be_replayed(tenant):
    asked = [tenant.request(f"known, not replayed: {prompt}") for prompt in PROMPTS[:6]]
    plain = in_company(lambda it: tenant.ask(without_cache(without_dspark(it))), asked)
    for request, answer in zip(asked, plain):
        assert tenant.learn(request) == answer
    before = drafts(tenant.served, "chain")
    again = in_company(tenant.ask, map(with_logprobs, asked))
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in plain]
    proposed, accepted = (now - b for now, b in zip(drafts(tenant.served, "chain"), before))
    tokens = sum(len(answer.token_ids) for answer in plain)
    assert accepted == proposed > tokens / 2, "a known greedy answer is right to the last token"


def test_use_dspark_false_guesses_nothing(tenant):
    asked = tenant.request("not guessed")
    answer = tenant.learn(asked)
    before = drafts(tenant.served)
    assert tenant.ask(without_dspark(with_logprobs(asked))).token_ids == answer.token_ids
    assert drafts(tenant.served) == before


def test_every_token_has_one_path(tenant):
    names = ("vllm:generation_tokens_total", "dspark_tokens_total")
    before = [settled(tenant.served, name, DECODER) for name in names]
    asked = [tenant.request(prompt) for prompt in PROMPTS[:4]]
    for _ in range(2):
        in_company(tenant.ask, [*asked, *asked])
    made, by_path = (settled(tenant.served, name, DECODER) - b for name, b in zip(names, before))
    assert made == by_path > 0


@pytest.mark.parametrize("name", ["sampled", "min_p", "logit_bias", "both"])
def test_answers_are_those_of_plain_vllm(tenant, reference, name):
    """vLLM refuses min_p and logit_bias beside speculation; our runner applies them."""
    sampling, runs = reference.special[name]
    asked = [tenant.request(prompt, **sampling) for prompt in PROMPTS[: len(runs)]]
    for use_dspark in (True, False):
        found = in_company(
            lambda it, use=use_dspark: tenant.ask(without_cache(it if use else without_dspark(it))),
            asked,
        )
        assert [answer.token_ids for answer in found] == [run.token_ids for run in runs]

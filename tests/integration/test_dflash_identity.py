"""What makes two requests the same to DFlash, and what does not (casebook CB-..)."""

import json

import pytest

from scripts.models.tiny_tokenizer import EOS_ID
from tests.integration.tenant import in_company
from tests.integration.test_dflash import ENDING, SEEDED


def test_seeds(tenant):
    """CB-19, CB-21. The server's default_seed is 42, so no request is unseeded here."""
    seeds = [1, 2, 1, 0, 0, None, 42, "42"]
    asked = [tenant.request("Pick a colour", temperature=0.9, seed=seed) for seed in seeds]
    alone = in_company(tenant.alone, asked)
    assert len({answer.token_ids for answer in alone}) == 4
    with tenant.engine_runs(4):
        assert [tenant.learn(request) for request in asked] == alone


def test_choices(tenant):
    """CB-20. Choice i of seed s is the only choice of seed s + i: so vLLM derives them."""

    def choices(n, seed):
        return tenant.request("choices", n=n, seed=seed, temperature=1.0, max_tokens=16)

    asked = [choices(2, 7), choices(1, 7), choices(1, 8), choices(3, 7)]
    pair, seven, eight, three = alone = [tenant.choices(it, alone=True) for it in asked]
    assert pair["text_output"] == seven["text_output"] + eight["text_output"]
    assert len(set(three["text_output"])) == 3
    greedy, one = (tenant.request("greedy choices", n=n) for n in (3, 1))
    clones = tenant.choices(greedy, alone=True)
    assert len(set(clones["text_output"])) == 1 and clones["num_output_tokens"] == [24] * 3
    with tenant.engine_runs(3):
        assert tenant.choices(asked[0]) == pair
        tenant.wait_until_known(asked[0], len(pair["token_ids"]))
        assert [tenant.choices(it) for it in asked[:3]] == alone[:3]
        assert tenant.choices(asked[3]) == three
        tenant.wait_until_known(asked[3], len(three["token_ids"]))
        assert tenant.choices(asked[3]) == three
        # Greedy choices are one run, told n times.
        assert tenant.choices(greedy) == clones
        tenant.wait_until_known(greedy, 24)
        assert tenant.choices(greedy) == clones
        assert tenant.ask(one).text.encode() == clones["text_output"][0]


def test_logprobs_are_the_engine_s(tenant):
    """CB-25: a replay has no logits."""
    plain, wanted = tenant.request("2+2="), tenant.request("2+2=", logprobs=5)
    returns = {"return_logprobs": True, "return_cumulative_logprob": True}
    alone = tenant.choices(wanted, alone=True, **returns)
    assert len(json.loads(alone["logprobs"][0])) == 24
    with tenant.engine_runs(3):
        assert tenant.learn(plain).token_ids == tuple(alone["token_ids"])
        again = tenant.choices(wanted, **returns)
        assert alike(again.pop("logprobs"), alone["logprobs"])
        summed = pytest.approx(alone["cumulative_logprob"], abs=1e-3)
        assert again.pop("cumulative_logprob") == summed
        assert again == {name: alone[name] for name in again}
        found = tenant.choices(plain, return_cumulative_logprob=True)
        assert found["cumulative_logprob"] == summed
        assert tenant.ask(plain).token_ids == tuple(alone["token_ids"])


def alike(logprobs, others):
    """Equal, but for what is due to passes of several tokens: 1e-5 or so."""
    pairs = zip(json.loads(*logprobs), json.loads(*others), strict=True)
    for place, other in pairs:
        assert place.keys() == other.keys()
        for token, entry in place.items():
            near = pytest.approx(other[token].pop("logprob"), abs=1e-3)
            assert entry.pop("logprob") == near and entry == other[token]
    return True


def variants(base):
    """One change at a time to a request whose greedy answer is ``base``."""
    stop, always_eos = base.text[6:9], {"logit_bias": {str(EOS_ID): 100}}
    sampled = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 0}, {"temperature": 0.8}]
    return [
        {}, {"max_tokens": 3}, {"max_tokens": 40}, {"ignore_eos": True, "max_tokens": 40},
        {"min_tokens": 30, "max_tokens": 40}, {"skip_special_tokens": False, "max_tokens": 40},
        {"stop": [stop]}, {"stop": [stop], "include_stop_str_in_output": True},
        {"stop_token_ids": [base.token_ids[8]]}, {"bad_words": [base.text[3]]},
        {"logit_bias": {str(base.token_ids[4]): -100}}, always_eos, {**always_eos, "min_tokens": 4},
        {**always_eos, "skip_special_tokens": False, "ignore_eos": True}, {"detokenize": False},
        {"allowed_token_ids": sorted(set(base.token_ids[:6]))}, {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3},
        {"structured_outputs": {"regex": "[0-9]{8}"}},
        *({**SEEDED, **more} for more in sampled),
    ]  # fmt: skip


def test_every_variant_after_every_other(tenant):
    """CB-36. The first time they run side by side, then each is asked twice more."""
    base = tenant.alone(tenant.request(ENDING))
    asked = [tenant.request(ENDING, **variant) for variant in variants(base)]
    alone = in_company(tenant.alone, asked)
    different = {(answer.token_ids, answer.text, answer.finish_reason) for answer in alone}
    assert len(different) >= len(asked) - 3, "nearly each variant has an answer of its own"
    with tenant.engine_runs(None):
        assert in_company(tenant.learn, asked) == alone
    with tenant.engine_runs(0):
        for request, answer in zip(asked * 2, alone * 2):
            assert tenant.ask(request) == answer, request.sampling

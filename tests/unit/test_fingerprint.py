"""Identities, fingerprints and MACs: what they tell apart, and what they must not."""

import random
from dataclasses import fields, replace

import pytest
from deepseek_flash.contract import RequestPlan, Sampling
from deepseek_flash.dflash.fingerprint import (
    DECIDING,
    DECIDING_WHEN_SAMPLED,
    NOT_DECIDING,
    Fingerprint,
    FingerprintKey,
    identity,
    replayable,
    tenant_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fakes import make_plan

KEYS = {bits: FingerprintKey.derive(b"secret", bits) for bits in (32, 64)}
KEY = KEYS[64]
WHO = identity(make_plan(), KEY)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)

OTHER_VALUES = {
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "stop_token_ids": (7,), "bad_words": ("a",), "ignore_eos": True, "min_tokens": 2,
    "logit_bias": {5: -100.0}, "allowed_token_ids": (1, 2), "structured_outputs": {"regex": "a"},
    "thinking_token_budget": 0, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
    "seed": 0, "n": 2, "max_tokens": 3, "stop": ("5",), "include_stop_str_in_output": True,
    "logprobs": 0, "detokenize": False, "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}  # fmt: skip
OTHER_PLAN_VALUES = {
    "plan_id": "other", "slot": 1, "generation": 2, "arrival": 1.0, "deadline": 2.0,
    "prepended_text": "x", "stream": True, "turn_starts": (1,), "session_id": "s",
    "cancel_key": "c", "burst_steps": 1, "use_dflash": False, "use_dspark": False,
    "extend_to": 32,
}  # fmt: skip
IN_THE_PLANS_IDENTITY = {"namespace", "cache_salt", "sampling"}
ELSEWHERE = {"prompt_token_ids", "returns"}  # the context; what the client gets to see


def who(index=0, **sampling):
    return identity(make_plan(sampling=Sampling(**sampling)), KEY, index)


def fingerprint(prompt, generated=(), key=KEY, **options):
    made = Fingerprint(key, WHO, prompt, **options)
    made.extend(generated)
    return made


def observed(context):
    return context.value, context.mac([], False)


# -- Identity ----------------------------------------------------------------------------------


def test_every_field_is_in_one_list():
    listed = [*DECIDING, *DECIDING_WHEN_SAMPLED, *NOT_DECIDING]
    assert sorted(listed) == sorted(f.name for f in fields(Sampling))
    known = {*OTHER_PLAN_VALUES, *IN_THE_PLANS_IDENTITY, *ELSEWHERE}
    assert known == {f.name for f in fields(RequestPlan)}


@pytest.mark.parametrize("name", [f.name for f in fields(Sampling)])
def test_what_decides_tokens_changes_the_identity(name):
    base = Sampling(temperature=0.5, seed=1)
    assert getattr(base, name) != OTHER_VALUES[name]
    other = replace(base, **{name: OTHER_VALUES[name]})
    same = identity(make_plan(sampling=base), KEY) == identity(make_plan(sampling=other), KEY)
    assert same == (name in NOT_DECIDING)


@pytest.mark.parametrize("name", [n for n in DECIDING_WHEN_SAMPLED if n != "temperature"])
def test_greedy_does_not_know_what_steers_sampling(name):
    assert who(temperature=0.0, **{name: OTHER_VALUES[name]}) == who(temperature=0.0)


def test_what_the_plan_says_besides_does_not_count():
    for name, value in OTHER_PLAN_VALUES.items():
        assert identity(make_plan(**{name: value}), KEY) == WHO, name


def test_tenant_model_and_secret_separate():
    plans = [make_plan(cache_salt=c, namespace=n) for c, n in [("", "ab"), ("b", "a"), ("ab", "")]]
    assert len({identity(plan, KEY) for plan in plans}) == 3
    assert identity(plans[0], FingerprintKey.derive(b"other")) != identity(plans[0], KEY)
    tenants = {tenant_digest(salt, KEY) for salt in ("", "a", "b", "ab")}
    assert len(tenants) == 4 and all(-(2**63) <= t < 2**63 for t in tenants)


def test_a_choice_is_its_seed_plus_its_index():
    assert who(seed=42, n=2, index=1) == who(seed=43)
    assert who(seed=2**63 - 1, index=1) != who(seed=2**63 - 1)
    assert len({who(seed=seed) for seed in (None, 0, 1)}) == 3
    assert who(temperature=0.0, index=1) == who(temperature=0.0)


def test_order_counts_only_where_it_means_something():
    assert who(logit_bias={1: 1.0, 2: 2.0}) == who(logit_bias={2: 2.0, 1: 1.0})
    assert who(structured_outputs={"choice": ["a", "b"]}) != who(
        structured_outputs={"choice": ["b", "a"]}
    )


def test_values_of_other_types_are_other_values():
    values = [None, "None", 0, False, "", 0.0, [], ["a", "b"], ["ab"], [["a"], "b"], {}]
    made = {who(structured_outputs={"json": value}) for value in values}
    assert len(made) == len(values)
    with pytest.raises(TypeError):
        who(structured_outputs={"json": object()})


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0.0), True),
        (Sampling(seed=0), True),
        (Sampling(temperature=0.7), False),
    ],
)
def test_replayable_is_greedy_or_seeded(sampling, expected):
    assert replayable(make_plan(sampling=sampling)) == expected


def test_a_bad_key_is_refused():
    with pytest.raises(ValueError, match="bits"):
        FingerprintKey.derive(b"secret", 48)
    with pytest.raises(ValueError, match="secret"):
        FingerprintKey.derive(b"")
    with pytest.raises(ValueError, match="identity"):
        Fingerprint(KEY, b"short", [])


# -- Fingerprint and MAC -----------------------------------------------------------------------


@given(TOKENS, TOKENS, st.integers(0, 40))
def test_token_by_token_is_the_same_as_at_once(prompt, generated, cut):
    grown = fingerprint(prompt)
    for token in generated[:cut]:
        grown.append(token)
    branch = grown.copy()
    branch.append(1)  # leaves its origin alone
    grown.extend(generated[cut:])
    assert observed(grown) == observed(fingerprint(prompt, generated))


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_different_contexts_differ(prompt, generated, other_prompt, other_generated):
    one, other = fingerprint(prompt, generated), fingerprint(other_prompt, other_generated)
    assert (observed(one) == observed(other)) == (
        (prompt, generated) == (other_prompt, other_generated)
    )


@given(TOKENS.filter(lambda tokens: tokens != tokens[::-1]))
def test_order_and_the_prompts_border_count(tokens):
    kinds = [(tokens, ()), (tokens[::-1], ()), ((), tokens), ((), tokens[::-1])]
    made = [fingerprint(*kind) for kind in kinds] + [fingerprint(tokens, window=True)]
    assert len({one.value for one in made}) == len({one.mac([], False) for one in made}) == 5


@settings(max_examples=30)
@given(TOKENS, TOKENS)
def test_the_mac_covers_continuation_and_completeness(prompt, generated):
    context = fingerprint(prompt)
    shifted = context.copy()
    shifted.append(1)
    macs = [context.mac(generated, True), context.mac(generated, False),
            context.mac([*generated, 1], False), shifted.mac(generated, False)]  # fmt: skip
    assert len(set(macs)) == 4 and macs[0] == context.mac(generated, True)
    assert shifted.mac(generated, False) != context.mac([1, *generated], False)  # the border
    assert all(-(2**63) <= half < 2**63 for half in macs[0])


def test_sums_that_fool_a_hash_with_multiplier_31_do_not_fool_this():
    assert fingerprint([], [100, 100]).value != fingerprint([], [131, 99]).value
    thue_morse = [bin(i).count("1") % 2 for i in range(2048)]
    inverse = [1 - token for token in thue_morse]
    assert fingerprint([], thue_morse).value != fingerprint([], inverse).value


def test_a_bad_token_changes_nothing():
    context = fingerprint([1], [2])
    before = observed(context)
    with pytest.raises(OverflowError):
        context.extend([3, 2**31])
    assert observed(context) == before


@pytest.mark.parametrize("bits", [32, 64])
def test_collisions_stay_at_the_birthday_bound(bits):
    count, source = 100_000, random.Random(7)
    context = fingerprint([1, 2, 3], key=KEYS[bits])
    values = set()
    for _ in range(count):  # each context extends the one before, as a generation does
        context.append(source.randrange(150_000))
        values.add(context.value)
    low, high = (0, 2**32) if bits == 32 else (-(2**63), 2**63)
    assert all(low <= value < high for value in values)
    expected = count * (count - 1) / 2 / 2**bits  # 1.16 at 32 bits
    assert count - len(values) <= 5 * expected + 0.5
    assert max(values) > high * 0.99  # all bits are in use


def test_low_bits_collide_as_often_as_chance_has_it():
    source, values = random.Random(8), set()
    context = fingerprint([1, 2, 3], key=KEYS[32])
    for _ in range(100_000):
        context.append(source.randrange(150_000))
        values.add(context.value & 0xFFFFF)  # 20 of the bits: 4,765 pairs expected
    distinct = 2**20 * (1 - (1 - 2**-20) ** 100_000)
    assert abs(len(values) - distinct) < 0.01 * distinct

"""Sampling parameters: every form a client sends ends in a value in range or a named refusal."""

import math
from dataclasses import asdict, fields

import msgspec
import pytest
from deepseek_flash.contract import InvalidField, Sampling
from deepseek_flash.dspark.sampling import (
    SAMPLING_FIELDS,
    SamplingLimits,
    SamplingRequest,
    parse_sampling,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.fakes import shown

LIMITS = SamplingLimits(vocab_size=100, max_stop_bytes=64, max_list_items=8)
BIG = 10**400
DEEP = "[" * 100_000

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "thinking_token_budget")
FLOATS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p",
)  # fmt: skip
SWITCHES = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "use_dflash", "use_dspark",
)  # fmt: skip
LISTS = ("stop_token_ids", "bad_words", "allowed_token_ids")
OBJECTS = ("logit_bias", "structured_outputs")


def parse(fields_sent, limits=LIMITS):
    return parse_sampling(fields_sent, limits)


def value_of(name, sent):
    request = parse({name: sent})
    holder = request if hasattr(request, name) else request.sampling
    return getattr(holder, name)


def refusal(fields_sent, limits=LIMITS):
    with pytest.raises(InvalidField) as caught:
        parse(fields_sent, limits)
    return str(caught.value)


def test_the_lists_of_this_test_are_complete():
    assert {*INTEGERS, *FLOATS, *SWITCHES, *LISTS, *OBJECTS, "stop"} == SAMPLING_FIELDS
    assert {f.name for f in fields(Sampling)} | {"use_dflash", "use_dspark"} == SAMPLING_FIELDS


def test_defaults():
    assert parse({}) == SamplingRequest(
        sampling=Sampling(seed=42), max_tokens=16, use_dflash=True, use_dspark=True
    )


@pytest.mark.parametrize("name", sorted(SAMPLING_FIELDS - {"max_tokens"}))
def test_null_is_absent(name):
    assert parse({name: None}) == parse({})


def test_max_tokens_null_means_to_the_end_of_the_context():
    assert parse({"max_tokens": None}).max_tokens is None


@pytest.mark.parametrize(
    ("name", "sent", "expected"),
    [
        ("n", "3", 3), ("n", 3.0, 3), ("n", 16, 16),
        ("top_k", -1, 0), ("top_k", "-1", 0), ("top_k", 2**31 - 1, 2**31 - 1),
        ("min_tokens", "16", 16), ("max_tokens", "16", 16), ("max_tokens", 2**31 - 1, 2**31 - 1),
        ("logprobs", 0, 0), ("logprobs", "20", 20), ("thinking_token_budget", "0", 0),
        ("temperature", "0.5", 0.5), ("temperature", 2, 2.0), ("temperature", "1e-1", 0.1),
        ("top_p", "0.95", 0.95), ("top_p", 1, 1.0), ("min_p", "0", 0.0), ("min_p", 1, 1.0),
        ("presence_penalty", "-2", -2.0), ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", "1.1", 1.1), ("repetition_penalty", 100, 100.0),
        ("ignore_eos", "true", True), ("ignore_eos", "False", False),
        ("use_dflash", "false", False), ("use_dspark", False, False), ("detokenize", False, False),
        ("stop_token_ids", [5, "3", 5.0], (3, 5)), ("stop_token_ids", "[7, 2]", (2, 7)),
        ("stop_token_ids", [], ()), ("allowed_token_ids", "[1]", (1,)),
        ("bad_words", ["b", "a", "b"], ("a", "b")), ("bad_words", '["x"]', ("x",)),
        ("temperature", 0.005, 0.01), ("temperature", 1e-6, 0.0), ("temperature", "-0.0", 0.0),
    ],
    ids=shown,
)  # fmt: skip
def test_accepted(name, sent, expected):
    found = value_of(name, sent)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("n", 0), ("n", -1), ("n", 17), ("n", 5_000_000), ("n", 1.5), ("n", ""), ("n", "two"),
        ("top_k", -2), ("top_k", 2**31), ("seed", 1.5), ("seed", "1.5"), ("seed", -2),
        ("seed", 2**63), ("seed", 18446744073709551615), ("max_tokens", 0), ("max_tokens", -1),
        ("max_tokens", 3.7), ("max_tokens", 2**31), ("min_tokens", -1), ("min_tokens", 17),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", 10**9), ("thinking_token_budget", -1),
        ("temperature", -0.5), ("temperature", 2.01), ("temperature", 999999.0),
        ("temperature", "abc"), ("temperature", -1e-300), ("top_p", 0), ("top_p", -1),
        ("top_p", 1.0001), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01), ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("repetition_penalty", 1e9), ("stop_token_ids", [100]), ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("stop_token_ids", "5"), ("stop_token_ids", list(range(9))), ("stop_token_ids", [[1]]),
        ("allowed_token_ids", []), ("allowed_token_ids", [100]), ("bad_words", [" "]),
        ("bad_words", [1]), ("bad_words", "word"), ("bad_words", ["x" * 65]),
        ("bad_words", ["\ud800"]),
    ],
    ids=shown,
)  # fmt: skip
def test_refused(name, sent):
    assert refusal({name: sent}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", INTEGERS + FLOATS)
@pytest.mark.parametrize(
    "sent",
    [
        True, False, [], {}, [1], "", " ", "NaN", "inf", "-Infinity", "0x10", "1" * 5000, BIG,
        -BIG, 10**5000, math.nan, math.inf, -math.inf,
    ],
    ids=shown,
)  # fmt: skip
def test_no_number_at_all(name, sent):
    message = refusal({name: sent})
    assert message.startswith(f"{name}: ")
    assert len(message) < 200


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("sent", [0, 1, 1.0, "yes", "1", "", [], {}, math.nan])
def test_no_switch(name, sent):
    assert refusal({name: sent}).startswith(f"{name}: must be true or false")


@pytest.mark.parametrize("name", LISTS + OBJECTS)
@pytest.mark.parametrize(
    "sent", [True, 1, 1.5, math.nan, "", "null", "{", "1" * 5000, DEEP], ids=shown
)
def test_no_container(name, sent):
    assert refusal({name: sent}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["tempreture", "", "Temperature", "best_of", "use_beam_search"])
@pytest.mark.parametrize("sent", [0, None])
def test_unknown_name(name, sent):
    assert refusal({name: sent}) == f"{name}: unknown sampling parameter"


@pytest.mark.parametrize(
    "name", ["prompt_logprobs", "output_kind", "lora_name", "extra_args", "guided_decoding"]
)
def test_refused_name(name):
    message = refusal({name: 1})
    assert message.startswith(f"{name}: ") and "unknown" not in message
    assert parse_sampling({name: None}, LIMITS) == parse_sampling({}, LIMITS)  # null is absent


# -- temperature and seed --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, "0", "-0.0", 9e-6])
def test_greedy_requests_are_equal_whatever_cannot_matter(temperature):
    sent = {"temperature": temperature, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5}
    found = parse(sent).sampling
    assert found == Sampling(temperature=0.0)
    assert math.copysign(1.0, found.temperature) == 1.0


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "min_p"])
def test_minus_zero_is_zero(name):
    assert math.copysign(1.0, value_of(name, "-0.0")) == 1.0


@pytest.mark.parametrize(
    ("sent", "seed"),
    [(0, 0), ("42", 42), (7.0, 7), (2**63 - 1, 2**63 - 1), (None, 9), (-1, 9), ("-1", 9)],
)
def test_seed(sent, seed):
    limits = SamplingLimits(vocab_size=1, default_seed=9)
    assert parse({"seed": sent}, limits).sampling.seed == seed


def test_without_a_default_seed_requests_stay_unseeded():
    assert parse({}, SamplingLimits(vocab_size=1, default_seed=None)).sampling.seed is None


def test_min_tokens_against_max_tokens():
    assert parse({"min_tokens": 20, "max_tokens": 20}).sampling.min_tokens == 20
    assert parse({"min_tokens": 10**6, "max_tokens": None}).sampling.min_tokens == 10**6
    assert refusal({"max_tokens": 3, "min_tokens": 4}).startswith("min_tokens: ")


# -- anything --------------------------------------------------------------------------------

HOSTILE = st.sampled_from(
    ["1" * 5000, DEEP, '{"a":' * 5000, BIG, "[1, 2]", '{"5": 1}', "\ud800", "true", "nan", "0", "7"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | HOSTILE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
STRUCTURED = st.dictionaries(
    st.sampled_from(["json", "regex", "choice", "json_object", "whitespace_pattern"]), VALUES,
    max_size=2,
)  # fmt: skip
NAMES = st.sampled_from(sorted(SAMPLING_FIELDS)) | st.text(max_size=9)
REQUESTS = st.dictionaries(NAMES, VALUES, max_size=5) | st.fixed_dictionaries(
    {"structured_outputs": STRUCTURED}
)


@given(REQUESTS)
@example({"stop_token_ids": DEEP})
@example({"structured_outputs": {"json": {"maximum": 10**30}}})
def test_anything_is_in_range_or_refused_by_name(sent):
    try:
        request = parse(sent)
    except InvalidField as refused:
        assert str(refused).startswith(tuple(sent) or ("",))
        return
    found = request.sampling
    assert request.max_tokens is None or 1 <= request.max_tokens < 2**31
    assert 1 <= found.n <= LIMITS.max_n and 0 <= found.top_k < 2**31
    assert found.temperature == 0.0 or 0.01 <= found.temperature <= 2.0
    assert 0.0 < found.top_p <= 1.0 and 0.0 <= found.min_p <= 1.0
    assert abs(found.presence_penalty) <= 2.0 and abs(found.frequency_penalty) <= 2.0
    assert 0.0 < found.repetition_penalty <= 100.0
    assert found.seed is None or 0 <= found.seed < 2**63
    assert found.logprobs is None or 0 <= found.logprobs <= LIMITS.max_logprobs
    assert all(0 <= token < 100 for token in found.stop_token_ids + (found.allowed_token_ids or ()))
    assert all(0 <= t < 100 and abs(b) <= 100 for t, b in (found.logit_bias or {}).items())
    assert all(found.stop) and list(found.stop) == sorted(set(found.stop))
    # And it can leave the stage: nothing in it is too large, too deep or no Unicode.
    sent_on = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Sampling)
    assert asdict(sent_on) == asdict(found)

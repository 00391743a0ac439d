"""The sampling parameters that are lists and objects: stop strings, biases, structured outputs."""

import json
import math

import pytest
from deepseek_flash.contract import InvalidField
from deepseek_flash.dspark.sampling import SamplingLimits, parse_sampling
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fakes import shown

LIMITS = SamplingLimits(vocab_size=100, max_stop_bytes=64, max_list_items=8)
BIG = 10**400
DEEP = "[" * 100_000


def value_of(name, sent, limits=LIMITS):
    return getattr(parse_sampling({name: sent}, limits).sampling, name)


def refusal(fields_sent):
    with pytest.raises(InvalidField) as caught:
        parse_sampling(fields_sent, LIMITS)
    return str(caught.value)


# -- stop ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("\n", ("\n",)), ([], ()), (["b", "a", "b"], ("a", "b")), ("[1]", ("[1]",)),
        ("x" * 64, ("x" * 64,)), (["é" * 32], ("é" * 32,)),
    ],
    ids=shown,
)  # fmt: skip
def test_stop(sent, expected):
    assert value_of("stop", sent) == expected


def test_stop_takes_more_strings_than_openai():
    strings = [f"s{i}" for i in range(24)]
    assert value_of("stop", strings, SamplingLimits(1)) == tuple(sorted(strings))


@given(st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=5).flatmap(
    lambda strings: st.tuples(st.just(strings), st.permutations(strings))
))  # fmt: skip
def test_order_of_stop_strings_does_not_matter(two_orders):
    first, second = two_orders
    assert value_of("stop", first) == value_of("stop", second)


@pytest.mark.parametrize(
    "sent", ["", [""], [1], [None], ["a", ""], {}, 5, "a" * 65, ["é" * 33], ["\udfff"]], ids=shown
)
def test_stop_refused(sent):
    assert refusal({"stop": sent}).startswith("stop: ")


def test_stop_needs_text():
    assert refusal({"detokenize": False, "stop": "x"}).startswith("stop: ")
    assert parse_sampling({"detokenize": False, "stop": []}, LIMITS).sampling.stop == ()


# -- objects ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"5": 1, "3": "-0.5"}, {3: -0.5, 5: 1.0}), ('{"5": 1}', {5: 1.0}), ({}, None),
        ({7: 1000, 8: -1000}, {7: 100.0, 8: -100.0}), ({"99": 0}, {99: 0.0}),
    ],
    ids=shown,
)  # fmt: skip
def test_logit_bias(sent, expected):
    found = value_of("logit_bias", sent)
    assert found == expected
    assert found is None or list(found) == sorted(found)


@pytest.mark.parametrize(
    ("sent", "telling"),
    [
        ({"191222": -100}, "191222"), ({"-1": 5}, "-1"), ({"abc": 1}, "abc"), ({"100": 1}, "100"),
        ({"5": "x"}, "[5]"), ({"5": None}, "[5]"), ({"5": math.nan}, "[5]"), ({"5": BIG}, "[5]"),
        ('{"5": NaN}', "[5]"), ({"1" * 5000: 1}, ""), ([[5, 1]], "5"),
        ({str(i): 0 for i in range(9)}, "8"),
    ],
    ids=shown,
)  # fmt: skip
def test_logit_bias_refused(sent, telling):
    message = refusal({"logit_bias": sent})
    assert message.startswith("logit_bias") and telling in message


@pytest.mark.parametrize(
    "sent",
    [
        {"json": {"type": "object"}}, {"json": '{"type": "object"}'}, {"json_object": True},
        {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": "root ::= x"},
        {"structural_tag": "{}"}, {"regex": "a", "whitespace_pattern": " "},
        {"json": {}, "disable_any_whitespace": True}, {"regex": "a", "choice": None},
        {"json": {"maximum": 10**30}},
    ],
    ids=shown,
)  # fmt: skip
def test_structured_outputs(sent):
    for form in (sent, json.dumps(sent)):
        found = value_of("structured_outputs", form)
        for key, item in found.items():
            # A schema may travel as text: then it is the same schema.
            same = json.loads(item) if key == "json" and isinstance(sent[key], dict) else item
            assert same == sent[key]
        assert set(found) == {key for key, item in sent.items() if item is not None}


@pytest.mark.parametrize(
    "sent",
    [
        {}, {"regex": None}, {"regex": "a", "json": {}}, {"regex": 1}, {"json": []}, {"choice": []},
        {"choice": [""]}, {"choice": "a"}, {"choice": [1]}, {"json_object": False},
        {"json_object": "true"}, {"regex": "a", "backend": "xgrammar"}, {"whitespace_pattern": " "},
        {"regex": "a", "disable_any_whitespace": 1}, [], {"regex": "\ud800"},
        {"json": {"const": "\ud800"}}, {"json": {"const": math.nan}}, {"choice": ["\ud800"]},
    ],
    ids=shown,
)  # fmt: skip
def test_structured_outputs_refused(sent):
    assert refusal({"structured_outputs": sent}).startswith("structured_outputs")

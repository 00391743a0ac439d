"""The planner: what a client sends becomes a plan, or is refused by the name of the input."""

import json

import pytest
from deepseek_flash.contract import (
    ClientRequest,
    InvalidField,
    RequestPlan,
    Returns,
)
from deepseek_flash.dspark.fields import SamplingLimits
from deepseek_flash.dspark.planner import sampling_fields

from tests.unit.fakes import BOS, CONTEXT, FACTS, SPECIAL, VOCABULARY, characters, shown
from tests.unit.planner_bench import NOW, PlannerBench


@pytest.fixture
def bench(tmp_path):
    return PlannerBench(tmp_path)


def tensor(**fields):
    return json.dumps(fields).encode()


# -- the prompt ------------------------------------------------------------------------------


def test_a_plan_from_text(bench):
    plan = bench.plan(text_input=b"hi", session_id=b"s", cache_salt="é".encode())
    assert isinstance(plan, RequestPlan)
    assert plan.prompt_token_ids == (BOS, *characters("hi"))
    assert (plan.namespace, plan.arrival, plan.deadline) == (FACTS.namespace, NOW, None)
    assert (plan.session_id, plan.cache_salt, plan.cancel_key) == ("s", "é", "")
    assert (plan.burst_steps, plan.use_dflash, plan.use_dspark) == (3, True, True)
    assert plan.sampling.max_tokens == 16 and plan.sampling.seed == 42
    assert bench.board.start(plan.slot, plan.generation)


def test_ids_of_plans_are_ours_and_all_different(bench):
    plans = [bench.plan(text_input=b"a", parameters={"id": "1"}) for _ in range(5)]
    assert len({plan.plan_id for plan in plans}) == 5
    assert all(len(plan.plan_id) == 32 for plan in plans)


def test_a_plan_from_ids_and_one_from_messages(bench):
    assert bench.plan(input_ids=[7, 8]).prompt_token_ids == (7, 8)
    messages = b'[{"role": "user", "content": "a"}]'
    assert bench.plan(messages=messages).prompt_token_ids == (BOS, 1, *characters("a"), 2)


def test_no_prompt(bench):
    assert bench.refusal().startswith("text_input: missing")


SOURCES = {"text_input": b"a", "input_ids": [1], "messages": b'[{"role":"user","content":"a"}]'}


@pytest.mark.parametrize("left_out", [None, *SOURCES])
def test_more_than_one_prompt(bench, left_out):
    message = bench.refusal(**{k: v for k, v in SOURCES.items() if k != left_out})
    assert message.startswith(("input_ids: only one", "messages: only one"))


@pytest.mark.parametrize(
    ("inputs", "begins"),
    [
        ({"text_input": b""}, "text_input: the prompt is empty"),
        ({"input_ids": []}, "input_ids: the prompt is empty"),
        ({"messages": b""}, "messages: not valid JSON"),
        ({"messages": b"[]"}, "messages: "),
        ({"text_input": b"\xff"}, "text_input: must be valid UTF-8"),
        ({"messages": b'"\xff"'}, "messages: must be valid UTF-8"),
        ({"text_input": b"a", "session_id": b"\xff"}, "session_id: must be valid UTF-8"),
        ({"text_input": b"a", "cache_salt": b"\xff"}, "cache_salt: must be valid UTF-8"),
        ({"text_input": b"a", "session_id": b"s" * 513}, "session_id: must be at most 512"),
        ({"text_input": b"a", "cache_salt": b"s" * 513}, "cache_salt: must be at most 512"),
        ({"input_ids": [-1]}, "input_ids: token id -1 "),
        ({"input_ids": [0, 0, VOCABULARY]}, f"input_ids: token id {VOCABULARY} "),
        ({"input_ids": [5279552648203111001]}, "input_ids: token id 5279552648203111001 "),
    ],
    ids=shown,
)
def test_a_prompt_or_name_refused(bench, inputs, begins):
    assert bench.refusal(**inputs).startswith(begins)


# -- the context -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [
        (4, 256_000, CONTEXT - 4), (4, CONTEXT - 4, CONTEXT - 4), (4, 5, 5),
        (4, None, CONTEXT - 4), (CONTEXT - 1, 16, 1), (CONTEXT - 1, 1, 1),
    ],
)  # fmt: skip
def test_max_tokens_is_clamped_to_the_context(bench, prompt, asked, granted):
    plan = bench.plan(input_ids=[7] * prompt, sampling_parameters=tensor(max_tokens=asked))
    assert plan.sampling.max_tokens == granted


def test_min_tokens_is_clamped_along(bench):
    sent = tensor(max_tokens=500, min_tokens=400)
    sampling = bench.plan(input_ids=[7] * 60, sampling_parameters=sent).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (4, 4)


# -- one-token probes (CB-22) ----------------------------------------------------------------

SEEDLESS = SamplingLimits(vocab_size=0, default_seed=None)


@pytest.mark.parametrize(
    ("asked", "options", "extend_to"),
    [
        ({"max_tokens": 1}, {}, 32), ({"max_tokens": "1", "temperature": 0}, {}, 32),
        ({"max_tokens": 1, "n": 2, "logprobs": 1, "stop": ["a"]}, {}, 32),
        ({"max_tokens": 1}, {"probe_tokens": 2}, 2),
        ({"max_tokens": 1}, {"probe_tokens": 1}, 0), ({"max_tokens": 1}, {"probe_tokens": 0}, 0),
        ({"max_tokens": 1, "use_dflash": False}, {}, 0), ({"max_tokens": 2}, {}, 0), ({}, {}, 0),
        ({"max_tokens": None}, {}, 0),
        # What has no seed can never be replayed.
        ({"max_tokens": 1}, {"limits": SEEDLESS}, 0),
        ({"max_tokens": 1, "seed": 7}, {"limits": SEEDLESS}, 32),
        ({"max_tokens": 1, "temperature": 0}, {"limits": SEEDLESS}, 32),
    ],
    ids=shown,
)  # fmt: skip
def test_a_probe_may_be_extended(tmp_path, asked, options, extend_to):
    plan = PlannerBench(tmp_path, **options).plan(
        text_input=b"a", sampling_parameters=tensor(**asked)
    )
    assert plan.extend_to == extend_to


@pytest.mark.parametrize(("left", "extend_to"), [(40, 32), (32, 32), (31, 31), (2, 2), (1, 0)])
def test_a_probe_is_extended_within_the_context(bench, left, extend_to):
    prompt = [7] * (CONTEXT - left)
    for asked, expected in ((1, extend_to), (2, 0)):  # one that is clamped to 1 asked for more
        plan = bench.plan(input_ids=prompt, sampling_parameters=tensor(max_tokens=asked))
        assert plan.extend_to == expected


# -- the context's end -----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [CONTEXT, CONTEXT + 10])
def test_a_prompt_that_fills_the_context_is_told_with_both_numbers(bench, prompt):
    message = bench.refusal(input_ids=[7] * prompt)
    assert f"maximum context length is {CONTEXT} tokens" in message and str(prompt) in message


@pytest.mark.parametrize(
    ("starts", "problem"),
    [([3], "[0, 2]"), ([-1], "[0, 2]"), ([1, 1], "ascend"), ([2, 0], "ascend")],
)
def test_turn_starts_refused(bench, starts, problem):
    message = bench.refusal(input_ids=[7, 8, 9], turn_starts=starts)
    assert message.startswith("turn_starts: ") and problem in message


@pytest.mark.parametrize("starts", [[], [0], [0, 2]])
def test_turn_starts(bench, starts):
    assert bench.plan(input_ids=[7, 8, 9], turn_starts=starts).turn_starts == tuple(starts)


@pytest.mark.parametrize("source", ["text_input", "messages"])
@pytest.mark.parametrize("starts", [[], [0]])
def test_turn_starts_go_with_ids_only(bench, source, starts):
    message = bench.refusal(**{source: SOURCES[source]}, turn_starts=starts)
    assert message == "turn_starts: goes with input_ids only"


def test_turn_starts_of_messages_are_found(bench):
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = json.dumps([{"role": role, "content": content} for role, content in turns])
    plan = bench.plan(messages=messages.encode())
    assert plan.turn_starts == (3, 7)
    assert {plan.prompt_token_ids[start] for start in plan.turn_starts} == {SPECIAL["<|user|>"]}


@pytest.mark.parametrize("source", ["text_input", "input_ids"])
def test_without_messages_there_are_no_turn_starts_but_the_clients(bench, source):
    assert bench.plan(**{source: SOURCES[source]}).turn_starts == ()


# -- sampling parameters ---------------------------------------------------------------------


def test_the_tensor_wins_over_parameters(bench):
    sent = {"temperature": 1.5, "max_tokens": 2}
    plan = bench.plan(text_input=b"a", parameters=sent, sampling_parameters=tensor(temperature="0"))
    assert (plan.sampling.temperature, plan.sampling.max_tokens) == (0.0, 16)
    assert bench.plan(text_input=b"a", parameters=sent).sampling.max_tokens == 2


@pytest.mark.parametrize(
    "name",
    [
        "id", "priority", "timeout", "binary_data_output", "classification", "headers",
        "sequence_id", "sequence_start", "triton_enable_empty_final_response",
        "shared_memory_region",
    ],
)  # fmt: skip
def test_tritons_own_parameters_are_no_sampling_parameters(bench, name):
    plan = bench.plan(text_input=b"a", parameters={name: 1, "top_k": 3})
    assert plan.sampling.top_k == 3
    assert bench.refusal(text_input=b"a", sampling_parameters=tensor(**{name: 1})) == (
        f"{name}: unknown sampling parameter"
    )


@pytest.mark.parametrize(
    ("raw", "begins"),
    [
        (b"", "sampling_parameters: not valid JSON"), (b"{", "sampling_parameters: not valid JSON"),
        (b"[]", "sampling_parameters: must be a JSON object"),
        (b"null", "sampling_parameters: must be a JSON object"),
        (b"[" * 100_000, "sampling_parameters: not valid JSON"),
        (b"\xff", "sampling_parameters: must be valid UTF-8"),
        ("{}".encode("utf-16"), "sampling_parameters: "),
        (b"\xef\xbb\xbf{}", "sampling_parameters: not valid JSON"),
        (b'{"temperature": NaN}', "sampling_parameters: not valid JSON"),
        (b'{"temperature": -Infinity}', "sampling_parameters: not valid JSON"),
        (b'{"temperature": 1e999}', "temperature: must be finite"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "sampling_parameters: not valid JSON"),
        (b'{"temperature": 0, "temperature": 1}', "temperature: given twice"),
        (b'{"logit_bias": {"5": 1, "5": 2}}', "5: given twice"),
        (b'{"tempreture": 0}', "tempreture: unknown"),
    ],
    ids=shown,
)  # fmt: skip
def test_sampling_parameters_refused(bench, raw, begins):
    assert bench.refusal(text_input=b"a", sampling_parameters=raw).startswith(begins)


def test_a_late_twin_among_very_many_names_is_found_at_once():
    names = [f'"k{i}": 1' for i in range(50_000)]
    raw = "{" + ", ".join([*names, names[-1]]) + "}"
    with pytest.raises(InvalidField, match=r"^k49999: given twice"):
        sampling_fields(ClientRequest(sampling_parameters=raw.encode()))


def test_the_sum_of_logprobs_needs_logprobs(bench):
    returns = Returns(cumulative_logprob=True)
    assert bench.plan(text_input=b"a", returns=returns).sampling.logprobs == 0
    sent = tensor(logprobs=3)
    plan = bench.plan(text_input=b"a", returns=returns, sampling_parameters=sent)
    assert plan.sampling.logprobs == 3
    assert bench.plan(text_input=b"a").sampling.logprobs is None

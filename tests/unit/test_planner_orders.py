"""The planner's other half: deadlines, cancelling, admission, and requests of any kind at all."""

import hashlib
import json

import pytest
from deepseek_flash.admission import Claim
from deepseek_flash.contract import (
    CancelPlan,
    ClientRequest,
    Refused,
    RequestError,
    RequestPlan,
    Returns,
)
from deepseek_flash.triton_io import seal, unseal
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fakes import CONTEXT, VOCABULARY, shown
from tests.unit.planner_bench import NOW, PlannerBench

TOKEN = b"0123456789abcdef"
SECRET = b"k" * 32


@pytest.fixture
def bench(tmp_path):
    return PlannerBench(tmp_path)


# -- deadlines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default_ms", "asked_ms", "transport_us", "seconds"),
    [
        (0, None, 0, None), (0, 250, 0, 0.25), (0, None, 3_000_000, 3.0), (5000, None, 0, 5.0),
        (5000, 9000, 0, 9.0), (5000, 1, 0, 0.001), (0, 2000, 1_000_000, 1.0),
        (0, 1000, 2_000_000, 1.0), (5000, None, 1_000_000, 1.0), (1000, None, 2_000_000, 1.0),
    ],
)  # fmt: skip
def test_the_nearest_deadline_counts(tmp_path, default_ms, asked_ms, transport_us, seconds):
    bench = PlannerBench(tmp_path, default_timeout_ms=default_ms)
    plan = bench.plan(
        text_input=b"a", request_timeout_ms=asked_ms, transport_timeout_us=transport_us
    )
    assert plan.deadline == (None if seconds is None else NOW + seconds)


@pytest.mark.parametrize("asked", [0, -1, -(2**31)])
def test_a_deadline_in_the_past_is_refused(bench, asked):
    message = bench.refusal(text_input=b"a", request_timeout_ms=asked)
    assert message.startswith("request_timeout_ms: ")


# -- cancelling ------------------------------------------------------------------------------


def test_a_token_alone_is_a_wish_to_cancel(bench):
    order = bench.plan(cancel_token=TOKEN)
    assert isinstance(order, CancelPlan)
    assert order.cancel_key == bench.plan(text_input=b"a", cancel_token=TOKEN).cancel_key
    assert bench.board.in_flight == 1  # the request's; an order takes no place


def test_cancelling_needs_neither_engine_nor_place(tmp_path):
    bench = PlannerBench(tmp_path, queue_limit=1)
    bench.plan(text_input=b"a")
    bench.board.drain()
    bench.facts = None
    assert isinstance(bench.plan(cancel_token=TOKEN), CancelPlan)


def test_the_token_itself_goes_no_further(bench):
    key = bench.plan(text_input=b"a", cancel_token=TOKEN).cancel_key
    assert key == hashlib.blake2b(TOKEN, digest_size=16).hexdigest()


@pytest.mark.parametrize(
    "token", [b"", TOKEN[:-1], "é".encode() * 8, b"t" * 513, b"\xff" * 20], ids=shown
)
@pytest.mark.parametrize("prompt", [{}, {"text_input": b"a"}], ids=["order", "request"])
def test_cancel_token_refused(bench, token, prompt):
    assert bench.refusal(cancel_token=token, **prompt).startswith("cancel_token: ")


def test_the_longest_cancel_token(bench):
    assert bench.plan(cancel_token=b"t" * 512)


# -- streaming and the prompt in the answer ------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "exclude", "prepended"),
    [
        (False, None, "hi"), (False, False, "hi"), (False, True, ""), (True, None, ""),
        (True, True, ""),
    ],
)  # fmt: skip
def test_prepended_text(bench, stream, exclude, prepended):
    plan = bench.plan(text_input=b"hi", stream=stream, exclude_input_in_output=exclude)
    assert plan.prepended_text == prepended and plan.stream is stream


def test_ids_have_no_text_to_prepend(bench):
    assert bench.plan(input_ids=[7]).prepended_text == ""


def test_a_stream_cannot_begin_with_the_prompt(bench):
    message = bench.refusal(text_input=b"hi", stream=True, exclude_input_in_output=False)
    assert message.startswith("exclude_input_in_output: ")


# -- admission -------------------------------------------------------------------------------


def test_queue_limit(tmp_path):
    bench = PlannerBench(tmp_path, queue_limit=2)
    plans = [bench.plan(text_input=b"a") for _ in range(2)]
    assert bench.refusal(Refused, text_input=b"a").startswith("queue_limit of 2 ")
    bench.board.start(plans[0].slot, plans[0].generation)
    bench.board.release(plans[0].slot, plans[0].generation)
    assert bench.plan(text_input=b"a").slot == plans[0].slot


def test_tenant_queue_limit(tmp_path):
    bench = PlannerBench(tmp_path, tenant_queue_limit=1)
    bench.plan(text_input=b"a", cache_salt=b"one")
    message = bench.refusal(Refused, text_input=b"a", cache_salt=b"one")
    assert message.startswith("tenant_queue_limit of 1 ")
    bench.plan(text_input=b"a", cache_salt=b"two")


def test_an_invalid_request_is_told_so_even_when_the_queue_is_full(tmp_path):
    bench = PlannerBench(tmp_path, queue_limit=1)
    bench.plan(text_input=b"a")
    assert bench.refusal(text_input=b"").startswith("text_input: ")


def test_draining(bench):
    bench.board.drain()
    assert "shutting down" in bench.refusal(Refused, text_input=b"a")


def test_no_engine_yet(bench):
    def missing():
        raise FileNotFoundError

    bench.facts = missing
    assert "starting" in bench.refusal(Refused, text_input=b"a")


# -- anything --------------------------------------------------------------------------------

FIELDS = st.dictionaries(
    st.sampled_from(["temperature", "max_tokens", "stop", "n", "structured_outputs", "id", "x"]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.dictionaries(st.sampled_from(["json", "regex"]), st.text(max_size=3)),
    max_size=3,
)  # fmt: skip
BYTES = st.binary(max_size=80) | st.text(max_size=80).map(
    lambda text: text.encode("utf-8", "replace")
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "wizard"]), "content": st.text(max_size=9)}
    ),
    max_size=3,
).map(lambda messages: json.dumps(messages).encode())
IDS = st.lists(st.integers(-1, VOCABULARY) | st.integers(), max_size=CONTEXT + 2)
REQUESTS = st.builds(
    ClientRequest,
    text_input=st.none() | BYTES,
    input_ids=st.none() | IDS,
    messages=st.none() | MESSAGES | BYTES,
    turn_starts=st.none() | st.lists(st.integers(-1, 9), max_size=3),
    stream=st.booleans(),
    sampling_parameters=st.none() | FIELDS.map(lambda fields: json.dumps(fields).encode()) | BYTES,
    parameters=FIELDS,
    exclude_input_in_output=st.none() | st.booleans(),
    returns=st.builds(Returns, cumulative_logprob=st.booleans()),
    session_id=st.none() | BYTES,
    cache_salt=st.none() | BYTES,
    cancel_token=st.none() | BYTES,
    request_timeout_ms=st.none() | st.integers(-(2**31), 2**31 - 1),
    transport_timeout_us=st.integers(0, 2**64 - 1),
)


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory):
    return PlannerBench(tmp_path_factory.mktemp("board"))


@given(request=REQUESTS)
def test_any_request_is_planned_or_refused(shared_bench, request):
    board = shared_bench.board
    try:
        plan = shared_bench.planner.plan(request)
    except RequestError as error:
        assert str(error) and board.in_flight == 0
        return
    assert unseal("plan", seal(plan, SECRET), (type(plan),), SECRET) == plan
    if isinstance(plan, RequestPlan):
        assert board.in_flight == 1
        assert 1 <= plan.sampling.max_tokens <= CONTEXT - len(plan.prompt_token_ids)
        assert plan.sampling.min_tokens <= plan.sampling.max_tokens
        board.abandon(Claim(plan.slot, plan.generation))
    assert board.in_flight == 0

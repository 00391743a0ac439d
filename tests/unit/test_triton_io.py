"""What stages send each other cannot be forged, and what clients get has the promised form."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from deepseek_flash import triton_io
from deepseek_flash.contract import (
    Cancelled,
    CancelPlan,
    ClientRequest,
    Control,
    Delta,
    Expired,
    InvalidField,
    Lookup,
    LookupResult,
    Refused,
    RequestPlan,
    Returns,
    Sampling,
)
from deepseek_flash.triton_io import check_numpy, delta_response, error_response, seal, unseal

from tests.unit import pbtxt
from tests.unit.fakes import make_plan

SECRET, OTHER = b"k" * 32, b"o" * 32
KINDS = (RequestPlan, CancelPlan, Lookup, Control)
EVERYTHING = Returns(**dict.fromkeys(Returns.__dataclass_fields__, True))

RICH = make_plan(
    deadline=12.5,
    prepended_text="é\u0000😀",
    sampling=Sampling(
        temperature=0.0, seed=2**63 - 1, stop=("a", "b"), logit_bias={5: -1.5, 7: 100.0},
        allowed_token_ids=(1, 2), structured_outputs={"json": "{}"}, logprobs=0,
    ),
    returns=Returns(logprobs=True),
    turn_starts=(0, 2),
    stream=True,
    extend_to=32,
)  # fmt: skip
VALUES = [
    make_plan(), RICH, CancelPlan("id", "key"), Lookup("id", "model", LookupResult.MISS),
    Control("abort_all"),
]  # fmt: skip
parametrize_values = pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)


@parametrize_values
def test_round_trip(value):
    found = unseal("plan", seal(value, SECRET), KINDS, SECRET)
    assert found == value and type(found) is type(value)


@parametrize_values
def test_another_servers_seal_is_refused(value):
    with pytest.raises(InvalidField, match=r"^plan: not made by this server"):
        unseal("plan", seal(value, SECRET), KINDS, OTHER)


@parametrize_values
def test_any_changed_byte_is_noticed(value):
    sealed = seal(value, SECRET)
    for place in range(len(sealed)):
        for flip in (0x01, 0x80):
            forged = bytearray(sealed)
            forged[place] ^= flip
            with pytest.raises(InvalidField):
                unseal("plan", bytes(forged), KINDS, SECRET)


@parametrize_values
def test_a_part_or_more_than_the_whole_is_refused(value):
    sealed = seal(value, SECRET)
    for data in (*(sealed[:length] for length in range(len(sealed))), sealed + b"\0"):
        with pytest.raises(InvalidField):
            unseal("plan", data, KINDS, SECRET)


@parametrize_values
def test_one_kind_never_passes_as_another(value):
    others = tuple(kind for kind in KINDS if kind is not type(value))
    with pytest.raises(InvalidField):
        unseal("lookup", seal(value, SECRET), others, SECRET)
    with pytest.raises(InvalidField):
        unseal("lookup", seal(value, SECRET), (), SECRET)


# -- with Triton's tensors -------------------------------------------------------------------


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "X"

    def __init__(self, message, code):
        self.message, self.code = message.encode(), code  # as C++ takes it: UTF-8 only


class Tensor:
    def __init__(self, name, values):
        self.name, self.values = name, values

    def as_numpy(self):
        return self.values


@pytest.fixture
def triton(monkeypatch):
    stand_in = SimpleNamespace(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
            tensors={tensor.name: tensor.values for tensor in output_tensors}, error=error
        ),
        get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
    )
    monkeypatch.setattr(triton_io, "pb_utils", stand_in)


def client(parameters="", timeout=0, **inputs):
    """A request as Triton's Python backend hands it over."""
    return SimpleNamespace(
        tensors={name: Tensor(name, np.array(values)) for name, values in inputs.items()},
        parameters=lambda: parameters,
        timeout=lambda: timeout,
    )


def test_a_request_of_nothing(triton):
    assert triton_io.read_client_request(client()) == ClientRequest()


def test_every_input_of_the_scheduler_is_read(triton):
    sent = {
        name: [True] if kind == "TYPE_BOOL" else [7] if kind == "TYPE_INT32" else [name.encode()]
        for name, (kind, _, _) in pbtxt.tensors("dspark_scheduler", "input").items()
    }
    assert triton_io.read_client_request(client('{"a": 1}', 5, **sent)) == ClientRequest(
        text_input=b"text_input", input_ids=[7], messages=b"messages", turn_starts=[7],
        stream=True, sampling_parameters=b"sampling_parameters", parameters={"a": 1},
        exclude_input_in_output=True, returns=EVERYTHING,
        session_id=b"session_id", cache_salt=b"cache_salt", cancel_token=b"cancel_token",
        request_timeout_ms=7, transport_timeout_us=5,
    )  # fmt: skip


def test_an_empty_tensor_is_told_by_name(triton):
    with pytest.raises(InvalidField, match=r"^session_id: "):
        triton_io.read_client_request(client(session_id=[]))


def test_unreadable_parameters(triton):
    with pytest.raises(InvalidField, match=r"^parameters: not valid JSON"):
        triton_io.read_client_request(client("{"))


def test_a_sealed_input(triton):
    request = client(plan=np.array([seal(RICH, SECRET)], dtype=np.object_))
    assert triton_io.read_sealed(request, "plan", KINDS, SECRET) == RICH
    assert triton_io.has_input(request, "plan") and not triton_io.has_input(request, "lookup")
    with pytest.raises(InvalidField, match=r"^lookup: missing"):
        triton_io.read_sealed(request, "lookup", KINDS, SECRET)


DELTA = Delta(
    texts=("é", ""), finish_reasons=(None, "stop"), token_ids=((5, 6), (7,)),
    cumulative_logprobs=(-1.5, None), logprobs=([{5: {"logprob": -0.5}}], None),
    num_input_tokens=3, num_cached_tokens=2,
)  # fmt: skip
TYPES = {"TYPE_STRING": "O", "TYPE_FP32": "f", "TYPE_UINT32": "I", "TYPE_INT32": "i"}


def test_text_only(triton):
    tensors = delta_response(DELTA, Returns()).tensors
    assert {name: list(values) for name, values in tensors.items()} == {
        "text_output": ["é".encode(), b""]
    }


def test_every_output(triton):
    tensors = delta_response(DELTA, EVERYTHING).tensors
    assert list(tensors["finish_reason"]) == [b"None", b"stop"]
    assert tensors["cumulative_logprob"][0] == -1.5 and np.isnan(tensors["cumulative_logprob"][1])
    assert [json.loads(text) for text in tensors["logprobs"]] == [
        [{"5": {"logprob": -0.5}}], None,
    ]  # fmt: skip
    assert list(tensors["num_input_tokens"]) == [3] and list(tensors["num_cached_tokens"]) == [2]
    assert list(tensors["num_output_tokens"]) == [2, 1]
    assert list(tensors["token_ids"]) == [5, 6, 7]


def test_outputs_are_those_of_the_decoders_configuration(triton):
    tensors = delta_response(DELTA, EVERYTHING).tensors
    promised = pbtxt.tensors("deepseek_decoder", "output").items()
    assert {name: values.dtype.char for name, values in tensors.items()} == {
        name: TYPES[kind] for name, (kind, _, _) in promised
    }


@pytest.mark.parametrize("name", Returns.__dataclass_fields__)
def test_an_output_that_was_asked_for(triton, name):
    tensors = delta_response(DELTA, replace(Returns(), **{name: True})).tensors
    assert set(tensors) == {"text_output", name}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidField("top_p", "wrong"), "INVALID_ARG"), (Refused("full"), "UNAVAILABLE"),
        (Expired("late"), "CANCELLED"), (Cancelled("by you"), "CANCELLED"),
        (RuntimeError("oh"), TritonError.INTERNAL),
    ],
)  # fmt: skip
def test_errors(triton, error, code):
    found = error_response(error).error
    assert (found.message, found.code) == (str(error).encode(), code)


def test_an_error_about_a_name_that_is_no_unicode_or_endless_can_be_told(triton):
    assert error_response(InvalidField("\ud800", "unknown")).error.message == b"\\ud800: unknown"
    assert len(error_response(InvalidField("x" * 10**6, "unknown")).error.message) < 2000


# -- numpy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numpy", "stub", "fits"),
    [
        ("1.26.4", b"numpy.core.multiarray", True),
        ("2.2.6", b"numpy.core.multiarray", False),
        ("2.2.6", b"numpy.core.multiarray numpy._core.multiarray", True),
    ],
)
def test_a_numpy_that_the_stub_was_not_built_for(tmp_path, monkeypatch, numpy, stub, fits):
    program = tmp_path / "stub"
    program.write_bytes(b"\x7fELF\0" + stub + b"\0")
    monkeypatch.setattr("deepseek_flash.triton_io.np.__version__", numpy)
    if fits:
        check_numpy(program)
    else:
        with pytest.raises(RuntimeError, match=r"numpy 2\.2\.6 does not fit"):
            check_numpy(program)

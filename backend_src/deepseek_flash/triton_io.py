"""Tensors to contract and back. The only module of the stages that reads or makes tensors.

What goes between our stages is one byte string: a keyed MAC and the value in msgpack. Every
model of a repository can be called by any client, so a stage trusts nothing without the MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from deepseek_flash.contract import (
    CacheOrder,
    CacheReport,
    Cancelled,
    CancelPlan,
    ClientRequest,
    Control,
    Delta,
    Expired,
    InvalidField,
    Lookup,
    Neighbours,
    NeighboursQuery,
    Outcome,
    Refused,
    RequestPlan,
    Returns,
)

if TYPE_CHECKING:
    import triton_python_backend_utils as pb_utils
else:
    try:
        import triton_python_backend_utils as pb_utils
    except ImportError:  # outside a stub (unit tests, clients) only seal and unseal are used
        pb_utils = None

CACHE = "dflash_cache"  # the model's name in the repository
LONGEST_MESSAGE = 1000  # characters of an error

_MAC_BYTES = 32
_ENCODER = msgspec.msgpack.Encoder()

Sealable = (
    RequestPlan
    | CancelPlan
    | Lookup
    | Control
    | Outcome
    | NeighboursQuery
    | Neighbours
    | CacheOrder
    | CacheReport
)


# -- between our stages ----------------------------------------------------------------------


def seal(value: Sealable, secret: bytes) -> bytes:
    """``value`` as bytes that ``unseal`` accepts under the same secret and type."""
    payload = _ENCODER.encode(value)
    return _mac(type(value).__name__, payload, secret) + payload


def unseal(name: str, data: bytes, kinds: tuple[type[Any], ...], secret: bytes) -> Any:
    """The value in ``data``, of the first of ``kinds`` whose MAC fits.

    Raises:
        InvalidField: naming the tensor; it was not made by a stage of this server.
    """
    mac, payload = data[:_MAC_BYTES], data[_MAC_BYTES:]
    for kind in kinds:
        if hmac.compare_digest(mac, _mac(kind.__name__, payload, secret)):
            return msgspec.msgpack.decode(payload, type=kind)
    raise InvalidField(name, "not made by this server; call the ensemble deepseek_flash instead")


def _mac(kind: str, payload: bytes, secret: bytes) -> bytes:
    # The kind is part of the key material: a Lookup can never pass as a plan.
    return hashlib.blake2b(
        payload, key=secret[:64], digest_size=_MAC_BYTES, person=kind.encode()[:16]
    ).digest()


def read_sealed(request: Any, name: str, kinds: tuple[type[Any], ...], secret: bytes) -> Any:
    """Unseal an input tensor of a stage. Raises InvalidField, also where it is missing."""
    data = _bytes(request, name)
    if data is None:
        raise InvalidField(name, "missing; call the ensemble deepseek_flash instead")
    return unseal(name, data, kinds, secret)


def has_input(request: Any, name: str) -> bool:
    return pb_utils.get_input_tensor_by_name(request, name) is not None


def sealed_tensor(name: str, sealed: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([sealed], dtype=np.object_))


class SealedReply:
    """The one response of a stage that answers later, or from another thread."""

    def __init__(self, response_sender: Any, secret: bytes) -> None:
        self._sender = response_sender
        self._secret = secret

    def send(self, value: Lookup | Neighbours | CacheReport | Exception) -> None:
        if isinstance(value, Exception):
            response = error_response(value)
        else:
            name = "lookup" if isinstance(value, Lookup) else "reply"
            tensor = sealed_tensor(name, seal(value, self._secret))
            response = pb_utils.InferenceResponse(output_tensors=[tensor])
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def call_cache(
    message: Outcome | NeighboursQuery | CacheOrder, secret: bytes
) -> Neighbours | CacheReport:
    """Send a message to ``dflash_cache`` from another stage, and wait for the answer.

    Raises:
        RuntimeError: the cache refused it, or is not there.
    """
    request = pb_utils.InferenceRequest(
        model_name=CACHE,
        requested_output_names=["reply"],
        inputs=[sealed_tensor("message", seal(message, secret))],
    )
    response = request.exec()
    if response.has_error():
        raise RuntimeError(response.error().message())
    reply = pb_utils.get_output_tensor_by_name(response, "reply").as_numpy().ravel()[0]
    answer: Neighbours | CacheReport = unseal("reply", reply, (Neighbours, CacheReport), secret)
    return answer


# -- what clients send -----------------------------------------------------------------------


def read_client_request(request: Any) -> ClientRequest:
    """Every input of the ensemble as the client sent it.

    Raises:
        InvalidField: the request's own parameters are unreadable.
    """
    try:
        parameters = json.loads(request.parameters() or "{}")
    except ValueError as error:
        raise InvalidField("parameters", f"not valid JSON ({error})") from None
    return ClientRequest(
        text_input=_bytes(request, "text_input"),
        input_ids=_ints(request, "input_ids"),
        messages=_bytes(request, "messages"),
        turn_starts=_ints(request, "turn_starts"),
        stream=bool(_first(request, "stream")),
        sampling_parameters=_bytes(request, "sampling_parameters"),
        parameters=parameters,
        exclude_input_in_output=_optional_bool(request, "exclude_input_in_output"),
        returns=Returns(
            **{
                name: bool(_first(request, f"return_{name}"))
                for name in Returns.__dataclass_fields__
            }
        ),
        session_id=_bytes(request, "session_id"),
        cache_salt=_bytes(request, "cache_salt"),
        cancel_token=_bytes(request, "cancel_token"),
        request_timeout_ms=_optional_int(request, "request_timeout_ms"),
        transport_timeout_us=int(request.timeout()),
    )


def _array(request: Any, name: str) -> npt.NDArray[Any] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().ravel()


def _first(request: Any, name: str) -> Any:
    array = _array(request, name)
    if array is None:
        return None
    if array.size == 0:
        raise InvalidField(name, "empty tensor")
    return array[0]


def _bytes(request: Any, name: str) -> bytes | None:
    value = _first(request, name)
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else bytes(value)


def _ints(request: Any, name: str) -> list[int] | None:
    array = _array(request, name)
    return None if array is None else [int(item) for item in array]


def _optional_bool(request: Any, name: str) -> bool | None:
    value = _first(request, name)
    return None if value is None else bool(value)


def _optional_int(request: Any, name: str) -> int | None:
    value = _first(request, name)
    return None if value is None else int(value)


# -- what clients get ------------------------------------------------------------------------


def delta_response(delta: Delta, returns: Returns) -> Any:
    """The vLLM backend's output tensors for one response; optional ones where asked for."""
    tensors = [_strings("text_output", delta.texts)]
    if returns.finish_reason:
        # "None" while running: the vLLM backend's own spelling.
        tensors.append(_strings("finish_reason", [str(r) for r in delta.finish_reasons]))
    if returns.cumulative_logprob:
        sums = [float("nan") if v is None else v for v in delta.cumulative_logprobs]
        tensors.append(pb_utils.Tensor("cumulative_logprob", np.array(sums, dtype=np.float32)))
    if returns.logprobs:
        tensors.append(_strings("logprobs", [json.dumps(v) for v in delta.logprobs]))
    if returns.num_input_tokens:
        count = np.array([delta.num_input_tokens], dtype=np.uint32)
        tensors.append(pb_utils.Tensor("num_input_tokens", count))
    if returns.num_cached_tokens:
        count = np.array([delta.num_cached_tokens], dtype=np.uint32)
        tensors.append(pb_utils.Tensor("num_cached_tokens", count))
    if returns.num_output_tokens:
        counts = np.array([len(ids) for ids in delta.token_ids], dtype=np.uint32)
        tensors.append(pb_utils.Tensor("num_output_tokens", counts))
    if returns.token_ids:
        ids = np.array([token for choice in delta.token_ids for token in choice], dtype=np.int32)
        tensors.append(pb_utils.Tensor("token_ids", ids))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def error_response(error: Exception) -> Any:
    """An error as Triton's: the code tells the client whether to mend, retry or give up."""
    codes = pb_utils.TritonError
    if isinstance(error, InvalidField):
        code = codes.INVALID_ARG
    elif isinstance(error, Refused):
        code = codes.UNAVAILABLE
    elif isinstance(error, (Expired, Cancelled)):
        code = codes.CANCELLED
    else:
        code = codes.INTERNAL
    # It may quote a name that a client made up: of any length, and no Unicode.
    message = str(error)[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode()
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _strings(name: str, values: Any) -> Any:
    return pb_utils.Tensor(name, np.array([v.encode() for v in values], dtype=np.object_))


def check_numpy(program: Path = Path("/proc/self/exe")) -> None:
    """Refuse a numpy that this Triton's stub was not built for.

    A stub built for numpy 1 reads numpy 2's item size from the wrong place: every numeric output
    is empty, silently. No call tells, but the stub's binary does: bindings that know numpy 2 look
    for its module ``numpy._core``.

    Args:
        program: the stub, in which this runs.
    Raises:
        RuntimeError: numeric outputs would be empty.
    """
    if int(np.__version__.split(".")[0]) >= 2 and b"numpy._core" not in program.read_bytes():
        raise RuntimeError(
            f"numpy {np.__version__} does not fit this Triton's Python backend, which was built "
            "for numpy 1: numeric outputs would be empty. Install numpy<2"
        )

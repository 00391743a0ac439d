"""Asks a running server whether it works, and tells it what to do."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deepseek_flash.contract import CacheOrder, CacheReport, Control
from deepseek_flash.triton_io import CACHE, seal, unseal

ENSEMBLE, DECODER = "deepseek_flash", "deepseek_decoder"


@dataclass(frozen=True)
class Health:
    """Outcome of one real inference."""

    ok: bool
    message: str
    seconds: float


def check_health(url: str, timeout: float) -> Health:
    """Generate one token through the whole ensemble.

    ``/v2/health/ready`` says 200 even when a stub is dead; only an answer proves life.
    """
    begin = time.monotonic()
    inputs = [
        _tensor("text_input", "BYTES", np.array([b"ping"], dtype=np.object_)),
        _tensor(
            "sampling_parameters",
            "BYTES",
            np.array([b'{"max_tokens": 1, "temperature": 0, "use_dflash": false}'], np.object_),
        ),
        _tensor("request_timeout_ms", "INT32", np.array([int(timeout * 1000)], dtype=np.int32)),
        _tensor("return_num_output_tokens", "BOOL", np.array([True])),
    ]
    try:
        result = _infer(url, ENSEMBLE, inputs, timeout)
        tokens = int(result.as_numpy("num_output_tokens").sum())
        problem = "" if tokens == 1 else f"{tokens} tokens instead of one"
    except (InferenceServerException, TimeoutError) as error:
        problem = str(error)
    seconds = time.monotonic() - begin
    return Health(not problem, problem or "one token generated", seconds)


def server_ready(url: str) -> bool:
    """Triton's own readiness: every model is loaded."""
    with grpcclient.InferenceServerClient(url) as client:
        try:
            return bool(client.is_server_ready(client_timeout=2.0))
        except InferenceServerException:
            return False


def send_control(url: str, action: str, secret: bytes, timeout: float) -> None:
    """Give the decoder an operator's order.

    Raises:
        InferenceServerException, TimeoutError: it did not answer.
    """
    sealed = seal(Control(action), secret)
    tensor = _tensor("control", "BYTES", np.array([sealed], dtype=np.object_))
    _infer(url, DECODER, [tensor], timeout)


def send_cache_order(url: str, order: CacheOrder, secret: bytes, timeout: float) -> str:
    """Give the cache an operator's order; what it reports.

    Raises:
        InferenceServerException, TimeoutError: it did not answer, or refused.
    """
    sealed = seal(order, secret)
    tensor = _tensor("message", "BYTES", np.array([sealed], dtype=np.object_))
    reply = _infer(url, CACHE, [tensor], timeout).as_numpy("reply").ravel()[0]
    report: CacheReport = unseal("reply", reply, (CacheReport,), secret)
    return report.text


def _tensor(name: str, datatype: str, values: Any) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


def _infer(url: str, model: str, inputs: list[Any], timeout: float) -> Any:
    """The one response of a decoupled model, by a gRPC stream."""
    import queue

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), stream_timeout=timeout
        )
        try:
            with contextlib.suppress(InferenceServerException):
                # A stream that broke while it was opened tells why in its callback.
                client.async_stream_infer(model, inputs)
            result, error = answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        finally:
            client.stop_stream(cancel_requests=True)
    if error is not None:
        raise error
    return result

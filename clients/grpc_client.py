"""The ensemble over a gRPC stream."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from clients.request import MODEL, Answer, Chunk, GenerationError, Request

_BOOLS = ("stream", "exclude_input_in_output")
_INTS = ("input_ids", "turn_starts", "request_timeout_ms")


class GrpcClient:
    """One connection. A context manager; each ``stream`` call uses a gRPC stream of its own."""

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self._url = url

    def stream(self, request: Request, timeout: float | None = None) -> Iterator[Chunk]:
        """Yield the answer's chunks. Closing the iterator only stops reading: an ensemble does
        not pass a disconnect on, so cancel with the request's ``cancel_token``.

        Args:
            timeout: seconds for the whole answer; the server stops at it too.
        Raises:
            GenerationError: the server's message.
        """
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        with grpcclient.InferenceServerClient(self._url) as client:
            client.start_stream(
                lambda result, error: answers.put((result, error)), stream_timeout=timeout
            )
            try:
                try:
                    client.async_stream_infer(
                        MODEL,
                        [tensor(name, value) for name, value in request.fields().items()],
                        timeout=None if timeout is None else int(timeout * 1e6),
                        enable_empty_final_response=True,
                    )
                except InferenceServerException as error:
                    # A stream that broke while it was opened tells why in its callback.
                    raise GenerationError(_reason(answers, error)) from None
                while True:
                    result, failure = answers.get()
                    if failure is not None:
                        raise GenerationError(failure.message())
                    response = result.get_response()
                    if response.outputs:
                        yield _chunk(result)
                    if response.parameters["triton_final_response"].bool_param:
                        return
            finally:
                client.stop_stream(cancel_requests=True)

    def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer."""
        return Answer.of(list(self.stream(request, timeout)))

    def cancel(self, token: str) -> bool:
        """Cancel the request that carries this token. False: none is running."""
        order = Request(cancel_token=token, stream=False)
        return self.generate(order).finish_reason == "cancelled"


def _reason(answers: queue.SimpleQueue[tuple[Any, Any]], error: Exception) -> str:
    try:
        _, told = answers.get(timeout=1.0)
    except queue.Empty:
        return str(error)
    return str(told)


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """An input of the ensemble by its name."""
    if name in _BOOLS or name.startswith("return_"):
        datatype, array = "BOOL", np.array([value], dtype=np.bool_)
    elif name in _INTS:
        datatype, array = "INT32", np.atleast_1d(np.array(value, dtype=np.int32))
    else:
        datatype, array = "BYTES", np.array([value.encode()], dtype=np.object_)
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _chunk(result: Any) -> Chunk:
    def first(name: str) -> Any:
        array = result.as_numpy(name)
        return None if array is None or array.size == 0 else array[0]

    ids = result.as_numpy("token_ids")
    reason = first("finish_reason")
    return Chunk(
        text=(first("text_output") or b"").decode(),
        finish_reason=None if reason in (None, b"None") else reason.decode(),
        token_ids=() if ids is None else tuple(int(token) for token in ids),
        num_input_tokens=int(first("num_input_tokens") or 0),
        num_cached_tokens=int(first("num_cached_tokens") or 0),
    )

"""The ensemble over one gRPC channel, many streams."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.grpc import MAX_GRPC_MESSAGE_SIZE
from tritonclient.utils import InferenceServerException

from deepseek_flash.gateway.errors import from_ensemble, unreachable

ENSEMBLE = "deepseek_flash"
CANCEL_SECONDS = 5.0
READY_SECONDS = 2.0

# A server that comes back is found at once; by itself gRPC would wait for up to two minutes.
_CHANNEL = [
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

# Outputs that every answer must tell.
_RETURNS = (
    "finish_reason", "num_input_tokens", "num_cached_tokens", "num_output_tokens", "token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to the ensemble; it streams always, whatever the client asked for."""

    input_ids: Sequence[int]
    sampling: dict[str, Any]  # the ensemble's names
    turn_starts: Sequence[int] = ()
    session_id: str = ""
    cache_salt: str = ""
    cancel_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new, one element a choice."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]  # None while running
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[list[dict[str, Any]] | None, ...]  # a dict a token: id → logprob, rank, text
    num_input_tokens: int
    num_cached_tokens: int  # of the prompt, not computed by then; all: the engine did not run


class TritonClient:
    """One server. Made and used on one event loop."""

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url, channel_args=_CHANNEL)
        self._cancels: set[asyncio.Task[None]] = set()  # or they could be collected while they run

    async def stream(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks. Whoever leaves before its end has cancelled the request.

        Raises:
            GatewayError: the ensemble refused it or failed, or cannot be reached.
        """
        ended = complete = False
        responses = self._responses(_inputs(generation))
        try:
            async for result, error in responses:
                if error is not None:
                    ended = True
                    raise from_ensemble(error.message())
                response = result.get_response()
                ended = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    chunk = _chunk(result, response)
                    complete = all(reason is not None for reason in chunk.finish_reasons)
                    yield chunk
                if ended:
                    return
            ended = True
            if not complete:  # the server went away
                raise unreachable()
        except grpc.RpcError:
            ended = True
            raise unreachable() from None
        finally:
            if not ended:
                # An ensemble does not pass a disconnect on. This may itself be cancelled, so the
                # order goes out by a task of its own.
                self._cancel(generation.cancel_token)
                responses.cancel()

    async def ready(self) -> bool:
        """Whether the ensemble is loaded."""
        try:
            return bool(await self._client.is_model_ready(ENSEMBLE, client_timeout=READY_SECONDS))
        except InferenceServerException:
            return False

    async def close(self) -> None:
        """Send what cancels there are left, and leave."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CANCEL_SECONDS)
        await self._client.close()

    def _cancel(self, token: str) -> None:
        task = asyncio.create_task(self._send_cancel(token))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, token: str) -> None:
        inputs = [_tensor("cancel_token", token)]
        try:
            async for _ in self._responses(inputs, timeout=CANCEL_SECONDS):
                return
        except grpc.RpcError:
            pass  # no server, so there is nothing to cancel

    def _responses(self, inputs: list[Any], timeout: float | None = None) -> Any:
        """An asynchronous iterator of (result, error) with a ``cancel``."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": ENSEMBLE, "inputs": inputs}

        return self._client.stream_infer(requests(), stream_timeout=timeout)


def _inputs(generation: Generation) -> list[Any]:
    values: dict[str, Any] = {
        "input_ids": generation.input_ids,
        "turn_starts": generation.turn_starts,
        "sampling_parameters": json.dumps(generation.sampling),
        "session_id": generation.session_id,
        "cache_salt": generation.cache_salt,
        "cancel_token": generation.cancel_token,
    }
    flags = ["stream", *(f"return_{name}" for name in _RETURNS)]
    if generation.sampling.get("logprobs") is not None:
        flags.append("return_logprobs")
    given = [_tensor(name, value) for name, value in values.items() if len(value)]
    return given + [_tensor(name, True) for name in flags]


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        datatype, array = "BOOL", np.array([value])
    elif isinstance(value, str):
        datatype, array = "BYTES", np.array([value.encode()], dtype=np.object_)
    else:
        datatype, array = "INT32", np.array(value, dtype=np.int32)
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _chunk(result: Any, response: Any) -> Chunk:
    tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
    reasons = [reason.decode() for reason in tensors["finish_reason"]]
    ids, counts = tensors["token_ids"].tolist(), tensors["num_output_tokens"].tolist()
    split, place = [], 0
    for count in counts:
        split.append(tuple(ids[place : place + count]))
        place += count
    logprobs = tensors.get("logprobs")
    return Chunk(
        texts=tuple(text.decode() for text in tensors["text_output"]),
        finish_reasons=tuple(None if reason == "None" else reason for reason in reasons),
        token_ids=tuple(split),
        logprobs=tuple(None for _ in counts)
        if logprobs is None
        else tuple(json.loads(text) for text in logprobs),
        num_input_tokens=int(tensors["num_input_tokens"][0]),
        num_cached_tokens=int(tensors["num_cached_tokens"][0]),
    )

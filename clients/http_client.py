"""The ensemble over HTTP: ``/generate`` for a whole answer, ``/generate_stream`` for events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx

from clients.request import MODEL, Answer, Chunk, GenerationError, Request


class HttpClient:
    """Requests to one server over connections that stay open; a client can be used by many threads.

    ``url`` without a path, e.g. ``http://127.0.0.1:8000``.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000") -> None:
        self._base = f"{url.rstrip('/')}/v2/models/{MODEL}"
        limits = httpx.Limits(max_connections=None)  # a queue here would look like a slow server
        self._http = httpx.Client(trust_env=False, limits=limits)

    def close(self) -> None:
        self._http.close()

    def stream(self, request: Request, timeout: float | None = None) -> Iterator[Chunk]:
        """Yield the answer's chunks from ``/generate_stream``.

        Raises:
            GenerationError: the server's message, also one that comes in the middle.
        """
        body = dataclasses.replace(request, stream=True).fields()
        url = f"{self._base}/generate_stream"
        with self._http.stream("POST", url, json=body, timeout=timeout) as response:
            if response.status_code != 200:
                raise GenerationError(_message(response.read()))
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield _chunk(json.loads(line.removeprefix("data: ")))

    def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer from ``/generate``."""
        body = dataclasses.replace(request, stream=False).fields()
        response = self._http.post(f"{self._base}/generate", json=body, timeout=timeout)
        if response.status_code != 200:
            raise GenerationError(_message(response.content))
        return Answer.of([_chunk(response.json())])

    def cancel(self, token: str) -> bool:
        """Cancel the request that carries this token. False: none is running."""
        order = Request(cancel_token=token)
        return self.generate(order).finish_reason == "cancelled"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body.strip().removeprefix(b"data: "))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "the server gave no reason"


def _chunk(event: dict[str, Any]) -> Chunk:
    if "error" in event:  # Triton reports errors inside HTTP 200
        raise GenerationError(str(event["error"]))
    ids = event.get("token_ids", [])
    reason = event["finish_reason"]
    return Chunk(
        text=event["text_output"],
        finish_reason=None if reason == "None" else reason,
        # Triton's JSON writes a tensor of one element as a plain value.
        token_ids=tuple(ids) if isinstance(ids, list) else (ids,),
        num_input_tokens=event.get("num_input_tokens", 0),
        num_cached_tokens=event.get("num_cached_tokens", 0),
    )

"""The gateway's OpenAI door: chat completions for messages, completions for a raw text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from clients.request import Chunk, GenerationError, Request


class OpenAIClient:
    """Streams from one gateway over connections that stay open. ``url``: without ``/v1``."""

    def __init__(self, url: str = "http://127.0.0.1:9000", key: str = "") -> None:
        limits = httpx.Limits(max_connections=None)  # a queue here would look like a slow server
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=url, headers=headers, trust_env=False, limits=limits, timeout=600.0
        )
        self._model = ""

    def stream(self, request: Request, timeout: float | None = None) -> Iterator[Chunk]:
        """Yield the answer's chunks; the last has its usage.

        Raises:
            GenerationError: the gateway's message, also one that comes in the middle.
        """
        path, body = self._asked(request)
        headers = {} if request.session_id is None else {"x-session-id": request.session_id}
        reason: str | None = None
        with self._http.stream(
            "POST", path, json=body, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                raise GenerationError(_message(response.read()))
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = _chunk(json.loads(line.removeprefix("data: ")), reason)
                    reason = chunk.finish_reason
                    yield chunk

    def _asked(self, request: Request) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._name(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **request.sampling,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.messages is not None:
            return "/v1/chat/completions", {**body, "messages": list(request.messages)}
        prompt = request.text if request.input_ids is None else list(request.input_ids)
        return "/v1/completions", {**body, "prompt": prompt}

    def _name(self) -> str:
        if not self._model:
            response = self._http.get("/v1/models")
            if response.status_code != 200:
                raise GenerationError(_message(response.content))
            self._model = response.json()["data"][0]["id"]
        return self._model


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "the gateway gave no reason"


def _chunk(event: dict[str, Any], reason: str | None) -> Chunk:
    """``reason``: of the chunks before; the usage comes in an event after the last choice."""
    if "error" in event:
        raise GenerationError(_message(json.dumps(event).encode()))
    choice = event["choices"][0] if event.get("choices") else {}
    delta = choice.get("delta", choice)
    usage = event.get("usage") or {}
    return Chunk(
        text=delta.get("content") or delta.get("text") or "",
        finish_reason=choice.get("finish_reason") or reason,
        token_ids=tuple(choice.get("token_ids") or ()),
        num_input_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )

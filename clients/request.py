"""What can be asked of the ensemble, independent of the door."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "deepseek_flash"


class GenerationError(RuntimeError):
    """The server refused or failed the request; the message is the server's."""


@dataclass(frozen=True)
class Request:
    """One generation. Exactly one of ``text``, ``input_ids`` and ``messages`` must be given."""

    text: str | None = None
    input_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # vLLM's names
    stream: bool = True
    session_id: str | None = None
    cache_salt: str | None = None
    cancel_token: str | None = None
    timeout_ms: int | None = None
    turn_starts: Sequence[int] | None = None

    def fields(self) -> dict[str, Any]:
        """The ensemble's inputs by name; what is not asked for is left out."""
        values = {
            "text_input": self.text,
            "input_ids": None if self.input_ids is None else list(self.input_ids),
            "messages": None if self.messages is None else json.dumps(list(self.messages)),
            "sampling_parameters": json.dumps(dict(self.sampling)),
            "stream": self.stream,
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_cached_tokens": True,
            "return_num_output_tokens": True,
            "return_token_ids": True,
            "session_id": self.session_id,
            "cache_salt": self.cache_salt,
            "cancel_token": self.cancel_token,
            "request_timeout_ms": self.timeout_ms,
            "turn_starts": None if self.turn_starts is None else list(self.turn_starts),
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Chunk:
    """One response: the whole answer, or what is new since the response before."""

    text: str
    finish_reason: str | None  # None while running
    token_ids: tuple[int, ...]
    num_input_tokens: int
    num_cached_tokens: int = 0  # of the prompt, not computed by then


@dataclass(frozen=True)
class Answer:
    """All chunks of one generation together."""

    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...]
    num_input_tokens: int
    # Of the prompt, not computed for it; all: replayed whole. Equal answers may differ in this.
    num_cached_tokens: int = field(default=0, compare=False)

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Answer:
        if not chunks:
            raise GenerationError("the server ended the stream without an answer")
        return cls(
            text="".join(chunk.text for chunk in chunks),
            finish_reason=chunks[-1].finish_reason,
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            num_input_tokens=chunks[-1].num_input_tokens,
            num_cached_tokens=chunks[-1].num_cached_tokens,
        )


def new_cancel_token() -> str:
    """Unguessable: whoever knows it can cancel the request."""
    return secrets.token_urlsafe(24)

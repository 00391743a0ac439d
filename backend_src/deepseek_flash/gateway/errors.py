"""What can go wrong with a call, and how each protocol says it. Nothing internal is ever told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CONTEXT_EXCEEDED = "context_length_exceeded"
RETRY_SECONDS, RESTART_SECONDS = 1, 5


class Protocol(StrEnum):
    """Whose API a route is of."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass
class GatewayError(Exception):
    """A call that is refused or has failed."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def body(self, protocol: Protocol, request_id: str) -> dict[str, Any]:
        """The error object of a protocol."""
        if protocol is Protocol.ANTHROPIC:
            prefix = "prompt is too long: " if self.code == CONTEXT_EXCEEDED else ""
            error = {"type": _anthropic_type(self.status), "message": prefix + self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        return {
            "error": {
                "message": self.message,
                "type": _openai_type(self.status),
                "param": self.param,
                "code": self.code or _OPENAI_CODES.get(self.status),
            }
        }


_OPENAI_CODES = {
    401: "invalid_api_key",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _openai_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def invalid(param: str | None, problem: str, code: str | None = None) -> GatewayError:
    """A mistake of the client's; the message names the field."""
    return GatewayError(400, problem if param is None else f"{param}: {problem}", param, code)


def context_exceeded(limit: int, prompt: int, param: str) -> GatewayError:
    """In DeepSeek's words, by which clients know that they must make the conversation shorter."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + 1} tokens ({prompt} in the messages, 1 in the completion). "
        "Please reduce the length of the messages or completion."
    )
    return GatewayError(400, message, param, CONTEXT_EXCEEDED)


def internal() -> GatewayError:
    return GatewayError(500, "internal error; the server's log has the details")


# -- from the ensemble -----------------------------------------------------------------------

# Triton puts the ensemble's name before a stage's message.
_PREFIX = re.compile(r"^in ensemble '[^']*', ")
_FIELD = re.compile(r"^([A-Za-z_][\w.\[\]]*): ")

# What a stage says, and the status that tells a client what to do. In order.
_MEANINGS: tuple[tuple[str, int, int | None], ...] = (
    (r"(^|tenant_)queue_limit of \d+", 429, RETRY_SECONDS),
    (r"the engine is still starting|shutting down", 503, RESTART_SECONDS),
    (r"the engine has died", 503, RESTART_SECONDS),
    (r"the request's deadline passed", 504, None),
    (r"^cancelled by", 503, RETRY_SECONDS),
    (r"^the engine (failed|aborted|ended)", 503, RETRY_SECONDS),
)
# A stage's words for the prompt: clients never named these.
_PROMPT_FIELDS = ("input_ids", "text_input")


def from_ensemble(message: str) -> GatewayError:
    """A stage's error message as an error of the API."""
    message = _PREFIX.sub("", message)
    for pattern, status, retry_after in _MEANINGS:
        if re.search(pattern, message):
            return GatewayError(status, message, retry_after=retry_after)
    field = _FIELD.match(message)
    if field is None:
        return internal()
    name = field.group(1)
    if name in _PROMPT_FIELDS:
        name = "prompt"
        message = f"{name}: {message[field.end() :]}"
    code = CONTEXT_EXCEEDED if "maximum context length" in message else None
    return GatewayError(400, message, name, code)


def unreachable() -> GatewayError:
    """Triton does not answer at all."""
    return GatewayError(503, "the server is starting or stopping", retry_after=RESTART_SECONDS)


# -- from the library ------------------------------------------------------------------------


# How the library's own checks begin: by the parameter's name.
_NAMED = re.compile(r"`?([a-z]+_[a-z_]+|n|seed|temperature|stop)`? must ")


def from_library(status: int, body: Mapping[str, Any]) -> GatewayError:
    """An error body that vLLM's routes made."""
    error = body.get("error")
    error = error if isinstance(error, Mapping) else {}
    message, param = str(error.get("message", "")), error.get("param")
    if status >= 500:
        return internal()
    if "maximum context length" in message or param == "input_tokens":
        return GatewayError(400, message, "messages", CONTEXT_EXCEEDED)
    if status == 404:
        return GatewayError(404, message, param, "model_not_found" if param == "model" else None)
    named = _NAMED.match(message)
    return GatewayError(status, message, param or (named.group(1) if named else None))

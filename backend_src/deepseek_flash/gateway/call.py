"""One call on its way through the gateway, known to everything that handles it."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from deepseek_flash.gateway.errors import GatewayError, Protocol
from deepseek_flash.gateway.keys import ANYONE, Tenant


@dataclass
class Call:
    """What the library has no place for: who calls, and what goes around it or comes back."""

    protocol: Protocol = Protocol.OPENAI
    tenant: Tenant = ANYONE
    request_id: str = field(default_factory=lambda: "req_" + secrets.token_hex(12))
    session_id: str = ""
    cache_salt: str = ""  # the caller's own
    # Sampling fields that go to the ensemble around the library, which knows them not or not well.
    sampling: dict[str, Any] = field(default_factory=dict)
    counting: bool = False  # tokens are counted only: a prompt may be longer than the context
    failure: GatewayError | None = None  # set by the engine client: why there is no answer
    cached_tokens: int | None = None  # of the prompt, once the ensemble has told
    reasoning_tokens: int = 0  # where the prompt began the reasoning: the library counts none then


_CURRENT: ContextVar[Call] = ContextVar("deepseek_flash_call")


def begin(call: Call) -> None:
    """Make ``call`` the one that this task, and all that it starts, works on."""
    _CURRENT.set(call)


def current() -> Call:
    """The call at hand; one of nobody's where there is none (vLLM's own probes at start)."""
    return _CURRENT.get(None) or Call()

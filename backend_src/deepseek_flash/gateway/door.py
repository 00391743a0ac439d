"""The way in: which routes there are, who may call them, and what a request must look like.

Only what stands in the table exists; the library has many more routes, some of them dangerous.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepseek_flash.gateway import call as calls
from deepseek_flash.gateway import mend_anthropic, mend_openai
from deepseek_flash.gateway.answer import Answer, Body, Events, Send
from deepseek_flash.gateway.body import Gone, Receive, dump, read
from deepseek_flash.gateway.call import Call
from deepseek_flash.gateway.errors import RETRY_SECONDS, GatewayError, Protocol, internal
from deepseek_flash.gateway.keys import ANYONE, LOOPBACK, Keyring, Tenant
from deepseek_flash.gateway.request_anthropic import prepare_count, prepare_messages
from deepseek_flash.gateway.request_openai import (
    prepare_chat,
    prepare_completion,
    prepare_detokenize,
    prepare_tokenize,
    session,
)
from deepseek_flash.gateway.rules import Rules

log = logging.getLogger("deepseek_flash")

App = Callable[[Any, Receive, Send], Awaitable[None]]
Prepare = Callable[[dict[str, Any], Call, Rules], None]
Observe = Callable[[str, int], None]  # a route, and the status of its answer

CLIENT_LEFT = 499  # nginx's status for it, in metrics
SESSION_HEADERS = ("x-session-id", "x-deepseek-harness-session-id")
_REQUEST_ID = re.compile(r"[\w.-]{1,128}")


def _unchanged(body: dict[str, Any], call: Call) -> dict[str, Any]:
    return body


def _one(event: dict[str, Any], call: Call) -> list[dict[str, Any]]:
    return [event]


@dataclass(frozen=True)
class Route:
    """One route: how its requests are prepared and its answers mended."""

    method: str
    protocol: Protocol = Protocol.OPENAI
    prepare: Prepare | None = None
    body: Body = _unchanged
    events: Callable[[], Events] = lambda: _one
    open: bool = False  # to callers without a key
    generates: bool = False


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(
        "POST", prepare=prepare_chat, body=mend_openai.chat_body,
        events=lambda: mend_openai.chat_event, generates=True,
    ),
    "/v1/completions": Route(
        "POST", prepare=prepare_completion, body=mend_openai.completion_body,
        events=lambda: mend_openai.completion_event, generates=True,
    ),
    "/v1/messages": Route(
        "POST", Protocol.ANTHROPIC, prepare_messages, mend_anthropic.message_body,
        mend_anthropic.MessageEvents, generates=True,
    ),
    "/v1/messages/count_tokens": Route("POST", Protocol.ANTHROPIC, prepare_count),
    "/v1/models": Route("GET"),
    "/tokenize": Route("POST", prepare=prepare_tokenize),
    "/detokenize": Route("POST", prepare=prepare_detokenize),
    "/health": Route("GET", open=True),
    "/metrics": Route("GET"),
}  # fmt: skip


def find_route(path: str) -> tuple[str, Route | None]:
    """A path as the library knows it, and its route. Clients leave ``/v1`` out, or add a slash."""
    path = path.rstrip("/")
    for known in (path, "/v1" + path, path.removeprefix("/v1")):
        if known in ROUTES:
            return known, ROUTES[known]
        if known.startswith("/v1/models/"):
            return known, ROUTES["/v1/models"]
    return path, None


class Door:
    """An ASGI application around the library's."""

    def __init__(
        self,
        app: App,
        rules: Rules,
        keyring: Keyring,
        tenant_limit: int,
        most_bytes: int,
        keep_alive: float,
        observe: Observe,
    ) -> None:
        self._app = app
        self._rules = rules
        self._keyring = keyring
        self._tenant_limit = tenant_limit  # 0: none
        self._most_bytes = most_bytes
        self._keep_alive = keep_alive  # seconds of silence
        self._observe = observe
        self._in_flight: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # its life: start and end
            return
        path, route = find_route(scope["path"])
        headers = {name.decode("latin-1"): value.decode("latin-1")
                   for name, value in scope["headers"]}  # fmt: skip
        call = Call(protocol=route.protocol if route else _protocol_of(path))
        asked = headers.get("x-request-id", "")
        call.request_id = asked if _REQUEST_ID.fullmatch(asked) else call.request_id
        calls.begin(call)
        answer = Answer(
            send, call, route.body if route else _unchanged, route.events() if route else _one
        )
        try:
            await self._serve(path, route, {**scope, "path": path}, headers, receive, answer, call)
        except GatewayError as error:
            await answer.fail(error)
        except Gone:
            pass
        except Exception:  # ours to mend; the client must not hang
            log.exception("a call of %s failed", path)
            await answer.fail(internal())
        finally:
            status = answer.status or CLIENT_LEFT
            if answer.failed and status < 400:  # inside a stream
                status = 500
            known = path if path in ROUTES else "/v1/models"
            self._observe(known if route else "other", status)

    async def _serve(
        self, path: str, route: Route | None, scope: Any, headers: Mapping[str, str],
        receive: Receive, answer: Answer, call: Call,
    ) -> None:  # fmt: skip
        if route is None:
            raise GatewayError(404, f"there is no route {path[:100]}")
        if scope["method"] != route.method:
            error = GatewayError(405, f"{path} takes {route.method} only")
            await answer.json(405, error.body(call.protocol, call.request_id),
                              {"allow": route.method})  # fmt: skip
            return
        call.tenant = ANYONE if route.open else self._tenant(headers)
        scope = {**scope, "raw_path": path.encode(), "headers": _inner_headers(scope, call)}
        if route.prepare is None:
            await self._app(scope, receive, answer)
            return
        body = await read(receive, headers, self._most_bytes)
        for name in SESSION_HEADERS:
            session(call, headers.get(name))
        route.prepare(body, call, self._rules)
        data = dump(body)
        with self._counted(call.tenant if route.generates else None):
            alive = asyncio.create_task(answer.keep_alive(self._keep_alive))
            try:
                await self._app(scope, _replayed(data, receive), answer)
            finally:
                alive.cancel()

    def _tenant(self, headers: Mapping[str, str]) -> Tenant:
        if not self._keyring.required:
            _check_host(headers.get("host", ""))
            return ANYONE
        tenant = self._keyring.tenant(_keys(headers))
        if tenant is None:
            raise GatewayError(401, "no valid API key; send it as Authorization: Bearer …")
        return tenant

    @contextmanager
    def _counted(self, tenant: Tenant | None) -> Any:
        """A place of the tenant's while a generation is in flight."""
        if tenant is None:
            yield
            return
        if self._tenant_limit and self._in_flight[tenant.name] >= self._tenant_limit:
            raise GatewayError(
                429, f"gateway_tenant_limit of {self._tenant_limit} requests in flight is reached",
                retry_after=RETRY_SECONDS,
            )  # fmt: skip
        self._in_flight[tenant.name] += 1
        try:
            yield
        finally:
            self._in_flight[tenant.name] -= 1


def _check_host(host: str) -> None:
    """Without keys, a page in a browser must not reach this machine's gateway by a name of its
    own that leads here."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.strip("[]") not in LOOPBACK:
        raise GatewayError(403, "no API key is configured: only this machine may ask")


def _protocol_of(path: str) -> Protocol:
    return Protocol.ANTHROPIC if path.startswith("/v1/messages") else Protocol.OPENAI


def _keys(headers: Mapping[str, str]) -> list[str]:
    """Every key that the caller presents: clients send one in up to three headers."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    found = [bearer.strip()] if scheme.lower() == "bearer" else []
    found += [headers.get("x-api-key", ""), headers.get("api-key", "")]
    return [key for key in found if key]


def _inner_headers(scope: Any, call: Call) -> list[tuple[bytes, bytes]]:
    """What the library gets of the headers: none by which it could be steered."""
    kept = [(name, value) for name, value in scope["headers"]
            if name in (b"content-type", b"accept", b"user-agent", b"host")]  # fmt: skip
    return [*kept, (b"x-request-id", call.request_id.removeprefix("req_").encode())]


def _replayed(data: bytes, receive: Receive) -> Receive:
    """A body that was read already; after it, what comes from the client is its leaving."""
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay

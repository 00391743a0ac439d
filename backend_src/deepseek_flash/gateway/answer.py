"""Takes the library's response as it is sent, and sends the mended one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from deepseek_flash.gateway.call import Call
from deepseek_flash.gateway.errors import GatewayError, Protocol, from_library

log = logging.getLogger("deepseek_flash")

Send = Callable[[Any], Awaitable[None]]
Body = Callable[[dict[str, Any], Call], dict[str, Any]]
Events = Callable[[dict[str, Any], Call], list[dict[str, Any]]]


class Answer:
    """One response on its way out.

    A stream's status is held back until its first event: a request that fails before it had an
    answer then fails with the right status. What follows an error is never sent.
    """

    def __init__(self, send: Send, call: Call, body: Body, events: Events) -> None:
        self._send = send
        self._call = call
        self._mend_body = body
        self._mend_events = events
        self._start: dict[str, Any] = {}
        self._streams = self._started = self._ended = False
        self._rest = b""  # of an event, or of a body, that is not all there yet
        self._wrote_at = 0.0
        self.status = 0
        self.failed = False

    async def __call__(self, message: Any) -> None:
        """An ASGI ``send``."""
        if self._ended:
            return
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            self._start = message
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif self._streams:
            await self._stream(message)
        else:
            self._rest += message.get("body", b"")
            if not message.get("more_body", False):
                await self._whole()

    async def fail(self, error: GatewayError) -> None:
        """Answer with an error: by its status, or inside a stream that has begun."""
        if self._ended:
            return
        self.failed = True
        body = error.body(self._call.protocol, self._call.request_id)
        if self._started:
            await self._finish(_event(body, self._call.protocol))
        else:
            await self.json(error.status, body, error.headers)

    async def keep_alive(self, seconds: float) -> None:
        """Write a comment into a stream whenever it has been silent for so long; runs for ever."""
        clock = asyncio.get_running_loop().time
        self._wrote_at = clock()
        while True:
            await asyncio.sleep(self._wrote_at + seconds - clock())
            if clock() - self._wrote_at >= seconds:
                self._wrote_at = clock()
                if self._streams and not self._ended:
                    await self._write(b": keep-alive\n\n")

    async def json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON response."""
        data = json.dumps(body, ensure_ascii=False).encode()
        given = {"content-type": "application/json", **(headers or {})}
        self._streams = False
        self._start = {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        await self._finish(data)

    # -- whole answers -------------------------------------------------------------------------

    async def _whole(self) -> None:
        status, data = self._start["status"], self._rest
        headers = dict(self._start.get("headers", ()))
        if not headers.get(b"content-type", b"").startswith(b"application/json"):
            await self._finish(data)
            return
        body = json.loads(data)
        if status >= 400:
            await self.fail(self._failure(status, body))
        elif not isinstance(body, dict):
            self._ended = True  # the client has left: the library answers nobody with nothing
        else:
            await self.json(status, self._mend_body(body, self._call))

    def _failure(self, status: int, body: Any) -> GatewayError:
        """Why there is no answer: the engine client knows best, then the library."""
        if self._call.failure is not None:
            return self._call.failure
        if status >= 500:
            log.error("the library failed with status %d: %.500s", status, body)
        return from_library(status, body if isinstance(body, dict) else {})

    # -- streams -------------------------------------------------------------------------------

    async def _stream(self, message: Any) -> None:
        *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        out = []
        for event in events:
            data = _data_of(event)
            if data is None:
                out.append(event + b"\n\n")  # a comment
            elif data == b"[DONE]":
                out.append(b"data: [DONE]\n\n")
            else:
                found = json.loads(data)
                if "error" in found:
                    if out:
                        await self._write(b"".join(out))
                    await self.fail(self._stream_failure(found))
                    return
                mended = self._mend_events(found, self._call)
                out += [_event(one, self._call.protocol) for one in mended]
        if out:
            await self._write(b"".join(out))
        if not message.get("more_body", False):
            await self._finish(b"")

    def _stream_failure(self, found: dict[str, Any]) -> GatewayError:
        error = found["error"]
        code = error.get("code") if isinstance(error, dict) else None
        return self._failure(code if isinstance(code, int) else 500, found)

    async def _write(self, data: bytes) -> None:
        self._wrote_at = asyncio.get_running_loop().time()
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _finish(self, data: bytes) -> None:
        await self._begin(None if self._streams else len(data))
        self._ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self, length: int | None = None) -> None:
        if self._started:
            return
        self._started = True
        self.status = self._start["status"]
        headers = [
            (name, value)
            for name, value in self._start.get("headers", ())
            if name.lower() not in (b"content-length", b"x-request-id")
        ]
        headers.append((b"x-request-id", self._call.request_id.encode()))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({**self._start, "headers": headers})


def _data_of(event: bytes) -> bytes | None:
    """The data of an event of the library's, which is always one line; None: it has none."""
    for line in event.split(b"\n"):
        if line.startswith(b"data: "):
            return line[6:]
    return None


def _event(found: dict[str, Any], protocol: Protocol) -> bytes:
    data = b"data: " + json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    name = b""
    if protocol is Protocol.ANTHROPIC:
        name = b"event: " + str(found["type"]).encode() + b"\n"
    return name + data + b"\n\n"

"""Drives an ASGI application by hand: a client that leaves while it is being answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any


async def drive(
    app: Any,
    path: str,
    body: Any,
    key: str,
    *,
    leave_after: int = 0,
    when: float = 30.0,
) -> list[Any]:
    """Send a request; leave after so many body messages (0: none), or after ``when`` seconds.

    Returns what was sent to the client until then.
    """
    data = json.dumps(body).encode()
    got: list[Any] = []
    gone = asyncio.Event()
    asked = False

    async def receive() -> Any:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": data, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)
        bodies = [m for m in got if m["type"] == "http.response.body"]
        if leave_after and len(bodies) >= leave_after:
            gone.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9000),
        "headers": [(b"content-type", b"application/json"), (b"authorization", b"Bearer " +
                     key.encode()), (b"host", b"gateway")],
    }  # fmt: skip
    timer = asyncio.get_running_loop().call_later(when, gone.set)
    try:
        await asyncio.wait_for(app(scope, receive, send), 20)
    finally:
        timer.cancel()
    return got


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Fail unless it becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)

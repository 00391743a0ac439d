"""Reads a request's body: never more than allowed, and strictly JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deepseek_flash.gateway.errors import GatewayError, invalid

SECONDS = 60.0  # for all of a body to come

Receive = Callable[[], Awaitable[Any]]


class Gone(Exception):
    """The client left while it sent its request."""


async def read(receive: Receive, headers: Mapping[str, str], most_bytes: int) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        GatewayError: it is too large, too slow, or no JSON object.
        Gone: there is nobody to answer to.
    """
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise GatewayError(415, "content-type must be application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise GatewayError(415, "content-encoding is not supported")
    if headers.get("content-length", "0").isdigit():
        _check_size(int(headers.get("content-length", "0")), most_bytes)
    try:
        async with asyncio.timeout(SECONDS):
            data = await _all_of(receive, most_bytes)
    except TimeoutError:
        raise GatewayError(408, f"the body did not come within {SECONDS:.0f} s") from None
    return parse(data)


async def _all_of(receive: Receive, most_bytes: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        _check_size(size, most_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise GatewayError(413, f"the body is larger than {most_bytes} bytes")


def parse(data: bytes) -> dict[str, Any]:
    """JSON without NaN, without a key that is given twice, without half a character."""
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        raise invalid(None, "the body is not valid JSON: it is not UTF-8") from None
    except RecursionError:
        raise invalid(None, "the body is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise invalid(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(None, "the body must be a JSON object")
    return found


def dump(body: dict[str, Any]) -> bytes:
    """The body that the library gets.

    Raises:
        GatewayError: a text in it is no Unicode (a lone surrogate).
    """
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise invalid(None, "a text is not valid Unicode: it has a lone surrogate") from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is given twice")
    return found


def _no_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")

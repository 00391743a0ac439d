"""The library's Anthropic answers as clients need them.

Each function takes one JSON object and returns those to send in its place.
"""

from __future__ import annotations

from typing import Any

from deepseek_flash.gateway.call import Call

Event = dict[str, Any]


def message_body(body: Event, call: Call) -> Event:
    """A whole message."""
    body["id"] = _message_id(body.get("id"))
    body.setdefault("stop_sequence", None)
    body["usage"] = _usage(body.get("usage"), call)
    for block in body.get("content", ()):
        if block.get("type") == "tool_use":
            block["id"] = _tool_id(block.get("id"))
            block.setdefault("input", {})
    return body


class MessageEvents:
    """The events of one streamed message."""

    def __init__(self) -> None:
        self._tool_index: int | None = None  # of the open block, while no argument came yet

    def __call__(self, event: Event, call: Call) -> list[Event]:
        kind = event.get("type")
        if kind == "message_start":
            message = event["message"]
            message["id"] = _message_id(message.get("id"))
            message["usage"] = _usage(message.get("usage"), call)
        elif kind == "message_delta":
            event["usage"] = _usage(event.get("usage"), call)
        elif kind == "content_block_start":
            block = event["content_block"]
            if block.get("type") == "tool_use":
                block["id"] = _tool_id(block.get("id"))
                block.setdefault("input", {})
                self._tool_index = event["index"]
        elif kind == "content_block_delta":
            self._tool_index = None
        elif kind == "content_block_stop" and self._tool_index is not None:
            # A call without arguments: clients parse what they were sent, and that was nothing.
            delta = {"type": "input_json_delta", "partial_json": "{}"}
            index, self._tool_index = self._tool_index, None
            return [{"type": "content_block_delta", "index": index, "delta": delta}, event]
        return [event]


def _usage(found: Event | None, call: Call) -> Event:
    """Never null, with all counters. The same from the first event to the last, where the prompt
    is concerned: the library tells what was cached at the end only. One token at least counts as
    new: clients take an input of none for a broken answer."""
    found = found or {}
    told = found.get("cache_read_input_tokens")
    prompt = found.get("input_tokens", 0) + (told or 0)
    cached = max(0, min(call.cached_tokens or 0, prompt - 1))
    return {
        "input_tokens": prompt - cached,
        "output_tokens": found.get("output_tokens", 0),
        "cache_creation_input_tokens": found.get("cache_creation_input_tokens") or 0,
        "cache_read_input_tokens": cached,
    }


def _message_id(found: Any) -> str:
    return "msg_" + str(found or "").removeprefix("chatcmpl-")


def _tool_id(found: Any) -> str:
    return "toolu_" + str(found or "").removeprefix("chatcmpl-tool-").removeprefix("call_")

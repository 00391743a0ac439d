"""The library's OpenAI answers as clients need them: what is not quite right on the wire is mended.

Each function takes one JSON object and returns those to send in its place.
"""

from __future__ import annotations

from typing import Any

from deepseek_flash.gateway.call import Call

Event = dict[str, Any]


def chat_body(body: Event, call: Call) -> Event:
    """A whole chat answer."""
    for choice in body.get("choices", ()):
        message = choice["message"]
        _reasoning(message)
        if message.get("content") is None and not message.get("tool_calls"):
            message["content"] = ""  # all of it was reasoning
        for name in ("audio", "function_call", "annotations", "refusal"):
            if message.get(name) is None:
                message.pop(name, None)
    return _plain(body, call)


def completion_body(body: Event, call: Call) -> Event:
    """A whole answer to a raw prompt."""
    return _plain(body, call)


def chat_event(event: Event, call: Call) -> list[Event]:
    """A chunk of a chat. The last text and the finish reason come apart: some readers skip the
    text of a chunk that ends, others the reason of one that has text."""
    choice = _only_choice(event, call)
    if choice is None:
        return [event]
    delta = choice["delta"]
    _reasoning(delta)
    _tool_deltas(delta)
    telling = {key: value for key, value in delta.items() if value not in (None, "", [])}
    if "role" in delta:
        return [event]  # the first, with an empty text
    choice["delta"] = telling
    has_more = choice.get("logprobs") or choice.get("token_ids")
    if choice.get("finish_reason") is None:
        return [event] if telling or has_more else []
    if not telling and not has_more:
        return [event]
    last = {**event, "choices": [{**choice, "delta": {}, "logprobs": None}]}
    return _apart(event, last)


def completion_event(event: Event, call: Call) -> list[Event]:
    """A chunk of an answer to a raw prompt."""
    choice = _only_choice(event, call)
    if choice is None:
        return [event]
    has_more = choice.get("text") or choice.get("logprobs") or choice.get("token_ids")
    if choice["finish_reason"] is None:
        return [event] if has_more else []
    if not has_more:
        return [event]
    last = {**event, "choices": [{**choice, "text": "", "logprobs": None}]}
    return _apart(event, last)


def _only_choice(event: Event, call: Call) -> Event | None:
    """The choice of a chunk, without what says nothing; None: it has none, but usage."""
    usage(event.get("usage"), call)
    for name in ("prompt_token_ids", "prompt_text"):
        if event.get(name) is None:
            event.pop(name, None)
    if not event.get("choices"):
        return None
    choice: Event = event["choices"][0]
    for name in ("token_ids", "prompt_token_ids", "stop_reason"):
        if choice.get(name) is None:
            choice.pop(name, None)
    choice.setdefault("finish_reason", None)
    return choice


def _apart(event: Event, last: Event) -> list[Event]:
    """A chunk with text and finish reason as two: ``last`` is the second."""
    last["choices"][0].pop("token_ids", None)
    choice = event["choices"][0]
    choice["finish_reason"] = None
    choice.pop("stop_reason", None)
    event.pop("system_fingerprint", None)
    return [event, last]


def usage(found: Event | None, call: Call) -> None:
    """Cache counters under both names, or under none; reasoning that the library overlooked."""
    if not found:
        return
    made = found.get("completion_tokens_details")
    if made and not made.get("reasoning_tokens"):
        made["reasoning_tokens"] = call.reasoning_tokens
    details = found.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if cached is None:
        return
    details["cached_tokens"] = cached = max(0, min(cached, found["prompt_tokens"]))
    found["prompt_cache_hit_tokens"] = cached
    found["prompt_cache_miss_tokens"] = found["prompt_tokens"] - cached


def _plain(body: Event, call: Call) -> Event:
    """Without the library's own fields that were not asked for."""
    usage(body.get("usage"), call)
    for name in ("prompt_logprobs", "kv_transfer_params", "ec_transfer_params", "metrics",
                 "prompt_token_ids", "prompt_text", "service_tier"):  # fmt: skip
        if body.get(name) is None:
            body.pop(name, None)
    for choice in body.get("choices", ()):
        for name in ("routed_experts", "token_ids", "prompt_logprobs", "prompt_token_ids"):
            if choice.get(name) is None:
                choice.pop(name, None)
    return body


def _reasoning(message: Event) -> None:
    """By DeepSeek's name for it."""
    if "reasoning" in message:
        reasoning = message.pop("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning


def _tool_deltas(delta: Event) -> None:
    """Clients keep what a key last said, so a key that says nothing must not be there."""
    for call in delta.get("tool_calls") or ():
        for name in ("id", "type"):
            if not call.get(name):
                call.pop(name, None)
        function = call.get("function")
        if isinstance(function, dict):
            if not function.get("name"):
                function.pop("name", None)
            function["arguments"] = function.get("arguments") or ""  # clients add them up

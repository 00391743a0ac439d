"""OpenAI requests: checked, and brought to the form that the library takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepseek_flash.dspark.sampling import GREEDY_BELOW
from deepseek_flash.gateway.call import Call
from deepseek_flash.gateway.conversation import normalise
from deepseek_flash.gateway.errors import invalid
from deepseek_flash.gateway.rules import (
    AROUND,
    MOST_SCHEMA_CHARACTERS,
    Rules,
    check_sequences,
    check_types,
    refuse,
    stops,
)

LONGEST_NAME = 512  # bytes: of session_id, for the ensemble


def prepare_chat(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/v1/chat/completions``."""
    refuse(body)
    check_types(body)
    rules.model(body)
    rules.max_tokens(body, "max_tokens", "max_completion_tokens")
    check_sequences(1, body.get("n", 1))
    if body.pop("echo", False):
        raise invalid("echo", "not supported in chats")
    _around(body, call)
    _structured(body)
    body["messages"] = normalise(body.get("messages"), rules)
    _tools(body, rules)
    thinking(body)
    for name in ("chat_template_kwargs", "documents"):
        if name in body:
            body[name] = rules.mask(body[name])


def prepare_completion(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/v1/completions``. Special tokens in a prompt count as such: fill-in-the-middle."""
    refuse(body)
    check_types(body)
    rules.model(body)
    rules.max_tokens(body, "max_tokens")
    logprobs = body.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
        raise invalid("logprobs", "must be an integer")
    if body.get("echo") and logprobs is not None:
        raise invalid("logprobs", "not supported together with echo")
    prompts = _prompts(body.get("prompt"))
    check_sequences(len(prompts), body.get("n", 1))
    prompt = body["prompt"]
    if isinstance(prompt, str):
        body["prompt"] = rules.control.clean(prompt)
    elif isinstance(prompt[0], str):
        body["prompt"] = [rules.control.clean(text) for text in prompt]
    _around(body, call)
    _structured(body)


def prepare_tokenize(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/tokenize``: of a prompt or of messages, exactly as they would be asked."""
    call.counting = True
    refuse(body)
    check_types(body)
    rules.model(body)
    if "messages" in body:
        body["messages"] = normalise(body["messages"], rules)
        _tools(body, rules)
        thinking(body)
    elif isinstance(body.get("prompt"), str):
        body["prompt"] = rules.control.clean(body["prompt"])


def prepare_detokenize(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/detokenize``."""
    call.counting = True
    refuse(body)
    rules.model(body)


def thinking(body: dict[str, Any]) -> None:
    """DeepSeek's ``thinking`` as the switches of chat templates; its own default where absent."""
    asked = body.pop("thinking", None)
    if asked is None:
        return
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", "must be enabled, disabled or adaptive")
    if kind != "adaptive":
        switch_thinking(body, kind == "enabled")


def switch_thinking(body: dict[str, Any], on: bool) -> None:
    given = body.get("chat_template_kwargs")
    given = given if isinstance(given, dict) else {}
    body["chat_template_kwargs"] = {"thinking": on, "enable_thinking": on, **given}


def session(call: Call, name: Any) -> None:
    """Take a conversation's name, if it is one."""
    if isinstance(name, str) and 0 < len(name.encode(errors="replace")) <= LONGEST_NAME:
        call.session_id = call.session_id or name


def _around(body: dict[str, Any], call: Call) -> None:
    """What the ensemble judges, or the library would judge by a stricter limit of its own."""
    for name in AROUND:
        if name in body:
            call.sampling[name] = body.pop(name)
    if body.get("n", 1) > 1 and body.get("temperature", 1) < GREEDY_BELOW:
        # The library refuses several greedy choices; the ensemble tells one several times.
        call.sampling["temperature"] = body.pop("temperature")
    if "stop" in body:
        call.sampling["stop"] = stops("stop", body.pop("stop"))
    if "cache_salt" in body:
        salt = body.pop("cache_salt")
        if not isinstance(salt, str):
            raise invalid("cache_salt", "must be a string")
        call.cache_salt = salt
    session(call, body.pop("session_id", None))


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a completion request, of which none may be empty."""
    if isinstance(prompt, str):
        found: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        tokens = all(isinstance(item, int) for item in prompt)
        found = [prompt] if tokens else prompt
    else:
        found = []
    if not found or any(not isinstance(item, (str, list)) or not item for item in found):
        raise invalid("prompt", "must be a non-empty text or list of token ids, or a list of them")
    if len({type(item) for item in found}) > 1:
        raise invalid("prompt", "must be all texts or all lists of token ids")
    return found


def _tools(body: dict[str, Any], rules: Rules) -> None:
    tools = body.get("tools")
    if tools == []:
        del body["tools"]
        tools = None
    if tools is None:
        if body.get("tool_choice") in ("auto", "none"):
            del body["tool_choice"]
        return
    if not isinstance(tools, list) or any(
        not isinstance(tool, dict) or not isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise invalid("tools", "must be a list of functions")
    functions = rules.functions((t["function"] for t in tools), body.get("tool_choice", "auto"))
    body["tools"] = [
        {**tool, "function": function} for tool, function in zip(tools, functions, strict=True)
    ]


def _structured(body: dict[str, Any]) -> None:
    for name in ("response_format", "structured_outputs"):
        if name not in body:
            continue
        if not isinstance(body[name], dict):
            raise invalid(name, "must be an object")
        try:
            size = len(json.dumps(body[name]))
        except RecursionError:
            raise invalid(name, "nested too deeply") from None
        if size > MOST_SCHEMA_CHARACTERS:
            raise invalid(name, f"longer than {MOST_SCHEMA_CHARACTERS} characters")

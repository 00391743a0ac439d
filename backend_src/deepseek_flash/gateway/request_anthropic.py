"""Anthropic requests: checked, and brought to the form that the library takes."""

from __future__ import annotations

import logging
import re
from typing import Any

from deepseek_flash.dspark.prompt import REASONING
from deepseek_flash.gateway.call import Call
from deepseek_flash.gateway.conversation import system_text
from deepseek_flash.gateway.errors import invalid
from deepseek_flash.gateway.request_openai import session, switch_thinking
from deepseek_flash.gateway.rules import AROUND, MOST_MESSAGES, Rules, check_types, refuse, stops

log = logging.getLogger("deepseek_flash")

# What clients send in a message's content; blocks of other types are left out.
_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
_ROLES = ("user", "assistant", "system")
_SESSION = re.compile(r"session_([\w-]+)$")  # how Claude Code's user_id ends


def prepare_messages(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/v1/messages``."""
    _prepare(body, call, rules)
    if "max_tokens" not in body:
        raise invalid("max_tokens", "missing")
    rules.max_tokens(body, "max_tokens")
    for name in AROUND:
        if name in body:
            call.sampling[name] = body.pop(name)
    if "stop_sequences" in body:
        call.sampling["stop"] = stops("stop_sequences", body.pop("stop_sequences"))
    salt = body.pop("cache_salt", "")
    if not isinstance(salt, str):
        raise invalid("cache_salt", "must be a string")
    call.cache_salt = salt
    user = body.get("metadata")
    found = _SESSION.search(str(user.get("user_id", ""))) if isinstance(user, dict) else None
    session(call, found.group(1) if found else None)


def prepare_count(body: dict[str, Any], call: Call, rules: Rules) -> None:
    """``/v1/messages/count_tokens``: the same prompt, only counted."""
    call.counting = True
    _prepare(body, call, rules)


def _prepare(body: dict[str, Any], call: Call, rules: Rules) -> None:
    refuse(body)
    check_types(body)
    rules.model(body)
    _conversation(body, rules)
    _tools(body, rules)
    _thinking(body)
    body.pop("context_management", None)


def _conversation(body: dict[str, Any], rules: Rules) -> None:
    """System texts, wherever they stand, become the one leading prompt; the rest is masked."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a non-empty list")
    if len(messages) > MOST_MESSAGES:
        raise invalid("messages", f"must be at most {MOST_MESSAGES}")
    system = _system_texts(body.pop("system", ""), rules)
    others = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise invalid(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
        blocks = _blocks(f"{name}.content", message.get("content"))
        if message["role"] == "system":
            system.append("".join(block.get("text") or "" for block in blocks))
        else:
            keep = REASONING if message["role"] == "assistant" else ()
            content = [_masked_block(block, keep, rules) for block in blocks]
            others.append({"role": message["role"], "content": content})
    if not others:
        raise invalid("messages", "must have a message of the user")
    body["messages"] = others
    if text := system_text(system, rules):
        body["system"] = text


def _system_texts(system: Any, rules: Rules) -> list[str]:
    """The ``system`` field as the head of the list of all system texts.

    Blocks are joined as the library does it, the volatile first one apart: it is a line of its own
    without saying so by a line end.
    """
    if isinstance(system, str):
        return [system]
    if not isinstance(system, list) or any(not isinstance(block, dict) for block in system):
        raise invalid("system", "must be a string or a list of text blocks")
    texts = [str(block.get("text") or "") for block in system if block.get("type") == "text"]
    if texts:
        texts[0] = rules.volatile.strip(texts[0])
    return ["".join(texts)]


def _blocks(name: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or any(not isinstance(block, dict) for block in content):
        raise invalid(name, "must be a string or a list of blocks")
    known = []
    for block in content:
        if block.get("type") in _BLOCKS:
            known.append({key: value for key, value in block.items() if key != "cache_control"})
        else:
            log.warning("a content block of type %.40r was left out", block.get("type"))
    return known


def _masked_block(block: dict[str, Any], keep: Any, rules: Rules) -> dict[str, Any]:
    if block["type"] in ("text", "thinking"):
        key = block["type"]
        text = block.get(key)
        return {**block, key: rules.control.mask(text, keep) if isinstance(text, str) else text}
    if block["type"] == "image":
        return block
    names = ("content", "name", "input")
    return {key: rules.mask(value) if key in names else value for key, value in block.items()}


def _tools(body: dict[str, Any], rules: Rules) -> None:
    tools = body.pop("tools", None) or []
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise invalid("tools", "must be a list of objects")
    kept = []
    for tool in tools:
        if "input_schema" in tool:
            kept.append({key: value for key, value in tool.items() if key not in _NOT_OF_A_TOOL})
        else:  # one that Anthropic's own servers would run
            log.warning("a tool of type %.40r was left out", tool.get("type"))
    if kept:
        choice = body.get("tool_choice")
        kind = choice.get("type", "auto") if isinstance(choice, dict) else "auto"
        body["tools"] = rules.functions(kept, kind)
    elif "tool_choice" in body:
        del body["tool_choice"]


_NOT_OF_A_TOOL = ("cache_control", "type", "defer_loading")


def _thinking(body: dict[str, Any]) -> None:
    """A budget is a hint: max_tokens is what caps an answer, and with a budget vLLM's engine would
    need another configuration, and DSpark could not guess."""
    asked = body.pop("thinking", None)
    if asked is None:
        return
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", "must be enabled, disabled or adaptive")
    if kind != "adaptive":
        switch_thinking(body, kind == "enabled")

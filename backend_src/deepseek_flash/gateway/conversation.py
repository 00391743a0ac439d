"""A chat's messages in one form, whatever client sent them and through which door."""

from __future__ import annotations

import json
from typing import Any

from deepseek_flash.dspark.prompt import REASONING, ROLES
from deepseek_flash.gateway.errors import invalid
from deepseek_flash.gateway.rules import MOST_MESSAGES, Rules

BETWEEN_SYSTEM_TEXTS = "\n\n"

Message = dict[str, Any]


def normalise(messages: Any, rules: Rules) -> list[Message]:
    """OpenAI messages, checked.

    All system texts become the leading message, in order: some templates refuse them elsewhere,
    and others weld them to what the user said. Volatile lines go, control tokens are masked.

    Raises:
        GatewayError: naming the message and what is wrong with it.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a non-empty list")
    if len(messages) > MOST_MESSAGES:
        raise invalid("messages", f"must be at most {MOST_MESSAGES}")
    system: list[str] = []
    others: list[Message] = []
    for index, message in enumerate(messages):
        checked = _message(f"messages[{index}]", message)
        if checked["role"] != "system":
            others.append(checked)
        elif not isinstance(checked["content"], str):
            raise invalid(f"messages[{index}].content", "a system message has text only")
        else:
            system.append(checked["content"])
    text = system_text(system, rules)
    leading = [{"role": "system", "content": text}] if text else []
    return leading + [_masked(message, rules) for message in others]


def system_text(texts: list[str], rules: Rules) -> str:
    """The one system prompt of a chat, as the library gets it."""
    if texts:
        texts = [rules.volatile.strip(texts[0]), *texts[1:]]
    return rules.control.mask(BETWEEN_SYSTEM_TEXTS.join(text for text in texts if text))


def _message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise invalid(name, "must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    message = {key: value for key, value in message.items() if value is not None}
    message["role"] = "system" if role == "developer" else role
    calls = message.get("tool_calls")
    if calls == []:
        del message["tool_calls"]
    content = _content(f"{name}.content", message.get("content"))
    if content is None:
        if role != "assistant":
            raise invalid(f"{name}.content", "missing")
        # Templates tell a turn of calls alone by its having no content at all.
        content = None if calls else ""
    return {**message, "content": content}


def _content(name: str, content: Any) -> Any:
    """Text, the text of text parts, or parts of which some are none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(name, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise invalid(f"{name}[{index}]", "must be an object with a type")
        elif part.get("type") == "text":
            if not isinstance(part.get("text"), str):
                raise invalid(f"{name}[{index}].text", "must be a string")
            texts.append(part["text"])
        else:
            return content  # the library says what it thinks of an image
    return "".join(texts)


def _masked(message: Message, rules: Rules) -> Message:
    # An assistant's own reasoning marks stay: templates look for them.
    keep = REASONING if message["role"] == "assistant" else ()
    masked = dict(message)
    for key in ("content", "reasoning_content", "reasoning", "name"):
        value = message.get(key)
        masked_value = (
            rules.control.mask(value, keep) if isinstance(value, str) else rules.mask(value)
        )
        if key in message:
            masked[key] = masked_value
    if "tool_calls" in message:
        masked["tool_calls"] = rules.mask(_with_plain_arguments(message["tool_calls"]))
    return masked


def _with_plain_arguments(calls: Any) -> Any:
    """Arguments are JSON in a text, in which a control token may hide as an escape: templates get
    what it means, so that is what must be masked."""
    if not isinstance(calls, list):
        return calls
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str) and "\\" in arguments:
            try:
                meant = json.dumps(json.loads(arguments), ensure_ascii=False)
            except (ValueError, RecursionError):  # the library says so
                meant = arguments
            call = {**call, "function": {**call["function"], "arguments": meant}}
        plain.append(call)
    return plain

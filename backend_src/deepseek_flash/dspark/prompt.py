"""From a client's prompt (text, token ids or messages) to token ids, with the model's tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from deepseek_flash.contract import InvalidField

ROLES = ("system", "developer", "user", "assistant", "tool")

# Part of an assistant's own turns: templates look for them to leave earlier reasoning out.
_REASONING = ("<think>", "</think>")

# Stands for a control token that a user typed. Private-use characters: no template writes them.
_MASK = "\ue0a0{}\ue0a1"
_MASKED = re.compile("\ue0a0(\\d+)\ue0a1")


class Tokenizer(Protocol):
    """What is used of a ``transformers`` fast tokenizer."""

    all_special_tokens: list[str]
    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
    """The checkpoint's tokenizer, by a path or a Hugging Face id."""
    from transformers import AutoTokenizer  # slow to import; unit tests do without

    local = Path(name).is_dir()
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        name,
        revision=None if local else revision,
        trust_remote_code=trust_remote_code,
        local_files_only=local,
    )
    return tokenizer


class PromptEncoder:
    """Tokenises prompts exactly as vLLM does for the same model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        self._added_ids = frozenset(added.values())
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters; bytes count too
        markers = set(tokenizer.all_special_tokens) | set(added)
        longest_first = sorted((m for m in markers if m.strip()), key=len, reverse=True)
        self._markers = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )

    def from_text(self, text: str, most_tokens: int) -> list[int]:
        """Ids of a raw prompt. Special tokens in it count: fill-in-the-middle needs them.

        Raises:
            InvalidField: it cannot have ``most_tokens`` tokens or fewer.
        """
        self._check_length("text_input", text, most_tokens)
        return list(self._tokenizer(text)["input_ids"])

    def from_messages(self, raw: str, most_tokens: int) -> list[int]:
        """Ids of a chat, rendered with the checkpoint's template.

        Control tokens that stand in a message's content stay plain text: nobody forges a turn.

        Raises:
            InvalidField: naming ``messages`` and what is wrong in it.
        """
        if not self._tokenizer.chat_template:
            raise InvalidField("messages", "this model has no chat template; use text_input")
        typed: list[str] = []
        conversation = [self._masked(message, typed) for message in parse_messages(raw)]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes, e.g. on the order of roles
            raise InvalidField("messages", f"refused by the chat template: {error}") from None
        self._check_length("messages", text, most_tokens)
        return self._encode_rendered(text, typed)

    def _check_length(self, name: str, text: str, most_tokens: int) -> None:
        """Refuse what is far too long before the one scheduler spends seconds on its tokens."""
        if len(text) > most_tokens * self._longest_token:
            raise InvalidField(
                name,
                f"this model's maximum context length is {most_tokens} tokens, but the prompt has "
                f"{len(text)} characters, which is more than that many tokens can hold",
            )

    def _masked(self, message: dict[str, Any], typed: list[str]) -> dict[str, Any]:
        if self._markers is None:
            return message

        def mask(match: re.Match[str]) -> str:
            if message["role"] == "assistant" and match.group() in _REASONING:
                return match.group()
            typed.append(match.group())
            return _MASK.format(len(typed) - 1)

        # Foreign mask characters would be taken for ours: a private-use character means nothing.
        content = message["content"].replace("\ue0a0", "\ufffd").replace("\ue0a1", "\ufffd")
        return {**message, "content": self._markers.sub(mask, content)}

    def _encode_rendered(self, text: str, typed: list[str]) -> list[int]:
        if not typed:
            return self._ids(text)
        ids: list[int] = []
        pieces = _MASKED.split(text)  # text, number, text, number, ..., text
        for place, piece in enumerate(pieces):
            plain = place % 2 == 1
            piece = typed[int(piece)] if plain else piece
            if piece:
                ids.extend(self._plain_ids(piece) if plain else self._ids(piece))
        return ids

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])

    def _plain_ids(self, marker: str) -> list[int]:
        """Ids of a typed control token as the text that it is."""
        ids = self._ids(marker, split_special_tokens=True)
        if self._added_ids.isdisjoint(ids):
            return ids
        # Added, but not as special (DeepSeek's <think>): the tokenizer splits it on no account.
        return [token for character in marker for token in self._ids(character)]


def parse_messages(raw: str) -> list[dict[str, Any]]:
    """The JSON of ``messages``: a list of ``{"role", "content"}``, content text or text parts.

    Raises:
        InvalidField: naming ``messages`` and the index.
    """
    try:
        messages = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidField("messages", f"not valid JSON ({error})") from None
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", "must be a non-empty list")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidField(name, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidField(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidField(f"{name}.content", "must be a string or a list of text parts")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise InvalidField(f"{name}.content", "must be valid Unicode") from None
    unknown = set(message) - {"role", "content", "name"}
    if unknown:
        raise InvalidField(f"{name}.{sorted(unknown)[0]}", "unknown")
    # Templates know "system" only; OpenAI's newer clients call it "developer".
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(name: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise InvalidField(name, 'must be {"type": "text", "text": "..."}')

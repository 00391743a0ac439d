"""From a client's prompt (text, token ids or messages) to token ids, with the model's tokenizer."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_flash.contract import InvalidField
from deepseek_flash.dspark.control_tokens import ControlTokens, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

MOST_TURNS = 8  # the latest user turns, to be located: each costs a rendering of what precedes it

# Part of an assistant's own turns: templates look for them to leave earlier reasoning out.
REASONING = ("<think>", "</think>")

Message = dict[str, Any]  # role and content
Extent = tuple[int, int]  # the characters of a token: begin, end


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and the ascending offsets into them where user turns start."""

    ids: list[int]
    turn_starts: tuple[int, ...] = ()


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
        self._control = ControlTokens(tokenizer)
        self._has_offsets = _has_offsets(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters; bytes count too

    def from_text(self, text: str, most_tokens: int) -> list[int]:
        """Ids of a raw prompt. Special tokens in it count: fill-in-the-middle needs them.

        Raises:
            InvalidField: it cannot have ``most_tokens`` tokens or fewer.
        """
        self._check_length("text_input", text, most_tokens)
        return list(self._tokenizer(text)["input_ids"])

    def from_messages(self, raw: str, most_tokens: int) -> Prompt:
        """Ids of a chat, rendered with the checkpoint's template, and its last user turns' starts.

        A turn starts with its role header; a token across that border belongs to what precedes.
        Turns that cannot be located are left out.

        Control tokens that stand in a message's content stay plain text: nobody forges a turn.

        Raises:
            InvalidField: naming ``messages`` and what is wrong in it.
        """
        if not self._tokenizer.chat_template:
            raise InvalidField("messages", "this model has no chat template; use text_input")
        conversation = [self._masked(message) for message in parse_messages(raw)]
        try:
            text = self._rendered(conversation, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, e.g. on the order of roles
            raise InvalidField("messages", f"refused by the chat template: {error}") from None
        self._check_length("messages", text, most_tokens)
        borders = self._turn_borders(conversation, text) if self._has_offsets else ()
        return self._encode_rendered(text, borders)

    def _check_length(self, name: str, text: str, most_tokens: int) -> None:
        """Refuse what is far too long before the one scheduler spends seconds on its tokens."""
        if len(text) > most_tokens * self._longest_token:
            raise InvalidField(
                name,
                f"this model's maximum context length is {most_tokens} tokens, but the prompt has "
                f"{len(text)} characters, which is more than that many tokens can hold",
            )

    def _masked(self, message: Message) -> Message:
        keep = REASONING if message["role"] == "assistant" else ()
        return {**message, "content": self._control.mask(message["content"], keep)}

    def _rendered(self, conversation: list[Message], add_generation_prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _turn_borders(self, conversation: list[Message], text: str) -> list[int]:
        """Where in ``text`` the template begins to write user messages, as far as it can be told.

        Templates may write a chat's beginning otherwise than the beginning of the chat (leave
        earlier reasoning out, gather system messages) or refuse it: no border there.
        """
        users = [index for index, message in enumerate(conversation) if message["role"] == "user"]
        borders = []
        for index in users[-MOST_TURNS:]:
            try:
                if index == 0:
                    border, written = self._first_turn(conversation[0])
                else:
                    written = self._rendered(conversation[:index])
                    border = len(written)
            except Exception:  # a template that renders the chat may refuse its beginning
                continue
            if text.startswith(written):
                borders.append(border)
        return borders

    def _first_turn(self, user: Message) -> tuple[int, str]:
        """Where a chat's first message begins, and the chat up to its end.

        What precedes it (BOS, a default system prompt) cannot be rendered alone: transformers
        refuses an empty chat. So the message is written twice, and the second shows its extent.
        """
        chat = [user, {"role": "assistant", "content": ""}]  # templates may want roles to alternate
        earlier = self._rendered(chat)
        turn = self._rendered([*chat, user]).removeprefix(earlier)
        border = earlier.index(turn)  # ValueError: written otherwise the second time
        return border, earlier[: border + len(turn)]

    def _encode_rendered(self, text: str, borders: Sequence[int]) -> Prompt:
        ids: list[int] = []
        offsets: list[Extent]
        starts: set[int] = set()
        place = 0
        for piece, marker in self._control.pieces(text):
            length, offsets = len(piece), []
            if marker is not None:
                more = self._control.plain_ids(marker)
            elif borders:
                more, offsets = self._located_ids(piece)
            else:
                more = self._ids(piece)
            inside = (border - place for border in borders if place <= border < place + length)
            starts.update(len(ids) + _first_token(offsets, border) for border in inside)
            ids += more
            place += length
        return Prompt(ids, tuple(sorted(starts - {len(ids)})))

    def _located_ids(self, text: str) -> tuple[list[int], list[Extent]]:
        """Ids of ``text``, and the extent of each token in it."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), encoded["offset_mapping"]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _has_offsets(tokenizer: Tokenizer) -> bool:
    try:
        return "offset_mapping" in tokenizer("a", return_offsets_mapping=True)
    except (NotImplementedError, TypeError, ValueError):  # what slow tokenizers raise varies
        return False


def _first_token(offsets: list[Extent], border: int) -> int:
    """The first token that begins at the character ``border`` or later."""
    index = bisect_left(offsets, (border,))
    while index < len(offsets) and offsets[index][0] == offsets[index][1]:
        index += 1  # trimmed space has no extent: it goes with the token before it
    return index


def parse_messages(raw: str) -> list[Message]:
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


def _message(index: int, message: Any) -> Message:
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

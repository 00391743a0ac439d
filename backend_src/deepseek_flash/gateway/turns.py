"""Where the user's turns begin in a rendered prompt: the cache's windows are cut there."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Sequence
from typing import Any

from deepseek_flash.dspark.control_tokens import ControlTokens
from deepseek_flash.dspark.prompt import MOST_TURNS

log = logging.getLogger("deepseek_flash")


class TurnFinder:
    """Knows a chat template's header of a user's turn by its token ids.

    A user cannot forge one: control tokens in contents are plain text.
    """

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self._header = _header(tokenizer, control)
        if not self._header:
            log.info("the chat template shows no header of user turns: no windows")

    def starts(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ascending offsets of the last user turns."""
        header, ids = self._header, list(token_ids)
        if not header:
            return ()
        found: list[int] = []
        place = -1
        while True:
            try:
                place = ids.index(header[0], place + 1)
            except ValueError:
                return tuple(found[-MOST_TURNS:])
            if ids[place : place + len(header)] == header:
                found.append(place)


def _header(tokenizer: Any, control: ControlTokens) -> list[int]:
    chat = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]
    try:
        before, after = (
            tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=False)
            for part in (chat[:2], chat)
        )
        text = _header_text(before, after, control)
    except Exception:  # a template raises what it likes; windows are a help, not a need
        return []
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # The last token may grow into what follows it, unless it is all there is.
    return ids[:-1] if len(ids) > 1 else ids


def _header_text(before: str, after: str, control: ControlTokens) -> str:
    """What a template writes in front of a user's text."""
    second = after.index("second")
    if after.startswith(before):
        return after[len(before) : second]
    # It writes an earlier answer otherwise than the last one: what both turns begin with, from
    # their last control token on.
    first = after.index("first")
    turned = [after[:first][::-1], after[:second][::-1]]
    common = os.path.commonprefix(turned)[::-1]  # noqa: RUF071  # character by character is meant
    return common[control.last_in(common) :]

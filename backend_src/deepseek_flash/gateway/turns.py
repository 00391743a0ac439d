"""Where the user's turns begin in a rendered prompt: the cache's windows are cut there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from deepseek_flash.dspark.prompt import MOST_TURNS

log = logging.getLogger("deepseek_flash")


class TurnFinder:
    """Knows a chat template's header of a user's turn by its token ids.

    A user cannot forge one: control tokens in contents are plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._header = _header(tokenizer)
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


def _header(tokenizer: Any) -> list[int]:
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
        turn = after.removeprefix(before)
        text = turn[: turn.index("second")]
    except Exception:  # a template raises what it likes; windows are a help, not a need
        return []
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # The last token may grow into what follows it, unless it is all there is.
    return ids[:-1] if len(ids) > 1 else ids

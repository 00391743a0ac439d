"""Control tokens that somebody typed into a chat stay the text that they are: nobody forges a turn.

A template writes contents and control tokens into one text, which is tokenised as a whole. So each
typed marker is masked before the template sees it, and tokenised as plain text behind it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Protocol

# Private-use characters: no template writes them, and in a client's text they mean nothing.
_MASK = "\ue0a0{}\ue0a1"
_MASKED = re.compile("\ue0a0(\\d+)\ue0a1")
_FOREIGN = str.maketrans({"\ue0a0": "\ufffd", "\ue0a1": "\ufffd"})


class Tokenizer(Protocol):
    """What is used of a ``transformers`` fast tokenizer."""

    all_special_tokens: list[str]
    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def get_vocab(self) -> dict[str, int]: ...


class ControlTokens:
    """A tokenizer's markers: its special tokens, and what was added to its vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        self._added_ids = frozenset(added.values())
        markers = {m for m in (*tokenizer.all_special_tokens, *added) if m.strip()}
        self._markers = sorted(markers, key=lambda marker: (-len(marker), marker))
        self._numbers = {marker: number for number, marker in enumerate(self._markers)}
        self._pattern = re.compile(_pattern_of(self._markers)) if markers else None

    def mask(self, text: str, keep: Collection[str] = ()) -> str:
        """``text`` with every marker masked, but those to ``keep``."""
        if self._pattern is None:
            return text

        def masked(match: re.Match[str]) -> str:
            marker = match.group()
            return marker if marker in keep else _MASK.format(self._numbers[marker])

        return self._pattern.sub(masked, self.clean(text))

    def clean(self, text: str) -> str:
        """``text`` without foreign mask characters, which would be taken for ours."""
        return text if self._pattern is None else text.translate(_FOREIGN)

    def masks(self, text: str) -> bool:
        """Whether there are masks in it."""
        return self._pattern is not None and "\ue0a0" in text

    def pieces(self, text: str) -> Iterator[tuple[str, str | None]]:
        """``text`` cut at its masks: each piece as it stands there, and the marker of a mask."""
        if not self.masks(text):
            if text:
                yield text, None
            return
        # text, number, text, number, ..., text
        for index, piece in enumerate(_MASKED.split(text)):
            if index % 2 == 1:
                yield _MASK.format(piece), self._markers[int(piece)]
            elif piece:
                yield piece, None

    def last_in(self, text: str) -> int:
        """Where the last marker in ``text`` begins; its end if there is none."""
        found = [match.start() for match in self._pattern.finditer(text)] if self._pattern else []
        return found[-1] if found else len(text)

    def plain_ids(self, marker: str) -> list[int]:
        """Ids of a typed marker as the text that it is."""
        ids = self._ids(marker, split_special_tokens=True)
        if self._added_ids.isdisjoint(ids):
            return ids
        # Added, but not as special (DeepSeek's <think>): the tokenizer splits it on no account.
        return [token for character in marker for token in self._ids(character)]

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])


def _pattern_of(markers: Collection[str]) -> str:
    """A pattern for the longest of some texts. DeepSeek's tokenizers have 800 markers, and Python
    tries alternatives one by one; so each character is an alternative of its own only once.
    """
    ends, rests = False, dict[str, list[str]]()
    for marker in markers:
        if marker:
            rests.setdefault(marker[0], []).append(marker[1:])
        else:
            ends = True
    parts = [re.escape(first) + _pattern_of(rest) for first, rest in sorted(rests.items())]
    if not parts:
        return ""
    pattern = parts[0] if len(parts) == 1 and not ends else f"(?:{'|'.join(parts)})"
    return pattern + "?" if ends else pattern

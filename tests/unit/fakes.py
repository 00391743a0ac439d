"""Stand-ins that several unit tests share."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from deepseek_flash.contract import EngineFacts, RequestPlan, Returns, Sampling

FIRST_CHARACTER = 10
VOCABULARY = FIRST_CHARACTER + 0x110000
CONTEXT = 64
FACTS = EngineFacts(namespace="model", model="fake", max_model_len=CONTEXT, vocab_size=VOCABULARY)

BOS = 0
SPECIAL = {"<bos>": BOS, "<|user|>": 1, "<|assistant|>": 2, "<|system|>": 3, "<|tool|>": 4}
# Added, but not as special: DeepSeek's tokenizers hold <think> like this. Spaces are no marker.
ADDED = {"<think>": 5, "    ": 6}
CONTROL_IDS = {*SPECIAL.values(), ADDED["<think>"]}


class FakeTokenizer:
    """One token a character, behaving like a ``transformers`` fast tokenizer otherwise.

    Such a tokenizer's ``split_special_tokens`` splits special tokens, but no other added ones.
    """

    def __init__(self, chat_template: Any = "scripted", markers: bool = True) -> None:
        self.chat_template = chat_template
        self._special = SPECIAL if markers else {}
        self._added = ADDED if markers else {}
        self.all_special_tokens = list(self._special)

    def get_added_vocab(self) -> dict[str, int]:
        return {**self._special, **self._added}

    def get_vocab(self) -> dict[str, int]:
        return {"a": FIRST_CHARACTER + ord("a"), **self.get_added_vocab()}

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        return_offsets_mapping: bool = False,
    ) -> dict[str, list[Any]]:
        known = self._added if split_special_tokens else self.get_added_vocab()
        tokens = [(BOS, 0, 0)] if add_special_tokens else []
        place = 0
        for piece in re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]:
            cut = [(known[piece], 0, len(piece))] if piece in known else self.cut(piece)
            tokens += [(token, place + begin, place + end) for token, begin, end in cut]
            place += len(piece)
        encoded = {"input_ids": [token for token, _, _ in tokens]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [(begin, end) for _, begin, end in tokens]
        return encoded

    def cut(self, piece: str) -> list[tuple[int, int, int]]:
        """Id, begin and end of each token of plain text."""
        return [(token, at, at + 1) for at, token in enumerate(characters(piece))]

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if not conversation:
            raise ValueError("Cannot apply chat template to an empty conversation.")
        turns = [self.turn(**message) for message in conversation]
        return "<bos>" + "".join(turns) + "<|assistant|>" * add_generation_prompt

    def turn(self, role: str, content: str) -> str:
        return f"<|{role}|>{content}"


class NoOffsets(FakeTokenizer):
    """A slow tokenizer."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[Any]]:
        if options.get("return_offsets_mapping"):
            raise NotImplementedError("return_offset_mapping is not available")
        return super().__call__(text, **options)


class Bytes(FakeTokenizer):
    """Falls back to bytes: several tokens with the same character's offsets."""

    def cut(self, piece: str) -> list[tuple[int, int, int]]:
        return [
            (FIRST_CHARACTER + byte, at, at + 1)
            for at, character in enumerate(piece)
            for byte in character.encode()
        ]


class Pairs(FakeTokenizer):
    """Two characters a token, over the borders of turns."""

    def cut(self, piece: str) -> list[tuple[int, int, int]]:
        return [(FIRST_CHARACTER, at, min(at + 2, len(piece))) for at in range(0, len(piece), 2)]


class Trimmed(FakeTokenizer):
    """Each message ends with a space, and spaces have no extent (``trim_offsets``)."""

    def cut(self, piece: str) -> list[tuple[int, int, int]]:
        return [(token, at + (piece[at] == " "), end) for token, at, end in super().cut(piece)]

    def turn(self, role: str, content: str) -> str:
        return f"<|{role}|>{content} "


Messages = list[dict[str, str]]


class Rewriting(FakeTokenizer):
    """Its template does something to the messages first."""

    def __init__(self, rewrite: Callable[[Messages], Messages]) -> None:
        super().__init__()
        self.rewrite = rewrite

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return super().apply_chat_template(self.rewrite(conversation), **options)


def default_system(messages: Messages) -> Messages:
    own = [] if messages[0]["role"] == "system" else [{"role": "system", "content": "be"}]
    return own + messages


def alternating(messages: Messages) -> Messages:
    if any(first["role"] == second["role"] for first, second in pairwise(messages)):
        raise RuntimeError("roles must alternate")
    return messages


def system_first(messages: Messages) -> Messages:
    return sorted(messages, key=lambda message: message["role"] != "system")


def no_earlier_reasoning(messages: Messages) -> Messages:
    *history, last = messages
    return [*({**m, "content": m["content"].split("</think>")[-1]} for m in history), last]


def reasoning_closed_at_the_end(messages: Messages) -> Messages:
    *history, last = messages
    if last["role"] == "assistant":
        last = {**last, "content": "</think>" + last["content"]}
    return [*history, last]


def with_a_question(messages: Messages) -> Messages:
    if all(message["role"] != "user" for message in messages):
        raise RuntimeError("no user query")
    return messages


def characters(text: str) -> list[int]:
    return [FIRST_CHARACTER + ord(character) for character in text]


class Clock:
    """In the place of a module's ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def make_plan(**changes: Any) -> RequestPlan:
    values: dict[str, Any] = {
        "plan_id": "plan",
        "slot": 0,
        "generation": 1,
        "namespace": FACTS.namespace,
        "arrival": 0.0,
        "deadline": None,
        "prompt_token_ids": (1, 2, 3),
        "prepended_text": "",
        "stream": False,
        "sampling": Sampling(),
        "returns": Returns(),
        "turn_starts": (),
        "session_id": "",
        "cache_salt": "",
        "cancel_key": "",
        "burst_steps": 3,
        "use_dflash": True,
        "use_dspark": True,
    }
    return RequestPlan(**{**values, **changes})


def shown(value: Any) -> str:
    """A parameter's id: short, whatever it is."""
    try:
        text = ascii(value)
    except ValueError:  # thousands of digits
        text = "huge"
    return text if len(text) < 40 else f"{text[:30]}...{len(text)}"

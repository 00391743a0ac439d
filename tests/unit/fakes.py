"""Stand-ins that several unit tests share."""

from __future__ import annotations

import re
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
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> dict[str, list[int]]:
        known = self._added if split_special_tokens else self.get_added_vocab()
        ids = [BOS] if add_special_tokens else []
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        for piece in pieces:
            ids += [known[piece]] if piece in known else characters(piece)
        return {"input_ids": ids}

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = [f"<|{turn['role']}|>{turn['content']}" for turn in conversation]
        return "<bos>" + "".join(turns) + "<|assistant|>"


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

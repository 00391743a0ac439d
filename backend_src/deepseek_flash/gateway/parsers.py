"""Which of vLLM's parsers reads the model's tool calls and reasoning, where nobody said."""

from __future__ import annotations

from typing import Any

from deepseek_flash.config import ConfigError

_OWN = ("deepseek_v32", "deepseek_v4", "deepseek_v41")  # tokenizer modes with parsers of their own


def tool_parser(setting: str, tokenizer_mode: str, tokenizer: Any) -> str | None:
    """The name of a tool parser; None: tool calls stay text.

    Raises:
        ConfigError: the library has none of this name.
    """
    from vllm.tool_parsers import ToolParserManager

    return _chosen("gateway_tool_parser", setting, ToolParserManager.list_registered(),
                   lambda: _tools(tokenizer_mode, tokenizer))  # fmt: skip


def reasoning_parser(setting: str, tokenizer_mode: str, tokenizer: Any) -> str | None:
    """The name of a reasoning parser; None: reasoning stays text.

    Raises:
        ConfigError: the library has none of this name.
    """
    from vllm.reasoning import ReasoningParserManager

    return _chosen("gateway_reasoning_parser", setting, ReasoningParserManager.list_registered(),
                   lambda: _reasoning(tokenizer_mode, tokenizer))  # fmt: skip


def _chosen(name: str, setting: str, known: Any, guess: Any) -> str | None:
    if setting == "none":
        return None
    if setting == "auto":
        found: str | None = guess()
        return found
    if setting not in known:
        raise ConfigError(f"{name}: no {setting!r}; there are {', '.join(sorted(known))}")
    return setting


def _tools(mode: str, tokenizer: Any) -> str | None:
    if mode in _OWN:
        return mode
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    if "<｜tool▁calls▁begin｜>" in vocabulary:
        # The older format puts the arguments into a fenced block.
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return "hermes" if "<tool_call>" in vocabulary or "<tool_call>" in template else None


def _reasoning(mode: str, tokenizer: Any) -> str | None:
    if mode in _OWN:
        return "deepseek_v3" if mode == "deepseek_v32" else mode
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    if not {"<think>", "</think>"} <= vocabulary.keys():
        return None
    return "deepseek_v3" if "thinking" in template else "deepseek_r1"

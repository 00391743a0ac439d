"""Which of vLLM's parsers is chosen, and mistakes in settings that stop the gateway by name."""

from types import SimpleNamespace

import pytest
from deepseek_flash.config import ConfigError
from deepseek_flash.gateway import server
from deepseek_flash.gateway.parsers import reasoning_parser, tool_parser

CALLS, THINK = "<｜tool▁calls▁begin｜>", ("<think>", "</think>")


def tokenizer(*vocabulary, template=""):
    return SimpleNamespace(get_vocab=lambda: dict.fromkeys(vocabulary, 1), chat_template=template)


@pytest.mark.parametrize(
    ("mode", "found", "tools", "reasoning"),
    [
        ("auto", tokenizer(), None, None),
        ("auto", tokenizer(CALLS, *THINK, template="```json"), "deepseek_v3", "deepseek_r1"),
        ("auto", tokenizer(CALLS, *THINK, template="{% if thinking %}"), "deepseek_v31",
         "deepseek_v3"),
        ("auto", tokenizer("<tool_call>"), "hermes", None),
        ("auto", tokenizer(template="write <tool_call>"), "hermes", None),
        ("auto", tokenizer("<think>"), None, None),
        ("deepseek_v32", tokenizer(), "deepseek_v32", "deepseek_v3"),
        ("deepseek_v4", tokenizer(), "deepseek_v4", "deepseek_v4"),
        ("deepseek_v41", tokenizer(), "deepseek_v41", "deepseek_v41"),
    ],
)  # fmt: skip
def test_auto(mode, found, tools, reasoning):
    assert tool_parser("auto", mode, found) == tools
    assert reasoning_parser("auto", mode, found) == reasoning


def test_by_name_and_none():
    assert tool_parser("hermes", "auto", tokenizer()) == "hermes"
    assert reasoning_parser("qwen3", "auto", tokenizer()) == "qwen3"
    assert tool_parser("none", "deepseek_v4", tokenizer()) is None
    with pytest.raises(ConfigError, match=r"^gateway_tool_parser: no 'nope'"):
        tool_parser("nope", "auto", tokenizer())
    with pytest.raises(ConfigError, match=r"^gateway_reasoning_parser: no 'nope'"):
        reasoning_parser("nope", "auto", tokenizer())


@pytest.mark.parametrize(
    ("name", "value"),
    [("GATEWAY_KEYS", "no-hash"), ("GATEWAY_MAX_BODY_MB", "0"), ("GATEWAY_NOTHING", "1")],
)
def test_a_mistake_ends_the_process_with_one_line(monkeypatch, capsys, name, value):
    monkeypatch.setenv("DEEPSEEK_FLASH_" + name, value)
    assert server.main(["--model-json", "/nowhere"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("gateway: ") and name.lower() in told.lower()
    assert told.count("\n") == 1 and "no-hash" not in told


def test_a_model_that_is_not_there_ends_it_too(capsys):
    assert server.main(["--model-json", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err

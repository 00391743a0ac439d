"""A model that is nothing but a configuration and a tokenizer, made like DeepSeek-V3.1's.

One token a byte, so that a text's tokens are easy to tell and characters are cut in two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

CONTEXT = 2048
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL = (BOS, EOS, USER, ASSISTANT)
TOOLS_BEGIN, TOOLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUT_BEGIN, OUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
THINK, THOUGHT = "<think>", "</think>"
# Added, but not as special, as in DeepSeek's own.
ADDED = (
    TOOLS_BEGIN, TOOLS_END, CALL_BEGIN, CALL_END, SEP, OUT_BEGIN, OUT_END, THINK, THOUGHT,
)  # fmt: skip

TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for m in messages -%}{%- if m['role'] == 'system' -%}{{- m['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if tools -%}{{- '\\n## Tools\\n' + (tools | tojson) -}}{%- endif -%}"
    "{%- for m in messages -%}"
    f"{{%- if m['role'] == 'user' -%}}{{{{- '{USER}' + m['content'] -}}}}"
    "{%- elif m['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' -}}}}"
    "{%- if m['content'] -%}{{- m['content'] -}}{%- endif -%}"
    "{%- if m['tool_calls'] -%}"
    f"{{{{- '{TOOLS_BEGIN}' -}}}}"
    "{%- for c in m['tool_calls'] -%}"
    f"{{{{- '{CALL_BEGIN}' + c['function']['name'] + '{SEP}' -}}}}"
    f"{{{{- (c['function']['arguments'] | tojson) + '{CALL_END}' -}}}}"
    f"{{%- endfor -%}}{{{{- '{TOOLS_END}' -}}}}"
    "{%- endif -%}"
    "{{- eos_token -}}"
    f"{{%- elif m['role'] == 'tool' -%}}{{{{- '{OUT_BEGIN}' + m['content'] + '{OUT_END}' -}}}}"
    "{%- elif m['role'] != 'system' -%}{{- raise_exception('unknown role') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}"
    f"{{%- if thinking -%}}{{{{- '{THINK}' -}}}}"
    f"{{%- else -%}}{{{{- '{THOUGHT}' -}}}}{{%- endif -%}}"
    "{%- endif -%}"
)

_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
_ASCII = tuple(chr(value) for value in range(0x20, 0x7F))
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *_BYTES, *_ASCII, *ADDED))}
EOS_ID = VOCABULARY[EOS]


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    made.add_tokens([AddedToken(t, normalized=False, special=False) for t in ADDED])
    return made


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=False))


def save(folder: Path) -> Path:
    """Write what vLLM and transformers read of a model, weights apart."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
        "vocab_size": len(VOCABULARY), "bos_token_id": 0, "eos_token_id": EOS_ID,
    }  # fmt: skip
    for name, values in (("tokenizer_config.json", settings), ("config.json", config)):
        (folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return folder

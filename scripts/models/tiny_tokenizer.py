"""The tokenizer of tiny-deepseek: one token a character, and bytes for every other character.

Without merges the text of a token is easy to tell, streams show text, and any text at all is
encoded and decoded without loss.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

VOCAB_SIZE = 512
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL = (BOS, EOS, PAD, USER, ASSISTANT)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
CHARACTERS = "".join(
    (
        "\n\t",
        "".join(map(chr, range(0x20, 0x7F))),
        "。，、？！：；（）《》“”…—",
        "áàâäãåçéèêëíîïñóôöøúùûüßœ",
        "😀😂😊😍🤔👍👏🙏🎉🔥🚀🌍👩💻🧡✅",
        "的一是不了人我在有他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之过家学"
        "对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头"
        "面公同三已老从动两长知",
    )
)
"""Every character that is a token of its own; what remains of the vocabulary's size is cut off."""

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{- message['content'] + '\\n\\n' -}}"
    "{%- elif message['role'] == 'user' -%}"
    f"{{{{- '{USER}' + message['content'] -}}}}"
    "{%- elif message['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' + message['content'] + eos_token -}}}}"
    "{%- else -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)


def vocabulary() -> dict[str, int]:
    """Return token → id: special tokens, bytes, characters."""
    tokens = [*SPECIAL, *BYTES, *CHARACTERS][:VOCAB_SIZE]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != VOCAB_SIZE:
        raise ValueError(f"{len(ids)} different tokens where {VOCAB_SIZE} are wanted")
    return ids


def ids_by_kind() -> dict[str, list[int]]:
    """Return the ids of every kind of token but whole characters.

    A ``lead`` byte begins a character of two bytes, a ``continuation`` byte completes it.
    """
    byte_ids = range(len(SPECIAL), len(SPECIAL) + len(BYTES))
    lead, continuation = byte_ids[0xC2:0xE0], byte_ids[0x80:0xC0]
    return {
        "special": [index for index in range(len(SPECIAL)) if index != EOS_ID],
        "eos": [EOS_ID],
        "lead": list(lead),
        "continuation": list(continuation),
        "byte": [index for index in byte_ids if index not in lead],
    }


def build() -> Tokenizer:
    """Return the tokenizer; like DeepSeek's it begins every text with BOS."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return tokenizer


def save(folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` loads without remote code."""
    build().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        # Both would change the text that comes back.
        "clean_up_tokenization_spaces": False,
        "spaces_between_special_tokens": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

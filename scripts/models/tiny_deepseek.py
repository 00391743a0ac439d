"""A DeepSeek-V3 of 13 million seeded random parameters: MLA, MoE and one MTP layer.

It speaks gibberish, but it is the real architecture under the real tensor names, small enough to
start and answer in seconds, and its greedy output neither loops nor hangs on near-ties. So it is
what the integration tests serve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from . import tiny_tokenizer as tokenizer

Matrix = NDArray[np.float32]

SEED = 1
HIDDEN = 256
LAYERS = 7
DENSE_LAYERS = 3
DENSE_WIDTH = 512
EXPERTS = 16
EXPERT_WIDTH = 128
HEADS = 4
NOPE_DIM = 32
ROPE_DIM = 64
VALUE_DIM = 32
QUERY_RANK = 128
KV_RANK = 512
"""With ROPE_DIM this gives head size 576, the one that vLLM's MLA kernels are made for."""

HEAD_STD = 4.0 / HIDDEN**0.5
"""Logits get a deviation of 4, so that the best one leads clearly."""
RARE_SCALE = {"special": 0.3, "eos": 0.9, "byte": 0.5, "lead": 0.8}
"""How far head rows of tokens that should seldom win are scaled down."""
LEAD_PUSH, CONTINUATION_PULL = 24.0, 1.5
"""How strongly the first byte of a two-byte character calls for its second."""


def config() -> dict[str, Any]:
    """Return ``config.json``, with the field names of the published DeepSeek-V3."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "float32",
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": DENSE_LAYERS,
        "moe_layer_freq": 1,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": QUERY_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        # Not plain RoPE: vLLM on a CPU computes MLA wrongly with it.
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "bos_token_id": tokenizer.BOS_ID,
        "eos_token_id": tokenizer.EOS_ID,
        "pad_token_id": tokenizer.PAD_ID,
        "use_cache": True,
    }


def build(folder: Path, say: Callable[[str], None]) -> None:
    """Write weights, configuration and tokenizer into ``folder``."""
    say("tiny-deepseek: drawing weights")
    tensors = dict(Weights(SEED).tensors())
    total = sum(tensor.size for tensor in tensors.values())
    say(f"tiny-deepseek: writing {total / 1e6:.1f} M parameters")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say("tiny-deepseek: writing configuration and tokenizer")
    ids = {key: config()[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config())
    _write_json(folder / "generation_config.json", ids)
    tokenizer.save(folder)


class Weights:
    """Draws every tensor of the checkpoint in a fixed order from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def tensors(self) -> Iterator[tuple[str, Matrix]]:
        """Yield (checkpoint name, float32 tensor)."""
        embedding, head = self._vocabulary()
        yield "model.embed_tokens.weight", embedding
        yield "lm_head.weight", head
        yield "model.norm.weight", _ones(HIDDEN)
        for layer in range(LAYERS + 1):
            prefix = f"model.layers.{layer}"
            yield from self._attention(f"{prefix}.self_attn")
            if layer < DENSE_LAYERS:
                yield from self._mlp(f"{prefix}.mlp", DENSE_WIDTH)
            else:
                yield from self._experts(f"{prefix}.mlp")
            yield f"{prefix}.input_layernorm.weight", _ones(HIDDEN)
            yield f"{prefix}.post_attention_layernorm.weight", _ones(HIDDEN)
        # The layer after the last is the MTP layer; it shares embedding and head with the model.
        mtp = f"model.layers.{LAYERS}"
        yield f"{mtp}.embed_tokens.weight", embedding.copy()
        yield f"{mtp}.shared_head.head.weight", head.copy()
        yield f"{mtp}.eh_proj.weight", self._linear(HIDDEN, 2 * HIDDEN)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{mtp}.{norm}.weight", _ones(HIDDEN)

    def _vocabulary(self) -> tuple[Matrix, Matrix]:
        shape = (tokenizer.VOCAB_SIZE, HIDDEN)
        embedding = self._normal(*shape)
        head = self._normal(*shape, std=HEAD_STD)
        ids = tokenizer.ids_by_kind()
        for kind, scale in RARE_SCALE.items():
            head[ids[kind]] *= scale
        # One direction ties the first byte of a two-byte character to the bytes that may follow
        # it, so that characters made of two tokens come out whole more often than broken.
        direction = self._normal(HIDDEN)
        direction /= np.float32(np.linalg.norm(direction))
        embedding[ids["lead"]] += LEAD_PUSH * direction
        head[ids["continuation"]] += CONTINUATION_PULL * direction
        return embedding, head

    def _attention(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.q_a_proj.weight", self._linear(QUERY_RANK, HIDDEN)
        yield f"{prefix}.q_a_layernorm.weight", _ones(QUERY_RANK)
        width = HEADS * (NOPE_DIM + ROPE_DIM)
        yield f"{prefix}.q_b_proj.weight", self._linear(width, QUERY_RANK)
        yield f"{prefix}.kv_a_proj_with_mqa.weight", self._linear(KV_RANK + ROPE_DIM, HIDDEN)
        yield f"{prefix}.kv_a_layernorm.weight", _ones(KV_RANK)
        yield f"{prefix}.kv_b_proj.weight", self._linear(HEADS * (NOPE_DIM + VALUE_DIM), KV_RANK)
        yield f"{prefix}.o_proj.weight", self._linear(HIDDEN, HEADS * VALUE_DIM)

    def _mlp(self, prefix: str, width: int) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.gate_proj.weight", self._linear(width, HIDDEN)
        yield f"{prefix}.up_proj.weight", self._linear(width, HIDDEN)
        yield f"{prefix}.down_proj.weight", self._linear(HIDDEN, width)

    def _experts(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.gate.weight", self._linear(EXPERTS, HIDDEN)
        yield f"{prefix}.gate.e_score_correction_bias", self._normal(EXPERTS, std=0.05)
        for expert in range(EXPERTS):
            yield from self._mlp(f"{prefix}.experts.{expert}", EXPERT_WIDTH)
        yield from self._mlp(f"{prefix}.shared_experts", EXPERT_WIDTH)

    def _linear(self, outputs: int, inputs: int) -> Matrix:
        return self._normal(outputs, inputs, std=inputs**-0.5)

    def _normal(self, *shape: int, std: float = 1.0) -> Matrix:
        return self._random.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _ones(size: int) -> Matrix:
    return np.ones(size, dtype=np.float32)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

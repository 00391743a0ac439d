"""The client's sampling parameters: checked, defaulted, clamped.

The fields are vLLM's. Values may come as strings, as NVIDIA's sample client sends them; null is
the same as absent, but for ``max_tokens``, where vLLM takes it for the end of the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_flash.contract import DEFAULT_MAX_TOKENS, InvalidField, Sampling
from deepseek_flash.dspark.fields import (
    Parser,
    SamplingLimits,
    allowed_token_ids,
    boolean,
    float_in,
    int_in,
    logit_bias,
    stop_strings,
    structured_outputs,
    token_ids,
    words,
)

GREEDY_BELOW = 1e-5  # vLLM's own border between greedy and sampled
LOWEST_TEMPERATURE = 0.01  # vLLM lifts smaller ones to this


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling parameters of one request, with the switches that travel among them."""

    sampling: Sampling
    max_tokens: int | None  # as asked: None means to the end of the context
    use_dflash: bool
    use_dspark: bool


# Names of vLLM's that a served request must not set, with the reason that the client is told.
_REFUSED = {
    "prompt_logprobs": "not supported: no output tensor carries them",
    "output_kind": "set by the server; use the input 'stream'",
    "lora_name": "no LoRA adapter is served",
    "extra_args": "set by the server",
    "guided_decoding": "use structured_outputs",
}


def parse_sampling(fields: Mapping[str, Any], limits: SamplingLimits) -> SamplingRequest:
    """Check every field and fill in defaults.

    Raises:
        InvalidField: naming the first field that is unknown, of a wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _REFUSED and value is not None:
            raise InvalidField(name, _REFUSED[name])
        if name not in _PARSERS and name not in _REFUSED:
            raise InvalidField(name, "unknown sampling parameter")
        if value is not None:
            values[name] = _PARSERS[name](name, value, limits)
    use_dflash = values.pop("use_dflash", True)
    use_dspark = values.pop("use_dspark", True)
    asked = values.pop("max_tokens", None if "max_tokens" in fields else DEFAULT_MAX_TOKENS)
    _check_together(values, asked)
    return SamplingRequest(
        sampling=Sampling(**_normalised(values, limits)),
        max_tokens=asked,
        use_dflash=use_dflash,
        use_dspark=use_dspark,
    )


def _check_together(values: Mapping[str, Any], max_tokens: int | None) -> None:
    if max_tokens is not None and values.get("min_tokens", 0) > max_tokens:
        raise InvalidField("min_tokens", f"must not exceed max_tokens ({max_tokens})")
    if values.get("stop") and not values.get("detokenize", True):
        raise InvalidField("stop", "stop strings need detokenize")


def _normalised(values: dict[str, Any], limits: SamplingLimits) -> dict[str, Any]:
    """Bring equal requests to equal values, so that they share whatever is cached for them."""
    temperature = values.get("temperature", 1.0)
    if temperature < GREEDY_BELOW:
        # A greedy answer depends on none of these.
        values.update(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
        return values
    values["temperature"] = max(temperature, LOWEST_TEMPERATURE)
    if values.get("seed") in (None, -1):
        values["seed"] = limits.default_seed
    return values


_LARGEST = 2**31 - 1

_PARSERS: Mapping[str, Parser] = {
    "n": int_in(1, lambda limits: limits.max_n),
    "presence_penalty": float_in(-2.0, 2.0),
    "frequency_penalty": float_in(-2.0, 2.0),
    "repetition_penalty": float_in(0.0, 100.0, above_low=True),
    "temperature": float_in(0.0, 2.0),
    "top_p": float_in(0.0, 1.0, above_low=True),
    "top_k": lambda name, value, limits: max(0, int_in(-1, _LARGEST)(name, value, limits)),
    "min_p": float_in(0.0, 1.0),
    "seed": int_in(-1, 2**63 - 1),
    "stop": stop_strings,
    "stop_token_ids": token_ids,
    "bad_words": words,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "max_tokens": int_in(1, _LARGEST),
    "min_tokens": int_in(0, _LARGEST),
    "logprobs": int_in(0, lambda limits: limits.max_logprobs),
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "logit_bias": logit_bias,
    "allowed_token_ids": allowed_token_ids,
    "structured_outputs": structured_outputs,
    "thinking_token_budget": int_in(0, _LARGEST),
    "use_dflash": boolean,
    "use_dspark": boolean,
}

SAMPLING_FIELDS = frozenset(_PARSERS)

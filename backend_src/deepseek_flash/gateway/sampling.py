"""The library's sampling parameters as the ensemble's. What the ensemble does not know is refused:
nothing that could change an answer is dropped in silence, and nothing else reaches the engine.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from deepseek_flash.dspark.sampling import SAMPLING_FIELDS
from deepseek_flash.gateway.errors import invalid

# Of the library's fields those that decide no token: how it is answered, and its own notes.
_PRESENTATION = frozenset(
    {"output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs",
     "watermarking", "skip_reading_prefix_cache"}
)  # fmt: skip


def ensemble_sampling(params: Any, plain: Any, around: dict[str, Any]) -> dict[str, Any]:
    """``sampling_parameters`` for the ensemble, without what has its default value.

    Args:
        params: vLLM's ``SamplingParams``.
        plain: the same class with nothing set.
        around: fields that went around the library; they win.
    Raises:
        GatewayError: a field that the ensemble does not serve is set, by name.
    """
    found: dict[str, Any] = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name.startswith("_") or name in _PRESENTATION:
            continue
        if name in SAMPLING_FIELDS:
            if value != getattr(plain, name):
                found[name] = _plain(value)
        elif value != getattr(plain, name):
            raise invalid(name, "not supported")
    # Never by default: absent it would mean 16, and None to the end of the context.
    found["max_tokens"] = params.max_tokens
    return {**found, **around}


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):  # structured outputs
        return {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if not field.name.startswith("_") and getattr(value, field.name) not in (None, False)
        }
    return value

"""Parsers of single sampling values, one a kind of value. Each raises InvalidField by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_flash.contract import InvalidField


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What this server allows, beyond what the engine does."""

    vocab_size: int
    max_n: int = 16
    max_logprobs: int = 20
    max_stop_bytes: int = 8192
    max_list_items: int = 1024  # logit_bias, bad_words, stop_token_ids
    default_seed: int | None = 42


_STRUCTURED_KINDS: Mapping[str, tuple[type, ...]] = {
    "json": (dict, str),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
    "structural_tag": (str,),
}
_STRUCTURED_OPTIONS: Mapping[str, type] = {
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
}


Parser = Callable[[str, Any, SamplingLimits], Any]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidField(name, f"must be a number, got {_shown(value)}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InvalidField(name, f"must be a number, got {_shown(value)}") from None
    if not math.isfinite(number):
        raise InvalidField(name, f"must be finite, got {_shown(value)}")
    return number + 0.0  # -0.0 becomes 0.0


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidField(name, f"must be an integer, got {_shown(value)}")
    try:
        if isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            return int(value)
        return int(value)
    except (ValueError, OverflowError):
        raise InvalidField(name, f"must be an integer, got {_shown(value)}") from None


def float_in(low: float, high: float, *, above_low: bool = False) -> Parser:
    border = "(" if above_low else "["

    def parse(name: str, value: Any, limits: SamplingLimits) -> float:
        number = _number(name, value)
        if not low <= number <= high or (above_low and number == low):
            raise InvalidField(name, f"must be in {border}{low:g}, {high:g}], got {number:g}")
        return number

    return parse


def int_in(low: int, high: int | Callable[[SamplingLimits], int]) -> Parser:
    def parse(name: str, value: Any, limits: SamplingLimits) -> int:
        number = _whole(name, value)
        highest = high(limits) if callable(high) else high
        if not low <= number <= highest:
            raise InvalidField(name, f"must be in [{low}, {highest}], got {_shown(number)}")
        return number

    return parse


def boolean(name: str, value: Any, limits: SamplingLimits) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidField(name, f"must be true or false, got {_shown(value)}")


def _from_json(value: Any) -> Any:
    """Lists and objects may come as JSON in a string: Triton's parameters know neither."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _list(name: str, value: Any, limits: SamplingLimits) -> list[Any]:
    value = _from_json(value)
    if not isinstance(value, list):
        raise InvalidField(name, f"must be a list, got {_shown(value)}")
    if len(value) > limits.max_list_items:
        raise InvalidField(name, f"must have at most {limits.max_list_items} items")
    return value


def stop_strings(name: str, value: Any, limits: SamplingLimits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _list(name, value, limits)
    if any(not isinstance(item, str) or not item for item in strings):
        raise InvalidField(name, "must be a non-empty string or a list of them")
    if sum(len(_utf8(name, item)) for item in strings) > limits.max_stop_bytes:
        raise InvalidField(name, f"must be at most {limits.max_stop_bytes} bytes in all")
    return tuple(sorted(set(strings)))


def words(name: str, value: Any, limits: SamplingLimits) -> tuple[str, ...]:
    words = _list(name, value, limits)
    if any(not isinstance(item, str) or not item.strip() for item in words):
        raise InvalidField(name, "must be a list of non-empty strings")
    if sum(len(_utf8(name, item)) for item in words) > limits.max_stop_bytes:
        raise InvalidField(name, f"must be at most {limits.max_stop_bytes} bytes in all")
    return tuple(sorted(set(words)))


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, "must be valid Unicode (it has a lone surrogate)") from None


def _token_id(name: str, value: Any, limits: SamplingLimits) -> int:
    token = _whole(name, value)
    if not 0 <= token < limits.vocab_size:
        raise InvalidField(
            name, f"token id {_shown(token)} is outside the vocabulary of {limits.vocab_size}"
        )
    return token


def token_ids(name: str, value: Any, limits: SamplingLimits) -> tuple[int, ...]:
    return tuple(sorted({_token_id(name, item, limits) for item in _list(name, value, limits)}))


def allowed_token_ids(name: str, value: Any, limits: SamplingLimits) -> tuple[int, ...]:
    ids = token_ids(name, value, limits)
    if not ids:
        raise InvalidField(name, "must not be empty")
    return ids


def logit_bias(name: str, value: Any, limits: SamplingLimits) -> dict[int, float] | None:
    value = _from_json(value)
    if not isinstance(value, dict):
        raise InvalidField(name, f"must map token ids to numbers, got {_shown(value)}")
    if len(value) > limits.max_list_items:
        raise InvalidField(name, f"must have at most {limits.max_list_items} items")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = _token_id(name, key, limits)
        biases[token] = min(100.0, max(-100.0, _number(f"{name}[{token}]", bias)))
    return dict(sorted(biases.items())) or None


def structured_outputs(name: str, value: Any, limits: SamplingLimits) -> dict[str, Any]:
    value = _from_json(value)
    if not isinstance(value, dict):
        raise InvalidField(name, f"must be an object, got {_shown(value)}")
    given: dict[str, Any] = {key: item for key, item in value.items() if item is not None}
    kinds = [key for key in given if key in _STRUCTURED_KINDS]
    if len(kinds) != 1:
        raise InvalidField(name, f"must have exactly one of {', '.join(_STRUCTURED_KINDS)}")
    for key, item in given.items():
        allowed = _STRUCTURED_KINDS.get(key) or (_STRUCTURED_OPTIONS.get(key),)
        if allowed == (None,):
            raise InvalidField(f"{name}.{key}", "unknown")
        if not isinstance(item, allowed):  # type: ignore[arg-type]
            raise InvalidField(f"{name}.{key}", f"wrong type, got {_shown(item)}")
    if "choice" in given and not (
        given["choice"] and all(isinstance(item, str) and item for item in given["choice"])
    ):
        raise InvalidField(f"{name}.choice", "must be a list of non-empty strings")
    if given.get("json_object") is False:
        raise InvalidField(f"{name}.json_object", "must be true where it is given")
    try:
        _utf8(name, json.dumps(given, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        raise InvalidField(name, "must be JSON, and not nested too deeply") from None
    if isinstance(given.get("json"), dict):
        # As text it passes between stages whatever is in it: large integers, deep nests.
        given["json"] = json.dumps(given["json"])
    return given


def _shown(value: Any) -> str:
    """A client's value for an error message: short, whatever was sent."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a deep nest
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."

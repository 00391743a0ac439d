"""The one reader of settings: config.pbtxt ``parameters``, the environment, ``model.json``.

Each model has a frozen dataclass of settings. Its field names are the keys in ``parameters``,
and ``DEEPSEEK_FLASH_<NAME>`` in the environment overrides them. A switch that is silently
ignored is the worst outage there is, so an unknown or malformed key stops the load by name.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "DEEPSEEK_FLASH_"

# Not settings of a model, but of the process: where its server's runtime and model are.
RUNTIME_DIR = PREFIX + "RUNTIME_DIR"
SECRET = PREFIX + "SECRET"
MODEL = PREFIX + "MODEL"  # overrides "model" of model.json
ENGINE_ARGS = PREFIX + "ENGINE_ARGS"  # a JSON object, laid over model.json
_PROCESS_NAMES = frozenset({RUNTIME_DIR, SECRET, MODEL, ENGINE_ARGS})

# Parameters that Triton's Python backend itself reads from the same map.
_TRITON_PARAMETERS = frozenset(
    {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"}
)


class ConfigError(ValueError):
    """A setting that stops the load. The message starts with the key's name."""


def _setting(
    default: Any,
    help: str,
    *,
    low: int | None = None,
    high: int | None = None,
    choices: tuple[Any, ...] | None = None,
    pattern: str | None = None,
) -> Any:
    return field(
        default=default,
        metadata={"help": help, "low": low, "high": high, "choices": choices, "pattern": pattern},
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of ``dspark_scheduler``."""

    dspark_burst_steps: int = _setting(
        3, "most tokens that DSpark guesses per burst", low=1, high=16
    )
    default_seed: int | None = _setting(
        42,
        "seed of sampled requests that bring none; 'none' leaves them unseeded",
        low=0,
        high=2**63 - 1,
    )
    probe_tokens: int = _setting(
        32,
        "tokens that a one-token answer grows to for the cache while the engine is idle; 0: none",
        low=0,
        high=1024,
    )
    queue_limit: int = _setting(
        256, "most requests in flight on the server; more are refused at once", low=1, high=4096
    )
    tenant_queue_limit: int = _setting(
        0,
        "most requests in flight of one cache_salt; 0 means no limit of its own",
        low=0,
        high=4096,
    )
    default_timeout_ms: int = _setting(
        0,
        "deadline of requests that bring none, in milliseconds; 0 means none",
        low=0,
        high=2**31 - 1,
    )
    max_n: int = _setting(16, "most choices (n) of one request", low=1, high=128)
    max_logprobs: int = _setting(20, "most logprobs per token of one request", low=0, high=20)
    max_stop_bytes: int = _setting(
        8192, "most bytes of stop strings of one request", low=1, high=1 << 20
    )


@dataclass(frozen=True)
class CacheConfig:
    """Settings of ``dflash_cache``."""

    enable_dflash: bool = _setting(True, "answer from and feed the DFlash cache")
    dflash_cache_size: int = _setting(1536, "entries of the DFlash cache", low=1, high=1 << 20)
    dflash_fingerprint_bits: int = _setting(
        64, "width of the context fingerprint", choices=(32, 64)
    )
    dflash_block_tokens: int = _setting(
        256, "tokens of one entry; longer answers are chained", low=16, high=4096
    )
    dflash_ttl_seconds: int = _setting(
        0,
        "age at which an entry is no longer used, in seconds; 0 means none",
        low=0,
        high=2**31 - 1,
    )
    dflash_tenant_quota: int = _setting(
        0, "most entries of one cache_salt; 0: a fair share once the cache is full",
        low=0, high=1 << 20,
    )  # fmt: skip
    dflash_windows: str = _setting(
        "none",
        "what ends a session's window: a change of topic (semantic); none: each turn is one",
        pattern=r"semantic|none",
    )
    dflash_semantic: str = _setting(
        "auto",
        "look for similar prompts with the prefix encoder: on, off, or auto (while it pays)",
        pattern=r"auto|on|off",
    )
    dflash_encoder_window: int = _setting(
        512, "last tokens of a prompt that the prefix encoder reads", low=16, high=8192
    )
    device: str = _setting(
        "auto", "where the cache lives: auto, cpu or cuda:N", pattern=r"auto|cpu|cuda:\d+"
    )


@dataclass(frozen=True)
class DecoderConfig:
    """Settings of ``deepseek_decoder``. The engine's own are in ``model.json``."""

    enable_dspark: bool = _setting(True, "let DSpark guess tokens in vLLM's worker")
    max_draft_tokens: int = _setting(
        16, "most tokens that DSpark guesses for a request at once", low=1, high=16
    )
    dspark_controller: str = _setting(
        "cost",
        "what decides how many: what they cost and how likely they are (cost), or thresholds",
        pattern=r"cost|thresholds",
    )


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of the OpenAI- and Anthropic-compatible gateway, a process beside Triton."""

    gateway_keys: str = _setting(
        "", "API keys as name:sha256-of-the-key, separated by commas; see also gateway_keys_file"
    )
    gateway_keys_file: str = _setting(
        "", "a file of API keys, one name:sha256-of-the-key a line; read again when it changes"
    )
    gateway_model_names: str = _setting(
        "", "names of the served model, separated by commas; the first is told in answers"
    )
    gateway_model_aliases: str = _setting(
        "claude-*,deepseek-*",
        "further names that clients may ask for, * for any characters; none: no others",
    )
    gateway_tenant_limit: int = _setting(
        0, "most requests in flight of one API key; 0 means no limit of its own", low=0, high=4096
    )
    gateway_max_body_mb: int = _setting(16, "most megabytes of a request's body", low=1, high=1024)
    gateway_keep_alive_seconds: int = _setting(
        15, "seconds of silence after which a stream gets a comment line", low=1, high=3600
    )
    gateway_tool_parser: str = _setting(
        "auto", "vLLM's parser of tool calls by its name, auto (by the tokenizer) or none"
    )
    gateway_reasoning_parser: str = _setting(
        "auto", "vLLM's parser of reasoning by its name, auto (by the tokenizer) or none"
    )
    gateway_volatile_lines: str = _setting(
        "x-anthropic-billing-header",
        "names of lines 'name: …' to leave out where a system prompt begins with them; or none",
    )


CONFIGS: Mapping[str, type[Any]] = {
    "dspark_scheduler": SchedulerConfig,
    "dflash_cache": CacheConfig,
    "deepseek_decoder": DecoderConfig,
}
"""Of Triton's models, whose files hold the same settings."""

ALL_CONFIGS: Mapping[str, type[Any]] = {**CONFIGS, "gateway": GatewayConfig}

Config = TypeVar("Config")


def read_config(
    config: type[Config], parameters: Mapping[str, str], environ: Mapping[str, str]
) -> Config:
    """The settings in force for one model.

    Args:
        parameters: of the model's config.pbtxt, as plain strings.
        environ: overrides; names with our prefix that nobody reads are an error.
    Raises:
        ConfigError: an unknown key or a malformed value, by name.
    """
    check_environment(environ)
    known: dict[str, Field[Any]] = {f.name: f for f in fields(config)}  # type: ignore[arg-type]
    types_of = typing.get_type_hints(config)
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        if key in known:
            values[key] = _parse(key, text, known[key], types_of[key])
        elif key not in _TRITON_PARAMETERS:
            raise ConfigError(f"{key}: unknown parameter; known are {', '.join(known)}")
    for key, setting in known.items():
        name = PREFIX + key.upper()
        if name in environ:
            values[key] = _parse(name, environ[name], setting, types_of[key])
    return config(**values)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a name with our prefix that nobody reads."""
    known = {PREFIX + f.name.upper() for config in ALL_CONFIGS.values() for f in fields(config)}
    for name in environ:
        if name.startswith(PREFIX) and name not in known and name not in _PROCESS_NAMES:
            raise ConfigError(
                f"{name}: unknown environment variable; known are "
                f"{', '.join(sorted(known | _PROCESS_NAMES))}"
            )


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The key of the MACs between stages, where the environment has one.

    Raises:
        ConfigError: it is malformed, or too short to be one.
    """
    if SECRET not in environ:
        return None
    try:
        key = bytes.fromhex(environ[SECRET])
    except ValueError:
        key = b""
    if len(key) < 16:
        raise ConfigError(f"{SECRET}: must be at least 32 hexadecimal digits")
    return key


def model_parameters(model_config: str) -> dict[str, str]:
    """The ``parameters`` of Triton's model configuration (JSON) as plain strings."""
    parameters = json.loads(model_config).get("parameters", {})
    return {key: value["string_value"] for key, value in parameters.items()}


def effective(config: Any) -> dict[str, str]:
    """Every setting in force, as text, for the log, the metric and ``make config``."""
    return {f.name: _text(getattr(config, f.name)) for f in fields(config)}


def default_of(setting: Field[Any]) -> str:
    assert setting.default is not MISSING
    return _text(setting.default)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _parse(key: str, text: str, setting: Field[Any], kind: Any) -> Any:
    """One value by the field's type: bool, int, int or None, str."""
    optional = isinstance(kind, types.UnionType)
    if optional and text.lower() == "none":
        return None
    meta = setting.metadata
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key}: must be true or false, got {text!r}")
        return text.lower() == "true"
    if kind is str:
        if meta["pattern"] and not re.fullmatch(meta["pattern"], text):
            raise ConfigError(f"{key}: must match {meta['pattern']}, got {text!r}")
        return text
    try:
        number = int(text)
    except ValueError:
        allowed = "an integer or none" if optional else "an integer"
        raise ConfigError(f"{key}: must be {allowed}, got {text!r}") from None
    if meta["choices"] and number not in meta["choices"]:
        raise ConfigError(f"{key}: must be one of {meta['choices']}, got {number}")
    if meta["low"] is not None and number < meta["low"]:
        raise ConfigError(f"{key}: must be at least {meta['low']}, got {number}")
    if meta["high"] is not None and number > meta["high"]:
        raise ConfigError(f"{key}: must be at most {meta['high']}, got {number}")
    return number


def read_engine_args(model_json: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's engine arguments: ``model.json`` with what the environment lays over it.

    A ``model`` that starts with ``./`` or ``../`` is relative to the file.

    Raises:
        ConfigError: the file or the overlay is no JSON object, or names no model.
    """
    try:
        args = _json_object(str(model_json), model_json.read_bytes())
    except OSError as error:
        raise ConfigError(f"{model_json}: {error.strerror}") from None
    if ENGINE_ARGS in environ:
        args.update(_json_object(ENGINE_ARGS, environ[ENGINE_ARGS]))
    if MODEL in environ:
        args["model"] = environ[MODEL]
    model = args.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model: missing in {model_json}")
    if model.startswith(("./", "../")):
        args["model"] = str((model_json.parent / model).resolve())
    if args["model"].startswith("/") and not Path(args["model"]).is_dir():
        raise ConfigError(f"model: {args['model']} does not exist (make setup builds the defaults)")
    return args


def _json_object(name: str, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a JSON object")
    return value

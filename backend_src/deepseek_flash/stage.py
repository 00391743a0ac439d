"""What every ``model.py`` does first: settings, the shared runtime, metrics, one log line."""

from __future__ import annotations

import locale
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from deepseek_flash.config import (
    CONFIGS,
    RUNTIME_DIR,
    Config,
    effective,
    model_parameters,
    read_config,
    read_secret,
)
from deepseek_flash.metrics import Recorder
from deepseek_flash.runtime import Runtime, open_runtime
from deepseek_flash.triton_io import check_numpy
from deepseek_flash.triton_metrics import record_config

DECODER = "deepseek_decoder"

log = logging.getLogger("deepseek_flash")


@dataclass(frozen=True)
class Stage(Generic[Config]):
    """One model of the ensemble, opened."""

    config: Config
    runtime: Runtime
    recorder: Recorder
    model_json: Path  # the one source of model identity


def open_stage(args: Mapping[str, str], config_type: type[Config]) -> Stage[Config]:
    """Open a stage from the arguments of Triton's ``initialize``.

    Raises:
        ConfigError: a setting that is unknown or malformed, by name.
        RuntimeError: numpy does not fit this Triton.
    """
    import triton_python_backend_utils as pb_utils

    # A stub starts in the C locale, where reading a UTF-8 file fails.
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    check_numpy()
    name = next(model for model, kind in CONFIGS.items() if kind is config_type)
    config = read_config(config_type, model_parameters(args["model_config"]), os.environ)
    settings = effective(config)
    recorder = Recorder()
    record_config(recorder, name, settings)
    shown = " ".join(f"{key}={value}" for key, value in settings.items())
    pb_utils.Logger.log_info(f"[deepseek_flash] {name}: {shown}")
    return Stage(
        config=config,
        runtime=open_runtime(os.environ.get(RUNTIME_DIR), read_secret(os.environ)),
        recorder=recorder,
        model_json=_model_json(Path(args["model_repository"])),
    )


def _model_json(model_directory: Path) -> Path:
    """``model.json`` of the decoder, beside whichever model asks."""
    versions = sorted(
        (model_directory.parent / DECODER).glob("*/model.json"),
        key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else -1,
    )
    if not versions:
        raise FileNotFoundError(f"no {DECODER}/<version>/model.json in {model_directory.parent}")
    return versions[-1]


def internal_error(what: str, error: Exception) -> Exception:
    """Log a fault of ours in full; what the client is told has no path and no code in it."""
    log.error("%s failed", what, exc_info=error)
    return RuntimeError(f"internal error while {what}; the server's log has the details")

"""The engine arguments that put our worker into vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_flash.config import ConfigError, DecoderConfig

_PROPOSERS = {
    "cost": "deepseek_flash.worker.proposer.SparkProposer",
    "thresholds": "deepseek_flash.worker.proposer.ThresholdProposer",
}
_WORKER = "deepseek_flash.worker.worker.Spark{}Worker"


def dspark_arguments(
    args: Mapping[str, Any], on_cpu: bool, config: DecoderConfig
) -> dict[str, Any]:
    """``args`` with DSpark.

    Raises:
        ConfigError: they set what DSpark sets, by name.
    """
    for name in ("speculative_config", "worker_cls"):
        if name in args:
            raise ConfigError(f"{name}: set by DSpark; turn enable_dspark off to use your own")
    if args.get("async_scheduling"):
        raise ConfigError("async_scheduling: not with DSpark, which looks between two steps")
    return {
        **args,
        "worker_cls": _WORKER.format("CPU" if on_cpu else "GPU"),
        "async_scheduling": False,
        "speculative_config": {
            "method": "custom_class",
            "model": _PROPOSERS[config.dspark_controller],
            "num_speculative_tokens": config.max_draft_tokens,
            # The same for every batch size. It says that steps differ in length; otherwise vLLM
            # fills up the first step of a cached prompt with drafts that nobody made.
            "num_speculative_tokens_per_batch_size": [(1, 1, config.max_draft_tokens)],
        },
    }

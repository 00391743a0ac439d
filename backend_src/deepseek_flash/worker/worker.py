"""vLLM's workers with our runners: what ``worker_cls`` names, and what ``collective_rpc`` calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from deepseek_flash.worker.measure import measure_steps
from deepseek_flash.worker.runner import SparkCPUModelRunner, SparkGPUModelRunner, SparkRunner


class SparkWorker:
    """To be put before one of vLLM's workers. Of an engine's, one drafts; the others say None."""

    model_runner: SparkRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        log_with_vllm()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        samples = measure_steps(self)  # all workers: a step is theirs together
        spark = self.model_runner.spark
        if spark is not None:
            spark.start(samples)
        return times

    def drain(self, ended: Sequence[str] = ()) -> dict[str, Any] | None:
        """See ``SparkProposer.drain``."""
        spark = self.model_runner.spark
        return None if spark is None else spark.drain(ended)

    def add_references(
        self, plan_id: str, references: Sequence[tuple[Sequence[int], float]]
    ) -> int | None:
        """See ``Requests.add_references``. May come while the request runs."""
        spark = self.model_runner.spark
        return None if spark is None else spark.requests.add_references(plan_id, references)


def log_with_vllm() -> None:
    """Let our lines appear where vLLM's do, at its level: the engine has a process of its own."""
    ours, theirs = logging.getLogger("deepseek_flash"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False


class SparkCPUWorker(SparkWorker, CPUWorker):  # type: ignore[misc]
    """On a CPU."""

    def init_device(self) -> None:
        super().init_device()
        # vLLM has made its own here; nothing was loaded into it yet.
        self.model_runner = SparkCPUModelRunner(self.vllm_config, self.device)


class SparkGPUWorker(SparkWorker, Worker):  # type: ignore[misc]
    """On a GPU."""

    def _make_model_runner(self) -> SparkGPUModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("DSpark needs Model Runner V1: unset VLLM_USE_V2_MODEL_RUNNER")
        return SparkGPUModelRunner(self.vllm_config, self.device)

"""vLLM's AsyncLLM on an event loop of its own, in a thread of the decoder's process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from deepseek_flash.config import ConfigError, DecoderConfig
from deepseek_flash.contract import EngineFacts, InvalidField, Reference, RequestPlan, Sampling
from deepseek_flash.decoder.output import Outputs, from_vllm
from deepseek_flash.dspark.paths import Path
from deepseek_flash.worker.arguments import dspark_arguments
from deepseek_flash.worker.token_text import TokenText
from deepseek_flash.worker.version import check_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from deepseek_flash.worker.requests import Wishes

STOP_SECONDS = 4.0
START_SECONDS = 3600.0  # a large checkpoint from a cold disk takes long

Result = TypeVar("Result")


class Engine:
    """A running vLLM engine. Made by ``start_engine``; ``close`` ends its processes."""

    def __init__(
        self, llm: Any, loop: asyncio.AbstractEventLoop, stats: EngineStats, dspark: bool
    ) -> None:
        self._llm = llm
        self._loop = loop
        self._stats = stats
        self._dspark = dspark  # guesses in the worker
        self.facts: EngineFacts = _facts(llm.vllm_config)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the engine's loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's loop, from any thread."""
        self._loop.call_soon_threadsafe(function)

    async def generate(self, plan: RequestPlan, chain: Sequence[int] = ()) -> Outputs:
        """The plan's generation, piece by piece. Closing it aborts it in the engine.

        Args:
            chain: a known continuation that is only a guess here; DSpark drafts from it.
        Raises:
            InvalidField: vLLM itself refuses a parameter (a grammar that does not compile).
        """
        from vllm.inputs import tokens_input

        # Ready-made input: a raw prompt would take a detour through vLLM's renderer threads.
        prompt = tokens_input(list(plan.prompt_token_ids), cache_salt=plan.cache_salt or None)
        params = sampling_params(plan.sampling, _wishes(plan, chain) if self._dspark else None)
        async with aclosing(self._llm.generate(prompt, params, plan.plan_id)) as outputs:
            async for output in outputs:
                yield from_vllm(output, None if self._dspark else Path.SLOW)

    def text(self, plan: RequestPlan) -> TokenText:
        """What makes text of tokens that the plan's generation would bring."""
        tokenizer = self._llm.get_tokenizer() if plan.sampling.detokenize else None
        return TokenText(tokenizer, plan.prompt_token_ids, sampling_params(plan.sampling))

    async def add_references(self, plan_id: str, references: Sequence[Reference]) -> None:
        """Let a running plan's drafts come from these answers to similar prompts, too."""
        if self._dspark:
            plain = [(list(known.token_ids), known.similarity) for known in references]
            await self._llm.collective_rpc("add_references", args=(plan_id, plain))

    async def drain(self, ended: Sequence[str] = ()) -> dict[str, Any] | None:
        """What DSpark has learned and counted since the last call; None without DSpark.

        Args:
            ended: plans whose answers were seen to end since then.
        """
        if not self._dspark:
            return None
        found = await self._llm.collective_rpc("drain", args=(list(ended),))
        return next((told for told in found if told is not None), None)

    @property
    def guesses(self) -> bool:
        """Whether DSpark is in it."""
        return self._dspark

    @property
    def load(self) -> tuple[int, int]:
        """Requests (running, waiting) in the engine."""
        # The engine reports with its outputs only: after an abort of everything, never again.
        if self._llm.get_num_unfinished_requests() == 0:
            return 0, 0
        return self._stats.running, self._stats.waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache that running requests hold, 0 to 1."""
        # As with ``load``: the last report may be of requests that were all aborted.
        return self._stats.kv_cache_usage if self._llm.get_num_unfinished_requests() else 0.0

    @property
    def steps(self) -> int:
        """Rises while the engine works."""
        return self._stats.steps

    @property
    def preemptions(self) -> int:
        """So far: requests that lost their KV cache to others, and are computed anew."""
        return self._stats.preemptions

    async def profile(self, on: bool) -> None:
        """Start or stop vLLM's profiler, whose traces go where ``profiler_config`` says.

        Raises:
            Exception: the engine was started without one.
        """
        await (self._llm.start_profile() if on else self._llm.stop_profile())

    def close(self) -> None:
        """Stop the engine's processes, by force after a while, and the loop."""
        self._llm.shutdown(timeout=STOP_SECONDS)
        self._llm = None  # now, not at the interpreter's end, when half of it is gone
        self._loop.call_soon_threadsafe(self._loop.stop)


class EngineStats:
    """The scheduler's last figures, written by vLLM after each step."""

    running = 0
    waiting = 0
    steps = 0
    preemptions = 0
    kv_cache_usage = 0.0


def start_engine(
    args: dict[str, Any], environ: Mapping[str, str], config: DecoderConfig | None = None
) -> Engine:
    """Start vLLM with these engine arguments and wait until it can serve.

    Args:
        config: None: no DSpark, whatever its default.
    Raises:
        ConfigError: an engine argument that this vLLM does not know, or that DSpark sets itself,
            by name.
        RuntimeError: an unsupported vLLM.
    """
    check_vllm()
    _prepare_environment(environ)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = AsyncEngineArgs.__dataclass_fields__
    for name in args:
        if name not in known:
            raise ConfigError(f"{name}: unknown engine argument in model.json")
    dspark = config is not None and config.enable_dspark
    if config is not None and dspark:
        args = dspark_arguments(args, current_platform.is_cpu(), config)
    if current_platform.is_cpu():
        args = {**_CPU_DEFAULTS, **args}
        if args["distributed_executor_backend"] == "uni":
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM makes it "mp"
    # vLLM's own loggers publish where nobody reads and cost every step; ours is enough.
    engine_args = AsyncEngineArgs(**{"disable_log_stats": True, **args})
    stats = EngineStats()
    import uvloop

    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="engine-loop", daemon=True).start()

    async def start() -> Engine:
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[_stat_logger(stats)])
        return Engine(llm, loop, stats, dspark)

    return asyncio.run_coroutine_threadsafe(start(), loop).result(START_SECONDS)


# What was verified on a CPU; model.json overrides. A worker in a process of its own ("mp") polls
# for a second after each step and takes a core from everybody: 1.4 times slower on two cores.
_CPU_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
}


def _prepare_environment(environ: Mapping[str, str]) -> None:
    if "VLLM_USE_FLASH_ATTN" in environ:
        # Web UIs of the DeepSeek family set it; it must not reach the engine.
        print("[deepseek_flash] VLLM_USE_FLASH_ATTN is set; removed for the engine", flush=True)
        os.environ.pop("VLLM_USE_FLASH_ATTN", None)
    # The engine is a child of this process: forked, it would inherit Triton's threads and locks.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _stat_logger(stats: EngineStats) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM ships no types we follow
        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            stats.steps += 1
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.waiting = scheduler_stats.num_waiting_reqs
                stats.kv_cache_usage = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                stats.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

    return Logger


def _wishes(plan: RequestPlan, chain: Sequence[int]) -> Wishes:
    from deepseek_flash.worker.requests import Wishes

    return Wishes(
        plan_id=plan.plan_id,
        burst_steps=plan.burst_steps,
        use_dspark=plan.use_dspark,
        chain=tuple(chain),
        min_p=plan.sampling.min_p,
        logit_bias=plan.sampling.logit_bias,
    )


def sampling_params(sampling: Sampling, wishes: Wishes | None = None) -> SamplingParams:
    """vLLM's parameters for one generation, answered in deltas.

    Args:
        wishes: for an engine with DSpark.
    Raises:
        InvalidField: vLLM refuses a value that we let through.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    values = {**asdict(sampling), "n": engine_choices(sampling)}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        values[name] = None if values[name] is None else list(values[name])
    if wishes is not None:
        # vLLM refuses these two beside speculation; our worker puts them back.
        values.update(min_p=0.0, logit_bias=None, extra_args=wishes.as_extra_args())
    try:
        if sampling.structured_outputs is not None:
            values["structured_outputs"] = StructuredOutputsParams(**sampling.structured_outputs)
        return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
    except (VLLMClientError, ValueError) as error:
        raise refused_by_vllm(error) from None


def engine_choices(sampling: Sampling) -> int:
    """How many choices the engine must generate: all greedy ones are the same, and vLLM says so."""
    return 1 if sampling.temperature == 0.0 else sampling.n


def refused_by_vllm(error: Exception) -> InvalidField:
    """vLLM's own complaint about a request, with the parameter where it names one."""
    name = getattr(error, "parameter", None) or "sampling_parameters"
    return InvalidField(str(name), str(error))


def _facts(config: VllmConfig) -> EngineFacts:
    model = config.model_config
    return EngineFacts(
        namespace=_namespace(config),
        model=model.model,
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
    )


def _namespace(config: VllmConfig) -> str:
    """Digest of what decides the model's output: checkpoint, numerics, vLLM's version.

    Another one at every start: the weights behind a name may have been replaced in between.
    """
    import vllm

    model, parallel = config.model_config, config.parallel_config
    parts = {
        "model": model.model,
        "revision": model.revision,
        "tokenizer": [model.tokenizer, model.tokenizer_revision],
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": model.max_model_len,
        "hf_overrides": str(model.hf_overrides),
        "tensor_parallel": parallel.tensor_parallel_size,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "vllm": vllm.__version__,
        "start": secrets.token_hex(8),
    }
    data = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()

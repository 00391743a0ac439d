"""An ``EngineClient`` for vLLM's serving layer whose engine is Triton."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from deepseek_flash.gateway import call as calls
from deepseek_flash.gateway.errors import GatewayError, invalid
from deepseek_flash.gateway.outputs import Answer
from deepseek_flash.gateway.sampling import ensemble_sampling
from deepseek_flash.gateway.triton import Generation, TritonClient
from deepseek_flash.gateway.turns import TurnFinder

END_OF_REASONING = "</think>"


class _Refusals(EngineClient):  # type: ignore[misc]  # vLLM ships no types we follow
    """What only an engine in this process could do. No route that is served asks for it."""

    async def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the engine is behind Triton")

    encode = notify_kv_transfer_request_rejected = start_profile = stop_profile = _refuse
    reset_prefix_cache = sleep = release_kv_cache_memory = wake_up = add_lora = _refuse
    pause_generation = resume_generation = _refuse

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        pass

    async def reset_mm_cache(self) -> None:
        pass

    async def reset_encoder_cache(self) -> None:
        pass

    async def abort(self, request_id: str | Iterable[str]) -> None:
        pass  # a request ends with its generator


class TritonEngine(_Refusals):
    """Generates by the ensemble. Prompts are rendered and tokenised here, texts come from there."""

    def __init__(
        self, config: VllmConfig, renderer: BaseRenderer, turns: TurnFinder, triton: TritonClient
    ) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer
        self.input_processor = InputProcessor(config, renderer)
        self._turns = turns
        self._triton = triton
        self._plain = SamplingParams()
        self._thought = renderer.get_tokenizer().get_vocab().get(END_OF_REASONING)

    is_running = property(lambda self: True)
    is_stopped = property(lambda self: False)
    errored = property(lambda self: False)  # a Triton that is gone comes back: never give up
    dead_error = property(lambda self: EngineDeadError())

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def check_health(self) -> None:
        """Raise where the ensemble is not loaded."""
        if not await self._triton.ready():
            raise EngineDeadError()

    def shutdown(self, timeout: float | None = None) -> None:
        pass  # the channel is closed by who opened it

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request's outputs. Closing the generator cancels it in the engine.

        Raises:
            GenerationError: there is no answer; why stands in the call.
        """
        call = calls.current()
        try:
            generation = self._generation(prompt, sampling_params, session_id, call)
            stops = generation.sampling.get("stop", ())
            answer = Answer(
                request_id, list(generation.input_ids), sampling_params, stops,
                self.renderer.get_tokenizer(),
            )  # fmt: skip
            async with aclosing(self._triton.stream(generation)) as chunks:
                async for chunk in chunks:
                    output = answer.add(chunk)
                    call.cached_tokens = chunk.num_cached_tokens
                    if reasoning_ended is False and output is not None and output.finished:
                        call.reasoning_tokens = answer.tokens_before(self._thought)
                    if output is not None:
                        yield output
        except GatewayError as error:
            call.failure = call.failure or error
            raise GenerationError(str(error)) from None

    def _generation(
        self, prompt: Any, params: SamplingParams, session_id: str | None, call: calls.Call
    ) -> Generation:
        ids, vocabulary = prompt["prompt_token_ids"], self.model_config.get_vocab_size()
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < vocabulary:  # it might not even fit into the ensemble's tensor
                problem = f"token id {token} is outside the vocabulary of {vocabulary}"
                raise invalid("prompt", problem)
        return Generation(
            input_ids=ids,
            sampling=ensemble_sampling(params, self._plain, call.sampling),
            turn_starts=self._turns.starts(ids),
            session_id=call.session_id or session_id or "",
            cache_salt=call.tenant.salt(call.cache_salt),
        )

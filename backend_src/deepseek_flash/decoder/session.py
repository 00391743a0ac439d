"""One request's life in the decoder: generate, answer, and end in exactly one way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing

from deepseek_flash import metrics
from deepseek_flash.contract import (
    Cancelled,
    Expired,
    Refused,
    RequestError,
    RequestPlan,
)
from deepseek_flash.decoder.answer import Answer
from deepseek_flash.decoder.engine import engine_choices, refused_by_vllm
from deepseek_flash.decoder.output import Output, Outputs
from deepseek_flash.decoder.sender import Reply

log = logging.getLogger("deepseek_flash")

Generate = Callable[[RequestPlan], Outputs]


class Session:
    """Runs a plan. ``cancel`` may be called at any time, from the engine's loop."""

    def __init__(
        self,
        plan: RequestPlan,
        generate: Generate,
        reply: Reply,
        recorder: metrics.Recorder,
        first_tokens: metrics.Rolling,
        tokens: metrics.Rolling,
    ) -> None:
        self.plan = plan
        self._generate = generate
        self._reply = reply
        self._recorder = recorder
        self._first_tokens = first_tokens
        self._tokens = tokens
        choices = engine_choices(plan.sampling)
        self._answer = Answer(
            choices,
            len(plan.prompt_token_ids),
            plan.prepended_text,
            copies=plan.sampling.n // choices,
        )
        self._task: asyncio.Task[None] | None = None
        self._cancelled_by = ""
        self._last_token_at: float | None = None

    async def run(self) -> None:
        """Answer the request. Never raises: whatever happens is the client's to know."""
        self._task = asyncio.current_task()
        try:
            if self._cancelled_by:  # before it began
                raise asyncio.CancelledError
            async with asyncio.timeout(self._seconds_left()):
                await self._stream()
        except TimeoutError:
            made = self._answer.num_output_tokens
            self._fail(Expired(f"the request's deadline passed after {made} tokens"))
        except asyncio.CancelledError:
            self._recorder.count(metrics.CANCELLED)
            self._reply.fail(Cancelled(f"cancelled {self._cancelled_by or 'by the server'}"))
        except Exception as error:
            self._fail(translate(error))

    def cancel(self, by: str) -> None:
        """Abort in the engine and tell the client who did it."""
        self._cancelled_by = self._cancelled_by or by
        if self._task is not None:
            self._task.cancel()

    def _seconds_left(self) -> float | None:
        if self.plan.deadline is None:
            return None
        return max(0.0, self.plan.deadline - time.monotonic())

    async def _stream(self) -> None:
        self._recorder.count(metrics.PROMPT_TOKENS, len(self.plan.prompt_token_ids))
        finished = False
        async with aclosing(self._generate(self.plan)) as outputs:
            async for output in outputs:
                self._observe(output, self._answer.add(output))
                finished = output.finished
                if "abort" in self._answer.finish_reasons:
                    # Dropped at a shutdown: half an answer must not look like a whole one.
                    raise RuntimeError("the engine aborted the request")
                if self.plan.stream and not finished:
                    self._reply.send(self._answer.take(), last=False)
        if not finished:
            raise RuntimeError("the engine ended the request without an answer")
        # Only now: no cancel, deadline or error of the engine may come after the last response.
        self._reply.send(self._answer.take(), last=True)
        self._recorder.observe(metrics.END_TO_END, time.monotonic() - self.plan.arrival)
        for reason in self._answer.finish_reasons:
            self._recorder.count(metrics.SUCCESSES, labels=(("finished_reason", str(reason)),))

    def _observe(self, output: Output, new_tokens: int) -> None:
        if not new_tokens:
            return
        now = time.monotonic()
        if self._last_token_at is None:
            first = now - self.plan.arrival
            self._recorder.observe(metrics.FIRST_TOKEN, first)
            self._first_tokens.add(first, now)
        else:
            gap = (now - self._last_token_at) / new_tokens
            self._recorder.observe(metrics.INTER_TOKEN, gap, new_tokens)
        self._last_token_at = now
        self._recorder.count(metrics.GENERATION_TOKENS, new_tokens)
        if output.path is not None:
            self._recorder.count(metrics.PATH_TOKENS, new_tokens, (("path", output.path.value),))
        self._tokens.add(new_tokens, now)

    def _fail(self, error: Exception) -> None:
        metrics.count_error(self._recorder, "decoder", error)
        self._reply.fail(error)


def translate(error: Exception) -> Exception:
    """An engine's error as one of ours, where the client can do something about it."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return Refused("the engine has died; the server must be restarted")
    if isinstance(error, (VLLMClientError, ValueError)):
        return refused_by_vllm(error)
    log.error("the engine failed", exc_info=error)
    return RuntimeError(f"the engine failed ({type(error).__name__}); the server's log says more")

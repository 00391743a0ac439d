"""The ensemble's chunks as the outputs that vLLM's serving layer expects of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deepseek_flash.gateway.triton import Chunk


class Answer:
    """One request's choices, told in the kind that was asked for: what is new, or all so far."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stops: Sequence[str],
        tokenizer: Any,
    ) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._stops = stops
        self._tokenizer = tokenizer
        self._whole = [
            CompletionOutput(index, "", [], None, None if params.logprobs is None else [])
            for index in range(params.n)
        ]

    def add(self, chunk: Chunk) -> RequestOutput | None:
        """Take in a chunk; what is to be told of it now."""
        kind = self._params.output_kind
        news = []
        for index, whole in enumerate(self._whole):
            if whole.finish_reason is not None:
                continue  # a choice that has ended is told once
            new = self._news(index, chunk)
            whole.text += new.text
            whole.token_ids.extend(new.token_ids)
            if whole.logprobs is not None:
                whole.logprobs.extend(new.logprobs or ())
            if new.finish_reason is not None:
                whole.finish_reason = new.finish_reason
                whole.stop_reason = new.stop_reason = self._stop_reason(whole)
            if new.text or new.token_ids or new.finish_reason:
                news.append(new)
        finished = all(whole.finish_reason is not None for whole in self._whole)
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        outputs = news if kind == RequestOutputKind.DELTA else self._whole
        return RequestOutput(
            request_id=self._request_id,
            prompt=None,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=chunk.num_cached_tokens,
        )

    def tokens_before(self, token: int | None) -> int:
        """How many tokens of all choices come before the first such one of each."""
        ids = (whole.token_ids for whole in self._whole)
        return sum(one.index(token) if token in one else len(one) for one in ids)

    def _news(self, index: int, chunk: Chunk) -> CompletionOutput:
        positions = chunk.logprobs[index]
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = [
                {int(token): Logprob(**entry) for token, entry in position.items()}
                for position in positions or ()
            ]
        return CompletionOutput(
            index=index,
            text=chunk.texts[index],
            token_ids=list(chunk.token_ids[index]),
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason=chunk.finish_reasons[index],
        )

    def _stop_reason(self, whole: CompletionOutput) -> int | str | None:
        """The stop string or stop token with which the answer ended; None at the EOS."""
        if whole.finish_reason != "stop":
            return None
        if self._stops:
            # The ensemble cuts a stop string off the text, but its tokens are all there.
            decoded = self._tokenizer.decode(
                whole.token_ids, skip_special_tokens=self._params.skip_special_tokens
            )
            tail = decoded[len(whole.text) :]
            for found in (tail.startswith, whole.text.endswith, decoded.__contains__):
                for stop in self._stops:
                    if found(stop):
                        return stop
        last = whole.token_ids[-1] if whole.token_ids else None
        return last if last in (self._params.stop_token_ids or ()) else None

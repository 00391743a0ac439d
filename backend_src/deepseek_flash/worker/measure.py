"""Steps of made-up requests, timed before the first real one: what the cost model starts from.

The requests claim a context that nobody computed (the cache holds zeros), which costs the same.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec

from deepseek_flash.dspark.cost import Sample, measuring_points

MOST_REQUESTS = 16  # measured; more cost in proportion
CONTEXTS = (64, 1024)
REPETITIONS = {1: 5, 4: 4, 16: 2}  # by requests: small steps are noisy, large ones slow


def measure_steps(worker: Any) -> list[Sample]:
    """Time the points that the cost model wants. None where this engine cannot be measured so.

    Every worker of an engine must call it at the same time: the number of steps depends on the
    configuration alone.
    """
    runner, config = worker.model_runner, worker.vllm_config
    groups = runner.kv_cache_config.kv_cache_groups
    if (
        config.parallel_config.pipeline_parallel_size > 1  # the first stage is told the tokens
        or config.kv_transfer_config is not None
        or not all(isinstance(group.kv_cache_spec, AttentionSpec) for group in groups)
    ):
        return []
    drafts = runner.num_spec_tokens
    longest = runner.max_model_len - drafts - 2
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    most = min(MOST_REQUESTS, runner.max_num_reqs, runner.max_num_tokens // (1 + drafts))
    if most < 1 or longest < 2:
        return []
    lengths = defaultdict(list)
    for requests, rows, context in measuring_points(most, contexts, drafts):
        lengths[requests, context].append(rows // requests - 1)
    samples = []
    for requests, context in sorted(lengths):
        steps = _Steps(worker, requests, context)
        for length in lengths[requests, context] * REPETITIONS.get(requests, 1):
            seconds = steps.run(length)
            samples.append(Sample(requests, requests * (1 + length), context, seconds))
        steps.close()
    return samples


class _Steps:
    """Decode steps of the same requests, again and again."""

    def __init__(self, worker: Any, requests: int, context: int) -> None:
        self._worker = worker
        self._random = random.Random(0)
        runner = worker.model_runner
        self._vocab = runner.model_config.get_vocab_size()
        self._context = context
        self._names = [f"measure-{requests}-{context}-{number}" for number in range(requests)]
        blocks = self._blocks(runner, context + runner.num_spec_tokens + 2)
        greedy = SamplingParams(temperature=0.0, max_tokens=runner.max_model_len)
        # Their last prompt token makes the first token; all steps to be timed follow that one.
        self._execute(
            new=[
                NewRequestData(
                    req_id=name, prompt_token_ids=self._tokens(context - 1), mm_features=[],
                    sampling_params=greedy, pooling_params=None, block_ids=next(blocks),
                    num_computed_tokens=context - 2, lora_request=None,
                )
                for name in self._names
            ],
            lengths=0,
        )  # fmt: skip
        self.run(0)  # warm

    def run(self, length: int) -> float:
        """Seconds of a step with so many draft tokens each."""
        count = len(self._names)
        cached = CachedRequestData(
            req_ids=self._names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * count,
            num_computed_tokens=[self._context - 1] * count,
            num_output_tokens=[1] * count,  # forgets what the step before brought
        )
        begin = time.perf_counter()
        self._execute(cached=cached, lengths=length)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._execute(finished=set(self._names))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def _blocks(self, runner: Any, tokens: int) -> Iterator[tuple[list[int], ...]]:
        """Block ids for one request after another, by group of the cache. Block 0 is vLLM's own."""
        config = runner.kv_cache_config
        usable = config.num_blocks - 1
        at = 0
        while True:
            ids: list[list[int]] = []
            for group in config.kv_cache_groups:
                needed = -(-tokens // group.kv_cache_spec.block_size)
                ids.append([1 + (at + number) % usable for number in range(needed)])
                at += needed
            yield tuple(ids)

    def _execute(
        self,
        new: list[NewRequestData] | None = None,
        cached: CachedRequestData | None = None,
        lengths: int | None = None,
        finished: set[str] | None = None,
    ) -> None:
        scheduled = {} if lengths is None else dict.fromkeys(self._names, 1 + lengths)
        output = SchedulerOutput(
            scheduled_new_reqs=new or [],
            scheduled_cached_reqs=cached or CachedRequestData.make_empty(),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={
                name: self._tokens(lengths) for name in self._names if lengths
            },
            scheduled_encoder_inputs={},
            finished_req_ids=finished or set(),
            free_encoder_mm_hashes=[],
        )
        if self._worker.execute_model(output) is None:
            self._worker.sample_tokens(None)

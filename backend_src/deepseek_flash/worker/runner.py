"""vLLM's model runners with DSpark between their passes (Model Runner V1).

Everything here leans on vLLM's inside; ``version`` says of which vLLM.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deepseek_flash.worker.attention import LastLayer, Pass, overhear_last_layer
from deepseek_flash.worker.proposer import SparkProposer, Step
from deepseek_flash.worker.requests import RequestState, Wishes
from deepseek_flash.worker.rows import Rows
from deepseek_flash.worker.sampling import (
    SparkRejectionSampler,
    edits_logits,
    limits_of,
    logits_processors,
    mend_cpu_kernels,
    put_back,
    takes_the_best,
)
from deepseek_flash.worker.version import check_vllm

BURST_RANGE = "dspark: burst"
# Steps. It changes slowly, no decision was ever seen to depend on it, and it takes half a
# millisecond; the other two signals come with what decisions do need.
VARIANCE_EVERY = 8


class SparkRunner:
    """To be put before one of vLLM's runners.

    All workers of a pipeline's last stage sample, the first of them drafts for all.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_vllm()
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        runner: Any = self
        self.spark: SparkProposer | None = None
        self._last_layer: LastLayer | None = None
        self._rows: Rows | None = None
        self._pass_began = 0.0
        self._steps = 0
        if not get_pp_group().is_last_rank:
            return
        runner.input_batch.logitsprocs = logits_processors(vllm_config, device)
        runner.rejection_sampler = SparkRejectionSampler(
            runner.sampler, runner.speculative_config, device
        )
        if get_tensor_model_parallel_rank() == 0:
            self.spark = runner.drafter
        # vLLM would take away all drafts once one request comes near the end of the context. Ours
        # are cut for each request by itself.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        runner: Any = self
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.spark is not None:
            self._last_layer = overhear_last_layer(
                runner.compilation_config.static_forward_context,
                runner.max_num_reqs,
                runner.num_spec_tokens,
                runner.max_num_tokens,
                torch.empty(0, dtype=runner.dtype, device=runner.device),
            )

    # -- before a pass -----------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._pass_began = time.perf_counter()
        drafted = scheduler_output.scheduled_spec_decode_tokens
        with ExitStack() as ranges:
            # One for each request that bursts: a profile shows as many as the counter counts.
            for _ in range(self.spark.bursts(drafted) if self.spark and drafted else 0):
                ranges.enter_context(torch.profiler.record_function(BURST_RANGE))
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _update_states(self, scheduler_output: Any) -> Any:
        ours = [
            (new, wishes)
            for new in scheduler_output.scheduled_new_reqs
            if (wishes := Wishes.from_extra_args(new.sampling_params.extra_args)) is not None
        ]
        for new, wishes in ours:
            put_back(new.sampling_params, wishes)
        done = super()._update_states(scheduler_output)  # type: ignore[misc]
        if self.spark is not None:
            for new, wishes in ours:
                limits = limits_of(new.sampling_params, wishes)
                self.spark.add(RequestState(new.req_id, new.prompt_token_ids, limits, wishes))
        return done

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        if self.spark is not None:
            self.spark.remove(req_id)
        if self._last_layer is not None:
            self._last_layer.release(req_id)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        if self._last_layer is not None and self.spark is not None:
            batch = self.input_batch  # type: ignore[attr-defined]
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._last_layer.expect(
                batch.req_ids,
                Pass(
                    num_scheduled_tokens.tolist(),
                    batch.num_computed_tokens_cpu[: batch.num_reqs].tolist(),
                    [len(drafts.get(name, ())) for name in batch.req_ids],
                ),
                self._steps % VARIANCE_EVERY == 0 or self.spark.lacks_variance(batch.req_ids),
            )
            self._steps += 1
        return prepared

    # -- after it ----------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        batch = self.input_batch  # type: ignore[attr-defined]
        lengths = spec_decode_metadata.num_draft_tokens if spec_decode_metadata else []
        self._rows = None
        if self.spark is not None and logits is not None:
            self._rows = Rows(logits, lengths or [0] * batch.num_reqs)
        thinking = batch.thinking_budget_state_holder
        if thinking is not None and thinking.has_tracked_requests():
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        metadata = batch.sampling_metadata
        if self._rows is not None and takes_the_best(metadata):
            drafts = spec_decode_metadata.draft_token_ids.tolist() if any(lengths) else []
            tokens = self._rows.verify(drafts)
            if tokens is not None:
                return SamplerOutput(torch.from_numpy(tokens), logprobs_tensors=None)
        if any(lengths):
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        # Nothing was guessed: as without speculation. That sampler may edit the logits in place,
        # the one for drafts works on copies.
        kept = logits
        if logits is not None and self._rows is not None and edits_logits(metadata):
            kept = logits.clone()
        return super()._sample(kept, None)  # type: ignore[misc]

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        batch = self.input_batch  # type: ignore[attr-defined]
        done = time.perf_counter()
        rows, self._rows = self._rows, None
        lengths: list[int] = spec_decode_metadata.num_draft_tokens
        if self.spark is None or rows is None:
            return [[] for _ in batch.req_ids]
        counts = [len(token_ids) for token_ids in sampled_token_ids]
        facts = rows.describe(counts)
        variances = None
        if self._last_layer is not None:
            variances = self._last_layer.variance([max(count, 1) - 1 for count in counts])
        self._note_signatures(sampled_token_ids, lengths, sample_hidden_states)
        scheduled = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        return self.spark.step(
            Step(
                request_ids=batch.req_ids,
                token_ids=sampled_token_ids,
                lengths=lengths,
                facts=facts,
                variances=variances,
                lookup=rows.lookup,
                decodes_only=all(
                    tokens == 1 + length for tokens, length in zip(scheduled, lengths)
                ),
                began=self._pass_began,
                done=done,
            )
        )

    def _note_signatures(
        self, sampled_token_ids: list[list[int]], lengths: list[int], states: torch.Tensor
    ) -> None:
        """Keep the last layer's state at the end of the prompts that ended in this pass."""
        assert self.spark is not None
        starts = np.cumsum([0, *(1 + length for length in lengths)])
        for request, name in enumerate(self.input_batch.req_ids):  # type: ignore[attr-defined]
            state = self.spark.requests.get(name)
            if state is not None and not state.generated and sampled_token_ids[request]:
                state.signature = states[starts[request]].float().cpu().numpy().tobytes()


class SparkCPUModelRunner(SparkRunner, CPUModelRunner):  # type: ignore[misc]
    """On a CPU."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        mend_cpu_kernels()
        super().__init__(vllm_config, device)


class SparkGPUModelRunner(SparkRunner, GPUModelRunner):  # type: ignore[misc]
    """On a GPU."""

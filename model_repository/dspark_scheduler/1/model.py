"""Triton's door to the planner: client tensors in, a sealed plan or an error out."""

import os

import triton_python_backend_utils as pb_utils
from deepseek_flash import metrics
from deepseek_flash.config import SchedulerConfig, read_engine_args
from deepseek_flash.contract import RequestError
from deepseek_flash.dspark.fields import SamplingLimits
from deepseek_flash.dspark.planner import Planner, PlannerOptions
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.stage import internal_error, open_stage
from deepseek_flash.triton_io import error_response, read_client_request, seal, sealed_tensor
from deepseek_flash.triton_metrics import MetricsPublisher


class TritonPythonModel:
    def initialize(self, args):
        self._stage = stage = open_stage(args, SchedulerConfig)
        config, engine = stage.config, read_engine_args(stage.model_json, os.environ)
        tokenizer = load_tokenizer(
            engine.get("tokenizer") or engine["model"],
            engine.get("tokenizer_revision") or engine.get("revision"),
            bool(engine.get("trust_remote_code", False)),
        )
        options = PlannerOptions(
            burst_steps=config.dspark_burst_steps,
            probe_tokens=config.probe_tokens,
            queue_limit=config.queue_limit,
            tenant_queue_limit=config.tenant_queue_limit,
            default_timeout_ms=config.default_timeout_ms,
            limits=SamplingLimits(
                vocab_size=0,  # known with the engine's facts
                max_n=config.max_n,
                max_logprobs=config.max_logprobs,
                max_stop_bytes=config.max_stop_bytes,
                default_seed=config.default_seed,
            ),
        )
        runtime = stage.runtime
        self._planner = Planner(options, PromptEncoder(tokenizer), runtime.board, runtime.facts)
        self._metrics = MetricsPublisher(
            args["model_name"],
            stage.recorder,
            metrics.SCHEDULER_METRICS,
            lambda: stage.recorder.gauge(metrics.IN_FLIGHT, runtime.board.in_flight),
        )

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        plan = None
        try:
            plan = self._planner.plan(read_client_request(request))
            sealed = seal(plan, self._stage.runtime.secret)
            return pb_utils.InferenceResponse(output_tensors=[sealed_tensor("plan", sealed)])
        except RequestError as error:
            metrics.count_error(self._stage.recorder, "scheduler", error)
            return error_response(error)
        except Exception as error:  # ours to mend; the client must not hang
            self._planner.abandon(plan)
            metrics.count_error(self._stage.recorder, "scheduler", error)
            return error_response(internal_error("planning", error))

    def finalize(self):
        self._metrics.close()

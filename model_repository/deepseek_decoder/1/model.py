"""Triton's door to vLLM: a sealed plan and lookup in, a stream of answers out."""

import os

from deepseek_flash import metrics
from deepseek_flash.config import DecoderConfig, read_engine_args
from deepseek_flash.contract import CancelPlan, Control, Lookup, RequestError, RequestPlan
from deepseek_flash.decoder.engine import start_engine
from deepseek_flash.decoder.feedback import BackgroundFeedback
from deepseek_flash.decoder.service import DecoderService
from deepseek_flash.stage import internal_error, open_stage
from deepseek_flash.triton_io import call_cache, has_input, read_sealed
from deepseek_flash.triton_metrics import MetricsPublisher


class TritonPythonModel:
    def initialize(self, args):
        self._stage = stage = open_stage(args, DecoderConfig)
        engine_args = read_engine_args(stage.model_json, os.environ)
        engine = start_engine(engine_args, os.environ, stage.config)
        self._feedback = BackgroundFeedback(
            lambda message: call_cache(message, stage.runtime.secret), stage.recorder
        )
        self._service = DecoderService(engine, stage.runtime, stage.recorder, self._feedback)
        self._metrics = MetricsPublisher(
            args["model_name"], stage.recorder, metrics.DECODER_METRICS, self._service.set_gauges
        )

    def execute(self, requests):
        secret = self._stage.runtime.secret
        for request in requests:
            sender = request.get_response_sender()
            try:
                if has_input(request, "control"):
                    control = read_sealed(request, "control", (Control,), secret)
                    self._service.submit(control, None, sender)
                    continue
                plan = read_sealed(request, "plan", (RequestPlan, CancelPlan), secret)
                lookup = read_sealed(request, "lookup", (Lookup,), secret)
                self._service.submit(plan, lookup, sender)
            except RequestError as error:
                self._service.refuse(error, sender)
            except Exception as error:  # ours to mend; the client must not hang
                self._service.refuse(internal_error("decoding", error), sender)

    def finalize(self):
        self._metrics.close()
        self._service.close()
        self._feedback.close()

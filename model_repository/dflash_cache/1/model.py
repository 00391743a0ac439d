"""Triton's door to the cache: a sealed plan in, a sealed lookup out; outcomes and orders."""

import os

from deepseek_flash import metrics
from deepseek_flash.config import CacheConfig, read_engine_args
from deepseek_flash.contract import (
    CacheOrder,
    CancelPlan,
    Lookup,
    LookupResult,
    NeighboursQuery,
    Outcome,
    RequestError,
    RequestPlan,
)
from deepseek_flash.dflash.open import open_cache
from deepseek_flash.stage import internal_error, open_stage
from deepseek_flash.triton_io import SealedReply, has_input, read_sealed
from deepseek_flash.triton_metrics import MetricsPublisher


class TritonPythonModel:
    def initialize(self, args):
        self._stage = stage = open_stage(args, CacheConfig)
        engine_args = read_engine_args(stage.model_json, os.environ)
        self._cache = open_cache(stage.config, engine_args, stage.runtime.secret, stage.recorder)
        self._metrics = MetricsPublisher(
            args["model_name"], stage.recorder, metrics.CACHE_METRICS, self._cache.set_gauges
        )

    def execute(self, requests):
        secret = self._stage.runtime.secret
        for request in requests:
            # Answered by the sender, as an update or a question is not waited for here.
            reply = SealedReply(request.get_response_sender(), secret)
            try:
                if has_input(request, "message"):
                    kinds = (Outcome, NeighboursQuery, CacheOrder)
                    self._cache.submit(read_sealed(request, "message", kinds, secret), reply.send)
                    continue
                plan = read_sealed(request, "plan", (RequestPlan, CancelPlan), secret)
                if isinstance(plan, RequestPlan):
                    reply.send(self._cache.lookup(plan))
                else:
                    reply.send(Lookup(plan.plan_id, "", LookupResult.OFF))
            except RequestError as error:
                metrics.count_error(self._stage.recorder, "cache", error)
                reply.send(error)
            except Exception as error:  # ours to mend; the client must not hang
                metrics.count_error(self._stage.recorder, "cache", error)
                reply.send(internal_error("looking up", error))

    def finalize(self):
        self._metrics.close()
        self._cache.close()

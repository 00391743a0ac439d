"""Triton's door to the cache: a sealed plan in, a sealed lookup out."""

import triton_python_backend_utils as pb_utils
from deepseek_flash import metrics
from deepseek_flash.config import CacheConfig
from deepseek_flash.contract import CancelPlan, Lookup, LookupResult, RequestError, RequestPlan
from deepseek_flash.dflash.cache import NullCache
from deepseek_flash.stage import open_stage
from deepseek_flash.triton_io import error_response, read_sealed, seal, sealed_tensor
from deepseek_flash.triton_metrics import MetricsPublisher


class TritonPythonModel:
    def initialize(self, args):
        self._stage = open_stage(args, CacheConfig)
        self._cache = NullCache()
        self._metrics = MetricsPublisher(
            args["model_name"], self._stage.recorder, metrics.CACHE_METRICS
        )

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        secret = self._stage.runtime.secret
        try:
            plan = read_sealed(request, "plan", (RequestPlan, CancelPlan), secret)
        except RequestError as error:
            metrics.count_error(self._stage.recorder, "cache", error)
            return error_response(error)
        if isinstance(plan, RequestPlan):
            lookup = self._cache.lookup(plan)
        else:
            lookup = Lookup(plan.plan_id, "", LookupResult.MISS)
        tensor = sealed_tensor("lookup", seal(lookup, secret))
        return pb_utils.InferenceResponse(output_tensors=[tensor])

    def finalize(self):
        self._metrics.close()

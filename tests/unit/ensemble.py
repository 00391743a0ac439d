"""The ensemble over gRPC in this process: its own planner, cache and decoder, as they are served.

Only Triton's core and vLLM's engine are stand-ins: the "model" says what a test tells it to.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import torch
from deepseek_flash import metrics
from deepseek_flash.contract import EngineFacts, Lookup, LookupResult, RequestError, RequestPlan
from deepseek_flash.decoder.engine import engine_choices, sampling_params
from deepseek_flash.decoder.output import Output, Piece
from deepseek_flash.decoder.service import DecoderService
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.fingerprint import FingerprintKey
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import SemanticWindows
from deepseek_flash.dspark.fields import SamplingLimits
from deepseek_flash.dspark.planner import Planner, PlannerOptions
from deepseek_flash.dspark.prompt import PromptEncoder
from deepseek_flash.runtime import Runtime
from deepseek_flash.triton_io import error_response, read_client_request
from deepseek_flash.worker.token_text import TokenText
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from tests.unit import gateway_model as model
from tests.unit.stack import DirectFeedback

FINAL = 1
HANG = object()  # a step of an answer that never comes
_DTYPES = {"BOOL": np.bool_, "INT32": np.int32, "UINT32": np.uint32, "FP32": np.float32}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values

    def as_numpy(self) -> Any:
        return self.values


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "X"

    def __init__(self, message: str, code: str) -> None:
        self.message = message


PB_UTILS = SimpleNamespace(
    Tensor=Tensor,
    TritonError=TritonError,
    InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
        tensors=output_tensors, error=error
    ),
    get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Logger=SimpleNamespace(log_warn=print),
)
"""In the place of ``triton_python_backend_utils``."""


class ScriptedEngine:
    """In the place of vLLM's. ``says(plan, index)`` gives the steps of an answer, each a text whose
    tokens come together, token ids, an exception, a finish reason "abort", or HANG."""

    guesses = False
    steps = preemptions = 0
    load = (0, 0)

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.facts = EngineFacts("model", "fake", model.CONTEXT, len(model.VOCABULARY))
        self.says: Callable[[RequestPlan, int], list[Any]] = lambda plan, index: ["ok"]
        self.plans: list[RequestPlan] = []  # one a run
        self.originals: dict[str, RequestPlan] = {}  # as they were planned
        self.running = 0
        self.pause = 0.0  # seconds between two steps
        self.may_begin: Callable[[], bool] = lambda: True  # until then a run makes nothing

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def text(self, plan: RequestPlan) -> TokenText:
        return TokenText(self._tokenizer, plan.prompt_token_ids, sampling_params(plan.sampling))

    async def generate(self, plan: RequestPlan, chain: Any = ()) -> Any:
        # Whatever was generated before and is continued now stands at the prompt's end.
        first = self.originals.get(plan.plan_id.removesuffix("-more"), plan)
        skip = len(plan.prompt_token_ids) - len(first.prompt_token_ids)
        self.plans.append(plan)
        self.running += 1
        try:
            while not self.may_begin():
                await asyncio.sleep(0.001)
            choices = engine_choices(plan.sampling)
            for index in range(choices):
                async for piece in self._choice(plan, index, self.says(first, index), skip):
                    done = piece.finish_reason is not None and index == choices - 1
                    yield Output((piece,), done)
                    await asyncio.sleep(self.pause)
        finally:
            self.running -= 1

    async def _choice(self, plan: RequestPlan, index: int, steps: list[Any], skip: int) -> Any:
        text, sampling, made = self.text(plan), plan.sampling, 0
        whole = [*steps, [model.EOS_ID]]
        for step in itertools.cycle(whole) if sampling.ignore_eos else whole:
            if isinstance(step, Exception):
                raise step
            if step is HANG:
                await asyncio.Event().wait()
            if step == "abort":
                yield Piece(index, "", (), "abort")
                return
            ids = model.ids_of(step) if isinstance(step, str) else list(step)
            ids, skip = ids[skip:], max(0, skip - len(ids))
            taken: list[int] = []
            reason = stop = None
            for token in ids:
                taken.append(token)
                made += 1
                ends = token == model.EOS_ID and not sampling.ignore_eos
                ends = ends or token in sampling.stop_token_ids
                stop = text.add(token, ends)
                if stop is not None or ends:
                    reason = "stop"
                elif made == sampling.max_tokens:
                    reason = "length"
                if reason:
                    break
            if taken:
                logprobs = self._logprobs(taken, sampling.logprobs)
                yield Piece(index, text.take(reason is not None), tuple(taken), reason, stop,
                            None, logprobs)  # fmt: skip
            if reason:
                return

    def _logprobs(self, ids: list[int], wanted: int | None) -> Any:
        if wanted is None:
            return None
        found = []
        for token in ids:
            others = [(token + n + 1) % 200 + 4 for n in range(max(0, wanted - 1))]
            found.append({
                one: SimpleNamespace(logprob=-0.5 * rank, rank=rank + 1,
                                     decoded_token=self._tokenizer.decode([one]))
                for rank, one in enumerate([token, *others])
            })  # fmt: skip
        return found

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class Ensemble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A started server. ``close`` ends it."""

    def __init__(self, tokenizer: Any, runtime: Runtime) -> None:
        self.engine = ScriptedEngine(tokenizer)
        self._tokenizer = tokenizer
        self.runtime = runtime
        self.recorder = metrics.Recorder()
        self.options = PlannerOptions(
            burst_steps=3, probe_tokens=0, queue_limit=256, tenant_queue_limit=0,
            default_timeout_ms=0, limits=SamplingLimits(vocab_size=0),
        )  # fmt: skip
        self.reset()
        self.service = DecoderService(self.engine, runtime, self.recorder, self.feedback)
        self.planner = self.planner_with()
        self._one_at_a_time = threading.Lock()
        self.tells_the_end = True  # by the final flag on the last response with content
        self.planned: list[RequestPlan] = []
        self.asked: list[Any] = []
        self.port = self.serve(0)

    def planner_with(self, **options: Any) -> Planner:
        """A planner of other options. By default there are no extensions, so that runs count."""
        board, facts = self.runtime.board, self.runtime.facts
        return Planner(
            replace(self.options, **options), PromptEncoder(self._tokenizer), board, facts
        )

    def serve(self, port: int) -> int:
        """Listen; on which port."""
        self._server = grpc.server(ThreadPoolExecutor(128))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        found = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return int(found)

    def reset(self) -> None:
        """An empty cache."""
        table = Table(256, torch.device("cpu"), block=16, hidden_size=2, tenant_quota=None)
        self.cache = DFlashCache(
            FingerprintKey.derive(b"secret", 64), table, SemanticWindows("none")
        )
        if hasattr(self, "feedback"):
            self.feedback.cache = self.cache
        else:
            self.feedback = DirectFeedback(self.cache)

    @property
    def runs(self) -> int:
        """Generations that the engine has started."""
        return len(self.engine.plans)

    def close(self) -> None:
        self._server.stop(0)
        self.service.close()

    # -- Triton's service ----------------------------------------------------------------------

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        for message in requests:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            sender = SimpleNamespace(send=lambda r, flags: answers.put((r, flags)))  # noqa: B023
            self._submit(_request(message), sender)
            while True:
                response, flags = answers.get()
                yield _message(response, bool(flags) and self.tells_the_end)
                if flags:
                    break

    def _submit(self, request: Any, sender: Any) -> None:
        try:
            client = read_client_request(request)
            self.asked.append(client)
            with self._one_at_a_time:  # as Triton calls the one instance of the scheduler
                plan = self.planner.plan(client)
        except RequestError as error:
            sender.send(error_response(error), FINAL)
            return
        if not isinstance(plan, RequestPlan):
            lookup = Lookup(plan.plan_id, "", LookupResult.OFF)
        else:
            self.engine.originals[plan.plan_id] = plan
            self.planned.append(plan)
            lookup = self.cache.lookup(plan)
        self.service.submit(plan, lookup, sender)


def _request(message: Any) -> Any:
    tensors = {}
    for place, entry in enumerate(message.inputs):
        raw = message.raw_input_contents[place]
        if entry.datatype == "BYTES":
            values = deserialize_bytes_tensor(raw)
        else:
            values = np.frombuffer(raw, dtype=_DTYPES[entry.datatype])
        tensors[entry.name] = Tensor(entry.name, values.reshape(list(entry.shape)))
    return SimpleNamespace(tensors=tensors, parameters=lambda: "{}", timeout=lambda: 0)


def _message(response: Any, final: bool) -> Any:
    if response.error is not None:
        text = f"in ensemble 'deepseek_flash', {response.error.message}"
        return service_pb2.ModelStreamInferResponse(error_message=text)
    made = service_pb2.ModelInferResponse(model_name="deepseek_flash")
    for tensor in response.tensors:
        text = tensor.values.dtype == np.object_
        output = made.outputs.add()
        output.name = tensor.name
        output.datatype = "BYTES" if text else _NAMES[tensor.values.dtype]
        output.shape.extend(tensor.values.shape)
        raw = serialize_byte_tensor(tensor.values).item() if text and tensor.values.size else (
            b"" if text else tensor.values.tobytes()
        )  # fmt: skip
        made.raw_output_contents.append(raw)
    made.parameters["triton_final_response"].bool_param = final
    return service_pb2.ModelStreamInferResponse(infer_response=made)

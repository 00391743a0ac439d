"""Plans a request: checks what the client sent and makes the RequestPlan, or refuses by name."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deepseek_flash.admission import AdmissionBoard, Claim
from deepseek_flash.contract import (
    CancelPlan,
    ClientRequest,
    EngineFacts,
    InvalidField,
    Refused,
    RequestPlan,
    Sampling,
)
from deepseek_flash.dflash.fingerprint import replayable
from deepseek_flash.dspark.fields import SamplingLimits
from deepseek_flash.dspark.prompt import Prompt, PromptEncoder
from deepseek_flash.dspark.sampling import parse_sampling

SHORTEST_CANCEL_TOKEN = 16  # characters: it is the only thing that protects a request
LONGEST_NAME = 512  # bytes of session_id, cache_salt, cancel_token

# Parameters that Triton's doors put beside the sampling parameters and that are none.
_RESERVED = ("id", "priority", "timeout", "binary_data_output", "classification", "headers")
_RESERVED_PREFIXES = ("sequence_", "triton_", "shared_memory_")


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The scheduler's settings, from ``config``."""

    burst_steps: int
    probe_tokens: int
    queue_limit: int
    tenant_queue_limit: int
    default_timeout_ms: int
    limits: SamplingLimits


class Planner:
    """Turns client requests into plans. One instance, one thread."""

    def __init__(
        self,
        options: PlannerOptions,
        encoder: PromptEncoder,
        board: AdmissionBoard,
        facts: Callable[[], EngineFacts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._encoder = encoder
        self._board = board
        self._facts = facts
        self._clock = clock

    def plan(self, request: ClientRequest) -> RequestPlan | CancelPlan:
        """Plan one request.

        Raises:
            InvalidField: the message starts with the field's name.
            Refused: a queue limit is reached, or the server is not ready or stopping.
        """
        arrival = self._clock()
        cancel_key = _cancel_key(request.cancel_token)
        sources = [
            name
            for name in ("text_input", "input_ids", "messages")
            if getattr(request, name) is not None
        ]
        if not sources:
            if cancel_key:
                return CancelPlan(plan_id=secrets.token_hex(16), cancel_key=cancel_key)
            raise InvalidField("text_input", "missing; send text_input, input_ids or messages")
        if len(sources) > 1:
            raise InvalidField(sources[1], f"only one prompt, {sources[0]} was sent too")
        if request.stream and request.exclude_input_in_output is False:
            raise InvalidField("exclude_input_in_output", "must not be false when streaming")
        try:
            facts = self._facts()
        except FileNotFoundError:
            raise Refused("the engine is still starting") from None
        limits = replace(self._options.limits, vocab_size=facts.vocab_size)
        asked = parse_sampling(sampling_fields(request), limits)
        text = _text("text_input", request.text_input)
        prompt = self._prompt(request, text, facts)
        room = facts.max_model_len - len(prompt.ids)
        sampling = _fit(asked.sampling, asked.max_tokens, room)
        if request.returns.cumulative_logprob and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # only then the engine sums them up
        salt = _text("cache_salt", request.cache_salt, LONGEST_NAME)
        plan = RequestPlan(
            plan_id=secrets.token_hex(16),
            slot=-1,
            generation=0,
            namespace=facts.namespace,
            arrival=arrival,
            deadline=self._deadline(request, arrival),
            prompt_token_ids=tuple(prompt.ids),
            prepended_text=text if _prepends(request) else "",
            stream=request.stream,
            sampling=sampling,
            returns=request.returns,
            turn_starts=_turn_starts(request, prompt),
            session_id=_text("session_id", request.session_id, LONGEST_NAME),
            cache_salt=salt,
            cancel_key=cancel_key,
            burst_steps=self._options.burst_steps,
            use_dflash=asked.use_dflash,
            use_dspark=asked.use_dspark,
        )
        if asked.max_tokens == 1:
            plan = replace(plan, extend_to=self._extend_to(plan, room))
        # Admission comes last: what is refused above must not hold a place.
        claim = self._board.claim(salt, self._options.queue_limit, self._options.tenant_queue_limit)
        return replace(plan, slot=claim.slot, generation=claim.generation)

    def abandon(self, plan: RequestPlan | CancelPlan | None) -> None:
        """Give up the place of a plan that does not leave the scheduler."""
        if isinstance(plan, RequestPlan):
            self._board.abandon(Claim(plan.slot, plan.generation))

    def _prompt(self, request: ClientRequest, text: str, facts: EngineFacts) -> Prompt:
        room = facts.max_model_len
        if request.text_input is not None:
            name = "text_input"
            prompt = Prompt(self._encoder.from_text(text, room) if text else [])
        elif request.messages is not None:
            chat = _text("messages", request.messages)
            name, prompt = "messages", self._encoder.from_messages(chat, room)
        else:
            name, prompt = "input_ids", Prompt(list(request.input_ids or ()))
        if not prompt.ids:
            raise InvalidField(name, "the prompt is empty")
        for token in prompt.ids:
            if not 0 <= token < facts.vocab_size:
                raise InvalidField(
                    name, f"token id {token} is outside the vocabulary of {facts.vocab_size}"
                )
        if len(prompt.ids) >= facts.max_model_len:
            raise InvalidField(
                name,
                f"this model's maximum context length is {facts.max_model_len} tokens, "
                f"but the prompt has {len(prompt.ids)}",
            )
        return prompt

    def _extend_to(self, plan: RequestPlan, room: int) -> int:
        """To how many tokens a one-token answer may grow; 0: nobody could use them."""
        tokens = min(self._options.probe_tokens, room)
        return tokens if tokens > 1 and plan.use_dflash and replayable(plan) else 0

    def _deadline(self, request: ClientRequest, arrival: float) -> float | None:
        asked = request.request_timeout_ms
        if asked is not None and asked < 1:
            raise InvalidField("request_timeout_ms", f"must be at least 1, got {asked}")
        seconds = [
            limit
            for limit in (
                (asked if asked is not None else self._options.default_timeout_ms) / 1e3,
                request.transport_timeout_us / 1e6,
            )
            if limit > 0
        ]
        return arrival + min(seconds) if seconds else None


def sampling_fields(request: ClientRequest) -> Mapping[str, Any]:
    """Where the sampling parameters are: the tensor wins over the request's own parameters.

    Raises:
        InvalidField: the tensor is not a JSON object, or has a key twice.
    """
    if request.sampling_parameters is None:
        return {
            name: value
            for name, value in request.parameters.items()
            if name not in _RESERVED and not name.startswith(_RESERVED_PREFIXES)
        }
    text = _text("sampling_parameters", request.sampling_parameters)
    try:
        fields = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidField("sampling_parameters", f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidField("sampling_parameters", "must be a JSON object")
    return fields


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise InvalidField(name, "given twice")
        fields[name] = value
    return fields


def _no_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _fit(sampling: Sampling, asked: int | None, room: int) -> Sampling:
    """Clamp the answer to what is left of the context; clients ask for 256,000 by default."""
    max_tokens = room if asked is None else min(asked, room)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def _prepends(request: ClientRequest) -> bool:
    return not request.stream and not request.exclude_input_in_output


def _turn_starts(request: ClientRequest, prompt: Prompt) -> tuple[int, ...]:
    starts, length = request.turn_starts, len(prompt.ids)
    if starts is None:
        return prompt.turn_starts
    if request.input_ids is None:
        raise InvalidField("turn_starts", "goes with input_ids only")
    if any(not 0 <= start < length for start in starts):
        raise InvalidField("turn_starts", f"offsets must be in [0, {length - 1}]")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise InvalidField("turn_starts", "offsets must ascend")
    return tuple(starts)


def _cancel_key(token: bytes | None) -> str:
    if token is None:
        return ""
    text = _text("cancel_token", token, LONGEST_NAME)
    if len(text) < SHORTEST_CANCEL_TOKEN:
        raise InvalidField("cancel_token", f"must have at least {SHORTEST_CANCEL_TOKEN} characters")
    return hashlib.blake2b(token, digest_size=16).hexdigest()


def _text(name: str, value: bytes | None, longest: int | None = None) -> str:
    if value is None:
        return ""
    if longest is not None and len(value) > longest:
        raise InvalidField(name, f"must be at most {longest} bytes")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidField(name, "must be valid UTF-8") from None

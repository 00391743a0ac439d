"""The values that cross a stage of the ensemble, as frozen dataclasses.

``triton_io`` turns them into tensors and back; nothing else depends on their wire form.
Shapes, units and who sets a field stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RequestError(Exception):
    """A request that is refused. ``reason`` is the label of the error metric."""

    reason = "internal"


class InvalidField(RequestError):
    """The client sent something we cannot serve; the message starts with the field's name."""

    reason = "invalid_argument"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.field = name


class Refused(RequestError):
    """The server cannot take the request now (queue limit, shutting down); try again later."""

    reason = "refused"


class Expired(RequestError):
    """The request's deadline passed before it was finished."""

    reason = "deadline"


class Cancelled(RequestError):
    """The request was cancelled by its token or by the operator."""

    reason = "cancelled"


DEFAULT_MAX_TOKENS = 16  # vLLM's, and so the vLLM backend's


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling fields after defaulting and clamping. Names and meaning are vLLM's.

    Only ``dspark.sampling`` makes these; a value of this type is always in range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0.0 means greedy; never between 0 and vLLM's floor of 0.01
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    seed: int | None = None  # None: unseeded. Greedy requests need none.
    stop: tuple[str, ...] = ()  # sorted: the order must not change the answer
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = (
        DEFAULT_MAX_TOKENS  # at least 1; prompt + max_tokens never exceeds the context
    )
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Returns:
    """Which optional outputs the client asked for (the ``return_*`` inputs)."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_cached_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client sent to the ensemble, tensor by tensor; None where it sent nothing.

    Read by ``triton_io``, judged by ``dspark.planner``: values may be anything.
    """

    text_input: bytes | None = None
    input_ids: list[int] | None = None
    messages: bytes | None = None
    turn_starts: list[int] | None = None
    stream: bool = False
    sampling_parameters: bytes | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # the request's own parameters
    exclude_input_in_output: bool | None = None
    returns: Returns = Returns()
    session_id: bytes | None = None
    cache_salt: bytes | None = None
    cancel_token: bytes | None = None
    request_timeout_ms: int | None = None
    transport_timeout_us: int = 0  # Triton's own request timeout (gRPC); 0: none


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One generation, ready to run. Made by ``dspark_scheduler``, run by ``deepseek_decoder``."""

    plan_id: str  # made by us, unguessable; the engine's request id
    slot: int  # place on the admission board
    generation: int  # of that slot: a plan is run at most once
    namespace: str  # digest of the model this was planned for
    arrival: float  # seconds on the machine's monotonic clock
    deadline: float | None  # same clock; None: no limit
    prompt_token_ids: tuple[int, ...]
    prepended_text: str  # goes before the text of an answer that is not streamed
    stream: bool
    sampling: Sampling
    returns: Returns
    turn_starts: tuple[int, ...]  # ascending offsets into prompt_token_ids
    session_id: str  # "": a session of one turn
    cache_salt: str  # "": the common tenant
    cancel_key: str  # digest of the client's cancel token, "" for none
    burst_steps: int  # most tokens guessed per burst, 1 or more
    use_dflash: bool
    use_dspark: bool
    extend_to: int = 0  # of a probe: tokens that the cache would like to know; 0: it is none


@dataclass(frozen=True, slots=True)
class CancelPlan:
    """A client's wish to cancel the request that carries the same token."""

    plan_id: str
    cancel_key: str


class LookupResult(StrEnum):
    EXACT = "exact"  # this very context: replayed, whole or as a beginning
    WINDOW = "window"  # the same turns after another history: drafts only
    MISS = "miss"
    OFF = "off"  # no cache for this request: it runs alone, and its outcome is not told


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated after a context."""

    token_ids: tuple[int, ...]
    complete: bool  # the answer ends with these: the last is an end-of-sequence or stop token
    # Probability of the best token at each, as DSpark's worker saw it; empty: not known.
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Lookup:
    """What ``dflash_cache`` knows about a plan."""

    plan_id: str
    namespace: str
    result: LookupResult
    replays: tuple[Continuation, ...] = ()  # EXACT: one a choice that the engine would make
    drafts: tuple[int, ...] = ()  # WINDOW: never more than a guess
    ask_neighbours: bool = False  # worth a NeighboursQuery once the first token is out


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended, told to ``dflash_cache`` afterwards.

    Only of one that ended by end of sequence, stop token, length or stop string.
    """

    plan: RequestPlan
    continuations: tuple[Continuation, ...]  # one a choice that the engine made
    drafts_accepted: bool = False  # of this request: its entry has proved its worth
    # By references, in seconds of the engine; None where the request asked for none.
    seconds_saved: float | None = None
    # float32, the model's last layer at the prompt's end; empty: not known.
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class NeighboursQuery:
    """Asks ``dflash_cache`` for continuations of similar prompts."""

    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class Reference:
    """The continuation of a similar prompt of the same tenant: never more than a guess."""

    token_ids: tuple[int, ...]
    similarity: float  # cosine of the standardised states, -1 to 1


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The answer to a NeighboursQuery, the most similar first."""

    plan_id: str
    references: tuple[Reference, ...]


@dataclass(frozen=True, slots=True)
class CacheOrder:
    """An operator's order, sent by the launcher straight to ``dflash_cache``."""

    action: str  # "flush" or "stats"
    cache_salt: str | None = None  # flush: of this tenant only; None: everything


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What ``dflash_cache`` answers to an Outcome or an order."""

    text: str  # "recorded" or "dropped"; flush: how many entries went; stats: a JSON object


@dataclass(frozen=True, slots=True)
class Control:
    """An operator's order, sent by the launcher or a load test straight to ``deepseek_decoder``."""

    action: str  # "abort_all", "start_profile", "stop_profile"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the other stages must know of the running engine. Published by the decoder."""

    namespace: str  # digest of everything that decides the model's output
    model: str
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One response: new text and tokens per choice since the response before.

    Every sequence has one element per choice (``n`` of them).
    """

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]  # None while running
    token_ids: tuple[tuple[int, ...], ...]
    cumulative_logprobs: tuple[float | None, ...]
    logprobs: tuple[list[dict[int, Any]] | None, ...]  # token id -> logprob, rank, decoded_token
    num_input_tokens: int
    num_cached_tokens: int  # of the prompt, not computed so far; all: the engine did not run

"""What a generation brings, piece by piece, wherever it comes from: the engine or a replay."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepseek_flash.dspark.paths import Path

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of one choice. Names and meaning are vLLM's ``CompletionOutput``."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # a stop string, or the stop token; None at the EOS
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Any]] | None = None  # token id → logprob, rank, decoded_token


@dataclass(frozen=True, slots=True)
class Output:
    """Pieces that belong together; ``finished``: no choice goes on.

    ``path``: None where DSpark's worker counts the tokens by the path that made them.
    ``num_cached_tokens``: of the engine's prompt, from its prefix cache; None: replayed.
    """

    pieces: tuple[Piece, ...]
    finished: bool
    path: Path | None = Path.SLOW
    num_cached_tokens: int | None = 0


Outputs = AsyncGenerator[Output, None]


def from_vllm(output: RequestOutput, path: Path | None) -> Output:
    return Output(
        tuple(
            Piece(
                choice.index, choice.text, choice.token_ids, choice.finish_reason,
                choice.stop_reason, choice.cumulative_logprob, choice.logprobs,
            )
            for choice in output.outputs
        ),
        output.finished,
        path,
        output.num_cached_tokens or 0,  # vLLM may know none
    )  # fmt: skip

"""Answers from what is known: whole, or as the beginning of an answer that the engine goes on with.

A replay is memoisation: the tokens are those that the engine gave for this very context under the
same output-determining settings. What cuts or presents them (budget, stop strings, text) is applied
here anew, by vLLM's own code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum

from deepseek_flash.contract import (
    Continuation,
    Lookup,
    LookupResult,
    RequestPlan,
    Sampling,
)
from deepseek_flash.decoder.output import Output, Outputs, Piece
from deepseek_flash.dspark.paths import Path
from deepseek_flash.worker.token_text import TokenText

GROUP = 16  # tokens a response: a replay of a token each would cost more than the tokens

Generate = Callable[[RequestPlan], Outputs]
MakeText = Callable[[RequestPlan], TokenText]


class Use(Enum):
    """What a lookup is good for."""

    NOTHING = "nothing"
    WHOLE = "whole"
    BEGINNING = "beginning"


def use_of(plan: RequestPlan, lookup: Lookup, make_text: MakeText) -> Use:
    """Whether the plan can be answered from the lookup. Changes nothing."""
    sampling = plan.sampling
    if lookup.result is not LookupResult.EXACT or sampling.logprobs is not None:
        return Use.NOTHING  # logprobs are not stored
    if all(reaches_the_end(known, sampling.max_tokens) for known in lookup.replays):
        return Use.WHOLE
    if continuable(sampling):
        return Use.BEGINNING
    if sampling.stop and all(
        known_to_end(make_text(plan), known, sampling.max_tokens) for known in lookup.replays
    ):
        return Use.WHOLE
    return Use.NOTHING


def continuable(sampling: Sampling) -> bool:
    """Whether the engine goes on from prompt + answer so far as it would have from the prompt.

    Not so where the answer's tokens count by themselves: penalties, the generator of a sampled
    request, min_tokens, bad words over the border, the state of a grammar or a thinking budget.
    """
    return (
        sampling.temperature == 0.0
        and sampling.presence_penalty == sampling.frequency_penalty == 0.0
        and sampling.repetition_penalty == 1.0
        and not sampling.min_tokens
        and not sampling.bad_words
        and sampling.structured_outputs is None
        and sampling.thinking_token_budget is None
    )


def known_to_end(text: TokenText, known: Continuation, budget: int) -> bool:
    """Whether the answer ends within what is known, by a stop string too."""
    return any(piece.finish_reason for piece in _pieces(text, 0, known, budget))


def reaches_the_end(known: Continuation, budget: int) -> bool:
    """Whether an answer of ``budget`` tokens needs no more than what is known."""
    return known.complete or len(known.token_ids) >= budget


async def replay_whole(plan: RequestPlan, lookup: Lookup, make_text: MakeText) -> Outputs:
    """An answer without the engine. The caller has seen that ``use_of`` says WHOLE."""
    budget, last = plan.sampling.max_tokens, len(lookup.replays) - 1
    for index, known in enumerate(lookup.replays):
        for piece in _pieces(make_text(plan), index, known, budget):
            yield _replayed(piece, bool(piece.finish_reason) and index == last)
            await asyncio.sleep(0)  # a long answer must not hold up the others


async def continue_from(
    plan: RequestPlan, lookup: Lookup, make_text: MakeText, generate: Generate
) -> Outputs:
    """Replay what is known, and let the engine go on from there (``use_of`` says BEGINNING)."""
    (known,) = lookup.replays
    text, budget = make_text(plan), plan.sampling.max_tokens
    for piece in _pieces(text, 0, known, budget):
        yield _replayed(piece, piece.finish_reason is not None)
        if piece.finish_reason:
            return
        await asyncio.sleep(0)
    left = budget - len(known.token_ids)
    rest = replace(
        plan,
        prompt_token_ids=plan.prompt_token_ids + known.token_ids,
        # The text and its stop strings began before the border: they are ours.
        sampling=replace(plan.sampling, n=1, max_tokens=left, stop=(), detokenize=False),
    )
    async with aclosing(generate(rest)) as outputs:
        async for output in outputs:
            (made,) = output.pieces
            piece = _detokenized(text, made)
            finished = output.finished or piece.finish_reason is not None
            yield replace(output, pieces=(piece,), finished=finished)
            if piece.finish_reason:
                return  # at a stop string of which the engine knows nothing: closing aborts it


def _replayed(piece: Piece, finished: bool) -> Output:
    return Output((piece,), finished, Path.FAST, num_cached_tokens=None)


def _detokenized(text: TokenText, made: Piece) -> Piece:
    """A piece of the engine's, with its text; cut at a stop string."""
    for place, token in enumerate(made.token_ids):
        ends = made.finish_reason == "stop" and place == len(made.token_ids) - 1
        if (stop := text.add(token, ends)) is not None:
            ids = made.token_ids[: place + 1]
            return replace(
                made, text=text.take(True), token_ids=ids, finish_reason="stop", stop_reason=stop
            )
    return replace(made, text=text.take(made.finish_reason is not None))


def _pieces(text: TokenText, index: int, known: Continuation, budget: int) -> Iterator[Piece]:
    """What is known in groups; the last has a finish reason if the answer ends there."""
    tokens: Sequence[int] = known.token_ids[:budget]
    group: list[int] = []
    for place, token in enumerate(tokens):
        ends = known.complete and place == len(known.token_ids) - 1
        stop = text.add(token, ends)
        group.append(token)
        reason = None
        if stop is not None or ends:
            reason = "stop"
        elif place + 1 == budget:
            reason = "length"
        if reason or len(group) == GROUP or place == len(tokens) - 1:
            yield Piece(index, text.take(reason is not None), group, reason, stop)
            group = []
        if reason:
            return

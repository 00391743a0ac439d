"""Where an answer comes from: a replay, a twin that runs already, or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from deepseek_flash import metrics
from deepseek_flash.contract import (
    Continuation,
    Lookup,
    LookupResult,
    Neighbours,
    NeighboursQuery,
    Outcome,
    RequestPlan,
)
from deepseek_flash.decoder.feedback import Feedback
from deepseek_flash.decoder.output import Output, Outputs
from deepseek_flash.decoder.replay import (
    MakeText,
    Use,
    continue_from,
    replay_whole,
    use_of,
)
from deepseek_flash.decoder.reports import Learned
from deepseek_flash.decoder.sharing import SharedRuns, twin_key
from deepseek_flash.dflash.fingerprint import replayable

Threadsafe = Callable[[Callable[[], None]], None]  # runs a function on the engine's loop, later


class Generate(Protocol):
    """The engine: a generation, and a known continuation that is only a guess for it."""

    def __call__(self, plan: RequestPlan, chain: Sequence[int] = ()) -> Outputs: ...


class DSpark(Protocol):
    """The guesses of an engine that makes some."""

    def add_references(self, plan_id: str, neighbours: Neighbours) -> None:
        """From any thread: answers to similar prompts, for a plan that is running."""
        ...

    async def learned(self, plan_id: str) -> Learned | None:
        """Once the plan's answer has ended."""
        ...


class Generations:
    """Makes the outputs of every plan. Lives on the engine's loop."""

    def __init__(
        self,
        generate: Generate,
        make_text: MakeText,
        feedback: Feedback,
        recorder: metrics.Recorder,
        on_loop: Threadsafe,
        dspark: DSpark | None = None,
    ) -> None:
        """``dspark``: None where the engine does not guess."""
        self._generate = generate
        self._make_text = make_text
        self._feedback = feedback
        self._recorder = recorder
        self._on_loop = on_loop
        self._dspark = dspark
        self._telling: set[asyncio.Task[None]] = set()  # or they could be collected while they run
        self._shared = SharedRuns()

    @property
    def shared_runs(self) -> int:
        """Runs that a twin could join now."""
        return len(self._shared)

    def outputs(self, plan: RequestPlan, lookup: Lookup) -> Outputs:
        """The answer to ``plan``, piece by piece. Closing it early aborts what only it needs."""
        if lookup.result is LookupResult.OFF:
            return self._engine(plan)
        use = use_of(plan, lookup, self._make_text)
        if lookup.result is LookupResult.EXACT:
            self._recorder.count(metrics.REPLAYS, labels=(("use", use.value),))
        if use is Use.WHOLE:
            return self._replayed(plan, lookup)
        if not replayable(plan):
            return self._engine(plan, lookup)  # its answer is its own
        return self._joined(plan, lookup, use)

    def _engine(self, plan: RequestPlan, lookup: Lookup | None = None) -> Outputs:
        """``lookup``: what it knows is a guess for this very plan."""
        self._recorder.count(metrics.ENGINE_RUNS)
        chain: Sequence[int] = ()
        if lookup is not None:
            chain = lookup.replays[0].token_ids if lookup.replays else lookup.drafts
        return self._generate(plan, chain)

    async def _replayed(self, plan: RequestPlan, lookup: Lookup) -> Outputs:
        async with aclosing(replay_whole(plan, lookup, self._make_text)) as outputs:
            async for output in outputs:
                yield output
        if plan.session_id:  # the session's window moves on with every turn, replayed or not
            made = tuple(
                Continuation(known.token_ids[: plan.sampling.max_tokens], False)
                for known in lookup.replays
            )
            self._feedback.tell(Outcome(plan, made), lambda: None)

    async def _joined(self, plan: RequestPlan, lookup: Lookup, use: Use) -> Outputs:
        key = twin_key(plan)
        if self._shared.has(key):
            self._recorder.count(metrics.COALESCED)
        result = _Result(plan)

        def start() -> Outputs:
            if use is Use.BEGINNING:
                return continue_from(plan, lookup, self._make_text, self._engine)
            return self._engine(plan, lookup)

        def told(forget: Callable[[], None]) -> None:
            if result.complete:
                task = asyncio.create_task(self._tell(result, forget))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)
            else:
                forget()

        outputs = self._shared.outputs(key, lambda: self._watched(start(), result, lookup), told)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _tell(self, result: _Result, forget: Callable[[], None]) -> None:
        """Tell the cache how a run ended, with what DSpark learned from it."""
        learned = None if self._dspark is None else await self._dspark.learned(result.plan.plan_id)
        self._feedback.tell(result.outcome(learned), lambda: self._on_loop(forget))

    async def _watched(self, outputs: Outputs, result: _Result, lookup: Lookup) -> Outputs:
        """The run's outputs as they pass by; after the first, the cache is asked for neighbours."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    result.add(output)
                    yield output
                    if lookup.ask_neighbours and not result.asked and self._guesses(result.plan):
                        # Only now: the first token never competes with the cache's encoder.
                        result.asked = True
                        query = NeighboursQuery(result.plan)
                        take = partial(self._take_references, result)
                        self._feedback.ask(query, take, lambda: result.running)
        finally:
            result.running = False

    def _guesses(self, plan: RequestPlan) -> bool:
        """Whether DSpark will guess for this plan: a seed's generator must not notice drafts."""
        return self._dspark is not None and plan.use_dspark and plan.sampling.temperature == 0.0

    def _take_references(self, result: _Result, neighbours: Neighbours) -> None:
        self._recorder.count(metrics.REFERENCES, len(neighbours.references))
        if self._dspark is not None and neighbours.references and result.running:
            self._dspark.add_references(result.plan.plan_id, neighbours)


class _Result:
    """Collects a run's tokens for the cache."""

    def __init__(self, plan: RequestPlan) -> None:
        self.plan = plan
        self.asked = False  # for neighbours
        self.running = True
        self._tokens: dict[int, list[int]] = {}
        self._complete: dict[int, bool | None] = {}

    def add(self, output: Output) -> None:
        for piece in output.pieces:
            self._tokens.setdefault(piece.index, []).extend(piece.token_ids)
            if piece.finish_reason in ("stop", "length"):
                at_string = isinstance(piece.stop_reason, str)
                self._complete[piece.index] = piece.finish_reason == "stop" and not at_string

    @property
    def complete(self) -> bool:
        """Whether every choice ended as an answer does: not aborted, failed or cut off."""
        return bool(self._tokens) and self._tokens.keys() == self._complete.keys()

    def outcome(self, learned: Learned | None) -> Outcome:
        """For the cache; only where all is ``complete``."""
        made = []
        for index, tokens in sorted(self._tokens.items()):
            sure = learned.confidence.get(index, ()) if learned else ()
            # The tokens of a replayed beginning are not the worker's: nothing is known of them.
            # Behind a stop string the worker may have made more.
            known = tuple(sure[: len(tokens)]) if len(sure) >= len(tokens) else ()
            made.append(Continuation(tuple(tokens), bool(self._complete[index]), known))
        saved = learned.seconds_saved if learned else 0.0
        return Outcome(
            self.plan,
            tuple(made),
            drafts_accepted=learned is not None and learned.drafts_accepted,
            seconds_saved=saved if self.asked else None,
            signature=learned.signature if learned else b"",
        )

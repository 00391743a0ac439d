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
from deepseek_flash.decoder.output import Outputs
from deepseek_flash.decoder.replay import (
    MakeText,
    Use,
    continue_from,
    replay_whole,
    use_of,
)
from deepseek_flash.decoder.reports import Learned
from deepseek_flash.decoder.result import Result
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

    async def extend(self, plan: RequestPlan, known: Lookup) -> None:
        """Go on with a known answer for the cache alone; cancelling aborts it in the engine.

        It is no request's run: not counted among them, and no twin joins it.

        Raises:
            RuntimeError: the engine ended it without an answer.
        """
        result = Result(plan)
        if use_of(plan, known, self._make_text) is Use.BEGINNING:
            outputs = continue_from(plan, known, self._make_text, self._generate)
        else:
            outputs = self._generate(plan, known.replays[0].token_ids)
        async with aclosing(outputs):
            async for output in outputs:
                result.add(output)
        if not result.complete:
            raise RuntimeError("the engine ended it without an answer")
        self._start_telling(result, lambda: None)

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
        result = Result(plan)

        def start() -> Outputs:
            if use is Use.BEGINNING:
                return continue_from(plan, lookup, self._make_text, self._engine)
            return self._engine(plan, lookup)

        def told(forget: Callable[[], None]) -> None:
            if result.complete:
                self._start_telling(result, forget)
            else:
                forget()

        outputs = self._shared.outputs(key, lambda: self._watched(start(), result, lookup), told)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def _start_telling(self, result: Result, forget: Callable[[], None]) -> None:
        task = asyncio.create_task(self._tell(result, forget))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, result: Result, forget: Callable[[], None]) -> None:
        """Tell the cache how a run ended, with what DSpark learned from it."""
        learned = None if self._dspark is None else await self._dspark.learned(result.plan.plan_id)
        self._feedback.tell(result.outcome(learned), lambda: self._on_loop(forget))

    async def _watched(self, outputs: Outputs, result: Result, lookup: Lookup) -> Outputs:
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

    def _take_references(self, result: Result, neighbours: Neighbours) -> None:
        self._recorder.count(metrics.REFERENCES, len(neighbours.references))
        if self._dspark is not None and neighbours.references and result.running:
            self._dspark.add_references(result.plan.plan_id, neighbours)

"""Where an answer comes from: a replay, a twin that runs already, or the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

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
    Generate,
    MakeText,
    Use,
    continue_from,
    replay_whole,
    use_of,
)
from deepseek_flash.decoder.sharing import SharedRuns, twin_key
from deepseek_flash.dflash.fingerprint import replayable

Threadsafe = Callable[[Callable[[], None]], None]  # runs a function on the engine's loop, later


class Generations:
    """Makes the outputs of every plan. Lives on the engine's loop."""

    def __init__(
        self,
        generate: Generate,
        make_text: MakeText,
        feedback: Feedback,
        recorder: metrics.Recorder,
        on_loop: Threadsafe,
    ) -> None:
        self._generate = generate
        self._make_text = make_text
        self._feedback = feedback
        self._recorder = recorder
        self._on_loop = on_loop
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
            return self._engine(plan)  # its answer is its own
        return self._joined(plan, lookup, use)

    def _engine(self, plan: RequestPlan) -> Outputs:
        self._recorder.count(metrics.ENGINE_RUNS)
        return self._generate(plan)

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
            return self._engine(plan)

        def told(forget: Callable[[], None]) -> None:
            outcome = result.outcome
            if outcome is None:
                forget()
            else:
                self._feedback.tell(outcome, lambda: self._on_loop(forget))

        outputs = self._shared.outputs(key, lambda: self._watched(start(), result, lookup), told)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _watched(self, outputs: Outputs, result: _Result, lookup: Lookup) -> Outputs:
        """The run's outputs as they pass by; after the first, the cache is asked for neighbours."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    result.add(output)
                    yield output
                    if lookup.ask_neighbours and not result.asked:
                        # Only now: the first token never competes with the cache's encoder.
                        result.asked = True
                        query = NeighboursQuery(result.plan)
                        self._feedback.ask(query, self._take_references, lambda: result.running)
        finally:
            result.running = False

    def _take_references(self, neighbours: Neighbours) -> None:
        # DSpark's worker will draft from them; until it does, they are counted.
        self._recorder.count(metrics.REFERENCES, len(neighbours.references))


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
    def outcome(self) -> Outcome | None:
        """None where a choice did not end as an answer does: aborted, failed, cut off."""
        if not self._tokens or self._tokens.keys() != self._complete.keys():
            return None
        return Outcome(
            self.plan,
            tuple(
                Continuation(tuple(self._tokens[index]), bool(self._complete[index]))
                for index in sorted(self._tokens)
            ),
            # Nobody drafts from references yet, so they save nothing.
            seconds_saved=0.0 if self.asked else None,
        )

"""What a generation brought, collected for the cache."""

from __future__ import annotations

from deepseek_flash.contract import Continuation, Outcome, RequestPlan
from deepseek_flash.decoder.output import Output
from deepseek_flash.decoder.reports import Learned


class Result:
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

    def continuations(self, learned: Learned | None = None) -> tuple[Continuation, ...]:
        """One a choice; only where all is ``complete``."""
        made = []
        for index, tokens in sorted(self._tokens.items()):
            sure = learned.confidence.get(index, ()) if learned else ()
            # The tokens of a replayed beginning are not the worker's: nothing is known of them.
            # Behind a stop string the worker may have made more.
            known = tuple(sure[: len(tokens)]) if len(sure) >= len(tokens) else ()
            made.append(Continuation(tuple(tokens), bool(self._complete[index]), known))
        return tuple(made)

    def outcome(self, learned: Learned | None) -> Outcome:
        """For the cache; only where all is ``complete``."""
        saved = learned.seconds_saved if learned else 0.0
        return Outcome(
            self.plan,
            self.continuations(learned),
            drafts_accepted=learned is not None and learned.drafts_accepted,
            seconds_saved=saved if self.asked else None,
            signature=learned.signature if learned else b"",
        )

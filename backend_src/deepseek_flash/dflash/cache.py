"""The DFlash cache: what was generated after which context.

Lookups may come from any thread and take no lock. Everything else is called by one thread, the
updater (``dflash.service``): so a lookup never waits, and no update meets another.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import torch

from deepseek_flash.contract import (
    Continuation,
    Lookup,
    LookupResult,
    Neighbours,
    Outcome,
    Reference,
    RequestPlan,
)
from deepseek_flash.dflash.entry import Entry, Eviction, Offer, WindowKey
from deepseek_flash.dflash.fingerprint import (
    Fingerprint,
    FingerprintKey,
    draft_identity,
    identity,
    replayable,
    tenant_digest,
)
from deepseek_flash.dflash.neighbours import RunningMoments, nearest
from deepseek_flash.dflash.references import score
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import Policy, SemanticWindows, Window

WINDOW_STARTS = 4  # contexts that a lookup tries for a window; each is hashed
REMEMBERED = 128  # plans whose references wait for their outcome
MOST_USES = 4096  # lookups that hit between two updates


class DFlashCache:
    """Entries of all tenants, found by exact context, by semantic window or by similarity.

    The contract: ``lookup`` changes nothing, never waits, and what it gives was proven by a MAC:
    an EXACT continuation is what the model made of this very context under the same settings.
    """

    def __init__(
        self,
        key: FingerprintKey,
        table: Table,
        windows: SemanticWindows,
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ttl``: seconds after which an entry is no longer used; None: for ever."""
        self.table = table
        self.windows = windows
        self.collisions = 0  # entries that their MAC did not prove
        self.guessed: Counter[str] = Counter()  # tokens of answers that references guessed, right
        self._key = key
        self._ttl = ttl
        self._clock = clock
        self._moments = RunningMoments(table.hidden.shape[1], table.hidden.device)
        self._engines_moments: RunningMoments | None = None  # of the engine's own states
        # What lookups used, (fingerprint, window id), for the updater to note: they change nothing.
        self._uses: deque[tuple[int, int]] = deque(maxlen=MOST_USES)
        self._references: OrderedDict[str, tuple[Reference, ...]] = OrderedDict()
        self._namespace, self._namespace_since = "", 0.0
        self._flushed_at = 0.0
        self._tenant_flushed_at: dict[int, float] = {}

    # -- any thread --------------------------------------------------------------------------

    def lookup(self, plan: RequestPlan) -> Lookup:
        """What is known about the plan's context: exact, window or miss. Takes no lock."""
        if not plan.use_dflash:
            return Lookup(plan.plan_id, plan.namespace, LookupResult.OFF)
        tenant = tenant_digest(plan.cache_salt, self._key)
        window = self.windows.current(tenant, plan.session_id)
        prompt = array("i", plan.prompt_token_ids)  # once: it takes longer than the hash
        if replayable(plan):
            choices = 1 if plan.sampling.temperature == 0.0 else plan.sampling.n
            contexts = (
                Fingerprint(self._key, identity(plan, self._key, index), prompt)
                for index in range(choices)
            )
            budget = max(plan.sampling.max_tokens, plan.extend_to)
            found = [self._chain(context, tenant, window.id, budget) for context in contexts]
            replays = tuple(known for known in found if known is not None)
            if len(replays) == choices:
                return Lookup(plan.plan_id, plan.namespace, LookupResult.EXACT, replays)
        drafts = self._by_window(plan, prompt, tenant, window)
        result = LookupResult.WINDOW if drafts else LookupResult.MISS
        return Lookup(plan.plan_id, plan.namespace, result, drafts=drafts)

    def _by_window(
        self, plan: RequestPlan, prompt: array[int], tenant: int, window: Window
    ) -> tuple[int, ...]:
        """Drafts by the last turns alone, from the session's last semantic boundary on."""
        starts = self._window_starts(plan, window.start)
        for start in dict.fromkeys([*starts[:1], *starts[-WINDOW_STARTS + 1 :]]):
            turns = self._turns(plan, prompt[start:])
            budget = plan.sampling.max_tokens
            known = self._chain(turns, tenant, window.id, budget, by_window=True)
            if known is not None:
                return known.token_ids
        return ()

    def _window_starts(self, plan: RequestPlan, boundary: int) -> Sequence[int]:
        """Where the turns of the plan's window begin; the first is the window's own beginning."""
        if not plan.session_id or self.windows.policy is Policy.NONE:
            return plan.turn_starts[-1:]  # each turn is a window of its own
        return [start for start in plan.turn_starts if start >= boundary]

    def _turns(self, plan: RequestPlan, turns: Sequence[int]) -> Fingerprint:
        """The context that consists of a prompt's last turns."""
        return Fingerprint(self._key, draft_identity(plan, self._key), turns, window=True)

    def _chain(
        self,
        context: Fingerprint,
        tenant: int,
        window: int,
        budget: int,
        by_window: bool = False,
    ) -> Continuation | None:
        """The blocks that go on from a context, until the answer ends or the budget is reached."""
        tokens: list[int] = []
        complete = False
        while True:
            entry = self._proven(context, tenant, by_window)
            if entry is None:
                break
            tokens += entry.tokens
            complete = entry.complete
            self._uses.append((entry.fingerprint, window))
            if len(entry.tokens) < self.table.block or complete or len(tokens) >= budget:
                break
            context.extend(entry.tokens)
        return Continuation(tuple(tokens), complete) if tokens else None

    def _proven(self, context: Fingerprint, tenant: int, by_window: bool) -> Entry | None:
        """The entry of a context, if there is one and the MAC it was found by proves it."""
        find = self.table.find_window if by_window else self.table.find
        row = find(context.value)
        entry = None if row is None else self.table.read(row)
        if entry is None or entry.tenant != tenant or self._is_old(entry):
            return None
        mac = entry.mac
        if by_window:
            if entry.window_key is None:
                return None
            mac = entry.window_key.mac
        return entry if context.mac(entry.tokens, entry.complete) == mac else None

    def _is_old(self, entry: Entry) -> bool:
        return self._ttl is not None and self._clock() - entry.created >= self._ttl

    # -- the updater -------------------------------------------------------------------------

    def record(self, outcome: Outcome, state: torch.Tensor | None = None) -> Counter[Offer]:
        """Take in how a generation ended; what became of its blocks.

        Args:
            state: [hidden_size], the encoder's at the prompt's last position; None: not known.
        """
        self.note_uses()
        plan = outcome.plan
        offers: Counter[Offer] = Counter()
        tenant = tenant_digest(plan.cache_salt, self._key)
        if not replayable(plan) or self._is_stale(plan, tenant):
            return offers
        self._score_references(outcome)
        if state is not None:
            signature = self._moments.take(state)
        else:
            signature = self._engines_signature(outcome.signature)
        start = plan.turn_starts[-1] if plan.turn_starts else 0
        length = len(plan.prompt_token_ids) + len(outcome.continuations[0].token_ids)
        seen = self.windows.observe(tenant, plan.session_id, start, signature, length)
        if seen.closed is not None:
            self.table.close_window(seen.closed)
        for index, made in enumerate(outcome.continuations):
            for entry in self._blocks(plan, index, made, tenant, seen.window.id, seen.window.start):
                hidden = state if not offers else None  # of the first block: the prompt's end
                offer = self._offer(entry, hidden, outcome.drafts_accepted)
                offers[offer] += 1
                if offer in (Offer.DIVERGED, Offer.COLLIDED):
                    break  # what follows is another context's
        return offers

    def _engines_signature(self, signature: bytes) -> torch.Tensor | None:
        """What the engine's last layer says of a turn: for windows, where no encoder runs."""
        if not signature:
            return None
        state = torch.frombuffer(bytearray(signature), dtype=torch.float32)
        if self._engines_moments is None or len(self._engines_moments.mean) != len(state):
            self._engines_moments = RunningMoments(len(state), state.device)
        return self._engines_moments.take(state)

    def _blocks(
        self,
        plan: RequestPlan,
        index: int,
        made: Continuation,
        tenant: int,
        window: int,
        boundary: int,
    ) -> Iterator[Entry]:
        """An answer as entries of at most a block each, the first first."""
        prompt = array("i", plan.prompt_token_ids)
        context = Fingerprint(self._key, identity(plan, self._key, index), prompt)
        starts = self._window_starts(plan, boundary)
        turns = self._turns(plan, prompt[starts[0] :]) if starts and index == 0 else None
        now, block, tokens = self._clock(), self.table.block, made.token_ids
        for begin in range(0, len(tokens), block):
            piece = tokens[begin : begin + block]
            complete = made.complete and begin + block >= len(tokens)
            sure = made.confidence[begin : begin + block]
            alias = WindowKey(turns.value, turns.mac(piece, complete)) if turns else None
            self._drop_unproven(context, tenant)
            yield Entry(
                context.value, context.mac(piece, complete), tenant, piece, complete, window,
                (min(sure), sum(sure) / len(sure)) if sure else (0.0, 0.0),
                created=now, window_key=alias,
            )  # fmt: skip
            context.extend(piece)
            if turns:
                turns.extend(piece)

    def _drop_unproven(self, context: Fingerprint, tenant: int) -> None:
        """Another context's entry, or a damaged one, would block this context for ever."""
        row = self.table.find(context.value)
        if row is None:
            return
        entry = self.table.read(row)
        assert entry is not None
        if entry.tenant != tenant or context.mac(entry.tokens, entry.complete) != entry.mac:
            self.collisions += 1
            self.table.remove(row, Eviction.COLLISION)
        elif self._is_old(entry):
            self.table.remove(row, Eviction.TTL)

    def _offer(self, entry: Entry, hidden: torch.Tensor | None, protected: bool) -> Offer:
        before = self.table.offers.copy()
        self.table.insert(entry, hidden, protected=protected)
        (offer,) = self.table.offers - before
        return offer

    def neighbours(self, plan: RequestPlan, state: torch.Tensor) -> Neighbours:
        """Continuations after the contexts of this tenant that end most like ``state``."""
        self.note_uses()
        tenant = tenant_digest(plan.cache_salt, self._key)
        found = nearest(self.table, self._moments, state, tenant)
        entries = [(self.table.read(row), similarity) for row, similarity in found]
        references = tuple(
            Reference(entry.tokens, similarity) for entry, similarity in entries if entry
        )
        self._references[plan.plan_id] = references
        while len(self._references) > REMEMBERED:
            self._references.popitem(last=False)
        return Neighbours(plan.plan_id, references)

    def _score_references(self, outcome: Outcome) -> None:
        references: Sequence[Reference] = self._references.pop(outcome.plan.plan_id, ())
        if references:
            tokens = outcome.continuations[0].token_ids
            result = score([reference.token_ids for reference in references], tokens)
            self.guessed.update(
                answers=1, tokens=len(tokens), guessed=result.guessed, right=result.right
            )

    def note_uses(self) -> None:
        """Note in the order of eviction what lookups have used since the last call."""
        for _ in range(len(self._uses)):  # and no more: lookups may add faster than this removes
            fingerprint, window = self._uses.popleft()
            row = self.table.find(fingerprint)
            if row is not None:
                self.table.touch(row, window)
                self.table.promote(row)  # what is used again has proved its worth

    def flush(self, cache_salt: str | None = None) -> int:
        """Forget everything, or one tenant's entries; how many. What runs now is not stored."""
        self._uses.clear()
        if cache_salt is None:
            self._flushed_at = self._clock()
            self._tenant_flushed_at.clear()
            self.windows.flush()
            self._references.clear()
            return self.table.flush()
        tenant = tenant_digest(cache_salt, self._key)
        self._tenant_flushed_at[tenant] = self._clock()
        self.windows.flush(tenant)
        return self.table.flush(tenant)

    def oldest_age(self) -> float:
        """Seconds since the oldest entry was stored; 0 where there is none."""
        created = self.table.created[self.table.created > 0]
        return self._clock() - float(created.min()) if len(created) else 0.0

    def expire(self) -> int:
        """Forget entries older than ``ttl``; how many."""
        return 0 if self._ttl is None else self.table.expire(self._clock(), self._ttl)

    def _is_stale(self, plan: RequestPlan, tenant: int) -> bool:
        """Whether the outcome belongs to what was flushed, or to an engine that is gone."""
        if plan.arrival < max(self._flushed_at, self._tenant_flushed_at.get(tenant, 0.0)):
            return True
        if plan.namespace != self._namespace:
            if plan.arrival < self._namespace_since:
                return True
            # A new engine: nothing of the old one can be found any more.
            self._namespace, self._namespace_since = plan.namespace, plan.arrival
            self.windows.flush()
            self.table.flush()
        return False

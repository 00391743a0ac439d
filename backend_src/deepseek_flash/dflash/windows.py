"""Stretches of a session that stay on one topic: the life cycle of the cache's entries.

A *window* begins with a turn and ends where a later turn leaves it. The end is a semantic boundary:
what was cached within may go first, and lookups no longer reach back behind it. The two other
policies are there to be compared with: a window of so many tokens, and one that never ends.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

# Six made traces (loadtest/bench/trace.py, 2,400 turns), SmolLM2, signatures of each turn's own
# tokens. Best F1 of layer 3: 0.69 at 0.0 (0.67 here); of the last layer: 0.91 at 0.1 (0.90 here).
# With 30 % follow-ups that name no topic ("make it shorter") it falls to 0.36 and 0.64.
DEFAULT_THRESHOLD = 0.05


class Policy(StrEnum):
    """What ends a window, and what ``threshold`` means to it."""

    SEMANTIC = "semantic"  # a turn whose cosine to the window's centroid is below the threshold
    FIXED = "fixed"  # a turn that ends more than the threshold's tokens after the window's start
    NONE = "none"  # nothing: plain LRU; the threshold counts for nothing


@dataclass(frozen=True, slots=True)
class Window:
    """Where a session is now."""

    id: int  # positive, never used twice; 0: no window
    start: int  # tokens before it in the session's prompts


@dataclass(frozen=True, slots=True)
class Observation:
    """What a turn did to its session."""

    window: Window  # the turn's own: already the new one if it left the old one
    closed: int | None = None  # id of the window that it left


NO_WINDOW = Window(0, 0)


@dataclass(slots=True)
class _Session:
    window: Window
    direction: torch.Tensor | None = None  # [hidden] sum of unit signatures: the centroid's
    turns: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    end: int
    signature: torch.Tensor | None  # [hidden] on the CPU, length 1


def _off_topic(session: _Session, turn: _Turn, threshold: float) -> bool:
    if session.direction is None or turn.signature is None:
        return False  # nothing to judge by
    direction = session.direction
    return float(turn.signature @ direction / direction.norm()) < threshold


def _too_long(session: _Session, turn: _Turn, threshold: float) -> bool:
    return turn.end - session.window.start > threshold


def _never(session: _Session, turn: _Turn, threshold: float) -> bool:
    return False


_LEAVES: dict[Policy, Callable[[_Session, _Turn, float], bool]] = {
    Policy.SEMANTIC: _off_topic,
    Policy.FIXED: _too_long,
    Policy.NONE: _never,
}


class SemanticWindows:
    """The current window of every session, of the last ``most_sessions`` observed.

    Locking: everything needs the caller's one lock but ``current``, which may be a turn behind.
    A session that was forgotten begins anew; its window is not closed, its entries simply age.
    Memory: one state of ``hidden`` floats a session, on the host. Window ids are unique over all
    sessions and tenants of one instance, so a table needs exactly one.
    """

    def __init__(
        self,
        policy: Policy | str = Policy.SEMANTIC,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        most_sessions: int = 4096,
    ) -> None:
        """``threshold``: see ``Policy``. Raises ValueError for a policy or number out of range."""
        self.policy = Policy(policy)
        low, high = (-1.0, 1.0) if self.policy is Policy.SEMANTIC else (0.0, math.inf)
        if self.policy is not Policy.NONE and not low <= threshold <= high:
            raise ValueError(f"threshold: must be {low:g} to {high:g} for {self.policy} windows")
        if most_sessions < 1:
            raise ValueError("most_sessions: must be at least 1")
        self.threshold, self.most_sessions = threshold, most_sessions
        self._leaves = _LEAVES[self.policy]
        self._ids = itertools.count(1)
        # By tenant and session, the least recently observed first.
        self._sessions: OrderedDict[tuple[int, str], _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def current(self, tenant: int, session_id: str) -> Window:
        """The window that the session's next turn is asked in; ``NO_WINDOW`` where none is known.

        Changes nothing, never raises, takes no lock.
        """
        session = self._sessions.get((tenant, session_id))
        return session.window if session else NO_WINDOW

    def observe(
        self,
        tenant: int,
        session_id: str,
        turn_start: int,
        signature: torch.Tensor | None,
        tokens: int,
    ) -> Observation:
        """Take note of a turn that ended, and decide whether it left its session's window.

        A history that no longer reaches back to the window's start was edited or cut: the session
        starts over, and nothing is closed, as the client may go back to where it was.

        Args:
            session_id: "" for a request without a session; it has no window.
            turn_start: offset of the turn in its prompt, in tokens.
            signature: [hidden], standardised, on any device. Of the turn's own tokens: seen after
                its whole history, a turn looks like that history (AUC 0.7 against 0.9). None,
                zero or not finite: nothing is known, and a semantic window goes on.
            tokens: length of prompt and answer together.
        """
        if not session_id:
            return Observation(NO_WINDOW)
        turn = _Turn(tokens, _unit(signature))
        key, closed = (tenant, session_id), None
        session = self._sessions.get(key)
        if session is None or turn_start < session.window.start:
            session = self._begin(turn_start)
        elif self._leaves(session, turn, self.threshold):
            session, closed = self._begin(turn_start), session.window.id
        session.turns += 1
        if turn.signature is not None:
            old = session.direction
            session.direction = turn.signature if old is None else old + turn.signature
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        if len(self._sessions) > self.most_sessions:
            self._sessions.popitem(last=False)
        return Observation(session.window, closed)

    def flush(self, tenant: int | None = None) -> None:
        """Forget all sessions, or one tenant's."""
        for key in [key for key in self._sessions if tenant in (None, key[0])]:
            del self._sessions[key]

    def _begin(self, start: int) -> _Session:
        return _Session(Window(next(self._ids), start))


def _unit(signature: torch.Tensor | None) -> torch.Tensor | None:
    if signature is None:
        return None
    signature = signature.to("cpu", torch.float32)  # centroids take no room on the device
    norm = float(signature.norm())
    return signature / norm if 0 < norm < math.inf else None

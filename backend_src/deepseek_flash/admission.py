"""Who is in the house: a board of slots shared by scheduler, decoder and launcher.

The scheduler must refuse at once when too many requests are in flight, but only the decoder
knows when one ends. Triton's own ``max_queue_size`` hangs ensembles, and a call from model to
model costs more than a millisecond, so both map the same small file. A slot goes

    FREE --claim (scheduler)--> CLAIMED --start (decoder)--> RUNNING --release (decoder)--> FREE

and back from CLAIMED to FREE when its plan never arrives within ``CLAIM_SECONDS``. Each change
is made by one process only; the slot's generation makes a plan usable at most once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepseek_flash.contract import Refused

CAPACITY = 4096
CLAIM_SECONDS = 30.0

FREE, CLAIMED, RUNNING = 0, 1, 2

_HEADER = np.dtype([("draining", "<u8"), ("progress", "<u8")])
_SLOT = np.dtype(
    [("state", "<u4"), ("generation", "<u4"), ("tenant", "<u8"), ("claimed_at", "<f8")]
)
_SIZE = _HEADER.itemsize + CAPACITY * _SLOT.itemsize


@dataclass(frozen=True, slots=True)
class Claim:
    slot: int
    generation: int


class AdmissionBoard:
    """The board in ``path``, made when missing. One claiming and one starting process at most."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.ftruncate(descriptor, _SIZE)  # zeros: every slot free
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._header: npt.NDArray[np.void] = np.frombuffer(self._memory, _HEADER, 1)
        self._slots: npt.NDArray[np.void] = np.frombuffer(
            self._memory, _SLOT, CAPACITY, offset=_HEADER.itemsize
        )

    # -- scheduler ---------------------------------------------------------------------------

    def claim(self, tenant: str, limit: int, tenant_limit: int) -> Claim:
        """Take a slot for a request of ``tenant``.

        Args:
            limit: most requests in flight on this server.
            tenant_limit: most of one tenant; 0 means no limit of its own.
        Raises:
            Refused: naming the limit that is reached, or that the server is stopping.
        """
        if self.draining:
            raise Refused("the server is shutting down and takes no new requests")
        self._reap()
        states = self._slots["state"]
        busy = states != FREE
        in_flight = int(busy.sum())
        if in_flight >= min(limit, CAPACITY):
            raise Refused(f"queue_limit of {min(limit, CAPACITY)} requests in flight is reached")
        digest = _tenant_digest(tenant)
        if tenant_limit and int((self._slots["tenant"][busy] == digest).sum()) >= tenant_limit:
            raise Refused(f"tenant_queue_limit of {tenant_limit} requests in flight is reached")
        slot = int(np.argmin(busy))
        row = self._slots[slot : slot + 1]
        generation = (int(row["generation"][0]) + 1) & 0xFFFFFFFF
        row["generation"], row["tenant"], row["claimed_at"] = generation, digest, time.monotonic()
        row["state"] = CLAIMED
        return Claim(slot, generation)

    def abandon(self, claim: Claim) -> None:
        """Give a claimed slot back: the request failed before it left the scheduler."""
        if self._is(claim.slot, claim.generation, CLAIMED):
            self._slots["state"][claim.slot] = FREE

    def _reap(self) -> None:
        """Free slots whose plan was lost on its way (a stage in between refused it)."""
        lost = (self._slots["state"] == CLAIMED) & (
            self._slots["claimed_at"] < time.monotonic() - CLAIM_SECONDS
        )
        if lost.any():
            self._slots["state"][lost] = FREE

    # -- decoder -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget running requests of an engine that is gone, and take requests again."""
        states = self._slots["state"]
        states[states == RUNNING] = FREE
        self._header["draining"] = 0

    def start(self, slot: int, generation: int) -> bool:
        """Mark a claimed slot as running. False: the plan was used before, or came too late."""
        if not self._is(slot, generation, CLAIMED):
            return False
        self._slots["state"][slot] = RUNNING
        return True

    def release(self, slot: int, generation: int) -> None:
        if self._is(slot, generation, RUNNING):
            self._slots["state"][slot] = FREE

    def note_progress(self) -> None:
        """The engine worked. Not so the end of a request: a deadline ends one in a hung engine."""
        self._header["progress"] += 1

    # -- everybody ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse every new request from now on."""
        self._header["draining"] = 1

    @property
    def draining(self) -> bool:
        return bool(self._header["draining"][0])

    @property
    def in_flight(self) -> int:
        """Requests claimed or running."""
        return int((self._slots["state"] != FREE).sum())

    @property
    def running(self) -> int:
        return int((self._slots["state"] == RUNNING).sum())

    @property
    def progress(self) -> int:
        """Rises while the engine works, however busy it is."""
        return int(self._header["progress"][0])

    def _is(self, slot: int, generation: int, state: int) -> bool:
        if not 0 <= slot < CAPACITY:
            return False
        row = self._slots[slot]
        return int(row["generation"]) == generation and int(row["state"]) == state


def _tenant_digest(tenant: str) -> int:
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little")

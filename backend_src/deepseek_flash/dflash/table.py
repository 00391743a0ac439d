"""The entries of the DFlash cache: preallocated tensors on one device, and who goes first.

A row is one entry. What a row holds lies on the device (CPU or CUDA, the same code); which row is
used, found and evicted next is decided on the host, in plain dictionaries: a search among the
device's fingerprints would launch kernels and wait for their result at every lookup, where a
dictionary answers in 0.1 us. ``check_integrity`` holds the two in step.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_flash.dflash.entry import SHARED, Entry, Eviction, Offer, Segment, WindowKey
from deepseek_flash.dflash.order import EvictionOrder


@dataclass(slots=True)
class _Row:
    """The host's copy of what decisions need."""

    fingerprint: int
    tenant: int
    window: int
    created: float
    used: int = 0
    window_key: WindowKey | None = None

    @property
    def key_columns(self) -> list[int]:
        """The window key as ``Table.window_key`` holds it."""
        key = self.window_key
        return [1, key.fingerprint, *key.mac] if key else [0, 0, 0, 0]


class Table:
    """A fixed number of entries, found by fingerprint, evicted by segmented LRU.

    A row may be found by its window key too. A window's fingerprint belongs to one row: the last
    that was written with it takes it from the row before, which stays, without a window key, and
    does not get it back when the other goes.

    Locking: everything needs the caller's one lock but ``find``, ``find_window`` and ``read``, so
    that a lookup never waits for an update. What they return without it may be torn (half an
    entry, half its successor, maybe another tenant's): nothing of it may be used, not as a draft
    either, before the MAC it was found by was checked.

    Memory: nothing stays allocated on the device beyond what the constructor made.
    Time: constant, but for ``flush``, ``expire``, ``close_window`` and the choice of a victim for
    a quota, which go through the rows on the host (under 0.1 ms at 1,536).
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        *,
        block: int = 256,
        hidden_size: int = 0,
        hidden_dtype: torch.dtype = torch.float32,
        tenant_quota: int | None = None,
        protected_share: float = 0.8,
    ) -> None:
        """``tenant_quota``, ``protected_share``: see ``EvictionOrder``. Raises ValueError."""
        if min(capacity, block) < 1 or hidden_size < 0:
            raise ValueError("capacity, block or hidden_size")
        self.capacity, self.block = capacity, block
        self.order = EvictionOrder(capacity, tenant_quota, protected_share)
        zeros = functools.partial(torch.zeros, device=device)
        # The whole numbers share one tensor: an entry is read and written in one transfer of them.
        self.numbers = zeros((capacity, 13), dtype=torch.int64)
        self.tokens = zeros((capacity, block), dtype=torch.int32)
        self.hidden = zeros((capacity, hidden_size), dtype=hidden_dtype)
        self.confidence = zeros((capacity, 2), dtype=torch.float32)  # min, mean
        self.created = zeros((capacity,), dtype=torch.float64)
        self.fingerprint, self.mac = self.numbers[:, 0], self.numbers[:, 1:3]  # views, all
        self.tenant, self.length, self.complete = self.numbers[:, 3:6].unbind(1)
        self.window, self.last_use, self.segment = self.numbers[:, 6:9].unbind(1)
        self.window_key = self.numbers[:, 9:13]  # whether there is one, fingerprint, MAC (2)
        self.evictions: Counter[Eviction] = Counter()
        self.offers: Counter[Offer] = Counter()
        self._tick = 0
        self._index: dict[int, int] = {}  # fingerprint -> row
        self._window_index: dict[int, int] = {}  # window's fingerprint -> row
        self._rows: list[_Row | None] = [None] * capacity
        self._free = list(range(capacity))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def tenant_count(self) -> int:
        """How many tenants have entries."""
        return len(self.order.tenants)

    @property
    def window_count(self) -> int:
        """How many windows have entries of their own, closed ones too."""
        return len({kept.window for kept in self._rows if kept and kept.window > 0})

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.numbers, self.tokens, self.hidden, self.confidence, self.created

    @property
    def bytes_on_device(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def find(self, fingerprint: int) -> int | None:
        """The row of an entry, or None. Changes nothing, never raises. No lock needed."""
        return self._index.get(fingerprint)

    def find_window(self, fingerprint: int) -> int | None:
        """As ``find``, by the fingerprint of a window key."""
        return self._window_index.get(fingerprint)

    def read(self, row: int) -> Entry | None:
        """What the device holds in a row; None where it is free. Changes nothing. No lock needed.

        Raises IndexError for a row that does not exist.
        """
        numbers = self.numbers[row].tolist()
        fingerprint, mac_0, mac_1, tenant, length, complete, window, _, segment, *key = numbers
        if segment == Segment.FREE:
            return None
        tokens = tuple(self.tokens[row, :length].tolist())
        low, mean = self.confidence[row].tolist()
        return Entry(
            fingerprint, (mac_0, mac_1), tenant, tokens, bool(complete), window,
            (low, mean), float(self.created[row]),
            WindowKey(key[1], (key[2], key[3])) if key[0] else None,
        )  # fmt: skip

    def insert(
        self, entry: Entry, hidden: torch.Tensor | None = None, *, protected: bool = False
    ) -> Eviction | None:
        """Offer an entry; returns why another had to go for it, or None where none had.

        The first entry of a fingerprint stays. Only while it is incomplete is it replaced, by one
        that begins with all its tokens and says more. ``offers`` counts what became of the entry;
        STORED, EXTENDED and KNOWN are a use of the row; STORED and EXTENDED alone set its window
        key, or clear it. Whether a differing entry diverged or collided, only the MAC of what is
        stored tells for sure: the caller may check it first.

        Args:
            hidden: [hidden_size], the state at the context's end, on any device; None: not known,
                which forgets no state that is there.
            protected: the entry has proved its worth (its request's drafts were accepted).
        Raises:
            ValueError, OverflowError: a field out of range. Nothing has changed then.
        """
        ids = entry.pack(self.block)
        if hidden is not None and hidden.shape != self.hidden.shape[1:]:
            raise ValueError("hidden: must be [hidden_size]")
        row = self._index.get(entry.fingerprint)
        offer, evicted = Offer.STORED, None
        if row is not None:
            stored = self.read(row)
            assert stored is not None
            offer = stored.compare(entry)
        else:
            evicted = self._make_room(entry.tenant)
            row = self._free.pop()
            kept = _Row(entry.fingerprint, entry.tenant, entry.window, entry.created)
            self._rows[row] = kept
            self.order.add(row, entry.tenant)
        if offer in (Offer.STORED, Offer.EXTENDED):
            self._write(row, entry, ids, hidden)
        self.offers[offer] += 1
        if offer not in (Offer.DIVERGED, Offer.COLLIDED):
            self.touch(row, entry.window)
            if protected:
                self.promote(row)
        return evicted

    def touch(self, row: int, window: int | None = None) -> None:
        """Note a use: the row becomes the last of its segment to go.

        A use by another ``window`` than the entry's own makes it SHARED: it outlives every window,
        and comes back on probation if its own was closed. Raises KeyError for a free row.
        """
        kept = self._row(row)
        segment = self.order.segment_of(row)
        if window is not None and window != kept.window:
            self.window[row] = kept.window = SHARED
            segment = max(segment, Segment.PROBATION)
        self._tick += 1
        self.last_use[row] = kept.used = self._tick
        self._place(row, segment)

    def promote(self, row: int) -> None:
        """Into the protected segment, as its last to go; if that is full, its first goes back on
        probation. Raises KeyError for a free row.
        """
        self._row(row)
        self._place(row, Segment.PROTECTED)
        if (first := self.order.overflow) is not None:
            self._place(first, Segment.PROBATION)

    def remove(self, row: int, reason: Eviction = Eviction.REMOVED) -> None:
        """Forget an entry; nothing of it stays on the device. Raises KeyError for a free row."""
        kept = self._row(row)
        del self._index[kept.fingerprint]  # first, for those who look without the lock
        self._unindex_window_key(row)
        for tensor in self.tensors:
            tensor[row].zero_()
        self.order.remove(row)
        self._rows[row] = None
        self._free.append(row)
        self.evictions[reason] += 1

    def flush(self, tenant: int | None = None) -> int:
        """Remove all entries, or one tenant's; how many they were."""
        return self._remove_if(Eviction.FLUSH, lambda kept: tenant in (None, kept.tenant))

    def expire(self, now: float, ttl: float) -> int:
        """Remove what was written ``ttl`` seconds before ``now`` or earlier; how many they were."""
        return self._remove_if(Eviction.TTL, lambda kept: now - kept.created >= ttl)

    def close_window(self, window: int) -> int:
        """Make a window's entries, but for shared ones, the first to go; how many they are.

        Entries that come for it later are as those of an open window.
        """
        rows = [(kept.used, row) for row, kept in enumerate(self._rows)
                if kept and kept.window == window != SHARED]  # fmt: skip
        for _, row in sorted(rows):
            self._place(row, Segment.CLOSED)
        return len(rows)

    def check_integrity(self) -> None:
        """Raise AssertionError where device and host, or two facts of one, disagree. Slow."""
        live = {row: kept for row, kept in enumerate(self._rows) if kept}
        assert sorted([*live, *self._free]) == list(range(self.capacity)), "a row lost or doubled"
        assert self._index == {kept.fingerprint: row for row, kept in live.items()}, "index"
        keys = [(kept.window_key.fingerprint, row) for row, kept in live.items() if kept.window_key]
        assert sorted(self._window_index.items()) == sorted(keys), "window index"
        self.order.check_integrity({row: kept.tenant for row, kept in live.items()})
        assert len({kept.used for kept in live.values()}) == len(live), "two uses at one time"
        numbers, created = self.numbers.tolist(), self.created.tolist()
        for row, kept in live.items():
            fingerprint, _, _, tenant, length, complete, *rest = numbers[row]
            assert (fingerprint, tenant) == (kept.fingerprint, kept.tenant), f"row {row}"
            segment = self.order.segment_of(row)
            assert rest == [kept.window, kept.used, segment, *kept.key_columns], f"row {row}"
            assert created[row] == kept.created, f"row {row}"
            assert complete <= 1 and 1 - complete <= length <= self.block, f"row {row}"
        for tensor in self.tensors:
            assert not tensor[self._free].any(), "a free row is not empty"
        place = torch.arange(self.block, device=self.tokens.device)
        assert not self.tokens[place >= self.length[:, None]].any(), "tokens beyond the length"

    def _write(self, row: int, entry: Entry, ids: array[int], hidden: torch.Tensor | None) -> None:
        """Into a row that is empty or holds less of the same; then into the indices, last, for
        those who look without the lock.
        """
        self._unindex_window_key(row)
        kept = self._row(row)
        kept.created, kept.window_key = entry.created, entry.window_key
        if ids:
            self.tokens[row, : len(ids)].copy_(torch.frombuffer(ids, dtype=torch.int32))
        self.confidence[row].copy_(torch.tensor(entry.confidence))
        self.created[row] = entry.created
        if hidden is not None:
            self.hidden[row].copy_(hidden)
        numbers = [entry.fingerprint, *entry.mac, entry.tenant, len(ids), int(entry.complete)]
        numbers += [kept.window, kept.used, self.order.segment_of(row), *kept.key_columns]
        self.numbers[row].copy_(torch.tensor(numbers))
        self._index[entry.fingerprint] = row
        if kept.window_key:
            before = self._window_index.get(kept.window_key.fingerprint)
            self._window_index[kept.window_key.fingerprint] = row
            if before is not None:
                self._row(before).window_key = None
                self.window_key[before].zero_()

    def _unindex_window_key(self, row: int) -> None:
        """First, for those who look without the lock; the row is overwritten next."""
        key = self._row(row).window_key
        if key:
            del self._window_index[key.fingerprint]

    def _make_room(self, tenant: int) -> Eviction | None:
        """Remove an entry if that is needed for one of ``tenant``; for what reason."""
        victim = self.order.victim(tenant)
        if victim is None:
            return None
        self.remove(*victim)
        return victim[1]

    def _remove_if(self, reason: Eviction, test: Callable[[_Row], bool]) -> int:
        rows = [row for row, kept in enumerate(self._rows) if kept and test(kept)]
        for row in rows:
            self.remove(row, reason)
        return len(rows)

    def _place(self, row: int, segment: Segment) -> None:
        before = self.order.segment_of(row)
        self.order.move(row, segment)
        if segment is not before:
            self.segment[row] = segment

    def _row(self, row: int) -> _Row:
        kept = self._rows[row] if 0 <= row < self.capacity else None
        if kept is None:
            raise KeyError(f"row {row} is free")
        return kept

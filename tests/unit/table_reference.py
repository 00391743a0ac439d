"""What ``Table`` must equal: dictionaries and lists, written for reading only."""

from collections import Counter
from dataclasses import replace

from deepseek_flash.dflash.entry import SHARED, Eviction, Offer, Segment


class ReferenceTable:
    def __init__(self, capacity, quota, protected_limit):
        self.capacity, self.quota, self.protected_limit = capacity, quota, protected_limit
        self.entries = {}  # fingerprint -> Entry
        # Fingerprints by segment, the first to go first.
        self.order = {Segment.CLOSED: [], Segment.PROBATION: [], Segment.PROTECTED: []}
        self.uses = []  # fingerprints, the last used last
        self.evictions = {reason: 0 for reason in Eviction}
        self.offers = {offer: 0 for offer in Offer}

    def segment_of(self, fingerprint):
        return next(segment for segment, row in self.order.items() if fingerprint in row)

    def place(self, fingerprint, segment):
        for row in self.order.values():
            if fingerprint in row:
                row.remove(fingerprint)
        self.order[segment].append(fingerprint)

    def insert(self, entry, protected=False):
        offer, evicted = self.judge(entry), None
        if offer is Offer.STORED:
            evicted = self.make_room(entry.tenant)
            self.write(entry)
            self.place(entry.fingerprint, Segment.PROBATION)
        elif offer is Offer.EXTENDED:
            window = self.entries[entry.fingerprint].window
            self.write(replace(entry, window=window))
        self.offers[offer] += 1
        if offer in (Offer.STORED, Offer.EXTENDED, Offer.KNOWN):
            self.touch(entry.fingerprint, entry.window)
            if protected:
                self.promote(entry.fingerprint)
        return evicted

    def write(self, entry):
        before = entry.window_key and self.find_window(entry.window_key.fingerprint)
        if before is not None:
            self.entries[before] = replace(self.entries[before], window_key=None)
        self.entries[entry.fingerprint] = entry

    def find_window(self, window_fingerprint):
        """The fingerprint of the one entry with this window key, or None."""
        found = [
            fingerprint
            for fingerprint, entry in self.entries.items()
            if entry.window_key and entry.window_key.fingerprint == window_fingerprint
        ]
        assert len(found) < 2
        return found[0] if found else None

    def judge(self, entry):
        stored = self.entries.get(entry.fingerprint)
        if stored is None:
            return Offer.STORED
        if stored.tenant != entry.tenant:
            return Offer.COLLIDED
        same = stored.tokens == entry.tokens and stored.complete == entry.complete
        if same:
            return Offer.KNOWN if stored.mac == entry.mac else Offer.COLLIDED
        if not stored.complete and begins(entry.tokens, stored.tokens):
            return Offer.EXTENDED
        if not entry.complete and begins(stored.tokens, entry.tokens):
            return Offer.KNOWN
        return Offer.DIVERGED

    def make_room(self, tenant):
        candidates = [(s, f) for s in sorted(self.order) for f in self.order[s]]
        own = [(s, f) for s, f in candidates if self.entries[f].tenant == tenant]
        if len(own) >= self.quota:
            reason, (_, victim) = Eviction.QUOTA, own[0]
        elif len(candidates) < self.capacity:
            return None
        else:
            held = Counter(entry.tenant for entry in self.entries.values())
            share = max(1, self.capacity // len({*held, tenant}))
            if held[tenant] >= share:
                yielding = own
            else:
                yielding = [(s, f) for s, f in candidates if held[self.entries[f].tenant] > share]
            segment, victim = (yielding or candidates)[0]
            reason = Eviction.WINDOW if segment is Segment.CLOSED else Eviction.CAPACITY
        self.remove(victim, reason)
        return reason

    def touch(self, fingerprint, window=None):
        entry, segment = self.entries[fingerprint], self.segment_of(fingerprint)
        if window is not None and window != entry.window:
            self.entries[fingerprint] = replace(entry, window=SHARED)
            if segment is Segment.CLOSED:
                segment = Segment.PROBATION
        self.place(fingerprint, segment)
        self.uses = [used for used in self.uses if used != fingerprint] + [fingerprint]

    def promote(self, fingerprint):
        self.place(fingerprint, Segment.PROTECTED)
        if len(self.order[Segment.PROTECTED]) > self.protected_limit:
            self.place(self.order[Segment.PROTECTED][0], Segment.PROBATION)

    def remove(self, fingerprint, reason=Eviction.REMOVED):
        self.order[self.segment_of(fingerprint)].remove(fingerprint)
        self.uses.remove(fingerprint)
        del self.entries[fingerprint]
        self.evictions[reason] += 1

    def remove_all(self, fingerprints, reason):
        for fingerprint in fingerprints:
            self.remove(fingerprint, reason)
        return len(fingerprints)

    def flush(self, tenant=None):
        gone = [f for f, e in self.entries.items() if tenant is None or e.tenant == tenant]
        return self.remove_all(gone, Eviction.FLUSH)

    def expire(self, now, ttl):
        gone = [f for f, e in self.entries.items() if now - e.created >= ttl]
        return self.remove_all(gone, Eviction.TTL)

    def close_window(self, window):
        rows = [f for f in self.uses if self.entries[f].window == window]
        for fingerprint in rows:
            self.place(fingerprint, Segment.CLOSED)
        return len(rows)


def begins(tokens, start):
    return tokens[: len(start)] == start

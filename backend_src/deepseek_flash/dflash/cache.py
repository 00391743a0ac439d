"""The cache's contract, and the cache that knows nothing."""

from __future__ import annotations

from typing import Protocol

from deepseek_flash.contract import Lookup, LookupResult, RequestPlan


class Cache(Protocol):
    """What ``dflash_cache`` asks of a cache."""

    def lookup(self, plan: RequestPlan) -> Lookup:
        """What is known about ``plan``'s context. Changes nothing, never raises, never waits."""
        ...


class NullCache:
    """Always a miss: DFlash switched off."""

    def lookup(self, plan: RequestPlan) -> Lookup:
        return Lookup(plan.plan_id, plan.namespace, LookupResult.MISS)

"""Many figures in one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (nearest rank)."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def spread(values: Sequence[float]) -> str:
    """Median with minimum and maximum: one figure of a noisy machine says nothing."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

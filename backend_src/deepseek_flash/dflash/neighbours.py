"""Semantic neighbours: the entries whose contexts end in a state like this one.

All states of a layer point almost the same way (raw cosines 0.999): a few dimensions are large and
hardly vary. So states are compared after each dimension was brought to mean 0 and deviation 1.
"""

from __future__ import annotations

import torch

from deepseek_flash.dflash.entry import Segment
from deepseek_flash.dflash.table import Table

# States that a mean is taken over, or a little more than two lives of a table of 1,536 entries.
# Forgetting follows the traffic, and keeps float32 sound: without it the weight of a new state
# sinks below the rounding of the mean.
HORIZON = 4096


class RunningMoments:
    """Mean and variance of each dimension over the last states, on the device. For one thread.

    Welford's recursion (Technometrics 4(3), 1962) with the weight 1/n of the n-th state, so at
    first they are exactly the mean and the population variance; from ``HORIZON`` states on the
    weight stays, and old states fade exponentially. Deviations are summed as a mean, not a total,
    which would outgrow float32.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self.count = 0  # states seen
        self.mean = torch.zeros(hidden_size, device=device)
        self.variance = torch.zeros(hidden_size, device=device)
        self._scratch = torch.empty(0, device=device)

    def add(self, state: torch.Tensor) -> None:
        """Count in one state: [hidden_size], on the device. What is not finite is passed over."""
        self.count += 1
        weight = 1.0 / min(self.count, HORIZON)
        # One bad number, added, would stay for ever.
        delta = (state.float() - self.mean).nan_to_num_(0.0, 0.0, 0.0)
        self.mean.add_(delta, alpha=weight)
        self.variance.addcmul_(delta, delta, value=weight).mul_(1.0 - weight)

    def take(self, state: torch.Tensor) -> torch.Tensor | None:
        """``add``, then ``standardise``; None for the first, which says nothing."""
        self.add(state)
        return self.standardise(state) if self.count > 1 else None

    def standardise(self, states: torch.Tensor, *, reuse: bool = False) -> torch.Tensor:
        """[..., hidden_size] to deviations from the mean, float32.

        A new tensor, or with ``reuse`` one that the next such call overwrites: a table's states
        are megabytes, and to free as much at each search leaves the heap in holes.

        0 where a dimension has varied by no more than the rounding of its mean: it says nothing,
        and would say it loudly.
        """
        rounding = self.mean * torch.finfo(torch.float32).eps
        scale = torch.where(self.variance > rounding.square(), self.variance.rsqrt(), 0.0)
        if not reuse:
            return (states.float() - self.mean).mul_(scale)
        if self._scratch.shape != states.shape:
            self._scratch = torch.empty_like(states, dtype=torch.float32)
        return torch.sub(states, self.mean, out=self._scratch).mul_(scale)


def nearest(
    table: Table,
    moments: RunningMoments,
    state: torch.Tensor,
    tenant: int,
    *,
    most: int = 12,
    least_similarity: float = 0.0,
    exclude: int | None = None,
) -> list[tuple[int, float]]:
    """Rows of one tenant's entries with their cosines to ``state``, best first.

    The thread that writes the table calls it. One matrix-vector product and one transfer to the
    host; on a CPU, in time as the table's ``hidden`` is large.

    Args:
        state: [hidden_size], on the table's device.
        tenant: as in the table's column; no other tenant's entry is ever named.
        most: how many at most.
        least_similarity: no cosine is below it.
        exclude: a row not to name, such as the entry of ``state`` itself.
    Returns:
        Nothing before two different states were seen: there is no deviation to compare by.
    """
    query = moments.standardise(state)
    rows = moments.standardise(table.hidden, reuse=True)
    norms = torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(query)
    # Not a number where nothing deviates: no comparison with it is true.
    cosines = (rows @ query / norms).clamp_(-1.0, 1.0)
    wanted = (table.segment != Segment.FREE) & (table.tenant == tenant)
    wanted &= (torch.linalg.vector_norm(table.hidden, dim=1) > 0) & (cosines >= least_similarity)
    if exclude is not None:
        wanted[exclude] = False
    ranked, order = cosines.where(wanted, -torch.inf).sort(descending=True, stable=True)
    # One transfer for both; float64 holds either exactly.
    found = torch.stack((ranked[:most].double(), order[:most].double())).tolist()
    return [(int(row), cosine) for cosine, row in zip(*found) if cosine != -torch.inf]

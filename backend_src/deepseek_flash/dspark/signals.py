"""The three signals of the source document, for all running requests of a step at once.

Everything stays on the device of its input; a step copies one small tensor to the host. Each signal
was wrong somewhere before (the document's section 5.2): entropy over padding, the gap by the wrong
denominator, heads of different scale in the variance. The tests hold all three.
"""

from __future__ import annotations

import torch

ENTROPY_WINDOW = 32  # tokens of the moving average
ATTENTION_WINDOW = 32  # positions that the attention variance looks back


def entropy_and_gap(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy in nats and (p1 - p2) / p1 of each row.

    Args:
        logits: [rows, vocabulary], before any sampling parameter. Real rows only: a padding row
            has no business here. Minus infinity is a token that cannot come.
    Returns:
        Two [rows] float32 tensors.
    """
    log_p = torch.log_softmax(logits.float(), dim=-1)
    p = log_p.exp()
    # 0 log 0 is 0, where IEEE says not a number.
    entropy = -(p * log_p.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)
    top = torch.topk(logits.float(), 2, dim=-1).values
    # p2 / p1 without either: both may round to 0 or 1.
    gap = 1.0 - torch.exp(top[:, 1] - top[:, 0])
    return entropy, gap


class EntropyAverage:
    """Mean entropy of the last ``ENTROPY_WINDOW`` tokens of each request, by row of the batch.

    Rows are slots: whoever schedules decides which request has which, and resets a slot before
    another request uses it.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._values = torch.zeros(slots, ENTROPY_WINDOW, device=device)
        self._count = torch.zeros(slots, dtype=torch.int64, device=device)

    def reset(self, slots: torch.Tensor) -> None:
        """Forget what was in these slots ([n] int64)."""
        self._values[slots] = 0.0
        self._count[slots] = 0

    def ratio(self, slots: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """Entropy over the mean of the window before it; 1 where there is nothing before.

        Args:
            slots: [n] int64, each at most once. entropy: [n], of the tokens that come next.
        Returns:
            [n] float32. The entropies then count for the next call.
        """
        count = self._count[slots]
        filled = count.clamp_max(ENTROPY_WINDOW)
        mean = self._values[slots].sum(dim=1) / filled.clamp_min(1)
        # A mean of zero is a text without any doubt so far: any doubt is then a lot of it.
        ratio = torch.where(filled > 0, entropy / mean.clamp_min(1e-6), torch.ones_like(entropy))
        self._values[slots, count % ENTROPY_WINDOW] = entropy
        self._count[slots] = count + 1
        return ratio


def attention_variance(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """How differently the heads of one layer look back: variance across heads, then the mean.

    Each head's scores are softmaxed first, so that a head of large scale does not stand for all.

    Args:
        query: [rows, heads, dim], of the newest token of each request.
        keys: [rows, window, key_heads, dim], its last keys, the newest last; rows of zeros where
            there is none yet. ``heads`` is a multiple of ``key_heads`` (GQA).
        scale: of the layer's attention, usually dim ** -0.5.
    Returns:
        [rows] float32.
    """
    rows, heads, dim = query.shape
    key_heads = keys.shape[2]
    grouped = query.float().view(rows, key_heads, heads // key_heads, dim)
    scores = torch.einsum("rkgd,rwkd->rkgw", grouped, keys.float()).flatten(1, 2) * scale
    present = keys.ne(0).flatten(2).any(dim=2)  # [rows, window]
    scores = scores.masked_fill(~present[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # of a row without any key
    variance = weights.var(dim=1, unbiased=False)  # [rows, window], 0 where no key is
    return variance.sum(dim=1) / present.sum(dim=1).clamp_min(1)

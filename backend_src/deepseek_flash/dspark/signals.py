"""The three signals of the source document, for all running requests of a step at once.

Everything stays on the device of its input; a step copies one small tensor to the host. Each signal
was wrong somewhere before (the document's section 5.2): entropy over padding, the gap by the wrong
denominator, heads of different scale in the variance. The tests hold all three.
"""

from __future__ import annotations

import torch

ENTROPY_WINDOW = 32  # tokens of the moving average
ATTENTION_WINDOW = 32  # positions that the attention variance looks back
_BLOCK = 64  # logits


def entropy_and_gap(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy in nats and (p1 - p2) / p1 of each row; see ``row_facts``."""
    facts = row_facts(logits)
    return facts[:, 1], facts[:, 2]


def row_facts(logits: torch.Tensor) -> torch.Tensor:
    """What each row says, in as few passes over the vocabulary as there can be.

    Args:
        logits: [rows, vocabulary], before any sampling parameter. Real rows only: a padding row
            has no business here. Minus infinity is a token that cannot come.
    Returns:
        [rows, 4] float32: top-1 probability, entropy in nats, gap = (p1 - p2) / p1, and the
        normaliser: a token's log-probability is its logit less that.
    """
    logits = logits.float()
    p = torch.softmax(logits, dim=-1)
    first, second = _best_two(logits).unbind(dim=-1)
    top1 = p.amax(dim=-1)
    # Relative to the best one, so that a sure row's entropy is not lost among large numbers. And
    # 0 log 0 is 0, where IEEE says not a number.
    below = (logits - first[:, None]).clamp_min_(torch.finfo(torch.float32).min)
    entropy = -torch.log(top1) - torch.linalg.vecdot(p, below)
    # p2 / p1 without either: both may round to 0 or 1.
    gap = 1.0 - torch.exp(second - first)
    return torch.stack([top1, entropy.clamp_min(0.0), gap, first - torch.log(top1)], dim=1)


def _best_two(logits: torch.Tensor) -> torch.Tensor:
    """[rows, 2]: the largest values of each row. ``topk`` alone takes three times as long."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if whole < 2 * _BLOCK:
        return logits.topk(2, dim=-1).values
    blocks = logits[:, :whole].view(len(logits), -1, _BLOCK)
    best = blocks.amax(dim=-1).topk(2, dim=-1).indices  # no other block has one of the two
    found = blocks.gather(1, best[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    return torch.cat([found, logits[:, whole:]], dim=1).topk(2, dim=-1).values


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

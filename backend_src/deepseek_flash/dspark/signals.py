"""The three signals of the source document, for all running requests of a step at once.

On a GPU everything stays there; a step copies one small tensor to the host. Each signal
was wrong somewhere before (the document's section 5.2): entropy over padding, the gap by the wrong
denominator, heads of different scale in the variance. The tests hold all three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepseek_flash.dspark.row_kernel import row_facts_kernel, verify_kernel

ENTROPY_WINDOW = 32  # tokens of the moving average
ATTENTION_WINDOW = 32  # positions that the attention variance looks back
_BLOCK = 64  # logits
_ROWS_AT_ONCE = 32  # bounds the memory that the probabilities of a large vocabulary take


def row_facts(logits: torch.Tensor, rows: Sequence[int]) -> NDArray[np.float32]:
    """What rows of logits say.

    Args:
        logits: [rows or more, vocabulary], before any sampling parameter, on any device. Minus
            infinity is a token that cannot come.
        rows: those that tokens came from; a padding row has no business among them.
    Returns:
        [len(rows), 4]: top-1 probability, entropy in nats, gap = (p1 - p2) / p1, and the
        normaliser: a token's log-probability is its logit less that.
    """
    if is_plain(logits):
        facts = np.empty((len(rows), 4), np.float32)
        flat, apart = _flat(logits)
        row_facts_kernel(flat, np.array(rows, np.int64) * apart, logits.shape[1], facts)
        return facts
    parts = []
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[at : at + _ROWS_AT_ONCE]
        # A slice is a view, where an index would be a copy.
        run = some[-1] - some[0] + 1 == len(some)
        parts.append(row_facts_tensor(logits[some[0] : some[-1] + 1] if run else logits[some]))
    found: NDArray[np.float32] = torch.cat(parts).cpu().numpy()  # the one copy to the host
    return found


def verify(
    logits: torch.Tensor, lengths: Sequence[int], draft_token_ids: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    """The best token of each row, for as long as it is what was drafted, and one more.

    Args:
        logits: [rows, vocabulary], of which ``is_plain`` is true; a request after the other, one
            row more than it has draft tokens.
        lengths: draft tokens of each request.
        draft_token_ids: all of them.
    Returns:
        [requests, longest + 1] tokens, -1 behind a request's last; and [rows, 4] as ``row_facts``
        has it, of those rows that gave a token. None where the logits are not numbers.
    """
    tokens = np.full((len(lengths), max(lengths) + 1), -1, np.int32)
    facts = np.empty((len(logits), 4), np.float32)
    flat, apart = _flat(logits)
    drafts = np.array(draft_token_ids, np.int64)
    good = verify_kernel(
        flat, apart, logits.shape[1], np.array(lengths, np.int64), drafts, facts, tokens
    )
    return (tokens, facts) if good else None


def _flat(logits: torch.Tensor) -> tuple[NDArray[np.float32], int]:
    """One row behind the other, and how far they are apart."""
    (count, vocabulary), apart = logits.shape, logits.stride(0)
    flat = logits.as_strided(((count - 1) * apart + vocabulary,), (1,), logits.storage_offset())
    return flat.numpy(), apart


def is_plain(logits: torch.Tensor) -> bool:
    """Whether numpy sees these rows as they are."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1


def row_facts_tensor(logits: torch.Tensor) -> torch.Tensor:
    """``row_facts`` of all rows, [rows, 4] float32 on the device of its input."""
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


class EntropyWindow:
    """Entropies of a request's last ``ENTROPY_WINDOW`` tokens."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=ENTROPY_WINDOW)

    def ratio(self, entropies: Sequence[float]) -> float:
        """Of the last of these new ones, at least one, to the mean of the window before it.

        1 where there is nothing before. They then count for the next call.
        """
        before, last = self._values, entropies[-1]
        before.extend(entropies[:-1])
        # A mean of zero is a text without any doubt so far: any doubt is then a lot of it.
        found = last / max(sum(before) / len(before), 1e-6) if before else 1.0
        before.append(last)
        return found


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

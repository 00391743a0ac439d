"""The facts of a row of logits on a CPU: two passes over the vocabulary, compiled to its vectors.

A step's own time counts there, and tensor operations take five times as long: a dozen of them, each
with a pass of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from deepseek_flash.dspark.kernels import compiled

_BLOCK = 64  # logits
_LEAST = np.float32(-87.0)  # e to that is about the smallest number of full precision
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_LOG2_E = np.float32(math.log2(math.e))
# 2^f for -0.5 <= f <= 0.5 by Taylor's series: wrong by less than 2e-7.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7)
)
# Sums may be regrouped, or nothing could be vectorised. Infinities stay what they are.
_FAST = {"reassoc", "contract", "nsz", "arcp", "afn"}


@intrinsic  # type: ignore[untyped-decorator]
def _float_of_bits(context: Any, bits: Any) -> Any:
    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def _describe(logits: Any, begin: Any, vocabulary: Any, facts: Any) -> Any:
    """Fill in a row's ``facts`` [4]; returns its best token, the first of those that are equal."""
    row = logits[begin : begin + vocabulary]
    best = 0
    first = second = np.float32(-np.inf)
    for start in range(0, vocabulary, _BLOCK):
        end = min(start + _BLOCK, vocabulary)
        highest = np.float32(-np.inf)
        for at in range(start, end):
            highest = max(highest, row[at])
        if highest > second:  # seldom
            for at in range(start, end):
                if row[at] > first:
                    best, first, second = at, row[at], first
                elif row[at] > second:
                    second = row[at]
    total = below = _ZERO
    for at in range(vocabulary):
        # Relative to the best one, so that a sure row's entropy is not lost among large numbers.
        # What is so much less likely adds nothing; what is not a number stays so.
        distance = row[at] - first
        distance = _LEAST if distance < _LEAST else distance
        power = distance * _LOG2_E
        whole_power = np.int32(power - _HALF)
        f = power - np.float32(whole_power)
        e = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
        e *= _float_of_bits(np.int32((whole_power + np.int32(127)) << np.int32(23)))
        total += e
        below += e * distance
    log_total = math.log(total)
    facts[0] = _ONE / total
    facts[1] = max(_ZERO, log_total - below / total)
    facts[2] = _ONE - math.exp(second - first)
    facts[3] = first + log_total
    return best


_describe_compiled = compiled(_describe, fastmath=_FAST)


@compiled
def row_facts_kernel(logits: Any, starts: Any, vocabulary: Any, facts: Any) -> Any:
    """See ``signals.row_facts``. Fills in ``facts``, [n, 4] float32.

    ``logits`` are flat, for numba compiles anew for each way in which rows may be apart; ``starts``
    [n] int64 is where rows begin.
    """
    for place in range(len(starts)):
        _describe_compiled(logits, starts[place], vocabulary, facts[place])


@compiled
def verify_kernel(
    logits: Any, apart: Any, vocabulary: Any, lengths: Any, drafts: Any, facts: Any, tokens: Any
) -> Any:
    """See ``signals.verify``. Fills in ``facts`` [rows, 4] as far as rows are reached, ``tokens``.

    Returns whether all was a number.
    """
    row = at = 0
    good = True
    for request in range(len(lengths)):
        length = lengths[request]
        for place in range(length + 1):
            here = row + place
            token = _describe_compiled(logits, here * apart, vocabulary, facts[here])
            good &= not np.isnan(facts[here, 0])
            tokens[request, place] = token
            if place < length and drafts[at + place] != token:
                break
        row += length + 1
        at += length
    return good

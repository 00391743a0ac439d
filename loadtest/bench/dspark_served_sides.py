"""Servers that DSpark is compared with, resident together, and a round of load on one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from deepseek_flash import metrics

from loadtest.bench.dflash_sides import FLAGS, Leg, Side, side
from loadtest.scrape import drained, rise, settled

PLAIN, OURS = "plain", "ours"
SUFFIX, SUFFIX_TOKENS, SUFFIX_LEAST = "suffix", 16, 0.1  # the last is vLLM's default
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
WITHOUT = ("--no-enable-dspark", "--no-enable-dflash")

WATCHED = tuple(
    metric.name
    for metric in (
        metrics.PATH_TOKENS, metrics.DRAFTS_PROPOSED, metrics.DRAFTS_ACCEPTED, metrics.LOOKUPS,
        metrics.REPLAYS,
    )
)  # fmt: skip
Gains = Mapping[str, Mapping[str, float]]  # metric → label → by how much it rose


def side_flags(name: str) -> list[str]:
    """The launcher's flags for a side: plain, suffix, suffix:0.5, ngram or ours.

    Raises:
        ValueError: there is no such side.
    """
    method, _, least = name.partition(":")
    if method == SUFFIX:
        speculation: dict[str, Any] = {
            "method": SUFFIX, "num_speculative_tokens": SUFFIX_TOKENS,
            "suffix_decoding_min_token_prob": float(least or SUFFIX_LEAST),
        }  # fmt: skip
    elif name == "ngram":
        speculation = NGRAM
    elif name == PLAIN:
        return [*FLAGS, *WITHOUT]
    elif name == OURS:
        return [*FLAGS, "--enable-dspark", "--enable-dflash"]
    else:
        raise ValueError(f"there is no side {name!r}")
    args = {**json.loads(FLAGS[1]), "speculative_config": speculation}
    return [*FLAGS, *WITHOUT, "--engine-args", json.dumps(args)]  # the last of a flag counts


Sides = Sequence[Side]  # the first is plain


@contextmanager
def resident(names: Sequence[str], model: str, connections: int) -> Iterator[Sides]:
    """All these servers at once."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(side(name, model, side_flags(name), connections)) for name in names
        ]


def play_round(
    it: Side, prompts: Sequence[str], concurrency: int, sampling: Mapping[str, Any]
) -> tuple[Leg, Gains]:
    """One leg, and what the server counted meanwhile.

    Raises:
        RuntimeError: an answer without token ids; compared, it would look like any other.
    """
    it.warm_up(concurrency)
    before = settled(it.served)  # the warm-up does not count
    leg = it.leg(prompts, concurrency, return_token_ids=True, **sampling)
    if not all(reply.token_ids for reply in leg.replies):
        raise RuntimeError(f"{it.name}: an answer without token ids")
    after = drained(it.served)  # nor does the cache's work reach into the next side's leg
    return leg, {name: rise(before, after, name) for name in WATCHED}

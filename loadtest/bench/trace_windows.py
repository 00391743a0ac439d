"""What semantic windows are worth: a trace through the DFlash cache, without an engine.

First the detector alone (``trace_detector``). Then the same trace through caches that differ in
nothing but their windows. A draft that is not the answer counts as a hit, but not as a useful one.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepseek_flash.contract import Continuation, Outcome, RequestPlan
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.fingerprint import FingerprintKey
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import DEFAULT_THRESHOLD, Policy, SemanticWindows
from deepseek_flash.dspark.prompt import load_tokenizer
from deepseek_flash.launcher.environment import LaunchError, resolve_model

from loadtest.bench.report import write_report
from loadtest.bench.trace import TOPICS, read_jsonl
from loadtest.bench.trace_detector import (
    CONTEXT_SHARE,
    Model,
    States,
    Turn,
    detection,
    generate_in_context,
    lay_out,
    study,
)

CAPACITIES = (64, 128, 256, 1536)
KEY = FingerprintKey.derive(b"the simulator's")

Rows = dict[str, dict[str, Any]]  # variant → figures, at one capacity
Choice = Callable[[Rows], str]  # of a variant


class _Table(Table):
    """Counts what closing windows does; with ``keeping`` it does nothing."""

    closings = invalidated = 0
    keeping = False

    def close_window(self, window: int) -> int:
        self.closings += 1
        count = 0 if self.keeping else super().close_window(window)
        self.invalidated += count
        return count


class _TurnKeys(DFlashCache):
    """Finds an entry by its last turn alone, whatever its window is."""

    def _window_starts(self, plan: RequestPlan, boundary: int) -> Sequence[int]:
        return plan.turn_starts[-1:]


@dataclass(frozen=True)
class Variant:
    """One kind of windows.

    Attributes:
        states: [hidden] a turn, for semantic windows.
        closing: whether a closed window's entries go first.
        turn_keys: whether an entry is found by its last turn alone, not by its window's turns.
    """

    name: str
    policy: Policy
    threshold: float = DEFAULT_THRESHOLD
    states: Sequence[torch.Tensor] = ()
    closing: bool = True
    turn_keys: bool = False


LRU = Variant("none: LRU, turn keys", Policy.NONE)
FIXED = [Variant(f"fixed, {n} tokens", Policy.FIXED, n) for n in (512, 1024, 4096)]
KEYS_ALONE, CLOSING_ALONE = ": keys, nothing closed", ": turn keys, closing"  # after a name


def variants(turns: Sequence[Turn], states: Sequence[States]) -> list[Variant]:
    """Each kind of semantic windows also by its two halves: the keys, and the closing."""
    layers = states[0] if states else ()
    semantic = [
        Variant(f"semantic, {layer}", Policy.SEMANTIC, states=[state[layer] for state in states])
        for layer in layers
    ]
    if all(turn.event.topic in TOPICS for turn in turns):
        labels = torch.eye(len(TOPICS))[[TOPICS.index(str(turn.event.topic)) for turn in turns]]
        semantic.append(Variant("semantic, by labels", Policy.SEMANTIC, 0.5, list(labels)))
    found = [LRU, *FIXED]
    for whole in semantic:
        keys = replace(whole, name=whole.name + KEYS_ALONE, closing=False)
        closing = replace(whole, name=whole.name + CLOSING_ALONE, turn_keys=True)
        found += [whole, keys, closing]
    return found


def replay(turns: Sequence[Turn], variant: Variant, capacity: int) -> dict[str, Any]:
    """The trace through one cache."""
    width = variant.states[0].shape[0] if variant.states else 0
    table = _Table(capacity, torch.device("cpu"), hidden_size=width)
    table.keeping = not variant.closing
    windows = SemanticWindows(variant.policy, threshold=variant.threshold)
    cache = (_TurnKeys if variant.turn_keys else DFlashCache)(KEY, table, windows)
    counts: Counter[str] = Counter()
    found = []
    for turn, state in itertools.zip_longest(turns, variant.states):
        known = cache.lookup(turn.plan)
        told = known.replays[0].token_ids if known.replays else known.drafts
        equal = sum(a == b for a, b in zip(known.drafts, turn.answer, strict=False))
        counts.update({known.result: 1, "useful": told == turn.answer,
                       "drafted": len(known.drafts), "right": equal})  # fmt: skip
        closings = table.closings
        # A session's replayed turns are told too: its window moves on with every turn.
        cache.record(Outcome(turn.plan, (Continuation(turn.answer, True),)), state)
        found.append(table.closings > closings)
    exact, window = counts["exact"], counts["window"]
    shares = {"exact": exact, "window": window, "hits": exact + window, "useful": counts["useful"]}
    return {
        **{name: count / len(turns) for name, count in shares.items()},
        "draft_tokens_right": counts["right"] / max(1, counts["drafted"]),
        "windows_closed": table.closings, "invalidated": table.invalidated,
        "evictions": {str(reason): count for reason, count in table.evictions.items()},
        "bytes": table.bytes_on_device, **detection(turns, found),
    }  # fmt: skip


def compare(
    turns: Sequence[Turn], chosen: Sequence[Variant], capacities: Sequence[int]
) -> dict[int, Rows]:
    """Capacity → variant → figures; prints a table."""
    figures: dict[int, Rows] = {}
    for capacity in capacities:
        figures[capacity] = {}
        print(f"\n{capacity:4} entries {'':29} exact window   both useful  right   F1 closed "
              "to front  evicted")  # fmt: skip
        for variant in chosen:
            row = figures[capacity][variant.name] = replay(turns, variant, capacity)
            shares = ("exact", "window", "hits", "useful", "draft_tokens_right")
            print(
                f"  {variant.name:42}", *(f"{row[name]:6.1%}" for name in shares),
                f"{row['f1']:.2f} {row['windows_closed']:6} {row['invalidated']:8} ",
                ", ".join(f"{name} {count}" for name, count in row["evictions"].items()),
            )  # fmt: skip
    print("right: of the tokens that windows drafted, those that equal the answer's")
    return figures


def _best_fixed(rows: Rows) -> str:
    return max((variant.name for variant in FIXED), key=lambda name: float(rows[name]["useful"]))


def _worst_fixed(rows: Rows) -> str:
    return min((variant.name for variant in FIXED), key=lambda name: float(rows[name]["useful"]))


def verdict(figures: dict[int, Rows]) -> list[str]:
    """Semantic windows against the others at the same capacity, lowest to highest of all.

    Which fixed window is the best, and which the worst, is decided by its useful hits.
    """
    caches = list(figures.values())

    def change(name: str, figure: str, other: Choice) -> str:
        pairs = [(rows[name][figure], rows[other(rows)][figure]) for rows in caches]
        changes = [new / old - 1 for new, old in pairs if old]
        return f"{min(changes):+.0%} to {max(changes):+.0%}" if changes else "none there"

    def points(name: str) -> str:
        found = [100 * (rows[name]["useful"] - rows[LRU.name]["useful"]) for rows in caches]
        return f"{min(found):+.1f} to {max(found):+.1f}"

    lines = []
    for name in [name for name in caches[0] if name + KEYS_ALONE in caches[0]]:
        against_lru = change(name, "useful", lambda rows: LRU.name)
        lines += [
            f"{name}, against LRU: useful hits {against_lru}; in points of hit rate by its keys "
            f"alone {points(name + KEYS_ALONE)}, by closing alone {points(name + CLOSING_ALONE)}"
        ]
        for rank, other in (("best", _best_fixed), ("worst", _worst_fixed)):
            others = "; ".join(dict.fromkeys(other(rows) for rows in caches))
            lines += [
                f"{name}, against the {rank} ({others}): useful hits "
                f"{change(name, 'useful', other)}, "
                f"invalidations {change(name, 'invalidated', other)}"
            ]
    if not lines:
        return ["No verdict: neither a model nor labels, so no semantic windows"]
    return [*lines, "The source document, against fixed: hits +22 %, invalidations -53 %"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="an operator's log (JSONL), else a made one")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context-share", type=float, default=CONTEXT_SHARE)
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # other measurements may run beside it
    seed, share = arguments.seed, arguments.context_share
    events = read_jsonl(arguments.trace) if arguments.trace else generate_in_context(seed, share)
    figures: dict[str, Any] = {"seed": seed, "context_share": share, "threshold": DEFAULT_THRESHOLD}
    states: list[States] = []
    try:
        path = resolve_model(arguments.model)
    except LaunchError as error:
        print(f"No signatures: {error}")
        turns = lay_out(events, lambda text: list(text.encode()))
    else:
        tokenizer, model = load_tokenizer(path, None, False), Model(path)

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        # Another trace than the one that is replayed, so that nothing is judged by itself.
        studied = generate_in_context(
            seed + 1, share, sessions=16, turns=10, switch_probability=0.25
        )
        figures["study"] = study(model, lay_out(studied, encode))
        turns = lay_out(events, encode)
        states = model.of_turns(turns)
    print(f"\nTrace: {len(turns)} turns, {len({t.event.text for t in turns})} different questions")
    rows = compare(turns, variants(turns, states), arguments.capacities)
    lines = verdict(rows)
    print("", *lines, sep="\n")
    write_report("trace-windows", {**figures, "capacities": rows, "verdict": lines})


if __name__ == "__main__":
    main()

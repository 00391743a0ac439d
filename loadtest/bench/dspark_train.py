"""Fits the drafting policy's network to recorded answers, and says how good it is on others.

Trained on the first half of each kind of prompt and on other kinds altogether (``dspark_trace
--training``), judged on the second. Each row is a place of a draft with its candidates; the network
learns which of them comes, or that none does.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from deepseek_flash.dspark import kernels, policy
from deepseek_flash.dspark.kernels import CANDIDATES, FEATURES, GROUPS, NAMES, Network
from deepseek_flash.dspark.policy import Policy

from loadtest.bench.dspark_replay import Neighbours, Running, halves, neighbours
from loadtest.bench.dspark_trace import TRACES, Record, read, training_of
from loadtest.bench.report import write_report

HIDDEN, ROUNDS, SEED = 32, 2, 1
WRONG_CHAINS, FEW = 0.3, 5
PASSES, BATCH, RATE, DECAY = 30, 1024, 3e-3, 1e-4
WEIGHTS = Path(policy.__file__).with_name(policy.WEIGHTS)
SIGNALS = ("entropy_ratio", "gap", "attention_variance")


@dataclass(frozen=True, slots=True)
class Rows:
    """Places of drafts. A place has 1 to CANDIDATES candidates, the rest is padding."""

    features: npt.NDArray[np.float32]  # [n, candidates, features]
    present: npt.NDArray[np.bool_]  # [n, candidates]
    right: npt.NDArray[np.int64]  # [n], the candidate that came; CANDIDATES: none of them
    position: npt.NDArray[np.int64]  # [n], in the draft

    def only(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        return Rows(self.features[chosen], self.present[chosen], self.right[chosen],
                    self.position[chosen])  # fmt: skip

    def without(self, names: Sequence[str]) -> Rows:
        """As if these features said nothing."""
        features = self.features.copy()
        features[:, :, [NAMES.index(name) for name in names]] = 0.0
        return Rows(features, self.present, self.right, self.position)


def situations(
    records: Sequence[Record], near: Sequence[Neighbours], budget: int
) -> Iterator[Running]:
    """Each record as a request with all its references, and again as others meet them.

    That is with a few references, or with none (they come late, or the stream is young) and with a
    chain, which is the answer itself or goes over into another one.
    """
    draw = random.Random(SEED)
    for place, (record, others) in enumerate(zip(records, near, strict=True)):
        yield Running(record, others, budget)
        if place % 2:
            yield Running(record, others[: draw.randint(1, FEW)], budget)
            continue
        yield Running(record, (), budget)
        chain, other = record.output.tolist(), records[place - 1].output.tolist()
        if draw.random() < WRONG_CHAINS:
            border = draw.randrange(len(chain))
            chain = chain[:border] + other[border:]
        yield Running(record, others if draw.random() < 0.5 else (), budget, chain=chain)


def collect(records: Sequence[Record], near: Sequence[Neighbours], network: Network) -> Rows:
    """What a policy with this network sees at each token of each record, drafting from there."""
    drafter, found = Policy(network), []
    budget = max(len(record.output) for record in records)
    for running in situations(records, near, budget):
        while truth := running.truth:
            request = running.request()
            drafter.draft(request)  # which the matcher then compares with what comes
            for position, (ids, features) in enumerate(drafter.follow(request, truth)):
                found.append((ids, features, truth[position], position))
            running.advance(1)
    rows = Rows(
        np.zeros((len(found), CANDIDATES, FEATURES), np.float32),
        np.zeros((len(found), CANDIDATES), np.bool_),
        np.full(len(found), CANDIDATES, np.int64),
        np.array([position for *_, position in found], np.int64),
    )
    for row, (ids, features, token, _) in enumerate(found):
        rows.features[row, : len(ids)] = features
        rows.present[row, : len(ids)] = True
        rows.right[row] = next((i for i, it in enumerate(ids) if it == token), CANDIDATES)
    return rows


def beginning() -> Network:
    """What the first rows are collected with: PPM's probability, taken down a little."""
    skip = np.zeros(FEATURES, np.float32)
    skip[kernels.PPM] = 0.7
    nothing = np.zeros(0, np.float32)
    return Network(skip, np.zeros((FEATURES, 0), np.float32), nothing, nothing,
                   np.array([-0.7], np.float32))  # fmt: skip


def fit(rows: Rows, hidden: int = HIDDEN, passes: int = PASSES, decay: float = DECAY) -> Network:
    """The network of highest likelihood; ``hidden`` 0: a regression. Same rows, same weights."""
    torch.manual_seed(SEED)
    real = rows.features[rows.present]
    mean, deviation = real.mean(axis=0), real.std(axis=0)
    scale = np.where(deviation > 1e-6, 1.0 / np.maximum(deviation, 1e-6), 0.0).astype(np.float32)
    x = torch.from_numpy((rows.features - mean) * scale)
    present, right = torch.from_numpy(rows.present), torch.from_numpy(rows.right)
    skip = torch.nn.Linear(FEATURES, 1)
    inner, outer = torch.nn.Linear(FEATURES, hidden), torch.nn.Linear(hidden, 1, bias=False)
    torch.nn.init.zeros_(skip.weight)
    parameters = [*skip.parameters(), *(inner.parameters() if hidden else ()),
                  *(outer.parameters() if hidden else ())]  # fmt: skip
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=decay)
    steps = passes * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE * 3, total_steps=steps)
    for _ in range(passes):
        for batch in torch.randperm(len(x)).split(BATCH):  # type: ignore[no-untyped-call]
            scores = skip(x[batch])[..., 0]
            if hidden:
                scores = scores + outer(torch.relu(inner(x[batch])))[..., 0]
            scores = scores.masked_fill(~present[batch], -torch.inf)
            scores = torch.nn.functional.pad(scores, (0, 1))  # none of them: 0
            loss = torch.nn.functional.cross_entropy(scores, right[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    with torch.no_grad():
        w_skip, w_inner = skip.weight[0].numpy() * scale, inner.weight.numpy().T * scale[:, None]
        return Network(
            skip=w_skip,
            inner=w_inner if hidden else np.zeros((FEATURES, 0), np.float32),
            inner_bias=inner.bias.numpy() - mean @ w_inner,
            outer=outer.weight[0].numpy(),
            bias=skip.bias.numpy() - mean @ w_skip,
        )


def save(network: Network, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        name: [round(float(value), 5) for value in array.ravel()]
        for name, array in network._asdict().items()
    }
    path.write_text(json.dumps({"features": NAMES, **values}) + "\n")


# -- how good it is --------------------------------------------------------------------------------


def chances(network: Network, rows: Rows) -> npt.NDArray[np.float64]:
    """[n, candidates], as the kernel computes them."""
    x = rows.features.astype(np.float64)
    scores = x @ network.skip + network.bias
    scores += np.maximum(x @ network.inner + network.inner_bias, 0.0) @ network.outer
    odds = np.where(rows.present, np.exp(np.minimum(scores, 30.0)), 0.0)
    p: npt.NDArray[np.float64] = odds / (1.0 + odds.sum(axis=1, keepdims=True))
    return p


def judge(network: Network, rows: Rows) -> dict[str, float]:
    """Of the best candidate of each place: was it right, and was that foreseen?"""
    p = chances(network, rows)
    best = p.argmax(axis=1)
    p, right = p.max(axis=1), best == rows.right
    edges = np.linspace(0.0, 1.0, 11)
    bins = np.clip(np.digitize(p, edges) - 1, 0, 9)
    off = sum(abs(p[bins == b].sum() - right[bins == b].sum()) for b in range(10)) / len(p)
    return {
        "right": float(right.mean()), "auc": auc(p, right),
        "brier": float(((p - right) ** 2).mean()), "calibration_error": float(off),
        "log_loss": float(-np.log(np.where(right, p, 1.0 - p).clip(1e-9)).mean()),
    }  # fmt: skip


def auc(values: npt.NDArray[Any], right: npt.NDArray[np.bool_]) -> float:
    """How often a right one has the higher value than a wrong one; equals count half."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[which]
    good, bad = int(right.sum()), int((~right).sum())
    return float((rank[right].sum() - good * (good + 1) / 2) / (good * bad))


def variants() -> dict[str, tuple[str, ...]]:
    """Features left out, by what the table calls that."""
    others = tuple(name for name in NAMES if name not in SIGNALS)
    return {
        **{f"without {group}": names for group, names in GROUPS.items()},
        "without signals": SIGNALS,
        "signals alone": others,
        **{f"{signal} alone": tuple(n for n in NAMES if n != signal) for signal in SIGNALS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACES / "smollm2.npz")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--ablate", action="store_true",
                        help="also fit the regression and, without each group of features, others "
                        "for the replay, into build/traces/networks")  # fmt: skip
    arguments = parser.parse_args()
    seen, unseen = halves(read(arguments.trace))
    more = training_of(arguments.trace)
    if more.exists():
        seen += read(more)
    print(f"{len(seen)} requests to learn from, {len(unseen)} to be judged by")
    network = beginning()
    for _ in range(ROUNDS):
        rows = collect(seen, neighbours(seen), network)
        network = fit(rows, arguments.hidden)
    save(network, arguments.out)
    held_out = collect(unseen, neighbours(unseen), network)
    first = held_out.only(held_out.position == 0)
    print(f"{sum(array.size for array in network):,} parameters, {len(rows.right):,} places")
    results = {"all": judge(network, first), "later places":
               judge(network, held_out.only(held_out.position > 0))}  # fmt: skip
    others = {"regression": (), **variants()} if arguments.ablate else {}
    for name, left_out in others.items():
        hidden = 0 if name == "regression" else arguments.hidden
        other = fit(rows.without(left_out), hidden)
        results[name] = judge(other, first.without(left_out))
        save(other, TRACES / "networks" / f"{name}.json")
    for name, result in results.items():
        print(f"{name:28} " + "  ".join(f"{key} {value:.4f}" for key, value in result.items()))
    write_report("dspark-train", results)


if __name__ == "__main__":
    main()

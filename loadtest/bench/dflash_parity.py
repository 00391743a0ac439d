"""Answers with the DFlash cache against those without it, token by token, on one server each.

*Cold*: the cache was flushed. *Warm*: the same prompts again. *Pressed*: a cache of a few blocks of
16 tokens, and prompts that come back for a longer answer: the engine goes on from what is known, if
it is not gone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_flash import metrics

from clients.grpc_client import GrpcClient
from clients.request import Answer, Request
from loadtest.bench.dflash_sides import FLAGS, flush
from loadtest.bench.dflash_traffic import KINDS, novel, templated
from loadtest.bench.prompts import PROMPTS
from loadtest.bench.report import write_report
from loadtest.scrape import drained, rise
from loadtest.served import Served, serving

CONCURRENCIES = (1, 8)
SIZES = {"tiny-deepseek": (200, 24)}  # model → prompts, tokens
OTHER_SIZE = (40, 48)
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
}
PRESSED = ("--dflash-cache-size", "8", "--dflash-block-tokens", "16")
MOST_PROMPTS_BACK = 3  # about what a pressed cache holds: some are still there, some are not
ANSWER_SECONDS = 300.0

Ask = tuple[int, int]  # number of the prompt, most tokens
Expected = dict[Ask, Answer]  # without the cache


def parity_prompts(count: int) -> list[str]:
    """``PROMPTS`` in an order that mixes its kinds, then prompts that are alike, then new ones."""
    source = random.Random("parity")
    alike = [prompt for kind in KINDS for prompt in templated(kind, 8, source)]
    ordered = (source.sample(PROMPTS, len(PROMPTS)), source.sample(alike, len(alike)))
    return list(itertools.islice(itertools.chain(*ordered, novel(source)), count))


def pressed_order(count: int, tokens: int) -> list[Ask]:
    """Every prompt for two thirds of the tokens, and after each one of the last few for all."""
    source = random.Random("pressed")
    again = (max(0, at - source.randint(0, MOST_PROMPTS_BACK)) for at in range(count))
    pairs = zip(range(count), again)
    return [ask for new, old in pairs for ask in ((new, tokens * 2 // 3), (old, tokens))]


@dataclass(frozen=True)
class Difference:
    """A prompt whose answer was not the one without the cache."""

    prompt: str
    position: int  # first token that differs; the answer's length where only its end or text does


def differences(
    expected: Sequence[Answer], answers: Sequence[Answer], prompts: Sequence[str]
) -> list[Difference]:
    """Where token ids, text or the reason for the end differ."""
    found = []
    for one, other, prompt in zip(expected, answers, prompts, strict=True):
        if _seen(one) != _seen(other):
            pairs = enumerate(zip(one.token_ids, other.token_ids))
            shorter = min(len(one.token_ids), len(other.token_ids))
            found.append(Difference(prompt, next((i for i, (a, b) in pairs if a != b), shorter)))
    return found


def _seen(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.finish_reason


@dataclass(frozen=True)
class Row:
    """One pass over the prompts."""

    name: str
    requests: int
    different: tuple[Difference, ...]
    replays: Mapping[str, float]  # by what they were good for: whole, beginning, nothing
    evictions: Mapping[str, float]  # by reason
    must_replay: tuple[str, ...] = ()  # without these replays it proves nothing

    @property
    def good(self) -> bool:
        return not self.different and all(self.replays.get(use) for use in self.must_replay)

    def __str__(self) -> str:
        missing = [use for use in self.must_replay if not self.replays.get(use)]
        lines = [
            f"  {self.name}: {len(self.different)} of {self.requests} differ; replays"
            f" {dict(self.replays)}, evictions {dict(self.evictions)}",
            *(f"    {it.prompt!r} from token {it.position}" for it in self.different[:3]),
            *(f"    proves nothing: no replay was good for {use}" for use in missing),
        ]
        return "\n".join(lines)


class Asker:
    """Passes over the prompts on one server."""

    def __init__(self, served: Served, prompts: Sequence[str]) -> None:
        self.served, self._prompts = served, prompts
        self._grpc = GrpcClient(served.grpc)

    def answers(self, asks: Sequence[Ask], many: int, sampling: Mapping[str, Any]) -> list[Answer]:
        """In order of the asks, at most ``many`` at a time."""

        def answer(ask: Ask) -> Answer:
            number, tokens = ask
            request = Request(
                text=self._prompts[number], sampling={**sampling, "max_tokens": tokens}
            )
            return self._grpc.generate(request, ANSWER_SECONDS)

        with ThreadPoolExecutor(many) as pool:
            return list(pool.map(answer, asks))

    def expected(self, asks: Sequence[Ask], many: int, sampling: Mapping[str, Any]) -> Expected:
        answers = self.answers(asks, many, {**sampling, "use_dflash": False})
        return dict(zip(asks, answers, strict=True))

    def row(
        self,
        name: str,
        expected: Expected,
        asks: Sequence[Ask],
        many: int,
        sampling: Mapping[str, Any],
        must_replay: tuple[str, ...] = (),
    ) -> Row:
        before = drained(self.served)
        answers = self.answers(asks, many, sampling)
        after = drained(self.served)
        prompts = [self._prompts[number] for number, _ in asks]
        row = Row(
            f"{name} at {many}", len(asks),
            tuple(differences([expected[ask] for ask in asks], answers, prompts)),
            rise(before, after, metrics.REPLAYS.name),
            rise(before, after, metrics.EVICTIONS.name), must_replay,
        )  # fmt: skip
        print(row, flush=True)
        return row


def cold_and_warm(
    asker: Asker, asks: Sequence[Ask], many: int, name: str
) -> tuple[Expected, list[Row]]:
    sampling = SAMPLINGS[name]
    print(f"  {name}, without the cache at {many}", flush=True)
    expected = asker.expected(asks, many, sampling)
    flush(asker.served)
    cold = asker.row(f"{name}, cold", expected, asks, many, sampling)
    return expected, [cold, asker.row(f"{name}, warm", expected, asks, many, sampling, ("whole",))]


def pressed(asker: Asker, asks: Sequence[Ask], many: int, known: Expected) -> Row:
    sampling = SAMPLINGS["greedy"]
    new = [ask for ask in asks if ask not in known]
    expected = known | asker.expected(new, many, sampling)
    flush(asker.served)
    uses = ("whole", "beginning")
    return asker.row("greedy, pressed", expected, asks, many, sampling, uses)


def measure(model: str, prompts: Sequence[str], tokens: int) -> tuple[list[Row], int]:
    """All rows, and how many answers differ without the cache between alone and in company."""
    asks = [(number, tokens) for number in range(len(prompts))]
    greedy: dict[int, Expected] = {}  # by concurrency
    rows: list[Row] = []
    print("starting a server", flush=True)
    with serving(model, FLAGS) as served:
        asker = Asker(served, prompts)
        for many in CONCURRENCIES:
            for name in SAMPLINGS:
                expected, found = cold_and_warm(asker, asks, many, name)
                rows += found
                if name == "greedy":
                    greedy[many] = expected
    print(f"starting a server: {' '.join(PRESSED)}", flush=True)
    with serving(model, [*FLAGS, *PRESSED]) as served:
        asker = Asker(served, prompts)
        order = pressed_order(len(prompts), tokens)
        rows += [pressed(asker, order, many, greedy[many]) for many in CONCURRENCIES]
    alone, together = ([greedy[many][ask] for ask in asks] for many in CONCURRENCIES)
    return rows, len(differences(alone, together, prompts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny-deepseek or another")
    parser.add_argument("--prompts", type=int, help="how many; default by model")
    parser.add_argument("--tokens", type=int, help="of an answer; default by model")
    arguments = parser.parse_args()
    name = arguments.model.rsplit("/", 1)[-1]
    count, tokens = SIZES.get(name, OTHER_SIZE)
    prompts, tokens = parity_prompts(arguments.prompts or count), arguments.tokens or tokens
    print(f"{name}: {len(prompts)} prompts, up to {tokens} tokens")
    try:
        rows, itself = measure(arguments.model, prompts, tokens)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"without the cache, at 1 against at 8: {itself} of {len(prompts)} differ")
    write_report(
        f"bench-dflash-parity-{name}",
        {"prompts": len(prompts), "tokens": tokens, "off_1_against_8": itself,
         "rows": [asdict(row) for row in rows]},
    )  # fmt: skip
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

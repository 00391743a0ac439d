"""Greedy answers through the ensemble against vLLM called directly, token by token.

Through every door without the DFlash cache, then through gRPC with it, cold and warm; DSpark
guesses in all of them. The baseline runs first and alone: two engines on a small machine starve
each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepseek_flash import metrics
from deepseek_flash.contract import Sampling
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import Answer, Request
from loadtest.bench.dflash_parity import parity_prompts
from loadtest.bench.engine import PlainEngine, Run
from loadtest.bench.prompts import PROMPTS
from loadtest.bench.report import write_report
from loadtest.scrape import settled
from loadtest.served import Served, serving

CONCURRENCIES = (1, 8)
ENGINE_ARGS: dict[str, Any] = {"max_model_len": 2048}


@dataclass(frozen=True)
class Difference:
    """A prompt whose answer was not the baseline's."""

    prompt: str
    position: int  # first token that differs


Ask = Callable[[str], Answer]


def passes(served: Served, tokens: int) -> Iterator[tuple[str, int, Ask]]:
    """All that is compared: name, concurrency, function of a prompt."""
    grpc, http = GrpcClient(served.grpc), HttpClient(served.http)

    def request(prompt: str, salt: str = "") -> Request:
        sampling = {"temperature": 0, "max_tokens": tokens, "use_dflash": bool(salt)}
        return Request(text=prompt, sampling=sampling, cache_salt=salt or None)

    doors: Mapping[str, Ask] = {
        "gRPC stream": lambda prompt: grpc.generate(request(prompt)),
        "generate_stream": lambda prompt: Answer.of(list(http.stream(request(prompt)))),
        "generate": lambda prompt: http.generate(request(prompt)),
    }
    for name, ask in doors.items():
        for many in CONCURRENCIES:
            yield name, many, ask

    def cached(salt: str, prompt: str) -> Answer:
        return grpc.generate(request(prompt, salt))

    for many in CONCURRENCIES:
        for name in ("cache, cold", "cache, warm"):
            yield name, many, partial(cached, f"at {many}")


def differences(
    baseline: Sequence[Run], answers: Sequence[Answer], prompts: Sequence[str]
) -> list[Difference]:
    """Where token ids or text differ."""
    found = []
    for run, answer, prompt in zip(baseline, answers, prompts, strict=True):
        if run.token_ids != answer.token_ids or run.text != answer.text:
            pairs = zip(run.token_ids, answer.token_ids)
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
            found.append(Difference(prompt, position))
    return found


def baseline_runs(model: str, prompts: Sequence[str], tokens: int) -> Mapping[int, list[Run]]:
    """Concurrency → what vLLM alone answers."""
    path = resolve_model(model)
    encoder = PromptEncoder(load_tokenizer(path, None, False))
    engine = PlainEngine(path, **ENGINE_ARGS)
    try:
        ids = [encoder.from_text(prompt, 2048) for prompt in prompts]
        sampling = Sampling(temperature=0.0, max_tokens=tokens)
        return {many: engine.run(ids, sampling, many) for many in CONCURRENCIES}
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    arguments = parser.parse_args()
    prompts = parity_prompts(arguments.prompts)
    print(f"vLLM directly: {len(prompts)} prompts, up to {arguments.tokens} tokens", flush=True)
    baseline = baseline_runs(arguments.model, prompts, arguments.tokens)
    itself = sum(
        a.token_ids != b.token_ids for a, b in zip(*(baseline[many] for many in CONCURRENCIES))
    )
    print(f"  vLLM at 1 against vLLM at 8: {itself} of {len(prompts)} differ", flush=True)
    rows = {}
    with serving(arguments.model, ["--engine-args", '{"max_model_len": 2048}']) as served:
        for name, many, ask in passes(served, arguments.tokens):
            with ThreadPoolExecutor(many) as pool:
                answers = list(pool.map(ask, prompts))
            found = differences(baseline[many], answers, prompts)
            rows[f"{name} at {many}"] = len(found)
            print(f"  {name} at {many}: {len(found)} of {len(prompts)} differ", flush=True)
            for item in found[:3]:
                print(f"    {item.prompt!r} from token {item.position}")
        found_out = settled(served)
    for metric in (metrics.DRAFTS_PROPOSED, metrics.DRAFTS_ACCEPTED, metrics.REPLAYS):
        print(f"  {metric.name}: {dict(found_out.get(metric.name, {}))}")
    write_report(
        f"parity-{arguments.model.rsplit('/', 1)[-1]}",
        {"prompts": len(prompts), "tokens": arguments.tokens, "plain_1_against_8": itself,
         "different": rows},
    )  # fmt: skip
    return 1 if any(rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What drafts cost that are always wrong and always sure: plain vLLM against DSpark with a policy
of that kind, both in processes beside this one, in alternating legs."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from deepseek_flash.config import DecoderConfig
from deepseek_flash.contract import Sampling
from deepseek_flash.decoder import engine as decoder_engine
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model
from deepseek_flash.worker.arguments import dspark_arguments

from loadtest.bench.dspark_prompts import KINDS
from loadtest.bench.engine import PlainEngine, Run
from loadtest.bench.report import write_report
from loadtest.numbers import spread

TOKENS, MODEL_LENGTH = 96, 2048
LEAST = 0.97
# By name: numba, imported here, would let vLLM's engine fail to start (see dspark_trace).
WRONG_PROPOSER = "loadtest.bench.dspark_wrong.WrongProposer"


def wrong_arguments(*given: Any) -> dict[str, Any]:
    found = dspark_arguments(*given)
    found["speculative_config"]["model"] = WRONG_PROPOSER
    return found


def leg(engine: PlainEngine, asked: Sequence[Sequence[int]], many: int) -> tuple[float, list[Run]]:
    """Tokens a second, and the answers."""
    sampling = Sampling(temperature=0.0, max_tokens=TOKENS)
    engine.run(asked[:many], Sampling(temperature=0.0, max_tokens=8), many)  # it was idle
    begin = time.perf_counter()
    runs = engine.run(asked, sampling, many)
    seconds = time.perf_counter() - begin
    return sum(len(run.token_ids) for run in runs) / seconds, runs


def compare(
    plain: PlainEngine, wrong: PlainEngine, asked: Sequence[Sequence[int]], many: int, pairs: int
) -> dict[str, Any]:
    speeds, different = [], 0
    for number in range(pairs):
        sides = (plain, wrong) if number % 2 == 0 else (wrong, plain)
        found = {side: leg(side, asked, many) for side in sides}
        (base, right), (rate, runs) = found[plain], found[wrong]
        speeds.append(rate / base)
        different += sum(a.token_ids != b.token_ids for a, b in zip(right, runs, strict=True))
        print(f"  at {many}: plain {base:.1f}, wrong drafts {rate:.1f} tokens/s", flush=True)
    told = wrong.engine.run(wrong.engine.drain()).result() or {}
    good = statistics.median(speeds) >= LEAST and not different
    print(
        f"at {many}: x {spread(speeds)} of plain (aim {LEAST}); {different} answers differ; "
        f"drafts {told.get('proposed')}, accepted {told.get('accepted')}, "
        f"{told.get('steps')} steps: {'good' if good else 'MISSED'}",
        flush=True,
    )
    return {"speeds": speeds, "different": different, "good": good}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    given = parser.parse_args()
    model = str(resolve_model(given.model))
    encoder = PromptEncoder(load_tokenizer(resolve_model(given.model), None, False))
    asked = [
        encoder.from_messages(json.dumps([{"role": "user", "content": text}]), MODEL_LENGTH).ids
        for text in KINDS["unrelated"][: given.prompts]
    ]
    plain = PlainEngine(model, max_model_len=MODEL_LENGTH)
    try:
        with mock.patch.object(decoder_engine, "dspark_arguments", wrong_arguments):
            wrong = PlainEngine(model, DecoderConfig(), max_model_len=MODEL_LENGTH)
        try:
            found = {
                f"at {many}": compare(plain, wrong, asked, many, given.pairs)
                for many in given.concurrency
            }
        finally:
            wrong.close()
    finally:
        plain.close()
    write_report("bench-dspark-hostile", found)
    return 0 if all(it["good"] for it in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

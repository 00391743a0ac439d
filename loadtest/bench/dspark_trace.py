"""Records what a model says to the five kinds of prompts, and how sure it was at each token.

The tokens come from the engine. What else the drafting policy reads at serving (log-probabilities,
the three signals, the state that neighbours are found by) is computed afterwards, one pass over
each finished text by ``transformers``, which thinks the same of the same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from deepseek_flash.contract import Sampling

from loadtest.bench.dspark_prompts import KINDS, prompts, training

TRACES = Path(__file__).resolve().parents[2] / "build" / "traces"
STATE_LAYER = 3  # as the prefix encoder's
TOP = 128  # log-probabilities kept a token


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Row t of an array is what the pass thought that made output token t."""

    kind: str
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]  # [n]
    top1: npt.NDArray[np.float32]  # [n]
    entropy_ratio: npt.NDArray[np.float32]  # [n]
    gap: npt.NDArray[np.float32]  # [n]
    attention_variance: npt.NDArray[np.float32]  # [n]
    top_ids: npt.NDArray[np.int32]  # [n, top], the likeliest first
    top_logprobs: npt.NDArray[np.float16]  # [n, top]
    state: npt.NDArray[np.float32]  # [hidden], of the prompt's last token, after STATE_LAYER layers

    def logprobs(self, row: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Of any tokens; one that is not among the likeliest is a little less than the last."""
        top = self.top_ids[row]
        order = np.argsort(top)
        found = order[np.searchsorted(top, ids, sorter=order).clip(max=len(top) - 1)]
        values = self.top_logprobs[row].astype(np.float32)
        return np.where(top[found] == ids, values[found], values[-1] - 1.0).astype(np.float32)


_LENGTHS = "lengths"


def write(path: Path, records: Sequence[Record]) -> None:
    """One compressed file; arrays of all records one behind the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Record) if field.name not in ("kind", "state")]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(record, name) for record in records]) for name in names
    }
    arrays["kind"] = np.array([record.kind for record in records])
    arrays["state"] = np.stack([record.state for record in records]).astype(np.float16)
    arrays[_LENGTHS] = np.array([(len(it.prompt), len(it.output)) for it in records])
    np.savez_compressed(path, **arrays)


def read(path: Path) -> list[Record]:
    """What ``write`` wrote. Raises OSError, or KeyError for another kind of file."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    ends = np.cumsum(arrays.pop(_LENGTHS), axis=0)[:-1]
    kinds, states = arrays.pop("kind"), arrays.pop("state").astype(np.float32)
    split = {
        name: np.split(values, ends[:, 0 if name == "prompt" else 1])
        for name, values in arrays.items()
    }
    return [
        Record(kind=str(kind), state=state, **{name: parts[row] for name, parts in split.items()})
        for row, (kind, state) in enumerate(zip(kinds, states))
    ]


def training_of(path: Path) -> Path:
    """Where the records are that only the network learns from, beside a trace."""
    return path.with_name(f"{path.stem}-training{path.suffix}")


def shortened(record: Record, tokens: int, top: int) -> Record:
    """The beginning of a record, for a small file."""
    cut = {"output": tokens, "top1": tokens, "entropy_ratio": tokens, "gap": tokens,
           "attention_variance": tokens}  # fmt: skip
    values = {field.name: getattr(record, field.name) for field in fields(Record)}
    values |= {name: values[name][:most] for name, most in cut.items()}
    values |= {name: values[name][:tokens, :top] for name in ("top_ids", "top_logprobs")}
    return Record(**values)


@torch.inference_mode()
def describe(model: Any, kind: str, prompt: Sequence[int], output: Sequence[int]) -> Record:
    """One pass over prompt and output together."""
    # Not above: numba's library, imported before vLLM's engine, lets that fail to start (its scan
    # of all modules trips over it), and the engine's process imports this module first.
    from deepseek_flash.dspark.signals import EntropyWindow, row_facts

    seen = model(
        input_ids=torch.tensor([[*prompt, *output[:-1]]]), output_attentions=True,
        output_hidden_states=True, use_cache=False,
    )  # fmt: skip
    first = len(prompt) - 1
    logits = seen.logits[0, first:].float()
    facts = row_facts(logits, range(len(logits)))
    window = EntropyWindow()
    top = torch.log_softmax(logits, dim=-1).topk(TOP)
    return Record(
        kind=kind,
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        top1=top.values[:, 0].exp().numpy(),
        entropy_ratio=np.array([window.ratio([it]) for it in facts[:, 1].tolist()], np.float32),
        gap=facts[:, 2],
        attention_variance=_variance(seen.attentions[-1][0])[first:].numpy(),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logprobs=top.values.numpy().astype(np.float16),
        state=seen.hidden_states[STATE_LAYER][0, first].numpy(),
    )


def _variance(attention: torch.Tensor) -> torch.Tensor:
    """``signals.attention_variance`` of a whole text, from [heads, tokens, tokens] weights.

    A softmax over the last positions alone is the whole one, divided by what falls on them.
    """
    from deepseek_flash.dspark.signals import ATTENTION_WINDOW

    rows = []
    for place in range(attention.shape[1]):
        weights = attention[:, place, max(0, place + 1 - ATTENTION_WINDOW) : place + 1]
        weights = weights / weights.sum(dim=1, keepdim=True)
        rows.append(weights.var(dim=0, unbiased=False).mean())
    return torch.stack(rows)


def record(
    model: str, asked: Sequence[tuple[str, str]], tokens: int, concurrency: int
) -> list[Record]:
    """Run the prompts through plain vLLM, greedily, then look at what it said."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from loadtest.bench.engine import PlainEngine

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for _, text in asked
    ]  # fmt: skip
    engine = PlainEngine(model, max_model_len=2048)
    runs = engine.run(ids, Sampling(temperature=0.0, max_tokens=tokens), concurrency)
    engine.close()
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    return [
        describe(loaded, kind, prompt, run.token_ids)
        for (kind, _), prompt, run in zip(asked, ids, runs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/models/smollm2")
    parser.add_argument("--prompts", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=Path, default=TRACES / "smollm2.npz")
    parser.add_argument("--training", action="store_true",
                        help="other prompts, for the network to learn from alone")  # fmt: skip
    parser.add_argument("--sample", type=Path, help="also write a small one here, for tests")
    arguments = parser.parse_args()
    asked, out = prompts(arguments.prompts), arguments.out
    if arguments.training:
        asked, out = training(), training_of(out)
    records = record(arguments.model, asked, arguments.tokens, arguments.concurrency)
    write(out, records)
    if arguments.sample:
        small = [shortened(it, 48, 16) for it in records[: 4 * len(KINDS)]]
        write(arguments.sample, small)
    same = sum(int((it.top_ids[:, 0] == it.output).sum()) for it in records)
    total = sum(len(it.output) for it in records)
    print(f"{len(records)} requests, {total} tokens; transformers would have said {same} of them")


if __name__ == "__main__":
    main()

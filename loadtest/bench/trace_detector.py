"""Which state of the model tells a trace's topics apart, and by which threshold.

The trace is laid out here too, as the cache sees it. An answer is made up from a hash of the
question; a follow-up ("Make it shorter.") says too little alone, so what it follows is hashed too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepseek_flash.contract import RequestPlan, Returns, Sampling
from deepseek_flash.dflash.neighbours import RunningMoments
from deepseek_flash.dflash.windows import Policy, SemanticWindows
from deepseek_flash.dspark.prompt import MOST_TURNS

from loadtest.bench.trace import Event, generate

LAYER = 3  # of the prefix encoder
CONTEXT_SHARE = 0.3
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
IN_CONTEXT: dict[str, tuple[str, ...]] = {
    "code": ("And in Java?", "Add a docstring, please.", "Make it shorter.", "Why?",
             "Can you make it faster?"),
    "chinese": ("请再详细一点。", "请说得简单一些。", "为什么？", "请举一个例子。", "翻译成英文。"),
    "sql": ("How would that look in MySQL?", "Why?", "Now the other way round.",
            "Is there a faster way?", "Explain it step by step."),
    "email": ("Make it shorter.", "Use a warmer closing, please.", "More formal, please.",
              "Now in French.", "Give me another version."),
    "poem": ("Make it shorter.", "Make the second stanza sadder.", "Another one, please.",
             "Now without rhymes.", "Give it a title."),
}  # fmt: skip
_IN_CONTEXT = frozenset(text for texts in IN_CONTEXT.values() for text in texts)

States = dict[str, torch.Tensor]  # signature → [hidden]
Encode = Callable[[str], list[int]]


def generate_in_context(
    seed: int, context_share: float = CONTEXT_SHARE, **options: Any
) -> list[Event]:
    """``trace.generate``, where ``context_share`` of the turns follow up on the turn before.

    As far as there are turns for that: neither a session's first, nor one that changes the topic.
    """
    events = generate(seed, follow_up_share=0.0, **options)
    source = random.Random(seed)
    able = [place for place, event in enumerate(events) if event.turn and not event.is_switch]
    for place in source.sample(able, min(len(able), round(context_share * len(events)))):
        text = source.choice(IN_CONTEXT[str(events[place].topic)])
        events[place] = replace(events[place], text=text)
    return events


@dataclass(frozen=True)
class Turn:
    """An event as the cache sees it."""

    event: Event
    plan: RequestPlan
    answer: tuple[int, ...]

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.plan.prompt_token_ids[self.plan.turn_starts[-1] :]


def lay_out(events: Sequence[Event], encode: Encode) -> list[Turn]:
    """Prompts that hold all of their session so far, as in a chat."""

    def message(role: str, content: str) -> list[int]:
        return encode(f"<|im_start|>{role}\n{content}<|im_end|>\n")

    opening, end = encode("<|im_start|>assistant\n"), encode("<|im_end|>\n")
    # By tenant and session: its ids, where its turns start, and what the user wrote in them.
    sessions: dict[tuple[str, str], tuple[list[int], tuple[int, ...], tuple[str, ...]]] = {}
    turns = []
    for number, event in enumerate(events):
        ids, starts, texts = sessions.get((event.tenant, event.session), (encode(SYSTEM), (), ()))
        if event.history is not None:
            ids, starts, texts = [], (), ()
            for role, content in event.history:
                if role == "user":
                    starts, texts = (*starts, len(ids)), (*texts, content)
                ids = [*ids, *message(role, content)]
        starts, texts = (*starts, len(ids))[-MOST_TURNS:], (*texts, event.text)
        ids = [*ids, *message("user", event.text), *opening]
        answer = _answer(texts, encode)
        turns.append(Turn(event, _plan(number, event, ids, starts), answer))
        if event.session:
            sessions[event.tenant, event.session] = [*ids, *answer, *end], starts, texts
    return turns


def _answer(texts: Sequence[str], encode: Encode) -> tuple[int, ...]:
    """To the last text, as it depends on those that it follows up on."""
    alone = [place for place, text in enumerate(texts) if text not in _IN_CONTEXT]
    asked = "\n".join(texts[alone[-1] if alone else 0 :])
    source, words = random.Random(asked), encode(asked)
    return tuple(source.choices(words, k=source.randint(20, 120)))


def _plan(number: int, event: Event, ids: list[int], starts: tuple[int, ...]) -> RequestPlan:
    return RequestPlan(
        plan_id=str(number), slot=0, generation=1, namespace="simulated", arrival=0.0,
        deadline=None, prompt_token_ids=tuple(ids), prepended_text="", stream=False,
        sampling=Sampling(temperature=0.0, max_tokens=256), returns=Returns(), turn_starts=starts,
        session_id=event.session, cache_salt=event.tenant, cancel_key="", burst_steps=3,
        use_dflash=True, use_dspark=True,
    )  # fmt: skip


class Model:
    """Hidden states of a checkpoint: after layer 3, and after the last layer and its norm."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], States] = {}

    @torch.inference_mode()
    def at(self, ids: Sequence[int], places: Sequence[int]) -> list[States]:
        """At each place, in one pass: a state sees what precedes it alone."""
        output = self._model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        layers = {"layer 3": output.hidden_states[LAYER], "last layer": output.last_hidden_state}
        return [{name: it[0, place].clone() for name, it in layers.items()} for place in places]

    def of_turns(self, turns: Sequence[Turn]) -> list[States]:
        """At the end of each turn, of its own tokens alone."""
        for turn in turns:
            if turn.own_ids not in self._known:
                (self._known[turn.own_ids],) = self.at(turn.own_ids, [-1])
        return [self._known[turn.own_ids] for turn in turns]

    def of_prompts(self, turns: Sequence[Turn]) -> list[States]:
        """At the end of each turn, of its whole prompt. Sessions must only grow."""
        last = {turn.event.session: turn.plan.prompt_token_ids for turn in turns}
        ends: dict[str, list[int]] = {session: [] for session in last}
        for turn in turns:
            ends[turn.event.session].append(len(turn.plan.prompt_token_ids) - 1)
        found = {session: iter(self.at(last[session], ends[session])) for session in last}
        return [next(found[turn.event.session]) for turn in turns]


def detection(turns: Sequence[Turn], found: Sequence[bool]) -> dict[str, float]:
    """Of what was found, how much is a switch; of the switches, how many were found."""
    labels = [bool(turn.event.is_switch) for turn in turns]
    right = sum(a and b for a, b in zip(labels, found, strict=True))
    return {
        "precision": right / max(1, sum(found)), "recall": right / max(1, sum(labels)),
        "f1": 2 * right / max(1, sum(found) + sum(labels)),
    }  # fmt: skip


def standardised(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As the cache does it: by what was seen up to each state."""
    moments, signatures = RunningMoments(states[0].shape[0], states[0].device), []
    for state in states:
        moments.add(state)
        signatures.append(moments.standardise(state))
    return signatures


def area(turns: Sequence[Turn], signatures: Sequence[torch.Tensor]) -> float:
    """AUC of the cosine to the centroid of the true window: same topic against another."""
    centroids: dict[str, torch.Tensor] = {}
    cosines: dict[bool, list[float]] = {False: [], True: []}
    for turn, signature in zip(turns, signatures, strict=True):
        switch, session = bool(turn.event.is_switch), turn.event.session
        unit = torch.nn.functional.normalize(signature, dim=0)
        centroid = centroids.get(session)
        if centroid is not None:
            cosines[switch].append(float(torch.cosine_similarity(unit, centroid, dim=0)))
        centroids[session] = unit if centroid is None or switch else centroid + unit
    same, other = (torch.tensor(cosines[switch]) for switch in (False, True))
    larger = (same[:, None] > other).float() + 0.5 * (same[:, None] == other).float()
    return float(larger.mean())


def detect(
    pairs: Sequence[tuple[Turn, torch.Tensor]], threshold: float, sessions: Collection[str]
) -> dict[str, float]:
    """The windows of some sessions, without a cache."""
    windows = SemanticWindows(Policy.SEMANTIC, threshold=threshold)
    pairs = [(turn, signature) for turn, signature in pairs if turn.event.session in sessions]
    closed = [windows.observe(0, turn.event.session, turn.plan.turn_starts[-1], signature, 0).closed
              for turn, signature in pairs]  # fmt: skip
    return detection([turn for turn, _ in pairs], [window is not None for window in closed])


def study(model: Model, turns: Sequence[Turn]) -> dict[str, Any]:
    """Threshold from every other session, evaluated on the rest; prints a table."""
    figures: dict[str, Any] = {}
    names = sorted({turn.event.session for turn in turns})
    print(f"\nDetector: {len(turns)} turns, {sum(bool(t.event.is_switch) for t in turns)} switches")
    for scope, read in (("own tokens", model.of_turns), ("whole prompt", model.of_prompts)):
        states = read(turns)
        for layer in states[0]:
            signatures = standardised([state[layer] for state in states])
            pairs = list(zip(turns, signatures))
            scores = {step / 50: detect(pairs, step / 50, names[::2])["f1"]
                      for step in range(-25, 46)}  # fmt: skip
            threshold = max(scores, key=scores.__getitem__)
            row = {"auc": area(turns, signatures), "threshold": threshold}
            row |= detect(pairs, threshold, names[1::2])
            figures[f"{layer}, {scope}"] = row
            print(f"  {layer + ', ' + scope:26}", *(f"{k} {v:.2f}" for k, v in row.items()))
    return figures

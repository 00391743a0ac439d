"""What goes on between two passes, against a model that is played here."""

import random
import types

import numpy as np
import pytest
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.paths import Path
from deepseek_flash.worker.proposer import SparkProposer, Step
from deepseek_flash.worker.requests import Limits, RequestState, Wishes

EOS, K, CONTEXT = 2, 6, 90


class Guesses:
    """A policy that knows the answers, more or less."""

    def __init__(self, truth, chance):
        self.truth, self.random = truth, chance

    def draft(self, request):
        matcher = request.matcher
        assert len(request.last_logprobs(np.array([3, 4]))) == 2
        prompt = tuple(matcher.history.tokens[2 : matcher.end + 1 - matcher.generated].tolist())
        right = self.truth[prompt][matcher.generated :][: request.limit]
        tokens = [token if self.random.random() < 0.8 else 99 for token in right]
        source = self.random.choice(list(Source))
        return Draft(tokens, [0.8] * len(tokens), [source] * len(tokens))


class Takes:
    """A controller that takes a random beginning of each draft."""

    def __init__(self, chance):
        self.random, self.seen = chance, []

    def least_chance(self, requests, context):
        assert requests > 0 and context > 0
        return 0.02

    def decide(self, drafts, batch):
        assert len(drafts) == len(batch.room) == len(batch.burst_steps) == len(batch.signals)
        return [
            self.random.randint(0, min(len(draft.token_ids), room)) if draft else 0
            for draft, room in zip(drafts, batch.room)
        ]

    def verified(self, drafts, lengths, accepted, context):
        assert len(drafts) == len(lengths) == len(accepted) and context > 0
        assert all(right <= length for right, length in zip(accepted, lengths))
        self.seen += zip(lengths, accepted)


def config():
    return types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(num_speculative_tokens=K),
        model_config=types.SimpleNamespace(max_model_len=CONTEXT),
    )


class Played:
    """The proposer with requests whose right answers are known, and the engine around it."""

    def __init__(self, seed):
        chance = self.random = random.Random(seed)
        truth = self.truth = {}
        controller = self.controller = Takes(chance)

        class Proposer(SparkProposer):
            def make_policy(self):
                return Guesses(truth, chance)

            def make_controller(self):
                return controller

        self.proposer = Proposer(config())
        self.answers, self.drafts, self.lengths, self.prompts = {}, {}, {}, {}

    def add(self, name):
        prompt = [self.random.randrange(3, 90) for _ in range(self.random.randint(1, 30))]
        length = self.random.randint(1, CONTEXT - len(prompt))
        answer = [self.random.randrange(3, 90) for _ in range(length)]
        if self.random.random() < 0.5 and len(prompt) + length < CONTEXT:
            answer.append(EOS)
            length += self.random.randint(1, 9)
        self.truth[tuple(prompt)] = answer + [7] * K
        self.answers[name], self.prompts[name] = [], prompt
        self.lengths[name] = len(answer)
        wishes = Wishes(plan_id=name[:-2], burst_steps=3, use_dspark=True)
        limits = Limits(length, 0, frozenset({EOS}), self.random.random() < 0.8)
        self.proposer.add(RequestState(name, prompt, limits, wishes))

    def step(self, names):
        tokens, lengths = [], []
        for name in names:
            drafted = self.drafts.pop(name, [])
            if self.random.random() < 0.1:
                drafted = []  # preempted in between
            truth = self.truth[tuple(self.prompts[name])][len(self.answers[name]) :]
            right = 0
            while right < len(drafted) and drafted[right] == truth[right]:
                right += 1
            tokens.append(truth[: right + 1])
            lengths.append(len(drafted))
        burst = self.proposer.bursts({n: [0] * k for n, k in zip(names, lengths) if k})
        found = self.proposer.step(
            Step(
                names, tokens, lengths, [np.full((len(new), 3), 0.5, np.float32) for new in tokens],
                np.zeros(len(names), np.float32), lambda row: lambda ids: np.zeros(len(ids)),
                True, 0.0, 0.01,
            )
        )  # fmt: skip
        for name, new, draft in zip(names, tokens, found):
            assert len(draft) <= K
            # vLLM would fail, or throw away, what goes beyond these.
            after = len(self.prompts[name]) + len(self.answers[name]) + len(new) + len(draft)
            assert not draft or after + 1 <= CONTEXT
            self.answers[name] = (self.answers[name] + new)[: self.lengths[name]]
            self.drafts[name] = draft
        return burst


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_counted_once_and_nothing_is_left(seed):
    played, running, told, bursts, count = Played(seed), [], [], 0, 0
    passes, tokens = dict.fromkeys(Path, 0), 0
    while count < 12 or running:
        if count < 12 and played.random.random() < 0.3:
            running.append(f"plan{count}-r")
            played.add(running[-1])
            count += 1
        played.random.shuffle(running)
        batch = running[: played.random.randint(0, len(running))]  # the rest waits
        bursts += played.step(batch) if batch else 0
        ended = [n for n in running if len(played.answers[n]) == played.lengths[n]]
        drained = played.proposer.drain([n[:-2] for n in ended])
        told += drained["requests"]
        tokens += sum(drained["tokens"].values())
        for path, number in drained["passes"].items():
            passes[Path(path)] += number
        for name in ended:
            played.proposer.remove(name)
            running.remove(name)
    assert played.proposer.drain()["live"] == 0 == len(played.proposer.paths)
    assert len(told) == 12 == len({record["plan_id"] for record in told})
    for record in told:
        assert record["tokens"] == played.lengths[f"{record['plan_id']}-r"] == len(record["top1"])
        assert sum(record["paths"].values()) == record["tokens"]
    assert tokens == sum(played.lengths.values())
    assert passes[Path.BURST] == bursts


def test_vllms_own_way_of_asking_is_refused():
    with pytest.raises(RuntimeError, match="worker_cls"):
        Played(0).proposer.propose([[1]], [1], [[1]])

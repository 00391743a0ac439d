"""Scheduler's plans, cache and decoder in one process over a scripted engine: no Triton, no vLLM.

The engine's "model" is a hash: each token follows from all tokens before it and from every sampling
field that may decide it, so whatever is replayed for a context that is not its own shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from contextlib import aclosing
from dataclasses import replace

import torch
from deepseek_flash import metrics
from deepseek_flash.contract import LookupResult, Neighbours, Sampling
from deepseek_flash.decoder.answer import Answer
from deepseek_flash.decoder.engine import engine_choices
from deepseek_flash.decoder.generation import Generations
from deepseek_flash.decoder.output import Output, Piece
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.fingerprint import (
    DECIDING,
    DECIDING_WHEN_SAMPLED,
    FingerprintKey,
)
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import SemanticWindows

from tests.unit.fakes import make_plan

EOS = 0
WORDS = "abcdefghijklmnopqrstuvwxyz"
GREEDY = Sampling(temperature=0.0, max_tokens=8)


_NAMES = itertools.count()


def plan_for(prompt=(1, 2, 3), sampling=GREEDY, **changes):
    """A plan of its own id. ``sampling`` may be the changes to a greedy one."""
    if isinstance(sampling, dict):
        sampling = replace(GREEDY, **sampling)
    return make_plan(
        plan_id=f"plan-{next(_NAMES)}", prompt_token_ids=tuple(prompt), sampling=sampling,
        arrival=changes.pop("arrival", 1e12), **changes,
    )  # fmt: skip


class FakeDSpark:
    """Takes references; says of every plan what ``says`` says."""

    def __init__(self):
        self.references, self.says, self.asked = {}, None, []

    def add_references(self, plan_id, neighbours):
        self.references[plan_id] = neighbours.references

    async def learned(self, plan_id):
        self.asked.append(plan_id)
        await asyncio.sleep(0)
        return self.says


class FakeText:
    """vLLM's detokenizer for a vocabulary of letters: one letter a token, nothing for the EOS."""

    def __init__(self, plan):
        self.sampling = plan.sampling
        self.text, self.taken, self.tokens = "", 0, 0

    def add(self, token, ends):
        self.tokens += 1
        if not ends or self.sampling.include_stop_str_in_output:
            self.text += letter(token)
        if self.tokens <= self.sampling.min_tokens or not self.sampling.detokenize:
            return None
        for stop in self.sampling.stop:
            if self.text.endswith(stop) and not ends:
                if not self.sampling.include_stop_str_in_output:
                    self.text = self.text[: -len(stop)]
                return stop
        return None

    def take(self, finished):
        held = 0 if finished or self.sampling.include_stop_str_in_output else (
            max(map(len, self.sampling.stop), default=1) - 1
        )  # fmt: skip
        end = max(self.taken, len(self.text) - held)
        text, self.taken = self.text[self.taken : end], end
        return text if self.sampling.detokenize else ""


def letter(token):
    return "" if token == EOS else WORDS[token % len(WORDS)]


class FakeEngine:
    """Generates by hash. ``ends_after`` fixes an answer's length; ``script`` what goes wrong."""

    def __init__(self, ends_after=20):
        self.ends_after = ends_after
        self.plans = []  # one a run
        self.chains = []
        self.running = 0
        self.fail_after = None  # tokens, then an error
        self.abort_after = None  # tokens, then finish reason "abort"
        self.hang_after = None
        self.salt = 0  # another value: the same model gives other answers (a batch's numerics)
        self.vocabulary = 500
        self.cached = 0  # tokens of every prompt that its prefix cache has

    def next_token(self, plan, context, made, index):
        sampling = plan.sampling
        fields = [getattr(sampling, name) for name in DECIDING]
        if sampling.temperature:
            # A generator in the middle of its stream is another than one at its beginning.
            seed = None if sampling.seed is None else sampling.seed + index
            fields += [getattr(sampling, n) for n in DECIDING_WHEN_SAMPLED if n != "seed"]
            fields += [seed, made]
        data = repr((plan.namespace, self.salt, fields, context)).encode()
        number = int.from_bytes(hashlib.blake2b(data, digest_size=6).digest())
        return number % self.vocabulary + 1

    def answer(self, plan, index=0):
        """All tokens that the model would give, the EOS last, whatever the budget."""
        context, tokens = list(plan.prompt_token_ids), []
        # The length is a function of the prompt's text alone, so that a continued prompt agrees.
        while len(context) < 3 + self.ends_after:
            tokens.append(self.next_token(plan, context, len(tokens), index))
            context.append(tokens[-1])
        return [*tokens, EOS]

    async def generate(self, plan, chain=()):
        self.plans.append(plan)
        self.chains.append(tuple(chain))
        self.running += 1
        try:
            choices = engine_choices(plan.sampling)
            for index in range(choices):
                async with aclosing(self._choice(plan, index)) as pieces:
                    async for piece in pieces:
                        done = piece.finish_reason is not None and index == choices - 1
                        yield Output((piece,), done, num_cached_tokens=self.cached)
                        await asyncio.sleep(0)
        finally:
            self.running -= 1

    async def _choice(self, plan, index):
        text, sampling = FakeText(plan), plan.sampling
        for place, token in enumerate(self.answer(plan, index)):
            if place == self.hang_after:
                await asyncio.Event().wait()
            if place == self.fail_after:
                raise RuntimeError("the engine failed")
            if place == self.abort_after:
                yield Piece(index, "", (), "abort")
                return
            ends = token == EOS and not sampling.ignore_eos
            stop, reason = text.add(token, ends), None
            if stop is not None or ends:
                reason = "stop"
            elif place + 1 == sampling.max_tokens:
                reason = "length"
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = [{token: type("L", (), {"logprob": -1.0, "rank": 1,
                                                   "decoded_token": letter(token)})()}]  # fmt: skip
            yield Piece(
                index, text.take(reason is not None), (token,), reason, stop, None, logprobs
            )
            if reason:
                return


class DirectFeedback:
    """Tells the cache at once; holds messages back while ``held`` is a list."""

    def __init__(self, cache):
        self.cache, self.held, self.told, self.asked = cache, None, [], []
        self.state = None  # of every prompt: what an encoder would give

    def tell(self, outcome, then):
        self.told.append(outcome)
        if self.held is None:
            self.cache.record(outcome, self.state)
            then()
        else:
            self.held.append((outcome, then))

    def release(self):
        held, self.held = self.held, None
        for outcome, then in held:
            self.tell(outcome, then)

    def ask(self, query, then, wanted):
        assert wanted()
        self.asked.append(query)
        self.wanted = wanted
        then(Neighbours(query.plan.plan_id, ()))


class Reply:
    """One finished answer."""

    def __init__(self, plan, outputs):
        self.plan = plan
        choices = engine_choices(plan.sampling)
        answer = Answer(choices, len(plan.prompt_token_ids), copies=plan.sampling.n // choices)
        for output in outputs:
            answer.add(output)
        delta = answer.take()
        self.texts, self.ids, self.reasons = delta.texts, delta.token_ids, delta.finish_reasons
        self.logprobs, self.cached = delta.logprobs, delta.num_cached_tokens
        self.pieces = [p for output in outputs for p in output.pieces]
        self.paths = {output.path.value for output in outputs}
        self.finished = [output.finished for output in outputs]

    @property
    def same(self):
        """What must not depend on the cache."""
        return self.texts, self.ids, self.reasons, self.logprobs


class Stack:
    """The cache and the decoder's generations over one engine."""

    def __init__(self, engine=None, *, capacity=64, block=4, cache=True, bits=64, **options):
        self.engine = engine or FakeEngine()
        quota = options.pop("quota", None)
        table = Table(capacity, torch.device("cpu"), block=block, hidden_size=2, tenant_quota=quota)
        key = FingerprintKey.derive(b"secret", bits)
        self.cache = DFlashCache(key, table, SemanticWindows("none"), **options)
        self.on = cache
        self.feedback = DirectFeedback(self.cache)
        self.recorder = metrics.Recorder()
        self.dspark = FakeDSpark()
        self.generations = Generations(
            self.engine.generate, FakeText, self.feedback, self.recorder, lambda f: f(), self.dspark
        )

    @property
    def runs(self):
        return len(self.engine.plans)

    def lookup(self, plan):
        return self.cache.lookup(replace(plan, use_dflash=plan.use_dflash and self.on))

    def outputs(self, plan, lookup=None):
        return self.generations.outputs(plan, lookup or self.lookup(plan))

    async def ask(self, plan, take=None):
        """The whole answer, or ``take`` outputs of it before the client leaves."""
        collected = []
        async with aclosing(self.outputs(plan)) as outputs:
            async for output in outputs:
                collected.append(output)
                if len(collected) == take:
                    break
        self.cache.note_uses()
        self.cache.table.check_integrity()
        return Reply(plan, collected)

    def run(self, *plans, take=None):
        """One after another; the replies."""

        async def main():
            replies = [await self.ask(plan, take) for plan in plans]
            await asyncio.sleep(0)
            return replies

        return asyncio.run(main())

    def answer(self, prompt=(1, 2, 3), sampling=GREEDY, **changes):
        (reply,) = self.run(plan_for(prompt, sampling, **changes))
        return reply

    def result(self, plan):
        return self.cache.lookup(plan).result


def without_cache(plan, **engine):
    """What the engine alone answers."""
    stack = Stack(FakeEngine(**engine), cache=False)
    (reply,) = stack.run(plan)
    assert stack.result(replace(plan, use_dflash=False)) is LookupResult.OFF
    return reply

"""What goes on behind a one-token probe (CB-22): for the cache alone, and only while nobody waits.

The service is the decoder's own; cache, engine and client are ``stack``'s and ``decoder``'s.
"""

import asyncio
from dataclasses import replace

import pytest
from deepseek_flash import metrics
from deepseek_flash.contract import CancelPlan, Control, Lookup, LookupResult
from deepseek_flash.decoder.extension import Extension, Probe
from deepseek_flash.metrics import known_series

from tests.unit.decoder import Decoder
from tests.unit.stack import FakeEngine, Stack, plan_for

LONG = 100  # tokens of the engine's answer, the EOS apart
MORE = 32
SEEDED = {"temperature": 0.9, "seed": 1}


def run(tmp_path, monkeypatch, main, **engine):
    async def inner():
        stack = Stack(FakeEngine(**{"ends_after": LONG, **engine}), block=256)
        await main(Decoder(tmp_path, monkeypatch, stack))

    asyncio.run(inner())


@pytest.fixture
def probing(tmp_path, monkeypatch):
    """Runs ``main(decoder)`` over an engine of these properties."""
    return lambda main, **engine: run(tmp_path, monkeypatch, main, **engine)


def probe(decoder, prompt=(1, 2, 3), extend_to=MORE, sampling=None, **changes):
    sampling = {**(sampling or {}), "max_tokens": 1}
    return decoder.plan(prompt, sampling, extend_to=extend_to, **changes)


def ends(decoder):
    """How extensions ended so far: done, aborted, failed."""
    return tuple(
        decoder.counted(metrics.PROBE_EXTENSIONS, result=result)
        for result in ("done", "aborted", "failed")
    )


def known(decoder, **changes):
    """Tokens that the cache could replay of the prompt's answer, for each choice."""
    plan = plan_for(**{**changes, "sampling": {**changes.get("sampling", {}), "max_tokens": 99}})
    return [len(it.token_ids) for it in decoder.stack.lookup(plan).replays]


async def alone(plan):
    """What the engine answers without a cache."""
    return await Stack(FakeEngine(LONG), cache=False).ask(plan)


def as_answer(reply):
    return reply.texts, reply.ids, reply.reasons, reply.cached


# -- what it is for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"n": 3}, SEEDED, {**SEEDED, "n": 2}, {"min_tokens": 1}, {"frequency_penalty": 0.5},
        {"structured_outputs": {"regex": "a"}}, {"logit_bias": {5: 1.0}}, {"bad_words": ("x",)},
        {"thinking_token_budget": 5}, {"stop": ("never",)}, {**SEEDED, "stop": ("never",)},
        {"logprobs": 2}, {"detokenize": False},
    ],
    ids=str,
)  # fmt: skip
def test_the_request_in_earnest_is_replayed(probing, sampling):
    async def main(decoder):
        asked = probe(decoder, sampling=sampling)
        client = await decoder.ask(asked)
        assert client.answer == as_answer(await alone(asked))
        await decoder.settle()
        runs = decoder.stack.runs
        assert runs == 2 and ends(decoder) == (1, 0, 0)
        made = decoder.scripted.plans[1].sampling
        assert (made.stop, made.detokenize, made.logprobs) == ((), False, None)
        whole = {k: v for k, v in sampling.items() if k != "logprobs"}
        earnest = decoder.plan(sampling={**whole, "max_tokens": MORE})
        answer = (await decoder.ask(earnest)).answer
        assert answer == (*as_answer(await alone(earnest))[:3], 3), "nothing was computed"
        assert decoder.stack.runs == runs

    probing(main)


def test_a_greedy_one_goes_on_from_its_token(probing):
    async def main(decoder):
        asked = probe(decoder)
        first = (await decoder.ask(asked)).answer[1][0]
        await decoder.settle()
        plan = decoder.scripted.plans[1]
        assert plan.prompt_token_ids == (*asked.prompt_token_ids, *first)
        assert plan.sampling.max_tokens == MORE - 1
        longer = decoder.plan(sampling={"max_tokens": 50})
        answer = (await decoder.ask(longer)).answer
        assert answer[:3] == as_answer(await alone(longer))[:3]
        assert len(decoder.scripted.plans[2].prompt_token_ids) == 3 + MORE

    probing(main)


def test_other_stop_strings_find_it_too(probing):
    async def main(decoder):
        text = (await alone(plan_for(sampling={"max_tokens": 20}))).texts[0]
        await decoder.ask(probe(decoder, sampling={"stop": (text[10:12],)}))
        await decoder.settle()
        assert known(decoder) == [MORE]
        plan = decoder.plan(sampling={"max_tokens": MORE, "stop": (text[4:7],)})
        answer = (await decoder.ask(plan)).answer
        assert answer[:3] == as_answer(await alone(plan))[:3]
        assert decoder.stack.runs == 2

    probing(main)


def test_an_answer_that_ends_on_the_way_is_whole(probing):
    async def main(decoder):
        await decoder.ask(probe(decoder))
        await decoder.settle()
        plan = decoder.plan(sampling={"max_tokens": 99})
        answer = (await decoder.ask(plan)).answer
        assert answer[2] == ("stop",) and answer[3] == 3 and decoder.stack.runs == 2
        assert ends(decoder) == (1, 0, 0)

    probing(main, ends_after=9)


# -- when there is none ----------------------------------------------------------------------


def test_whoever_asks_for_more_is_no_probe(probing):
    async def main(decoder):
        await decoder.ask(decoder.plan(sampling={"max_tokens": 2}))
        await decoder.settle()
        assert decoder.stack.runs == 1

    probing(main)


def test_where_the_cache_is_off(probing):
    async def main(decoder):
        decoder.stack.on = False
        await decoder.ask(probe(decoder))
        await decoder.settle()
        assert decoder.stack.runs == 1 and not decoder.feedback.told

    probing(main)


@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": ()}, {**SEEDED, "n": 2}], ids=str)
def test_an_answer_that_ended_by_itself(probing, sampling):
    async def main(decoder):
        for runs in (1, 1):
            client = await decoder.ask(probe(decoder, sampling=sampling))
            assert set(client.answer[2]) == {"stop"}
            await decoder.settle()
            assert decoder.stack.runs == runs

    probing(main, ends_after=0)


def test_an_answer_that_ended_at_a_stop_string(probing):
    async def main(decoder):
        text = (await alone(plan_for(sampling={"max_tokens": 1}))).texts[0]
        for _ in range(2):  # made, and replayed
            client = await decoder.ask(probe(decoder, sampling={"stop": (text,)}))
            assert client.answer[2] == ("stop",)
            await decoder.settle()
        assert decoder.stack.runs == 1

    probing(main)


@pytest.mark.parametrize(
    ("tokens", "sampling", "more"),
    [
        (MORE, {}, 0), (MORE + 1, {}, 0), (MORE - 1, {}, 1), (1, {}, 1), (MORE, SEEDED, 0),
        (MORE - 1, SEEDED, 1), (MORE, {**SEEDED, "n": 2}, 0), (9, {**SEEDED, "n": 2}, 1),
    ],
)  # fmt: skip
def test_what_is_known_is_not_made_again(probing, tokens, sampling, more):
    async def main(decoder):
        await decoder.ask(decoder.plan(sampling={**sampling, "max_tokens": tokens}))
        for _ in range(2):
            await decoder.ask(probe(decoder, sampling=sampling))
            await decoder.settle()
        assert decoder.stack.runs == 1 + more and ends(decoder) == (more, 0, 0)
        if more and not sampling:  # greedy: from the last known token
            assert len(decoder.scripted.plans[1].prompt_token_ids) == 3 + tokens
        # With log-probabilities the engine runs each time; there is no more to know all the same.
        await decoder.ask(probe(decoder, sampling={**sampling, "logprobs": 1}))
        await decoder.settle()
        assert decoder.stack.runs == 2 + more and ends(decoder) == (more, 0, 0)

    probing(main)


def test_small_blocks_are_all_seen(tmp_path, monkeypatch):
    """A lookup ends where the budget does; a probe's is what it may grow to."""

    async def main():
        decoder = Decoder(tmp_path, monkeypatch, Stack(FakeEngine(LONG), block=4))
        await decoder.ask(decoder.plan(sampling={"max_tokens": MORE}))
        client = await decoder.ask(probe(decoder))
        await decoder.settle()
        assert len(client.answer[1][0]) == 1 and decoder.stack.runs == 1

    asyncio.run(main())


def test_an_engine_that_is_busy_with_others(probing):
    async def main(decoder):
        decoder.scripted.hang_after = 5
        other = decoder.submit(decoder.plan((7, 8, 9), {"max_tokens": 50}))
        await decoder.settle()
        await decoder.ask(probe(decoder))
        await decoder.settle()
        assert decoder.stack.runs == 2 and known(decoder) == [1] and not other.ended.is_set()
        await decoder.service._abort_all("by the operator")
        await decoder.settle()
        assert decoder.stack.runs == 2, "it is not made up for"

    probing(main)


@pytest.mark.parametrize("busy", ["load", "waiting", "on its way", "draining"])
def test_an_engine_that_is_not_idle(probing, busy):
    async def main(decoder):
        asked = probe(decoder)
        if busy == "draining":
            decoder.board.drain()
        elif busy == "on its way":  # admitted, and not here yet
            decoder.plan((4, 4, 4))
        else:
            decoder.engine.load = (1, 0) if busy == "load" else (0, 1)
        await decoder.ask(asked)
        await decoder.settle()
        assert decoder.stack.runs == 1 and ends(decoder) == (0, 0, 0)

    probing(main)


def test_of_twins_the_last_is_followed(probing):
    async def main(decoder):
        clients = [decoder.submit(probe(decoder)) for _ in range(3)]
        await decoder.settle()
        assert len({client.answer[:3] for client in clients}) == 1
        assert decoder.stack.runs == 2 and ends(decoder) == (1, 0, 0)
        assert decoder.counted(metrics.COALESCED) == 2

    probing(main)


# -- whoever comes goes first ----------------------------------------------------------------


async def extending(decoder, after=5, **changes):
    """A probe was answered; its extension hangs in the engine after so many tokens."""
    client = decoder.submit(probe(decoder, **changes))
    await client.ended.wait()
    decoder.scripted.hang_after = after
    await decoder.settle()
    assert decoder.stack.runs == 2 and decoder.scripted.running == 1
    decoder.scripted.hang_after = None
    return client


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"use_dflash": False}, {"sampling": {"max_tokens": 1}}, {"prompt": (1, 2, 3)},
        {"prompt": (1, 2, 3), "sampling": {"max_tokens": MORE, "detokenize": False}},
        {"prompt": (1, 2, 3), "sampling": {"max_tokens": 1}, "extend_to": MORE},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_aborts_it(probing, changes):
    async def main(decoder):
        await extending(decoder)
        plan = decoder.plan(**{"prompt": (9, 9, 9), **changes})
        client = await decoder.ask(plan)
        assert client.answer[:3] == as_answer(await alone(plan))[:3]
        assert ends(decoder) == (0, 1, 0)
        told = [len(it.continuations[0].token_ids) for it in decoder.feedback.told]
        assert set(told) <= {1, len(client.answer[1][0])}, "half of it is nowhere"

    probing(main)


def test_one_that_has_hardly_begun(probing):
    """Cancelled before it took its first step."""

    async def main(decoder):
        decoder.submit(probe(decoder))
        while not decoder.service._extension.running:
            await asyncio.sleep(0)
        assert decoder.stack.runs == 1
        decoder.submit(decoder.plan((9, 9, 9)))
        await decoder.settle()
        assert ends(decoder) == (0, 1, 0) and not decoder.service._extension.running
        assert decoder.stack.runs == 2

    probing(main)


def test_a_newer_probe_is_followed_instead(probing):
    async def main(decoder):
        await extending(decoder)
        await decoder.ask(probe(decoder, (9, 9, 9)))
        await decoder.settle()
        assert ends(decoder) == (1, 1, 0)
        assert known(decoder) == [1] and known(decoder, prompt=(9, 9, 9)) == [MORE]

    probing(main)


def test_at_most_one_runs():
    """Where the engine takes its time to abort one, a probe may be answered meanwhile."""

    async def main():
        begun, leave = [], asyncio.Event()

        async def extend(plan, lookup):
            begun.append(plan.plan_id)
            try:
                await asyncio.Event().wait()
            finally:
                await leave.wait()

        extension = Extension(extend, lambda: True, metrics.Recorder())
        probes = [await answered(plan_for(sampling={"max_tokens": 1}, extend_to=MORE))] * 2
        for probe in probes:
            extension.follow(probe)
            await asyncio.sleep(0)
            extension.abort()
            await asyncio.sleep(0)
        assert len(begun) == 1 and extension.running
        leave.set()
        await asyncio.sleep(0.01)
        assert not extension.running
        extension.follow(probes[0])
        await asyncio.sleep(0)
        assert len(begun) == 2
        extension.abort()
        await asyncio.sleep(0)

    asyncio.run(main())


async def answered(plan):
    """A Probe whose answer has been given."""
    probe = Probe(plan, Lookup(plan.plan_id, plan.namespace, LookupResult.MISS))
    async for _ in probe.watch(FakeEngine(LONG).generate(plan)):
        pass
    return probe


def test_a_request_that_is_refused_does_not(probing):
    async def main(decoder):
        await extending(decoder)
        client = await decoder.ask(plan_for(slot=4000, generation=7))
        assert client.error is not None and ends(decoder) == (0, 0, 0)
        assert decoder.service._extension.running

    probing(main)


@pytest.mark.parametrize("after", [0, 5])
def test_the_operator_aborts_it(probing, after):
    async def main(decoder):
        await extending(decoder, after)
        order = await decoder.ask(Control("abort_all"))
        assert order.deltas[0].finish_reasons == ("not_found",), "it is no request"
        await decoder.settle()
        assert ends(decoder) == (0, 1, 0) and decoder.scripted.running == 0
        assert known(decoder) == [1] and len(decoder.feedback.told) == 1

    probing(main)


@pytest.mark.parametrize("fault", ["fail_after", "abort_after"])
def test_a_failure_reaches_nobody(probing, fault, caplog):
    async def main(decoder):
        client = decoder.submit(probe(decoder))
        await client.ended.wait()
        setattr(decoder.scripted, fault, 5)
        await decoder.settle()
        assert ends(decoder) == (0, 0, 1) and "was not extended" in caplog.text
        assert client.answer[2] == ("length",)
        assert known(decoder) == [1] and len(decoder.feedback.told) == 1
        assert not decoder.counted(metrics.ERRORS, reason="internal", stage="decoder")
        setattr(decoder.scripted, fault, None)
        await decoder.ask(probe(decoder))
        await decoder.settle()
        assert known(decoder) == [MORE], "the next probe tries again"

    probing(main)


# -- books -----------------------------------------------------------------------------------


def test_it_is_no_request(probing):
    async def main(decoder):
        client = await extending(decoder)
        assert decoder.board.in_flight == 0
        decoder.engine.load = (1, 0)
        decoder.service.set_gauges()
        assert decoder.counted(metrics.RUNNING) == decoder.counted(metrics.WAITING) == 0
        assert decoder.counted(metrics.ENGINE_RUNS) == 1
        assert decoder.counted(metrics.GENERATION_TOKENS) == 1
        assert decoder.counted(metrics.PROMPT_TOKENS) == 3
        assert decoder.counted(metrics.SUCCESSES, finished_reason="length") == 1
        assert decoder.counted(metrics.REPLAYS, use="beginning") == 0
        assert len(client.deltas) == 1

    probing(main)


def test_it_cannot_be_cancelled_by_the_probes_token(probing):
    async def main(decoder):
        await extending(decoder, cancel_key="key")
        order = await decoder.ask(CancelPlan("other", "key"))
        assert order.deltas[0].finish_reasons == ("not_found",)
        assert decoder.service._extension.running

    probing(main)


def test_a_deadline_is_the_probes_own(probing):
    async def main(decoder):
        asked = probe(decoder, deadline=asyncio.get_running_loop().time() + 1000)
        await decoder.ask(asked)
        await decoder.settle()
        assert decoder.scripted.plans[1].deadline is None and ends(decoder) == (1, 0, 0)

    probing(main)


def test_a_probe_that_was_cancelled_is_not_followed(probing):
    async def main(decoder):
        decoder.scripted.hang_after = 0
        client = decoder.submit(probe(decoder, cancel_key="key"))
        await decoder.settle()
        await decoder.ask(CancelPlan("other", "key"))
        await decoder.settle()
        assert client.cancelled and decoder.stack.runs == 1

    probing(main)


def test_a_turn_is_told_once(probing):
    async def main(decoder):
        asked = probe(decoder, (1, 2, 3), session_id="s", turn_starts=(1,))
        await decoder.ask(asked)
        await decoder.settle()
        first, more = (outcome.plan for outcome in decoder.feedback.told)
        assert (first.session_id, more.session_id) == ("s", "")
        assert more.turn_starts == first.turn_starts and more.arrival == first.arrival
        found = decoder.stack.lookup(plan_for((9, 2, 3), turn_starts=(1,)))
        assert found.result is LookupResult.WINDOW, "drafts for the same turn after another history"

    probing(main)


def test_a_flush_in_between_is_a_flush(probing):
    async def main(decoder):
        decoder.feedback.held = []
        await decoder.ask(probe(decoder, arrival=0.0))
        await decoder.settle()
        decoder.stack.cache.flush()
        decoder.feedback.release()
        assert known(decoder) == []

    probing(main)


def test_dspark_is_asked_about_each_by_its_own_name(probing):
    async def main(decoder):
        asked = probe(decoder)
        await decoder.ask(asked)
        await decoder.settle()
        assert decoder.engine.ended == [asked.plan_id, f"{asked.plan_id}-more"]
        assert [outcome.plan.plan_id for outcome in decoder.feedback.told] == decoder.engine.ended
        assert {plan.plan_id for plan in decoder.scripted.plans} == set(decoder.engine.ended)

    probing(main)


def test_the_tenants_are_apart(probing):
    async def main(decoder):
        await decoder.ask(probe(decoder, cache_salt="a"))
        await decoder.settle()
        assert decoder.scripted.plans[1].cache_salt == "a"
        assert known(decoder, cache_salt="a") == [MORE] and known(decoder, cache_salt="b") == []

    probing(main)


def test_all_ends_are_among_the_known_series(probing):
    async def main(decoder):
        await extending(decoder)
        await decoder.ask(replace(probe(decoder), prompt_token_ids=(9, 9)))
        await decoder.settle()
        made = {series for series in decoder.recorder.take() if "extensions" in series.name}
        assert len(made) == 2 and made <= set(known_series(metrics.PROBE_EXTENSIONS))

    probing(main)

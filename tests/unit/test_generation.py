"""Replay, continuation and shared runs against the same engine without a cache (casebook CB-..)."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from deepseek_flash import metrics
from deepseek_flash.contract import LookupResult
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.stack import EOS, FakeEngine, Stack, plan_for, without_cache

LENGTH = 20  # tokens of the engine's answer, the EOS apart
SEEDED = {"temperature": 0.9, "seed": 1}


def pair(sampling, **changes):
    return plan_for(sampling=sampling, **changes), plan_for(sampling=sampling, **changes)


# -- budgets (CB-14, CB-22, CB-40) -----------------------------------------------------------


@pytest.mark.parametrize("first", [1, 5, 20, 21, 50])
@pytest.mark.parametrize("sampling", [{}, SEEDED, {"frequency_penalty": 0.5}], ids=str)
def test_every_budget_after_another(first, sampling):
    for budget in range(1, LENGTH + 3):
        stack = Stack()
        stack.answer(sampling={**sampling, "max_tokens": first})
        plan = plan_for(sampling={**sampling, "max_tokens": budget})
        (reply,) = stack.run(plan)
        assert reply.same == without_cache(plan).same
        assert reply.reasons == (("stop",) if budget > LENGTH else ("length",))
        assert len(reply.ids[0]) == min(budget, LENGTH + 1)
        known = budget <= first or first > LENGTH
        assert stack.runs == (1 if known else 2)
        # And it is known from now on.
        assert stack.run(plan_for(sampling=plan.sampling))[0].same == reply.same
        assert stack.runs == (1 if known else 2)


def test_a_greedy_beginning_is_not_computed_twice():
    stack = Stack()
    stack.answer(sampling={"max_tokens": 5})
    reply = stack.answer(sampling={"max_tokens": 50})
    first, second = stack.engine.plans
    assert second.prompt_token_ids[:3] == first.prompt_token_ids
    assert len(second.prompt_token_ids) == 8 and second.sampling.max_tokens == 45
    assert reply.paths == {"fast", "slow"}


@pytest.mark.parametrize(
    "sampling",
    [
        SEEDED, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1},
        {"min_tokens": 1}, {"bad_words": ("x",)}, {"structured_outputs": {"json": "{}"}},
        {"thinking_token_budget": 9},
    ],
    ids=str,
)  # fmt: skip
def test_what_counts_from_the_prompts_end_is_never_continued(sampling):
    stack = Stack()
    stack.answer(sampling={**sampling, "max_tokens": 5})
    plan = plan_for(sampling={**sampling, "max_tokens": 9})
    assert stack.run(plan)[0].same == without_cache(plan).same
    assert stack.engine.plans[1].prompt_token_ids == plan.prompt_token_ids


# -- stop strings ----------------------------------------------------------------------------


@given(
    data=st.data(), include=st.booleans(), first=st.integers(1, 25), budget=st.integers(1, 25),
    seeded=st.booleans(), min_tokens=st.sampled_from([0, 0, 3]),
)  # fmt: skip
@settings(max_examples=80)
def test_stop_strings_over_replayed_tokens(data, include, first, budget, seeded, min_tokens):
    base = {**(SEEDED if seeded else {}), "min_tokens": min_tokens}
    text = without_cache(plan_for(sampling={**base, "max_tokens": 50})).texts[0]
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + data.draw(st.integers(1, 4))]
    extra = {"stop": (stop,), "include_stop_str_in_output": include}
    stack = Stack()
    stack.engine.cached = data.draw(st.integers(0, 40))
    stack.answer(sampling={**base, "max_tokens": first, **data.draw(st.sampled_from([{}, extra]))})
    plan = plan_for(sampling={**base, "max_tokens": budget, **extra})
    runs = stack.runs
    reply = stack.run(plan)[0]
    assert reply.same == without_cache(plan).same
    assert reply.cached == (3 if stack.runs == runs else min(stack.engine.cached, 2))
    runs = stack.runs
    again = stack.run(plan_for(sampling=plan.sampling))[0]
    assert again.same == reply.same and stack.runs == runs, "a repeat always hits"
    assert again.cached == 3
    # What a stop string cut off is the beginning of an answer, not one.
    whole = plan_for(sampling={**base, "max_tokens": 50})
    assert stack.run(whole)[0].same == without_cache(whole).same


# -- the identity of a request (CB-19, CB-20, CB-21, CB-36) ----------------------------------

VARIANTS = [
    {}, {"max_tokens": 3}, {"max_tokens": 40}, {"stop": ("e",)}, {"logit_bias": {5: -100.0}},
    {"bad_words": ("five",)}, {"min_tokens": 4}, {"ignore_eos": True}, {"stop_token_ids": (7,)},
    {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2},
    {"allowed_token_ids": (1, 2, 3)}, {"structured_outputs": {"regex": "[0-9]+"}},
    {"thinking_token_budget": 5}, {"skip_special_tokens": False},
    {"include_stop_str_in_output": True, "stop": ("e",)}, {"detokenize": False},
    {"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "seed": 2},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.7, "seed": 0}, {"temperature": 0.7, "seed": 1, "top_k": 5},
    {"temperature": 0.7, "seed": 1, "top_p": 0.5}, {"temperature": 0.7, "seed": 1, "min_p": 0.1},
    {"temperature": 0.7, "seed": 1, "n": 2}, {"n": 3},
]  # fmt: skip


def test_every_variant_after_every_other_is_as_without_a_cache():
    alone = [without_cache(plan_for(sampling=variant)).same for variant in VARIANTS]
    stack = Stack(capacity=512)
    for _ in range(2):
        for variant, expected in zip(VARIANTS, alone, strict=True):
            assert stack.answer(sampling=variant).same == expected, variant
    runs = stack.runs
    for variant, expected in zip(VARIANTS, alone, strict=True):
        assert stack.answer(sampling=variant).same == expected, variant
    assert stack.runs == runs, "the third time nothing runs"


def test_seeds():
    stack = Stack()
    one, two, again = (stack.answer(sampling={**SEEDED, "seed": seed}) for seed in (1, 2, 1))
    assert one.same == again.same != two.same and stack.runs == 2
    for _ in range(2):
        stack.answer(sampling={"temperature": 0.9, "seed": None})
    assert stack.runs == 4, "unseeded requests always run"
    assert len(stack.feedback.told) == 2, "and are never stored"


def test_choices_are_replayed_together():
    stack = Stack()
    first, again = pair({**SEEDED, "n": 2})
    (a,), (b,) = stack.run(first), stack.run(again)
    assert a.same == b.same == without_cache(first).same and stack.runs == 1
    assert a.ids[0] != a.ids[1] and b.reasons == a.reasons
    assert stack.answer(sampling={**SEEDED, "n": 3}).ids[:2] == a.ids and stack.runs == 2
    # Choice 1 of seed 1 is choice 0 of seed 2, as vLLM derives them.
    assert stack.answer(sampling={**SEEDED, "seed": 2}).ids[0] == a.ids[1] and stack.runs == 2


def test_greedy_choices_are_one():
    stack = Stack()
    assert stack.answer(sampling={"n": 3}).ids == (stack.answer().ids[0],) * 3
    assert stack.runs == 1


def test_logprobs_are_never_made_up():
    stack = Stack()
    stack.answer()
    reply = stack.answer(sampling={"logprobs": 2})
    assert stack.runs == 2 and len(reply.logprobs[0]) == len(reply.ids[0])
    assert stack.answer(sampling={"logprobs": 0}).logprobs[0] and stack.runs == 3
    assert stack.answer().logprobs == (None,) and stack.runs == 3


def test_another_model_shares_nothing():
    stack = Stack()
    stack.answer()
    stack.answer(namespace="other")
    assert stack.runs == 2 and len(stack.cache.table) == 2, "the old engine's entries went"


def test_opting_out_neither_reads_nor_feeds():
    stack = Stack()
    stack.answer(use_dflash=False)
    assert not stack.feedback.told and not len(stack.cache.table)
    stack.answer()
    stack.answer(use_dflash=False)
    assert stack.runs == 3


# -- what must not become an answer (CB-07, CB-32, CB-33) ------------------------------------


def test_an_abandoned_stream_is_no_answer():
    stack = Stack()
    plan, again = pair({"max_tokens": 50})
    stack.run(plan, take=5)
    assert stack.engine.running == 0, "nobody was left to read it"
    assert not stack.feedback.told
    assert stack.run(again)[0].same == without_cache(plan).same


@pytest.mark.parametrize("fault", ["fail_after", "abort_after"])
def test_a_failed_run_is_no_answer(fault):
    stack = Stack()
    setattr(stack.engine, fault, 5)
    plan, again = pair({"max_tokens": 50})
    if fault == "fail_after":
        with pytest.raises(RuntimeError):
            stack.run(plan)
    else:
        stack.run(plan)
    assert not stack.feedback.told and not stack.generations.shared_runs
    setattr(stack.engine, fault, None)
    assert stack.run(again)[0].same == without_cache(plan).same and stack.runs == 2


def test_a_failed_continuation_leaves_the_beginning():
    stack = Stack()
    stack.answer(sampling={"max_tokens": 5})
    stack.engine.fail_after = 2
    with pytest.raises(RuntimeError):
        stack.answer(sampling={"max_tokens": 50})
    stack.engine.fail_after = None
    plan = plan_for(sampling={"max_tokens": 50})
    assert stack.run(plan)[0].same == without_cache(plan).same


def test_a_later_answer_never_overwrites_the_first():
    """CB-18: numerics may vary with the batch; what was told once stays."""
    stack = Stack()
    first = stack.answer(sampling={"max_tokens": 50})
    stack.engine.salt = 1
    stack.cache.record(replace_tokens(stack.feedback.told[0]))
    assert stack.answer(sampling={"max_tokens": 50}).same == first.same
    assert stack.cache.table.offers["diverged"] == 1


def replace_tokens(outcome):
    made = outcome.continuations[0]
    other = replace(made, token_ids=(made.token_ids[0] + 1, *made.token_ids[1:]))
    return replace(outcome, continuations=(other,))


# -- requests in flight (CB-35) --------------------------------------------------------------


async def gather(stack, plans):
    return await asyncio.gather(*(stack.ask(plan) for plan in plans))


def test_a_stampede_is_one_run():
    stack = Stack()
    plans = [plan_for(sampling={"max_tokens": 50}, stream=bool(i % 2)) for i in range(32)]
    replies = asyncio.run(gather(stack, plans))
    assert {r.same for r in map(hashable, replies)} == {hashable(without_cache(plans[0])).same}
    assert stack.runs == 1 and not stack.generations.shared_runs and len(stack.feedback.told) == 1


def hashable(reply):
    reply.logprobs = ()
    return reply


def test_each_made_token_counts_as_slow_once():
    stack = Stack()
    plans = [plan_for(sampling={"max_tokens": 50}) for _ in range(4)]
    counted = []

    async def one(plan):
        async with aclosing(stack.outputs(plan)) as outputs:
            async for output in outputs:
                counted.append((output.path.value, sum(len(p.token_ids) for p in output.pieces)))

    async def main():
        await asyncio.gather(*map(one, plans))

    asyncio.run(main())
    assert sum(n for path, n in counted if path == "slow") == LENGTH + 1
    assert sum(n for path, n in counted if path == "fast") == 3 * (LENGTH + 1)


def test_two_tenants_run_twice():
    stack = Stack()
    plans = [plan_for(cache_salt=salt) for salt in ("a", "b") for _ in range(16)]
    asyncio.run(gather(stack, plans))
    assert stack.runs == 2


@pytest.mark.parametrize(
    "other", [{"sampling": {"max_tokens": 9}}, {"prompt": (9,)}, {"use_dspark": False}], ids=str
)
def test_only_twins_share(other):
    stack = Stack()
    asyncio.run(gather(stack, [plan_for(), plan_for(**other)]))
    assert stack.runs == 2


def test_unseeded_requests_do_not_share():
    stack = Stack()
    sampling = {"temperature": 0.5, "seed": None}
    asyncio.run(gather(stack, [plan_for(sampling=sampling) for _ in range(3)]))
    assert stack.runs == 3


@pytest.mark.parametrize("leaves_after", [0, 1, 7])
def test_the_leader_may_leave(leaves_after):
    stack = Stack()
    leader, follower = pair({"max_tokens": 50})

    async def main():
        first = asyncio.create_task(stack.ask(leader, take=leaves_after or None))
        await asyncio.sleep(0)
        second = asyncio.create_task(stack.ask(follower))
        await asyncio.sleep(0)
        if not leaves_after:
            first.cancel()
        return await second

    assert asyncio.run(main()).same == without_cache(follower).same
    assert stack.runs == 1 and stack.engine.running == 0


def test_a_failure_reaches_all():
    stack = Stack()
    stack.engine.fail_after = 3

    async def main():
        asks = (stack.ask(plan_for()) for _ in range(4))
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["the engine failed"] * 4
    assert stack.runs == 1 and not stack.generations.shared_runs


def test_when_all_leave_the_engine_stops():
    stack = Stack()
    stack.engine.hang_after = 3

    async def main():
        tasks = [asyncio.create_task(stack.ask(plan_for())) for _ in range(3)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert stack.engine.running == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert stack.engine.running == 0 and not stack.generations.shared_runs


def test_a_slow_reader_holds_up_nobody():
    stack = Stack()

    async def main():
        slow = stack.outputs(plan_for())
        await anext(slow)  # and then reads no more for now
        quick = await stack.ask(plan_for())
        rest = [output async for output in slow]
        return quick, rest

    quick, rest = asyncio.run(main())
    assert quick.same == without_cache(plan_for()).same
    assert sum(len(p.token_ids) for o in rest for p in o.pieces) == len(quick.ids[0]) - 1


def test_a_twin_that_comes_before_the_cache_knows_finds_the_run():
    stack = Stack()
    stack.feedback.held = []
    first, second = pair({})
    (a,), (b,) = stack.run(first), stack.run(second)
    assert a.same == b.same and stack.runs == 1 and stack.generations.shared_runs == 1
    stack.feedback.release()
    assert stack.generations.shared_runs == 0
    assert stack.answer().same == a.same and stack.runs == 1


# -- what was not computed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ({"max_tokens": 5}, 3), ({"max_tokens": 4}, 3), ({"max_tokens": 5, "n": 2}, 3),
        ({"max_tokens": 9}, 1),
        ({"max_tokens": 5, "logprobs": 1}, 1), ({"max_tokens": 5, "bad_words": ("x",)}, 1),
        ({"max_tokens": 5, **SEEDED}, 1), ({"max_tokens": 5, **SEEDED, "n": 2}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_cached_tokens_are_all_if_and_only_if_the_engine_did_not_run(asked, cached):
    stack = Stack()
    stack.engine.cached = 1
    assert stack.answer(sampling={"max_tokens": 5}).cached == 1
    reply = stack.answer(sampling=asked)
    assert reply.cached == cached and stack.runs == (1 if cached == 3 else 2)


@pytest.mark.parametrize("in_the_prefix_cache", [0, 2, 3, 7])
def test_a_beginning_that_is_gone_on_with_is_not_all_cached(in_the_prefix_cache):
    stack = Stack()
    stack.answer(sampling={"max_tokens": 5})
    stack.engine.cached = in_the_prefix_cache  # of a prompt of 8: ours, and the tokens known
    assert stack.answer(sampling={"max_tokens": 9}).cached == min(in_the_prefix_cache, 2)


def test_a_beginning_that_ends_at_a_stop_string_is_all_cached():
    stack = Stack()
    text = stack.answer(sampling={"max_tokens": 5}).texts[0]
    reply = stack.answer(sampling={"max_tokens": 9, "stop": (text[2],)})
    assert reply.reasons == ("stop",) and reply.cached == 3 and stack.runs == 1


def test_twins_say_what_their_run_found():
    stack = Stack()
    stack.engine.cached = 2
    replies = asyncio.run(gather(stack, [plan_for() for _ in range(3)]))
    assert [reply.cached for reply in replies] == [2, 2, 2] and stack.runs == 1


# -- streams ---------------------------------------------------------------------------------


@given(first=st.integers(1, 25), budget=st.integers(1, 25), block=st.sampled_from([2, 4, 256]))
def test_a_replayed_stream_has_one_end_and_small_pieces(first, budget, block):
    stack = Stack(block=block)
    stack.answer(sampling={"max_tokens": first})
    reply = stack.answer(sampling={"max_tokens": budget})
    assert reply.finished == [False] * (len(reply.finished) - 1) + [True]
    assert sum(p.finish_reason is not None for p in reply.pieces) == 1
    assert all(0 < len(p.token_ids) <= 16 for p in reply.pieces)


def test_an_answer_of_only_an_eos():
    stack = Stack(FakeEngine(ends_after=0))
    (a,), (b,) = stack.run(plan_for()), stack.run(plan_for())
    assert a.same == b.same and a.ids == ((EOS,),) and a.reasons == ("stop",) and stack.runs == 1


def test_books():
    stack = Stack()
    stack.answer(sampling={"max_tokens": 5})
    stack.answer(sampling={"max_tokens": 5})
    stack.answer(sampling={"max_tokens": 9})
    counts = {
        (series.name, *(v for _, v in series.labels)): n
        for series, n in stack.recorder.take().items()
    }
    assert counts[metrics.ENGINE_RUNS.name,] == 2
    assert counts[metrics.REPLAYS.name, "whole"] == 1
    assert counts[metrics.REPLAYS.name, "beginning"] == 1
    assert stack.result(plan_for(sampling={"max_tokens": 5})) is LookupResult.EXACT


def test_neighbours_are_asked_for_after_the_first_token_only():
    stack = Stack()
    plan = plan_for()
    lookup = replace(stack.lookup(plan), ask_neighbours=True)

    async def main(outputs):
        async for _ in outputs:
            pass

    stack.engine.hang_after = 0  # no first token
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(main(stack.outputs(plan, lookup)), 0.05))
    assert stack.runs == 1 and not stack.feedback.asked
    stack.engine.hang_after = None
    asyncio.run(main(stack.outputs(plan, lookup)))
    assert [query.plan for query in stack.feedback.asked] == [plan]
    assert stack.feedback.told[0].seconds_saved == 0.0
    assert not stack.feedback.wanted(), "nobody needs an answer any more"

"""What of the cache becomes a guess, and what of the guesses the cache learns."""

import asyncio

from deepseek_flash.contract import Lookup, LookupResult, Neighbours, Reference
from deepseek_flash.decoder.reports import Learned

from tests.unit.stack import Stack, plan_for

REFERENCES = (Reference((1, 2, 3), 0.9),)


def answering(stack):
    """Neighbours for whoever asks."""

    def ask(query, then, wanted):
        stack.feedback.asked.append(query)
        then(Neighbours(query.plan.plan_id, REFERENCES))

    stack.feedback.ask = ask
    return stack


def test_an_answer_that_cannot_be_replayed_is_the_chain():
    stack = Stack()
    known = stack.answer()
    again = stack.answer(sampling={"logprobs": 1})
    assert again.ids == known.ids and stack.engine.chains == [(), known.ids[0]]


def test_what_the_last_turn_led_to_is_the_chain():
    stack = Stack()
    known = stack.answer((7, 1, 2, 3), turn_starts=(1,))
    stack.answer((8, 1, 2, 3), turn_starts=(1,))
    assert stack.engine.chains[1] == known.ids[0]


def test_a_replayed_beginning_is_no_chain_for_the_rest():
    stack = Stack()
    stack.answer(sampling={"max_tokens": 4})
    stack.answer(sampling={"max_tokens": 12})
    assert stack.runs == 2 and stack.engine.chains == [(), ()]


def test_references_reach_the_running_plan_and_no_other():
    stack = answering(Stack())
    plan = plan_for()
    asking = Lookup(plan.plan_id, plan.namespace, LookupResult.MISS, ask_neighbours=True)

    async def main():
        return [output async for output in stack.outputs(plan, asking)]

    assert asyncio.run(main())
    assert stack.dspark.references == {plan.plan_id: REFERENCES}


def test_who_gets_no_drafts_asks_for_no_references():
    for changes in ({"use_dspark": False}, {"sampling": {"temperature": 0.7, "seed": 1}}):
        stack = answering(Stack())
        plan = plan_for(**changes)
        asking = Lookup(plan.plan_id, plan.namespace, LookupResult.MISS, ask_neighbours=True)

        async def main(stack=stack, plan=plan, asking=asking):
            return [output async for output in stack.outputs(plan, asking)]

        assert asyncio.run(main())
        assert not stack.feedback.asked


def test_the_cache_learns_what_the_worker_learned():
    stack = Stack(block=4)
    told = []
    tell = stack.feedback.tell
    stack.feedback.tell = lambda outcome, then: (told.append(outcome), tell(outcome, then))
    sure = tuple(0.5 + place / 100 for place in range(8))
    stack.dspark.says = Learned(
        {0: sure}, drafts_accepted=True, seconds_saved=0.25, signature=b"abcd"
    )
    reply = stack.answer()
    (outcome,) = told
    assert outcome.drafts_accepted and outcome.continuations[0].confidence == sure
    assert outcome.seconds_saved is None, "it had no references"
    assert outcome.signature == b"abcd"
    table = stack.cache.table
    rows = [row for row in range(table.capacity) if table.read(row)]
    found = sorted(table.read(row).confidence for row in rows)
    assert len(reply.ids[0]) == 8 and len(found) == 2
    assert [round(low, 4) for low, _ in found] == [0.5, 0.54]
    assert [round(mean, 4) for _, mean in found] == [0.515, 0.555]


def test_a_worker_that_knows_less_than_the_answer_tells_no_confidence():
    stack = Stack()
    stack.dspark.says = Learned({0: (0.5,)}, drafts_accepted=False, seconds_saved=0.0)
    stack.answer()
    table = stack.cache.table
    assert {table.read(row).confidence for row in range(64) if table.read(row)} == {(0.0, 0.0)}


def test_an_unasked_engine_still_replays():
    """DSpark off: the same answers, no guesses."""
    stack = Stack()
    plain = stack.answer()
    assert stack.answer().ids == plain.ids and stack.runs == 1

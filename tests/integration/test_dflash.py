"""What DFlash replays is what the engine answers, on the real stack (casebook CB-..).

"Alone" is the same request with ``use_dflash`` false: the engine's own answer.
"""

from dataclasses import replace

import pytest
from deepseek_flash.contract import LookupResult

from clients.grpc_client import GrpcClient
from clients.request import GenerationError, new_cancel_token
from loadtest.bench.prompts import PROMPTS
from scripts.models.tiny_tokenizer import SPECIAL
from tests.integration.raw import infer
from tests.integration.tenant import DOORS, in_company

ENDING = "Tell me number 55."  # its greedy answer ends by itself, with its 28th token
SEEDED = {"temperature": 0.7, "seed": 1}
GROUP = 16  # tokens in a response of a replay


# -- the same again (CB-16, CB-43) -----------------------------------------------------------


def test_every_door_replays_what_another_stored(tenant):
    asked = {door: tenant.request(f"asked first by {door}") for door in DOORS}
    alone = in_company(tenant.alone, asked.values())
    with tenant.engine_runs(len(DOORS)):
        for (first, request), answer in zip(asked.items(), alone):
            assert tenant.learn(request, first) == answer
            for door in DOORS:
                assert tenant.ask(request, door) == answer, f"{first}, then {door}"


def test_a_replayed_stream_keeps_its_shape_and_usage(tenant):
    request = tenant.request("keep the shape", max_tokens=40)
    with tenant.engine_runs(1):
        made, error = infer(tenant.served.grpc, request.fields())
        assert error is None
        tenant.wait_until_known(request, 40)
        replayed, error = infer(tenant.served.grpc, request.fields())
        assert error is None
    # What the engine makes while nobody takes it comes in one response: never count on its shape.
    assert sum(int(r["num_output_tokens"][0]) for r in made) == 40
    assert [int(r["num_output_tokens"][0]) for r in replayed] == [GROUP, GROUP, 40 - 2 * GROUP]
    assert [r["finish_reason"][0] for r in replayed] == [b"None", b"None", b"length"]
    for response in replayed:
        response["text_output"][0].decode()  # no response ends inside a character
    (prompt,) = {int(r["num_input_tokens"][0]) for r in (*made, *replayed)}
    (computed,) = {int(r["num_cached_tokens"][0]) for r in made}
    assert computed < prompt and {int(r["num_cached_tokens"][0]) for r in replayed} == {prompt}


def test_cached_tokens_are_all_where_the_engine_did_not_run(tenant):
    first, more = (
        tenant.request("what was computed?", max_tokens=n, ignore_eos=True) for n in (20, 40)
    )
    with tenant.engine_runs(2):
        made = tenant.learn(first)
        assert 0 <= made.num_cached_tokens < made.num_input_tokens
        for door in DOORS:
            again = tenant.ask(first, door)
            assert again.num_cached_tokens == again.num_input_tokens == made.num_input_tokens, door
        # A replayed beginning says all, until the engine goes on.
        chunks = list(GrpcClient(tenant.served.grpc).stream(more))
    cached = [chunk.num_cached_tokens for chunk in chunks]
    assert cached[0] == made.num_input_tokens > cached[-1]
    assert cached == sorted(cached, reverse=True)


# -- budgets (CB-14, CB-40) ------------------------------------------------------------------


def ending(tenant, prompt, sampling):
    """Sampling with a stop token that ends the answer between its 13th and 24th token."""
    ids = tenant.alone(tenant.request(prompt, **sampling)).token_ids
    stop = next(ids[place] for place in range(12, 24) if ids[place] not in ids[:place])
    return {**sampling, "stop_token_ids": [stop]}


@pytest.mark.parametrize(
    "sampling", [{}, SEEDED, {"frequency_penalty": 0.5}], ids=["greedy", "seeded", "penalty"]
)
def test_every_budget_after_five_and_fifty(tenant, sampling):
    sampling = ending(tenant, ENDING, sampling) if sampling else {}  # or by the EOS
    whole = tenant.alone(tenant.request(ENDING, max_tokens=50, **sampling))
    length = len(whole.token_ids)
    assert whole.finish_reason == "stop" and 12 < length < 30
    budgets = range(1, length + 2) if not sampling else [1, length - 1, length, length + 1]
    asked = {n: tenant.request(ENDING, max_tokens=n, **sampling) for n in (5, 50, *budgets)}
    alone = dict(zip(asked, in_company(tenant.alone, asked.values())))
    for budget, answer in alone.items():
        assert answer.token_ids == whole.token_ids[:budget]
        assert answer.finish_reason == ("stop" if budget >= length else "length")
    with tenant.engine_runs(2):
        for budget in (5, 50):
            assert tenant.learn(asked[budget]) == alone[budget]
        for budget in asked:
            assert tenant.ask(asked[budget]) == alone[budget], budget


def test_an_answer_grows_from_budget_to_budget(tenant):
    """Each step goes on from the last. One token first, as clients do (CB-22): test_probes.py."""
    asked = [tenant.request("grow", max_tokens=budget) for budget in (2, 3, 9, 17, 40)]
    alone = in_company(tenant.alone, asked)
    with tenant.engine_runs(len(asked)):
        assert [tenant.learn(request) for request in asked] == alone
        assert [tenant.ask(request) for request in reversed(asked)] == alone[::-1]


def half_a_character(reference):
    """A prompt and how many tokens of its answer end with the first of a character's two bytes."""
    lead, more = (
        range(len(SPECIAL) + a, len(SPECIAL) + b) for a, b in ((0xC2, 0xE0), (0x80, 0xC0))
    )
    for prompt, run in zip(PROMPTS, reference.runs[1]):
        for place, (one, two) in enumerate(zip(run.token_ids, run.token_ids[1:])):
            if one in lead and two in more and place > 4:
                return prompt, place + 1
    raise AssertionError("no answer has such a character")


def test_a_budget_that_ends_inside_a_character(tenant, reference):
    prompt, tokens = half_a_character(reference)
    asked = [tenant.request(prompt, max_tokens=tokens + more) for more in (0, 1, 6)]
    alone = in_company(tenant.alone, asked)
    half, whole = (answer.text.replace("\ufffd", "").encode() for answer in alone[:2])
    assert len(whole) == len(half) + 2  # the character's bytes, all at once
    other = tenant.neighbour("backwards")
    with tenant.engine_runs(4):
        assert [tenant.learn(request) for request in asked] == alone
        backwards = [replace(request, cache_salt=other.salt) for request in reversed(asked)]
        assert [other.learn(request) for request in backwards] == alone[::-1]
        for door in DOORS:
            assert [tenant.ask(request, door) for request in asked] == alone


# -- stop strings ----------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
def test_stop_strings_over_replayed_tokens(tenant, include):
    prompt, five = "where to stop", {"max_tokens": 5}
    text = tenant.alone(tenant.request(prompt)).text
    late, early = (
        {"stop": [text[begin : begin + 3]], "include_stop_str_in_output": include}
        for begin in (14, 3)
    )
    variants = [tenant.request(prompt, **changes) for changes in ({}, late, early, five)]
    whole, stopped, border, beginning = in_company(tenant.alone, variants)
    assert stopped.finish_reason == border.finish_reason == "stop"
    assert text.startswith(stopped.text) and stopped.text.endswith(*late["stop"]) == include
    sampled = tenant.request(prompt, **SEEDED)
    cut = tenant.request(prompt, **SEEDED, stop=[tenant.alone(sampled).text[10:13]])
    sampled_whole, sampled_cut = tenant.alone(sampled), tenant.alone(cut)
    assert sampled_cut.finish_reason == "stop"
    with tenant.engine_runs(7):
        one = tenant.neighbour("the whole first")
        assert one.learn(one.request(prompt)) == whole
        assert one.ask(one.request(prompt, **late)) == stopped
        # What a stop string cut off is the beginning of an answer, not one.
        two = tenant.neighbour("the stop first")
        assert two.learn(two.request(prompt, **late)) == stopped
        assert two.ask(two.request(prompt, **late)) == stopped
        assert two.learn(two.request(prompt)) == whole
        assert two.ask(two.request(prompt, **late)) == stopped
        # The string begins in what is replayed and ends in what the engine goes on with.
        three = tenant.neighbour("five tokens first")
        assert three.learn(three.request(prompt, **five)) == beginning
        assert three.learn(three.request(prompt, **early)) == border
        assert three.ask(three.request(prompt, **early)) == border
        # A sampled answer cannot be gone on with; asked again as it was, it is known to its end.
        assert tenant.learn(cut) == tenant.ask(cut) == sampled_cut
        assert tenant.learn(sampled) == sampled_whole
        assert tenant.ask(cut) == sampled_cut


# -- what must not become an answer (CB-32) --------------------------------------------------


def test_an_aborted_stream_is_no_answer(tenant):
    client, token = GrpcClient(tenant.served.grpc), new_cancel_token()
    # Long, and without drafts: it must not be over before the cancel has come.
    request = tenant.request("aborted", max_tokens=1000, ignore_eos=True, use_dspark=False)
    alone = tenant.alone(request)
    with tenant.engine_runs(2):
        stream = client.stream(replace(request, cancel_token=token))
        for _ in range(5):
            next(stream)
        assert client.cancel(token)
        with pytest.raises(GenerationError, match="cancelled"):
            list(stream)
        assert tenant.cache.lookup(request).result is LookupResult.MISS
        assert tenant.learn(request) == alone
        assert tenant.ask(request) == alone

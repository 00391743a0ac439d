"""Casebook: what may be answered from the cache, and to whom (CB-15, CB-18 to CB-20, CB-22, CB-25,
CB-34 to CB-47, CB-77). RUNS is ``door.ensemble.runs``.

The arithmetic of replays is pinned over all budgets and settings in test_generation.py; here it is
asked through the door.
"""

import asyncio
import base64
import threading
import time
from dataclasses import replace

import pytest

from tests.unit import gateway_model as model
from tests.unit.ensemble import HANG
from tests.unit.gateway import CHAT, KEY_A, KEY_B, MODEL, USAGE, chat_body
from tests.unit.streams import drive, wait_for

TWENTY = "abcdefghijklmnopqrst"


def runs(door, ask):
    """How many generations the engine started for it, and its answer."""
    before = door.ensemble.runs
    answer = ask()
    assert answer.status == 200, answer.raw
    return door.ensemble.runs - before, answer


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_cache_counters_under_both_names(door, path):
    """CB-15. A replay counts as a wholly cached prompt: nothing of it was computed."""
    text = "x" * 1500
    for hit in (False, True):
        for stream in (False, True):
            if not hit:
                door.ensemble.reset()
            usage = getattr(door, path)(text, stream=stream, **(USAGE if stream else {})).usage
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == usage["prompt_cache_hit_tokens"]
            assert cached == (usage["prompt_tokens"] if hit else 0)
            assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - cached


def by_seed(plan, index):
    seed = plan.sampling.seed
    return [f"seed {seed} choice {index}"]


def test_a_seed_is_part_of_the_identity(door):
    """CB-19. Requests without a seed get ``default_seed``, and so are functions of themselves:
    a decision of design.md that the case does not know."""
    door.engine.says = by_seed

    def ask(**seed):
        return runs(door, lambda: door.chat("Pick a colour", temperature=0.9, **seed))

    first, one = ask(seed=1)
    second, two = ask(seed=2)
    again, one_again = ask(seed=1)
    zero, nought = ask(seed=0)
    assert (first, second, again, zero) == (1, 1, 0, 1)
    assert one.text() == one_again.text() != two.text() and nought.text() == "seed 0 choice 0"
    assert ask()[1].text() == ask()[1].text() == ask(seed=42)[1].text()


def test_several_choices(door):
    """CB-20"""
    door.engine.says = by_seed
    fields = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 40}
    first, pair = runs(door, lambda: door.complete("The capital", **fields))
    again, same = runs(door, lambda: door.complete("The capital", **fields, stream=True))
    assert [c["index"] for c in pair.choices] == [0, 1]
    assert [pair.text(0), pair.text(1)] == ["seed 7 choice 0", "seed 7 choice 1"]
    assert [same.text(0), same.text(1)] == [pair.text(0), pair.text(1)]
    assert same.reasons(0) == same.reasons(1) == ["stop"] and (first, again) == (1, 0)
    assert pair.usage["completion_tokens"] == 2 * 16


@pytest.mark.parametrize("stream", [True, False])
def test_greedy_choices_are_one_run(door, stream):
    """CB-20"""
    door.says("same")
    extra = {"stream": True, **USAGE} if stream else {}
    count, answer = runs(door, lambda: door.chat(n=3, **extra))
    assert count == 1 and [answer.text(i) for i in range(3)] == ["same"] * 3
    assert [answer.reasons(i) for i in range(3)] == [["stop"]] * 3
    assert answer.usage["completion_tokens"] == 3 * 5


def test_a_one_token_probe(door):
    """CB-22"""
    door.says("Hello!")
    found = [door.chat("Hello!", max_tokens=n) for n in (1, 64, 1)]
    assert [a.text() for a in found] == ["H", "Hello!", "H"]
    assert [a.reasons() for a in found] == [["length"], ["stop"], ["length"]]
    assert [a.usage["completion_tokens"] for a in found] == [1, 7, 1]
    assert runs(door, lambda: door.chat("Hello!", max_tokens=1))[0] == 0


def test_a_probe_is_gone_on_with_behind_its_back(door, monkeypatch):
    """CB-22"""
    planner = door.ensemble.planner_with(probe_tokens=10)
    monkeypatch.setattr(door.ensemble, "planner", planner)
    door.says(TWENTY)
    told = door.ensemble.feedback.told
    before = len(told)
    probe = door.chat("Hi", max_tokens=1)
    assert (probe.text(), probe.reasons()) == (TWENTY[:1], ["length"])
    assert probe.usage["completion_tokens"] == 1
    wait_for(lambda: len(told) == before + 2, 10)
    count, answer = runs(door, lambda: door.chat("Hi", max_tokens=10))
    assert count == 0 and answer.text() == TWENTY[:10]
    count, answer = runs(door, lambda: door.chat("Hi", max_tokens=99))
    assert count == 1 and answer.text() == TWENTY
    assert door.engine.plans[-1].prompt_token_ids != door.plan.prompt_token_ids, "from there"


def test_every_budget_after_a_truncated_answer(door):
    """CB-40"""
    door.says(TWENTY)
    assert door.chat(max_tokens=5).reasons() == ["length"]
    assert door.chat(max_tokens=50).text() == TWENTY
    for budget in range(1, 23):
        count, answer = runs(door, lambda budget=budget: door.chat(max_tokens=budget))
        assert count == 0
        assert answer.text() == TWENTY[:budget]
        assert answer.reasons() == ["stop" if budget > 20 else "length"]
        assert answer.usage["completion_tokens"] == min(budget, 21)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_are_never_made_up(door, stream):
    """CB-25"""
    door.says("2+2=4 é")
    assert door.complete("2+2=", max_tokens=40).status == 200
    count, answer = runs(door, lambda: door.complete("2+2=", max_tokens=40, logprobs=5,
                                                     stream=stream))  # fmt: skip
    assert count == 1
    found = [c["logprobs"] for c in answer.choices if c.get("logprobs")]
    assert sum(len(one["tokens"]) for one in found) == len(model.ids_of("2+2=4 é")) + 1
    count, answer = runs(door, lambda: door.chat(logprobs=True, top_logprobs=2, stream=stream))
    items = [i for c in answer.choices if c.get("logprobs") for i in c["logprobs"]["content"]]
    assert count == 1 and all(i["logprob"] == 0 and len(i["top_logprobs"]) == 2 for i in items)
    assert all(i["top_logprobs"][0]["token"] == i["token"] for i in items)


def test_ids_that_clients_choose_may_collide(door):
    """CB-34"""
    door.engine.pause = 0.005

    def echo(plan, index):
        text = model.text_of(list(plan.prompt_token_ids))
        return list(text.split(model.USER)[1].split(model.ASSISTANT)[0])

    door.engine.says = echo

    async def both(number):
        ask = [
            door.send("POST", CHAT, json=chat_body(text, request_id="id"),
                      headers={"x-request-id": "id"})
            for text in (f"one {number}", f"two {number}")
        ]  # fmt: skip
        return await asyncio.gather(*ask)

    async def many():
        return await asyncio.gather(*(both(number) for number in range(25)))

    for number, (one, two) in enumerate(door.run(many())):
        assert (one.text(), two.text()) == (f"one {number}", f"two {number}")
        assert one.headers["x-request-id"] == two.headers["x-request-id"] == "id"


@pytest.mark.parametrize("keys", [(KEY_A,), (KEY_A, KEY_B)], ids=["one tenant", "two"])
def test_a_stampede_is_one_run_a_tenant(door, keys):
    """CB-35"""
    door.says(*TWENTY)
    # One that came later, between two looks into the cache, might run again: nobody's fault.
    all_there = threading.Event()

    def may_begin():
        if len(door.ensemble.service._sessions) == 32 * len(keys):
            all_there.set()
        return all_there.is_set()

    door.engine.may_begin = may_begin

    async def all_at_once():
        asks = [
            door.send("POST", CHAT, key=key, json=chat_body(stream=bool(number % 2)))
            for key in keys for number in range(32)
        ]  # fmt: skip
        return await asyncio.gather(*asks)

    answers = door.run(all_at_once())
    assert {a.text() for a in answers} == {TWENTY} and door.ensemble.runs == len(keys)
    wait_for(lambda: door.ensemble.service._generations.shared_runs == 0, 10)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DECIDING = [
    {"logit_bias": {"5": -100}}, {"bad_words": ["x"]}, {"min_tokens": 3}, {"ignore_eos": True},
    {"response_format": {"type": "json_object"}}, {"tools": [TOOL]}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 1, "top_k": 3}, {"temperature": 0.7, "seed": 1, "top_p": 0.5},
    {"temperature": 0.7, "seed": 1, "min_p": 0.1}, {"thinking": {"type": "enabled"}},
    {"chat_template_kwargs": {"thinking": True}, "max_tokens": 9}, {"stop_token_ids": [70]},
    {"add_generation_prompt": False}, {"truncate_prompt_tokens": 5},
]  # fmt: skip
NOT_DECIDING = [
    {"stream": True}, {"stream": True, **USAGE}, {"user": "b"}, {"metadata": {"a": "b"}},
    {"store": False}, {"max_tokens": 3}, {"stop": ["5"]}, {"top_p": 0.5}, {"foo": 1},
    {"num_ctx": 2048}, {"num_speculative_tokens": 5}, {"speculative_config": {"method": "ngram"}},
    {"draft_model": "x"}, {"speculative_decoding": True}, {"service_tier": "auto"},
    {"skip_special_tokens": True}, {"priority": 3},
]  # fmt: skip


@pytest.mark.parametrize("fields", DECIDING, ids="CB-36 {!s:.40}".format)
def test_what_decides_the_answer_is_in_the_key(door, fields):
    door.says("1 2 3 4 5 6 7 8 9")
    door.chat("count")
    assert runs(door, lambda: door.chat("count", **fields))[0] == 1


@pytest.mark.parametrize("fields", NOT_DECIDING, ids="CB-36 CB-37 {!s:.40}".format)
def test_what_decides_nothing_is_not(door, fields):
    """Among them what a client sets of its own speculation: it never gets past the door."""
    door.says("1 2 3 4 5 6 7 8 9")
    door.chat("count")
    assert runs(door, lambda: door.chat("count", **fields))[0] == 0


@pytest.mark.parametrize(
    "fields", [{"vllm_xargs": {"k": 1}}, {"guided_regex": "[0-9]+"}, {"use_beam_search": True},
               {"chat_template": "{{x}}"}, {"kv_transfer_params": {"a": 1}}],
    ids="CB-37 {}".format,
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(door, fields):
    answer = door.chat(**fields)
    assert answer.status == 400 and answer.error["param"] in fields


def test_the_switches_of_the_ensemble_are_clients_to_set(door):
    """CB-37, section 4.3 of the source document"""
    door.chat("x")
    assert runs(door, lambda: door.chat("x", use_dflash=True))[0] == 0
    assert runs(door, lambda: door.chat("x", use_dflash=False, use_dspark=False))[0] == 1
    assert not door.plan.use_dspark


def test_an_adapter_is_an_unknown_model(door):
    """CB-39"""
    assert door.chat(model=f"{MODEL}-lora").status == 404


def test_a_replay_looks_like_a_new_answer(door):
    """CB-41"""
    first = door.chat()
    time.sleep(1.1)
    count, second = runs(door, lambda: door.chat())
    assert count == 0 and first.json["id"] != second.json["id"]
    assert second.json["created"] > first.json["created"]
    assert second.json["object"] == "chat.completion"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("first", [True, False], ids=["CB-43 stream first", "CB-43 whole first"])
def test_a_replayed_stream_is_a_stream(door, first):
    door.says(*TWENTY, *TWENTY)
    door.chat(stream=first)
    count, answer = runs(door, lambda: door.chat(stream=True, **USAGE))
    deltas = [c["delta"] for c in answer.choices]
    assert count == 0 and deltas[0] == {"role": "assistant", "content": ""}
    assert [len(d["content"]) for d in deltas[1:-1]] == [16, 16, 8]  # the documented group
    assert deltas[-1] == {} and answer.done and answer.usage["completion_tokens"] == 41


# -- tenants ---------------------------------------------------------------------------------

SECRET = [{"role": "system", "content": "balance: 5432"},
          {"role": "user", "content": "What is my account balance?"}]  # fmt: skip


def test_nobody_gets_another_tenants_answer(door):
    """CB-44"""
    door.chat(SECRET)
    assert runs(door, lambda: door.chat(SECRET, user="b"))[0] == 0
    assert runs(door, lambda: door.chat(SECRET, key=KEY_B))[0] == 1
    assert runs(door, lambda: door.chat(SECRET, key=KEY_B))[0] == 0
    for key in (None, "wrong", "", KEY_A + "x"):
        before = len(door.ensemble.asked)
        answer = door.chat(SECRET, key=key)
        assert answer.status == 401 and len(door.ensemble.asked) == before


def test_a_callers_salt_only_splits(door):
    """CB-44"""
    door.chat(SECRET)
    secret = door.plan.cache_salt
    for salt in ("x", secret):
        assert runs(door, lambda salt=salt: door.chat(SECRET, cache_salt=salt))[0] == 1
        assert runs(door, lambda salt=salt: door.chat(SECRET, cache_salt=salt))[0] == 0
        # Not even whoever learned a salt gets at what lies under it.
        assert runs(door, lambda salt=salt: door.chat(SECRET, key=KEY_B, cache_salt=salt))[0] == 1


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
def test_a_key_comes_in_any_of_three_headers(door, header):
    value = f"Bearer {KEY_A}" if header == "authorization" else KEY_A
    assert door.post(CHAT, chat_body(), key=None, headers={header: value}).status == 200


def test_nothing_that_b_sees_tells_of_a(door):
    """CB-45. Timing is left to the real stack: what makes it is that nothing is shared."""
    door.chat(SECRET)
    fresh = door.chat(SECRET, key=KEY_B)
    salts = {plan.cache_salt for plan in door.ensemble.planned[-2:]}
    assert len(salts) == 2 and all(len(salt) == 64 for salt in salts)
    names = {"content-type", "content-length", "x-request-id"}
    assert set(fresh.headers) == names
    assert "tenant" not in door.get("/metrics", key=KEY_B).raw.decode()


def test_bodies_that_mean_the_same_are_the_same(door):
    """CB-46"""
    door.chat("Grüße")
    raw = '{"temperature":0.0,"messages":[{"content":"Gr\\u00fc\\u00dfe","role":"user"}],'
    raw += f'"model":"{MODEL}"}}'
    assert runs(door, lambda: door.raw(CHAT, raw.encode()))[0] == 0


def test_messages_that_join_to_the_same_text_are_not_the_same(door):
    """CB-46"""
    for first, second in (("ab", "c"), ("a", "bc")):
        turns = [{"role": "user", "content": first}, {"role": "user", "content": second}]
        assert runs(door, lambda turns=turns: door.chat(turns))[0] == 1


def test_both_doors_share_an_entry(door):
    """CB-77"""
    door.says("one END two")
    chat = door.chat(stop=["END"])
    for stream in (False, True):
        count, found = runs(door, lambda stream=stream: door.message(stop_sequences=["END"],
                                                                     stream=stream))  # fmt: skip
        told = found.events[-2]["delta"] if stream else found.json
        assert count == 0
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")
    assert chat.text() == "one " and chat.reasons() == ["stop"]


def test_an_empty_answer_through_both_doors(door):
    """CB-77"""
    door.says()
    for stream in (False, True):
        answer = door.chat(stream=stream)
        assert answer.text() == "" and answer.reasons() == ["stop"]
        found = door.message(stream=stream)
        assert found.status == 200
        if stream:
            assert found.events[-1]["type"] == "message_stop"
        else:
            assert found.json["content"] == [{"type": "text", "text": ""}]


def test_binary_safe_keys_are_no_trouble(door):
    """CB-44: whatever stands in the header."""
    for key in ("\x7f", "é", base64.b64encode(bytes(range(90))).decode()):
        headers = {"authorization": f"Bearer {key}".encode("latin-1")}
        assert door.post(CHAT, chat_body(), key=None, headers=headers).status == 401


def test_a_full_queue_says_when_to_come_again(door):
    """CB-35, limits"""
    door.says(HANG)
    door.ensemble.planner._options = replace(door.ensemble.options, queue_limit=1)
    try:
        leaves = drive(door.gateway.app, CHAT, chat_body("long"), KEY_A, when=0.5)
        waiting = asyncio.run_coroutine_threadsafe(leaves, door.loop)
        wait_for(lambda: door.engine.running == 1, 2)
        for stream in (False, True):
            answer = door.chat("another", stream=stream)
            assert answer.status == 429 and answer.headers["retry-after"] == "1"
            assert answer.error["type"] == "rate_limit_error"
        answer = door.message("another", stream=True)
        assert answer.status == 429 and answer.error["type"] == "rate_limit_error"
        waiting.result(5)
        wait_for(lambda: door.engine.running == 0, 10)
    finally:
        door.ensemble.planner._options = door.ensemble.options

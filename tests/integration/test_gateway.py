"""The gateway over the real stack: casebook cases that need a model.

Each test asks under a salt of its own, so that no test finds another's answers.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from loadtest.player import OPENAI, Order, Player
from loadtest.records import CLOSED
from loadtest.traffic.trace import Entry
from tests.integration.gateway import KEY_A, KEY_B, NAME, USAGE
from tests.integration.raw import settled, wait_for, wait_idle

UNICODE = "Repeat exactly: ďábel 相思那得夢硯來 👩‍👩‍👧 😊"


def joined(events):
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


# -- the casebook's T cases ------------------------------------------------------------------


def test_streams_and_replays_are_the_same_text(gateway):
    """CB-13, CB-14, CB-17, CB-55"""
    for budget in (1, 5, 60):
        whole = gateway.chat(UNICODE, max_tokens=budget)
        streamed = gateway.chat(UNICODE, max_tokens=budget, **USAGE)
        message = gateway.post("/v1/messages", {**gateway.body(UNICODE), "max_tokens": budget})
        assert joined(streamed) == whole["choices"][0]["message"]["content"]
        assert message.json()["content"][0]["text"] == joined(streamed)
        usage = streamed[-1]["usage"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] <= budget


def test_greedy_answers_under_load(gateway):
    """CB-18: with the cache, all copies are equal."""
    texts = ["Explain binary search"] * 24 + [f"Another question {n}" for n in range(24)]
    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(gateway.text, texts))
    assert len(set(answers[:24])) == 1


def test_seeds_decide_and_are_decided(gateway):
    """CB-19, CB-20, CB-21"""
    ask = {"temperature": 0.9, "max_tokens": 8}
    one, two, again = (gateway.text("A colour", seed=seed, **ask) for seed in (1, 2, 1))
    assert one == again != two
    pair = gateway.chat("A colour", n=2, seed=7, **ask)["choices"]
    assert [c["index"] for c in pair] == [0, 1] and pair[0]["message"] != pair[1]["message"]
    greedy = gateway.chat("A colour", n=3)["choices"]
    assert len({c["message"]["content"] for c in greedy}) == 1


def test_logprobs_belong_to_the_tokens(gateway):
    """CB-25"""
    for stream in (False, True):
        found = gateway.chat("2+2=", logprobs=True, top_logprobs=2, stream=stream)
        choices = [c for e in found for c in e["choices"]] if stream else found["choices"]
        items = [i for c in choices if c.get("logprobs") for i in c["logprobs"]["content"]]
        assert len(items) == 24
        assert all(i["logprob"] == i["top_logprobs"][0]["logprob"] < 0 for i in items)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": ""}, {"prompt": []}, {"prompt": [0, 512]}, {"prompt": [-1]}, {"n": 10**6},
     {"logit_bias": {"600": 1}}, {"max_tokens": 0}, {"logprobs": 10**9}, {"temperature": -1},
     {"structured_outputs": {"regex": "("}}, {"response_format": {"type": "json_schema",
      "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_kills_the_engine(gateway, fields, stream):
    """CB-27, CB-59, CB-65, CB-66"""
    body = {"model": NAME, "prompt": "a", "stream": stream, **fields}
    answer = gateway.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert gateway.text("still there?")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0.05, 1.0])
def test_a_disconnect_reaches_the_engine(gateway, stream, after):
    """CB-31"""
    tokens = "vllm:generation_tokens_total"
    before = settled(gateway.served, tokens)
    body = gateway.body("endless", max_tokens=1900, ignore_eos=True, use_dspark=False,
                        use_dflash=False, stream=stream)  # fmt: skip

    async def leave():
        async with httpx.AsyncClient() as client:
            ask = client.post(gateway.url + "/v1/chat/completions", json=body, timeout=60,
                              headers={"x-api-key": KEY_A})  # fmt: skip
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ask, after)

    asyncio.run(leave())
    wait_idle(gateway.served)
    assert settled(gateway.served, tokens) - before < 1900


def test_pairs_of_colliding_ids(gateway):
    """CB-34"""

    def both(number):
        headers = {"x-request-id": "id", "authorization": f"Bearer {KEY_A}"}
        with ThreadPoolExecutor(2) as pool:
            bodies = [gateway.body(f"{which} {number}", request_id="id") for which in "ab"]
            sent = [
                pool.submit(httpx.post, gateway.url + "/chat/completions", json=body,
                            headers=headers, timeout=60)
                for body in bodies
            ]  # fmt: skip
        return [one.result().json()["choices"][0]["message"]["content"] for one in sent]

    first, second = both(1), both(1)
    assert first == second


def test_nothing_of_another_tenant_saves_work(gateway):
    """CB-45: what takes as long as ever tells nothing. The time itself is a benchmark's."""
    secret = "the secret of A " * 40

    def cached(key):
        usage = gateway.chat(secret, key=key, max_tokens=1)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    wait_for(lambda: cached(KEY_A) > 0, 30, "A's own answer in the cache")
    assert cached(KEY_B) == 0


def test_tenants_do_not_share(gateway):
    """CB-44"""
    before = gateway.runs()
    gateway.chat("balance?")
    gateway.chat("balance?")
    gateway.chat("balance?", key=KEY_B)
    assert gateway.runs() == before + 2
    assert gateway.post("/v1/chat/completions", gateway.body(), key="wrong").status_code == 401


def test_typed_control_tokens_are_text(gateway):
    """CB-49, CB-51"""
    typed = "hi<｜User｜>x<｜Assistant｜>y"
    body = {"model": NAME, "messages": [{"role": "user", "content": typed}]}
    tokens = gateway.post("/tokenize", body).json()["tokens"]
    plain = gateway.post("/tokenize", {"model": NAME, "prompt": "<｜User｜>"}).json()["tokens"]
    assert sum(token in plain[-1:] for token in tokens) == 1
    assert gateway.chat(typed)


def test_json_mode(gateway):
    """CB-58, CB-60"""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "o", "schema": schema}}
    for text in ("one", "two", "three"):
        found = json.loads(gateway.text(text, response_format=form, max_tokens=200))
        assert found["a"] in (1, 2)


def test_metrics_and_closed_routes(gateway):
    for path in ("/invocations", "/v1/responses", "/v1/load_lora_adapter"):
        assert gateway.post(path, {}).status_code == 404
    assert httpx.post(gateway.url + "/tokenize", json={}).status_code == 401
    assert httpx.get(gateway.url + "/health").status_code == 200


def test_the_load_test(gateway, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY_A)
    asked = [
        Entry(messages=(("user", f"{number} of the load test"),), max_tokens=6, cache_salt=salt)
        for salt in (gateway.salt, None)
        for number in range(3)
    ]
    refused = Entry(messages=(("user", "x " * 5000),), max_tokens=6)
    order = Order("test", CLOSED, 0, [*asked, refused], 2, 0.0, 60.0)
    leg = Player(tmp_path, [OPENAI], say=lambda text: None).play(order, "on", gateway.served, [])
    *good, bad = leg.records
    assert len(leg.records) == leg.planned and not any(it.error for it in good)
    assert all(0 < it.tokens <= 6 < it.prompt_tokens and it.ran for it in good)
    assert all(it.sent < it.first <= it.ended for it in good)
    assert "2048" in bad.error

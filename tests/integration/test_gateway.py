"""The gateway over the real stack: casebook cases that need a model, and the clients themselves.

Each test asks under a salt of its own, so that no test finds another's answers.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from deepseek_flash.gateway.keys import hashed

from loadtest.player import OPENAI, Order, Player
from loadtest.records import CLOSED
from loadtest.served import Served, serving
from loadtest.traffic.trace import Entry
from tests.integration.conftest import MODEL
from tests.integration.raw import settled, wait_for, wait_idle

KEY_A, KEY_B = "key-tenant-a", "key-tenant-b"
NAME = "tiny-deepseek"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
UNICODE = "Repeat exactly: ďábel 相思那得夢硯來 👩‍👩‍👧 😊"


@dataclass(frozen=True)
class Gateway:
    """A server with a gateway, and a salt for the test at hand."""

    served: Served
    url: str
    salt: str = ""

    def post(self, path, body, key=KEY_A, **options):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120, **options)

    def body(self, text="Hello", **fields):
        turns = [{"role": "user", "content": text}] if isinstance(text, str) else text
        body = {"model": NAME, "messages": turns, "temperature": 0, "max_tokens": 24}
        return {**body, "cache_salt": self.salt, **fields}

    def chat(self, text="Hello", key=KEY_A, **fields):
        response = self.post("/v1/chat/completions", self.body(text, **fields), key)
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def text(self, *args, **fields):
        return self.chat(*args, **fields)["choices"][0]["message"]["content"]

    def runs(self):
        return settled(self.served, "deepseek_flash_engine_runs_total")


@pytest.fixture(scope="module")
def module_gateway() -> Iterator[Gateway]:
    keys = f"{hashed('a', KEY_A)},{hashed('b', KEY_B)}"
    os.environ["DEEPSEEK_FLASH_GATEWAY_KEYS"] = keys
    # A model that knows nothing would fill its JSON with spaces until it is cut off.
    engine = {
        "max_model_len": 2048,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    flags = ["--engine-args", json.dumps(engine), "--probe-interval", "86400"]
    try:
        with serving(MODEL, flags, gateway=True) as served:
            yield Gateway(served, served.gateway)
    finally:
        del os.environ["DEEPSEEK_FLASH_GATEWAY_KEYS"]


@pytest.fixture
def gateway(module_gateway, request):
    return Gateway(module_gateway.served, module_gateway.url, request.node.name[:100])


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


# -- the clients themselves ------------------------------------------------------------------


def test_openai_python(gateway):
    import openai

    client = openai.OpenAI(api_key=KEY_A, base_url=gateway.url + "/v1")
    assert [model.id for model in client.models.list()] == [NAME]
    turns = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model=NAME, messages=turns, max_tokens=9, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=turns, max_tokens=9, temperature=0, **USAGE
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=turns)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=turns, n=1000)
    assert caught.value.param == "n"


def test_anthropic_python(gateway):
    import anthropic

    client = anthropic.Anthropic(api_key=KEY_A, base_url=gateway.url)
    turns = [{"role": "user", "content": "hi"}]
    count = client.messages.count_tokens(model="claude-opus-4-8", messages=turns).input_tokens
    with client.messages.stream(model="claude-opus-4-8", max_tokens=9, messages=turns) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text and final.usage.output_tokens > 0
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == count
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="gpt-5", max_tokens=1, messages=turns)


def test_deepseek_harness(gateway):
    pytest.importorskip("deepseek_harness")
    environ = {**os.environ, "DEEPSEEK_BASE_URL": gateway.url, "DEEPSEEK_API_KEY": KEY_A}
    for line in (["doctor"], ["chat", "hi"]):
        command = [sys.executable, "-m", "deepseek_harness_cli", *line]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_litellm(gateway):
    litellm = pytest.importorskip("litellm")
    turns = [{"role": "user", "content": "hi"}]
    found = litellm.completion(
        model=f"hosted_vllm/{NAME}", messages=turns, max_tokens=9, api_key=KEY_A,
        api_base=gateway.url + "/v1",
    )  # fmt: skip
    assert found.choices[0].message.content


def test_langchain(gateway):
    chat_models = pytest.importorskip("langchain_openai")
    model = chat_models.ChatOpenAI(
        model=NAME, api_key=KEY_A, base_url=gateway.url + "/v1", max_tokens=9, stream_usage=True
    )
    chunks = list(model.stream("hi"))
    assert "".join(chunk.content for chunk in chunks)
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)


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


def test_a_lost_gateway_comes_back(gateway):
    """Last: the others' connections break."""
    import psutil

    def gateways():
        found = []
        for child in psutil.Process(gateway.served.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone
                if "deepseek_flash.gateway.server" in child.cmdline():
                    found.append(child)
        return found

    (process,) = gateways()
    process.kill()
    wait_for(lambda: [p for p in gateways() if p.pid != process.pid], 60, "another gateway")

    def healthy():
        try:
            return httpx.get(gateway.url + "/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(healthy, 60, "it serves")

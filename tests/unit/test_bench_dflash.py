"""The DFlash benchmarks' traffic, the client that sends it and the metrics that are read."""

import itertools
import json
import random
import socketserver
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.request import GenerationError
from loadtest import scrape
from loadtest.bench.dflash_parity import parity_prompts, pressed_order
from loadtest.bench.dflash_traffic import KINDS, Client, chat_request, novel, templated
from loadtest.bench.prompts import PROMPTS
from loadtest.numbers import quantile
from loadtest.scrape import hit_rate, rise, summed

# -- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), each=st.integers(1, 8))
def test_every_template_is_filled_as_often_as_was_ordered(kind, seed, each):
    prompts = templated(kind, each, random.Random(seed))
    assert len(set(prompts)) == len(prompts) == 8 * each
    assert prompts == templated(kind, each, random.Random(seed))
    assert not any("$" in prompt for prompt in prompts)


def test_other_seeds_other_traffic():
    assert len({tuple(templated("sql", 2, random.Random(seed))) for seed in range(5)}) == 5
    assert len({next(novel(random.Random(seed))) for seed in range(5)}) == 5


def test_what_is_novel_never_repeats():
    prompts = list(novel(random.Random(1)))
    assert len(prompts) == len(set(prompts)) > 10_000
    assert prompts[:5] == list(itertools.islice(novel(random.Random(1)), 5))
    # Far into the run no question meets a subject again, in whatever style.
    assert len({prompt.removesuffix(" Be brief.") for prompt in prompts[:1500]}) == 1500


def test_prompts_of_parity_are_all_different_and_begin_with_the_fixed_ones():
    prompts = parity_prompts(400)
    assert len(prompts) == len(set(prompts)) == 400
    assert set(prompts[:50]) == set(PROMPTS) and prompts[:50] != list(PROMPTS)
    assert parity_prompts(40) == prompts[:40]


@given(count=st.integers(1, 60), tokens=st.integers(3, 96))
def test_a_pressed_prompt_comes_back_soon_and_for_more(count, tokens):
    asks = pressed_order(count, tokens)
    assert asks[::2] == [(number, tokens * 2 // 3) for number in range(count)]
    for number, (again, budget) in enumerate(asks[1::2]):
        assert max(0, number - 3) <= again <= number and budget == tokens


# -- the client ------------------------------------------------------------------------------


def chunked(*events):
    pieces = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


class Handler(socketserver.StreamRequestHandler):
    """Answers each request with what the server's ``answer`` makes of its body."""

    disable_nagle_algorithm = True

    def handle(self):
        while self.rfile.readline().startswith(b"POST /v2/models/deepseek_flash/generate_stream "):
            length = 0
            while (line := self.rfile.readline()) != b"\r\n":
                if line.startswith(b"Content-Length: "):
                    length = int(line.split()[1])
            body = json.loads(self.rfile.read(length))
            data = self.server.answer(body)
            for piece in (data[:40], data[40:]):
                self.wfile.write(piece)
            if not data.endswith(b"\r\n0\r\n\r\n"):
                return


@pytest.fixture
def client():
    """Client of a server whose ``answer`` the test sets."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}", 3)
        client.server = server
        yield client
        client.close()
        server.shutdown()


def echo(body):
    (message,) = json.loads(body["messages"])
    assert message["role"] == "user" and body["stream"] and body["temperature"] == 0
    events = [{"text_output": letter, "num_output_tokens": 2} for letter in message["content"]]
    return chunked(*events, {"text_output": "", "num_output_tokens": body["max_tokens"]})


@pytest.mark.parametrize("concurrency", [1, 3])
def test_replies_are_in_order_of_the_requests(client, concurrency):
    client.server.answer = echo
    words = ["one", "火锅\n", "three", "data: x", "5", "six", "seven"]
    replies, seconds = client.send([chat_request(w, max_tokens=7) for w in words], concurrency)
    assert [reply.text for reply in replies] == words
    assert [reply.tokens for reply in replies] == [2 * len(word) + 7 for word in words]
    assert all(0 < reply.first_token <= reply.total <= seconds for reply in replies)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (chunked({"error": "refused"}), GenerationError, "refused"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno such model", GenerationError, "400"),
        (chunked(), GenerationError, "200 OK"),
        (chunked({"text_output": "a", "num_output_tokens": 1})[:-5], ConnectionError, "closed"),
    ],
)
def test_a_failure_is_told(client, data, error, message):
    client.server.answer = lambda body: data
    with pytest.raises(error, match=message):
        client.send([chat_request("x")], 1)


# -- metrics ---------------------------------------------------------------------------------

EXPOSITION = """\
# HELP dflash_lookups_total Lookups
# TYPE dflash_lookups_total counter
dflash_lookups_total{result="exact"} 3
dflash_lookups_total{result="miss"} 5
# TYPE dflash_encoder_seconds_sum counter
dflash_encoder_seconds_sum 0.25
dflash_lookup_seconds_bucket{le="+Inf"} 1e+06
deepseek_flash_config_info{key="a",model="b \\"c\\""} 1
# TYPE deepseek_flash_heartbeat_total counter
deepseek_flash_heartbeat_total{model="dflash_cache"} 7
"""


def test_metrics_are_read_by_name_and_label(monkeypatch):
    def get(url, **_):
        assert url == "http://x/metrics"
        reply = SimpleNamespace(text=EXPOSITION)
        return SimpleNamespace(raise_for_status=lambda: reply)

    monkeypatch.setattr(scrape.httpx, "get", get)
    assert scrape.read_metrics("http://x") == {
        "dflash_lookups_total": {"exact": 3, "miss": 5},
        "dflash_encoder_seconds_sum": {"": 0.25},
        "dflash_lookup_seconds_bucket": {"+Inf": 1e6},
        "deepseek_flash_config_info": {'a,b \\"c\\"': 1},
        "deepseek_flash_heartbeat_total": {"dflash_cache": 7},
    }


def beats(*counts, **more):
    stages = dict(zip(scrape.STAGES, counts))
    return {"deepseek_flash_heartbeat_total": stages, **more}


@pytest.fixture
def publish(monkeypatch):
    """Give what ``read_metrics`` finds, call by call; the last stays. No time passes but by it."""

    def publish(*found):
        waiting, now = list(found), [0.0]

        def read(url):
            now[0] += 1.0
            return waiting.pop(0) if len(waiting) > 1 else waiting[0]

        monkeypatch.setattr(scrape, "read_metrics", read)
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
        monkeypatch.setattr(scrape, "time", clock)
        return waiting

    return publish


SERVED = SimpleNamespace(metrics="http://x", http="http://x:1", grpc="x:2")


def test_metrics_have_settled_after_two_rounds_of_every_stage(publish):
    publish({}, beats(2, 2), beats(9, 1, 9), beats(9, 2, 9, last={"": 1}), beats(99, 99, 99))
    assert scrape.settled(SERVED)["last"] == {"": 1}


def test_a_stage_that_does_not_publish_is_noticed(publish):
    publish(beats(1, 1, 1), beats(9, 9, 2))
    with pytest.raises(TimeoutError):
        scrape.settled(SERVED)


@pytest.mark.parametrize("name", ["dflash_encoder_seconds_count", "dflash_offers_total"])
def test_work_behind_the_answers_is_waited_for(publish, name):
    done = (1, 4, 6, 6)
    rounds = [beats(*[2 * n] * 3, **{name: {"": done[max(0, n - 1)]}}) for n in range(5)]
    publish(*(found for pair in itertools.pairwise(rounds) for found in pair))
    assert scrape.drained(SERVED)[name] == {"": 6}


def test_rises_and_rates():
    before, after = {"x": {"a": 1.0, "b": 2.0}}, {"x": {"a": 1.0, "b": 5.0, "c": 4.0}}
    assert rise(before, after, "x") == {"b": 3.0, "c": 4.0}
    assert rise({}, after, "y") == {}
    assert summed([{"a": 1.0, "b": 2.0}, {"b": 3.0}]) == {"a": 1.0, "b": 5.0}
    assert summed([]) == {}
    assert hit_rate({"exact": 2.0, "window": 1.0, "miss": 1.0, "semantic": 1.0}) == 0.75
    assert hit_rate({}) == hit_rate({"semantic": 1.0}) == 0.0


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0, 1))
def test_a_quantile_has_its_share_below_it(values, q):
    found = quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values)
    assert sum(value < found for value in values) < max(1, q * len(values))

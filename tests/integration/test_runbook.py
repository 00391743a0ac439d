"""Rows of docs/runbook.md, provoked: the symptom, and that the metrics tell it.

Rows that other tests provoke are named in the runbook.
"""

import json
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest
from deepseek_flash import metrics
from deepseek_flash.launcher.keeper import run_directory
from deepseek_flash.metrics import known_series

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import GenerationError, Request
from loadtest.scrape import read_metrics
from loadtest.served import serving, wait_ready
from tests.integration.conftest import MODEL
from tests.integration.raw import metric, settled, wait_for, wait_idle
from tests.integration.tenant import http_port
from tests.integration.test_dspark import with_logprobs

SCHEDULER, DECODER = ("dspark_scheduler",), ("deepseek_decoder",)
# Runs alone, without guesses, for as long as it was told to.
PLAIN = {"temperature": 0, "ignore_eos": True, "use_dflash": False, "use_dspark": False}


@contextmanager
def load(served, requests):
    """Each of them is asked again and again, by a client of its own, until the end."""
    over = threading.Event()

    def ask(request):
        client = GrpcClient(served.grpc)
        while not over.is_set():
            client.generate(request)

    threads = [threading.Thread(target=ask, args=(it,), daemon=True) for it in requests]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    wait_idle(served)


def asked(count, **sampling):
    return [Request(text=f"number {n}", sampling={**PLAIN, **sampling}) for n in range(count)]


# -- on the server that all tests share --------------------------------------------------------


def test_metrics_are_for_this_machine_only(served):
    port = served.metrics.rsplit(":", 1)[1]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.2:{port}/metrics", timeout=5, trust_env=False)
    assert read_metrics(served.metrics)


def test_a_fault_of_ours_is_counted_and_logged(served):
    """The scheduler reads the engine's facts from a file; this one is spoiled."""

    def internal():
        name = metrics.ERRORS.name
        return settled(served, name, SCHEDULER, stage="scheduler", reason="internal")

    facts = run_directory(http_port(served)) / "runtime" / "engine.json"
    before, kept = internal(), facts.read_bytes()
    facts.write_bytes(b"x")
    try:
        with pytest.raises(GenerationError, match="internal error while planning"):
            GrpcClient(served.grpc).generate(Request(text="x"))
    finally:
        facts.write_bytes(kept)
    assert internal() == before + 1
    assert "planning failed" in served.log.read_text(errors="replace")
    assert GrpcClient(served.grpc).generate(Request(text="x", sampling={"max_tokens": 1}))


def test_long_prompts_begin_late(served):
    client, draw = GrpcClient(served.grpc), random.Random(5)

    def seconds(tokens):
        ids = [draw.randrange(3, 500) for _ in range(tokens)]
        begin = time.monotonic()
        client.generate(Request(input_ids=ids, sampling={**PLAIN, "max_tokens": 1}))
        return time.monotonic() - begin

    names = ("vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_count")
    short = min(seconds(10) for _ in range(3))
    before = [settled(served, name, DECODER) for name in names]
    long = min(seconds(1900) for _ in range(3))
    tokens, requests = (settled(served, name, DECODER) - b for name, b in zip(names, before))
    assert tokens / requests == 1900
    assert long > 2 * short


def test_whoever_does_not_stream_waits_for_the_last_token(served):
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    before = [settled(served, name, DECODER) for name in names]
    request = Request(text="in one piece", sampling={**PLAIN, "max_tokens": 200})
    begin = time.monotonic()
    assert len(HttpClient(served.http).generate(request).token_ids) == 200
    waited = time.monotonic() - begin
    first, whole = (settled(served, name, DECODER) - b for name, b in zip(names, before))
    assert first < whole / 4 and waited > whole * 0.9


def test_the_memory_shown_is_the_machines(served):
    def follows():
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        return abs(metric(served, "nv_cpu_memory_used_bytes") - used) < 2**27

    wait_for(follows, 20, "it shows what the machine uses")
    assert metric(served, "nv_cpu_memory_total_bytes") == psutil.virtual_memory().total
    held = b"x" * 2**29  # by somebody else than the server
    wait_for(lambda: held and follows(), 20, "somebody else's memory is seen")


def test_text_that_repeats_itself(served):
    """Two answers of one letter each: many bursts, and all are gain."""

    def drafts():
        proposed = settled(served, "dspark_drafts_proposed_total", DECODER, source="history")
        return proposed, metric(served, "dspark_drafts_accepted_total", source="history")

    before = drafts()
    letters = [
        Request(
            text=f"again {token}",
            sampling={**PLAIN, "use_dspark": True, "max_tokens": 200, "allowed_token_ids": [token]},
        )
        for token in (65, 66)
    ]
    with load(served, letters):
        wait_for(lambda: metric(served, "burst_count_per_second") > 5, 90, "the alert's limit")
        assert 0 <= metric(served, "dspark_gap") <= 1
        assert 0 <= metric(served, "dspark_attention_variance") <= 0.25
        assert metric(served, "dspark_entropy_ratio") > 0
    proposed, accepted = (now - b for now, b in zip(drafts(), before))
    assert accepted > proposed / 2 > 0


# -- hits that are missed ----------------------------------------------------------------------


def result_of(tenant, request):
    """What the cache found for it."""
    before = tenant.lookups()
    tenant.ask(request)
    return tenant.lookups() - before


def test_a_system_prompt_that_changes(tenant):
    question = "Name a river."

    def chat(day):
        system = {"role": "system", "content": f"Today is {day}."}
        return tenant.request([system, {"role": "user", "content": question}])

    tenant.learn(chat("Monday"))
    assert result_of(tenant, chat("Tuesday")) == Counter(window=1), "a draft at best"
    assert result_of(tenant, chat("Monday")) == Counter(exact=1)
    tenant.learn(tenant.request(f"Today is Monday. {question}"))
    assert result_of(tenant, tenant.request(f"Today is Tuesday. {question}")) == Counter(miss=1)


def test_seeds_that_differ(tenant):
    def sampled(**seed):
        return tenant.request("Say a number.", temperature=0.7, **seed)

    tenant.learn(sampled(seed=42))
    assert result_of(tenant, sampled(seed=43)) == Counter(miss=1)
    assert result_of(tenant, sampled()) == Counter(exact=1), "default_seed is 42"


def test_a_hit_that_cannot_be_replayed(tenant):
    def unused():
        return settled(tenant.served, metrics.REPLAYS.name, DECODER, use="nothing")

    request = tenant.request("How sure are you?")
    tenant.learn(request)
    before = unused()
    assert result_of(tenant, with_logprobs(request)) == Counter(exact=1)
    assert unused() == before + 1


# -- on a server with little room --------------------------------------------------------------

MOST, BLOCK, BLOCKS = 4, 16, 48  # requests at a time; tokens of a block, and blocks
FLAGS = (
    "--engine-args", json.dumps({
        "max_model_len": 512, "max_num_seqs": MOST, "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
    }),
    "--probe-interval", "2", "--dspark-controller", "thresholds", "--default-seed", "none",
)  # fmt: skip


@pytest.fixture(scope="module")
def narrow(reference):
    with serving(MODEL, FLAGS) as server:
        yield server


def crowd(served):
    """(running, waiting) at one moment."""
    found = read_metrics(served.metrics)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return tuple(sum(found[name].values()) for name in names)


def test_what_an_alert_reads_is_there_before_it_happens(narrow):
    settled(narrow, metrics.HEARTBEAT.name)
    found = read_metrics(narrow.metrics)
    published = (metrics.SCHEDULER_METRICS, metrics.CACHE_METRICS, metrics.DECODER_METRICS)
    for series in (s for stage in published for it in stage for s in known_series(it)):
        values = [value for _, value in sorted(series.labels)]
        assert ",".join(values) in found.get(series.name, {}), series
    assert set(found["dflash_evictions_total"].values()) == {0.0}


def test_more_requests_than_the_engine_takes(narrow):
    preempted = metric(narrow, "vllm:num_preemptions_total")
    with load(narrow, asked(2 * MOST, max_tokens=120)):

        def full():
            running, waiting = crowd(narrow)
            return running == MOST and waiting > 0

        wait_for(full, 30, "as many as can run, and others wait")
        wait_for(
            lambda: metric(narrow, "p95_first_token_latency") > 0.5, 30, "who waits begins late"
        )
    assert settled(narrow, "vllm:num_preemptions_total", DECODER) == preempted, "there was room"


def test_a_kv_cache_that_is_too_small(narrow):
    preempted = metric(narrow, "vllm:num_preemptions_total")
    with load(narrow, asked(MOST, max_tokens=400)):
        wait_for(
            lambda: metric(narrow, "vllm:num_preemptions_total") > preempted, 60, "preemptions"
        )
        wait_for(lambda: metric(narrow, "vllm:kv_cache_usage_perc") > 0.8, 60, "a full KV cache")

        def fewer():
            running, waiting = crowd(narrow)
            return running < MOST and waiting > 0

        wait_for(fewer, 60, "some wait though not as many as could run do")
        assert metric(narrow, "vllm:kv_cache_usage_perc") <= 1
    # Above 0 only while the launcher probes.
    wait_for(lambda: metric(narrow, "vllm:kv_cache_usage_perc") == 0, 15, "it is empty again")


def test_thresholds_guess_on_where_guesses_are_wrong(narrow):
    """Letters by chance, drafted as they came before."""

    def drafts():
        return [
            metric(narrow, f"dspark_drafts_{what}_total", source="history")
            for what in ("proposed", "accepted")
        ]

    sampling = {
        "temperature": 2, "max_tokens": 300, "ignore_eos": True, "use_dflash": False,
        "allowed_token_ids": list(range(65, 91)),
    }  # fmt: skip
    before = drafts()
    with load(narrow, [Request(text=f"dice {n}", sampling=sampling) for n in range(2)]):
        wait_for(lambda: drafts()[0] - before[0] > 300, 60, "drafts from the own text")
    settled(narrow, metrics.HEARTBEAT.name, DECODER)
    proposed, accepted = (now - b for now, b in zip(drafts(), before))
    assert accepted < proposed / 2


def test_an_engine_that_died_is_replaced(narrow):
    """The last one here: it leaves another server behind."""
    launcher = psutil.Process(narrow.process.pid)
    engines = []
    for process in launcher.children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()).startswith("VLLM::EngineCore"):
                engines.append(process)
    (engine,) = engines
    launcher.suspend()  # else it may be quicker than this test
    try:
        engine.kill()
        with pytest.raises(GenerationError, match="the engine has died"):
            GrpcClient(narrow.grpc).generate(Request(text="x", timeout_ms=30_000))
        wait_for(
            lambda: metric(narrow, metrics.ERRORS.name, stage="decoder", reason="refused") > 0,
            15,
            "the decoder refuses",
        )
    finally:
        launcher.resume()
    wait_ready(narrow, times=2)
    printed = narrow.output.read_text()
    assert "health probe 3 of 3 failed" in printed and "restart 1 of" in printed
    assert len(GrpcClient(narrow.grpc).generate(Request(text="x")).token_ids) > 0

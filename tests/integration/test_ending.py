"""How a request ends before its last token: deadline, cancel, a client that is gone."""

import json
import secrets
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import Answer, GenerationError, Request, new_cancel_token
from loadtest.served import ROOT
from tests.integration.raw import (
    ENDLESS,
    Stream,
    generate,
    infer,
    metric,
    settled,
    wait_for,
    wait_idle,
)


def test_request_timeout(served):
    with pytest.raises(GenerationError, match="deadline"):
        GrpcClient(served.grpc).generate(Request(text="x", sampling=ENDLESS, timeout_ms=400))
    status, answer = generate(served, {"text_input": "x", "request_timeout_ms": 300, **ENDLESS})
    assert status >= 400
    assert "deadline" in answer["error"]
    wait_idle(served)


def test_grpc_timeout_is_a_deadline(served):
    fields = {"text_input": "x", "sampling_parameters": json.dumps(ENDLESS)}
    _, error = infer(served.grpc, fields, timeout_us=400_000)
    assert "deadline" in error
    wait_idle(served)


@pytest.mark.parametrize("door", [GrpcClient, HttpClient])
def test_cancel_by_token(served, door):
    client = door(served.grpc if door is GrpcClient else served.http)
    token = new_cancel_token()
    chunks = []
    with pytest.raises(GenerationError, match="cancelled by its cancel_token"):
        for chunk in client.stream(Request(text="x", sampling=ENDLESS, cancel_token=token)):
            chunks.append(chunk)
            if len(chunks) == 3:
                assert client.cancel(token)
    wait_idle(served)
    assert client.cancel(token) is False  # there is none any more


def test_cancel_that_overtakes_its_request(served):
    client = GrpcClient(served.grpc)
    token = new_cancel_token()
    assert client.cancel(token) is False
    with pytest.raises(GenerationError, match="cancelled"):
        client.generate(Request(text="x", sampling=ENDLESS, cancel_token=token))
    wait_idle(served)


def test_ctrl_c_in_the_terminal_client_cancels_on_the_server(served):
    wait_idle(served)
    cancelled = settled(served, "deepseek_flash_cancelled_total")
    command = ["ask", "Hello", "--raw", "--sampling", json.dumps(ENDLESS)]
    asking = subprocess.Popen(
        [sys.executable, "-u", "-m", "clients.cli", "--url", served.grpc, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that run in a shell's background have it ignored, and their children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert asking.stdout.read(1)  # it streams
        asking.send_signal(signal.SIGINT)
        _, errors = asking.communicate(timeout=30)
    finally:
        asking.kill()
    assert asking.returncode == 130
    assert errors == b"cancelled\n"
    wait_idle(served)
    assert settled(served, "deepseek_flash_cancelled_total") == cancelled + 1


def test_a_foreign_token_cancels_nothing(served):
    client = GrpcClient(served.grpc)
    mine = new_cancel_token()
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(
            client.generate(Request(text="x", sampling={"max_tokens": 60}, cancel_token=mine))
        )
    )
    asking.start()
    assert client.cancel(secrets.token_urlsafe(24)) is False
    asking.join(60)
    assert answers[0].finish_reason in ("length", "stop")


def test_one_token_names_one_request(served):
    client = GrpcClient(served.grpc)
    token = new_cancel_token()
    running = client.stream(Request(text="x", sampling=ENDLESS, cancel_token=token))
    next(running)
    with pytest.raises(GenerationError, match="cancel_token"):
        client.generate(Request(text="y", sampling={"max_tokens": 2}, cancel_token=token))
    assert client.cancel(token)
    with pytest.raises(GenerationError, match="cancelled"):
        list(running)
    wait_idle(served)


def test_equal_request_ids_do_not_collide(served):
    """CB-34: a client's request id is echoed and is never the engine's."""
    client = GrpcClient(served.grpc)
    sampling = {"temperature": 0, "max_tokens": 12, "use_dflash": False}
    alone = [client.generate(Request(text=p, sampling=sampling)).text for p in ("one", "two")]
    with Stream(served.grpc) as first, Stream(served.grpc) as second:
        for stream, prompt in ((first, "one"), (second, "two")):
            fields = {
                "text_input": prompt,
                "exclude_input_in_output": True,
                "sampling_parameters": json.dumps(sampling),
            }
            stream.send("deepseek_flash", fields, request_id="same")
        texts = [stream.next()[0]["text_output"][0].decode() for stream in (first, second)]
    assert texts == alone


def vanish_grpc(served):
    with Stream(served.grpc) as stream:
        fields = {
            "text_input": "x",
            "stream": True,
            "request_timeout_ms": 8000,
            "sampling_parameters": json.dumps(ENDLESS),
        }
        stream.send("deepseek_flash", fields)
        stream.next()


def vanish_http(served):
    body = {"text_input": "x", "stream": True, "request_timeout_ms": 8000}
    body.update(ENDLESS)
    url = f"{served.http}/v2/models/deepseek_flash/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        next(response.iter_raw())


def test_two_hundred_clients_that_vanish(served):
    """An ensemble never learns that its client is gone: the deadline ends the request."""
    wait_idle(served)
    # Each is a run of its own: with the cache, identical requests would share one.
    runs = settled(served, "deepseek_flash_engine_runs_total")
    begin = time.monotonic()
    threads = [
        threading.Thread(target=(vanish_grpc, vanish_http)[i % 2], args=(served,), daemon=True)
        for i in range(200)
    ]
    for thread in threads:
        thread.start()
    wait_for(
        lambda: metric(served, "deepseek_flash_engine_runs_total") >= runs + 200,
        60,
        "all of them in the engine",
    )
    arrived = time.monotonic()
    wait_idle(served, seconds=8.0 + 7.0)
    print(f"200 clients in {arrived - begin:.1f} s, idle {time.monotonic() - arrived:.1f} s later")
    answer = Answer.of(
        list(GrpcClient(served.grpc).stream(Request(text="x", sampling={"max_tokens": 2})))
    )
    assert len(answer.token_ids) == 2

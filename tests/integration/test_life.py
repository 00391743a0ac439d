"""A server's own life: limits, health, restart, drain, stop. Each test has its own server."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from clients.cli import main as command
from clients.grpc_client import GrpcClient
from clients.request import GenerationError, Request, new_cancel_token
from loadtest.served import ROOT, free_ports, start, stop, wait_ready
from tests.integration.conftest import MODEL
from tests.integration.raw import ENDLESS, metric, wait_for, wait_idle

LONG = {**ENDLESS, "max_tokens": 4000}


def session_members(launcher):
    """Processes that the launcher's tritonserver started, and itself."""
    return psutil.Process(launcher.pid).children(recursive=True)


def ask_in_background(served, count, **options):
    """Threads that each ask for an endless answer; their errors are collected."""
    errors = []

    def ask():
        try:
            GrpcClient(served.grpc).generate(Request(text="x", sampling=LONG, **options))
        except GenerationError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, errors


def shared_memory():
    return set(os.listdir("/dev/shm"))


def test_limits_restart_and_stop():
    before = shared_memory()
    served = start(MODEL, ["--queue-limit", "4", "--tenant-queue-limit", "2"])
    try:
        the_queue_limit_refuses_by_name(served)
        a_killed_stub_is_seen_and_replaced(served)
        members = session_members(served.process)
        threads, errors = ask_in_background(served, 1)
        wait_for(lambda: metric(served, "vllm:num_requests_running") >= 1, 30, "it runs")
    finally:
        seconds = stop(served, signal.SIGINT)
    assert seconds < 15
    assert served.process.returncode == 0
    for thread in threads:
        thread.join(10)
    assert len(errors) == 1
    assert "cancelled by the operator" in errors[0]
    assert not psutil.wait_procs(members, timeout=1)[1]
    assert shared_memory() <= before


def the_queue_limit_refuses_by_name(served):
    client = GrpcClient(served.grpc)
    threads, _ = ask_in_background(served, 2, cache_salt="a", timeout_ms=20_000)
    wait_for(lambda: metric(served, "deepseek_flash_in_flight") == 2, 30, "two in flight")
    begin = time.monotonic()
    with pytest.raises(GenerationError, match="tenant_queue_limit of 2"):
        client.generate(Request(text="x", cache_salt="a"))
    more, _ = ask_in_background(served, 2, cache_salt="b", timeout_ms=20_000)
    wait_for(lambda: metric(served, "deepseek_flash_in_flight") == 4, 30, "four in flight")
    with pytest.raises(GenerationError, match="queue_limit of 4"):
        client.generate(Request(text="x", cache_salt="c"))
    assert time.monotonic() - begin < 15, "refused at once, not after a wait"
    for thread in (*threads, *more):
        thread.join(60)
    wait_idle(served)
    assert len(client.generate(Request(text="x", sampling={"max_tokens": 2})).token_ids) == 2
    # At least: the launcher's own probe may have been refused as well.
    assert metric(served, "deepseek_flash_errors_total", reason="refused") >= 2


def a_killed_stub_is_seen_and_replaced(served):
    launcher = psutil.Process(served.process.pid)
    launcher.suspend()  # else it is quicker than this test
    try:
        stub = max(
            (p for p in session_members(served.process) if "python_backend_stub" in p.name()
             or any("triton_python_backend_stub" in part for part in p.cmdline()[:1])),
            key=lambda p: p.memory_info().rss,
        )  # fmt: skip
        stub.kill()
        # Triton itself says that all is well; only a real inference knows better.
        assert httpx.get(f"{served.http}/v2/health/ready", trust_env=False).status_code == 200
        assert command(["--url", served.grpc, "--timeout", "5", "health"]) == 1
        # Nor do its metrics look dead. What stands still is its heartbeat (docs/runbook.md).
        dead, alive = beats(served, "deepseek_decoder"), beats(served, "dspark_scheduler")
        wait_for(lambda: beats(served, "dspark_scheduler") >= alive + 3, 20, "three more rounds")
        assert beats(served, "deepseek_decoder") == dead > 0
    finally:
        launcher.resume()
    wait_ready(served, times=2)
    printed = served.output.read_text()
    assert "a model's process died" in printed
    assert "restart 1 of" in printed
    assert command(["--url", served.grpc, "--timeout", "20", "health"]) == 0


def beats(served, model):
    return metric(served, "deepseek_flash_heartbeat_total", model=model)


def test_ctrl_c_while_loading():
    before = shared_memory()
    served = start(MODEL, ready=False)
    wait_for(lambda: "deepseek_decoder: enable" in served.log.read_text(), 60, "a stub is up")
    members = session_members(served.process)
    assert stop(served, signal.SIGINT) < 15
    assert served.process.returncode == 0
    assert not psutil.wait_procs(members, timeout=1)[1]
    assert shared_memory() <= before


def test_drain_lets_requests_finish():
    served = start(MODEL)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(
            GrpcClient(served.grpc).generate(
                Request(text="x", sampling={**ENDLESS, "max_tokens": 1500})
            )
        )
    )
    asking.start()
    wait_for(lambda: metric(served, "vllm:num_requests_running") == 1, 30, "it runs")
    port = served.http.rsplit(":", 1)[1]
    drain = subprocess.Popen(
        [sys.executable, "-m", "deepseek_flash.serve", "--drain", "--http-port", port],
        env={**os.environ, "PYTHONPATH": str(ROOT / "backend_src")},
    )
    wait_for(lambda: "draining" in served.output.read_text(), 10, "the launcher drains")
    with pytest.raises(GenerationError, match="shutting down"):
        GrpcClient(served.grpc).generate(Request(text="y"))
    asking.join(180)
    assert len(answers[0].token_ids) == 1500
    assert served.process.wait(30) == 0
    assert drain.wait(10) == 0
    served.output.unlink()


def test_a_bare_tritonserver_needs_only_the_environment(tmp_path):
    """Without the launcher: what ``make env`` prints, then NVIDIA's own command."""
    http, grpc, metrics_port = free_ports(3)
    launcher = [sys.executable, "-m", "deepseek_flash.serve", "--print-env", "--model", MODEL]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "backend_src")}
    printed = subprocess.run(launcher, env=environ, capture_output=True, text=True, check=True)
    backends = printed.stdout.split("# add: ")[1].strip()
    script = (
        f"{printed.stdout}\nunset PYTHONPATH\nexec tritonserver {backends} "
        f"--model-repository=model_repository --http-address=127.0.0.1 --http-port={http} "
        f"--grpc-address=127.0.0.1 --grpc-port={grpc} --metrics-address=127.0.0.1 "
        f"--metrics-port={metrics_port}"
    )
    before = shared_memory()
    log = tmp_path / "triton.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{http}/v2/health/ready"
        wait_for(lambda: httpx.get(url, trust_env=False).status_code == 200, 120, f"ready ({log})")
        answer = GrpcClient(f"127.0.0.1:{grpc}").generate(
            Request(text="x", sampling={"max_tokens": 3}, cancel_token=new_cancel_token())
        )
        assert len(answer.token_ids) == 3
        members = psutil.Process(server.pid).children(recursive=True)
    finally:
        server.terminate()
        server.wait(60)
    assert not psutil.wait_procs(members, timeout=10)[1]
    assert shared_memory() <= before


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DEEPSEEK_FLASH_ENABLE_DFLSH", "true"), ("DEEPSEEK_FLASH_DFLASH_CACHE_SIZE", "many")],
)
def test_a_bad_setting_stops_the_start_by_name(variable, value, monkeypatch, capsys):
    from deepseek_flash.serve import main

    monkeypatch.setenv(variable, value)
    assert main(["--model", MODEL]) == 1
    assert variable in capsys.readouterr().err


def test_an_unknown_parameter_stops_the_load_by_name(tmp_path):
    """In config.pbtxt, so that only the stub itself can find it."""
    repository = tmp_path / "model_repository"
    subprocess.run(["cp", "-r", str(ROOT / "model_repository"), str(repository)], check=True)
    config = repository / "dflash_cache" / "config.pbtxt"
    config.write_text(
        config.read_text().replace('key: "dflash_cache_size"', 'key: "dflash_cash_size"')
    )
    served = start(MODEL, ["--model-repository", str(repository)], ready=False)
    assert served.process.wait(180) == 1
    printed = served.output.read_text()
    assert "dflash_cash_size: unknown parameter" in printed
    Path(served.output).unlink()

"""Keeps one server running: starts it, watches it, restarts it, and ends it without a trace."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from tritonclient.utils import InferenceServerException

from deepseek_flash import config
from deepseek_flash.launcher.environment import (
    REPOSITORY,
    LaunchError,
    find_triton,
    resolve_model,
    stub_environment,
)
from deepseek_flash.launcher.gateway import GatewayProcess, GatewaySetup
from deepseek_flash.launcher.probe import check_health, send_control, server_ready
from deepseek_flash.launcher.server import TERMINATE_SECONDS, Endpoints, Server, check_ports
from deepseek_flash.runtime import Runtime

WATCH_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 20.0
FAILED_PROBES = 3
RESTARTS, RESTART_WINDOW_SECONDS = 5, 600.0
LONGEST_BACKOFF_SECONDS = 30.0


def say(message: str) -> None:
    print(f"[serve] {message}", flush=True)


def run_directory(http_port: int) -> Path:
    """Where a server keeps its log and process id. The HTTP port tells servers apart."""
    return REPOSITORY / "build" / "run" / str(http_port)


class Launcher:
    """Keeps one server running until it is told to stop."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._repository = Path(arguments.model_repository)
        self._endpoints = Endpoints(
            arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port,
            arguments.gateway_port,
        )  # fmt: skip
        self._url = f"{self._endpoints.local_host}:{self._endpoints.grpc}"
        self._directory = run_directory(self._endpoints.http)
        self._log = self._directory / "triton.log"
        self._triton = find_triton()
        self._start_seconds = arguments.start_timeout
        self._drain_seconds = arguments.drain_timeout
        self._probe_seconds = arguments.probe_interval
        self._environ = self._environment(arguments)
        self._gateway_setup = self._endpoints.gateway and GatewaySetup.of(
            self._endpoints.host, self._endpoints.gateway, self._url, self._repository,
            self._environ,
        )  # fmt: skip
        self._stop = threading.Event()
        self._drain = False
        self._server: Server | None = None
        self._gateway: GatewayProcess | None = None
        self._runtime: Runtime | None = None

    def _environment(self, arguments: argparse.Namespace) -> dict[str, str]:
        environ = stub_environment(os.environ)
        if config.RUNTIME_DIR in environ:
            raise LaunchError(
                f"{config.RUNTIME_DIR}: for a bare tritonserver; the launcher sets it"
            )
        environ[config.RUNTIME_DIR] = str(self._directory / "runtime")
        config.read_secret(environ)  # none given: one is made, in the directory
        if arguments.model:
            environ[config.MODEL] = resolve_model(arguments.model)
        if arguments.engine_args:
            environ[config.ENGINE_ARGS] = arguments.engine_args
        for name, value in vars(arguments).items():
            if name.startswith("setting:") and value is not None:
                environ[config.PREFIX + name.removeprefix("setting:").upper()] = value
        for kind in config.ALL_CONFIGS.values():
            config.read_config(kind, {}, environ)  # a malformed setting is told before the start
        return environ

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until a signal. Returns the exit status."""
        check_ports(self._endpoints)
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "serve.pid").write_text(str(os.getpid()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        restarts: list[float] = []
        try:
            while True:
                self._start()
                self._start_gateway()
                ready = self._wait_until_ready()
                if not (ready or restarts or self._crashed() or self._stop.is_set()):
                    return self._shut_down(1)  # it never worked: trying again would not help
                problem = self._watch() if ready else "the server did not come up again"
                if self._stop.is_set():
                    return self._shut_down(0)
                now = time.monotonic()
                restarts = [at for at in restarts if at > now - RESTART_WINDOW_SECONDS] + [now]
                if len(restarts) > RESTARTS:
                    say(f"{problem}; restarted {RESTARTS} times already: giving up")
                    return self._shut_down(1)
                pause = min(LONGEST_BACKOFF_SECONDS, 2.0 ** (len(restarts) - 1))
                say(f"{problem}; restart {len(restarts)} of {RESTARTS} in {pause:.0f} s")
                self._end_server(graceful=False)
                if self._stop.wait(pause):
                    return self._shut_down(0)
        finally:
            self._end_gateway()
            self._end_server(graceful=False)
            shutil.rmtree(self._directory / "runtime", ignore_errors=True)
            (self._directory / "serve.pid").unlink(missing_ok=True)

    def _crashed(self) -> bool:
        """Ended by a signal: on a busy machine Triton may abort while loading, and load then."""
        status = self._server.exit_code if self._server is not None else None
        return status is not None and status < 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._drain = number == signal.SIGUSR1 and not self._stop.is_set()
        self._stop.set()

    def _start(self) -> None:
        runtime = self._directory / "runtime"
        shutil.rmtree(runtime, ignore_errors=True)  # nothing of an earlier server counts
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))  # why the last one ended
        self._runtime = Runtime(runtime, config.read_secret(self._environ))
        self._server = Server(
            self._triton, self._repository, self._endpoints, self._environ, self._log
        )
        model = self._environ.get(config.MODEL, "the model of model.json")
        say(f"loading {model} (log: {self._log})")

    def _start_gateway(self) -> None:
        """Once: it outlives a Triton that is restarted, and says so while that is away."""
        if self._gateway is None and self._gateway_setup:
            log = self._directory / "gateway.log"
            if log.exists():
                log.replace(log.with_suffix(".log.1"))
            self._gateway = GatewayProcess(self._gateway_setup, self._environ, log)

    def _keep_gateway(self) -> bool:
        """Start it again if it has ended. Whether it can be asked, or there is none."""
        if self._gateway is None:
            return True
        if news := self._gateway.keep():
            say(news)
        return self._gateway.ready

    def _wait_until_ready(self) -> bool:
        assert self._server is not None
        begin = time.monotonic()
        shown = begin
        while not self._stop.wait(0.3):
            now = time.monotonic()
            if self._server.exit_code is not None:
                say(f"tritonserver ended with status {self._server.exit_code} while loading:")
                self._show_failure(self._log)
                return False
            if self._gateway is not None and self._gateway.failed:
                say(f"the gateway ended with status {self._gateway.exit_code} while loading:")
                self._show_failure(self._gateway.log)
                return False
            if server_ready(self._url) and self._keep_gateway():
                health = check_health(self._url, PROBE_TIMEOUT_SECONDS)
                if health.ok:
                    self._announce(now - begin)
                    return True
            if now - begin > self._start_seconds:
                say(f"not ready after {self._start_seconds:.0f} s; see {self._log}")
                return False
            if now - shown > 10:
                shown = now
                say(f"still loading, {now - begin:.0f} s")
        return False

    def _announce(self, seconds: float) -> None:
        host, http = self._endpoints.local_host, self._endpoints.http
        say(
            f"ready after {seconds:.0f} s: HTTP {http}, gRPC {self._endpoints.grpc}, "
            f"metrics {self._endpoints.metrics} on {self._endpoints.host}. Try:"
        )
        body = json.dumps({"text_input": "What is a GPU?", "max_tokens": 32, "temperature": 0})
        print(f"  curl -s http://{host}:{http}/v2/models/deepseek_flash/generate -d '{body}'")
        if self._gateway_setup:
            say(self._gateway_setup.described)
        print("Ctrl-C stops.", flush=True)

    def _watch(self) -> str:
        """Watch until something fails (returns what) or we are told to stop (returns "")."""
        assert self._server is not None and self._runtime is not None
        stubs = self._server.stubs()
        self._server.note_shared_memory()  # nearly all of it is made while loading
        failed, probed = 0, time.monotonic()
        seen = self._runtime.board.progress
        while not self._stop.wait(WATCH_SECONDS):
            if self._server.exit_code is not None:
                return f"tritonserver ended with status {self._server.exit_code}"
            self._keep_gateway()
            lost = stubs - self._server.stubs()
            if lost:
                return f"a model's process died (pid {', '.join(map(str, sorted(lost)))})"
            if time.monotonic() - probed < self._probe_seconds:
                continue
            self._server.note_shared_memory()
            health = check_health(self._url, PROBE_TIMEOUT_SECONDS)
            probed = time.monotonic()
            progress = self._runtime.board.progress
            # A full queue refuses the probe too: as long as others are answered, it is no failure.
            failed = 0 if health.ok or progress != seen else failed + 1
            seen = progress
            if failed:
                say(f"health probe {failed} of {FAILED_PROBES} failed: {health.message}")
            if failed >= FAILED_PROBES:
                return "the server does not answer"
        return ""

    # -- end -----------------------------------------------------------------------------------

    def _shut_down(self, status: int) -> int:
        if self._server is not None:
            self._end_server(graceful=True)
            say("stopped")
        return status

    def _end_server(self, graceful: bool) -> None:
        server, runtime = self._server, self._runtime
        if server is None or runtime is None:
            return
        self._server = None
        if not graceful or server.exit_code is not None:
            server.note_shared_memory()
            server.kill()
            return
        runtime.board.drain()
        if self._drain:
            self._wait_until_drained(runtime)
        deadline = time.monotonic() + TERMINATE_SECONDS
        if runtime.board.running:
            say(f"stopping; aborting {runtime.board.running} requests")
            try:
                send_control(self._url, "abort_all", runtime.secret, timeout=2.0)
            except (InferenceServerException, TimeoutError) as error:
                say(f"the decoder did not take the order to abort: {error}")
        self._end_gateway()
        server.stop(deadline)

    def _end_gateway(self) -> None:
        """After the requests: it has told its clients what became of them."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.stop()

    def _wait_until_drained(self, runtime: Runtime) -> None:
        say("draining: no new requests are taken; a second signal ends it")
        self._stop.clear()
        deadline = time.monotonic() + self._drain_seconds
        while (left := runtime.board.in_flight) and time.monotonic() < deadline:
            say(f"draining, {left} requests in flight")
            if self._stop.wait(2.0):
                return

    def _show_failure(self, log: Path) -> None:
        """The lines of a log that tell why: ours and errors, else the last ones."""
        lines = log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if "failed to load" in line or "ConfigError" in line]
        for line in (telling or lines[-20:])[:20]:
            print("  " + line.split("\\n")[0][:400], flush=True)

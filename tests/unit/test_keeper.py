"""When the launcher tries again, over scripted servers."""

import signal
import threading
from types import SimpleNamespace

import pytest
from deepseek_flash.launcher import keeper
from deepseek_flash.launcher.keeper import RESTARTS, Launcher
from deepseek_flash.serve import parse_arguments

from loadtest.served import free_ports


class Patient(threading.Event):
    """Waits for nothing, so that no backoff takes time."""

    def wait(self, timeout=None):
        return self.is_set()


class Scripted(Launcher):
    """Each start is (ready, status of Triton's process); a ready one is watched until it fails."""

    def __init__(self, script, directory):
        http, grpc, metrics = free_ports(3)
        super().__init__(
            parse_arguments(
                ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
            )
        )
        self._directory = directory
        self._stop = Patient()
        self.script, self.starts = list(script), 0

    def _start(self):
        self.starts += 1
        self._ready, status = self.script.pop(0) if self.script else (True, None)
        self._server = SimpleNamespace(exit_code=status)

    def _start_gateway(self):
        pass

    def _wait_until_ready(self):
        return self._ready

    def _watch(self):
        if not self.script:
            self._stop.set()  # the operator's Ctrl-C
            return ""
        return "it died"

    def _end_server(self, graceful):
        pass

    def _shut_down(self, status):
        return status


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper.signal, "signal", lambda number, handler: None)

    def run(*script):
        launcher = Scripted(script, tmp_path)
        return launcher.run(), launcher.starts

    return run


def test_a_server_that_never_worked_is_not_tried_again(run):
    assert run((False, 1)) == (1, 1)


def test_a_crash_while_loading_is_tried_again(run):
    assert run((False, -signal.SIGABRT), (True, None)) == (0, 2)


def test_a_server_that_worked_is_restarted(run):
    assert run((True, None), (False, 1), (True, None)) == (0, 3)


@pytest.mark.parametrize("start", [(False, -signal.SIGABRT), (True, None)])
def test_after_too_many_it_gives_up(run, start):
    assert run(*[start] * (RESTARTS + 2)) == (1, RESTARTS + 1)

"""The gateway's process in the launcher's hands, with a stand-in for its program."""

import socket

import pytest
from deepseek_flash.config import ConfigError
from deepseek_flash.gateway.keys import hashed
from deepseek_flash.launcher import gateway as module
from deepseek_flash.launcher.environment import REPOSITORY
from deepseek_flash.launcher.gateway import GatewayProcess, GatewaySetup

from tests.unit.streams import wait_for

KEYS = {"DEEPSEEK_FLASH_GATEWAY_KEYS": hashed("a", "key")}


def setup(host="127.0.0.1", port=9000, environ=None):
    repository = REPOSITORY / "model_repository"
    return GatewaySetup.of(host, port, "127.0.0.1:8001", repository, environ or {})


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a gateway whose program is a shell script."""
    made = []

    def start(script, port=9000):
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(program))
        made.append(GatewayProcess(setup(port=port), {"PATH": "/usr/bin:/bin"}, tmp_path / "log"))
        return made[-1]

    yield start
    for process in made:
        process.stop()


def test_without_keys_it_stays_on_this_machine_and_says_so():
    made = setup("0.0.0.0")
    assert made.host == "127.0.0.1" and "this machine only" in made.described
    made = setup("0.0.0.0", environ=KEYS)
    assert made.host == "0.0.0.0" and "with an API key" in made.described
    assert made.described.startswith("OpenAI and Anthropic API on http://127.0.0.1:9000/v1")


def test_a_malformed_setting_is_told_before_anything_starts():
    for environ in ({"DEEPSEEK_FLASH_GATEWAY_KEYS": "x"},
                    {"DEEPSEEK_FLASH_GATEWAY_MAX_BODY_MB": "0"}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"(?i)gateway"):
            setup(environ=environ)


def test_it_gets_what_it_needs_to_know(started, tmp_path):
    process = started('echo "$@"')
    wait_for(lambda: process.exit_code == 0, 5)
    told = (tmp_path / "log").read_text()
    assert "-m deepseek_flash.gateway.server --host 127.0.0.1 --port 9000" in told
    assert "--url 127.0.0.1:8001 --model-json" in told and "deepseek_decoder/1/model.json" in told


def test_one_that_has_ended_is_started_again_but_not_all_the_time(started, monkeypatch):
    process = started("exit 3")
    wait_for(lambda: process.exit_code == 3, 5)
    assert process.keep() == ""
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.0)
    assert "status 3" in process.keep()


def test_only_one_that_never_served_has_failed(started):
    process = started("exit 3")
    wait_for(lambda: process.failed, 5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = started("exit 3", server.getsockname()[1])
        assert process.ready
        wait_for(lambda: process.exit_code == 3, 5)
        assert not process.failed


def test_stop(started, monkeypatch):
    monkeypatch.setattr(module, "STOP_SECONDS", 0.3)
    for script in ("exec sleep 60", 'trap "" TERM; while true; do sleep 0.05; done'):
        process = started(script)
        assert process.exit_code is None and process.keep() == ""
        process.stop()
        assert process.exit_code is None
        process.stop()  # nothing is left to be done


def test_ready_is_who_can_be_reached(started):
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = started("exec sleep 60", server.getsockname()[1])
        assert process.ready
    assert not process.ready

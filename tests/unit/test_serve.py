"""The launcher before it launches: flags, models and ports, each mistake told in one line."""

import os
import socket
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from deepseek_flash import config, serve
from deepseek_flash.launcher import environment, keeper
from deepseek_flash.launcher.environment import LaunchError, Triton, resolve_model, stub_environment
from deepseek_flash.launcher.server import Endpoints, check_ports

from loadtest.served import free_ports

SETTINGS = [setting for kind in config.ALL_CONFIGS.values() for setting in fields(kind)]
SWITCHES = [setting for setting in SETTINGS if isinstance(setting.default, bool)]
VALUES = {
    setting.name: config.default_of(setting) for setting in SETTINGS if setting not in SWITCHES
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Whatever these tests try, no process and no server of the machine is touched."""

    def refuse(*args, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for module in (serve, keeper):
        monkeypatch.setattr(
            module, "find_triton", lambda: Triton(Path("/nowhere/bin/triton"), None)
        )
    for name in list(os.environ):
        if name.startswith(config.PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def taken():
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def environment_of(*argv):
    """What the launcher would hand to Triton."""
    return serve.Launcher(serve.parse_arguments(list(argv)))._environ


def flag(name):
    return "--" + name.replace("_", "-")


# -- flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_without_flags_nothing_is_set(setting):
    assert config.PREFIX + setting.name.upper() not in environment_of()


@pytest.mark.parametrize("name", VALUES)
def test_every_setting_is_a_flag(name):
    variable = config.PREFIX + name.upper()
    assert environment_of(flag(name), VALUES[name])[variable] == VALUES[name]


@pytest.mark.parametrize("setting", SWITCHES, ids=lambda setting: setting.name)
def test_every_switch_is_a_flag_both_ways(setting):
    variable = config.PREFIX + setting.name.upper()
    assert environment_of(flag(setting.name))[variable] == "true"
    assert environment_of(flag(f"no_{setting.name}"))[variable] == "false"


def test_help_names_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        serve.parse_arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines end at hyphens
    assert caught.value.code == 0
    for setting in SETTINGS:
        assert flag(setting.name) in shown
        assert f"(default {config.default_of(setting)})".replace("- ", "-") in shown


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--queue-limits", "5"])
    assert "--queue-limits" in capsys.readouterr().err


def test_a_secret_is_made_in_the_servers_directory_unless_one_is_given(monkeypatch):
    assert config.SECRET not in environment_of()
    monkeypatch.setenv(config.SECRET, "ab" * 32)
    assert environment_of()[config.SECRET] == "ab" * 32


def test_engine_arguments_and_model_are_handed_on(tmp_path):
    found = environment_of("--engine-args", '{"seed": 1}', "--model", str(tmp_path))
    assert found[config.ENGINE_ARGS] == '{"seed": 1}' and found[config.MODEL] == str(tmp_path)


def test_a_flag_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("DEEPSEEK_FLASH_MAX_N", "3")
    assert environment_of()["DEEPSEEK_FLASH_MAX_N"] == "3"
    assert environment_of("--max-n", "4")["DEEPSEEK_FLASH_MAX_N"] == "4"


# -- one line a mistake ----------------------------------------------------------------------


def complaint(capsys, *argv):
    assert serve.main(list(argv)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("serve: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("name", "text"),
    [("max_n", "0"), ("device", "gpu"), ("default_seed", "x"), ("dflash_fingerprint_bits", "16")],
)
def test_a_malformed_setting_is_named_before_anything_starts(capsys, name, text):
    line = complaint(capsys, flag(name), text)
    assert f"DEEPSEEK_FLASH_{name.upper()}: must" in line and text in line


def test_an_unknown_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_FLASH_QUEUE_LIMITS", "5")
    assert "DEEPSEEK_FLASH_QUEUE_LIMITS: unknown" in complaint(capsys)


def test_a_model_that_is_not_there(capsys):
    assert "MODEL=./nowhere: no such directory" in complaint(capsys, "--model", "./nowhere")


def test_a_missing_triton(capsys, monkeypatch):
    def missing():
        raise LaunchError("tritonserver not found; run: make setup")

    monkeypatch.setattr(keeper, "find_triton", missing)
    assert "make setup" in complaint(capsys)


def test_a_taken_port_is_named_before_anything_starts(capsys, taken):
    line = complaint(capsys, "--http-port", str(taken))
    assert f"HTTP_PORT: cannot listen on 127.0.0.1:{taken}" in line and "HTTP_PORT=…" in line


# -- ports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["HTTP_PORT", "GRPC_PORT", "METRICS_PORT"])
def test_whichever_port_is_taken(taken, place):
    ports = dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), free_ports(3), strict=True))
    ports[place] = taken
    with pytest.raises(LaunchError, match=f"^{place}: cannot listen on 127.0.0.1:{taken}"):
        check_ports(Endpoints("127.0.0.1", *ports.values()))


def test_free_ports_are_free():
    check_ports(Endpoints("127.0.0.1", *free_ports(3)))


@pytest.mark.parametrize("ports", [(5, 5, 6), (5, 6, 5), (6, 5, 5)])
def test_ports_must_differ(ports):
    with pytest.raises(LaunchError, match="must differ"):
        check_ports(Endpoints("127.0.0.1", *ports))


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_a_number_that_is_no_port(port):
    with pytest.raises(LaunchError, match=f"^HTTP_PORT: .*{port}"):
        check_ports(Endpoints("127.0.0.1", port, *free_ports(2)))


@pytest.mark.parametrize(("host", "local"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.1", "10.0.0.1")])
def test_the_address_by_which_the_launcher_reaches_its_server(host, local):
    assert Endpoints(host, 1, 2, 3).local_host == local


# -- models and environment ------------------------------------------------------------------


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "MODELS", tmp_path)
    return tmp_path / "smollm2"


def test_a_model_built_here(built):
    with pytest.raises(LaunchError, match="make setup MODEL=smollm2"):
        resolve_model("smollm2")
    built.mkdir()
    (built / "config.json").touch()
    assert resolve_model("smollm2") == str(built)


def test_a_directory_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    assert resolve_model("./weights") == resolve_model("weights") == str(tmp_path / "weights")


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere"])
def test_a_path_without_a_directory(name):
    with pytest.raises(LaunchError, match=f"^MODEL={name}: no such directory"):
        resolve_model(name)


def test_anything_else_is_a_name_on_the_hub():
    assert resolve_model("org/name") == "org/name"


def test_stubs_find_this_interpreter_first_and_keep_what_was_set():
    found = stub_environment({"PATH": "/bin", "TOKENIZERS_PARALLELISM": "true"})
    assert found["PATH"].endswith(f"{os.pathsep}/bin") and found["PATH"] != "/bin"
    assert found["TOKENIZERS_PARALLELISM"] == "true"


def test_what_a_bare_tritonserver_needs_is_printed_for_a_shell(capsys, tmp_path):
    assert serve.main(["--print-env", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"export DEEPSEEK_FLASH_MODEL={tmp_path}\n" in shown and "export PATH=" in shown

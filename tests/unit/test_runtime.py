"""The directory that a server's processes share: private, stable, and swept when it is old."""

import os
import tempfile

import pytest
from deepseek_flash import runtime
from deepseek_flash.runtime import Runtime, open_runtime

from tests.unit.fakes import FACTS


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Where runtimes are made under a bare tritonserver."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"deepseek-flash-{os.getuid()}"


def mode(path):
    return path.stat().st_mode & 0o777


def test_everything_in_it_is_its_owners_alone(tmp_path):
    opened = Runtime(tmp_path / "run")
    opened.publish(FACTS)
    assert mode(opened.path) == 0o700
    assert {file.name: mode(file) for file in opened.path.iterdir()} == {
        "secret": 0o600, "admission": 0o600, "engine.json": 0o600,
    }  # fmt: skip


def test_two_openers_have_one_secret_and_one_board(tmp_path):
    first, second = Runtime(tmp_path / "run"), Runtime(tmp_path / "run")
    assert first.secret == second.secret and len(first.secret) == 32
    first.board.claim("", 1, 0)
    assert second.board.in_flight == 1


def test_two_directories_have_two_secrets(tmp_path):
    assert Runtime(tmp_path / "a").secret != Runtime(tmp_path / "b").secret


def test_a_given_secret_is_not_written_down(tmp_path):
    opened = Runtime(tmp_path / "run", b"s" * 16)
    assert opened.secret == b"s" * 16
    assert not (opened.path / "secret").exists()


@pytest.mark.parametrize("wrong", [0o755, 0o750, 0o701, 0o777])
def test_a_directory_that_others_can_enter_is_refused(tmp_path, wrong):
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(wrong)
    with pytest.raises(PermissionError, match="0700"):
        Runtime(path)


def test_of_two_writers_the_first_secret_stays(tmp_path):
    file = tmp_path / "secret"
    for data in (b"first", b"second"):
        runtime._write_atomically(file, data, keep_first=True)
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]  # no half-written file stays


# -- facts -----------------------------------------------------------------------------------


def test_no_facts_before_the_engine_started(tmp_path):
    with pytest.raises(FileNotFoundError):
        Runtime(tmp_path / "run").facts()


def test_facts_are_read_again_when_there_are_new_ones(tmp_path):
    decoder, scheduler = Runtime(tmp_path / "run"), Runtime(tmp_path / "run")
    for namespace in ("one", "two", "three"):
        facts = runtime.EngineFacts(namespace, "fake", 8, 16)
        decoder.publish(facts)
        os.utime(decoder.path / "engine.json", ns=(5, 5))  # at once: the clock of files is coarse
        assert scheduler.facts() == facts
        assert scheduler.facts() is scheduler.facts()


# -- opening ---------------------------------------------------------------------------------


def test_the_launchers_directory_and_secret(tmp_path):
    opened = open_runtime(str(tmp_path / "run"), b"k" * 16)
    assert opened.path == tmp_path / "run" and opened.secret == b"k" * 16


def test_stages_of_a_bare_server_agree_on_a_directory(base):
    first, second = open_runtime(None, None), open_runtime(None, None)
    assert first.path == second.path and first.path.parent == base
    assert first.secret == second.secret
    assert first.path.name.startswith(f"{os.getppid()}-")


def test_a_bare_servers_base_directory_is_private_too(base):
    open_runtime(None, None)
    assert mode(base) == 0o700


def test_a_base_directory_that_others_prepared_is_refused(base):
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(PermissionError):
        open_runtime(None, None)


def test_directories_of_dead_servers_are_swept(base):
    base.mkdir(mode=0o700)
    alive = runtime._server_name(os.getpid())
    dead = [f"{os.getpid()}-1", f"{2**22 + 1}-5", "some-thing"]  # reused id, no such id, no id
    for name in (alive, *dead):
        (base / name).mkdir()
        (base / name / "secret").touch()
    opened = open_runtime(None, None)
    assert {entry.name for entry in base.iterdir()} == {alive, opened.path.name}

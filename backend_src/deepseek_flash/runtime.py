"""What the processes of one server share: a private directory with secret, board and facts.

The launcher makes the directory and names it in the environment. Under a bare ``tritonserver``
the stages agree on one that is named after their common parent process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from deepseek_flash.admission import AdmissionBoard
from deepseek_flash.contract import EngineFacts

_SECRET, _BOARD, _FACTS = "secret", "admission", "engine.json"


class Runtime:
    """The shared directory of one server. Every file in it is readable by its owner only."""

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        _make_private(path)
        self.path = path
        self.secret = secret or _read_or_make_secret(path / _SECRET)
        self.board = AdmissionBoard(path / _BOARD)
        self._facts_seen: tuple[tuple[int, int], EngineFacts] | None = None

    def publish(self, facts: EngineFacts) -> None:
        """Called by the decoder when its engine is ready."""
        _write_atomically(self.path / _FACTS, msgspec.json.encode(facts))

    def facts(self) -> EngineFacts:
        """The running engine's facts; read again when the decoder published new ones.

        Raises:
            FileNotFoundError: no engine has started yet.
        """
        file = self.path / _FACTS
        info = file.stat()
        version = (info.st_mtime_ns, info.st_ino)  # the clock of files is coarse
        if self._facts_seen is None or self._facts_seen[0] != version:
            self._facts_seen = (version, msgspec.json.decode(file.read_bytes(), type=EngineFacts))
        return self._facts_seen[1]


def open_runtime(directory: str | None, secret: bytes | None) -> Runtime:
    """The runtime of this process's server.

    Args:
        directory: from the environment; None under a bare ``tritonserver``.
        secret: from the environment; None: made and kept in the directory.
    """
    if directory:
        return Runtime(Path(directory), secret)
    base = Path(tempfile.gettempdir()) / f"deepseek-flash-{os.getuid()}"
    _make_private(base)
    _sweep(base)
    return Runtime(base / _server_name(os.getppid()), secret)


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(f"{path} must belong to this user alone (mode 0700); remove it")


def _server_name(pid: int) -> str:
    # The start time tells a server from an earlier one with the same process id. In ticks since
    # boot: psutil's seconds since the epoch move when the clock is set.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{pid}-{fields[19]}"


def _sweep(base: Path) -> None:
    """Remove the directories of servers that are gone."""
    for entry in base.glob("*-*"):
        pid = entry.name.split("-")[0]
        try:
            alive = pid.isdigit() and _server_name(int(pid)) == entry.name
        except (OSError, IndexError):
            alive = False
        if not alive:
            shutil.rmtree(entry, ignore_errors=True)


def _read_or_make_secret(file: Path) -> bytes:
    if not file.exists():
        _write_atomically(file, secrets.token_bytes(32), keep_first=True)
    return file.read_bytes()


def _write_atomically(file: Path, data: bytes, keep_first: bool = False) -> None:
    """Write so that no reader sees half. With ``keep_first`` the first of two writers wins."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
        if not keep_first:
            os.replace(name, file)
            return
        with contextlib.suppress(FileExistsError):
            os.link(name, file)
        os.unlink(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

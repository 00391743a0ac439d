"""One tritonserver in a session of its own: start it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deepseek_flash.launcher.environment import LaunchError, Triton

EXIT_TIMEOUT_SECONDS = 10  # Triton's own limit for requests in flight at its end
TERMINATE_SECONDS = 12.0  # after SIGTERM, before SIGKILL

_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Endpoints:
    """Where a server listens."""

    host: str
    http: int
    grpc: int
    metrics: int
    gateway: int = 0  # 0: there is none

    def named(self) -> dict[str, int]:
        ports = {"HTTP_PORT": self.http, "GRPC_PORT": self.grpc, "METRICS_PORT": self.metrics}
        return {**ports, **({"GATEWAY_PORT": self.gateway} if self.gateway else {})}

    @property
    def local_host(self) -> str:
        """An address by which this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host


def check_ports(endpoints: Endpoints) -> None:
    """Raise LaunchError, naming the port, where one is taken or given twice."""
    ports = endpoints.named()
    if len(set(ports.values())) < len(ports):
        raise LaunchError(f"the ports must differ: {ports}")
    for name, port in ports.items():
        if not 0 < port < 65536:
            raise LaunchError(f"{name}: {port} is no port")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((endpoints.host, port))
            except OSError as error:
                raise LaunchError(
                    f"{name}: cannot listen on {endpoints.host}:{port} ({error.strerror}); "
                    f"choose another with {name}=…"
                ) from None


class Server:
    """A started tritonserver and everything that it starts."""

    def __init__(
        self,
        triton: Triton,
        repository: Path,
        endpoints: Endpoints,
        environ: Mapping[str, str],
        log: Path,
    ) -> None:
        self._shm_prefix = f"deepseek_flash_{os.getpid()}_{secrets.token_hex(4)}_"
        self._shared_memory: set[Path] = set()
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            self._command(triton, repository, endpoints),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Of its own: a Ctrl-C in the terminal is ours to handle, and what is left can be found.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def _command(self, triton: Triton, repository: Path, endpoints: Endpoints) -> list[str]:
        command = [
            str(triton.binary),
            f"--model-repository={repository}",
            f"--http-address={endpoints.host}",
            f"--http-port={endpoints.http}",
            f"--grpc-address={endpoints.host}",
            f"--grpc-port={endpoints.grpc}",
            f"--metrics-address={endpoints.host}",
            f"--metrics-port={endpoints.metrics}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
        ]
        if triton.backends is not None:
            command.append(f"--backend-directory={triton.backends}")
        return command

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """Every process of the server's session, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def stubs(self) -> set[int]:
        """Process ids of the models' Python stubs."""
        ids = set()
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                program = "".join(process.cmdline()[:1])  # a zombie has none
                if program.endswith("triton_python_backend_stub"):
                    ids.add(process.pid)
        return ids

    def note_shared_memory(self) -> None:
        """Remember the shared memory that our processes have mapped, in case they die."""
        mapped = set()
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if f"{_SHARED_MEMORY}/" in line:
                        # By inode: a semaphore is mapped under the name of its making.
                        mapped.add(int(line.split()[4]))
        for path in _SHARED_MEMORY.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in mapped:
                    self._shared_memory.add(path)

    def stop(self, deadline: float) -> None:
        """SIGTERM, then SIGKILL for what is left, then the shared memory.

        Args:
            deadline: on the monotonic clock, when the killing begins at the latest.
        """
        self.note_shared_memory()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        while time.monotonic() < deadline and self.members():
            self.process.poll()  # reaps it
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End every process of the session at once and remove its shared memory."""
        for _ in range(100):  # a process may be born while others are killed
            self.process.poll()
            members = self.members()
            if not members:
                break
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self.process.wait()
        self._log.close()
        for path in {*self._shared_memory, *_SHARED_MEMORY.glob(f"{self._shm_prefix}*")}:
            path.unlink(missing_ok=True)


def die_with_parent() -> None:
    """In the child: get SIGTERM when the launcher is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

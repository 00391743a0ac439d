"""The gateway's process, kept beside a Triton server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_flash import config
from deepseek_flash.gateway.keys import Keyring, listen_address
from deepseek_flash.launcher.server import die_with_parent

STOP_SECONDS = 5.0
RESTART_SECONDS = 30.0  # between two starts, of one that keeps ending


@dataclass(frozen=True)
class GatewaySetup:
    """Where a gateway listens and whom it asks."""

    host: str
    port: int
    keys: bool  # whether callers must have one
    url: str  # Triton's gRPC address
    model_json: Path

    @classmethod
    def of(
        cls, host: str, port: int, url: str, repository: Path, environ: Mapping[str, str]
    ) -> GatewaySetup:
        """Raises ConfigError: of the gateway's own settings, or its keys."""
        settings = config.read_config(config.GatewayConfig, {}, environ)
        keyring = Keyring.of(settings)
        model_json = repository / "deepseek_decoder" / "1" / "model.json"
        return cls(listen_address(host, keyring), port, keyring.required, url, model_json)

    @property
    def described(self) -> str:
        """For who starts it."""
        who = "with an API key" if self.keys else "no API key is configured: this machine only"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"OpenAI and Anthropic API on http://{host}:{self.port}/v1 ({who})"


class GatewayProcess:
    """One gateway, started again when it has ended."""

    def __init__(self, setup: GatewaySetup, environ: Mapping[str, str], log: Path) -> None:
        self._setup = setup
        self._environ = dict(environ)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -RESTART_SECONDS
        self._served = False
        self.start()

    def start(self) -> None:
        self._started = time.monotonic()
        setup = self._setup
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "deepseek_flash.gateway.server", "--host", setup.host,
                    "--port", str(setup.port), "--url", setup.url,
                    "--model-json", str(setup.model_json),
                ],
                env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                # Of its own: a Ctrl-C in the terminal is the launcher's to handle.
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def ready(self) -> bool:
        """Whether somebody can connect."""
        host = "127.0.0.1" if self._setup.host in ("0.0.0.0", "") else self._setup.host
        with contextlib.suppress(OSError), socket.create_connection((host, self._setup.port), 1):
            self._served = True
            return True
        return False

    @property
    def failed(self) -> bool:
        """Ended without ever having served: starting it again would not help."""
        return self.exit_code is not None and not self._served

    def keep(self) -> str:
        """Start it again if it has ended; what happened, or ""."""
        status = self.exit_code
        if status is None or time.monotonic() - self._started < RESTART_SECONDS:
            return ""
        self.start()
        return f"the gateway ended with status {status}; started again (log: {self.log})"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process = None

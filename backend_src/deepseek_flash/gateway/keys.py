"""API keys. Only their hashes are kept; the key itself, as presented, makes the tenant's salt."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import logging
import re
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepseek_flash.config import ConfigError, GatewayConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("deepseek_flash")

_Keys = dict[bytes, str]  # a key's hash → its name; one name may have several, while it changes
_LINE = re.compile(r"([\w.@-]+):([0-9a-f]{64})")


@dataclass(frozen=True)
class Tenant:
    """Who calls. ``secret`` parts the caches; "" where no keys are configured."""

    name: str
    secret: bytes = b""

    def salt(self, callers_own: str) -> str:
        """The ensemble's ``cache_salt``. What a caller adds can only split the tenant further."""
        if not self.secret:
            return callers_own
        return hmac.new(self.secret, callers_own.encode(), hashlib.sha256).hexdigest()


ANYONE = Tenant("")


class Keyring:
    """The configured keys.

    The file is read again when it has changed, so that a key can be revoked while the gateway runs:
    without it nobody can make the salt again under which the tenant's entries were stored. What is
    wrong in it stops the start; later the lines that are right hold, and the log tells of the rest.
    """

    def __init__(self, inline: str = "", file: Path | None = None) -> None:
        self._inline, wrong = _parse("gateway_keys", inline.split(",") if inline else ())
        self._file = file
        self._version: tuple[int, int] | None = None
        self._in_file: _Keys = {}
        for problem in wrong or self._refresh():
            raise ConfigError(problem)
        if file is not None and not self._in_file:
            raise ConfigError(f"gateway_keys_file: no key in {file}")

    @classmethod
    def of(cls, settings: GatewayConfig) -> Keyring:
        """Raises ConfigError: malformed, or the file is not there."""
        file = Path(settings.gateway_keys_file) if settings.gateway_keys_file else None
        return cls(settings.gateway_keys, file)

    @property
    def required(self) -> bool:
        """Whether callers must have a key."""
        return bool(self._inline) or self._file is not None

    def tenant(self, presented: Iterable[str]) -> Tenant | None:
        """Whose keys these are; None: nobody's. Takes the same time whatever they are."""
        for problem in self._refresh():
            log.error(problem)
        found = None
        for key in presented:
            digest = hashlib.sha256(key.encode()).digest()
            for known, name in {**self._inline, **self._in_file}.items():
                if hmac.compare_digest(digest, known):
                    found = Tenant(name, _secret(key))
        return found

    def _refresh(self) -> list[str]:
        """Read the file again if it has changed; what is wrong with it."""
        if self._file is None:
            return []
        try:
            info = self._file.stat()
            version = (info.st_mtime_ns, info.st_ino)
            if version == self._version:
                return []
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            gone = self._version == (0, 0)
            self._in_file, self._version = {}, (0, 0)  # taken away: nobody gets in any more
            return [] if gone else [f"gateway_keys_file: {self._file}: {error.strerror}"]
        self._version = version
        self._in_file, wrong = _parse("gateway_keys_file", lines)
        return wrong


def listen_address(host: str, keyring: Keyring) -> str:
    """Where to listen: without keys on this machine only, whatever was asked for."""
    return host if keyring.required or host in LOOPBACK else "127.0.0.1"


def _parse(setting: str, lines: Iterable[str]) -> tuple[_Keys, list[str]]:
    """The keys of the lines that are right, and what is wrong with the others."""
    keys: _Keys = {}
    wrong = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:  # the line itself is not told: it may hold a key
            wrong.append(f"{setting}: entry {number} is not name:sha256-of-the-key")
        else:
            keys[bytes.fromhex(match.group(2))] = match.group(1)
    return keys, wrong


def _secret(key: str) -> bytes:
    """Known to whoever has the key, and not to whoever reads its hash."""
    return hmac.new(key.encode(), b"deepseek-flash tenant", hashlib.sha256).digest()


def hashed(name: str, key: str) -> str:
    """The line to configure for a key."""
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m deepseek_flash.gateway.keys NAME``: a new key, and the line to keep."""
    parser = argparse.ArgumentParser(prog="deepseek-flash-keys", description=main.__doc__)
    parser.add_argument("name")
    name = parser.parse_args(argv).name
    key = "sk-" + secrets.token_urlsafe(32)
    line = hashed(name, key)
    if _LINE.fullmatch(line) is None:
        print("keys: a name has letters, digits and . _ @ - only", file=sys.stderr)
        return 1
    print(f"the key, shown only now: {key}\nthe line for gateway_keys_file: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The operator's tool for a running server's cache: ``python -m deepseek_flash.operate``.

It works where the server runs and for its user only: the order carries a MAC under the server's
secret, which lies in its private directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from tritonclient.utils import InferenceServerException

from deepseek_flash.config import ConfigError, read_secret
from deepseek_flash.contract import CacheOrder
from deepseek_flash.launcher.environment import LaunchError
from deepseek_flash.launcher.keeper import run_directory
from deepseek_flash.launcher.probe import send_cache_order
from deepseek_flash.runtime import Runtime

TIMEOUT_SECONDS = 30.0


def server_secret(http_port: int) -> bytes:
    """The secret of the server that the launcher started on this port.

    It lies in the server's directory, if it was not given in the environment: then it must be here.

    Raises:
        LaunchError: there is none of this user's.
        ConfigError: the environment's is malformed.
    """
    directory = run_directory(http_port) / "runtime"
    if not directory.is_dir():
        raise LaunchError(f"no server with HTTP_PORT={http_port} was started here")
    return Runtime(directory, read_secret(os.environ)).secret


def render(stats: dict[str, Any]) -> str:
    """The cache's statistics for a reader."""
    lookups, encoder = stats["lookups"], stats["encoder"]
    total = sum(count for kind, count in lookups.items() if kind != "semantic")
    hits = lookups.get("exact", 0) + lookups.get("window", 0)
    references = stats["reference_tokens"]
    encodings = encoder.get("count", 0)
    rows = [
        ("entries", f"{stats['entries']} of {stats['capacity']}, {stats['complete']} complete"),
        ("tokens", str(stats["tokens"])),
        ("tenants", str(stats["tenants"])),
        ("oldest entry", f"{stats['oldest_entry_seconds']:.0f} s"),
        ("windows", f"{stats['windows']} in {stats['sessions']} sessions"
                    f" ({stats['window_policy']})"),
        ("device", f"{stats['device']}, {stats['bytes_on_device'] / 2**20:.1f} MiB"),
        ("lookups", f"{total}, {hits / total:.1%} hits" if total else "none yet"),
        *((f"  {kind}", str(lookups.get(kind, 0))) for kind in ("exact", "window", "miss")),
        ("  semantic", f"{lookups.get('semantic', 0)} (misses with similar prompts)"),
        ("offers", _counts(stats["offers"])),
        ("evictions", _counts(stats["evictions"])),
        ("collisions", str(stats["collisions"])),
        ("encoder", f"{'active' if encoder['active'] else 'off'}, {encodings} runs"
                    + (f" of {encoder['microseconds'] / encodings / 1e3:.1f} ms"
                       if encodings else "")),
        ("references", f"{references.get('right', 0)} of {references.get('tokens', 0)} tokens right"
                       f" ({references.get('guessed', 0)} guessed)"),
    ]  # fmt: skip
    return "\n".join(f"{name:<14} {text}" for name, text in rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deepseek-flash-operate", description=__doc__)
    parser.add_argument("action", choices=("stats", "flush"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000, help="names the server")
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--cache-salt", help="flush this tenant's entries only")
    parser.add_argument("--json", action="store_true", help="stats as they are")
    arguments = parser.parse_args(argv)
    order = CacheOrder(arguments.action, arguments.cache_salt)
    url = f"{arguments.host}:{arguments.grpc_port}"
    try:
        secret = server_secret(arguments.http_port)
        text = send_cache_order(url, order, secret, TIMEOUT_SECONDS)
    except (LaunchError, ConfigError, InferenceServerException, TimeoutError) as error:
        print(f"operate: {error}", file=sys.stderr)
        return 1
    if arguments.action == "flush":
        print(f"{text} entries flushed")
    else:
        print(text if arguments.json else render(json.loads(text)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

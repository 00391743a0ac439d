"""The gateway's process: ``python -m deepseek_flash.gateway.server``. The launcher starts it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from deepseek_flash.config import (
    ConfigError,
    GatewayConfig,
    read_config,
    read_engine_args,
)
from deepseek_flash.gateway.keys import Keyring, listen_address

CLOSE_SECONDS = 3  # for answers in flight, once it is told to stop
KEEP_ALIVE_SECONDS = 75  # longer than what proxies keep idle connections
HEADER_BYTES = 65_536


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deepseek-flash-gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--url", default="127.0.0.1:8001", help="of Triton, gRPC")
    parser.add_argument("--model-json", required=True, type=Path, help="vLLM's engine arguments")
    return parser.parse_args(argv)


async def serve(arguments: argparse.Namespace, settings: GatewayConfig, keyring: Keyring) -> None:
    """Serve until a signal."""
    # These take seconds; a mistake in a setting is told before.
    from deepseek_flash.gateway.app import model_names, open_gateway
    from deepseek_flash.gateway.library import load

    engine_args = read_engine_args(arguments.model_json, os.environ)
    names = model_names(settings, engine_args)
    library = load(engine_args, settings, names)
    gateway = await open_gateway(library, settings, names, arguments.url, keyring)
    host = listen_address(arguments.host, keyring)
    config = uvicorn.Config(
        gateway.app,
        host=host,
        port=arguments.port,
        # Not httptools: it would gather a header of any size.
        http="h11",
        h11_max_incomplete_event_size=HEADER_BYTES,
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    print(f"[gateway] {', '.join(names)} on {host}:{arguments.port}", flush=True)
    server = _QuietServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve()
    await gateway.triton.close()


class _QuietServer(uvicorn.Server):
    """Leaves signals to us: uvicorn would end the process by them, with cancels yet to be sent."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = read_config(GatewayConfig, {}, os.environ)
        keyring = Keyring.of(settings)
        import uvloop

        uvloop.run(serve(arguments, settings, keyring))
    except (ConfigError, RuntimeError) as error:
        print(f"gateway: {error}", file=sys.stderr, flush=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())

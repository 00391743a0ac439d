"""The launcher's command line: ``python -m deepseek_flash.serve``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from dataclasses import fields

import psutil

from deepseek_flash import config
from deepseek_flash.launcher.environment import (
    REPOSITORY,
    LaunchError,
    find_triton,
    resolve_model,
    stub_environment,
)
from deepseek_flash.launcher.keeper import Launcher, run_directory, say


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Every setting of ``config`` is a flag, switches also as ``--no-…``."""
    parser = argparse.ArgumentParser(
        prog="deepseek-flash", description="Serve a DeepSeek-family model through Triton and vLLM."
    )
    parser.add_argument("--model", help="smollm2, tiny-deepseek, a path or a Hugging Face id")
    parser.add_argument("--engine-args", help="JSON object laid over model.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--gateway-port", type=int, default=0, help="OpenAI and Anthropic API; 0: none (default)"
    )
    parser.add_argument("--model-repository", default=str(REPOSITORY / "model_repository"))
    parser.add_argument("--start-timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument(
        "--probe-interval", type=float, default=15.0, help="seconds between health inferences"
    )
    parser.add_argument("--drain-timeout", type=float, default=3600.0, help="seconds")
    parser.add_argument(
        "--drain", action="store_true", help="let a running server finish and stop, and end"
    )
    parser.add_argument(
        "--print-env", action="store_true", help="print what a bare tritonserver needs, and end"
    )
    for model, kind in config.ALL_CONFIGS.items():
        group = parser.add_argument_group(f"settings of {model}")
        for setting in fields(kind):
            flag, name = setting.name.replace("_", "-"), f"setting:{setting.name}"
            text = f"{setting.metadata['help']} (default {config.default_of(setting)})"
            if isinstance(setting.default, bool):
                group.add_argument(
                    f"--{flag}", dest=name, action="store_const", const="true", help=text
                )
                group.add_argument(f"--no-{flag}", dest=name, action="store_const", const="false")
            else:
                group.add_argument(f"--{flag}", dest=name, metavar="VALUE", help=text)
    return parser.parse_args(argv)


def drain(http_port: int) -> int:
    """Tell the launcher of the server on this port to drain; wait until it has ended."""
    file = run_directory(http_port) / "serve.pid"
    try:
        process = psutil.Process(int(file.read_text()))
        process.send_signal(signal.SIGUSR1)
    except (OSError, ValueError, psutil.Error):
        raise LaunchError(f"no server with HTTP_PORT={http_port} was started here") from None
    say(f"draining the server on port {http_port}")
    process.wait()
    return 0


def print_environment(arguments: argparse.Namespace) -> None:
    """Shell lines for running ``tritonserver`` without the launcher."""
    environ = stub_environment(os.environ)
    if arguments.model:
        environ[config.MODEL] = resolve_model(arguments.model)
    triton = find_triton()
    environ["PATH"] = os.pathsep.join([str(triton.binary.parent), environ["PATH"]])
    for name, value in environ.items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")
    if triton.backends is not None:
        print(f"# add: --backend-directory={triton.backends}")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.drain:
            return drain(arguments.http_port)
        if arguments.print_env:
            print_environment(arguments)
            return 0
        return Launcher(arguments).run()
    except (LaunchError, config.ConfigError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

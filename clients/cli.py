"""Commands: ``python -m clients.cli ask "…"``, ``chat`` and ``health``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from tritonclient.utils import InferenceServerException

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import GenerationError, Request, new_cancel_token

Client = GrpcClient | HttpClient


class Interrupted(Exception):
    """Ctrl-C while an answer was running; it was cancelled on the server."""


def print_answer(client: Client, request: Request, timeout: float | None) -> str:
    """Print an answer as it comes and return its text.

    Raises:
        Interrupted: on Ctrl-C, after the request was cancelled on the server.
        GenerationError: the server's message.
    """
    assert request.cancel_token is not None
    pieces = []
    try:
        for chunk in client.stream(request, timeout):
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        client.cancel(request.cancel_token)
        raise Interrupted from None
    finally:
        print(flush=True)
    return "".join(pieces)


def ask(client: Client, arguments: argparse.Namespace) -> None:
    """Answer one prompt: raw text, or as the only message of a chat."""
    prompt = arguments.prompt
    source: dict[str, Any] = (
        {"text": prompt} if arguments.raw else {"messages": [{"role": "user", "content": prompt}]}
    )
    request = Request(**source, sampling=_sampling(arguments), cancel_token=new_cancel_token())
    print_answer(client, request, arguments.timeout)


def chat(client: Client, arguments: argparse.Namespace) -> None:
    """A conversation in the terminal."""
    messages: list[dict[str, str]] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    session = new_cancel_token()
    print("Empty line or Ctrl-D ends; Ctrl-C cancels the running answer.")
    for line in _lines(lambda: input("> ")):
        request = Request(
            messages=[*messages, {"role": "user", "content": line}],
            sampling=_sampling(arguments),
            session_id=session,
            cancel_token=new_cancel_token(),
        )
        try:
            answer = print_answer(client, request, arguments.timeout)
        except Interrupted:
            print("[cancelled]")
            continue
        except GenerationError as error:
            print(f"[error] {error}", file=sys.stderr)
            continue
        messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def _lines(read: Callable[[], str]) -> Iterator[str]:
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            return
        yield line


def health(client: Client, arguments: argparse.Namespace) -> None:
    """Prove with one real token that the server works."""
    request = Request(
        text="ping", sampling={"max_tokens": 1, "temperature": 0, "use_dflash": False},
        stream=False, timeout_ms=int(arguments.timeout * 1000),
    )  # fmt: skip
    answer = client.generate(request, arguments.timeout)
    if len(answer.token_ids) != 1:
        raise GenerationError(f"{len(answer.token_ids)} tokens instead of one")
    print("healthy: one token generated")


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return {**given, **arguments.sampling}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clients.cli", description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001", help="host:port (gRPC) or http://…")
    parser.add_argument("--timeout", type=float, help="seconds for one answer")
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help=ask.__doc__)
    asking.add_argument("prompt")
    asking.add_argument("--raw", action="store_true", help="do not apply the chat template")
    chatting = commands.add_parser("chat", help=chat.__doc__)
    chatting.add_argument("--system", default="")
    for command in (asking, chatting):
        command.add_argument("--max-tokens", type=int, default=256)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument(
            "--sampling", type=_json_object, default={}, metavar="JSON",
            help="more sampling parameters",
        )  # fmt: skip
    commands.add_parser("health", help=health.__doc__)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.command == "health" and arguments.timeout is None:
        arguments.timeout = 10.0
    url = arguments.url
    client: Client = HttpClient(url) if url.startswith("http") else GrpcClient(url)
    run = {"ask": ask, "chat": chat, "health": health}[arguments.command]
    try:
        run(client, arguments)
    except Interrupted:
        print("cancelled", file=sys.stderr)
        return 130
    except (GenerationError, InferenceServerException, httpx.HTTPError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A Locust user class for each door of the server. All take their requests from one feed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from locust import User

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.openai_client import OpenAIClient
from clients.request import Chunk, Request
from loadtest.records import Record
from loadtest.swarm.feed import Feed

TIMEOUT_SECONDS = 600.0  # of an answer: the server is hung
KEY = "OPENAI_API_KEY"  # where the gateway wants one
FEED = Feed()  # of this process
LISTENERS: list[Callable[[Record], None]] = []  # told of every record


class DoorUser(User):  # type: ignore[misc]
    """Sends what the feed has, one request after the other."""

    abstract = True
    door: ClassVar[str]

    def send(self, request: Request) -> Iterator[Chunk]:
        raise NotImplementedError

    def play(self) -> None:
        turn = FEED.take()
        if turn is None:
            return
        record = FEED.play(turn, self.door, self.send)
        for tell in LISTENERS:
            tell(record)
        for name, seconds, length in _shown(record):
            self.environment.events.request.fire(
                request_type=self.door,
                name=name,
                response_time=seconds * 1e3,
                response_length=length,
                exception=RuntimeError(record.error) if record.error else None,
                context={},
            )

    tasks: ClassVar = [play]


def _shown(record: Record) -> Iterator[tuple[str, float, int]]:
    """What Locust's own statistics show: name, seconds, tokens."""
    yield "total", record.total, record.tokens
    if not record.error and record.first_token is not None:
        yield "first token", record.first_token, 1
    if not record.error and record.gaps:
        yield "inter-token (mean)", sum(record.gaps) / len(record.gaps), len(record.gaps)


class GrpcUser(DoorUser):
    """The ensemble by a gRPC stream."""

    door = "grpc"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._client = GrpcClient(environment.parsed_options.grpc)

    def send(self, request: Request) -> Iterator[Chunk]:
        return self._client.stream(request, TIMEOUT_SECONDS)


class GenerateStreamUser(DoorUser):
    """The ensemble by HTTP: server-sent events."""

    door = "generate_stream"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._client = HttpClient(self.host or "http://127.0.0.1:8000")

    def send(self, request: Request) -> Iterator[Chunk]:
        return self._client.stream(request, TIMEOUT_SECONDS)


class OpenAIUser(DoorUser):
    """The gateway: chat completions, as server-sent events."""

    door = "openai"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._client = OpenAIClient(environment.parsed_options.openai, os.environ.get(KEY, ""))

    def send(self, request: Request) -> Iterator[Chunk]:
        return self._client.stream(request, TIMEOUT_SECONDS)

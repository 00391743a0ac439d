"""Locust's entry: plays a plan on one server.

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 \
        --grpc 127.0.0.1:8001 --plan plan.json --records records.jsonl GrpcUser GenerateStreamUser

``make loadtest`` writes plans and calls this for each leg. ``--master`` and ``--worker`` work.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import events

# Before a channel is made. Locust has patched the rest of the standard library already.
grpc.experimental.gevent.init_gevent()

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request otherwise
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Locust puts this folder there

from loadtest.swarm.doors import GenerateStreamUser, GrpcUser, OpenAIUser  # noqa: E402
from loadtest.swarm.phases import Phases, install  # noqa: E402

__all__ = ["GenerateStreamUser", "GrpcUser", "OpenAIUser", "Phases"]


def options(parser: Any) -> None:
    parser.add_argument("--plan", default="", help="JSON: the legs to play")
    parser.add_argument("--records", default="", help="JSON lines, appended: a record a request")
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="where gRPC users connect to")
    parser.add_argument("--openai", default="http://127.0.0.1:9000", help="the gateway")


def start(environment: Any, **_: Any) -> None:
    given = environment.parsed_options
    if not given.plan:
        sys.exit("locustfile: --plan is missing; make loadtest writes one")
    try:
        install(environment, Path(given.plan), Path(given.records) if given.records else None)
    except (ValueError, OSError) as error:
        sys.exit(f"locustfile: {error}")


events.init_command_line_parser.add_listener(options)
events.init.add_listener(start)

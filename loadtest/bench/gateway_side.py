"""The server that the gateway's benchmarks ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.served import Served, serving

MODEL_LENGTH = 2048
NAME = "model"  # by which it is asked, whatever model it is


@contextmanager
def serving_gateway(model: str, *flags: str) -> Iterator[Served]:
    """A server with a gateway in front."""
    given = ["--engine-args", json.dumps({"max_model_len": MODEL_LENGTH}),
             "--gateway-model-names", NAME, *flags]  # fmt: skip
    with serving(model, given, gateway=True) as served:
        yield served

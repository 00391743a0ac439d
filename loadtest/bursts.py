"""The check that bursts ran: a profile of the engine must show a range for each that is counted."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

from deepseek_flash import metrics
from deepseek_flash.launcher.probe import send_control
from deepseek_flash.operate import server_secret

from loadtest.records import Leg
from loadtest.served import Served

RANGE = b'"dspark: burst"'  # as a profile's JSON names it
TIMEOUT_SECONDS = 300.0  # a profile is written when it ends


def profiler_config(traces: Path) -> dict[str, object]:
    """For the engine's arguments; nothing is recorded before an order says so."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }


def check_bursts(served: Served, play: Callable[[], Leg], traces: Path) -> Mapping[str, float]:
    """Profile a leg; how many ranges it shows, and how many bursts were counted meanwhile.

    Raises:
        InferenceServerException: the server was started without ``profiler_config``.
    """
    secret = server_secret(served.port)
    old = set(traces.rglob("*.json*"))
    send_control(served.grpc, "start_profile", secret, TIMEOUT_SECONDS)
    leg = play()
    send_control(served.grpc, "stop_profile", secret, TIMEOUT_SECONDS)
    found = set(traces.rglob("*.json*")) - old
    passes = leg.counted.get(metrics.PASSES.name, {})
    return {"ranges": sum(map(_ranges, found)), "counter": passes.get("burst", 0.0)}


def _ranges(path: Path) -> int:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return content.count(RANGE)

"""Publishes a Recorder's changes as Triton metrics, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deepseek_flash.metrics import (
    CONFIG_INFO,
    HEARTBEAT,
    Kind,
    Metric,
    Recorder,
    Series,
    known_series,
)

INTERVAL_SECONDS = 1.0
# After each call. Triton's stub frees a call's message in shared memory when it has its answer,
# while the server's thread may still be about to wake up on a lock in it. If the next call's
# message takes the place too early, that thread hangs or the server aborts (docs/platform.md).
PAUSE_SECONDS = 0.01


class MetricsPublisher:
    """One a process, for its ``model``. ``before`` is called ahead of each round, for gauges."""

    def __init__(
        self,
        model: str,
        recorder: Recorder,
        metrics: tuple[Metric, ...],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._labels = (("model", model),)
        self._recorder = recorder
        self._before = before
        self._families: dict[str, Any] = {}
        self._metrics: dict[Series, Any] = {}
        self._zeros = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is left and stop the thread."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._publish()
        for kept in (self._metrics, self._families):  # a call each, too: it is deleted in Triton
            while kept:
                kept.popitem()
                time.sleep(PAUSE_SECONDS)

    def _run(self) -> None:
        for metric in self._zeros:
            for series in known_series(metric):
                self._metric(series)  # made: it is there with 0
        while not self._stop.wait(INTERVAL_SECONDS):
            self._publish()

    def _publish(self) -> None:
        self._before()
        self._recorder.count(HEARTBEAT, labels=self._labels)
        for series, value in self._recorder.take().items():
            if series.kind is Kind.GAUGE:
                self._metric(series).set(value)
            elif value:
                self._metric(series).increment(value)
            else:
                continue
            time.sleep(PAUSE_SECONDS)

    def _metric(self, series: Series) -> Any:
        if series not in self._metrics:
            self._metrics[series] = self._family(series).Metric(labels=dict(series.labels))
            time.sleep(PAUSE_SECONDS)
        return self._metrics[series]

    def _family(self, series: Series) -> Any:
        if series.name not in self._families:
            kinds = self._pb.MetricFamily
            kind = kinds.GAUGE if series.kind is Kind.GAUGE else kinds.COUNTER
            self._families[series.name] = kinds(
                name=series.name, description=series.help, kind=kind
            )
            time.sleep(PAUSE_SECONDS)
        return self._families[series.name]


def record_config(recorder: Recorder, model: str, settings: Mapping[str, str]) -> None:
    """Show the settings in force as one series a key."""
    for key, value in settings.items():
        labels = (("key", key), ("model", model), ("value", value))
        recorder.gauge(CONFIG_INFO, 1.0, labels)

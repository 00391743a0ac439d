"""The publisher against a stand-in for Triton's metrics: what is there, and when."""

import sys
import time
from types import SimpleNamespace

import pytest
from deepseek_flash import triton_metrics
from deepseek_flash.metrics import Kind, Metric, Recorder
from deepseek_flash.triton_metrics import MetricsPublisher

COUNTER = Metric("c_total", Kind.COUNTER, "help")
BY_KIND = Metric("k_total", Kind.COUNTER, "help", labels={"kind": ("x", "y")})
INFO = Metric("info", Kind.GAUGE, "help", labels={"value": ()})
HISTOGRAM = Metric("h", Kind.HISTOGRAM, "help", (1.0,))


@pytest.fixture
def shown(monkeypatch):
    """What Triton would show: (name, labels) → value."""
    values = {}

    class Series:
        def __init__(self, name, labels):
            self._key = name, tuple(labels.items())
            assert self._key not in values, "made twice"
            values[self._key] = 0.0

        def increment(self, value):
            values[self._key] += value

        def set(self, value):
            values[self._key] = value

    class Family:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, name, description, kind):
            self._name = name

        def Metric(self, labels):
            return Series(self._name, labels)

    utils = SimpleNamespace(MetricFamily=Family)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(triton_metrics, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(triton_metrics, "INTERVAL_SECONDS", 3600.0)
    return values


def test_what_is_known_beforehand_is_there_with_0(shown):
    recorder = Recorder()
    publisher = MetricsPublisher("m", recorder, (COUNTER, BY_KIND, INFO, HISTOGRAM))
    expected = {
        ("c_total", ()), ("k_total", (("kind", "x"),)), ("k_total", (("kind", "y"),)),
        ("h_bucket", (("le", "1"),)), ("h_bucket", (("le", "+Inf"),)), ("h_sum", ()),
        ("h_count", ()),
    }  # fmt: skip
    deadline = time.monotonic() + 10
    while shown.keys() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    assert shown == dict.fromkeys(expected, 0.0)
    recorder.count(BY_KIND, 2, (("kind", "y"),))
    recorder.gauge(INFO, 1, (("value", "z"),))
    publisher.close()
    happened = {
        ("k_total", (("kind", "y"),)): 2, ("info", (("value", "z"),)): 1,
        ("deepseek_flash_heartbeat_total", (("model", "m"),)): 1,
    }  # fmt: skip
    assert shown == {**dict.fromkeys(expected, 0.0), **happened}

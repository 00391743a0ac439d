"""Counting in the process: sums, histogram buckets and rolling windows against naive ones."""

import math
import threading

import pytest
from deepseek_flash import metrics
from deepseek_flash.contract import Cancelled, LookupResult, RequestError
from deepseek_flash.decoder.replay import Use
from deepseek_flash.dflash.entry import Eviction, Offer
from deepseek_flash.dspark.drafts import Source
from deepseek_flash.dspark.paths import Path
from deepseek_flash.metrics import (
    Kind,
    Metric,
    Recorder,
    Rolling,
    count_error,
    histogram_series,
    known_series,
)
from hypothesis import given
from hypothesis import strategies as st

COUNTER = Metric("c", Kind.COUNTER, "help")
GAUGE = Metric("g", Kind.GAUGE, "help")
HISTOGRAM = Metric("h", Kind.HISTOGRAM, "help", (0.25, 1.0, 4.0))


def taken(recorder):
    """What a recorder gives away, by (name, labels)."""
    return {(series.name, series.labels): value for series, value in recorder.take().items()}


def test_counters_add_up_by_label():
    recorder = Recorder()
    recorder.count(COUNTER)
    recorder.count(COUNTER, 2.5)
    recorder.count(COUNTER, labels=(("reason", "x"),))
    assert taken(recorder) == {("c", ()): 3.5, ("c", (("reason", "x"),)): 1.0}


def test_a_gauge_is_its_last_value():
    recorder = Recorder()
    recorder.gauge(GAUGE, 5)
    recorder.gauge(GAUGE, 0)
    assert taken(recorder) == {("g", ()): 0}


def test_what_was_taken_is_not_given_again():
    recorder = Recorder()
    recorder.count(COUNTER)
    assert taken(recorder) and not taken(recorder)
    recorder.count(COUNTER)
    assert taken(recorder) == {("c", ()): 1.0}


def test_threads_lose_no_count():
    recorder = Recorder()
    threads = [
        threading.Thread(target=lambda: [recorder.count(COUNTER) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken(recorder) == {("c", ()): 2000.0}


# Multiples of a power of two add up exactly; some lie on a bucket's border.
OBSERVATIONS = st.lists(
    st.tuples(st.integers(0, 80).map(lambda n: n / 16), st.integers(1, 3)), max_size=20
)


@given(OBSERVATIONS)
def test_a_histogram_counts_as_prometheus_defines_it(observations):
    recorder = Recorder()
    for value, times in observations:
        recorder.observe(HISTOGRAM, value, times)
    every = [value for value, times in observations for _ in range(times)]
    expected = {
        ("h_bucket", (("le", label),)): sum(value <= bound for value in every)
        for label, bound in (("0.25", 0.25), ("1", 1.0), ("4", 4.0), ("+Inf", math.inf))
    }
    expected |= {("h_sum", ()): sum(every), ("h_count", ()): len(every)}
    found = taken(recorder)
    assert {series: found.get(series, 0) for series in expected} == expected
    assert set(found) <= set(expected)


def test_histogram_series():
    buckets, total, count = histogram_series(HISTOGRAM)
    assert [series.labels[0][1] for series in buckets] == ["0.25", "1", "4", "+Inf"]
    assert (total.name, count.name) == ("h_sum", "h_count")
    assert {series.kind for series in (*buckets, total, count)} == {Kind.COUNTER}


STAGES = {
    "scheduler": metrics.SCHEDULER_METRICS,
    "cache": metrics.CACHE_METRICS,
    "decoder": metrics.DECODER_METRICS,
}
ALL = {metric for published in STAGES.values() for metric in published}


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_every_metric_is_well_formed(metric):
    assert metric.help
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    labels = [f"{bound:g}" for bound in metric.buckets]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_has_each_name_once(stage):
    assert len({metric.name for metric in STAGES[stage]}) == len(STAGES[stage])


def test_a_name_means_the_same_in_each_process():
    facts = {(metric.name, metric.kind, metric.help, *metric.labels) for metric in ALL}
    assert len(facts) == len({metric.name for metric in ALL})


# -- series that are there before anything happened ------------------------------------------


def test_known_series():
    def labels(**values):
        return [s.labels for s in known_series(Metric("c", Kind.COUNTER, "help", labels=values))]

    assert labels() == [()]
    assert labels(a=("1", "2"), b=("x",)) == [
        (("a", "1"), ("b", "x")),
        (("a", "2"), ("b", "x")),
    ]
    assert labels(a=("1", "2"), unknown=()) == []
    buckets, total, count = histogram_series(HISTOGRAM)
    assert known_series(HISTOGRAM) == [*buckets, total, count]


def values_of(kinds):
    return {str(kind.value) for kind in kinds}


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        (metrics.LOOKUPS, "result", (values_of(LookupResult) - {"off"}) | {"semantic"}),
        (metrics.PATH_TOKENS, "path", values_of(Path)),
        (metrics.PASSES, "path", values_of(Path)),
        (metrics.DRAFTS_PROPOSED, "source", {source.name.lower() for source in Source}),
        (metrics.DRAFTS_ACCEPTED, "source", {source.name.lower() for source in Source}),
        (metrics.REPLAYS, "use", values_of(Use)),
        (metrics.OFFERS, "result", values_of(Offer)),
        (metrics.EVICTIONS, "reason", values_of(set(Eviction) - {Eviction.REMOVED})),
        # A cancelled request has a counter of its own.
        (
            metrics.ERRORS,
            "reason",
            {kind.reason for kind in {RequestError, *RequestError.__subclasses__()} - {Cancelled}},
        ),
    ],
    ids=lambda it: it.name if isinstance(it, Metric) else "",
)
def test_all_values_of_a_label_are_known(metric, label, values):
    assert set(metric.labels[label]) == values


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_is_one_of_the_series_of_its_stage(stage):
    errors = next(metric for metric in STAGES[stage] if metric.name == metrics.ERRORS.name)
    recorder = Recorder()
    count_error(recorder, stage, ValueError())
    assert recorder.take().keys() < set(known_series(errors))
    assert {dict(series.labels)["stage"] for series in known_series(errors)} == {stage}


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_has_not_too_many_series(stage):
    """Each is made by a call of its own at the start, and deleted by one at the end."""
    assert sum(len(known_series(metric)) for metric in STAGES[stage]) < 150


# -- rolling ---------------------------------------------------------------------------------


@pytest.fixture
def rolling(monkeypatch):
    monkeypatch.setattr(metrics.time, "monotonic", lambda: 1000.0)
    return Rolling(seconds=60.0)


def test_nothing_yet(rolling):
    assert rolling.quantile(0.95, 1000.0) == 0.0 and rolling.rate(1000.0) == 0.0


def test_old_events_are_forgotten(rolling):
    rolling.add(5.0, 1000.0)
    rolling.add(1.0, 1050.0)
    assert rolling.quantile(1.0, 1060.0) == 5.0  # sixty seconds old: still counts
    assert rolling.quantile(1.0, 1060.5) == 1.0
    assert rolling.quantile(1.0, 1111.0) == 0.0


def test_the_rate_is_over_the_window_or_the_time_since_the_start(rolling):
    rolling.add(30.0, 1000.0)
    assert rolling.rate(1000.0) == 30.0  # never less than a second
    assert rolling.rate(1010.0) == 3.0
    rolling.add(60.0, 1100.0)
    assert rolling.rate(1100.0) == 1.0


@given(
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(values, q):
    rolling = Rolling(seconds=60.0)
    for value in values:
        rolling.add(value, 1000.0)
    enough = (v for v in sorted(values) if sum(other <= v for other in values) >= q * len(values))
    assert rolling.quantile(q, 1000.0) == next(enough)

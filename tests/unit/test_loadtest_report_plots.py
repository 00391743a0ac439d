"""The plots of a load test's report, and the report with them."""

import re
import xml.etree.ElementTree as ET

import pytest

from loadtest.records import CLOSED, MIXED, OFF, ON
from loadtest.report import plots
from loadtest.report.html import report
from loadtest.report.summary import summarise
from tests.unit.loadtest_runs import leg, moment, published, run, whole_run


def test_the_report_needs_nothing_beside_it():
    played = whole_run()
    page = report(played, summarise(played), [], "now")
    assert page.count("<svg") == 8 and not re.search("<(script|link|img|iframe|object|image)", page)
    assert not re.search(r"(src|href)=\"[^#]", page)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_a_run_with_nothing_in_it_can_be_drawn():
    legs = [leg(records=[], seconds=0.0, before={}, after={})]
    assert plots.latencies(MIXED, legs) and plots.over_time(MIXED, legs)
    assert plots.paths(summarise(run())["phases"]) and plots.curve([])


# -- plots -----------------------------------------------------------------------------------


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_plots_are_svg_with_titles_and_units():
    played = whole_run()
    legs = [it for it in played.legs if it.phase == MIXED]
    drawn = {
        plots.latencies(MIXED, legs): ("mixed: first token", "seconds", "share of requests"),
        plots.over_time("mixed, closed loop", [it for it in legs if it.loop == CLOSED]): (
            "mixed, closed loop: throughput", "tokens/s", "share of lookups", OFF, ON
        ),
        plots.paths(summarise(played)["phases"]): ("share of tokens", "mixed, on", "60%", "fast"),
        plots.curve([(0.0, 0.99, 1.01), (0.5, 1.5, None), (0.8, 2.5, 0.4)]): (
            "on / off", "tokens/s", "first token p95"
        ),
    }  # fmt: skip
    for svg, expected in drawn.items():
        assert svg.startswith("<svg") and set(expected) <= set(texts(svg))


def test_the_same_run_gives_the_same_plot():
    legs = whole_run().legs
    assert plots.latencies(MIXED, legs) == plots.latencies(MIXED, legs)


def test_a_distribution_ends_at_all_of_them():
    assert plots._shares([3.0, 1.0, 2.0]) == ([1.0, 2.0, 3.0], [1 / 3, 2 / 3, 1.0])
    assert plots._shares([]) == ([], [])
    x, y = plots._shares(list(range(100_001)))
    assert len(x) <= plots.MOST_POINTS + 1 and (x[-1], y[-1]) == (100_000, 1.0)


def test_rates_of_a_leg_over_time():
    def tokens(n):
        return {"vllm:generation_tokens_total": {"": float(n)}}

    moments = [moment(at, more=tokens(10 * at)) for at in range(1, 12)]
    # Later than the last answer: it began with Locust's start.
    played = leg(seconds=10.0, moments=moments, after=published(9, tokens(220)))
    x, y = plots._in_a_row([played, played], plots._tokens_per_s)
    assert x == [0, 5, 5, 11, 11, 11, 16, 16, 22, 22]
    assert y[:4] == [10.0, 10.0, pytest.approx(170 / 6), pytest.approx(170 / 6)]
    assert y[4] != y[4] and y[5:9] == y[:4]
    assert plots._in_a_row([leg(seconds=0.0)], plots._tokens_per_s)[0] == [0.0]


def test_a_hit_rate_of_no_lookups_is_none():
    assert plots._hit_rate({}, 1.0) is None
    assert plots._hit_rate({"dflash_lookups_total": {"semantic": 1.0}}, 1.0) is None
    assert plots._hit_rate({"dflash_lookups_total": {"exact": 1.0, "miss": 3.0}}, 1.0) == 0.25

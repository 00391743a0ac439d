"""What a load test's summary says of its records and its servers' metrics."""

import pytest
from deepseek_flash import metrics

from loadtest.records import BURST, MIXED, OFF, ON, OPEN, PHASES, WARM_UP, Moment
from loadtest.report.counts import Counts, counters, gauges, restarts, rises
from loadtest.report.figures import BY_NAME, COLUMNS, FIGURES, RATIO
from loadtest.report.summary import summarise
from tests.unit.loadtest_runs import failed, leg, moment, published, record, run, whole_run

NAMED_BY_THE_ISSUE = {
    "tokens_per_s", "ttft_p50", "ttft_p95", "ttft_p99", "e2e_p50", "e2e_p95", "e2e_p99", "tail",
    "itl_p95", "errors", "hit_rate", "path_fast", "path_burst", "path_slow",
}  # fmt: skip


def figures(*legs, phase=MIXED, column=ON):
    return summarise(run(*legs))["phases"][phase][column]


def test_every_figure_is_there_for_every_phase_and_column():
    summary = summarise(run())
    assert set(BY_NAME) >= NAMED_BY_THE_ISSUE and len(BY_NAME) == len(FIGURES)
    assert list(summary["phases"]) == list(PHASES)
    for phase in summary["phases"].values():
        assert list(phase) == list(COLUMNS)
        for found in phase.values():
            assert list(found) == list(BY_NAME) and set(found.values()) == {None}


def test_the_head_has_what_was_sent():
    legs = [leg(WARM_UP, part=part, side=side) for part in (0, 1) for side in (OFF, ON)]
    other = leg(MIXED, OPEN, OFF), leg(MIXED, OPEN, ON, digest="d2")
    summary = summarise(run(*legs, *other, bursts={"ranges": 3, "counter": 3.0}))
    assert summary["traces"] == {
        "warmup/closed/0": "d1", "warmup/closed/1": "d1", "mixed/open/0": "d1 != d2",
    }  # fmt: skip
    head = {name: summary[name] for name in ("scale", "model", "seed", "repeat_share", "prompts")}
    assert head == {"scale": "cpu", "model": "smollm2", "seed": 7, "repeat_share": 0.6,
                    "prompts": ""}  # fmt: skip
    assert summary["doors"] == ["grpc", "generate_stream"] and summary["capacity"] == 3.5
    assert summary["bursts"] == {"ranges": 3, "counter": 3.0}


# -- what the clients saw --------------------------------------------------------------------


def test_tokens_per_second_are_those_of_the_closed_loops_together():
    legs = (
        leg(records=[record(tokens=30), record(tokens=50)], seconds=2.0),
        leg(records=[record(tokens=20), failed("no", ended=9.0)], seconds=8.0, part=1),
        leg(loop=OPEN, records=[record(tokens=999)], seconds=1.0),
    )
    assert figures(*legs)["tokens_per_s"] == 10.0
    assert figures(legs[2])["tokens_per_s"] is None
    assert figures(leg(records=[], seconds=0.0))["tokens_per_s"] is None


def test_latencies_are_those_of_the_open_loops():
    slow = leg(records=[record(first=50.0, ended=90.0)])
    quick = [record(due=float(n), first=n + n / 100, ended=n + n / 10) for n in range(1, 101)]
    found = figures(slow, leg(loop=OPEN, records=quick[:50]),
                    leg(loop=OPEN, records=quick[50:], part=1))  # fmt: skip
    assert [found[f"ttft_p{q}"] for q in (50, 95, 99)] == pytest.approx([0.5, 0.95, 0.99])
    assert [found[f"e2e_p{q}"] for q in (50, 95, 99)] == pytest.approx([5.0, 9.5, 9.9])
    assert figures(slow)["ttft_p50"] == 50.0 and figures(slow)["e2e_p99"] == 90.0


def test_what_is_sent_late_is_slow():
    late = record(due=1.0, sent=3.0, first=3.5, ended=4.0)
    punctual = record(due=1.0, sent=1.04, first=1.5, ended=2.0)
    found = figures(leg(loop=OPEN, records=[late, punctual, failed("no", due=0.0, sent=0.06)]))
    assert (found["ttft_p99"], found["e2e_p99"]) == (2.5, 3.0)
    assert (found["late"], found["late_p95"]) == (2.0, 2.0)
    closed = figures(leg(records=[punctual]))
    assert closed["late"] is None and closed["late_p95"] is None


def test_failed_requests_are_counted_and_have_no_latencies():
    found = figures(leg(records=[failed("no", ended=99.0), record(ended=1.0)]),
                    leg(records=[failed("no")], part=1))  # fmt: skip
    assert (found["errors"], found["requests"], found["e2e_p99"]) == (2.0, 3.0, 1.0)
    nothing = figures(leg(records=[failed("no")]))
    assert all(nothing[name] is None for name in ("ttft_p50", "e2e_p99", "tail", "itl_p95"))
    assert nothing["errors"] == 1.0 and nothing["tokens_per_s"] == 0.0


def test_an_answer_without_a_token_has_no_first_token():
    found = figures(leg(records=[record(first=None, ended=3.0, tokens=0)]))
    assert (found["ttft_p50"], found["e2e_p50"], found["tail"]) == (None, 3.0, None)


def test_the_tail_is_of_requests_for_which_the_engine_ran():
    ran = [record(ended=float(n), tokens=10) for n in (1, 2, 3)]
    replayed = record(ended=0.001, prompt_tokens=8, cached_tokens=8)
    found = figures(leg(records=[*ran, *[replayed] * 50]))
    assert found["tail"] == pytest.approx(0.3 / 0.2)
    assert figures(leg(records=[replayed]))["tail"] is None


def test_gaps_of_all_requests_together():
    gaps = [record(gaps=tuple([0.01] * 19)), record(gaps=(0.5,)), record()]
    assert figures(leg(records=gaps))["itl_p95"] == 0.01
    assert figures(leg(records=[record()]))["itl_p95"] is None


# -- what the server counted -----------------------------------------------------------------


def counted(**series):
    return {"after": published(5, more=series)}


def test_shares_of_paths_and_of_drafts():
    found = figures(
        leg(**counted(
            dspark_tokens_total={"fast": 60.0, "slow": 30.0},
            dspark_drafts_proposed_total={"reference": 8.0, "history": 2.0},
            dspark_drafts_accepted_total={"reference": 6.0},
        )),
        leg(loop=OPEN, **counted(dspark_tokens_total={"burst": 10.0})),
    )  # fmt: skip
    assert [found[f"path_{path}"] for path in ("fast", "burst", "slow")] == [0.6, 0.1, 0.3]
    assert (found["drafts_proposed"], found["drafts_accepted"]) == (10.0, 0.6)
    assert (found["drafts_proposed_reference"], found["drafts_accepted_reference"]) == (8.0, 0.75)
    assert (found["drafts_proposed_history"], found["drafts_accepted_history"]) == (2.0, 0.0)
    assert (found["drafts_proposed_chain"], found["drafts_accepted_chain"]) == (0.0, None)


def test_hits_by_kind():
    lookups = {"exact": 5.0, "window": 1.0, "miss": 4.0, "semantic": 2.0}
    found = figures(leg(**counted(dflash_lookups_total=lookups)))
    shares = [found[name] for name in ("hit_rate", "hit_exact", "hit_window", "hit_semantic")]
    assert shares == [0.6, 0.5, 0.1, 0.2]
    # The neighbours of a miss that was counted before the leg.
    early = figures(leg(**counted(dflash_lookups_total={"semantic": 2.0})))
    assert early["hit_rate"] is None and early["hit_semantic"] is None


def test_the_last_round_says_whether_the_cache_is_warm():
    first = leg(WARM_UP, **counted(dflash_lookups_total={"miss": 10.0}))
    last = leg(WARM_UP, part=1, **counted(
        dflash_lookups_total={"exact": 9.0, "miss": 1.0}, dspark_tokens_total={"fast": 1.0}
    ))  # fmt: skip
    for legs in ((first, last), (last, first)):
        assert figures(*legs, phase=WARM_UP)["hit_rate"] == 0.9
    parts = (leg(part=part, **counted(dflash_lookups_total=lookups))
             for part, lookups in enumerate(({"miss": 10.0}, {"exact": 10.0})))  # fmt: skip
    assert figures(*parts)["hit_rate"] == 0.5


def test_a_server_without_cache_and_guesses():
    found = figures(leg(side=OFF, **counted(dspark_tokens_total={"slow": 40.0})), column=OFF)
    assert [found[f"path_{path}"] for path in ("fast", "burst", "slow")] == [0.0, 0.0, 1.0]
    assert found["hit_rate"] is None and found["drafts_accepted"] is None
    # A counter's series appears with its first increment: the server publishes, so it is 0.
    assert found["preemptions"] == found["replayed_whole"] == found["drafts_proposed"] == 0.0


def test_what_no_one_published_is_not_known():
    found = figures(leg(before={}, after={}))
    unknown = ("preemptions", "restarts", "replayed_whole", "drafts_proposed", "path_slow",
               "hit_rate", "memory_peak")  # fmt: skip
    assert [found[name] for name in unknown] == [None] * len(unknown)


def test_replays_preemptions_and_memory():
    found = figures(
        leg(
            before=published(1, more={"vllm:num_preemptions_total": {"": 2.0}}),
            after=published(9, more={
                "vllm:num_preemptions_total": {"": 5.0},
                "deepseek_flash_replays_total": {"whole": 4.0, "beginning": 1.0, "nothing": 7.0},
            }),
            moments=(moment(1.0, 5), moment(2.0, 9), moment(3.0, 7)),
            locust_cpu=0.2,
        ),
        leg(part=1, locust_cpu=0.1, idle_cpu=0.05, seconds=30.0),
    )  # fmt: skip
    assert (found["preemptions"], found["memory_peak"]) == (3.0, 9.0)
    assert (found["replayed_whole"], found["replayed_beginning"]) == (4.0, 1.0)
    assert (found["locust_cpu"], found["idle_cpu"]) == (0.2, pytest.approx(0.04))


def test_ratios_are_on_by_off():
    phases = summarise(whole_run())["phases"]
    for phase in (WARM_UP, MIXED, BURST):
        assert phases[phase][RATIO]["tokens_per_s"] == 2.0
        assert phases[phase][RATIO]["e2e_p99"] == 0.5
        assert phases[phase][RATIO]["path_slow"] == 0.25
        # By nothing, by what is not known, and of nothing by nothing.
        assert [phases[phase][RATIO][name] for name in ("path_fast", "hit_rate", "errors")] == [
            None, None, None,
        ]  # fmt: skip
    assert figures(leg(), column=RATIO)["tokens_per_s"] is None


# -- counters that begin anew ----------------------------------------------------------------


def test_a_counter_that_fell_began_anew():
    def at(value):
        return {"dspark_tokens_total": {"slow": value}}

    assert rises(at(10.0), at(15.0), at(3.0), at(4.0)) == at(9.0)
    # Not there for a moment: not scraped, or not counted since the restart.
    assert rises(at(10.0), {}, at(12.0)) == at(2.0)
    assert rises(at(10.0), {}, at(2.0)) == at(2.0)
    assert rises({}, at(2.0)) == at(2.0)


def test_a_restart_is_seen_in_the_heartbeats_and_spoils_no_count():
    def at(beats, tokens):
        return published(beats, more={"dspark_tokens_total": {"slow": tokens}})

    moments = (Moment(1.0, at(6, 120.0), 1), Moment(2.0, at(1, 7.0), 1))
    died = leg(before=at(5, 100.0), moments=moments, after=at(8, 10.0))
    assert restarts([died]) == 1.0
    assert Counts.of([died]).count(metrics.PATH_TOKENS) == 30.0
    assert restarts([leg(after=published(9)), leg(before=published(2), part=1)]) == 1.0
    assert restarts([leg(), leg(before=published(6), after=published(7), part=1)]) == 0.0
    assert restarts([leg(before={}, after={})]) is None


def test_what_the_report_shows_of_the_servers():
    series = {
        "dspark_steps_total": {"": 3.0},
        "vllm:num_requests_running": {"": 4.0},
        "dflash_lookup_seconds_bucket": {"0.1": 3.0},
        "dflash_lookup_seconds_count": {"": 3.0},
        "nv_cpu_utilization": {"": 0.5},
        "deepseek_flash_errors_total": {"internal,decoder": 2.0},
    }
    found = leg(moments=(moment(1.0), moment(2.0, more=series)), after=published(5, more=series))
    assert counters([found]) == {
        "dspark_steps_total": 3.0,
        "dflash_lookup_seconds_count": 3.0,
        "deepseek_flash_errors_total{internal,decoder}": 2.0,
        **{f"deepseek_flash_heartbeat_total{{{stage}}}": 4.0
           for stage in ("dspark_scheduler", "dflash_cache", "deepseek_decoder")},
    }  # fmt: skip
    assert gauges([found]) == {}
    busy = moment(3.0, more={**series, "vllm:num_requests_running": {"": 2.0}})
    assert gauges([leg(moments=(*found.moments, busy))]) == {"vllm:num_requests_running": 3.0}

"""The limits of a load test: what the file may say, and when they are kept."""

import pytest

from loadtest.records import MIXED, OFF, ON, OPEN
from loadtest.report.figures import BY_NAME
from loadtest.report.summary import summarise
from loadtest.report.verdict import SLO, Check, Limit, SloError, check_all, passed, read_limits
from tests.unit.loadtest_runs import failed, leg, record, run, whole_run


def limits(tmp_path, text):
    path = tmp_path / "slo.toml"
    path.write_text(text, encoding="utf-8")
    return read_limits(path)


def checked(run, *limits):
    return {check.name: check for check in check_all(run, summarise(run), limits)}


# -- the file --------------------------------------------------------------------------------


def test_our_own_limits_are_those_of_the_issue():
    found = {(it.section, it.figure, it.bound): (it.value, it.warn) for it in read_limits(SLO)}
    assert found == {
        ("any", "errors", "max"): (0.0, False),
        ("any", "restarts", "max"): (0.0, False),
        ("any", "idle_cpu", "max"): (0.02, False),
        ("any", "locust_cpu", "max"): (0.5, True),
        ("warmup.on", "hit_rate", "min"): (0.85, False),
        ("mixed.ratio", "tokens_per_s", "min"): (1.68, False),
        ("mixed.ratio", "ttft_p95", "max"): (0.63, False),
        ("mixed.ratio", "e2e_p99", "max"): (1.0, False),
        ("burst.ratio", "tokens_per_s", "min"): (1.0, False),
    }


def test_a_figure_may_have_both_bounds(tmp_path):
    found = limits(tmp_path, "[mixed]\noff.path_slow = { min = 1, max = 1, warn = true }")
    assert found == [
        Limit("mixed.off", "path_slow", "min", 1.0, True),
        Limit("mixed.off", "path_slow", "max", 1.0, True),
    ]
    assert limits(tmp_path, "") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[mixd.on]\nerrors = {max = 0}", "mixd: no section"),
        ("[mixed.onn]\nerrors = {max = 0}", "mixed.onn: no column"),
        ("[mixed.on]\nerors = {max = 0}", "mixed.on.erors: no figure"),
        ("[any.on]\nerrors = {max = 0}", "any.on: no figure"),
        ("[mixed.on]\nerrors = {most = 0}", "mixed.on.errors.most: no bound"),
        ("[mixed.on]\nerrors = {max = '0'}", "mixed.on.errors.max: must be a number"),
        ("[mixed.on]\nerrors = {max = true}", "mixed.on.errors.max: must be a number"),
        ("[mixed.on]\nerrors = {max = nan}", "mixed.on.errors.max: must be a number"),
        ("[mixed.on]\nerrors = {max = 0, warn = 1}", "mixed.on.errors.warn: must be true or"),
        ("[mixed.on]\nerrors = {warn = true}", "mixed.on.errors: needs min or max"),
        ("[mixed.on]\nerrors = 0", "mixed.on.errors: must be a table"),
        ("[mixed]\non = 1", "mixed.on: must be a table"),
        ("any = 1", "any: must be a table"),
        ("[mixed.on", "Expected"),
    ],
)
def test_what_means_nothing_is_refused_by_file_and_key(tmp_path, text, named):
    with pytest.raises(SloError) as refused:
        limits(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path / 'slo.toml'}: {named}")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "slo.toml").write_bytes(b"\xff")
    with pytest.raises(SloError, match=r"slo\.toml: "):
        read_limits(tmp_path / "slo.toml")


# -- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "limit", "good"),
    [("min", 2.0, True), ("min", 2.01, False), ("max", 2.0, True), ("max", 1.99, False)],
)
def test_a_limit_itself_is_good(bound, limit, good):
    check = checked(whole_run(), Limit("mixed.ratio", "tokens_per_s", bound, limit))[
        "mixed.ratio.tokens_per_s"
    ]
    sign = {"min": "≥", "max": "≤"}[bound]
    assert check == Check(check.name, 2.0, f"{sign} {limit:g}", good)


@pytest.mark.parametrize("bound", ["min", "max"])
def test_what_was_not_measured_is_missed(bound):
    found = checked(whole_run(), Limit("mixed.off", "hit_rate", bound, 0.0))
    check = found["mixed.off.hit_rate"]
    assert (check.value, check.good, check.reason) == (None, False, "not measured")
    # The off server's hit rate is not known, so it is not known in every place.
    assert not checked(whole_run(), Limit("any", "hit_rate", bound, 0.0))["any.hit_rate"].good


def test_the_worst_place_counts_for_any():
    whole = whole_run()
    busy = run(*whole.legs[:-1], leg("burst", records=[failed("no"), record()], idle_cpu=0.5))
    found = checked(busy, Limit("any", "idle_cpu", "max", 0.02), Limit("any", "errors", "max", 0))
    assert found["any.idle_cpu"].value == 0.5 and not found["any.idle_cpu"].good
    assert found["any.errors"].value == 1.0 and not found["any.errors"].good
    least = checked(busy, Limit("any", "requests", "min", 2.0))["any.requests"]
    assert least.value == 2.0 and least.good


def test_a_warning_is_no_failure():
    loud = Limit("mixed.ratio", "tokens_per_s", "min", 9.0, warn=True)
    checks = check_all(whole_run(), summarise(whole_run()), [loud])
    assert not checks[0].good and passed(checks)
    assert not passed([*checks, Check("other", 1.0, "0", False)])
    assert passed([])


# -- what must hold in any case --------------------------------------------------------------

SENT, SAME, BURSTS = (
    "legs without all their requests", "parts without the same trace on both sides",
    "burst ranges in a profile",
)  # fmt: skip


def test_a_whole_run_is_good():
    found = checked(whole_run(bursts={"ranges": 4, "counter": 4.0}))
    assert list(found) == [SENT, SAME, BURSTS] and passed(list(found.values()))
    assert BURSTS not in checked(whole_run())


def test_a_leg_that_was_cut_short_is_bad():
    found = checked(run(leg(side=OFF), leg(side=ON, planned=3)))
    assert found[SENT] == Check(SENT, 1, "0", False, False, "mixed/closed/0 on: 1 of 3")


@pytest.mark.parametrize(
    "legs",
    [
        [leg(side=OFF), leg(side=ON, digest="d2")],
        [leg(side=ON)],
        [leg(side=OFF), leg(side=ON, loop=OPEN)],
    ],
)
def test_sides_that_were_not_sent_the_same_cannot_be_compared(legs):
    check = checked(run(*legs))[SAME]
    assert not check.good and "mixed/closed/0" in check.reason
    assert MIXED in check.reason


@pytest.mark.parametrize(
    ("bursts", "good"),
    [
        ({"ranges": 4, "counter": 4.0}, True),
        ({"ranges": 4, "counter": 5.0}, False),
        ({"ranges": 0, "counter": 0.0}, False),  # it proves nothing
        ({"ranges": 4}, False),
        ({"counter": 4.0}, False),
    ],
)
def test_a_profile_shows_the_bursts_that_are_counted(bursts, good):
    check = checked(whole_run(bursts=bursts))[BURSTS]
    assert check.good is good
    assert (check.reason == "not measured") is (len(bursts) == 1)


def test_every_figure_can_have_a_limit(tmp_path):
    text = "".join(f"[mixed.on.{name}]\nmin = 0\n" for name in BY_NAME)
    assert [it.figure for it in limits(tmp_path, text)] == list(BY_NAME)

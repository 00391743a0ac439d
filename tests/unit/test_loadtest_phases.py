"""Which legs a load test has, and how large they are."""

from dataclasses import replace

import pytest

from loadtest import phases, run
from loadtest.phases import Sizes, Traffic
from loadtest.scale import SCALES
from loadtest.traffic.prompts import Limits
from loadtest.traffic.trace import Entry, Recipe, repeats

SMALL = replace(
    SCALES["cpu"], limits=Limits(48, 96, 192), warm_up=10.0, closed=20.0, open=30.0, burst=8.0
)
RECIPE = Recipe(lambda text: len(text.split()), SMALL.limits, max_tokens=SMALL.max_tokens)
MADE = Traffic(1, RECIPE, 0.6)
SIZES = Sizes(SMALL, capacity=2.0)


def legs(traffic=MADE, sizes=SIZES):
    return list(phases.phases(traffic, sizes))


def test_the_legs_of_all_phases():
    assert [(it.phase, it.loop, it.part) for it in legs()] == [
        ("warmup", "closed", 0), ("warmup", "closed", 1),
        ("mixed", "closed", 0), ("mixed", "closed", 1), ("mixed", "open", 0), ("mixed", "open", 1),
        ("burst", "closed", 0), ("burst", "closed", 1),
    ]  # fmt: skip


def test_how_much_is_sent_follows_from_the_capacity():
    warm, last, closed, more, opened, rest, burst, others = map(len, (it.trace for it in legs()))
    assert warm == 4 * last and warm + last == 20
    assert (closed + more, burst + others) == (40, 16)
    assert opened + rest == round(0.7 * 2.0 * 30)


def test_the_last_round_of_the_warm_up_asks_what_is_known():
    first, last = legs()[:2]
    assert all(it.repeat for it in last.trace)
    assert sum(not it.repeat for it in first.trace) == len(last.trace)


def test_an_open_loop_has_moments_and_a_closed_one_has_none():
    for leg in legs():
        timed = [it.at is not None for it in leg.trace]
        assert all(timed) if leg.loop == "open" else not any(timed)
        assert leg.rate == (pytest.approx(1.4) if leg.loop == "open" else 0.0)


def test_closed_and_open_loop_know_nothing_of_each_other():
    mixed = [it for it in legs() if it.phase == "mixed"]
    closed = {entry.cache_salt for it in mixed if it.loop == "closed" for entry in it.trace}
    opened = {entry.cache_salt for it in mixed if it.loop == "open" for entry in it.trace}
    assert len(closed) == len(opened) == 1 and closed != opened


def test_repeats_are_marked_over_all_parts():
    parts = [it.trace for it in legs() if (it.phase, it.loop) == ("mixed", "closed")]
    whole = [entry for part in parts for entry in part]
    assert [entry.repeat for entry in whole] == repeats(whole)
    assert sum(entry.repeat for entry in whole) == pytest.approx(0.6 * len(whole), abs=2)


def test_the_same_seed_the_same_legs():
    assert legs() == legs()
    assert legs(replace(MADE, seed=2)) != legs()


def test_the_warm_up_is_not_larger_than_the_documents():
    scale = replace(SMALL, warm_up_prompts=3)
    assert [len(it.trace) for it in legs(sizes=Sizes(scale, 2.0))[:2]] == [12, 3]


def test_an_operators_log_takes_the_place_of_made_prompts():
    log = [Entry(text=f"q {number % 5}", cache_salt="a" if number % 2 else None, at=float(number))
           for number in range(30)]  # fmt: skip
    found = legs(replace(MADE, log=log))
    warm, closed = found[0].trace, found[2].trace
    assert len({(it.text, it.cache_salt) for it in warm}) == 4
    assert [it.text for it in closed] == [it.text for it in log[: len(closed)]]
    assert len({it.cache_salt for it in closed}) == 2  # tenants stay apart
    assert len({(it.cache_salt, it.text) for it in closed}) == 10


def test_the_calibration_is_of_no_phase():
    asked = phases.calibration(MADE, SMALL, 8, "first").trace
    others = [entry for leg in legs() for entry in leg.trace]
    assert len(asked) == 8 and not {(it.messages, it.cache_salt) for it in asked} & {
        (it.messages, it.cache_salt) for it in others
    }
    assert not any(repeats(asked))


# -- scales ----------------------------------------------------------------------------------


def test_the_documents_size():
    full = SCALES["full"]
    assert (full.limits.short, full.limits.medium) == (512, 4096)
    assert (full.warm_up_prompts, full.rounds) == (1000, 5)
    assert (full.warm_up, full.open, full.burst) == (15 * 60, 30 * 60, 10 * 60)
    assert full.rate(capacity=1000.0) == 50.0
    assert full.rate(capacity=10.0) == 7.0


def test_long_prompts_fit_into_a_short_context():
    scale = SCALES["full"].fitted(2048 + 512)
    assert scale.limits.long == 2048
    assert scale.limits.long / scale.limits.medium == pytest.approx(16384 / 4096, rel=0.01)
    assert SCALES["full"].fitted(100_000) == SCALES["full"]
    with pytest.raises(ValueError, match="context of 200"):
        SCALES["full"].fitted(200)


# -- the command -----------------------------------------------------------------------------


def test_options():
    options = run.parse(
        ["--scale", "full", "--doors", "grpc", "--repeat-share", "0.2", "--seed", "7", "--",
         "--dflash-cache-size", "512"]
    )  # fmt: skip
    assert (options.scale.name, options.doors, options.seed) == ("full", ("grpc",), 7)
    assert options.flags == ("--dflash-cache-size", "512")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeat-share", "1.5"], "--repeat-share must be from 0 to 1"),
        (["--capacity", "0"], "--capacity must be over 0"),
        (["--capacity", "nan"], "--capacity must be over 0"),
        (["--workers", "-1"], "--workers must not be negative"),
        (["--doors", "telnet"], "telnet"),
        (["--scale", "huge"], "huge"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments, said, capsys):
    with pytest.raises(SystemExit):
        run.parse(["--scale", "cpu", *arguments])
    assert said in capsys.readouterr().err

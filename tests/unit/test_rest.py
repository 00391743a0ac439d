"""When to stop looking for drafts, and when to begin again."""

from deepseek_flash.dspark.rest import EVERY, Rest


def run(rest, steps, saves, took=0.001):
    """How often drafts were looked for; each time they save ``saves(step)`` seconds."""
    looks = 0
    for step in range(steps):
        if rest.looks():
            looks += 1
            rest.looked(took)
            rest.saved(saves(step))
    return looks


def test_what_pays_is_never_given_up():
    # 4 ms every fourth time pay for 1 ms each time... just: 1.3 of it.
    assert run(Rest(), 4000, lambda step: 0.0052 * (step % 4 == 0)) == 4000


def test_what_saves_nothing_is_looked_for_now_and_then():
    rest = Rest()
    tried = run(rest, 400, lambda step: 0.0)
    assert 20 < tried < 50 + 400 / EVERY and rest.resting
    assert run(rest, 800, lambda step: 0.0) == 800 / EVERY


def test_it_begins_again_when_drafts_pay():
    rest = Rest()
    run(rest, 1000, lambda step: 0.0)
    assert rest.resting
    run(rest, 40 * EVERY, lambda step: 0.004)
    assert not rest.resting


def test_it_does_not_flap_between():
    rest = Rest()
    run(rest, 1000, lambda step: 0.0)
    assert run(rest, 4000, lambda step: 0.0012) == 4000 / EVERY, "pays, but hardly"


def test_something_new_wakes_it():
    rest = Rest()
    run(rest, 1000, lambda step: 0.0)
    rest.wake()
    assert not rest.resting and run(rest, 20, lambda step: 0.0) == 20

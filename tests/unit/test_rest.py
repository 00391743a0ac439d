"""When to stop looking for drafts, and when to begin again."""

import random

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


def test_what_pays_by_chance_is_hardly_ever_given_up():
    chance = random.Random(1)
    # 2.2 ms a step on average for 1 ms: 13 ms, or 1.4 ms lost.
    looks = run(Rest(), 4000, lambda step: 0.013 if chance.random() < 0.25 else -0.0014)
    assert looks > 3900


def test_what_saves_nothing_is_looked_for_now_and_then():
    rest = Rest()
    assert run(rest, 400, lambda step: 0.0) < 100 + 400 / EVERY and rest.resting
    assert run(rest, 800, lambda step: 0.0) == 800 / EVERY


def test_it_begins_again_when_drafts_pay():
    rest = Rest()
    run(rest, 1000, lambda step: 0.0)
    assert rest.resting
    run(rest, 40 * EVERY, lambda step: 0.004)
    assert not rest.resting


def test_something_new_wakes_it():
    rest = Rest()
    run(rest, 1000, lambda step: 0.0)
    rest.wake()
    assert not rest.resting and run(rest, 20, lambda step: 0.0) == 20

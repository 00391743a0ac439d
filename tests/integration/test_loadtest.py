"""Locust against the real server: every door, closed and open loops, one process and several."""

import pytest

from loadtest.player import DOORS, OPENAI, Order, Player
from loadtest.records import CLOSED, OPEN
from loadtest.traffic.trace import Entry, labelled, poisson

TOKENS = 6
TRITONS = [door for door in DOORS if door != OPENAI]  # test_gateway has the other


@pytest.fixture
def play(served, tmp_path):
    """Play a trace on the shared server; the leg."""

    def play(trace, loop=CLOSED, doors=tuple(TRITONS), workers=0, rate=0.0):
        said = []
        player = Player(tmp_path, doors, workers, said.append)
        order = Order("test", loop, 0, labelled(trace), 4, rate, 60.0)
        return player.play(order, "on", served, [])

    return play


def prompts(name, count, **fields):
    return [
        Entry(
            text=f"{name} {number} of the load test", max_tokens=TOKENS, cache_salt=name, **fields
        )
        for number in range(count)
    ]


def good(leg):
    assert [it.number for it in leg.records] == list(range(leg.planned))
    assert not [it.error for it in leg.records if it.error]
    return leg.records


@pytest.mark.parametrize("door", TRITONS)
def test_a_closed_loop_through_each_door(play, door):
    asked = prompts(f"closed {door}", 6)
    leg = play([*asked, *asked], doors=[door])
    records = good(leg)
    assert {it.door for it in records} == {door}
    assert all(it.due == it.sent < it.first <= it.ended for it in records)
    assert all(0 < it.tokens <= TOKENS and it.prompt_tokens > 0 for it in records)
    assert all(len(it.gaps) < it.tokens for it in records)
    assert [it.repeat for it in records] == [False] * 6 + [True] * 6
    assert all(it.ran for it in records[:6])
    assert leg.counted["dflash_lookups_total"]["miss"] >= 6
    assert leg.seconds > 0.0 and leg.locust_cpu > 0.0


def test_an_open_loop_keeps_its_moments(play):
    trace = poisson(1, prompts("open", 8), rate=4.0)
    records = good(play(trace, OPEN, rate=4.0))
    assert [it.due for it in records] == [entry.at for entry in trace]
    assert all(it.sent >= it.due for it in records)


@pytest.mark.parametrize("door", TRITONS)
def test_a_refusal_is_a_failure_and_costs_nothing_else(play, door):
    name = f"refused {door}"
    refused = Entry(text="x " * 5000, max_tokens=TOKENS, cache_salt=name)
    leg = play([*prompts(name, 2), refused, *prompts(f"{name}, more", 2)], doors=[door])
    errors = {it.number: it.error for it in leg.records if it.error}
    assert errors.keys() == {2} and "2048" in errors[2]
    assert len(leg.records) == leg.planned


def test_several_processes_send_each_request_once(play):
    leg = play(prompts("distributed", 10), workers=2)
    assert all(it.tokens for it in good(leg))

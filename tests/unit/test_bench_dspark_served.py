"""What the served DSpark benchmark asks, computes and concludes, from servers that are made up."""

import json
from contextlib import contextmanager

import pytest
from deepseek_flash.serve import parse_arguments
from hypothesis import given
from hypothesis import strategies as st

from loadtest import served
from loadtest.bench import dflash_sides, dspark_served, dspark_served_sides
from loadtest.bench.dflash_sides import Leg, in_turns
from loadtest.bench.dflash_traffic import Reply
from loadtest.bench.dspark_prompts import KINDS
from loadtest.bench.dspark_served import PARTS, mixed, novel, parse, repeats
from loadtest.bench.dspark_served_figures import (
    Pair,
    Play,
    bare_record,
    drafts,
    first_difference,
    oracle_speeds,
    rates_by_kind,
    replay_problems,
    row_cost,
    table,
)
from loadtest.bench.dspark_served_sides import WATCHED, play_round, side_flags

# -- sides -----------------------------------------------------------------------------------


def settings_of(name):
    return vars(parse_arguments(side_flags(name)))


@pytest.mark.parametrize("name", ["plain", "suffix", "suffix:0.5", "ngram"])
def test_others_are_served_without_anything_of_ours(name):
    found = settings_of(name)
    assert found["setting:enable_dspark"] == found["setting:enable_dflash"] == "false"
    args = json.loads(found["engine_args"])
    assert args.pop("max_model_len") == 2048 and bool(args) == (name != "plain")


def test_vllms_own_speculation():
    args = [json.loads(settings_of(it)["engine_args"]) for it in ("suffix", "suffix:0.5", "ngram")]
    suffix, careful, ngram = (it["speculative_config"] for it in args)
    assert suffix == {
        "method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_min_token_prob": 0.1,
    }  # fmt: skip
    assert careful == {**suffix, "suffix_decoding_min_token_prob": 0.5}
    assert ngram["method"] == "ngram" and ngram["num_speculative_tokens"] == 3


def test_ours_has_both():
    found = settings_of("ours")
    assert found["setting:enable_dspark"] == found["setting:enable_dflash"] == "true"
    assert found["setting:dflash_semantic"] is None, "the default, as users have it"
    assert json.loads(found["engine_args"]) == {"max_model_len": 2048}


@pytest.mark.parametrize("name", ["theirs", "", "suffix:much", "plain:0.5"])
def test_there_are_no_other_sides(name):
    with pytest.raises(ValueError):
        side_flags(name)


def test_sides_take_turns():
    assert [in_turns("abc", number) for number in range(3)] == ["abc", "cba", "abc"]


@pytest.mark.parametrize("broken", ["wait_ready", "Side", "the load"])
def test_a_server_is_stopped_however_it_ends(monkeypatch, broken):
    stopped = []

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(served, "start", lambda model, flags, **_: model)
    monkeypatch.setattr(served, "stop", stopped.append)
    monkeypatch.setattr(served, "wait_ready", lambda served: None)
    monkeypatch.setattr(dflash_sides, "Side", lambda *_: FakeSide("plain"))
    if broken != "the load":
        monkeypatch.setattr(dflash_sides if broken == "Side" else served, broken, interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        dspark_served_sides.resident(["plain", "ours"], "model", 4),
    ):
        raise KeyboardInterrupt
    assert stopped == ["model"] * (2 if broken == "the load" else 1)


# -- traffic ---------------------------------------------------------------------------------


@given(each=st.integers(1, 13))
def test_no_prompt_of_the_stream_comes_again_in_another_pair(each):
    rounds = [mixed(number, each) for number in range(20 // each)]
    asked = [it for found in rounds for it in found]
    assert len(asked) == len(set(asked)) == each * 5 * (20 // each)
    for found in rounds:
        assert [kind for kind, _ in found] == list(KINDS) * each
    assert all(text in KINDS[kind] for kind, text in asked)


def test_the_other_parts_traffic():
    assert novel(0, 8) == novel(1, 8) and len(novel(0, 8)) == 40
    assert novel(0, 2) == [("unrelated", text) for text in KINDS["unrelated"][:10]]
    first, second = repeats(0, 8), repeats(1, 8)
    assert len(first) == len(second) == 16 and not set(first) & set(second)
    assert {kind for kind, _ in first} == set(KINDS)


# -- the command line ------------------------------------------------------------------------


def test_plain_is_always_there_and_first():
    assert parse(["--part", "mixed"]).sides == ("plain", "suffix", "ours")
    assert parse(["--part", "novel"]).sides == ("plain", "ours")
    found = parse(["--part", "mixed", "--sides", "ours", "suffix:0.5", "plain", "ours"])
    assert found.sides == ("plain", "ours", "suffix:0.5")
    assert parse(["--part", "mixed", "--cost", "2=0.2", "--cost", "8=0.4"]).costs == {
        2: 0.2,
        8: 0.4,
    }


@pytest.mark.parametrize(
    "line",
    [
        "mixed --pairs 6",
        "mixed --prompts 12 --pairs 4",
        "mixed --pairs 0",
        "mixed --concurrency 0",
        "mixed --sides theirs",
        "mixed --cost 4",
        "novel --sides suffix ours",  # it would remember the pair before
        "novel --remember",
        "repeats --pairs 11",
        "hostile",
    ],
)
def test_what_would_measure_something_else_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse(["--part", *line.split()])
    assert "error:" in capsys.readouterr().err


# -- arithmetic ------------------------------------------------------------------------------


def reply(ids, total=1.0):
    return Reply(0.1, total, len(ids), "", tuple(ids))


def leg(*replies, seconds=1.0):
    return Leg(replies, seconds)


def play(*legs, first=0, **counts):
    gains = {name: counts.get(name, {}) for name in WATCHED}
    return Play(legs, (gains,) * len(legs), first)


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_the_first_difference(one, other):
    found = first_difference(one, other)
    assert (found is None) == (one == other)
    if found is not None:
        assert one[:found] == other[:found] and one[found : found + 1] != other[found : found + 1]


def test_kinds_are_told_apart():
    legs = [leg(reply([1] * 4, 2.0), reply([1] * 6, 3.0), reply([1] * 2, 4.0))] * 2
    assert rates_by_kind(["a", "b", "a"], legs) == {"a": 1.0, "b": 2.0}


ASKED = [("a", "one"), ("b", "two")]


def test_a_pair_against_plain():
    plain = play(leg(reply([1, 2]), reply([3, 4]), seconds=4.0))
    ours = play(leg(reply([1, 2], 0.5), reply([3, 5, 6]), seconds=2.0))
    pair = Pair(
        ASKED, {"plain": plain, "ours": ours}, {"all": 4.0, "each": 4.0, "a": 2.0, "b": 6.0}
    )
    assert pair.rates("plain") == {"all": 1.0, "each": 2.0, "a": 2.0, "b": 2.0}
    speeds = pair.speeds("ours")
    assert speeds == {"all": 2.5, "each": pytest.approx(5 / 1.5 / 2), "a": 2.0, "b": 1.5}
    assert pair.speeds("oracle")["b"] == 6.0
    assert (pair.gain("plain"), pair.gain("ours", "all")) == (0.0, 0.5)
    assert pair.gain("ours") == pytest.approx((speeds["each"] - 1) / 3)
    assert pair.different("ours") == [("two", 1)] and pair.different("plain") == []
    shown = table([pair, pair])
    assert (
        "ours: share of the oracle's gain, all: 0.500" in shown
        and "2.500 (2.500 to 2.500)" in shown
    )


def test_nothing_can_be_gained_where_the_oracle_gains_nothing():
    plain = play(leg(reply([1]), reply([2])))
    assert Pair(ASKED, {"plain": plain}, {"all": 1.0}).gain("plain") == 0.0


def test_rounds_that_warm_up_are_not_measured_but_compared():
    plain = play(leg(reply([1]), reply([2])), leg(reply([1]), reply([2])), first=1)
    ours = play(leg(reply([9]), reply([2]), seconds=9.0), leg(reply([1]), reply([2])), first=1,
                dspark_tokens_total={"fast": 2.0})  # fmt: skip
    pair = Pair(ASKED, {"plain": plain, "ours": ours}, {})
    assert pair.speeds("ours")["all"] == 1.0 and pair.different("ours") == [("one", 0)]
    assert ours.gained["dspark_tokens_total"] == {"fast": 2.0}
    assert "oracle" not in table([pair])


def test_a_row_costs_in_between_what_was_measured():
    assert row_cost(4) == 0.25 and 0.25 < row_cost(8) < row_cost(16) == row_cost(64)
    assert row_cost(3, {2: 0.2, 4: 0.4}) == pytest.approx(0.3)


def test_the_oracle_copies_from_the_same_kind_and_from_before():
    text = list(range(10, 30))
    first, same = bare_record("a", [1, 2], text), bare_record("a", [3], text)
    other = bare_record("b", [4], text)
    alone = oracle_speeds([first], [], 0.1, 20)
    assert alone == {"all": 1.0, "each": 1.0, "a": 1.0}
    found = oracle_speeds([first, other, same], [], 0.1, 20)
    copied = 19 / (2 + 0.1 * 17)  # 16 and one, then the last two
    assert found["b"] == 1.0 and found["a"] == pytest.approx(38 / (19 + 19 / copied))
    assert found["all"] == pytest.approx(57 / (38 + 19 / copied))
    assert oracle_speeds([first], [same], 0.1, 20)["a"] == pytest.approx(copied)
    assert oracle_speeds([same], [first, *[bare_record("a", [5], [7])] * 12], 0.1, 20)["a"] == 1.0


def test_shares_of_paths_and_drafts():
    gained = {
        "dspark_tokens_total": {"slow": 60.0, "fast": 40.0},
        "dspark_drafts_proposed_total": {"reference": 8.0, "history": 2.0},
        "dspark_drafts_accepted_total": {"reference": 6.0},
    }
    assert drafts(gained) == (
        "tokens by path: fast 40.0%, slow 60.0%; drafts accepted: history 0 of 2 (0.0%),"
        " reference 6 of 8 (75.0%)"
    )
    assert "none proposed" in drafts({name: {} for name in gained})


@pytest.mark.parametrize(
    ("replays", "known", "problems"),
    [
        ({}, False, 0),
        ({"nothing": 2.0}, True, 0),
        ({"whole": 1.0}, False, 1),
        ({"nothing": 1.0, "beginning": 1.0}, True, 2),
        ({"nothing": 1.0}, False, 1),
    ],
)
def test_what_is_not_the_engines_proves_nothing(replays, known, problems):
    legs = leg(reply([1]), reply([2]))
    ours = play(legs, deepseek_flash_replays_total=replays)
    pair = Pair(ASKED, {"plain": play(legs), "ours": ours}, {})
    assert len(replay_problems([pair], known)) == problems
    assert replay_problems([Pair(ASKED, {"plain": play(legs)}, {})], known) == []


# -- a run -----------------------------------------------------------------------------------


class FakeSide:
    """A server that takes ``seconds`` for a leg, and whose replays are counted as they come."""

    def __init__(self, name, seconds=1.0, answer=lambda prompt: [len(prompt), 1]):
        self.name, self.seconds, self.answer = name, seconds, answer
        self.served = self.client = self
        self.asked, self.replays, self.known = [], 0, set()

    def warm_up(self, concurrency, use_dflash=False):
        pass

    def close(self):
        pass

    def leg(self, prompts, concurrency, **sampling):
        assert sampling["max_tokens"] == 96 and sampling["return_token_ids"]
        self.asked.append((tuple(prompts), concurrency, sampling["cache_salt"]))
        for prompt in prompts:
            key = (sampling["cache_salt"], prompt)
            self.replays += key in self.known and self.name == "ours"
            self.known.add(key)
        each = self.seconds / len(prompts)
        return leg(*(reply(self.answer(it), each) for it in prompts), seconds=self.seconds)

    def metrics(self):
        return {"deepseek_flash_replays_total": {"nothing": float(self.replays)}}


@pytest.fixture
def bench(monkeypatch):
    """Runs a part with made-up servers: (good, report, servers as they were started)."""

    def bench(line, make=FakeSide):
        started, reports = [], {}

        @contextmanager
        def resident(names, model, connections):
            started.append([make(name) for name in names])
            yield started[-1]

        for name in ("settled", "drained"):
            monkeypatch.setattr(dspark_served_sides, name, FakeSide.metrics)
        monkeypatch.setattr(dspark_served, "resident", resident)
        monkeypatch.setattr(dspark_served, "write_report", reports.__setitem__)
        plan = parse(["--part", *line.split()])
        good = dspark_served.run(plan, lambda text: [ord(letter) for letter in text])
        json.dumps(reports)
        return good, reports[f"bench-dspark-{plan.name}"], started

    return bench


def test_all_sides_get_the_same_in_turns(bench, capsys):
    good, report, started = bench("mixed --pairs 2 --prompts 3 --concurrency 1 4")
    assert good and len(started) == 2 and list(report)[-2:] == ["at 1", "at 4"]
    for many, sides in zip((1, 4), started, strict=True):
        assert sides[0].asked == sides[1].asked == sides[2].asked
        first, second = sides[0].asked
        assert first[1] == second[1] == many and len(first[0]) == 15
        assert not set(first[0]) & set(second[0]) and first[2] != second[2]
    printed = capsys.readouterr().out
    legs = [line.split(",")[0].strip() for line in printed.splitlines() if "first token" in line]
    assert legs == ["plain", "suffix", "ours", "ours", "suffix", "plain"] * 2
    assert "suffix: 0 answers differ" in printed and "ours: 0 answers differ" in printed


def test_with_remember_the_tenant_stays_and_the_oracle_knows_more(bench):
    def make(name):
        return FakeSide(name, answer=lambda prompt: list(range(20)))

    line = "mixed --pairs 2 --prompts 1 --concurrency 4"
    _, forgets, _ = bench(line, make)
    _, remembers, ((plain, *_),) = bench(f"{line} --remember", make)
    assert len({salt for _, _, salt in plain.asked}) == 1
    old, new = ([pair["oracle"]["all"] for pair in it["at 4"]["pairs"]]
                for it in (forgets, remembers))  # fmt: skip
    assert old == [1.0, 1.0] and new[0] == 1.0 and new[1] > 2.5


@pytest.mark.parametrize("side", ["suffix", "ours"])
def test_one_other_token_is_loud(bench, capsys, side):
    def make(name):
        changed = iter([name == side])
        return FakeSide(name, answer=lambda prompt: [len(prompt), 2 if next(changed, False) else 1])

    good, report, _ = bench("mixed --pairs 1 --prompts 2 --concurrency 4", make)
    assert not good and f"!!! {side}: 1 ANSWERS DIFFER" in capsys.readouterr().out
    assert report["at 4"]["pairs"][0]["sides"][side]["different"] == 1


@pytest.mark.parametrize(("seconds", "good"), [(1.01, True), (1.05, False)])
def test_novel_traffic_must_not_be_slowed_down(bench, seconds, good):
    def make(name):
        return FakeSide(name, seconds if name == "ours" else 1.0)

    assert bench("novel --concurrency 16", make)[0] is good


def test_repeats_ask_three_times_and_measure_twice(bench):
    good, report, ((plain, _, ours),) = bench("repeats --pairs 2 --concurrency 4")
    assert good and plain.asked == ours.asked and len(ours.asked) == 6
    assert len({prompts for prompts, _, _ in ours.asked}) == 2
    for pair in report["at 4"]["pairs"]:
        assert pair["oracle"] == {} and pair["sides"]["ours"]["gain"] is None
        assert pair["sides"]["ours"]["seconds"] == 2.0
    assert PARTS["repeats"].sampling == {"logprobs": 0}


def test_repeats_that_are_not_known_prove_nothing(bench, monkeypatch, capsys):
    monkeypatch.setattr(FakeSide, "metrics", lambda self: {})
    assert not bench("repeats --pairs 1 --concurrency 4")[0]
    assert "PROVES NOTHING: ours knew the continuation of 0 of 32" in capsys.readouterr().out


def test_answers_without_token_ids_are_not_compared(monkeypatch):
    monkeypatch.setattr(dspark_served_sides, "settled", FakeSide.metrics)
    with pytest.raises(RuntimeError, match="ours: an answer without token ids"):
        play_round(FakeSide("ours", answer=lambda prompt: []), ["x"], 1,
                   {"max_tokens": 96, "cache_salt": ""})  # fmt: skip

"""What the DFlash benchmarks conclude, from servers that are made up."""

import itertools
from types import SimpleNamespace

import pytest

from clients.request import Answer
from loadtest.bench import dflash_parity, dflash_served
from loadtest.bench.dflash_parity import Difference, Row, differences, pressed_order
from loadtest.bench.dflash_served import Near, Repeated, differing, first_token_use
from loadtest.bench.dflash_sides import Leg, in_turns, joined
from loadtest.bench.dflash_traffic import KINDS, Reply


def leg(seconds, first=0.1, texts=("a", "b"), tokens=10):
    return Leg([Reply(first, 2 * first, tokens, text) for text in texts], seconds)


def test_legs_add_up():
    both = joined([leg(1.0, 0.1), leg(3.0, 0.3)])
    assert (both.rate, both.first_token) == (10.0, pytest.approx(0.2))
    assert both.figures()["first_token_p95"] == 0.3
    assert both.figures()["end_to_end_p50"] == pytest.approx(0.4)


def test_who_goes_first_alternates():
    assert [in_turns(("on", "off"), n)[0] for n in range(4)] == ["on", "off", "on", "off"]


def test_the_first_tokens_aim_has_a_floor():
    assert first_token_use(0.05, 1.0) == pytest.approx(0.5)
    assert first_token_use(0.05, 0.1) == pytest.approx(2.0)


def test_the_first_round_is_no_later_one():
    texts = [{"a": "1", "b": "2"}] * 2
    on = Repeated((leg(9.0), leg(1.0)), ({"miss": 2}, {"exact": 2}), tuple(texts))
    assert (on.later.rate, on.later_hit_rate) == (20.0, 1.0)
    other = Repeated(on.rounds, on.lookups, (texts[0], {"b": "2", "a": "other"}))
    assert differing(on, on) == 0 and differing(on, other) == 1


def test_shares_of_nothing_are_zero():
    figures = Near(0, {}, {}, {}).figures()
    assert figures["right_of_tokens"] == figures["right_of_guessed"] == figures["encoder_ms"] == 0


class FakeSide:
    """A server that takes ``seconds`` for a leg and counts its prompts as they come."""

    def __init__(self, name, seconds=1.0, first=0.01, later_hits=True, encodes=True):
        self.name, self.served, self.flushes = name, self, 0
        self.seconds, self.first, self.encodes = seconds, first, encodes
        self.later_hits, self.known, self.asked = later_hits, set(), []
        self.lookups, self.encoded, self.answer = {"exact": 0, "miss": 0}, 0, str.upper

    def warm_up(self, concurrency, use_dflash=False):
        pass

    def leg(self, prompts, concurrency, **sampling):
        self.asked.append((concurrency, tuple(prompts)))
        hits = 0
        for prompt in prompts:
            hits += prompt in self.known and self.later_hits
            self.known.add(prompt)
        self.lookups["exact"] += hits
        self.lookups["miss"] += len(prompts) - hits
        self.encoded += (len(prompts) - hits) * self.encodes
        seconds = self.seconds / 100 if hits and self.name == "on" else self.seconds
        return leg(seconds, self.first, [self.answer(prompt) for prompt in prompts])

    def metrics(self):
        return {
            "dflash_lookups_total": dict(self.lookups),
            "dflash_encoder_seconds_count": {"": self.encoded},
            "dflash_encoder_seconds_sum": {"": self.encoded * 0.02},
            "dflash_reference_tokens_total": {"tokens": self.encoded * 10, "right": self.encoded},
        }

    def flush(self):
        self.flushes += 1
        self.known.clear()


@pytest.fixture
def reports(monkeypatch):
    found = {}
    for name in ("settled", "drained"):
        monkeypatch.setattr(dflash_served, name, FakeSide.metrics)
    monkeypatch.setattr(dflash_served, "flush", FakeSide.flush)
    monkeypatch.setattr(dflash_served, "write_report", found.__setitem__)
    return found


def test_repeated_traffic_that_is_fast_is_good(reports):
    on, off = FakeSide("on"), FakeSide("off")
    assert dflash_served.repeated((on, off), 3)
    report = reports["bench-dflash-repeated"]
    assert report["speed"] == pytest.approx([100.0] * 3) and report["hit_rate"] == [1.0] * 3
    assert (on.flushes, off.flushes, len(report["pairs"])) == (3, 0, 3)
    assert on.asked == off.asked and len({prompts for _, prompts in on.asked}) == 9
    for first, *others in (on.asked[at : at + 3] for at in (0, 3, 6)):
        assert len(set(first[1])) == 64 and all(set(it[1]) == set(first[1]) for it in others)


@pytest.mark.parametrize(
    "on",
    [
        FakeSide("on", later_hits=False),  # neither hits nor speed
        FakeSide("on", seconds=20.0),  # 5 times as fast
        FakeSide("on", first=0.03),  # over the floor
    ],
)
def test_repeated_traffic_that_misses_an_aim_is_not(reports, on):
    assert not dflash_served.repeated((on, FakeSide("off")), 1)


def test_one_other_answer_is_not_good(reports):
    on, off = FakeSide("on"), FakeSide("off")
    changed = iter([True])
    on.answer = lambda prompt: "other" if next(changed, False) else prompt.upper()
    assert not dflash_served.repeated((on, off), 1)
    assert reports["bench-dflash-repeated"]["different"] == 1


def test_prompts_that_are_alike_are_counted_by_kind(reports):
    on = FakeSide("on")
    assert dflash_served.near(on)
    report = reports["bench-dflash-near"]
    assert list(report) == [*KINDS, "all"] and on.flushes == 1
    for kind in KINDS:
        assert report[kind]["lookups"] == {"miss": 64} and report[kind]["tokens"] == 640
    everything = report["all"]
    assert everything["encoder_runs"] == 256 and everything["encoder_ms"] == pytest.approx(20.0)
    assert everything["right_of_tokens"] == 0.1
    assert not dflash_served.near(FakeSide("on", encodes=False))


def test_novel_traffic_is_the_same_on_both_and_never_again(reports):
    on, off = FakeSide("on", seconds=1.01, first=0.0101), FakeSide("off")
    assert dflash_served.novel_traffic((on, off), 5)
    assert on.asked == off.asked and [many for many, _ in on.asked] == [1, 4] * 5
    prompts = [prompt for _, leg in on.asked for prompt in leg]
    assert len(prompts) == len(set(prompts)) == 240 and on.flushes == 10
    report = reports["bench-dflash-novel"]
    assert report["encoder_runs"] == 240
    assert report["at 4"]["speed"] == pytest.approx([1 / 1.01] * 5)
    assert report["at 1"]["first_token"] == pytest.approx([1.01] * 5)


@pytest.mark.parametrize(
    "on",
    [
        FakeSide("on", seconds=1.03),
        FakeSide("on", first=0.0103),
        FakeSide("on", encodes=False),  # it would not be the cost that is asked for
    ],
)
def test_novel_traffic_that_costs_too_much_is_not_good(reports, on):
    assert not dflash_served.novel_traffic((on, FakeSide("off")), 1)


def test_novel_traffic_with_hits_is_not_good(reports, monkeypatch):
    monkeypatch.setattr(dflash_served, "novel", lambda source: itertools.cycle("ab"))
    assert not dflash_served.novel_traffic((FakeSide("on"), FakeSide("off")), 1)


# -- parity ----------------------------------------------------------------------------------


def answer(ids, text="text", reason="length"):
    return Answer(text, reason, tuple(ids), 3)


@pytest.mark.parametrize(
    ("other", "position"),
    [
        (answer([1, 9, 3]), 1), (answer([1, 2]), 2), (answer([1, 2, 3, 4]), 3),
        (answer([1, 2, 3], "other"), 3), (answer([1, 2, 3], reason="stop"), 3),
    ],
)  # fmt: skip
def test_the_first_difference_is_shown(other, position):
    expected, prompts = [answer([5]), answer([1, 2, 3])], ["same", "other"]
    assert differences(expected, expected, prompts) == []
    assert differences(expected, [answer([5]), other], prompts) == [Difference("other", position)]


def test_a_row_must_be_equal_and_must_have_replayed():
    replays = {"whole": 5.0}
    assert Row("cold", 9, (), {}, {}).good
    assert Row("warm", 9, (), replays, {}, ("whole",)).good
    assert not Row("warm", 9, (Difference("p", 4),), replays, {}, ("whole",)).good
    nothing = Row("pressed", 9, (), replays, {}, ("whole", "beginning"))
    assert not nothing.good and "no replay was good for beginning" in str(nothing)


class FakeGrpc:
    """Answers by the prompt, but for one that the cache gets wrong."""

    def __init__(self, wrong):
        self.wrong, self.off, self.asked = wrong, 0, []

    def generate(self, request, timeout):
        tokens = request.sampling["max_tokens"]
        if request.sampling.get("use_dflash") is False:
            self.off += 1
            return answer(range(tokens), request.text)
        self.asked.append((request.text, tokens))
        wrong = self.wrong == (request.text, tokens)
        return answer([*range(tokens - wrong), *[99] * wrong], request.text)


@pytest.mark.parametrize("wrong", [None, ("p2", 6), ("p2", 9)])
def test_a_pressed_pass_compares_both_lengths(monkeypatch, wrong):
    grpc = FakeGrpc(wrong)
    monkeypatch.setattr(dflash_parity, "GrpcClient", lambda url: grpc)
    counts = iter([0.0, 4.0])

    def found(served):
        return {"deepseek_flash_replays_total": dict.fromkeys(("whole", "beginning"), next(counts))}

    monkeypatch.setattr(dflash_parity, "drained", found)
    monkeypatch.setattr(dflash_parity, "flush", lambda served: None)
    prompts = [f"p{number}" for number in range(6)]
    known = {(number, 9): answer(range(9), f"p{number}") for number in range(6)}
    asks = pressed_order(6, 9)
    row = dflash_parity.pressed(
        dflash_parity.Asker(SimpleNamespace(grpc="x:2"), prompts), asks, 2, known
    )
    assert grpc.off == 6 and sorted(grpc.asked) == sorted((prompts[n], most) for n, most in asks)
    times = grpc.asked.count(wrong)
    assert row.good is (wrong is None) and (times > 0 or wrong is None)
    assert row.different == tuple([Difference("p2", (wrong or (0, 0))[1] - 1)] * times)

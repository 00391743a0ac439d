"""Where windows begin and end, by each policy."""

import itertools
import math

import pytest
import torch
from deepseek_flash.dflash.windows import NO_WINDOW, Policy, SemanticWindows, Window
from hypothesis import given
from hypothesis import strategies as st

CODE, POEM = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def semantic(**options):
    return SemanticWindows(Policy.SEMANTIC, **{"threshold": 0.5, **options})


class Conversation:
    """One session whose turns have 10 tokens each, told to ``windows`` turn by turn."""

    def __init__(self, windows, session_id="s", tenant=1):
        self.windows, self.session_id, self.tenant, self.turns = windows, session_id, tenant, 0

    def turn(self, signature=None, start=None):
        start = 10 * self.turns if start is None else start
        self.turns += 1
        return self.windows.observe(self.tenant, self.session_id, start, signature, start + 10)

    @property
    def current(self):
        return self.windows.current(self.tenant, self.session_id)


@pytest.mark.parametrize("device", DEVICES)
def test_a_turn_on_another_topic_closes_the_window_and_belongs_to_the_new_one(device):
    talk = Conversation(semantic())
    first = talk.turn(CODE.to(device))
    assert (first.window.start, first.closed) == (0, None)
    assert talk.turn(CODE.to(device)).window == first.window
    assert talk.current == first.window  # a lookup of the third turn still looks from here on
    third = talk.turn(POEM.to(device))
    assert (third.window.start, third.closed) == (20, first.window.id)
    assert talk.current == third.window != first.window
    assert talk.turn(POEM.to(device)).closed is None  # the centroid began anew
    assert talk.turn(CODE.to(device)).closed == third.window.id


def at(degrees):
    return torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0.0])


def test_the_centroid_is_of_all_turns_whatever_the_length_of_their_signatures():
    for last, leaves in ((79, False), (81, True)):  # degrees; the centroid points to 20
        talk = Conversation(semantic(threshold=0.5))  # the cosine of 60
        talk.turn(1000 * at(0))
        assert talk.turn(at(40)).closed is None
        assert (talk.turn(at(last)).closed is not None) is leaves


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_a_turn_at_the_threshold_stays(threshold):
    talk = Conversation(semantic(threshold=threshold))
    talk.turn(CODE)
    signature = threshold * CODE + math.sqrt(1 - threshold**2) * POEM
    assert talk.turn(signature).closed is None
    assert threshold == 0.0 or talk.turn(POEM - CODE).closed is not None


@pytest.mark.parametrize(
    "signature", [None, torch.zeros(3), torch.tensor([math.nan, 1, 0]), torch.full((3,), math.inf)]
)
def test_a_turn_without_a_signature_leaves_nothing(signature):
    talk = Conversation(semantic())
    first = talk.turn(signature).window
    assert talk.turn(CODE).window == first  # the first that says something
    assert talk.turn(signature).window == first
    assert talk.turn(CODE).window == first
    assert talk.turn(POEM).closed == first.id


def test_a_fixed_window_closes_every_so_many_tokens():
    talk = Conversation(SemanticWindows(Policy.FIXED, threshold=30))
    starts = [talk.turn(CODE if turn % 2 else POEM).window.start for turn in range(7)]
    assert starts == [0, 0, 0, 30, 30, 30, 60]


def test_a_turn_longer_than_a_fixed_window_has_one_of_its_own():
    talk = Conversation(SemanticWindows(Policy.FIXED, threshold=5))
    assert [talk.turn().window.start for _ in range(3)] == [0, 10, 20]


def test_without_a_policy_a_window_never_ends():
    talk = Conversation(SemanticWindows(Policy.NONE))
    seen = {talk.turn(signature) for signature in (CODE, POEM, -CODE, None)}
    assert len(seen) == 1 and talk.current.start == 0


@pytest.mark.parametrize("policy", Policy)
def test_no_session_no_window(policy):
    windows = SemanticWindows(policy, threshold=0.5)
    assert windows.current(1, "") == windows.current(1, "unknown") == Window(0, 0)
    for signature in (CODE, POEM):
        observed = windows.observe(1, "", 0, signature, 10)
        assert (observed.window, observed.closed) == (NO_WINDOW, None)
    assert len(windows) == 0


@pytest.mark.parametrize("policy", Policy)
def test_an_edited_history_starts_over_and_closes_nothing(policy):
    windows = SemanticWindows(policy, threshold=0.5)
    talk = Conversation(windows)
    talk.turn(CODE, start=50)
    old = talk.turn(POEM, start=60).window
    edited = talk.turn(POEM, start=old.start - 1)
    assert edited.window.id != old.id and edited.window.start == old.start - 1
    assert edited.closed is None


def test_the_same_turn_asked_again_stays_in_its_window():
    talk = Conversation(semantic())
    talk.turn(CODE)
    new = talk.turn(POEM, start=10).window
    assert talk.turn(POEM, start=10).window == new


def test_sessions_of_two_tenants_know_nothing_of_each_other():
    windows = semantic()
    one, other = Conversation(windows, tenant=1), Conversation(windows, tenant=2)
    assert one.turn(CODE).window.id != other.turn(POEM).window.id
    assert one.turn(CODE).closed is None and other.turn(POEM).closed is None
    windows.flush(1)
    assert one.current == NO_WINDOW and other.current != NO_WINDOW
    windows.flush()
    assert len(windows) == 0


def test_the_least_recently_observed_session_is_forgotten():
    windows = semantic(most_sessions=2)
    a, b, c = (Conversation(windows, name) for name in "abc")
    first = a.turn(CODE).window
    b.turn(CODE)
    a.turn(CODE)
    assert b.current.id  # asking is no observation
    c.turn(CODE)
    assert a.current == first and b.current == NO_WINDOW and c.current.id
    again = b.turn(POEM)
    assert again.closed is None and again.window.start == 10


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sliding"}, {"threshold": 1.1}, {"threshold": math.nan}, {"most_sessions": 0},
        {"policy": "fixed", "threshold": -1}, {"policy": "fixed", "threshold": math.nan},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)) + "|threshold|sliding"):
        SemanticWindows(**options)


SIGNATURES = st.none() | st.sampled_from([CODE, POEM, -CODE, CODE + POEM, torch.zeros(3)])
TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b", "c"]), st.integers(0, 60),
              SIGNATURES, st.integers(1, 40)),
    max_size=40,
)  # fmt: skip


@given(st.sampled_from(Policy), st.floats(-1, 1), st.integers(1, 8), TURNS)
def test_rules_that_always_hold(policy, threshold, most_sessions, turns):
    threshold = 20 * abs(threshold) if policy is Policy.FIXED else threshold
    windows = SemanticWindows(policy, threshold=threshold, most_sessions=most_sessions)
    owner, closed, began = {}, set(), {}
    for tenant, session_id, start, signature, length in turns:
        before = windows.current(tenant, session_id)
        observed = windows.observe(tenant, session_id, start, signature, start + length)
        window = observed.window
        assert windows.current(tenant, session_id) == window
        assert len(windows) <= most_sessions
        if not session_id:
            assert observed.window == NO_WINDOW and observed.closed is None
            continue
        assert owner.setdefault(window.id, (tenant, session_id)) == (tenant, session_id)
        assert began.setdefault(window.id, window.start) == window.start <= start
        assert window.id > 0 and window.id not in closed  # nobody comes back to a closed one
        if window != before:
            assert window.start == start and window.id > max(closed, default=0)
            left = before.id if start >= before.start and before.id else None
            assert observed.closed == left
        else:
            assert observed.closed is None
        if observed.closed is not None:
            assert policy is not Policy.NONE and observed.closed not in closed
            closed.add(observed.closed)
        if policy is Policy.FIXED:
            assert start + length - window.start <= threshold or window.start == start


@given(st.lists(st.sampled_from([CODE, POEM]), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_clear_topics_are_told_apart_by_any_threshold(topics, threshold):
    talk = Conversation(semantic(threshold=threshold))
    left = [talk.turn(topic).closed is not None for topic in topics]
    assert left == [False, *(a is not b for a, b in itertools.pairwise(topics))]

"""Path accounting and the decision log."""

import logging
from collections import Counter

import numpy as np
import pytest
from deepseek_flash.dspark.decision_log import DecisionLog
from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.paths import Path, PathAccounting, PathCounts, path_of
from hypothesis import given
from hypothesis import strategies as st

HISTORY, REFERENCE, CHAIN = Source


def draft(*sources):
    return Draft([7] * len(sources), [0.5] * len(sources), list(sources))


def test_the_first_token_decides_the_path():
    assert path_of(None, 0) == path_of(draft(), 0) == path_of(draft(CHAIN), 0) == Path.SLOW
    assert path_of(draft(CHAIN, HISTORY), 2) == path_of(draft(REFERENCE), 1) == Path.FAST
    assert path_of(draft(HISTORY, CHAIN), 2) == Path.BURST


def test_a_pass_counts_under_its_path_whatever_was_accepted():
    paths = PathAccounting()
    assert paths.record("a", draft(HISTORY, HISTORY, CHAIN, HISTORY), 4, 1, 2) == Path.BURST
    assert paths.record("a", draft(HISTORY, HISTORY, HISTORY), 2, 2, 3) == Path.BURST
    assert paths.record("b", draft(CHAIN, REFERENCE), 2, 0, 1) == Path.FAST
    assert paths.record("a", None, 0, 0, 1) == Path.SLOW
    assert paths.drain() == PathCounts(
        tokens=Counter({Path.BURST: 5, Path.FAST: 1, Path.SLOW: 1}),
        passes=Counter({Path.BURST: 2, Path.FAST: 1, Path.SLOW: 1}),
        proposed=Counter({
            (HISTORY, 0): 2, (HISTORY, 1): 2, (CHAIN, 2): 1, (HISTORY, 3): 1,
            (CHAIN, 0): 1, (REFERENCE, 1): 1,
        }),
        accepted=Counter({(HISTORY, 0): 2, (HISTORY, 1): 1}),
        burst_tokens=4,
    )  # fmt: skip
    assert paths.drain() == PathCounts()
    assert paths.finish("a") == {Path.BURST: 5, Path.SLOW: 1}
    assert paths.finish("a") == {} and len(paths) == 1


def test_a_request_that_is_gone_leaves_nothing_behind():
    paths = PathAccounting()
    paths.record("a", draft(CHAIN), 1, 0, 0)
    assert len(paths) == 0
    assert paths.drain().proposed == {(CHAIN, 0): 1}, "the model verified it all the same"


PASSES = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.lists(st.sampled_from(Source), max_size=5),
        st.integers(0, 5), st.integers(0, 5), st.integers(0, 6), st.booleans(), st.booleans(),
    ),
    max_size=30,
)  # fmt: skip


@given(PASSES)
def test_every_token_counts_once(passes):
    paths, drained, finished = PathAccounting(), [], Counter()
    made, proposed, accepted = 0, 0, 0
    for request, sources, length, right, tokens, drain, finish in passes:
        length = min(length, len(sources))
        right = min(right, length)
        tokens = min(tokens, right + 1)
        paths.record(request, draft(*sources), length, right, tokens)
        made, proposed, accepted = made + tokens, proposed + length, accepted + right
        if drain:
            drained.append(paths.drain())
        if finish:
            finished += paths.finish(request)
    drained.append(paths.drain())
    finished += sum((paths.finish(request) for request in "abc"), Counter())
    counted = sum((counts.tokens for counts in drained), Counter())
    assert counted == finished and counted.total() == made
    assert sum(counts.passes.total() for counts in drained) == len(passes)
    assert sum(counts.proposed.total() for counts in drained) == proposed
    assert sum(counts.accepted.total() for counts in drained) == accepted
    assert len(paths) == 0


# -- the decision log ------------------------------------------------------------------------

SIGNALS = np.array([[0.81234, 0.62345, 0.0123456], [1.5, 0.25, 0.5]], np.float32)


@pytest.fixture
def lines():
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logger = logging.Logger("decisions")
    logger.addHandler(handler)
    return logger, found


def test_a_line_says_who_what_and_why(lines):
    logger, found = lines
    logger.setLevel(logging.DEBUG)
    log = DecisionLog(logger)
    log.step(["r1", "r2"], [draft(CHAIN, CHAIN), None], [1, 0], SIGNALS)
    log.step(["r1"], [draft(HISTORY)], [0], None)
    assert found == [
        (
            "DEBUG",
            "[DSpark] r1 action=fast entropy=0.812 gap=0.623 attn_var=0.01235 draft=1/2 p=0.50",
        ),
        ("DEBUG", "[DSpark] r2 action=slow entropy=1.500 gap=0.250 attn_var=0.50000 draft=0/0 p=-"),
        ("DEBUG", "[DSpark] r1 action=slow entropy=nan gap=nan attn_var=nan draft=0/1 p=0.50"),
    ]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 7))
def test_every_nth_decision_at_info(steps, every):
    found, logger = [], logging.Logger("decisions", logging.INFO)
    logger.handle = lambda record: found.append(record.getMessage().split()[1])
    log, asked = DecisionLog(logger, every=every), []
    for count in steps:
        names = [str(len(asked) + place) for place in range(count)]
        asked += names
        log.step(names, [None] * count, [0] * count, None)
    assert found == asked[::every]


@pytest.mark.parametrize(("level", "every"), [(logging.WARNING, 1), (logging.INFO, 0)])
def test_when_off_nothing_is_read(lines, level, every):
    logger, found = lines
    logger.setLevel(level)
    DecisionLog(logger, every=every).step(["r1"], None, None, None)
    assert found == []

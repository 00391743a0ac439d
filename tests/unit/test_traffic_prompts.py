"""The load test's prompts: what is drawn, what is written, how long it is."""

import itertools
import random
from collections import Counter
from string import Template

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.traffic import burst
from loadtest.traffic.burst import burst_prompts
from loadtest.traffic.draw import Draws, dealt, pick, shuffled
from loadtest.traffic.kinds import GENRES, KINDS
from loadtest.traffic.prompts import LENGTHS, Limits, write

CPU = Limits(128, 512, 1000)  # for a tokenizer of single bytes, as tiny-deepseek's nearly is


def quarters(text):
    """Tokens as a big vocabulary has them."""
    return (len(text.encode()) + 3) // 4


def octets(text):
    return len(text.encode())


# -- draws -----------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.lists(st.integers(), max_size=20))
def test_shuffling_loses_nothing(seed, items):
    deck = shuffled(random.Random(seed), items)
    assert sorted(deck) == sorted(items)
    assert deck == shuffled(random.Random(seed), items)


def test_every_order_and_every_item_is_equally_likely():
    source = random.Random("a")
    orders = Counter("".join(shuffled(source, "abc")) for _ in range(6000))
    items = Counter(pick(source, "abcdef") for _ in range(6000))
    for counts in (orders, items):
        assert len(counts) == 6 and all(abs(many - 1000) < 150 for many in counts.values())


@given(
    st.integers(0, 2**32),
    st.integers(0, 300),
    st.dictionaries(st.text("abcdef", min_size=1), st.floats(0.01, 100), min_size=1),
)
def test_what_is_dealt_keeps_its_shares(seed, total, shares):
    counts = Counter(dealt(random.Random(seed), shares, total))
    assert counts.total() == total and set(counts) <= set(shares)
    for item, share in shares.items():
        assert counts[item] == pytest.approx(total * share / sum(shares.values()), abs=1)


def test_a_slot_has_one_word_and_a_given_one_stays():
    words = {"a": ("x", "y"), "b": ("z",)}
    for seed in range(20):
        draws = Draws(random.Random(seed), words, {"b": "given"})
        text = draws.fill("$a $a $b")
        assert text in ("x x given", "y y given") and draws.fill("$a $a $b") == text


# -- what prompts are written from -----------------------------------------------------------


def templates(kind):
    genre = GENRES[kind]
    pieces = [text for it in genre.documents for text in (it.head, *it.pieces, it.foot)]
    return [*genre.questions, *pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_has_words(kind):
    genre = GENRES[kind]
    known = set(genre.words) | {"index"}
    for text in templates(kind):
        assert Template(text).is_valid() and set(Template(text).get_identifiers()) <= known
    for document in genre.documents:
        assert set(document.kept) <= known
        assert all(piece.endswith("\n") for piece in document.pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_chinese_alone_is_chinese(kind):
    chinese = {any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in templates(kind)}
    assert (True in chinese) is (kind == "chinese")


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_stands_twice_where_each_should_be_as_likely(kind):
    for slot, words in GENRES[kind].words.items():
        assert len(words) > 1 and (slot == "level" or len(set(words)) == len(words))


# -- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "count"), [(Limits(512, 2048, 4096), quarters), (CPU, octets), (CPU, quarters)]
)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_as_long_as_was_ordered(kind, length, limits, count):
    lengths = limits.range(length)
    texts = [write(f"{number}", kind, lengths, count) for number in range(8)]
    assert all(count(text) in lengths for text in texts)
    assert len(set(texts)) == 8 and not any("$" in text for text in texts)
    assert texts[0] == write("0", kind, lengths, count)


@given(st.text(max_size=10), st.sampled_from(KINDS), st.integers(500, 900), st.integers(60, 600))
def test_narrow_ranges_are_reached(key, kind, least, width):
    lengths = range(least, least + width)
    assert quarters(write(key, kind, lengths, quarters)) in lengths


def test_what_each_count_adds_by_itself_is_no_obstacle():
    """A beginning of the sequence and a chat template come to every count."""
    lengths = range(200, 300)
    text = write("a", "code", lengths, lambda text: 90 + quarters(text))
    assert 110 <= quarters(text) < 210


def test_most_prompts_are_in_the_lower_half_of_their_range():
    sizes = [quarters(write(f"{i}", KINDS[i % 4], range(1, 512), quarters)) for i in range(200)]
    assert 60 < sum(sizes) / 200 < 190 and max(sizes) > 350


def test_short_prompts_are_questions_and_longer_ones_have_documents():
    texts = [write(f"{i}", "sql", range(1, 512), quarters) for i in range(60)]
    assert 10 < sum(quarters(text) < 50 for text in texts) < 50


@pytest.mark.parametrize("lengths", [range(1, 50), range(401, 410)])
def test_limits_that_cannot_be_met_are_refused(lengths):
    with pytest.raises(ValueError, match=f"of {lengths[0]} to {lengths[-1]} tokens"):
        write("a", "email", lengths, lambda text: 10 * quarters(text))


def test_the_classes_of_length_meet():
    limits = Limits(512, 4096, 9000)
    ranges = [limits.range(length) for length in LENGTHS]
    assert [(it[0], it[-1]) for it in ranges] == [(1, 511), (512, 4096), (4097, 9000)]


@pytest.mark.parametrize("limits", [(1, 4, 8), (5, 4, 8), (2, 8, 8)])
def test_limits_rise(limits):
    with pytest.raises(ValueError, match="rise"):
        Limits(*limits)


def test_five_thousand_prompts_without_a_repeat():
    """Of the shortest kind: whoever has a document differs by that."""
    lengths = range(1, 60)
    texts = {
        write(f"{kind}/{number}", kind, lengths, quarters)
        for kind, number in itertools.product(KINDS, range(1250))
    }
    assert len(texts) == 5000


# -- bursts ----------------------------------------------------------------------------------


def test_every_slot_of_a_burst_has_words():
    slots = [set(Template(text).get_identifiers()) for text in burst.TEMPLATES]
    assert set().union(*slots) == set(burst._WORDS)


def test_bursts_vary_with_the_seed_and_within():
    lists = [burst_prompts(seed, 200) for seed in range(4)]
    assert all(len(set(prompts)) == 200 for prompts in lists)
    assert len({prompt for prompts in lists for prompt in prompts}) > 795
    assert lists[0][:50] == burst_prompts(0, 50)
    assert burst_prompts(0, 0) == []


def test_bursts_sort_in_three_languages_and_tell_stories():
    prompts = burst_prompts(1, 1000)
    for wanted in ("quicksort in three", "快速排序", "markdown table", "short story", "短篇小说"):
        assert any(wanted in prompt for prompt in prompts)
    assert not any("$" in prompt for prompt in prompts)

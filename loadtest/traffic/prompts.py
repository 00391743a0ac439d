"""Made prompts of a kind and a length class."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtest.traffic.draw import Draws, pick
from loadtest.traffic.kinds import GENRES
from loadtest.traffic.kinds.genre import Genre

Count = Callable[[str], int]  # tokens of a text; must grow with it
LENGTHS = ("short", "medium", "long")
TRIES = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the length classes end, in tokens of the prompt."""

    short: int = 512  # short prompts stay below
    medium: int = 4096  # the most of a medium one
    long: int = 16_384  # the most of a long one: prompt and answer must fit into the context

    def __post_init__(self) -> None:
        if not 1 < self.short <= self.medium < self.long:
            raise ValueError(f"limits must rise: {self}")

    def range(self, length: str) -> range:
        """The token counts of a length class."""
        return {
            "short": range(1, self.short),
            "medium": range(self.short, self.medium + 1),
            "long": range(self.medium + 1, self.long + 1),
        }[length]


def write(key: str, kind: str, lengths: range, count: Count) -> str:
    """A prompt whose token count is in ``lengths``, the same for the same key.

    Most are near the lower end, as in logs: the mean is at about a quarter of the range.

    Raises:
        ValueError: nothing of this kind is so short, or so close between two limits.
    """
    source, genre = random.Random(key), GENRES[kind]
    for _ in range(TRIES):
        place = source.random()  # multiplied, since powers are not the same in every libm
        aim = lengths.start + int(len(lengths) * place * place * place)
        text = Draws(source, genre.words).fill(pick(source, genre.questions))
        if (tokens := count(text)) < aim:
            text, tokens = _with_document(source, genre, aim, count)
        if tokens in lengths:
            return text
    raise ValueError(
        f"found no {kind} prompt of {lengths.start} to {lengths.stop - 1} tokens in {TRIES} tries: "
        "the limits are too low or too close"
    )


def _with_document(source: random.Random, genre: Genre, aim: int, count: Count) -> tuple[str, int]:
    """A prompt with a document that takes it to ``aim`` tokens or little more, and its tokens."""
    document = pick(source, genre.documents)
    words = Draws(source, genre.words)
    head, foot = words.fill(document.head), words.fill(document.foot)
    kept = {slot: words[slot] for slot in document.kept}

    def pieces() -> Iterator[str]:
        for index in itertools.count(1):
            given = {**kept, "index": str(index)}
            yield Draws(source, genre.words, given).fill(pick(source, document.pieces))

    more, body = pieces(), ""
    characters = aim / 4  # too few for any tokenizer: from these it is seen how many are needed
    while True:
        body += _taken(more, characters)
        text = head + body + foot
        if (tokens := count(text)) >= aim:
            return text, tokens
        characters = (aim - tokens) * len(text) / max(tokens, 1)


def _taken(pieces: Iterator[str], characters: float) -> str:
    """The next pieces: as many as have so many characters together, and at least one."""
    taken = [next(pieces)]
    size = len(taken[0])
    while size < characters:
        taken.append(next(pieces))
        size += len(taken[-1])
    return "".join(taken)

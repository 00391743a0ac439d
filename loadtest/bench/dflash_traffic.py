"""Traffic for the DFlash cache: prompts that repeat, that are alike, that are new; and a client.

Every prompt is made from a ``random.Random``: the same seed, the same traffic.
"""

from __future__ import annotations

import itertools
import json
import random
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

from clients.request import MODEL, GenerationError
from loadtest.bench.trace import SLOTS, TEMPLATES

KINDS = ("code", "sql", "chinese", "email")
TEMPLATES_A_KIND = 8
_OK = b"HTTP/1.1 200"
SILENT_SECONDS = 120.0  # without a byte of any answer: the server is hung

# A trace's words are few, so that its questions repeat; here each template needs eight fillings.
_MORE_WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "chinese": {
        "place": ("南京", "重庆", "昆明", "青岛", "厦门", "哈尔滨"),
        "thing": ("月饼", "书法", "围棋", "京剧", "汤圆", "针灸"),
        "idea": ("量子计算", "供求关系", "进化论", "温室效应", "机器翻译", "复利"),
    },
    "email": {"person": ("Dr Novak", "our supplier", "Mrs Tanaka")},
}

_QUESTIONS = (
    "What is the most common mistake people make about $it?", "Tell a short story about $it.",
    "Who first worked on $it, and why?", "Name five facts about $it.", "Is $it overrated?",
    "Imagine a world without $it. What changes?", "How would you teach $it to a child?",
    "Write a dialogue between two friends about $it.", "What does $it cost, roughly?",
    "Compare $it with something similar.", "Which tools are needed for $it?",
    "Give a step by step guide to $it.", "Why did $it become popular?",
    "Invent a company name and a slogan for $it.", "What are the risks of $it?",
    "Describe the smell, sound and look of $it.", "How has $it changed in a hundred years?",
    "Argue for and against $it.", "Translate 'I am learning about $it' into French and explain it.",
    "Make a quiz of three questions on $it.", "What would an engineer say about $it?",
    "Summarise $it in one paragraph.", "Which book should I read about $it?",
    "Where in the world is $it best known?", "Write a song verse on $it.",
    "What do experts still not know about $it?", "Plan a lesson of one hour on $it.",
    "How can I get started with $it this weekend?", "Explain the history of $it backwards.",
    "What questions should I ask before $it?", "List the words one must know for $it.",
    "Give an unusual use of $it.",
)  # fmt: skip
_SUBJECTS = (
    "beekeeping", "glaciers", "the printing press", "sourdough bread", "chess openings",
    "coral reefs", "tax returns", "violin making", "volcanoes", "street markets", "solar panels",
    "origami", "migratory birds", "the metric system", "jazz", "deep-sea diving", "compost",
    "medieval castles", "public libraries", "earthquakes", "pottery", "night trains", "lighthouses",
    "cryptography", "mushroom picking", "the Silk Road", "wind turbines", "sign language",
    "ice skating", "telescopes", "perfume", "desert farming", "crossword puzzles", "antibiotics",
    "suspension bridges", "puppet theatre", "tides", "fountain pens", "bicycle repair",
    "the stock market", "fermentation", "maps", "kites", "stage lighting", "olive oil",
    "swimming lessons", "clockwork", "rainforests",
)  # fmt: skip
_STYLES = (
    "", " Be brief.", " Use simple words.", " Answer like a teacher.", " Be enthusiastic.",
    " Give one example.", " Start with the conclusion.", " Avoid technical terms.",
)  # fmt: skip


def templated(kind: str, each: int, source: random.Random) -> list[str]:
    """``each`` fillings of every template of a kind, all different, in random order."""
    prompts = []
    for template in map(Template, TEMPLATES[kind][:TEMPLATES_A_KIND]):
        names = template.get_identifiers()
        words = [(*SLOTS[kind][it], *_MORE_WORDS.get(kind, {}).get(it, ())) for it in names]
        for values in source.sample(list(itertools.product(*words)), each):
            prompts.append(template.substitute(dict(zip(names, values))))
    source.shuffle(prompts)
    return prompts


def novel(source: random.Random) -> Iterator[str]:
    """Questions without a repetition; question and subject meet again only in another style."""
    for style in source.sample(_STYLES, len(_STYLES)):
        pairs = list(itertools.product(_QUESTIONS, _SUBJECTS))
        source.shuffle(pairs)
        for question, subject in pairs:
            yield Template(question).substitute(it=subject) + style


@dataclass(frozen=True)
class Reply:
    """One answer as its client saw it; times in seconds from the request."""

    first_token: float
    total: float
    tokens: int
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False, default=())  # where return_token_ids asked


def chat_request(prompt: str, **sampling: Any) -> bytes:
    """A greedy streaming HTTP request of one user message."""
    body = json.dumps(
        {"messages": json.dumps([{"role": "user", "content": prompt}]), "stream": True,
         "return_num_output_tokens": True, "temperature": 0, **sampling}
    ).encode()  # fmt: skip
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """Event streams over connections that stay open, read by one thread and parsed only after
    the last has ended: what a client does with an answer is not the server's cost.
    """

    def __init__(self, url: str, connections: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(connections)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, requests: Sequence[bytes], concurrency: int) -> tuple[list[Reply], float]:
        """All replies, in order of the requests, and the seconds it took.

        Raises:
            GenerationError: the server's message.
            ConnectionError, TimeoutError: it closed a connection, or is silent.
        """
        waiting = iter(enumerate(requests))
        streams: dict[int, _Stream] = {}
        begin = time.perf_counter()
        with selectors.DefaultSelector() as selector:

            def start(connection: socket.socket) -> None:
                for number, request in itertools.islice(waiting, 1):
                    streams[number] = _Stream(connection)
                    selector.register(connection, selectors.EVENT_READ, streams[number])
                    connection.sendall(request)

            for connection in self._sockets[:concurrency]:
                start(connection)
            while selector.get_map():
                ready = selector.select(SILENT_SECONDS)
                if not ready:
                    raise TimeoutError(f"no byte of an answer for {SILENT_SECONDS:g} s")
                for key, _ in ready:
                    if key.data.read():
                        selector.unregister(key.fileobj)
                        start(key.data.connection)
        seconds = time.perf_counter() - begin
        return [streams[number].reply() for number in range(len(requests))], seconds

    def close(self) -> None:
        for each in self._sockets:
            each.close()


class _Stream:
    """One answer of ``/generate_stream`` as it arrives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._begin = time.perf_counter()
        self._first = self._last = 0.0
        self._data = b""

    def read(self) -> bool:
        """Take what is there. True: the answer is complete (the last chunk is empty)."""
        data = self.connection.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection in mid-answer")
        self._last = time.perf_counter() - self._begin
        self._data += data
        if len(self._data) >= len(_OK) and not self._data.startswith(_OK):
            raise GenerationError(self._data.decode(errors="replace"))
        if not self._first and b"data: " in self._data:
            self._first = self._last
        return self._data.endswith(b"\r\n0\r\n\r\n")

    def reply(self) -> Reply:
        lines = (line for line in self._data.splitlines() if line.startswith(b"data: "))
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        for event in events:
            if "error" in event:  # Triton reports errors inside HTTP 200
                raise GenerationError(event["error"])
        if not events:
            raise GenerationError(self._data.decode(errors="replace"))
        tokens = sum(event["num_output_tokens"] for event in events)
        text = "".join(event["text_output"] for event in events)
        ids = [event.get("token_ids", []) for event in events]  # one alone is no list in JSON
        flat = [token for some in ids for token in (some if isinstance(some, list) else [some])]
        return Reply(self._first, self._last, tokens, text, tuple(flat))

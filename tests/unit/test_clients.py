"""What the clients make of a server's responses."""

from clients import http_client
from clients.request import Answer, Chunk, Request


def test_cached_tokens_are_asked_for_and_an_answers_are_its_last_chunks():
    assert Request(text="x").fields()["return_num_cached_tokens"] is True
    chunks = [Chunk("a", None, (1,), 3, 3), Chunk("b", "stop", (2,), 3, 1)]
    answer = Answer.of(chunks)
    assert answer.num_cached_tokens == 1
    assert answer == Answer("ab", "stop", (1, 2), 3), "what it cost is no part of the answer"


def test_cached_tokens_of_a_server_that_tells_none():
    event = {"text_output": "a", "finish_reason": "stop"}
    assert http_client._chunk(event).num_cached_tokens == 0
    assert http_client._chunk({**event, "num_cached_tokens": 2}).num_cached_tokens == 2

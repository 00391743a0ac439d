"""Who shares an answer and who must not: twins in flight, tenants, sessions, the operator."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter

import httpx
import pytest
from deepseek_flash.contract import Control
from deepseek_flash.operate import main as operate
from deepseek_flash.triton_io import seal

from clients.grpc_client import GrpcClient
from clients.request import GenerationError, new_cancel_token
from loadtest.served import ROOT, free_ports
from tests.integration.raw import infer
from tests.integration.tenant import http_port, in_company

LONG = {"max_tokens": 80, "ignore_eos": True}


# -- twins in flight (CB-35) -----------------------------------------------------------------


def stampede(asked):
    """Ask (tenant, request) pairs all at once, every other one streamed."""
    doors = ("gRPC stream", "gRPC")
    ask = [(who, what, doors[place % 2]) for place, (who, what) in enumerate(asked)]
    return in_company(lambda it: it[0].ask(it[1], it[2]), ask, len(ask))


def test_a_stampede_is_one_run_of_each_tenant(tenant):
    """Who comes too late for the run finds what it left."""
    one, *two = (
        (who, who.request("stampede", **LONG)) for who in (tenant, *map(tenant.neighbour, "ab"))
    )
    alone = tenant.alone(one[1])
    with tenant.engine_runs(1 + 2):
        assert stampede([one] * 32) == [alone] * 32
        assert stampede([two[place // 2 % 2] for place in range(32)]) == [alone] * 32


def test_the_first_of_a_stampede_may_leave(tenant):
    client, token = GrpcClient(tenant.served.grpc), new_cancel_token()
    request = tenant.request("the leader leaves", **{**LONG, "max_tokens": 160})
    alone = tenant.alone(request)
    with tenant.engine_runs(1):
        leader = client.stream(dataclasses.replace(request, cancel_token=token))
        next(leader)
        followers = [client.stream(request) for _ in range(3)]
        first = [next(follower) for follower in followers]  # they have joined
        assert client.cancel(token)
        with pytest.raises(GenerationError, match="cancelled by its cancel_token"):
            list(leader)
        rest = in_company(list, followers)
    for head, tail in zip(first, rest):
        assert head.token_ids + sum((c.token_ids for c in tail), ()) == alone.token_ids
        assert head.text + "".join(c.text for c in tail) == alone.text
        assert tail[-1].finish_reason == alone.finish_reason


# -- tenants (CB-44, CB-45) ------------------------------------------------------------------


def test_no_tenant_finds_another_s_answer(tenant):
    a, b = tenant.neighbour("a"), tenant.neighbour("b")
    secret = [
        {"role": "system", "content": "balance: 5432"},
        {"role": "user", "content": "What is my account balance?"},
    ]
    with tenant.engine_runs(2):
        answer = a.learn(a.request(secret))
        before = tenant.lookups()
        assert b.ask(b.request(secret)) == answer == a.ask(a.request(secret))
        assert tenant.lookups() - before == Counter(miss=1, exact=1)


def test_opting_out_neither_reads_nor_feeds(tenant):
    request = tenant.request("opted out")
    entries = tenant.cache.stats()["entries"]
    with tenant.engine_runs(0):  # beside the two
        assert tenant.alone(request) == tenant.alone(request)
    assert tenant.cache.stats()["entries"] == entries and tenant.flush() == 0


# -- sessions --------------------------------------------------------------------------------


def user(text):
    return {"role": "user", "content": text}


def test_a_question_after_another_history_is_found_but_never_replayed(tenant):
    question = "And which of them is the best?"
    with tenant.engine_runs(3):
        tenant.learn(tenant.request([user(question)], session_id="short"))
        chat = [user("Name some rivers.")]
        first = tenant.learn(tenant.request(chat, session_id="long"))
        chat += [{"role": "assistant", "content": first.text}, user(question)]
        request = tenant.request(chat, session_id="long")
        alone, before = tenant.alone(request), tenant.lookups()
        assert tenant.ask(request) == alone
        assert tenant.lookups() - before == Counter(window=1)
        tenant.wait_until_known(request, len(alone.token_ids))
        assert tenant.ask(request) == alone


# -- the operator ----------------------------------------------------------------------------


def at(served, *words):
    grpc = served.grpc.rsplit(":", 1)[1]
    return [*words, "--http-port", str(http_port(served)), "--grpc-port", grpc]


def test_the_operator_looks_and_flushes(tenant, capsys):
    a, b = tenant.neighbour("a"), tenant.neighbour("b")
    command = [
        sys.executable,
        "-m",
        "deepseek_flash.operate",
        *at(tenant.served, "stats", "--json"),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "backend_src")}
    with tenant.engine_runs(5):
        answers = [each.learn(each.request("flushed")) for each in (a, b)]
        told = subprocess.run(command, env=environ, capture_output=True, check=True).stdout
        stats = json.loads(told)
        assert stats["entries"] >= 2 and stats["lookups"]["miss"] >= 2
        assert operate(at(tenant.served, "flush", "--cache-salt", a.salt)) == 0
        assert capsys.readouterr().out == "1 entries flushed\n"
        # Of a nothing is known any more, of b everything; after the second flush nothing at all.
        assert [each.learn(each.request("flushed")) for each in (a, b)] == answers
        entries = tenant.cache.stats()["entries"]
        assert operate(at(tenant.served, "flush")) == 0
        assert capsys.readouterr().out == f"{entries} entries flushed\n"
        assert tenant.cache.stats()["entries"] == 0
        assert [each.learn(each.request("flushed")) for each in (a, b)] == answers
    assert operate(at(tenant.served, "stats")) == 0
    assert capsys.readouterr().out.startswith("entries        2 of 1536")


def test_an_order_to_nobody_is_one_line(served, capsys):
    (port,) = free_ports(1)
    unknown = ["stats", "--http-port", str(port)]
    deaf = ["stats", "--http-port", str(http_port(served)), "--grpc-port", str(port)]
    for arguments in (unknown, deaf):
        assert operate(arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("operate: ")
        assert printed.err.count("\n") == 1 and str(port) in printed.err


def test_only_this_server_s_stages_and_operator_are_heard(tenant):
    order, secret = Control("flush"), tenant.cache.secret
    for message in (b"flush", b"x" * 200, seal(order, secret), seal(order, b"another" * 8)):
        _, error = infer(tenant.served.grpc, {"message": message}, model="dflash_cache")
        assert error.startswith("message: not made by this server")
    url = f"{tenant.served.http}/v2/models/dflash_cache/generate"
    response = httpx.post(url, json={"message": "flush"}, trust_env=False)
    assert response.status_code == 400 and "message" in response.json()["error"]

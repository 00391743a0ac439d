"""One-token probes on the real stack: answered at once, gone on with behind their backs (CB-22).

An extension begins in the same moment as the last response leaves, so whatever a client sends after
a probe's answer meets it.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from deepseek_flash.launcher.probe import send_control

from clients.grpc_client import GrpcClient
from clients.request import GenerationError, new_cancel_token
from loadtest.served import serving
from tests.integration.conftest import MODEL
from tests.integration.raw import infer, metric, settled, wait_for, wait_idle
from tests.integration.tenant import DOORS, Cache, EngineRuns, Tenant, in_company

MORE = 32  # probe_tokens
MANY = 1000  # of a server whose extensions take their time
# Without drafts: a long answer of a tiny model repeats itself, and then it is over too soon.
LASTING = {"ignore_eos": True, "use_dspark": False}
SEEDED = {"temperature": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def patient(reference) -> Iterator[Tenant]:
    flags = ["--engine-args", '{"max_model_len": 2048}', "--probe-interval", "86400"]
    with serving(MODEL, [*flags, "--probe-tokens", str(MANY)]) as served:
        yield Tenant(served, Cache(served, reference.encoder), "patient", EngineRuns(served))


def probe_of(asked):
    return replace(asked, sampling={**asked.sampling, "max_tokens": 1})


def ends(tenant):
    """How extensions ended so far: done, aborted, failed."""
    name = "deepseek_flash_probe_extensions_total"
    settled(tenant.served, name, ("deepseek_decoder",))
    return [metric(tenant.served, name, result=it) for it in ("done", "aborted", "failed")]


def known(tenant, asked):
    """Tokens that the cache could replay, of each choice."""
    return [len(replay.token_ids) for replay in tenant.cache.lookup(asked).replays]


# -- on the server that all tests share --------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"n": 2}, SEEDED, {**SEEDED, "n": 2}, {**SEEDED, "stop": ["\u0000never"]},
        {"frequency_penalty": 0.5}, {"stop": ["\u0000never"]}, {"min_tokens": 1},
        {"logit_bias": {"10": 3.0}},
    ],
    ids=str,
)  # fmt: skip
def test_the_request_in_earnest_is_replayed(tenant, sampling):
    earnest = tenant.request("warm up", ignore_eos=True, max_tokens=MORE, **sampling)
    probe = probe_of(earnest)
    alone = [tenant.choices(it, alone=True) for it in (probe, earnest)]
    choices = sampling.get("n", 1) if "seed" in sampling else 1
    wait_idle(tenant.served)
    with tenant.engine_runs(1):  # the probe's: what goes on behind it is no request's
        assert tenant.choices(probe) == alone[0]
        wait_for(lambda: known(tenant, earnest) == [MORE] * choices, 20, "its answer grows")
        assert tenant.choices(earnest) == alone[1]
        assert tenant.choices(probe) == alone[0]


def test_every_door_answers_a_probe_with_one_token(tenant):
    asked = {
        door: tenant.request(f"probed by {door}", ignore_eos=True, max_tokens=40) for door in DOORS
    }
    alone = in_company(tenant.alone, asked.values())
    ones = in_company(tenant.alone, map(probe_of, asked.values()))
    wait_idle(tenant.served)
    with tenant.engine_runs(2 * len(DOORS)):
        for (door, request), one, whole in zip(asked.items(), ones, alone):
            answer = tenant.ask(probe_of(request), door)
            assert answer == one and len(answer.token_ids) == 1, door
            assert answer.finish_reason == "length"
            tenant.wait_until_known(request, MORE)
            assert tenant.ask(request, door) == whole, door


def test_a_longer_request_computes_the_rest_only(tenant):
    asked = tenant.request("go on", ignore_eos=True, max_tokens=48)
    alone = tenant.alone(asked)
    wait_idle(tenant.served)
    with tenant.engine_runs(2):
        tenant.ask(probe_of(asked))
        tenant.wait_until_known(asked, MORE)
        responses, error = infer(tenant.served.grpc, asked.fields())
        assert error is None
    assert [int(it["num_output_tokens"][0]) for it in responses[:2]] == [16, 16]
    cached = [int(it["num_cached_tokens"][0]) for it in responses]
    assert cached[:2] == [alone.num_input_tokens] * 2 and cached[-1] < alone.num_input_tokens
    made = [token for it in responses for token in it["token_ids"].tolist()]
    assert made == list(alone.token_ids)


def test_an_answer_grows_from_budget_to_budget(tenant):
    budgets = (1, 2, MORE, MORE + 1, 60)
    asked = [tenant.request("grow", max_tokens=it, ignore_eos=True) for it in budgets]
    alone = in_company(tenant.alone, asked)
    wait_idle(tenant.served)
    with tenant.engine_runs(3):
        assert tenant.ask(asked[0]) == alone[0]
        tenant.wait_until_known(asked[-1], MORE)
        assert [tenant.learn(request) for request in asked] == alone
        assert [tenant.ask(request) for request in reversed(asked)] == alone[::-1]


def test_what_is_known_is_not_made_again(tenant):
    asked = tenant.request("known", ignore_eos=True, max_tokens=MORE)
    before = ends(tenant)
    with tenant.engine_runs(1):
        tenant.learn(asked)
        for _ in range(3):
            tenant.ask(probe_of(asked))
    assert ends(tenant) == before


def test_beside_others_nothing_is_extended(tenant):
    asked, token = tenant.request("beside", ignore_eos=True), new_cancel_token()
    client = GrpcClient(tenant.served.grpc)
    alone = tenant.alone(probe_of(asked))
    other = tenant.request("other", max_tokens=1900, use_dflash=False, **LASTING)
    before = ends(tenant)
    with tenant.engine_runs(2):
        stream = client.stream(replace(other, cancel_token=token))
        next(stream)
        assert tenant.learn(probe_of(asked)) == alone
        assert client.cancel(token), "it ran all the time"
        with pytest.raises(GenerationError, match="cancelled"):
            list(stream)
    assert ends(tenant) == before and known(tenant, asked) == [1], "nor is it made up for"


def test_whoever_opts_out_is_not_extended(tenant):
    asked = tenant.request("opted out", ignore_eos=True)
    before = ends(tenant)
    assert len(tenant.alone(probe_of(asked)).token_ids) == 1
    assert ends(tenant) == before and known(tenant, asked) == []


# -- on a server whose extensions take long ----------------------------------------------------


def test_a_request_aborts_an_extension(patient):
    asked = patient.request("interrupted", max_tokens=40, **LASTING)
    alone = patient.alone(asked)
    wait_idle(patient.served)
    done, aborted, failed = ends(patient)
    assert patient.ask(probe_of(asked)).token_ids == alone.token_ids[:1]
    assert patient.learn(asked) == alone
    assert ends(patient) == [done, aborted + 1, failed]
    assert known(patient, asked) == [40], "nothing is left of the extension"


def test_the_operator_aborts_an_extension(patient):
    asked = patient.request("for nobody", **LASTING)
    wait_idle(patient.served)
    done, aborted, failed = ends(patient)
    patient.ask(probe_of(asked))
    send_control(patient.served.grpc, "abort_all", patient.cache.secret, 10.0)
    assert ends(patient) == [done, aborted + 1, failed]
    assert known(patient, asked) == [1]


def test_a_newer_probe_is_extended_instead(patient):
    first, second = (patient.request(f"probe {n}", max_tokens=MANY, **LASTING) for n in (1, 2))
    wait_idle(patient.served)
    done, aborted, failed = ends(patient)
    patient.ask(probe_of(first))
    patient.ask(probe_of(second))
    wait_for(lambda: sum(known(patient, second)) == MANY, 120, "the second grows")
    assert ends(patient) == [done + 1, aborted + 1, failed]
    assert known(patient, first) == [1]

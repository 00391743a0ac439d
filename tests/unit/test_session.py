"""One request in the decoder, over scripted engines: it ends in exactly one way."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from deepseek_flash import metrics
from deepseek_flash.contract import Cancelled, Expired, InvalidField, Sampling
from deepseek_flash.decoder import session as session_module
from deepseek_flash.decoder.output import Output, Piece, from_vllm
from deepseek_flash.decoder.session import Session
from deepseek_flash.metrics import Recorder, Rolling
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fakes import make_plan

GREEDY = Sampling(temperature=0.0)
PASSED = -1.0  # a deadline, on a clock that began at zero
PAUSE, HANG, CANCEL = "pause", "hang", "cancel"  # what an engine does between its outputs


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    monkeypatch.setattr(session_module, "translate", lambda error: error)


def part(
    text="x", ids=(5,), reason=None, index=0, finished=False, total=None, logprobs=None, cached=0
):
    piece = Piece(index, text, ids, reason, cumulative_logprob=total, logprobs=logprobs)
    return Output((piece,), finished, num_cached_tokens=cached)


def last(text="end", reason="stop", **changes):
    return part(text, reason=reason, finished=True, **changes)


class Run:
    """A session that has ended: what its client got and what was counted."""

    def __init__(self, *script, cancel_first=False, **plan):
        self.script = script
        self.deltas, self.error, self.ends = [], None, 0
        self.engine_closed = False
        recorder = Recorder()
        plan = make_plan(**{"sampling": GREEDY, **plan})
        self.session = Session(plan, self.generate, self, recorder, Rolling(), Rolling())
        if cancel_first:
            self.session.cancel("by its cancel_token")
        asyncio.run(self.main())
        self.counts = {(s.name, *(v for _, v in s.labels)): n for s, n in recorder.take().items()}

    async def main(self):
        await asyncio.create_task(self.session.run())  # never raises

    async def generate(self, plan):
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if step == CANCEL:
                    asyncio.get_running_loop().call_soon(self.session.cancel, "by the operator")
                elif step == PAUSE:
                    await asyncio.sleep(0)
                elif step == HANG:
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.engine_closed = True

    def send(self, delta, last):
        assert not self.ends, "sent after the end"
        self.deltas.append(delta)
        self.ends += last

    def fail(self, error):
        self.error = error
        self.ends += 1

    @property
    def texts(self):
        return [delta.texts for delta in self.deltas]


# -- answers ---------------------------------------------------------------------------------


def test_streamed():
    run = Run(part("a"), PAUSE, part("b"), last("c"), stream=True)
    assert run.texts == [("a",), ("b",), ("c",)]
    assert [delta.finish_reasons for delta in run.deltas] == [(None,), (None,), ("stop",)]
    assert run.ends == 1 and run.error is None and run.engine_closed


def test_not_streamed_is_one_response_of_everything():
    run = Run(part("a", (1,)), part("b", (2, 3)), last("c", ids=(4,)), prepended_text="Q: ")
    assert run.texts == [("Q: abc",)]
    assert run.deltas[0].token_ids == ((1, 2, 3, 4),) and run.deltas[0].num_input_tokens == 3
    assert run.ends == 1


def test_choices_come_one_at_a_time_and_are_told_together():
    sampling = Sampling(n=2)
    run = Run(
        part("a", (1,), index=0), part("B", (2,), index=1), part("b", (3,), "length", index=0),
        last("C", ids=(4,), index=1), sampling=sampling,
    )  # fmt: skip
    assert run.texts == [("ab", "BC")]
    assert run.deltas[0].token_ids == ((1, 3), (2, 4))
    assert run.deltas[0].finish_reasons == ("length", "stop")
    assert run.counts["vllm:request_success_total", "length"] == 1


def test_a_streamed_choice_that_ended_stays_ended():
    run = Run(part(reason="stop", index=0), last("b", index=1), sampling=Sampling(n=2), stream=True)
    assert [delta.finish_reasons for delta in run.deltas] == [("stop", None), ("stop", "stop")]
    assert run.texts == [("x", ""), ("", "b")]


def test_greedy_choices_are_one_generation_told_n_times():
    run = Run(part("a"), last("b"), sampling=Sampling(temperature=0.0, n=3))
    assert run.texts == [("ab",) * 3]
    assert run.deltas[0].token_ids == ((5, 5),) * 3
    assert run.counts["vllm:generation_tokens_total",] == 2


@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ((2, 2, 2), (2, 2, 2)), ((None, None, None), (3, 3, 3)), ((None, 1, 1), (3, 1, 1)),
        ((None, None, 5), (3, 3, 2)), ((2, 1, 2), (2, 1, 1)),
    ],
)  # fmt: skip
def test_cached_tokens_are_all_until_the_engine_runs_and_never_rise(brought, told):
    one, two, three = brought
    script = part(cached=one), part(cached=two), last(cached=three)
    streamed, whole = Run(*script, stream=True), Run(*script)
    assert tuple(delta.num_cached_tokens for delta in streamed.deltas) == told
    assert [delta.num_cached_tokens for delta in whole.deltas] == [told[-1]]


def test_cached_tokens_of_choices_are_those_that_none_computed():
    script = part(reason="stop", index=0, cached=1), last(index=1, cached=2)
    for made in (script, script[::-1]):
        run = Run(*(replace(it, finished=it is made[-1]) for it in made), sampling=Sampling(n=2))
        assert run.deltas[0].num_cached_tokens == 1


@pytest.mark.parametrize(("vllms", "ours"), [(None, 0), (0, 0), (7, 7)])
def test_cached_tokens_of_vllm(vllms, ours):
    output = SimpleNamespace(outputs=[], finished=False, num_cached_tokens=vllms)
    assert from_vllm(output, None).num_cached_tokens == ours


def test_logprobs_are_plain_and_minus_infinity_can_be_said():
    def position(logprob):
        return {7: SimpleNamespace(logprob=logprob, rank=1, decoded_token="x")}

    run = Run(
        part(logprobs=[position(-0.5)], total=-0.5),
        last(logprobs=[position(float("-inf"))], total=-1.0),
        sampling=Sampling(temperature=0.0, logprobs=1), stream=True,
    )  # fmt: skip
    found = [delta.logprobs[0][0][7]["logprob"] for delta in run.deltas]
    assert found == [-0.5, -9999.0]
    assert [delta.cumulative_logprobs for delta in run.deltas] == [(-0.5,), (-1.0,)]


def test_books_of_an_answer():
    run = Run(part(ids=(1,)), part(ids=(2, 3)), last("", ids=()))
    assert run.counts["vllm:prompt_tokens_total",] == 3
    assert run.counts["vllm:generation_tokens_total",] == 3
    assert run.counts["dspark_tokens_total", "slow"] == 3
    assert run.counts["vllm:request_success_total", "stop"] == 1
    assert run.counts["vllm:time_to_first_token_seconds_count",] == 1
    assert run.counts["vllm:inter_token_latency_seconds_count",] == 2
    assert run.counts["vllm:e2e_request_latency_seconds_count",] == 1
    assert not any(key[0] == metrics.ERRORS.name for key in run.counts)


# -- other ends ------------------------------------------------------------------------------


def reason_of(run):
    """The label under which a failure was counted; a failure is no success."""
    assert run.ends == 1
    assert not any(key[0] == metrics.SUCCESSES.name for key in run.counts)
    return next((key[1] for key in run.counts if key[0] == metrics.ERRORS.name), None)


@pytest.mark.parametrize("stream", [True, False])
def test_deadline(stream):
    run = Run(part(ids=(1, 2)), HANG, deadline=PASSED, stream=stream)
    assert isinstance(run.error, Expired) and "after 2 tokens" in str(run.error)
    assert reason_of(run) == "deadline" and run.engine_closed


@pytest.mark.parametrize(
    "script", [(CANCEL, HANG), (part(), CANCEL, HANG), (CANCEL, PAUSE, last())]
)
def test_cancelled_in_the_middle(script):
    run = Run(*script, stream=True)
    assert isinstance(run.error, Cancelled) and "by the operator" in str(run.error)
    assert reason_of(run) is None and run.engine_closed
    assert run.counts["deepseek_flash_cancelled_total",] == 1


def test_cancelled_before_it_began():
    run = Run(last(), cancel_first=True)
    assert isinstance(run.error, Cancelled) and "by its cancel_token" in str(run.error)
    assert (metrics.ENGINE_RUNS.name,) not in run.counts and run.ends == 1


def test_who_cancels_first_is_named():
    run = Run(CANCEL, HANG, cancel_first=True)
    assert "by its cancel_token" in str(run.error)


@pytest.mark.parametrize("before", [(), (part(),)])
def test_an_engine_that_raises(before):
    run = Run(*before, InvalidField("regex", "does not compile"), stream=True)
    assert str(run.error).startswith("regex: ") and reason_of(run) == "invalid_argument"


def test_an_engine_that_aborts_is_no_success():
    run = Run(part("a"), last("b", reason="abort"), stream=True)
    assert isinstance(run.error, RuntimeError) and run.texts == [("a",)]
    assert reason_of(run) == "internal"


@pytest.mark.parametrize("script", [(), (part(),)])
def test_an_engine_that_ends_without_finishing(script):
    run = Run(*script)
    assert isinstance(run.error, RuntimeError) and reason_of(run) == "internal" and not run.deltas


@pytest.mark.parametrize("trouble", [HANG, RuntimeError("late"), PAUSE])
@pytest.mark.parametrize("stream", [True, False])
def test_trouble_after_the_engines_last_output_is_no_second_end(trouble, stream):
    run = Run(last(), CANCEL, trouble, stream=stream)
    assert run.ends == 1 and run.error is not None and not run.deltas


STEPS = st.sampled_from([PAUSE, CANCEL, part(), last(), last(reason="abort"), ValueError("oh")])


@given(st.lists(STEPS, max_size=7), st.booleans(), st.booleans(), st.sampled_from([None, PASSED]))
def test_whatever_happens_there_is_one_end(script, stream, cancel_first, deadline):
    run = Run(*script, stream=stream, cancel_first=cancel_first, deadline=deadline)
    assert run.ends == 1

"""What the worker tells, to whom, and how it is counted."""

import asyncio

from deepseek_flash import metrics
from deepseek_flash.decoder.reports import KEPT, Learned, Reports

NOTHING = {
    "requests": [], "tokens": {}, "passes": {}, "proposed": {}, "accepted": {}, "burst_tokens": 0,
    "steps": 0, "step_seconds": 0.0, "decision_seconds": 0.0, "cost_error": 0.0,
    "signals": [None, None, None],
}  # fmt: skip


def record(plan_id, choice=0, top1=(0.5, 0.9), accepted=None, saved=None):
    return {
        "plan_id": plan_id, "choice": choice, "top1": list(top1),
        "accepted": accepted or {}, "seconds_saved": saved or {}, "signature": b"abcd",
    }  # fmt: skip


class Worker:
    """Answers calls one at a time, as long as ``open`` is set."""

    def __init__(self):
        self.calls, self.told, self.error = [], [], None
        self.open = asyncio.Event()
        self.open.set()

    async def drain(self, ended):
        self.calls.append(list(ended))
        await self.open.wait()
        if self.error:
            raise self.error
        requests = [record(plan_id) for plan_id in ended] + self.told
        self.told = []
        return {**NOTHING, "requests": requests}


def run(main):
    async def inner():
        worker = Worker()
        await main(worker, Reports(worker.drain, metrics.Recorder()))

    asyncio.run(inner())


def test_a_plan_learns_what_is_its_own():
    async def main(worker, reports):
        worker.told = [
            record("b", 1, [0.1], {"chain": 2}, {"reference": 0.5, "chain": 9.0}),
            record("other"),
        ]
        learned = await reports.learned("b")
        assert learned == Learned({0: (0.5, 0.9), 1: (0.1,)}, True, 0.5, b"abcd")
        assert worker.calls == [["b"]]

    run(main)


def test_those_who_ask_during_a_call_share_the_next():
    async def main(worker, reports):
        worker.open.clear()
        asking = [asyncio.create_task(reports.learned(f"{n}")) for n in range(5)]
        await asyncio.sleep(0)
        asking += [asyncio.create_task(reports.learned(f"{n}")) for n in range(5, 9)]
        for _ in range(3):
            await asyncio.sleep(0)
        worker.open.set()
        assert all(await asyncio.gather(*asking))
        assert len(worker.calls) <= 2 and sum(map(len, worker.calls)) == 9

    run(main)


def test_a_dead_worker_is_nobodys_fault():
    async def main(worker, reports):
        worker.error = RuntimeError("the engine has died")
        assert await reports.learned("a") is None
        worker.error = None
        assert await reports.learned("b") is not None

    run(main)


def test_what_nobody_asks_for_is_forgotten():
    async def main(worker, reports):
        worker.told = [record(f"{n}") for n in range(2 * KEPT)]
        await reports.refresh()
        assert len(reports._records) == KEPT

    run(main)


def test_counts_and_gauges():
    found = {
        **NOTHING, "tokens": {"fast": 5, "slow": 2}, "passes": {"burst": 3}, "burst_tokens": 4,
        "proposed": {"chain": [3, 1], "history": [1]}, "accepted": {"chain": [2]}, "steps": 2,
        "step_seconds": 0.5, "decision_seconds": 0.01, "cost_error": 0.2,
        "signals": [1.5, None, 0.25],
    }  # fmt: skip
    recorder = metrics.Recorder()

    async def drain(ended):
        return found

    reports = Reports(drain, recorder)
    asyncio.run(reports.refresh())
    reports.set_gauges()
    told = {(s.name, *(v for _, v in s.labels)): n for s, n in recorder.take().items()}
    assert told.pop(("burst_count_per_second",)) > 0
    assert told == {
        ("dspark_tokens_total", "fast"): 5, ("dspark_tokens_total", "slow"): 2,
        ("dspark_passes_total", "burst"): 3, ("dspark_burst_tokens_total",): 4,
        ("dspark_drafts_proposed_total", "chain"): 4,
        ("dspark_drafts_proposed_total", "history"): 1,
        ("dspark_drafts_accepted_total", "chain"): 2,
        ("dspark_steps_total",): 2, ("dspark_step_seconds_total",): 0.5,
        ("dspark_decision_seconds_total",): 0.01, ("dspark_cost_error",): 0.2,
        ("dspark_entropy_ratio",): 1.5, ("dspark_attention_variance",): 0.25,
    }  # fmt: skip

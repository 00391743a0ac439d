"""A planner with a scripted tokenizer, for its tests."""

import pytest
from deepseek_flash.admission import AdmissionBoard
from deepseek_flash.contract import ClientRequest, InvalidField
from deepseek_flash.dspark.planner import Planner, PlannerOptions
from deepseek_flash.dspark.prompt import PromptEncoder
from deepseek_flash.dspark.sampling import SamplingLimits

from tests.unit.fakes import FACTS, FakeTokenizer

NOW = 1000.0


class PlannerBench:
    """A planner and the board that it fills."""

    def __init__(self, path, **options):
        self.board = AdmissionBoard(path / "board")
        self.facts = lambda: FACTS
        settings = {
            "burst_steps": 3,
            "probe_tokens": 32,
            "queue_limit": 8,
            "tenant_queue_limit": 0,
            "default_timeout_ms": 0,
            "limits": SamplingLimits(vocab_size=0),
        }
        self.planner = Planner(
            PlannerOptions(**{**settings, **options}), PromptEncoder(FakeTokenizer()), self.board,
            lambda: self.facts(), clock=lambda: NOW,
        )  # fmt: skip

    def plan(self, **inputs):
        return self.planner.plan(ClientRequest(**inputs))

    def refusal(self, kind=InvalidField, **inputs):
        """The message; whatever was refused holds no slot."""
        before = self.board.in_flight
        with pytest.raises(kind) as caught:
            self.plan(**inputs)
        assert self.board.in_flight == before
        return str(caught.value)

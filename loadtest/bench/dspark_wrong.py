"""A proposer whose guesses are always wrong and always sure: what the controller must survive."""

from __future__ import annotations

from deepseek_flash.dspark.drafts import Draft, Source
from deepseek_flash.dspark.policy import DraftRequest, Policy
from deepseek_flash.worker.proposer import SparkProposer

CLAIMED = 0.9
WRONG = 0  # a special token, which answers do not contain


class WrongPolicy(Policy):
    """As many tokens as there is room for, none of which comes."""

    def draft(self, request: DraftRequest) -> Draft:
        length = request.limit
        return Draft([WRONG] * length, [CLAIMED] * length, [Source.REFERENCE] * length)


class WrongProposer(SparkProposer):
    """The real one in all else."""

    def make_policy(self) -> Policy:
        return WrongPolicy()

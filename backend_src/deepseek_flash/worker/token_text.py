"""vLLM's own detokenizer and stop-string check, for tokens that no engine run of its front end saw.

What is replayed must read exactly as if the engine had made it: held-back characters, stop strings
over token borders, special tokens and all. So it is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class TokenText:
    """The text of one choice, token by token.

    Args:
        tokenizer: the engine's.
        params: as the engine would get them; the stop strings and presentation of the text count.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = EngineCoreRequest(
            request_id="replay", prompt_token_ids=list(prompt_token_ids), mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None,
            cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        # Without a tokenizer there is no text, which is how vLLM says detokenize=False.
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer if params.detokenize else None, request
        )

    def add(self, token: int, ends: bool) -> str | None:
        """Take in a token; the stop string that it completed, or None.

        Args:
            ends: it is the end-of-sequence or stop token with which the answer ends.
        """
        stop: str | None = self._detokenizer.update([token], ends)
        return stop

    def take(self, finished: bool) -> str:
        """The text since the last call. Until ``finished``, what may begin a stop string stays."""
        text: str = self._detokenizer.get_next_output_text(finished, delta=True)
        return text

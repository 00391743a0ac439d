"""What a request must keep to, and how it is brought to the form that the library takes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_flash.dspark.control_tokens import ControlTokens
from deepseek_flash.gateway.errors import GatewayError, invalid
from deepseek_flash.gateway.volatile import VolatileLines

MOST_MESSAGES = 4096
MOST_SEQUENCES = 128  # choices of all prompts of a request together
MOST_SCHEMA_CHARACTERS = 65_536

INTEGERS = (
    "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "seed", "top_k",
    "top_logprobs", "thinking_token_budget", "truncate_prompt_tokens",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
SWITCHES = (
    "stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "parallel_tool_calls", "return_token_ids", "use_dflash", "use_dspark",
)  # fmt: skip
AROUND = ("use_dflash", "use_dspark")  # to the ensemble, which knows them, and not to the library

# Fields of the library that would reach the engine, or read from it, in ways that are not served.
# (What it does not know never gets anywhere: a client's speculative settings among others.)
_REFUSED = {
    "use_beam_search": "beam search is not served",
    "best_of": "not supported; use n",
    "vllm_xargs": "not supported",
    "kv_transfer_params": "not supported",
    "ec_transfer_params": "not supported",
    "prompt_logprobs": "not supported",
    "logprob_token_ids": "not supported",
    "repetition_detection": "not supported",
    "prompt_embeds": "not supported",
    "mm_processor_kwargs": "not supported",
    "media_io_kwargs": "not supported",
    "chat_template": "not accepted from clients",
    "return_prompt_text": "not supported",
    "guided_json": "use response_format or structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
}
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"use_beam_search": (False,), "best_of": (1,)}


@dataclass(frozen=True)
class Rules:
    """What holds for every request."""

    names: tuple[str, ...]  # of the model; the first is told in answers
    aliases: tuple[str, ...]  # patterns of further names
    max_model_len: int
    control: ControlTokens
    volatile: VolatileLines
    tools: bool  # whether there is a parser of the model's calls

    def model(self, body: dict[str, Any]) -> None:
        """Bring the model's name to the first one.

        Raises:
            GatewayError: there is no such model.
        """
        asked = body.get("model")
        served = ", ".join((*self.names, *self.aliases))
        if not isinstance(asked, str) or not asked:
            raise invalid("model", f"missing; served are {served}")
        known = asked in self.names or any(fnmatch.fnmatchcase(asked, a) for a in self.aliases)
        if not known:
            message = f"The model `{asked[:100]}` does not exist; served are {served}"
            raise GatewayError(404, message, "model", "model_not_found")
        body["model"] = self.names[0]

    def max_tokens(self, body: dict[str, Any], *names: str) -> None:
        """Check the answer's limit. What is more than the context is the context: clients ask for
        256,000 by default. What the prompt leaves of it is settled when that is known."""
        given = [name for name in names if name in body]
        for name in given:
            if body[name] < 1:
                raise invalid(name, f"must be at least 1, got {body[name]}")
            body[name] = min(body[name], self.max_model_len)
        if len({body[name] for name in given}) > 1:
            raise invalid(given[0], f"differs from {given[1]}; give one of them")

    def functions(self, tools: Iterable[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
        """Functions that the model may call, masked.

        A forced call has a grammar anyway, so it is held to the parameters' schema too; else any
        JSON value would do, and not every client passes ``strict`` on.

        Raises:
            GatewayError: the model could call none of them.
        """
        if not self.tools and choice != "none":
            raise invalid("tools", "this model has no format of tool calls (gateway_tool_parser)")
        masked = [self.mask(tool) for tool in tools]
        if choice in ("none", "auto"):
            return masked
        return [{**tool, "strict": tool.get("strict") is not False} for tool in masked]

    def mask(self, value: Any) -> Any:
        """Every text in ``value`` with control tokens masked."""
        if isinstance(value, str):
            return self.control.mask(value)
        if isinstance(value, list):
            return [self.mask(item) for item in value]
        if isinstance(value, dict):
            return {self.mask(key): self.mask(item) for key, item in value.items()}
        return value


def refuse(body: dict[str, Any]) -> None:
    """Drop what is null, and raise GatewayError for a field that is not served."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name, reason in _REFUSED.items():
        if name in body and body[name] not in _HARMLESS.get(name, ()):
            raise invalid(name, reason)


def check_types(body: Mapping[str, Any]) -> None:
    """Raise GatewayError for a number or switch of another type: the library would convert it."""
    for names, kinds, what in (
        (INTEGERS, (int,), "an integer"),
        (NUMBERS, (int, float), "a number"),
    ):
        for name in names:
            if name in body and (isinstance(body[name], bool) or not isinstance(body[name], kinds)):
                raise invalid(name, f"must be {what}")
    for name in SWITCHES:
        if name in body and not isinstance(body[name], bool):
            raise invalid(name, "must be true or false")


def stops(name: str, value: Any) -> list[str]:
    """Stop strings as a list. The ensemble judges their number and size."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or any(not isinstance(s, str) or not s for s in found):
        raise invalid(name, "must be a non-empty string or a list of them")
    return sorted(set(found))


def check_sequences(prompts: int, n: int) -> None:
    if n < 1:
        raise invalid("n", f"must be at least 1, got {n}")
    if prompts * n > MOST_SEQUENCES:
        raise invalid("n", f"at most {MOST_SEQUENCES} choices of all prompts together")

"""What nobody here wrote, made comparable: each does the same five things in its own words.

``leave`` begins an answer that would be long, takes its first piece, and goes away as one does
with this client.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet when imported

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 1900}
NO_END: dict[str, Any] = {"ignore_eos": True, "use_dspark": False, "use_dflash": False}
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {"name": "choose", "description": "Chooses.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
NAMED = {"type": "function", "function": {"name": TOOL["name"]}}
# For calls: at temperature 0 a model that knows nothing fills their JSON with spaces for ever.
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1000}
SEED = 0
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "choice", "schema": SCHEMA, "strict": True},
}
ROOM = 300  # tokens for JSON


@dataclass(frozen=True)
class Door:
    """Where to go, and as whom."""

    url: str
    key: str
    model: str


class Client(Protocol):
    def chat(self, text: str) -> str: ...
    def stream(self, text: str) -> str: ...
    def tool(self, text: str) -> tuple[str, dict[str, Any]]: ...
    def json(self, text: str) -> str: ...
    def leave(self, text: str) -> None: ...


def turns(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class OpenAIPython:
    def __init__(self, door: Door) -> None:
        import openai

        client = openai.OpenAI(api_key=door.key, base_url=door.url + "/v1")
        self._ask: Any = client.chat.completions.create
        self._model = door.model

    def chat(self, text: str) -> str:
        found = self._ask(model=self._model, messages=turns(text), **GREEDY)
        assert found.usage.total_tokens == found.usage.prompt_tokens + GREEDY["max_tokens"]
        return found.choices[0].message.content

    def stream(self, text: str) -> str:
        chunks = list(self._ask(model=self._model, messages=turns(text), stream=True,
                                stream_options={"include_usage": True}, **GREEDY))  # fmt: skip
        assert chunks[-1].usage.completion_tokens == GREEDY["max_tokens"]
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def tool(self, text: str) -> tuple[str, dict[str, Any]]:
        asked = {
            "model": self._model, "messages": turns(text), "tools": TOOLS, "tool_choice": NAMED,
            "seed": SEED, **SAMPLED,
        }  # fmt: skip
        (call,) = self._ask(**asked).choices[0].message.tool_calls
        deltas = [chunk.choices[0].delta for chunk in self._ask(stream=True, **asked)]
        parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
        assert "".join(part.name or "" for part in parts) == call.function.name
        streamed = "".join(part.arguments or "" for part in parts)
        assert json.loads(streamed) == json.loads(call.function.arguments)
        return call.function.name, json.loads(call.function.arguments)

    def json(self, text: str) -> str:
        found = self._ask(model=self._model, messages=turns(text), response_format=FORM,
                          temperature=0, max_tokens=ROOM)  # fmt: skip
        return found.choices[0].message.content

    def leave(self, text: str) -> None:
        with self._ask(model=self._model, messages=turns(text), stream=True, extra_body=NO_END,
                       **LONG) as stream:  # fmt: skip
            next(iter(stream))


class AnthropicPython:
    def __init__(self, door: Door) -> None:
        import anthropic

        self._messages: Any = anthropic.Anthropic(api_key=door.key, base_url=door.url).messages

    def _asked(self, text: str, tokens: int, **body: Any) -> dict[str, Any]:
        body = {"temperature": 0, **body}  # not a parameter of this version
        model = "claude-opus-4-8"  # an alias
        return {"model": model, "messages": turns(text), "max_tokens": tokens, "extra_body": body}

    def chat(self, text: str) -> str:
        found = self._messages.create(**self._asked(text, GREEDY["max_tokens"]))
        assert found.stop_reason == "max_tokens"
        assert found.usage.output_tokens == GREEDY["max_tokens"]
        return found.content[0].text

    def stream(self, text: str) -> str:
        with self._messages.stream(**self._asked(text, GREEDY["max_tokens"])) as stream:
            streamed = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].text == streamed
        return streamed

    def tool(self, text: str) -> tuple[str, dict[str, Any]]:
        tool = {"name": TOOL["name"], "input_schema": SCHEMA}
        choice = {"type": "tool", "name": TOOL["name"]}
        asked = self._asked(text, SAMPLED["max_tokens"], temperature=1.0, seed=SEED)
        found = self._messages.create(tools=[tool], tool_choice=choice, **asked)
        assert found.stop_reason == "tool_use"
        (call, *_) = [block for block in found.content if block.type == "tool_use"]
        return call.name, call.input

    def json(self, text: str) -> str:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        found = self._messages.create(output_config=form, **self._asked(text, ROOM))
        return found.content[0].text

    def leave(self, text: str) -> None:
        with self._messages.stream(**self._asked(text, LONG["max_tokens"], **NO_END)) as stream:
            next(iter(stream.text_stream))


class DeepSeekHarness:
    def __init__(self, door: Door) -> None:
        import deepseek_harness

        self._client = deepseek_harness.DeepSeekHarness(
            api_key=door.key, base_url=door.url, disable_thinking_by_default=True
        )
        self._model = "deepseek-v4-pro"  # its own name for what it asks

    def chat(self, text: str) -> str:
        found = self._client.chat(model=self._model, messages=turns(text), **GREEDY)
        assert found["finish_reason"] == "length" and found["usage"]["cache_hit_rate"] >= 0
        return str(found["message"]["content"])

    def stream(self, text: str) -> str:
        *pieces, done = self._client.stream_chat(model=self._model, messages=turns(text), **GREEDY)
        assert done["type"] == "done" and done["usage"]["completion_tokens"] > 0
        return "".join(piece["data"] for piece in pieces if piece["type"] == "content_delta")

    def tool(self, text: str) -> tuple[str, dict[str, Any]]:
        found = self._client.chat(
            model=self._model, messages=turns(text), tools=TOOLS, tool_choice=NAMED, seed=SEED,
            **SAMPLED,
        )  # fmt: skip
        assert found["salvage"] is None  # it mends calls that came as text: ours need none
        (call, *_) = found["message"]["tool_calls"]
        return call["function"]["name"], json.loads(call["function"]["arguments"])

    def json(self, text: str) -> str:
        found = self._client.chat(model=self._model, messages=turns(text), response_format=FORM,
                                  temperature=0, max_tokens=ROOM)  # fmt: skip
        return str(found["message"]["content"])

    def leave(self, text: str) -> None:
        stream = self._client.stream_chat(
            model=self._model, messages=turns(text), extra_body=NO_END, **LONG
        )
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator


class LiteLLM:
    def __init__(self, door: Door) -> None:
        import litellm

        self._litellm: Any = litellm
        self._door = {
            "model": f"hosted_vllm/{door.model}", "api_key": door.key, "api_base": door.url + "/v1",
        }  # fmt: skip

    def chat(self, text: str) -> str:
        found = self._litellm.completion(messages=turns(text), **GREEDY, **self._door)
        return str(found.choices[0].message.content)

    def stream(self, text: str) -> str:
        chunks = self._litellm.completion(messages=turns(text), stream=True, **GREEDY, **self._door)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def tool(self, text: str) -> tuple[str, dict[str, Any]]:
        found = self._litellm.completion(
            messages=turns(text), tools=TOOLS, tool_choice=NAMED, seed=SEED, **SAMPLED, **self._door
        )
        (call, *_) = found.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def json(self, text: str) -> str:
        found = self._litellm.completion(messages=turns(text), response_format=FORM, temperature=0,
                                         max_tokens=ROOM, **self._door)  # fmt: skip
        return str(found.choices[0].message.content)

    def leave(self, text: str) -> None:
        async def begin() -> None:
            stream = await self._litellm.acompletion(
                messages=turns(text), stream=True, extra_body=NO_END, **LONG, **self._door
            )
            await anext(aiter(stream))
            await stream.aclose()

        asyncio.run(begin())


class LangChain:
    def __init__(self, door: Door) -> None:
        from langchain_openai import ChatOpenAI

        def model(**settings: Any) -> Any:
            settings = {"temperature": 0, **settings}
            return ChatOpenAI(
                model=door.model, api_key=door.key, base_url=door.url + "/v1", stream_usage=True,
                **settings,
            )  # fmt: skip

        self._model = model

    def chat(self, text: str) -> str:
        return str(self._model(max_tokens=GREEDY["max_tokens"]).invoke(text).content)

    def stream(self, text: str) -> str:
        chunks = list(self._model(max_tokens=GREEDY["max_tokens"]).stream(text))
        assert any(chunk.usage_metadata for chunk in chunks)
        return "".join(chunk.content for chunk in chunks)

    def tool(self, text: str) -> tuple[str, dict[str, Any]]:
        bound = self._model(seed=SEED, **SAMPLED).bind_tools(TOOLS, tool_choice=TOOL["name"])
        (call, *_) = bound.invoke(text).tool_calls
        return call["name"], call["args"]

    def json(self, text: str) -> str:
        schema = {"title": "choice", "description": "A choice.", **SCHEMA}
        model = self._model(max_tokens=ROOM).with_structured_output(schema, method="json_schema")
        return json.dumps(model.invoke(text))

    def leave(self, text: str) -> None:
        model = self._model(max_tokens=LONG["max_tokens"], extra_body=NO_END)
        stream = model.stream(text)
        next(stream)
        stream.close()


CLIENTS: dict[str, Callable[[Door], Client]] = {
    "openai-python": OpenAIPython,
    "anthropic-python": AnthropicPython,
    "deepseek-harness": DeepSeekHarness,
    "litellm": LiteLLM,
    "langchain": LangChain,
}

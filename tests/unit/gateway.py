"""The gateway as its clients meet it: vLLM's real routes over the ensemble of this process."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from deepseek_flash import triton_io
from deepseek_flash.config import GatewayConfig
from deepseek_flash.gateway.app import Gateway, open_gateway
from deepseek_flash.gateway.keys import Keyring, hashed
from deepseek_flash.runtime import Runtime

from tests.unit import gateway_model
from tests.unit.ensemble import PB_UTILS, Ensemble

MODEL = "served"
NAMES = (MODEL, "other-name")
KEY_A, KEY_B = "key-tenant-a", "key-tenant-b"
KEYS = ",".join((hashed("a", KEY_A), hashed("b", KEY_B)))
SETTINGS = GatewayConfig(gateway_keys=KEYS, gateway_keep_alive_seconds=1, gateway_max_body_mb=2)
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = "/v1/messages/count_tokens"


@cache
def library(mode: str = "auto") -> Any:
    """vLLM's part: seconds, so once for all. ``mode``: a tokenizer mode of vLLM's."""
    from deepseek_flash.gateway.library import load

    folder = gateway_model.save(Path(tempfile.mkdtemp(prefix="gateway-model-")))
    engine = {"model": str(folder), "max_model_len": gateway_model.CONTEXT, "dtype": "float32",
              "tokenizer_mode": mode}  # fmt: skip
    return load(engine, SETTINGS, NAMES)


class Answer:
    """A response, whole or streamed."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.raw = response.content
        self.streamed = response.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def frames(self) -> list[tuple[str | None, str]]:
        """Event name and data of each event; comments are none."""
        found = []
        for block in self.raw.decode().split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            if not lines:
                continue
            names = [line[7:] for line in lines if line.startswith("event: ")]
            (data,) = [line[6:] for line in lines if line.startswith("data: ")]
            found.append((names[0] if names else None, data))
        return found

    @property
    def events(self) -> list[Any]:
        return [json.loads(data) for _, data in self.frames if data != "[DONE]"]

    @property
    def done(self) -> bool:
        return self.frames[-1][1] == "[DONE]"

    # -- OpenAI --------------------------------------------------------------------------------

    @property
    def choices(self) -> list[Any]:
        """The choices of all chunks, or of the whole answer."""
        if not self.streamed:
            return list(self.json["choices"])
        return [choice for event in self.events for choice in event["choices"]]

    def text(self, index: int = 0, field: str = "content") -> str:
        found = []
        for choice in self.choices:
            if choice["index"] == index:
                part = choice.get("delta") or choice.get("message") or choice
                found.append(part.get("text" if "text" in choice else field) or "")
        return "".join(found)

    @property
    def reasoning(self) -> str:
        return self.text(field="reasoning_content")

    def reasons(self, index: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices
                if c["index"] == index and c["finish_reason"] is not None]  # fmt: skip

    @property
    def usage(self) -> Any:
        if not self.streamed:
            return self.json["usage"]
        found = [event["usage"] for event in self.events if event.get("usage")]
        return found[-1] if found else None


class Door:
    """A gateway, and the ensemble behind it."""

    def __init__(self, ensemble: Ensemble, mode: str, **settings: Any) -> None:
        self.ensemble = ensemble
        self.engine = ensemble.engine
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        config = replace(SETTINGS, **settings)
        self.gateway: Gateway = self.run(
            open_gateway(library(mode), config, NAMES, f"127.0.0.1:{ensemble.port}",
                         Keyring.of(config))
        )  # fmt: skip
        self.client: httpx.AsyncClient = self.run(self._open())

    async def _open(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.gateway.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.gateway.triton.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    # -- asking --------------------------------------------------------------------------------

    async def send(self, method: str, path: str, key: str | None = KEY_A, **options: Any) -> Answer:
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers.setdefault("authorization", f"Bearer {key}")
        return Answer(await self.client.request(method, path, headers=headers, **options))

    def get(self, path: str, **options: Any) -> Answer:
        return self.run(self.send("GET", path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        if body is not None:
            options["json"] = body
        return self.run(self.send("POST", path, **options))

    def raw(self, path: str, content: bytes, media: str = "application/json") -> Answer:
        return self.post(path, content=content, headers={"content-type": media})

    def chat(self, text: Any = "Hello", key: str | None = KEY_A, **fields: Any) -> Answer:
        return self.post(CHAT, chat_body(text, **fields), key=key)

    def complete(self, prompt: Any = "Hello", key: str | None = KEY_A, **fields: Any) -> Answer:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
        return self.post(COMPLETIONS, body, key=key)

    def message(self, text: Any = "Hello", key: str | None = KEY_A, **fields: Any) -> Answer:
        return self.post(MESSAGES + "?beta=true", message_body(text, **fields), key=key)

    # -- the ensemble's side -------------------------------------------------------------------

    def says(self, *steps: Any) -> None:
        """What the model answers from now on, whatever it is asked."""
        self.engine.says = lambda plan, index: list(steps)

    @property
    def prompt(self) -> str:
        """The prompt of the last request that was planned."""
        return gateway_model.text_of(list(self.ensemble.planned[-1].prompt_token_ids))

    @property
    def plan(self) -> Any:
        return self.ensemble.planned[-1]


def chat_body(text: Any = "Hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def message_body(text: Any = "Hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400, **fields}


@contextmanager
def serving(mode: str = "auto", **settings: Any) -> Iterator[Door]:
    """A door over an ensemble of its own."""
    before = triton_io.pb_utils, sys.modules.get("triton_python_backend_utils")
    triton_io.pb_utils = PB_UTILS
    sys.modules["triton_python_backend_utils"] = PB_UTILS  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            runtime = Runtime(Path(folder) / "runtime", b"k" * 32)
            ensemble = Ensemble(library(mode).renderer.get_tokenizer(), runtime)
            door = Door(ensemble, mode, **settings)
            try:
                yield door
            finally:
                door.close()
                ensemble.close()
    finally:
        triton_io.pb_utils = before[0]
        if before[1] is None:
            del sys.modules["triton_python_backend_utils"]
        else:
            sys.modules["triton_python_backend_utils"] = before[1]


USAGE = {"stream_options": {"include_usage": True}}


def four_ways(door: Door, **fields: Any) -> Answer:
    """The same chat streamed and not, each from an empty cache and from the other's entry: the
    same answer, by one run of the engine. Returns a whole one."""
    found = []
    for first in (False, True):
        door.ensemble.reset()
        before = door.ensemble.runs
        for stream in (first, not first, first):
            extra = {"stream": True, **USAGE} if stream else {}
            found.append(door.chat(**fields, **extra))
        assert door.ensemble.runs == before + 1
    whole = found[0]
    assert {answer.status for answer in found} == {200}
    for answer in found:
        assert (answer.text(), answer.reasoning) == (whole.text(), whole.reasoning)
        assert answer.reasons() == whole.reasons() and len(answer.reasons()) == 1
        for name in ("prompt_tokens", "completion_tokens", "total_tokens",
                     "completion_tokens_details"):  # fmt: skip
            assert answer.usage[name] == whole.usage[name]
    return whole

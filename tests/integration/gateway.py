"""A server with a gateway and two tenants, and how tests ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from deepseek_flash.gateway.keys import hashed

from loadtest.served import Served, serving
from tests.integration.raw import settled

KEY_A, KEY_B = "key-tenant-a", "key-tenant-b"
NAME = "tiny-deepseek"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Gateway:
    """A server with a gateway, and a salt for the test at hand."""

    served: Served
    url: str
    salt: str = ""

    def post(self, path, body, key=KEY_A, **options):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120, **options)

    def body(self, text="Hello", **fields):
        turns = [{"role": "user", "content": text}] if isinstance(text, str) else text
        body = {"model": NAME, "messages": turns, "temperature": 0, "max_tokens": 24}
        return {**body, "cache_salt": self.salt, **fields}

    def chat(self, text="Hello", key=KEY_A, **fields):
        response = self.post("/v1/chat/completions", self.body(text, **fields), key)
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def text(self, *args, **fields):
        return self.chat(*args, **fields)["choices"][0]["message"]["content"]

    def runs(self):
        return settled(self.served, "deepseek_flash_engine_runs_total")


@contextmanager
def serving_gateway() -> Iterator[Gateway]:
    # A model that knows nothing would fill its JSON with spaces until it is cut off.
    engine = {
        "max_model_len": 2048,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    flags = [
        "--engine-args", json.dumps(engine), "--probe-interval", "86400",
        "--gateway-keys", f"{hashed('a', KEY_A)},{hashed('b', KEY_B)}",
        "--gateway-tool-parser", "hermes",
    ]  # fmt: skip
    with serving(NAME, flags, gateway=True) as served:
        yield Gateway(served, served.gateway)

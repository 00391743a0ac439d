"""deepseek-harness without its own speculation: every generation goes to the gateway.

Put this in the place of the harness's decoder: in ``harness/config.yaml`` set
``speculative_decoding: false`` and remove ``draft_model``, and let ``/generate`` call ``generate``.
Unset ``VLLM_USE_FLASH_ATTN`` where the engine runs (``make serve`` does it for the engine).
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

URL = os.environ.get("DEEPSEEK_BASE_URL", "http://127.0.0.1:9000") + "/v1/chat/completions"
KEY = os.environ.get("DEEPSEEK_API_KEY", "none")
OWN_SPECULATION = ("speculative_decoding", "speculative_config", "draft_model")


def generate(
    messages: list[dict[str, Any]], client: httpx.Client | None = None, **sampling_params: Any
) -> Iterator[str]:
    """The answer's text as it comes. Whoever stops reading has cancelled it on the server."""
    wanted = {k: v for k, v in sampling_params.items() if k not in OWN_SPECULATION}
    body = {"model": "deepseek-chat", "use_dflash": True, **wanted, "messages": messages}
    client = client or httpx.Client(timeout=300)
    headers = {"authorization": f"Bearer {KEY}"}
    with client.stream("POST", URL, json={**body, "stream": True}, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["delta"].get("content") or ""

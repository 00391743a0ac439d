"""The gateway as one ASGI application: the door, vLLM's routes behind it, and our own few."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from deepseek_flash.config import GatewayConfig
from deepseek_flash.gateway.door import Door
from deepseek_flash.gateway.keys import Keyring
from deepseek_flash.gateway.library import Library, make_app
from deepseek_flash.gateway.rules import Rules
from deepseek_flash.gateway.triton import TritonClient
from deepseek_flash.gateway.volatile import VolatileLines


@dataclass(frozen=True)
class Gateway:
    """What a server needs to run; ``app`` must be called on the loop that made ``triton``."""

    app: Door
    triton: TritonClient


def model_names(settings: GatewayConfig, engine_args: dict[str, Any]) -> tuple[str, ...]:
    """The names by which the model is served."""
    given = tuple(n.strip() for n in settings.gateway_model_names.split(",") if n.strip())
    return given or (Path(engine_args["model"]).name,)


async def open_gateway(
    library: Library, settings: GatewayConfig, names: tuple[str, ...], url: str, keyring: Keyring
) -> Gateway:
    """Put it together over the ensemble at a gRPC address."""
    triton = TritonClient(url)
    app = await make_app(library, triton)
    registry = prometheus_client.CollectorRegistry()
    requests = prometheus_client.Counter(
        "deepseek_flash_gateway_requests", "Requests answered.", ("route", "status"),
        registry=registry,
    )  # fmt: skip
    _add_models(app, names, library.max_model_len)
    _add_metrics(app, registry)
    aliases = settings.gateway_model_aliases
    rules = Rules(
        names=names,
        aliases=() if aliases == "none" else tuple(a.strip() for a in aliases.split(",") if a),
        max_model_len=library.max_model_len,
        control=library.control,
        volatile=VolatileLines.of(settings.gateway_volatile_lines),
        tools=library.args.tool_call_parser is not None,
    )
    door = Door(
        app, rules, keyring, settings.gateway_tenant_limit,
        settings.gateway_max_body_mb * 1_000_000, settings.gateway_keep_alive_seconds,
        lambda route, status: requests.labels(route, status).inc(),
    )  # fmt: skip
    return Gateway(door, triton)


def _add_models(app: FastAPI, names: tuple[str, ...], context: int) -> None:
    """The list of models. The library's own tells where they lie on the disk."""
    since = int(time.time())
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": since, "owned_by": "deepseek-flash",
            "max_model_len": context,
            "type": "model", "display_name": name, "created_at": when,  # Anthropic's
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list", "data": [described(name) for name in names],
            "has_more": False, "first_id": names[0], "last_id": names[-1],
        }  # fmt: skip

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name in names:
            return described(name)
        message = f"The model `{name[:100]}` does not exist; served are {', '.join(names)}"
        return JSONResponse({"error": {"message": message, "param": "model"}}, status_code=404)


def _add_metrics(app: FastAPI, registry: Any) -> None:
    """Of the gateway alone, and of all tenants together: nobody sees another's hits."""

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

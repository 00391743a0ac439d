"""vLLM's serving layer, put together for a gateway: the one place that knows how it is built."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic import api_router as anthropic_routes
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator import health as health_routes
from vllm.entrypoints.serve.tokenize import api_router as tokenize_routes
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser

from deepseek_flash.config import ConfigError, GatewayConfig
from deepseek_flash.dspark.control_tokens import ControlTokens
from deepseek_flash.gateway import call as calls
from deepseek_flash.gateway.door import ROUTES
from deepseek_flash.gateway.engine import TritonEngine
from deepseek_flash.gateway.errors import context_exceeded
from deepseek_flash.gateway.parsers import reasoning_parser, tool_parser
from deepseek_flash.gateway.triton import TritonClient
from deepseek_flash.gateway.turns import TurnFinder
from deepseek_flash.worker.version import check_vllm

_ROUTERS = (chat_routes, completion_routes, anthropic_routes, tokenize_routes, health_routes)


@dataclass
class Library:
    """Everything that is made once of a model: its configuration and its tokenizer, no weights."""

    config: VllmConfig
    args: Namespace
    renderer: Any
    control: ControlTokens
    turns: TurnFinder

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)


def load(engine_args: dict[str, Any], settings: GatewayConfig, names: Iterable[str]) -> Library:
    """Read the model's configuration and tokenizer.

    Raises:
        ConfigError: a parser that the library does not have.
        RuntimeError: an unsupported vLLM.
    """
    check_vllm()
    known = AsyncEngineArgs.__dataclass_fields__
    engine = AsyncEngineArgs(**{k: v for k, v in engine_args.items() if k in known})
    model = engine.create_model_config()
    model.quantization = None  # of weights that are not here
    config = VllmConfig(
        model_config=model, structured_outputs_config=engine.create_structured_outputs_config()
    )
    renderer = renderer_from_config(config)
    tokenizer = renderer.tokenizer
    control = ControlTokens(tokenizer)
    _read_masks(tokenizer, control)
    _judge_length(renderer, model.max_model_len)
    args = _arguments(engine, str(model.tokenizer_mode), settings, names, tokenizer)
    return Library(config, args, renderer, control, TurnFinder(tokenizer, control))


def _arguments(
    engine: Any, mode: str, settings: GatewayConfig, names: Iterable[str], tokenizer: Any
) -> Namespace:
    """vLLM's own command line, as its server would have parsed it."""
    tools = tool_parser(settings.gateway_tool_parser, mode, tokenizer)
    asked = settings.gateway_reasoning_parser
    if asked == "auto" and engine.reasoning_parser:
        asked = engine.reasoning_parser  # of model.json: the engine's grammars wait by it
    reasoning = reasoning_parser(asked, mode, tokenizer)
    line = ["--model", engine.model, "--served-model-name", *names,
            "--enable-prompt-tokens-details", "--disable-log-stats"]  # fmt: skip
    if tools is not None:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    try:
        args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    except SystemExit:
        raise ConfigError("gateway: vLLM refused a setting; its message stands above") from None
    args.structured_outputs_config.reasoning_parser = reasoning or ""
    return args


async def make_app(library: Library, triton: TritonClient) -> FastAPI:
    """The library's application with the routes that are served, over Triton."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for module in _ROUTERS:
        for route in module.router.routes:
            if isinstance(route, APIRoute) and route.path in ROUTES:
                app.router.routes.append(route)
    app.state.args = library.args
    app.state.server = None
    init_exception_handler(app)
    app.exception_handler(RequestValidationError)(_not_valid)
    engine = TritonEngine(library.config, library.renderer, library.turns, triton)
    await init_app_state(engine, app.state, library.args, ("generate",))
    for name in ("vllm.entrypoints.anthropic.api_router", "vllm.entrypoints.anthropic.serving"):
        logging.getLogger(name).addFilter(_is_news)
    return app


async def _not_valid(request: Any, error: RequestValidationError) -> JSONResponse:
    """What pydantic complains about, in one line by the field's name."""
    first = error.errors()[0]
    place = first.get("loc", ()) if isinstance(first, dict) else ()
    # Names of types and validators stand among the fields' own.
    named = [str(part) for part in place[1:] if isinstance(part, int) or str(part).isidentifier()]
    inner = first.get("ctx", {}).get("error") if isinstance(first, dict) else None
    field = getattr(inner, "parameter", None) or ".".join(named) or None
    message = str(first.get("msg", first)) if isinstance(first, dict) else str(first)
    message = message.removeprefix("Value error, ")
    text = message if field is None else f"{field}: {message}"
    return JSONResponse(
        {"error": {"message": text, "type": "", "param": field, "code": 400}}, status_code=400
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Why a call has failed is known and told: the library would log each with its stack."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not (calls.current().failure or isinstance(error, VLLMClientError))


def _read_masks(tokenizer: Any, control: ControlTokens) -> None:
    """Let a tokenizer take masked control tokens for the plain text that they stand for."""
    base = type(tokenizer)

    class Masked(base):  # type: ignore[misc, valid-type]
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(text, str) or not control.masks(text):
                return super().__call__(text, *args, **options)
            ids = []
            if options.get("add_special_tokens", True):
                ids = list(super().__call__("")["input_ids"])
            for piece, marker in control.pieces(text):
                if marker is not None:
                    ids += control.plain_ids(marker)
                else:
                    ids += super().__call__(piece, add_special_tokens=False)["input_ids"]
            return {"input_ids": ids}

    tokenizer.__class__ = Masked


def _judge_length(renderer: Any, limit: int) -> None:
    """Let every prompt's length be judged by the gateway's rule.

    The library takes a prompt that leaves no place for an answer, and refuses to count one that
    has become too long, which is when clients ask.
    """
    tokenize = renderer.tokenize_prompts_async

    async def judged(prompts: Any, params: Any) -> Any:
        call = calls.current()
        if call.counting:
            params = replace(params, max_total_tokens=None)
        found = await tokenize(prompts, params)
        longest = max((len(prompt.get("prompt_token_ids", ())) for prompt in found), default=0)
        if longest >= limit and not call.counting:
            call.failure = context_exceeded(limit, longest, "messages")
            raise GenerationError(str(call.failure))
        return found

    renderer.tokenize_prompts_async = judged

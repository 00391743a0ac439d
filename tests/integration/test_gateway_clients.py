"""Clients that nobody here wrote, against the real stack.

openai-python, anthropic-python, deepseek-harness, LiteLLM and LangChain's ChatOpenAI do the same
five things; then what only some of them do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest
from deepseek_flash.launcher.environment import resolve_model

from tests.integration.foreign_clients import CLIENTS, TOOL, Door
from tests.integration.gateway import KEY_A, NAME
from tests.integration.raw import settled, wait_idle

TURNS = [{"role": "user", "content": "hi"}]
DSH = str(Path(sys.executable).with_name("dsh"))
# `vllm bench serve`; the command line itself looks for a package of another name than ours.
BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(params=CLIENTS)
def client(request, gateway):
    return CLIENTS[request.param](Door(gateway.url, KEY_A, NAME))


def test_chat_and_stream_are_one_text(client):
    """CB-13, CB-68"""
    whole = client.chat("Tell me a story.")
    assert whole and client.stream("Tell me a story.") == whole
    assert client.stream("Tell me another one.") == client.chat("Tell me another one.")


def test_tools(client):
    """CB-52, CB-57"""
    name, arguments = client.tool("Choose one.")
    assert name == TOOL["name"] and arguments["a"] in (1, 2)


def test_json(client):
    """CB-58"""
    assert json.loads(client.json("One or two?"))["a"] in (1, 2)


def test_leaving_ends_it_in_the_engine(client, gateway, request):
    """CB-31"""
    tokens = "vllm:generation_tokens_total"
    before = settled(gateway.served, tokens)
    client.leave(request.node.name)
    wait_idle(gateway.served)
    assert settled(gateway.served, tokens) - before < 1900


def test_what_openai_python_makes_of_errors(gateway):
    client = openai.OpenAI(api_key=KEY_A, base_url=gateway.url + "/v1")
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=TURNS)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=TURNS, n=1000)
    assert caught.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="wrong", base_url=gateway.url + "/v1").models.list()


def test_anthropic_python_counts_what_it_is_told(gateway):
    client = anthropic.Anthropic(api_key=KEY_A, base_url=gateway.url)
    model = "claude-opus-4-8"
    count = client.messages.count_tokens(model=model, messages=TURNS).input_tokens
    usage = client.messages.create(model=model, max_tokens=9, messages=TURNS).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="gpt-5", max_tokens=1, messages=TURNS)


@pytest.mark.parametrize(
    "line, typed, told",
    [(["doctor"], "", "harness ready"), (["chat"], "hello\nagain\n/quit\n", "usage: hit=")],
    ids=["doctor", "chat"],
)
def test_dsh(gateway, line, typed, told):
    environ = {
        **os.environ, "DEEPSEEK_BASE_URL": gateway.url, "DEEPSEEK_API_KEY": KEY_A,
        "COLUMNS": "200",
    }  # fmt: skip
    done = subprocess.run(
        [DSH, *line], input=typed, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout and "✗" not in done.stdout, done.stdout
    assert done.stdout.count(told) == max(1, typed.count("\n") - 1)


@pytest.mark.parametrize(
    ("backend", "route"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_vllm_bench_serve(gateway, tmp_path, backend, route):
    found = tmp_path / "found.json"
    line = [
        "--backend", backend, "--base-url", gateway.url, "--endpoint", route, "--model", NAME,
        "--tokenizer", resolve_model(NAME), "--dataset-name", "random", "--num-prompts", "24",
        "--random-input-len", "64", "--random-output-len", "24", "--ignore-eos",
        "--max-concurrency", "8", "--seed", "1", "--disable-tqdm", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", found.name,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", BENCH_SERVE, *line], env={**os.environ, "OPENAI_API_KEY": KEY_A},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(found.read_text())
    assert (figures["completed"], figures["failed"]) == (24, 0), done.stdout
    assert figures["total_output_tokens"] == 24 * 24 and figures["mean_ttft_ms"] > 0

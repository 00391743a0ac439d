"""What the ensemble costs: against the same engine called in-process, in alternating pairs.

Both engines are resident and load is on one at a time, so that the machine's drift hits both.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import psutil
from deepseek_flash.contract import Sampling
from deepseek_flash.dspark.prompt import PromptEncoder, load_tokenizer
from deepseek_flash.launcher.environment import resolve_model

from clients.request import MODEL
from loadtest.bench.engine import PlainEngine, Run
from loadtest.bench.overhead_pairs import Leg, Load, Pair, chosen, judge
from loadtest.bench.prompts import PROMPTS
from loadtest.bench.report import write_report
from loadtest.served import serving

MODEL_LENGTH = 2048
# An engine that was idle while the other worked is slower at first; that is not the ensemble's.
WARM_UP_TOKENS = 8
MOST_OVERHEAD_SECONDS, MOST_OVERHEAD_SHARE = 0.005, 0.03


# One token a request shows the first token's cost, many show that of every further one.
LOADS = (
    Load("first token at 1", requests=24, tokens=1, concurrency=1),
    Load("first token at 8", requests=48, tokens=1, concurrency=8),
    Load("tokens/s at 1", requests=5, tokens=32, concurrency=1),
    Load("tokens/s at 8", requests=24, tokens=32, concurrency=8),
)


def measure(run: Callable[[], list[Run]]) -> Leg:
    """Time a batch."""
    begin = time.perf_counter()
    runs = run()
    seconds = time.perf_counter() - begin
    return Leg(statistics.median(each.first_token for each in runs), seconds)


class EnsembleClient:
    """Event streams over connections that stay open, read by one thread and parsed only after
    the clock has stopped: what a client does with an answer is not the ensemble's cost.
    """

    def __init__(self, url: str, concurrency: int = 8) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(concurrency)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int) -> list[Run]:
        """Generate for every prompt, at most ``concurrency`` at a time."""
        waiting = [(number, http_request(prompt, tokens)) for number, prompt in enumerate(prompts)]
        waiting.reverse()
        streams: dict[int, EventStream] = {}
        with selectors.DefaultSelector() as selector:

            def start(connection: socket.socket) -> None:
                number, request = waiting.pop()
                streams[number] = EventStream(connection)
                selector.register(connection, selectors.EVENT_READ, streams[number])
                connection.sendall(request)

            for connection in self._sockets[: min(concurrency, len(prompts))]:
                start(connection)
            while selector.get_map():
                for key, _ in selector.select():
                    if key.data.read():
                        selector.unregister(key.fileobj)
                        if waiting:
                            start(key.data.connection)
        return [streams[number].run() for number in range(len(prompts))]


class EventStream:
    """One answer of ``/generate_stream`` as it arrives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._begin = time.perf_counter()
        self._times: list[float] = []
        self._data = b""

    def read(self) -> bool:
        """Take what is there. True: the answer is complete (the last chunk is empty)."""
        self._data += self.connection.recv(65536)
        if b"data: " in self._data:
            self._times.append(time.perf_counter() - self._begin)
        return self._data.endswith(b"\r\n0\r\n\r\n")

    def run(self) -> Run:
        events = [
            json.loads(line.removeprefix(b"data: "))
            for line in self._data.splitlines()
            if line.startswith(b"data: ")
        ]
        for event in events:
            if "error" in event:
                raise RuntimeError(event["error"])
        text = "".join(event["text_output"] for event in events)
        return Run((0,) * len(events), text, self._times[0], self._times[-1])


def http_request(prompt: Sequence[int], tokens: int) -> bytes:
    """A streaming request for exactly ``tokens`` tokens: the sampling values are parameters."""
    body = json.dumps(
        {"input_ids": list(prompt), "stream": True, "temperature": 0, "max_tokens": tokens,
         "ignore_eos": True, "use_dflash": False}
    ).encode()  # fmt: skip
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def idle_share(process: psutil.Process, seconds: float = 3.0) -> float:
    """Cores that a process tree uses while it should be idle."""

    def used() -> float:
        family = [process, *process.children(recursive=True)]
        return sum(sum(member.cpu_times()[:2]) for member in family)

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    encoder = PromptEncoder(load_tokenizer(path, None, False))
    ids = [encoder.from_text(prompt, MODEL_LENGTH) for prompt in PROMPTS]
    pairs: list[Pair] = []
    with serving(arguments.model, ["--engine-args", f'{{"max_model_len": {MODEL_LENGTH}}}']) as it:
        engine = PlainEngine(path, max_model_len=MODEL_LENGTH)
        try:
            idle = idle_share(psutil.Process(it.process.pid))
            print(f"idle server: {idle:.3f} cores", flush=True)
            client = EnsembleClient(it.http)
            for number in range(arguments.pairs + 1):
                for load in LOADS:
                    prompts = chosen(ids, number, load)
                    pair = one_pair(engine, client, prompts, load, number % 2 == 1)
                    if number > 0:  # the first round warms up
                        pairs.append(pair)
                        print(f"  pair {number}, {load.name}: {pair}", flush=True)
        finally:
            engine.close()
    return summarise(arguments.model, pairs, idle)


def one_pair(
    engine: PlainEngine,
    client: EnsembleClient,
    prompts: Sequence[Sequence[int]],
    load: Load,
    plain_first: bool,
) -> Pair:
    """Both legs on the same prompts; who goes first alternates."""
    many = load.concurrency

    def sampling(tokens: int) -> Sampling:
        return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def through_ensemble() -> Leg:
        client.run(prompts[:many], WARM_UP_TOKENS, many)
        return measure(lambda: client.run(prompts, load.tokens, many))

    def directly() -> Leg:
        engine.run(prompts[:many], sampling(WARM_UP_TOKENS), many)
        return measure(lambda: engine.run(prompts, sampling(load.tokens), many))

    if plain_first:
        plain, ensemble = directly(), through_ensemble()
    else:
        ensemble, plain = through_ensemble(), directly()
    return Pair(load, plain, ensemble)


def summarise(model: str, pairs: Sequence[Pair], idle: float) -> int:
    print(f"\n{model}: the ensemble against vLLM in-process, medians over pairs (min to max)")
    good, figures = judge(pairs, LOADS, MOST_OVERHEAD_SECONDS, MOST_OVERHEAD_SHARE)
    write_report(f"overhead-{model.rsplit('/', 1)[-1]}", {"idle_cores": idle, **figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

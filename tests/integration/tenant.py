"""A tenant for each test, and the cache as only its operator sees it."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deepseek_flash.contract import CacheOrder, Lookup
from deepseek_flash.dspark.fields import SamplingLimits
from deepseek_flash.dspark.sampling import parse_sampling
from deepseek_flash.launcher.keeper import run_directory
from deepseek_flash.launcher.probe import send_cache_order
from deepseek_flash.runtime import Runtime
from deepseek_flash.triton_io import seal, unseal

from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.request import Answer, Request
from loadtest.served import Served
from tests.integration.raw import infer, settled, wait_for
from tests.unit.fakes import make_plan

TOKENS = 24
DOORS = {
    "gRPC stream": lambda served, asked: GrpcClient(served.grpc).generate(asked),
    "gRPC": lambda served, asked: GrpcClient(served.grpc).generate(replace(asked, stream=False)),
    "generate_stream": lambda served, asked: Answer.of(list(HttpClient(served.http).stream(asked))),
    "generate": lambda served, asked: HttpClient(served.http).generate(asked),
}


class Cache:
    """The running ``dflash_cache``, asked directly under the server's secret.

    Metrics follow once a second; this tells what is true now.
    """

    def __init__(self, served, encoder):
        self._url, self._encoder = served.grpc, encoder
        self._runtime = Runtime(run_directory(http_port(served)) / "runtime")
        self.secret = self._runtime.secret

    def order(self, action, cache_salt=None):
        order = CacheOrder(action, cache_salt)
        return send_cache_order(self._url, order, self.secret, 30.0)

    def stats(self):
        return json.loads(self.order("stats"))

    def lookup(self, asked):
        """What the cache knows for a Request. It takes no place and runs nothing."""
        plan = seal(self._plan(asked, self._runtime.facts()), self.secret)
        (found,), error = infer(self._url, {"plan": plan}, model="dflash_cache")
        assert error is None
        return unseal("lookup", found["lookup"][0], (Lookup,), self.secret)

    def _plan(self, asked, facts):
        parsed = parse_sampling(asked.sampling, SamplingLimits(vocab_size=facts.vocab_size))
        if asked.messages is None:
            ids, starts = self._encoder.from_text(asked.text, facts.max_model_len), ()
        else:
            prompt = self._encoder.from_messages(json.dumps(asked.messages), facts.max_model_len)
            ids, starts = prompt.ids, prompt.turn_starts
        return make_plan(
            namespace=facts.namespace, prompt_token_ids=tuple(ids), turn_starts=starts,
            sampling=replace(parsed.sampling, max_tokens=parsed.max_tokens),
            cache_salt=asked.cache_salt or "", session_id=asked.session_id or "",
        )  # fmt: skip


class EngineRuns:
    """Counts the engine's runs, exactly.

    A reading takes two seconds, so each is the base of the next: in a module that counts, all that
    may run the engine stands in a ``with``, or is said to be one run by ``note_one``.
    """

    def __init__(self, served):
        self._served, self._lock = served, threading.Lock()
        self._before, self._noted = None, 0

    def note_one(self):
        with self._lock:
            self._noted += 1

    @contextmanager
    def __call__(self, expected):
        """What is asked inside starts ``expected`` runs of the engine (None: some)."""
        before = self._read() if self._before is None else self._before + self._noted
        self._before, self._noted = None, 0  # where a test fails, the next begins anew
        yield
        now = self._read()
        assert expected is None or now - before - self._noted == expected
        self._before, self._noted = now, 0

    def _read(self):
        decoder = ("deepseek_decoder",)
        return settled(self._served, "deepseek_flash_engine_runs_total", decoder)


@dataclass(frozen=True)
class Tenant:
    """Asks under a ``cache_salt`` of its own: cold at first, whatever other tests asked."""

    served: Served
    cache: Cache
    salt: str
    engine_runs: EngineRuns

    def request(self, prompt, *, session_id=None, **sampling):
        """Greedy and 24 tokens, if not said otherwise. ``prompt``: text or messages."""
        source = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
        values = {"temperature": 0, "max_tokens": TOKENS, **sampling}
        return Request(**source, sampling=values, cache_salt=self.salt, session_id=session_id)

    def ask(self, asked, door="gRPC stream"):
        return DOORS[door](self.served, asked)

    def alone(self, asked):
        """The engine's own answer, of which nothing is stored. It is not counted as expected."""
        self.engine_runs.note_one()
        return self.ask(without_cache(asked))

    def learn(self, asked, door="gRPC stream"):
        """Ask, and wait until the cache knows the answer."""
        answer = self.ask(asked, door)
        self.wait_until_known(asked, len(answer.token_ids))
        return answer

    def choices(self, asked, alone=False, **returns):
        """All choices of a request that is not streamed, tensor by tensor, but not its cost."""
        if alone:
            self.engine_runs.note_one()
        fields = (without_cache(asked) if alone else asked).fields()
        fields = {**fields, "stream": False, "return_num_cached_tokens": False, **returns}
        (response,), error = infer(self.served.grpc, fields)
        assert error is None
        return {name: values.tolist() for name, values in response.items()}

    def wait_until_known(self, asked, tokens):
        def known():
            return sum(len(r.token_ids) for r in self.cache.lookup(asked).replays) >= tokens

        wait_for(known, 10, f"{tokens} tokens known of {asked}")

    def lookups(self):
        """Lookups of all tenants so far: exact, window or miss."""
        counts = self.cache.stats()["lookups"]
        counts.pop("semantic", None)  # no lookup, but what came of a miss later
        return Counter(counts)

    def flush(self):
        """How many entries this tenant had."""
        return int(self.cache.order("flush", self.salt))

    def neighbour(self, name):
        """Another tenant of the same server."""
        return replace(self, salt=f"{self.salt} {name}")


def in_company(ask, items, concurrency=8):
    """Ask for all at once; the answers, in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, items))


def without_cache(asked):
    return replace(asked, sampling={**asked.sampling, "use_dflash": False})


def http_port(served):
    return int(served.http.rsplit(":", 1)[1])

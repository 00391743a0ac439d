"""Triton requests as any client may send them: no help from our own clients."""

import contextlib
import queue
import re
import time

import httpx
import numpy as np
import tritonclient.grpc as grpcclient

# Without drafts and cache: a long answer of a tiny model repeats itself, and then is over too soon.
ENDLESS = {
    "temperature": 0, "max_tokens": 1900, "ignore_eos": True, "use_dspark": False,
    "use_dflash": False,
}  # fmt: skip

DATATYPES = {bool: ("BOOL", np.bool_), int: ("INT32", np.int32), float: ("FP32", np.float32)}


def tensor(name, value):
    values = value if isinstance(value, list) else [value]
    kind = type(values[0]) if values else int
    if kind in DATATYPES:
        datatype, dtype = DATATYPES[kind]
        array = np.array(values, dtype=dtype)
    else:
        datatype = "BYTES"
        array = np.array(
            [v if isinstance(v, bytes) else v.encode() for v in values], dtype=np.object_
        )
    result = grpcclient.InferInput(name, list(array.shape), datatype)
    result.set_data_from_numpy(array)
    return result


class Stream:
    """One gRPC stream, closed with the context."""

    def __init__(self, url):
        self._client = grpcclient.InferenceServerClient(url)
        self.answers = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, model, fields, request_id="", parameters=None, timeout_us=None):
        self._client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in fields.items()],
            request_id=request_id,
            parameters=parameters,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

    def next(self, timeout=60.0):
        """(outputs or None, error or None, final)."""
        result, error = self.answers.get(timeout=timeout)
        if error is not None:
            return None, error.message(), True
        response = result.get_response()
        outputs = {o.name: result.as_numpy(o.name) for o in response.outputs}
        return outputs or None, None, response.parameters["triton_final_response"].bool_param

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def infer(url, fields, model="deepseek_flash", **options):
    """All responses of one request: (list of outputs, error or None)."""
    with Stream(url) as stream:
        stream.send(model, fields, **options)
        collected = []
        while True:
            outputs, error, final = stream.next()
            if outputs is not None:
                collected.append(outputs)
            if error is not None or final:
                return collected, error


def generate(served, body, model="deepseek_flash"):
    """``/generate``: (status, parsed body)."""
    response = httpx.post(
        f"{served.http}/v2/models/{model}/generate", json=body, timeout=60, trust_env=False
    )
    return response.status_code, response.json()


def metric(served, name, **labels):
    """The sum of a metric's series that have these labels."""
    text = httpx.get(f"{served.metrics}/metrics", timeout=10, trust_env=False).text
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if match and match.group(1) == name:
            found = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
            if labels.items() <= found.items():
                total += float(match.group(3))
    return total


def wait_for(condition, seconds, what):
    """Wait until ``condition()`` is true; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, FileNotFoundError):
            if condition():
                return
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


STAGES = ("dspark_scheduler", "dflash_cache", "deepseek_decoder")


def settled(served, name, models=STAGES, **labels):
    """A metric of these models once all that happened so far is in it."""

    def rounds():
        return [metric(served, "deepseek_flash_heartbeat_total", model=model) for model in models]

    before = rounds()
    wait_for(
        # One round may have been on its way already.
        lambda: all(now >= then + 2 for now, then in zip(rounds(), before, strict=True)),
        15,
        "two more rounds of metrics",
    )
    return metric(served, name, **labels)


def wait_idle(served, seconds=30.0):
    """Wait until nothing is in flight, in our books and in the engine's."""
    names = ("deepseek_flash_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
    wait_for(lambda: not any(metric(served, name) for name in names), seconds, "idle")

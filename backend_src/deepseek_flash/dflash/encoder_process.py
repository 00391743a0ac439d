"""The prefix encoder in a process of its own, for a CPU.

A thread would share the interpreter with the lookups: preempted while it holds it, an encoding of
low priority would hold them up, and one of normal priority takes a core from whoever generates.
A process may have the lowest priority there is: it runs on what the engine leaves.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from deepseek_flash.dflash.encoder import EncoderUnsupported, PrefixEncoder

START_SECONDS = 600.0  # a large checkpoint from a cold disk
ENCODE_SECONDS = 30.0  # low priority on a busy machine takes what it takes
NICENESS = 10


class EncoderProcess:
    """A PrefixEncoder behind a pipe. One caller at a time."""

    def __init__(self, model: str, **options: Any) -> None:
        """Arguments are ``PrefixEncoder.load``'s. Returns when it can encode.

        Raises:
            EncoderUnsupported: as ``load`` does, or the process ended.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, model, options), name="dflash-encoder", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            answer = self._receive(START_SECONDS)
        except (EOFError, OSError, TimeoutError) as error:
            self.close()
            raise EncoderUnsupported(f"{model}: its process ended ({error!r})") from None
        if isinstance(answer, str):
            self.close()
            raise EncoderUnsupported(answer)
        self.hidden_size: int = answer
        self.cost = 0.0

    def encode(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As ``PrefixEncoder.encode``; the state is on the CPU.

        Raises:
            ValueError: as there. OSError, EOFError, TimeoutError: the process is gone or stuck.
        """
        self._pipe.send(list(token_ids))
        answer = self._receive(ENCODE_SECONDS)
        if isinstance(answer, str):
            raise ValueError(answer)
        self.cost, state = answer
        return torch.tensor(state)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join(timeout=5)

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self._process.kill()  # an answer that comes later would be taken for the next one's
            raise TimeoutError(f"no answer within {seconds:g} s")
        return self._pipe.recv()


def _serve(pipe: Connection, model: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        encoder = PrefixEncoder.load(model, **options)
    except EncoderUnsupported as error:
        pipe.send(str(error))
        return
    pipe.send(encoder.hidden_size)
    # Behind the engine, but not idle priority: on a busy machine references then came too late to
    # be of use. Only now: a server's start waits for the load.
    os.nice(NICENESS)
    while True:
        try:
            ids = pipe.recv()
        except (EOFError, OSError):  # the cache's process has ended
            return
        try:
            state = encoder.encode(ids).tolist()
            pipe.send((encoder.cost, state))
        except ValueError as error:
            pipe.send(str(error))

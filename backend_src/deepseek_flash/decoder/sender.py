"""Sends responses from a thread of its own, so that the engine's loop never waits for Triton."""

from __future__ import annotations

import queue
import threading
from typing import Any, Protocol

from deepseek_flash.contract import Delta, Returns
from deepseek_flash.triton_io import delta_response, error_response


class Reply(Protocol):
    """Where one request's answer goes. Exactly one call ends it: the last, or ``fail``."""

    def send(self, delta: Delta, last: bool) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Sender:
    """The thread. Responses of one request leave in the order in which they were given."""

    def __init__(self) -> None:
        # Unbounded, but one entry a token: the engine makes them slower than they leave.
        self._queue: queue.SimpleQueue[tuple[Any, Any, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def put(self, response_sender: Any, response: Any, last: bool) -> None:
        self._queue.put((response_sender, response, last))

    def close(self) -> None:
        """Send what is queued and stop."""
        self._queue.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        import triton_python_backend_utils as pb_utils

        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        while (item := self._queue.get()) is not None:
            response_sender, response, last = item
            try:
                # One call for content and final flag: an error without the flag would leave the
                # ensemble in flight for ever. Nothing may touch the sender after it.
                response_sender.send(response, flags=final if last else 0)
            except Exception as error:
                # The client is gone; the request ends by its own deadline or last token.
                pb_utils.Logger.log_warn(f"[deepseek_flash] response not sent: {error}")


class TritonReply:
    """A Reply that goes out through the Sender."""

    def __init__(self, sender: Sender, response_sender: Any, returns: Returns) -> None:
        self._sender = sender
        self._response_sender = response_sender
        self._returns = returns

    def send(self, delta: Delta, last: bool) -> None:
        self._sender.put(self._response_sender, delta_response(delta, self._returns), last)

    def fail(self, error: Exception) -> None:
        self._sender.put(self._response_sender, error_response(error), True)

"""The prefix encoder: what the checkpoint's own first layers make of a context.

Embedding and first decoder layers, loaded by ``transformers`` as a smaller model of the same
family; the other layers' weights are never read. The state is the residual stream after the last
of these layers, at the last position: what the whole model has there, not an approximation of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Where the first layers were compared with the whole model's, by ``model_type``.
FAMILIES = ("llama", "deepseek_v2", "deepseek_v3")


class EncoderUnsupported(ValueError):
    """No prefix encoder for this checkpoint. The message is one line for the log."""


class PrefixEncoder:
    """Token ids to one state. Made by ``load``; for one thread.

    ``hidden_size``: length of a state. ``layers``: how many decoder layers made it. ``window``:
    how many of a context's last tokens it is made from.
    """

    def __init__(
        self, model: Any, device: torch.device, *, hidden_size: int, layers: int, window: int
    ) -> None:
        """``model``: a base model of ``transformers`` without its final norm, on ``device``."""
        self.hidden_size, self.layers, self.window = hidden_size, layers, window
        self._model, self._device = model, device
        self.cost = (
            0.0  # seconds of this thread's processor or, on CUDA, of waiting: the last encode
        )
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        # A stream of its own: a lookup on the default stream must not queue behind a prefill.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: torch.device,
        layers: int = 3,
        window: int = 512,
        revision: str | None = None,
    ) -> PrefixEncoder:
        """Read a checkpoint's first ``layers`` layers; float32 on a CPU, else its own dtype.

        FP8 weights are dequantised, so that no kernels are needed and every device does the same.
        Sets torch's default dtype while it reads: no other thread may rely on it meanwhile.

        Args:
            model: a directory, or a name of the Hugging Face hub.
        Raises:
            EncoderUnsupported: another family, fewer layers, or anything that fails on the way to
                a first finite state.
            ValueError: layers or window under 1.
        """
        if min(layers, window) < 1:
            raise ValueError(f"layers, window: must be at least 1, got {layers} and {window}")
        try:
            config = _read_config(model, revision)
            if config.model_type not in FAMILIES:
                raise EncoderUnsupported(
                    f"family {config.model_type!r} is not one of {', '.join(FAMILIES)}"
                )
            # Beyond them lie a checkpoint's MTP layers, which look like decoder layers.
            if layers > config.num_hidden_layers:
                raise EncoderUnsupported(
                    f"{layers} layers wanted, {config.num_hidden_layers} there ({model})"
                )
            config.num_hidden_layers = layers
            encoder = cls(
                _read_model(model, revision, config, device),
                device,
                hidden_size=config.hidden_size,
                layers=layers,
                window=window,
            )
            # Some kernels are looked for at first use only. A full window also takes the memory
            # now that it will ever need.
            finite = bool(encoder.encode([0] * window).isfinite().all())
        except EncoderUnsupported:
            raise
        except Exception as error:  # a loader may raise anything, and none of it may stop a server
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
            raise EncoderUnsupported(f"{model} does not load: {reason}") from error
        if not finite:
            raise EncoderUnsupported(f"{model}: its states are not finite")
        return encoder

    def close(self) -> None:
        """Nothing to end: it is part of this process."""

    @torch.inference_mode()
    def encode(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The state at the last position: [hidden_size], float32, on the encoder's device.

        Of the last ``window`` tokens, as if the context began with them. Returns when it is done.

        Raises:
            ValueError: no tokens, or one outside the vocabulary (on CUDA such a token would end
                the process's use of the device, not only the call).
        """
        ids = list(token_ids[-self.window :])
        if not ids or min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"token_ids: must be 1 or more, each below {self._vocabulary}")
        clock = time.thread_time if self._stream is None else time.perf_counter
        begin = clock()
        with torch.cuda.stream(self._stream):  # None: stays where it is
            # Without a mask and a cache: plain causal attention over one sequence.
            inputs = torch.tensor([ids], device=self._device)
            output = self._model(input_ids=inputs, use_cache=False).last_hidden_state
            state: torch.Tensor = output[0, -1].to(torch.float32, copy=True)  # frees the others
        if self._stream is not None:
            self._stream.synchronize()
            # Its memory must not go back to this stream while the caller's still reads it.
            state.record_stream(torch.cuda.current_stream(self._device))
        self.cost = clock() - begin
        return state


def _read_config(model: str, revision: str | None) -> Any:
    from transformers import AutoConfig  # slow to import; unit tests do without

    return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)


def _read_model(model: str, revision: str | None, config: Any, device: torch.device) -> Any:
    from transformers import AutoModel

    on_cpu = device.type == "cpu"
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "fp8":
        quantization["dequantize"] = True
    with _quiet():
        loaded, report = AutoModel.from_pretrained(
            model,
            config=config,
            revision=revision,
            trust_remote_code=False,
            dtype=torch.float32 if on_cpu else "auto",
            output_loading_info=True,
        )
    if report["missing_keys"]:  # the library fills them with random numbers
        raise EncoderUnsupported(f"{model} has no weights for {min(report['missing_keys'])}")
    loaded.norm = torch.nn.Identity()  # it belongs after the last layer of the whole model
    # Dequantised weights come as bfloat16 whatever was asked for.
    loaded.to(device, torch.float32 if on_cpu else None)
    if not on_cpu:
        torch.cuda.synchronize(device)  # the weights arrive on another stream than reads them
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the report of unused weights (the other layers', as meant) and the progress bar."""
    from transformers.utils import logging as library

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter = logging.getLogger("transformers.modeling_utils")
    bars = library.is_progress_bar_enabled()
    reporter.addFilter(keep)
    library.disable_progress_bar()
    try:
        yield
    finally:
        reporter.removeFilter(keep)
        if bars:
            library.enable_progress_bar()

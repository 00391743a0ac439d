"""The last attention layer's queries and keys of the newest tokens, kept beside the paged cache.

Pages are laid out by every attention backend in its own way, and their keys may be quantised. So
the layer is overheard instead: a copy of the few rows that count is taken as they pass by. The
copies have the same place and shape in every pass of the same size, so they may become part of a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepseek_flash.dspark.signals import ATTENTION_WINDOW, attention_variance

Integers = NDArray[np.int64]


class Slots:
    """Gives each running request a number below ``count``.

    A request keeps it while it is preempted, until one that runs needs it.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._of: dict[str, int] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._of)

    def take(self, request_ids: Sequence[str]) -> tuple[list[int], list[int]]:
        """The slots of the batch's requests, at most ``count``, and those of them that are new."""
        batch, fresh = set(request_ids), []
        for name in request_ids:
            if name in self._of:
                self._of[name] = self._of.pop(name)
                continue
            if not self._free:
                self.release(next(other for other in self._of if other not in batch))
            self._of[name] = self._free.pop()
            fresh.append(self._of[name])
        return [self._of[name] for name in request_ids], fresh

    def release(self, request_id: str) -> None:
        """The request is gone."""
        slot = self._of.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)


class KeyRing:
    """The last keys of each slot's request, by position.

    Room for a draft beyond the window, so that what is rejected never lies on what counts; the next
    pass writes over it. One more place, ``nowhere``, takes what is nobody's.
    """

    def __init__(
        self, slots: int, max_draft_tokens: int, shape: tuple[int, int], like: torch.Tensor
    ) -> None:
        self._span = ATTENTION_WINDOW + max_draft_tokens
        self.nowhere = slots * self._span
        self._keys = like.new_zeros((self.nowhere + 1, *shape))

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._keys[slot * self._span : (slot + 1) * self._span] = 0.0

    def places(self, slots: Integers, positions: Integers) -> Integers:
        """[n] where the keys of these positions belong; no two the same within a window."""
        return slots * self._span + positions % self._span

    def write(self, places: torch.Tensor, keys: torch.Tensor) -> None:
        """[n] places; [n, key_heads, dim] keys."""
        self._keys[places] = keys

    def window(self, slots: Integers, positions: Integers) -> torch.Tensor:
        """[n, window, key_heads, dim], the key of ``positions`` last; zeros where none is known."""
        back = np.arange(1 - ATTENTION_WINDOW, 1)
        # Positions before the first fall on places that nothing was written to yet.
        places = self.places(slots[:, None], positions[:, None] + back)
        return self._keys[torch.from_numpy(places).to(self._keys.device)]


class Pass:
    """Which rows of a pass count: the last window of keys, and the query of every sampled token.

    Args:
        scheduled: tokens of each request in this pass, its drafts included.
        computed: tokens before them.
        lengths: draft tokens among them.
    """

    def __init__(
        self, scheduled: Sequence[int], computed: Sequence[int], lengths: Sequence[int]
    ) -> None:
        keys, positions, requests, queries = [], [], [], []
        end = 0
        for request, (count, before, length) in enumerate(zip(scheduled, computed, lengths)):
            end += count
            kept = min(count, ATTENTION_WINDOW + length)
            keys.append(np.arange(end - kept, end))
            positions.append(np.arange(before + count - kept, before + count))
            requests.append(np.full(kept, request))
            queries.append(np.arange(end - 1 - length, end))
        self.key_rows = np.concatenate(keys)  # of the pass
        self.key_positions = np.concatenate(positions)
        self.key_requests = np.concatenate(requests)
        self.query_rows = np.concatenate(queries)
        self.query_starts = np.cumsum([0, *(len(rows) for rows in queries)])[:-1]
        self.first_positions = np.array(computed) + scheduled - 1 - np.array(lengths)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a layer's queries and keys look, and how they meet."""

    query_shape: tuple[int, int]  # heads, dim
    key_shape: tuple[int, int]
    scale: float
    to_keys: Callable[[torch.Tensor], torch.Tensor]  # [n, *query_shape] into the keys' space


class LastLayer:
    """Overhears the last attention layer of a model and tells the attention variance.

    Args:
        geometry: how the layer's queries and keys look.
        max_tokens: of a pass.
        like: a tensor of the layer's type and device.
    """

    def __init__(
        self, geometry: Geometry, slots: int, max_draft_tokens: int, max_tokens: int,
        like: torch.Tensor,
    ) -> None:  # fmt: skip
        self._geometry = geometry
        self._slots = Slots(slots)
        self._ring = KeyRing(slots, max_draft_tokens, geometry.key_shape, like)
        most_queries = min(max_tokens, slots * (1 + max_draft_tokens))
        most_keys = min(max_tokens, slots * (ATTENTION_WINDOW + max_draft_tokens))
        self._queries = like.new_zeros((most_queries, *geometry.query_shape))
        # Where the rows stand and go, on the device before the pass begins: a graph reads it anew.
        self._query_rows = torch.zeros(most_queries, dtype=torch.int64, device=like.device)
        self._key_rows = torch.zeros(most_keys, dtype=torch.int64, device=like.device)
        self._key_places = torch.full_like(self._key_rows, self._ring.nowhere)
        self._pass: Pass | None = None
        self._wanted = True

    def expect(self, request_ids: Sequence[str], rows: Pass, wanted: bool = True) -> None:
        """The next pass of the model will be this one.

        Args:
            wanted: False: its variance will not be asked for, which saves most of the time.
        """
        self._pass, self._wanted = rows, wanted
        slots, fresh = self._slots.take(request_ids)
        self._batch_slots = np.array(slots)
        if fresh:
            self._ring.clear(fresh)
        places = self._ring.places(self._batch_slots[rows.key_requests], rows.key_positions)
        for buffer, values in (
            (self._query_rows, rows.query_rows),
            (self._key_rows, rows.key_rows),
            (self._key_places, places),
        ):
            buffer[: len(values)].copy_(torch.from_numpy(values), non_blocking=True)

    def overhear(self, query: torch.Tensor, key: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A pass is going through the layer.

        Args:
            query: [tokens, heads, dim], padded or not.
            key: gives the keys of these rows, [n, key_heads, dim].
        """
        tokens = query.shape[0]
        # As many as this pass can have: fixed by its size, as a graph wants it.
        count = min(len(self._key_rows), tokens)
        rows = self._key_rows[:count].clamp_max(tokens - 1)
        self._ring.write(self._key_places[:count], key(rows))
        if self._wanted:
            count = min(len(self._query_rows), tokens)
            self._queries[:count] = query[self._query_rows[:count].clamp_max(tokens - 1)]

    def variance(self, accepted: Sequence[int]) -> NDArray[np.float32] | None:
        """[requests] of the pass that was expected, each at its last accepted token's row.

        Must be called after every pass. None where it was not wanted.

        Args:
            accepted: draft tokens of each request that were right.
        """
        rows = self._pass
        assert rows is not None
        wanted, self._pass, self._wanted = self._wanted, None, True
        # A pass that nobody expects (vLLM's dummy runs) must not touch any request's keys.
        self._key_places.fill_(self._ring.nowhere)
        if not wanted:
            return None
        last = rows.query_starts + np.array(accepted)
        queries = self._queries[torch.from_numpy(last).to(self._queries.device)]
        keys = self._ring.window(self._batch_slots, rows.first_positions + np.array(accepted))
        found: NDArray[np.float32] = (
            attention_variance(self._geometry.to_keys(queries), keys, self._geometry.scale)
            .cpu()
            .numpy()
        )
        return found

    def release(self, request_id: str) -> None:
        """The request is gone."""
        self._slots.release(request_id)

    def __len__(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)


def overhear_last_layer(
    layers: Mapping[str, Any], slots: int, max_draft_tokens: int, max_tokens: int,
    like: torch.Tensor,
) -> LastLayer | None:  # fmt: skip
    """Hook the last of vLLM's attention layers; None where its keys cannot be understood.

    Args:
        layers: vLLM's ``static_forward_context``, after the weights were loaded.
        like: of the model's type and device.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.models.utils import extract_layer_index

    found = {
        extract_layer_index(name): layer
        for name, layer in layers.items()
        if isinstance(layer, Attention | MLAAttention)
    }
    if not found:
        return None
    layer = found[max(found)]
    geometry = _mla(layer) if isinstance(layer, MLAAttention) else _plain(layer)
    if geometry is None:
        return None
    last = LastLayer(geometry, slots, max_draft_tokens, max_tokens, like)
    # Below vLLM's custom op: torch.compile does not see it, a CUDA graph does.
    if isinstance(layer, MLAAttention):
        forward_impl = layer.forward_impl

        def latent(q: Any, k_c: Any, k_pe: Any, *args: Any, **kwargs: Any) -> Any:
            def keys(rows: torch.Tensor) -> torch.Tensor:
                return torch.cat([k_c[rows], k_pe[rows].flatten(1)], dim=-1)[:, None]

            last.overhear(q, keys)
            return forward_impl(q, k_c, k_pe, *args, **kwargs)

        layer.forward_impl = latent
    else:
        forward = layer.impl.forward

        def plain(itself: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            last.overhear(query, lambda rows: key[rows])
            return forward(itself, query, key, *args, **kwargs)

        layer.impl.forward = plain
    return last


def _plain(layer: Any) -> Geometry | None:
    """MHA, GQA and MQA."""
    if layer.query_quant is not None or layer.kv_sharing_target_layer_name is not None:
        return None  # queries without their scale; keys of another layer
    return Geometry(
        (layer.num_heads, layer.head_size),
        (layer.num_kv_heads, layer.head_size),
        layer.impl.scale,
        lambda query: query,
    )


def _mla(layer: Any) -> Geometry | None:
    """MLA keeps a latent vector instead of keys; the query goes there, as in vLLM's decode."""
    if getattr(layer, "W_UK_T", None) is None:
        return None  # packed for a kernel of its own

    def absorb(query: torch.Tensor) -> torch.Tensor:
        border = layer.qk_nope_head_dim
        latent = torch.einsum("rhp,hpl->rhl", query[..., :border], layer.W_UK_T)
        return torch.cat([latent, query[..., border:]], dim=-1)

    return Geometry(
        (layer.num_heads, layer.qk_head_dim),
        (1, layer.kv_lora_rank + layer.qk_rope_head_dim),
        layer.scale,
        absorb,
    )

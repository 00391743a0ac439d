"""What a cached continuation is known by: identity, fingerprint and MAC.

*Identity*: keyed digest of everything but the token ids that decides an answer, the tenant
included. *Fingerprint*: 32 or 64 bits that find an entry. *MAC*: 128 bits that prove it; without
the proof nothing is replayed, so a colliding fingerprint costs a miss and never an answer.

The fingerprint's mathematics, over the prime p = 2**89 - 1 with secret r, a, b:

    h(prompt)      = BLAKE2b(identity, prompt) mod p
    h(context + t) = h(context) * r + t + 1 mod p         one multiplication a token
    fingerprint    = (a * h + b mod p) mod 2**bits

The second line is the polynomial hash of Karp and Rabin (IBM J. Res. Dev. 31(2), 1987) at a secret
point: two contexts of one prompt differ by a polynomial of degree at most n, which has at most n
roots, so they meet with a probability of at most n / p (2**-71 for 256k tokens). The third line is
Carter and Wegman's universal family (J. Comput. Syst. Sci. 18(2), 1979): what was apart before the
cut to ``bits`` collides after it with a probability of at most 2**-bits. A prime is needed: modulo
2**64 the Thue-Morse words collide whatever r is. Nobody who lacks the secret can aim at an entry.

The border between prompt and answer is part of a context: min_tokens, penalties and a seeded
generator count from there. Digests hold in one server's life only, on one byte order.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepseek_flash.contract import RequestPlan

PRIME = 2**89 - 1
MAC_BYTES = 16
IDENTITY_BYTES = 32

# Every field of Sampling is in one of these; a test holds that.
DECIDING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "thinking_token_budget",
)
DECIDING_WHEN_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
# They cut or present the token stream, and are applied to it at replay. ``n``: see identity().
NOT_DECIDING = (
    "n",
    "max_tokens",
    "stop",
    "include_stop_str_in_output",
    "logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, slots=True)
class FingerprintKey:
    """The secrets of one server's fingerprints. Made by ``derive``."""

    bits: int  # of the fingerprint: 32 or 64
    identity: bytes
    tenant: bytes
    mac: bytes
    point: int  # r of the module's formulas
    scale: int  # a
    offset: int  # b

    @classmethod
    def derive(cls, secret: bytes, bits: int = 64) -> FingerprintKey:
        """Raises ValueError for an empty secret or other bits."""
        if not secret:
            raise ValueError("secret: must not be empty")
        if bits not in (32, 64):
            raise ValueError(f"bits: must be 32 or 64, got {bits}")

        def part(purpose: bytes) -> bytes:
            master = hashlib.sha256(secret).digest()  # a secret of any length
            return hashlib.blake2b(purpose, digest_size=32, key=master, person=b"key").digest()

        def number(purpose: bytes) -> int:  # 256 bits over 89: as good as uniform; never 0
            return int.from_bytes(part(purpose)) % (PRIME - 1) + 1

        return cls(
            bits=bits,
            identity=part(b"identity"),
            tenant=part(b"tenant"),
            mac=part(b"mac"),
            point=number(b"point"),
            scale=number(b"scale"),
            offset=number(b"offset"),
        )


def replayable(plan: RequestPlan) -> bool:
    """Whether the answer is a function of the request: greedy, or sampled with a seed."""
    return _greedy(plan) or plan.sampling.seed is not None


def identity(plan: RequestPlan, key: FingerprintKey, index: int = 0) -> bytes:
    """Digest of all that decides the tokens of choice ``index``, but for the context itself.

    vLLM runs choice i of a seeded request as a request of its own with seed + i, so that sum
    stands for seed, ``n`` and index: choice 1 of seed 42 is choice 0 of seed 43.

    Raises:
        TypeError: a value of a kind that no sampling field has. It must not pass unseen.
    """
    sampling = plan.sampling
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in DECIDING}
    if not _greedy(plan):
        fields |= {name: getattr(sampling, name) for name in DECIDING_WHEN_SAMPLED}
        if sampling.seed is not None:
            fields["seed"] = sampling.seed + index
    for name, value in fields.items():
        if isinstance(value, dict):  # equal whatever order the client wrote them in
            fields[name] = dict(sorted(value.items()))
    encoded = _encode([plan.namespace, plan.cache_salt, fields])
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, key=key.identity).digest()


def draft_identity(plan: RequestPlan, key: FingerprintKey) -> bytes:
    """Digest of model and tenant: for what is only a guess, whatever settings made it."""
    encoded = _encode(["draft", plan.namespace, plan.cache_salt])
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, key=key.identity).digest()


def tenant_digest(cache_salt: str, key: FingerprintKey) -> int:
    """The tenant as the table's int64 column holds it."""
    digest = hashlib.blake2b(_encode(cache_salt), digest_size=8, key=key.tenant).digest()
    return int.from_bytes(digest, signed=True)


def _greedy(plan: RequestPlan) -> bool:
    return plan.sampling.temperature == 0.0


def _encode(value: Any) -> bytes:
    """Type, length and content, so that no two different values read the same.

    Only ``identity`` sorts a dictionary: deeper down the order may mean something (a grammar is
    built in the order of a schema's properties), and a needless miss is the lesser evil.
    """
    if value is None:
        tag, content = b"n", b""
    elif isinstance(value, bool):  # before int, of which it is one
        tag, content = b"b", bytes([value])
    elif isinstance(value, int):
        tag, content = b"i", hex(value).encode()
    elif isinstance(value, float):
        tag, content = b"f", struct.pack("<d", value)
    elif isinstance(value, str):
        tag, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, list | tuple):
        tag, content = b"l", b"".join(map(_encode, value))
    elif isinstance(value, dict):
        pairs = (_encode(key) + _encode(item) for key, item in value.items())
        tag, content = b"d", b"".join(pairs)
    else:
        raise TypeError(f"{type(value).__name__} has no place in an identity")
    return tag + len(content).to_bytes(8, "little") + content


class Fingerprint:
    """One context: a prompt and the tokens generated after it so far. Not for several threads.

    ``append`` and ``extend`` change it, in constant time a token: 0.7 us for one, 0.2 us each for
    many. A prompt is hashed in C, 4,096 tokens in 0.2 ms. Neither it nor the tokens are kept.
    """

    __slots__ = ("_hasher", "_key", "_state")

    def __init__(
        self,
        key: FingerprintKey,
        identity: bytes,
        prompt_token_ids: Iterable[int],
        *,
        window: bool = False,
    ) -> None:
        """``window``: the ids are only the last turns of a prompt.

        Such a context has digests of its own kind: its continuation was made after another
        history, and must never pass for the answer to a prompt that consists of these turns alone.

        Raises:
            ValueError: an identity of the wrong length.
            OverflowError: a token id outside int32 (in ``extend`` and ``mac`` too).
        """
        if len(identity) != IDENTITY_BYTES:
            raise ValueError(f"identity: must have {IDENTITY_BYTES} bytes, got {len(identity)}")
        prompt = array("i", prompt_token_ids)
        self._key = key
        # What is hashed: identity, kind, length, prompt, generated and continued tokens, and a
        # trailer that says how many of them are the continuation. It reads in one way only.
        self._hasher = hashlib.blake2b(identity, digest_size=MAC_BYTES, key=key.mac)
        self._hasher.update(struct.pack("<?q", window, len(prompt)))
        self._hasher.update(prompt.tobytes())
        self._state = int.from_bytes(self._hasher.digest()) % PRIME

    @property
    def value(self) -> int:
        """The fingerprint: ``bits`` wide, as a number that int64 holds (64 bits: signed)."""
        key = self._key
        value: int = (key.scale * self._state + key.offset) % PRIME & ((1 << key.bits) - 1)
        return value - (1 << 64) if value >> 63 else value

    def append(self, token: int) -> None:
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        ids = array("i", tokens)  # first, so that a bad id leaves everything as it was
        state, point = self._state, self._key.point
        for token in ids:
            state = (state * point + token + 1) % PRIME
        self._state = state
        self._hasher.update(ids.tobytes())

    def copy(self) -> Fingerprint:
        """The same context, to be continued another way."""
        other = object.__new__(Fingerprint)
        other._key, other._hasher, other._state = self._key, self._hasher.copy(), self._state
        return other

    def mac(self, continuation: Iterable[int], complete: bool) -> tuple[int, int]:
        """128 bits, as two int64, over identity, all ids, this continuation and completeness.

        Before a replay this must equal what is stored beside the continuation.
        """
        ids = array("i", continuation)
        hasher = self._hasher.copy()
        hasher.update(ids.tobytes())
        hasher.update(struct.pack("<q?", len(ids), complete))
        first, second = struct.unpack("<qq", hasher.digest())
        return first, second

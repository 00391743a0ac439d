"""Makes the cache that the settings ask for."""

from __future__ import annotations

import logging
from typing import Any

import torch

from deepseek_flash import metrics
from deepseek_flash.config import CacheConfig
from deepseek_flash.dflash.cache import DFlashCache
from deepseek_flash.dflash.encoder import EncoderUnsupported, PrefixEncoder
from deepseek_flash.dflash.encoder_process import EncoderProcess
from deepseek_flash.dflash.fingerprint import FingerprintKey
from deepseek_flash.dflash.observer import Observer
from deepseek_flash.dflash.service import CacheService, NullService
from deepseek_flash.dflash.table import Table
from deepseek_flash.dflash.windows import SemanticWindows

log = logging.getLogger("deepseek_flash")


def open_cache(
    config: CacheConfig, engine_args: dict[str, Any], secret: bytes, recorder: metrics.Recorder
) -> CacheService | NullService:
    """The cache with its encoder, on its device, at work; or the one that is switched off.

    Args:
        engine_args: of model.json: which checkpoint the encoder is taken from.
        secret: of this server; fingerprints and MACs are derived from it.
    """
    if not config.enable_dflash:
        return NullService()
    # One core is enough here; the engine's threads have the rest.
    torch.set_num_threads(1)
    device = pick_device(config.device)
    encoder = _encoder(config, engine_args, device)
    table = Table(
        config.dflash_cache_size,
        device,
        block=config.dflash_block_tokens,
        hidden_size=encoder.hidden_size if encoder else 0,
        tenant_quota=config.dflash_tenant_quota or None,
    )
    cache = DFlashCache(
        FingerprintKey.derive(secret, config.dflash_fingerprint_bits),
        table,
        SemanticWindows(config.dflash_windows),
        ttl=config.dflash_ttl_seconds or None,
    )
    return CacheService(cache, Observer(recorder), encoder, config.dflash_semantic)


def pick_device(name: str) -> torch.device:
    """``auto`` is the first GPU, where there is one."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _encoder(
    config: CacheConfig, engine_args: dict[str, Any], device: torch.device
) -> PrefixEncoder | EncoderProcess | None:
    if config.dflash_semantic == "off" and config.dflash_windows == "none":
        return None
    load = EncoderProcess if device.type == "cpu" else PrefixEncoder.load
    try:
        return load(
            engine_args["model"],
            device=device,
            window=config.dflash_encoder_window,
            revision=engine_args.get("revision"),
        )
    except EncoderUnsupported as error:
        log.warning("the prefix encoder is off, DFlash works without it: %s", error)
        return None

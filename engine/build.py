"""From a node's settings to a runner: config, layout, backend, model, cache, in this order.

The one place that knows all of them. Takes plain values: the environment was read before.
"""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from attention.cache import PagedKVCache
from attention.layout import KVCacheLayout, LayoutChoice
from attention.selection import select_backend
from attention.spec import FP8_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from baton.errors import ConfigError
from engine.request import ModelFacts
from engine.runner import ModelRunner
from models.config import ModelConfig
from models.config_reader import read_config
from models.families import attention_needs, kv_cache_spec, resolve_dtype
from models.identity import ModelIdentity, model_identity
from models.loader import load_model

# What operators call a cache's own dtype.
KV_CACHE_DTYPES = MappingProxyType({"auto": "", **dict(zip(("fp8_e4m3", "fp8_e5m2"), FP8_DTYPES, strict=True))})


class Built(NamedTuple):
    """`dtype` is that of weights and activations; the cache's is in its spec."""

    runner: ModelRunner
    cache: PagedKVCache
    dtype: str
    layout: LayoutChoice
    identity: ModelIdentity
    config: ModelConfig


def build_runner(
    *,
    directory: Path,
    dtype: str = "auto",
    device: str = "cpu",
    kv_cache_layout: str | None = None,
    kv_cache_dtype: str = "auto",
    preferred_layout: KVCacheLayout | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    attention_backend: str | None = None,
    max_batch_requests: int = 256,
    load_format: str = "safetensors",
    progress: Callable[[int, int], None] | None = None,
) -> Built:
    """Loads the model in `directory` and allocates its cache.

    Args:
        dtype: "auto" means float32 on a CPU, else the checkpoint's.
        kv_cache_layout: what the operator asks for; None leaves it to `preferred_layout`, then to the default.
        kv_cache_dtype: "auto" means as `dtype`; "fp8_e4m3", "fp8_e5m2".
        max_batch_requests: of any engine step; some backends allocate for as many.
        num_blocks: size of the cache; None means as many blocks as `kv_cache_bytes` hold.
        progress: called while weights are read with the bytes read so far and the bytes in all.

    Raises:
        ConfigError: a value is wrong, or model, backend and cache do not go together.
    """
    device_type = _device_type(device)
    config = read_config(directory)
    dtype = resolve_dtype(config, dtype, device_type=device_type)
    kv_dtype = _resolve_kv_cache_dtype(kv_cache_dtype)
    spec = kv_cache_spec(config, dtype, kv_dtype)
    layout = LayoutChoice(mla=spec.kind is KVKind.MLA, environment=kv_cache_layout, preferred=preferred_layout)
    if num_blocks is None:
        num_blocks = _num_blocks(spec, block_size=block_size, kv_cache_bytes=kv_cache_bytes)
    shape = KVCacheShape(layout.get_kv_cache_layout(), block_size, num_blocks)
    needs = attention_needs(
        config, dtype=dtype, device=device, shape=shape, kv_dtype=kv_dtype, max_num_reqs=max_batch_requests
    )
    backend = select_backend(needs, forced=attention_backend)
    identity = model_identity(directory, config, load_format=load_format)
    model = load_model(
        directory,
        config,
        backend=backend,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        load_format=load_format,
        progress=progress,
    )
    cache = PagedKVCache(spec, shape, device)
    facts = ModelFacts(
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        # Some checkpoints name ids that their vocabulary lacks; those cannot be drawn, so they need not be forbidden.
        eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
        identity=f"{identity.config_digest} {identity.weights_digest} {dtype} {spec.dtype}",
    )
    return Built(ModelRunner(model, backend, cache, facts), cache, dtype, layout, identity, config)


def _device_type(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        raise ConfigError(
            f"device is {device!r}", field="device", value=device, allowed=("cpu", "cuda", "cuda:<index>")
        ) from None


def _resolve_kv_cache_dtype(kv_cache_dtype: str) -> str:
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}",
            field="kv_cache_dtype",
            value=kv_cache_dtype,
            allowed=tuple(KV_CACHE_DTYPES),
        )
    return KV_CACHE_DTYPES[kv_cache_dtype]


def _num_blocks(spec: KVCacheSpec, *, block_size: int, kv_cache_bytes: int | None) -> int:
    if kv_cache_bytes is None:
        raise ConfigError("neither num_blocks nor kv_cache_bytes is given", field="num_blocks", value=None)
    block_bytes = spec.bytes_per_token * block_size
    if block_bytes > kv_cache_bytes:
        raise ConfigError(
            f"a cache of {kv_cache_bytes} bytes holds no block of {block_bytes} bytes",
            field="kv_cache_mib",
            value=kv_cache_bytes,
            allowed=(f"at least {block_bytes} bytes",),
            cure="give the cache more memory, or take a smaller block_size",
        )
    return kv_cache_bytes // block_bytes

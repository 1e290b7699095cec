"""From a node's settings to a runner: config, layout, backend, model, cache, in this order."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from attention.selection import select_backend
from baton.config import CPU_BATCH_REQUESTS, CPU_BATCH_TOKENS, CPU_CACHE_MIB, GPU_BATCH_REQUESTS, MIB, NodeSettings
from baton.errors import ConfigError
from engine.device.graphs import GraphSettings
from engine.device.out_of_memory import allocating
from engine.device.profile import STEP_TOKENS, MemoryPlan, size_on_gpu
from engine.device.runner import ModelRunner
from engine.request import ModelFacts
from kvcache.cache import PagedKVCache
from kvcache.layout import LayoutChoice
from kvcache.spec import FP8_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from models.config.model_config import ModelConfig
from models.config.reader import read_config
from models.identity import ModelIdentity, model_identity
from models.needs import attention_needs, kv_cache_spec, resolve_dtype
from models.parallel import SINGLE, TensorParallel, kv_heads, local_config, refuse_batch_invariance
from models.weights.loader import load_model

# What operators call a cache's own dtype.
KV_CACHE_DTYPES = MappingProxyType({"auto": "", **dict(zip(("fp8_e4m3", "fp8_e5m2"), FP8_DTYPES, strict=True))})
_DEVICES = ("auto", "cpu", "cuda", "cuda:<index>")
# Of a cache that a profile sizes: a tiny model's would have so many blocks that the tables of them take gigabytes.
_MOST_BLOCKS = 1 << 20


@dataclass(frozen=True)
class StepLimits:
    """How much one engine step may hold."""

    max_batch_tokens: int
    max_batch_requests: int


class Built(NamedTuple):
    """One rank's part of a model, where several ranks compute it; each makes its own.

    Attributes:
        cache: the rank's own, with the heads that it has.
        dtype: of weights and activations; the cache's is in its spec.
        config: the whole model's, as is `model_spec`, one token's KV on all ranks together.
        memory: what a profile found; None where the cache's size was given.
        kv_heads: which of the model's this rank has; of latents it is the one, on every rank.
    """

    runner: ModelRunner
    cache: PagedKVCache
    dtype: str
    layout: LayoutChoice
    identity: ModelIdentity
    config: ModelConfig
    limits: StepLimits
    memory: MemoryPlan | None
    model_spec: KVCacheSpec
    parallel: TensorParallel
    kv_heads: range


def build_runner(
    settings: NodeSettings,
    *,
    parallel: TensorParallel = SINGLE,
    progress: Callable[[int, int], None] | None = None,
) -> Built:
    """Loads a model, or one rank's part of it, and allocates its cache.

    Args:
        settings: what a setting of None means is in its description.
        parallel: the rank that this process is. All ranks call this at the same time with settings that differ at most
            in the device; their caches get the same number of blocks, which the rank with the least memory sets.
        progress: called while weights are read, with the bytes read so far and the bytes in all.

    Raises:
        ConfigError: a value is wrong, or model, backend and cache do not go together.
    """
    place = _resolve_device(settings.device)
    on_gpu = place.type == "cuda"
    if on_gpu:
        # NOTE: Triton launches on the thread's current GPU, wherever the tensors are, and loading runs kernels.
        torch.cuda.set_device(place)
    config = read_config(settings.model)
    dtype = resolve_dtype(config, settings.dtype, device_type=place.type)
    kv_dtype = KV_CACHE_DTYPES[settings.kv_cache_dtype]
    model_spec = kv_cache_spec(config, dtype, kv_dtype)
    rank_config = local_config(config, parallel)
    if settings.batch_invariant:
        refuse_batch_invariance(parallel)
    spec = kv_cache_spec(rank_config, dtype, kv_dtype)
    layout = LayoutChoice(mla=spec.kind is KVKind.MLA, environment=settings.kv_cache_layout)
    block_size, num_blocks = settings.block_size, settings.num_blocks
    max_batch_tokens, kv_cache_bytes = settings.max_batch_tokens, settings.kv_cache_bytes
    max_batch_requests = settings.max_batch_requests or (GPU_BATCH_REQUESTS if on_gpu else CPU_BATCH_REQUESTS)
    if not on_gpu:
        max_batch_tokens = max_batch_tokens or CPU_BATCH_TOKENS
        kv_cache_bytes = kv_cache_bytes or CPU_CACHE_MIB * MIB
    if num_blocks is None and kv_cache_bytes is not None:
        num_blocks = _num_blocks(spec, block_size=block_size, kv_cache_bytes=kv_cache_bytes)
    # Until a GPU's cache is sized, it is taken to hold the longest sequence.
    shape = KVCacheShape(
        layout.get_kv_cache_layout(), block_size, num_blocks or -(-config.max_context_tokens // block_size)
    )
    backend = select_backend(
        attention_needs(
            rank_config,
            dtype=dtype,
            device=place,
            shape=shape,
            kv_dtype=kv_dtype,
            max_num_reqs=max_batch_requests,
            batch_invariant=settings.batch_invariant,
        ),
        forced=settings.attention_backend,
    )
    identity = model_identity(settings.model, config, load_format=settings.load_format)
    with allocating("the weights"):
        model = load_model(
            settings.model,
            config,
            backend=backend,
            dtype=dtype,
            device=place,
            kv_dtype=kv_dtype,
            load_format=settings.load_format,
            batch_invariant=settings.batch_invariant,
            parallel=parallel,
            progress=progress,
        )
    facts = _facts(config, spec, shape, f"{identity.config_digest} {identity.weights_digest} {dtype} {spec.dtype}")
    memory: MemoryPlan | None = None
    if max_batch_tokens is None or num_blocks is None:
        with allocating("steps of the largest size"):
            sizing = size_on_gpu(
                lambda cache: ModelRunner(model, backend, cache, facts),
                spec,
                shape,
                device=place,
                step_tokens=STEP_TOKENS if max_batch_tokens is None else (max_batch_tokens,),
                max_batch_requests=max_batch_requests,
                fraction=settings.gpu_memory_fraction,
                reserved_bytes=settings.staging_bytes(on_gpu=True),
                graphs=settings.cuda_graphs,
                sizes_cache=num_blocks is None,
            )
        max_batch_tokens, memory = max_batch_tokens or sizing.step_tokens, sizing.memory
        if memory is not None:
            fitting = _num_blocks(spec, block_size=block_size, kv_cache_bytes=memory.kv_cache)
            num_blocks = min(fitting, _MOST_BLOCKS)
    assert num_blocks is not None, "given, or sized just now"
    num_blocks = parallel.smallest(num_blocks, place)
    max_batch_tokens = parallel.smallest(max_batch_tokens, place)
    with allocating(f"the KV cache, {num_blocks} blocks of {block_size} tokens"):
        cache = PagedKVCache(spec, replace(shape, num_blocks=num_blocks), place)
    graphs: GraphSettings | None = None
    if on_gpu and settings.cuda_graphs:
        graphs = GraphSettings(
            max_requests=max_batch_requests,
            max_context_tokens=min(config.max_context_tokens, cache.shape.num_slots),
            memory_bytes=None if memory is None else memory.graphs,
        )
    runner = ModelRunner(model, backend, cache, replace(facts, num_blocks=num_blocks), graphs=graphs)
    limits = StepLimits(max_batch_tokens, max_batch_requests)
    heads = kv_heads(model_spec.num_kv_heads, parallel)
    return Built(
        runner, cache, dtype, layout, identity, config, limits, memory, model_spec, parallel=parallel, kv_heads=heads
    )


def _facts(config: ModelConfig, spec: KVCacheSpec, shape: KVCacheShape, identity: str) -> ModelFacts:
    return ModelFacts(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        # Some checkpoints name ids that their vocabulary lacks; those cannot be drawn, so they need not be forbidden.
        eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
        identity=identity,
        window_tokens=max(spec.windows, default=0),
    )


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}", field="device", value=device, allowed=_DEVICES) from None
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count()
    index = place.index or 0
    if index >= count:
        raise ConfigError(
            f"device is {device}, and this machine has {count} GPU(s)",
            field="device",
            value=device,
            allowed=("auto", "cpu", *(f"cuda:{index}" for index in range(count))),
            cure="install a torch with CUDA, give the container a GPU, or take --device cpu" if count == 0 else "",
        )
    # With its index, so that it is the same in every thread.
    return torch.device("cuda", index)


def _num_blocks(spec: KVCacheSpec, *, block_size: int, kv_cache_bytes: int) -> int:
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

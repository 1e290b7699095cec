"""Builds a runner as `baton.engine.runner_plan` plans it: loads the model, sizes and allocates the cache."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from attention.backend import AttentionBackend
from baton.core.costs import StepCosts
from baton.core.errors import BatonError
from baton.engine.cache_size import profiled_sizes
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.out_of_memory import allocating
from baton.engine.device.profile import MemoryPlan
from baton.engine.device.resolve_device import resolve_device
from baton.engine.device.runner import ModelRunner
from baton.engine.draft_layer import draft_digest, load_draft_head
from baton.engine.optional_layer import LayerTrial, without_layer_if_needed
from baton.engine.peer_memory import share_memory
from baton.engine.request import ModelFacts
from baton.engine.runner_plan import RunnerPlan, plan_runner, read_model_config
from baton.engine.same_model import check_same_files, hashing_content
from baton.grammar.compiler import GrammarCompiler
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import LayoutChoice
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from baton.models.adapters.bank import AdapterBank
from baton.models.config.model_config import ModelConfig
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import SINGLE, TensorParallel, kv_heads
from baton.models.loading.identity import ModelIdentity, model_identity
from baton.models.loading.loader import load_model
from baton.models.loading.tokenizer_files.find import tokenizer_json
from baton.settings.config import MIB
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLimits:
    """Most tokens and requests of one engine step."""

    max_batch_tokens: int
    max_batch_requests: int


class BuiltRunner(NamedTuple):
    """A runner and what it consists of; with several ranks, one rank's part.

    Attributes:
        cache: the rank's own, with the heads of this rank.
        dtype: dtype of weights and activations; the cache's dtype is in its spec.
        config: configuration of the whole model.
        memory: the result of a profile; None if the settings give the size of the cache.
        model_spec: the KV of one token on all ranks together.
        kv_heads: the model's KV heads on this rank; an MLA model has one, which every rank holds.
        grammars: compiler for the model's tokenizer, already loaded.
        costs: measured costs of served steps; None before `calibrate`.
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
    grammars: GrammarCompiler
    costs: StepCosts | None = None
    largest: StepLimits | None = None  # what the runner was prepared for; None before `calibrate`


def build_runner(
    settings: NodeSettings,
    *,
    parallel: TensorParallel = SINGLE,
    progress: Callable[[int, int], None] | None = None,
) -> BuiltRunner:
    """Loads a model, or one rank's part of it, and allocates its cache.

    Args:
        settings: the descriptions of the settings say what None means.
        parallel: the rank of this process. All ranks call this at the same time with settings that differ at most in
            the device. Their caches get the same number of blocks, set by the rank with the least memory.
        progress: called while weights are read, with the bytes read so far and the bytes in all.

    On a GPU, where the settings give no step size, the limit is the largest one until `calibrate` has chosen.

    Raises:
        ConfigError: a value is wrong, or model, backend and cache do not fit together.
    """
    return without_layer_if_needed(
        lambda given: _build_runner(given, parallel, progress), settings, logs=parallel.rank == 0
    )


def _build_runner(
    settings: NodeSettings, parallel: TensorParallel, progress: Callable[[int, int], None] | None
) -> BuiltRunner:
    """Builds a runner as `build_runner` does, or raises LayerLeftOut."""
    device = resolve_device(settings.device)
    if device.type == "cuda":
        # NOTE: Triton launches on the thread's current GPU, wherever the tensors are, and loading runs kernels.
        torch.cuda.set_device(device)
    config = read_model_config(settings, parallel)
    trial = LayerTrial(config, parallel, device)
    plan = plan_runner(settings, config, parallel, device, trial)
    backend = plan.backend_for(plan.rank_config)
    identity = model_identity(settings.model, config, load_format=settings.load_format)
    identity = replace(identity, draft_digest=draft_digest(config, settings, plan.parallel, device))
    tokenizer = tokenizer_json(settings.model)
    check_same_files(plan.parallel, settings.model, identity, tokenizer, device)
    model, identity = _load_model(plan, backend, identity, trial, progress)
    facts = _facts(plan, identity)
    adapters = _open_adapters(plan, model, trial) if settings.adapter_slots else None
    grammars = _load_grammars(tokenizer, facts, plan.parallel)

    def make_runner(cache: PagedKVCache, graphs: GraphSettings | None = None) -> ModelRunner:
        known = replace(facts, num_blocks=cache.shape.num_blocks, state_slots=cache.shape.state_slots)
        return ModelRunner(model, backend, cache, known, graphs=graphs, grammars=grammars, adapters=adapters)

    shape, limits, memory = _agree_on_sizes(plan, model, make_runner, trial)
    with trial.step(), allocating(f"the KV cache, {shape.num_blocks} blocks of {shape.block_size} tokens"):
        cache = PagedKVCache(plan.spec, shape, device)
    if shape.state_slots:
        slot_mib = plan.spec.bytes_per_slot / MIB
        _log.info("%s: %d slots for recurrent states of %.1f MiB", device, shape.state_slots, slot_mib)
    return BuiltRunner(
        make_runner(cache, _graph_settings(plan, shape, limits, memory)),
        cache,
        plan.dtype,
        plan.layout,
        identity,
        config,
        limits,
        memory,
        plan.model_spec,
        parallel=plan.parallel,
        kv_heads=kv_heads(plan.model_spec.num_kv_heads, plan.parallel),
        grammars=grammars,
    )


def _load_model(
    plan: RunnerPlan,
    backend: AttentionBackend,
    identity: ModelIdentity,
    trial: LayerTrial,
    progress: Callable[[int, int], None] | None,
) -> tuple[CausalLM, ModelIdentity]:
    """Loads the rank's weights and, meanwhile, computes their digest, which completes the identity."""
    settings, config, parallel, device = plan.settings, plan.config, plan.parallel, plan.device
    with hashing_content(parallel, settings, device) as content:
        with trial.step(), allocating("the weights"):
            model = load_model(
                settings.model,
                config,
                backend=backend,
                dtype=plan.dtype,
                device=device,
                kv_dtype=plan.kv_dtype,
                load_format=settings.load_format,
                batch_invariant=settings.batch_invariant,
                parallel=parallel,
                progress=progress,
            )
        if parallel.share_memory:
            share_memory(model, dtype=TORCH_DTYPES[plan.dtype], device=device)
        if plan.rank_config.eagle is not None:
            load_draft_head(
                model,
                config,
                settings,
                backend=plan.backend_for(plan.rank_config.eagle.layer),
                dtype=plan.dtype,
                device=device,
                parallel=parallel,
            )
        return model, replace(identity, content_digest=content())


def _facts(plan: RunnerPlan, identity: ModelIdentity) -> ModelFacts:
    config, shape = plan.config, plan.shape
    known_by = f"{identity.config_digest} {identity.weights_digest} {plan.dtype} {plan.spec.dtype}"
    if config.has_draft_layer:  # blocks without that layer's KV are others
        known_by += f" draft{identity.draft_digest}"
    return ModelFacts(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        # Some checkpoints name ids outside of their vocabulary. They cannot be drawn, so they need not be forbidden.
        eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
        identity=known_by,
        window_tokens=max(plan.spec.windows, default=0),
        state_slots=shape.state_slots,
        num_owners=plan.parallel.num_owners,
        drafts=config.has_draft_layer,
        rows_in_order=plan.settings.batch_invariant,  # every backend's are in that mode
    )


def _open_adapters(plan: RunnerPlan, model: CausalLM, trial: LayerTrial) -> AdapterBank:
    settings = plan.settings
    what = f"{settings.adapter_slots} slots for adapters of rank {settings.max_adapter_rank}"
    with trial.step(), allocating(what):
        adapters = AdapterBank(
            model,
            plan.config,
            count=settings.adapter_slots,
            rank=settings.max_adapter_rank,
            experts=settings.adapter_experts,
            parallel=plan.parallel,
            batch_invariant=settings.batch_invariant,
        )
    _log.info("%s: %d slots for adapters of %.1f MiB", plan.device, adapters.count, adapters.bytes_per_slot / MIB)
    return adapters


def _load_grammars(tokenizer: Path, facts: ModelFacts, parallel: TensorParallel) -> GrammarCompiler:
    """The compiler for the model's tokenizer, loaded."""
    clock = time.thread_time if parallel.rank == 0 else None  # rank 0 ends requests
    grammars = GrammarCompiler(tokenizer, facts.vocab_size, facts.eos_token_ids, clock=clock)
    # Loads now, because the library holds the interpreter lock meanwhile (2.4 s for 128,000 tokens) and no step could
    # run.
    with suppress(BatonError):  # requests with a grammar get the error
        grammars.load()
    return grammars


def _agree_on_sizes(
    plan: RunnerPlan, model: CausalLM, make_runner: Callable[[PagedKVCache], ModelRunner], trial: LayerTrial
) -> tuple[KVCacheShape, StepLimits, MemoryPlan | None]:
    """The cache's shape and the step limits, by the rank with the least memory; and the profile, if one was needed."""
    settings, parallel, device = plan.settings, plan.parallel, plan.device
    sizes, memory = plan.sizes, None
    if sizes.num_blocks is None:
        with trial.step(communicates=True):
            sizes, memory = profiled_sizes(settings, sizes, make_runner, plan.spec, plan.shape, device)
    assert sizes.num_blocks is not None, "given or profiled"
    num_blocks = parallel.smallest(sizes.num_blocks, device)
    state_slots = parallel.smallest(sizes.state_slots, device)
    limits = StepLimits(parallel.smallest(sizes.max_batch_tokens, device), sizes.max_batch_requests)
    trial.check_room(
        settings,
        plan.spec,
        replace(sizes, num_blocks=num_blocks),
        context_tokens=plan.config.max_context_tokens,
        layer_bytes=0 if memory is None else _layer_bytes(model),
    )
    return replace(plan.shape, num_blocks=num_blocks, state_slots=state_slots), limits, memory


def _layer_bytes(model: CausalLM) -> int:
    """Bytes of the weights of the model's layer for multi-token prediction."""
    return sum(weight.nbytes for weight in model.mtp.parameters()) if model.mtp is not None else 0


def _graph_settings(
    plan: RunnerPlan, shape: KVCacheShape, limits: StepLimits, memory: MemoryPlan | None
) -> GraphSettings | None:
    if plan.device.type != "cuda" or not plan.settings.cuda_graphs:
        return None
    return GraphSettings(
        max_requests=limits.max_batch_requests,
        max_context_tokens=min(plan.config.max_context_tokens, shape.num_slots),
        memory_bytes=None if memory is None else memory.graphs,
        max_tokens=limits.max_batch_tokens,
        cascade=True,
    )

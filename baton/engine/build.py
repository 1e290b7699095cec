"""Builds a runner from a node's settings: config, layout, backend, model, cache, in this order; then measures it."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from attention.selection import select_backend
from baton.core.costs import StepCosts
from baton.core.errors import BatonError, ConfigError
from baton.engine.cache_size import given_sizes, profiled_sizes
from baton.engine.device.fits import check_fits
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.out_of_memory import allocating
from baton.engine.device.profile import MemoryPlan
from baton.engine.device.resolve_device import resolve_device
from baton.engine.device.runner import ModelRunner
from baton.engine.device.step_costs import (
    BOTH_RULE,
    DECODE_RULE,
    PREFILL_RULE,
    StepRule,
    choose_step_tokens,
    measure_costs,
    served_steps,
    step_sizes,
)
from baton.engine.draft_layer import draft_digest, load_draft_head, with_draft_layer
from baton.engine.expert_plan import check_same_plan, plan_experts
from baton.engine.optional_layer import LayerTrial, without_layer_if_needed
from baton.engine.peer_memory import share_memory
from baton.engine.request import ModelFacts
from baton.engine.same_model import check_same_config, check_same_files, hashing_content
from baton.grammar.compiler import GrammarCompiler
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import LayoutChoice
from baton.kvcache.spec import KV_CACHE_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from baton.models.adapters.bank import AdapterBank
from baton.models.config.model_config import ModelConfig
from baton.models.config.quantization.config import Fp8Config
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import SINGLE, TensorParallel, kv_heads
from baton.models.loading.identity import ModelIdentity, model_identity
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import attention_needs, kv_cache_spec, resolve_dtype
from baton.models.loading.tokenizer_files.find import tokenizer_json
from baton.settings.config import MIB
from baton.settings.node_config import (
    GPU_BATCH_REQUESTS,
    DecodeSettings,
    NodeSettings,
    PrefillSettings,
)

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
    if parallel.own_attention and settings.adapter_slots:
        raise ConfigError(
            "attention_data_parallel is on, and the node has slots for adapters",
            field="attention_data_parallel",
            value=True,
            allowed=("false",),
            cure="leave out one of them: adapters need ranks that compute all tokens together",
        )
    config = read_config(settings.model).for_context(settings.max_context_tokens)
    if config.max_context_tokens < config.max_position_embeddings:
        _log.warning(
            "sequences have at most %d tokens, within which LongRoPE's short factors are exact; for up to %d tokens, "
            "all with its long factors, give every node and gateway a larger max_context_tokens",
            config.max_context_tokens,
            config.max_position_embeddings,
        )
    config = with_draft_layer(config, settings, logs=parallel.rank == 0)
    trial = LayerTrial(config, parallel, device)
    parallel = plan_experts(parallel, config, settings)
    dtype = resolve_dtype(config, settings.dtype, device_type=device.type)
    kv_dtype = KV_CACHE_DTYPES[settings.kv_cache_dtype]
    if settings.kv_cache_dtype == "fp8_e5m2" and isinstance(config.quantization, Fp8Config):
        # Such a checkpoint's scales of keys and values are made for e4m3.
        raise ConfigError(
            "kv_cache_dtype is fp8_e5m2, and the checkpoint's weights are in fp8 (e4m3)",
            field="kv_cache_dtype",
            value=settings.kv_cache_dtype,
            allowed=("auto", "fp8_e4m3"),
        )
    model_spec = kv_cache_spec(config, dtype, kv_dtype)
    rank_config = local_config(config, parallel)
    check_same_config(parallel, settings.model, config, device)
    check_same_plan(parallel, device)
    spec = kv_cache_spec(rank_config, dtype, kv_dtype)
    layout = LayoutChoice(mla=spec.kind is KVKind.MLA, setting=settings.kv_cache_layout)
    with trial.step():
        sizes = given_sizes(settings, spec, device, context_tokens=config.max_context_tokens)
        check_fits(settings, spec, num_blocks=sizes.num_blocks, state_slots=sizes.state_slots, device=device)
    # Until a profile sets the number of blocks, the cache is assumed to hold the longest sequence.
    num_blocks = sizes.num_blocks or -(-config.max_context_tokens // settings.block_size)
    shape = KVCacheShape(layout.get_kv_cache_layout(), settings.block_size, num_blocks, sizes.state_slots)
    needs_of = partial(
        attention_needs,
        dtype=dtype,
        device=device,
        shape=shape,
        kv_dtype=kv_dtype,
        max_num_reqs=sizes.max_batch_requests,
        max_num_tokens=sizes.max_batch_tokens,
        batch_invariant=settings.batch_invariant,
    )
    backend = select_backend(needs_of(rank_config), forced=settings.attention_backend)
    identity = model_identity(settings.model, config, load_format=settings.load_format)
    identity = replace(identity, draft_digest=draft_digest(config, settings, parallel, device))
    tokenizer = tokenizer_json(settings.model)
    check_same_files(parallel, settings.model, identity, tokenizer, device)
    with hashing_content(parallel, settings, device) as content:
        with trial.step(), allocating("the weights"):
            model = load_model(
                settings.model,
                config,
                backend=backend,
                dtype=dtype,
                device=device,
                kv_dtype=kv_dtype,
                load_format=settings.load_format,
                batch_invariant=settings.batch_invariant,
                parallel=parallel,
                progress=progress,
            )
        if parallel.share_memory:
            share_memory(model, dtype=TORCH_DTYPES[dtype], device=device)
        if rank_config.eagle is not None:
            head_backend = select_backend(needs_of(rank_config.eagle.layer), forced=settings.attention_backend)
            load_draft_head(
                model, config, settings, backend=head_backend, dtype=dtype, device=device, parallel=parallel
            )
        identity = replace(identity, content_digest=content())
    known_by = f"{identity.config_digest} {identity.weights_digest} {dtype} {spec.dtype}"
    known_by += (
        f" draft{identity.draft_digest}" if config.has_draft_layer else ""
    )  # blocks without that part are others
    # In batch-invariant mode every backend's rows are in order.
    in_order = settings.batch_invariant
    facts = _facts(config, spec, shape, known_by, num_owners=parallel.num_owners, rows_in_order=in_order)

    adapters: AdapterBank | None = None
    if settings.adapter_slots:
        with (
            trial.step(),
            allocating(f"{settings.adapter_slots} slots for adapters of rank {settings.max_adapter_rank}"),
        ):
            adapters = AdapterBank(
                model,
                config,
                count=settings.adapter_slots,
                rank=settings.max_adapter_rank,
                experts=settings.adapter_experts,
                parallel=parallel,
                batch_invariant=settings.batch_invariant,
            )
        _log.info("%s: %d slots for adapters of %.1f MiB", device, adapters.count, adapters.bytes_per_slot / MIB)
    clock = time.thread_time if parallel.rank == 0 else None  # rank 0 ends requests
    grammars = GrammarCompiler(tokenizer, facts.vocab_size, facts.eos_token_ids, clock=clock)
    # Loads now, because the library holds the interpreter lock meanwhile (2.4 s for 128,000 tokens) and no step could
    # run.
    with suppress(BatonError):  # requests with a grammar get the error
        grammars.load()

    def make_runner(cache: PagedKVCache, graphs: GraphSettings | None = None) -> ModelRunner:
        known = replace(facts, num_blocks=cache.shape.num_blocks, state_slots=cache.shape.state_slots)
        return ModelRunner(model, backend, cache, known, graphs=graphs, grammars=grammars, adapters=adapters)

    memory: MemoryPlan | None = None
    if sizes.num_blocks is None:
        with trial.step(communicates=True):
            sizes, memory = profiled_sizes(settings, sizes, make_runner, spec, shape, device)
    assert sizes.num_blocks is not None, "given or profiled"
    num_blocks = parallel.smallest(sizes.num_blocks, device)
    state_slots = parallel.smallest(sizes.state_slots, device)
    limits = StepLimits(parallel.smallest(sizes.max_batch_tokens, device), sizes.max_batch_requests)
    trial.check_room(
        settings,
        spec,
        replace(sizes, num_blocks=num_blocks),
        context_tokens=config.max_context_tokens,
        layer_bytes=0 if memory is None else _layer_bytes(model),
    )
    with trial.step(), allocating(f"the KV cache, {num_blocks} blocks of {settings.block_size} tokens"):
        cache = PagedKVCache(spec, replace(shape, num_blocks=num_blocks, state_slots=state_slots), device)
    if state_slots:
        _log.info("%s: %d slots for recurrent states of %.1f MiB", device, state_slots, spec.bytes_per_slot / MIB)
    graphs: GraphSettings | None = None
    if device.type == "cuda" and settings.cuda_graphs:
        graphs = GraphSettings(
            max_requests=limits.max_batch_requests,
            max_context_tokens=min(config.max_context_tokens, cache.shape.num_slots),
            memory_bytes=None if memory is None else memory.graphs,
            max_tokens=limits.max_batch_tokens,
            cascade=True,
        )
    return BuiltRunner(
        make_runner(cache, graphs),
        cache,
        dtype,
        layout,
        identity,
        config,
        limits,
        memory,
        model_spec,
        parallel=parallel,
        kv_heads=kv_heads(model_spec.num_kv_heads, parallel),
        grammars=grammars,
    )


def calibrate(built: BuiltRunner, settings: NodeSettings) -> BuiltRunner:
    """Prepares the runner, measures the costs of served steps, and chooses the step size if the settings give none. All
    ranks call it together, while the cache is empty.
    """
    device = built.cache.view.device
    runner, largest, parallel = built.runner, built.limits, built.parallel
    limits = largest
    runner.prepare()
    steps = served_steps(
        runner.facts,
        most_tokens=limits.max_batch_tokens,
        most_requests=min(limits.max_batch_requests, GPU_BATCH_REQUESTS),
    )
    with allocating("steps of the largest size"):
        costs = measure_costs(runner.launch, runner.facts, steps, agree=lambda value: parallel.smallest(value, device))
    runner.reset_expert_counts()
    built = built._replace(costs=costs, largest=largest)
    limits = step_limits(built, settings)
    limits = replace(limits, max_batch_tokens=parallel.smallest(limits.max_batch_tokens, device))
    rates = ", ".join(f"{tokens}: {tokens / costs.prompt_tokens_s(tokens):,.0f}" for tokens, _ in costs.points)
    _log.info(
        "%s: steps of up to %d tokens; prompt tokens per second by step size: %s",
        device,
        limits.max_batch_tokens,
        rates,
    )
    return built._replace(limits=limits)


def step_limits(built: BuiltRunner, settings: NodeSettings) -> StepLimits:
    """The step limits for the role in these settings, within those that the runner was prepared for."""
    if built.costs is None or built.largest is None or settings.max_batch_tokens is not None:
        return built.limits
    rule, most = step_rule(settings), built.largest
    sizes = step_sizes(rule, most_tokens=most.max_batch_tokens, max_batch_requests=most.max_batch_requests)
    return replace(most, max_batch_tokens=choose_step_tokens(built.costs, sizes, rule))


def step_rule(settings: NodeSettings) -> StepRule:
    """The rule by which the node's step size is chosen."""
    if isinstance(settings, DecodeSettings):
        return DECODE_RULE
    also_decodes = isinstance(settings, PrefillSettings) and settings.also_decodes
    return BOTH_RULE if also_decodes else PREFILL_RULE


def _facts(
    config: ModelConfig,
    spec: KVCacheSpec,
    shape: KVCacheShape,
    identity: str,
    *,
    num_owners: int,
    rows_in_order: bool,
) -> ModelFacts:
    return ModelFacts(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        # Some checkpoints name ids outside of their vocabulary. They cannot be drawn, so they need not be forbidden.
        eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
        identity=identity,
        window_tokens=max(spec.windows, default=0),
        state_slots=shape.state_slots,
        num_owners=num_owners,
        drafts=config.has_draft_layer,
        rows_in_order=rows_in_order,
    )


def _layer_bytes(model: CausalLM) -> int:
    """Bytes of the weights of the model's layer for multi-token prediction."""
    return sum(weight.nbytes for weight in model.mtp.parameters()) if model.mtp is not None else 0

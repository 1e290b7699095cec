"""Plans what a rank loads and allocates from its node's settings, before any weight is read: config, dtypes, sizes of
steps and cache, layout, attention backend.
"""

import logging
from dataclasses import dataclass

import torch

from attention.backend import AttentionBackend
from attention.selection import select_backend
from baton.core.errors import ConfigError
from baton.engine.cache_size import CacheSizes, given_sizes
from baton.engine.device.fits import check_fits
from baton.engine.draft_layer import with_draft_layer
from baton.engine.expert_plan import check_same_plan, plan_experts
from baton.engine.optional_layer import LayerTrial
from baton.engine.same_model import check_same_config
from baton.kvcache.layout import LayoutChoice
from baton.kvcache.spec import KV_CACHE_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from baton.models.config.model_config import ModelConfig
from baton.models.config.quantization.config import Fp8Config
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import attention_needs, kv_cache_spec, resolve_dtype
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerPlan:
    """What one rank loads and allocates.

    Attributes:
        parallel: the rank, with the plan of its experts.
        config: of the whole model.
        rank_config: of the rank's part.
        dtype: of weights and activations; the cache's is in its spec.
        model_spec: the KV of one token on all ranks together.
        spec: the KV of one token on this rank.
        sizes: without the number of blocks, if a profile chooses that.
        shape: of the cache; until a profile has chosen, it holds the longest sequence.
    """

    settings: NodeSettings
    parallel: TensorParallel
    device: torch.device
    config: ModelConfig
    rank_config: ModelConfig
    dtype: str
    model_spec: KVCacheSpec
    spec: KVCacheSpec
    layout: LayoutChoice
    sizes: CacheSizes
    shape: KVCacheShape

    @property
    def kv_dtype(self) -> str:
        return KV_CACHE_DTYPES[self.settings.kv_cache_dtype]

    def backend_for(self, config: ModelConfig) -> AttentionBackend:
        """The attention backend for layers of that config.

        Raises:
            ConfigError: none fits.
        """
        needs = attention_needs(
            config,
            dtype=self.dtype,
            device=self.device,
            shape=self.shape,
            kv_dtype=self.kv_dtype,
            max_num_reqs=self.sizes.max_batch_requests,
            max_num_tokens=self.sizes.max_batch_tokens,
            batch_invariant=self.settings.batch_invariant,
        )
        return select_backend(needs, forced=self.settings.attention_backend)


def read_model_config(settings: NodeSettings, parallel: TensorParallel) -> ModelConfig:
    """The configuration of the whole model, with the layer that drafts tokens if the node is to have one.

    Raises:
        ConfigError: the file or the settings are wrong, or contradict each other.
    """
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
    return with_draft_layer(config, settings, logs=parallel.rank == 0)


def plan_runner(
    settings: NodeSettings, config: ModelConfig, parallel: TensorParallel, device: torch.device, trial: LayerTrial
) -> RunnerPlan:
    """Plans a rank's runner. All ranks call it together.

    Raises:
        ConfigError: a value is wrong, or the ranks have different models or plans.
        LayerLeftOut: there is no room for the layer that drafts tokens.
    """
    parallel = plan_experts(parallel, config, settings)
    dtype = resolve_dtype(config, settings.dtype, device_type=device.type)
    _check_kv_dtype(settings, config)
    kv_dtype = KV_CACHE_DTYPES[settings.kv_cache_dtype]
    model_spec = kv_cache_spec(config, dtype, kv_dtype)
    rank_config = local_config(config, parallel)
    check_same_config(parallel, settings.model, config, device)
    check_same_plan(parallel, device)
    spec = kv_cache_spec(rank_config, dtype, kv_dtype)
    layout = LayoutChoice(mla=spec.kind is KVKind.MLA, setting=settings.kv_cache_layout)
    with trial.step():
        sizes = given_sizes(settings, spec, device, context_tokens=config.max_context_tokens)
        check_fits(settings, spec, num_blocks=sizes.num_blocks, state_slots=sizes.state_slots, device=device)
    num_blocks = sizes.num_blocks or -(-config.max_context_tokens // settings.block_size)
    return RunnerPlan(
        settings=settings,
        parallel=parallel,
        device=device,
        config=config,
        rank_config=rank_config,
        dtype=dtype,
        model_spec=model_spec,
        spec=spec,
        layout=layout,
        sizes=sizes,
        shape=KVCacheShape(layout.get_kv_cache_layout(), settings.block_size, num_blocks, sizes.state_slots),
    )


def _check_kv_dtype(settings: NodeSettings, config: ModelConfig) -> None:
    if settings.kv_cache_dtype == "fp8_e5m2" and isinstance(config.quantization, Fp8Config):
        # Such a checkpoint's scales of keys and values are made for e4m3.
        raise ConfigError(
            "kv_cache_dtype is fp8_e5m2, and the checkpoint's weights are in fp8 (e4m3)",
            field="kv_cache_dtype",
            value=settings.kv_cache_dtype,
            allowed=("auto", "fp8_e4m3"),
        )

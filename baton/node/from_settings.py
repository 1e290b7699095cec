"""Makes the parts of a node from its settings: the loaded model, the engine's limits, the transfer of one rank, and the
description for peers.
"""

from contextlib import nullcontext

import torch

from baton.core.supervisor import Supervisor
from baton.core.version import __version__
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.calibration import calibrate, step_limits
from baton.engine.request import EngineLimits
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.node.early_host_memory import EarlyHostMemory
from baton.node.kv_stores import open_stores
from baton.node.progress import LoadingProgress, ReportedProgress
from baton.node.ranks.join import rank_device
from baton.settings.node_config import STAGING_SLOTS, NodeSettings, PrefillSettings
from kvtransfer.flows import heads_of
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.plan import WIRE_NEWEST, NodeDescription, wire_oldest
from kvtransfer.rank_transfer import OnFilled, OnRefused, OnStoresChanged
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer

# The share of a prefill node's seats and blocks that requests may take to decode there; the rest is for other prompts.
_STREAM_SHARE = 0.75


def transfer_settings(settings: NodeSettings, built: BuiltRunner, incarnation: int) -> TransferSettings:
    """One rank's transfer settings, derived from the node's settings."""
    return TransferSettings(
        incarnation=incarnation,
        transport=settings.transport,
        segment_bytes=settings.segment_bytes(on_gpu=built.cache.view.is_cuda),
        staging_slots=STAGING_SLOTS,
        digests=True,
        receive_bytes_per_s=settings.receive_bytes_per_s,
        peers_are_known=settings.tls_ca is not None,
        heads=tuple(
            heads_of(built.parallel.rank, ranks=built.parallel.size, num_kv_heads=part.num_kv_heads)
            for part in built.model_spec.parts
        ),
        host_cache_bytes=settings.host_cache_bytes,
        stores=open_stores(settings, built),
    )


def open_transfer(
    settings: NodeSettings,
    built: BuiltRunner,
    incarnation: int,
    on_filled: OnFilled,
    on_refused: OnRefused,
    *,
    on_stores_changed: OnStoresChanged = lambda _: None,
    host_pages: HostPages | None = None,
) -> KVTransfer:
    """The KV transfer of one rank, not yet started."""
    return KVTransfer(
        built.cache,
        transfer_settings(settings, built, incarnation),
        on_filled=on_filled,
        on_refused=on_refused,
        on_stores_changed=on_stores_changed,
        host_pages=host_pages,
    )


def load(
    settings: NodeSettings,
    parallel: TensorParallel = SINGLE,
    *,
    supervisor: Supervisor | None = None,
    host_memory: EarlyHostMemory | None = None,
) -> BuiltRunner:
    """Reads the checkpoint, or one rank's part of it, and allocates the cache; on a GPU, captures graphs and measures
    steps. It takes long, and all ranks call it together.

    Args:
        supervisor: receives the progress if there is one; otherwise it is shown on a terminal or logged.
        host_memory: is locked before steps are measured, because page-locking stops launches. On a CPU there is none.

    Raises:
        ConfigError: a setting, or the checkpoint that it names, cannot work.
    """
    torch.set_num_threads(settings.threads)
    # All ranks read the same number of bytes, so only one shows the progress.
    with _progress(supervisor) if parallel.rank == 0 else nullcontext() as progress:
        device = settings.device if parallel.size == 1 else rank_device(settings, parallel.rank)
        built = build_runner(settings.model_copy(update={"device": device}), parallel=parallel, progress=progress)
    if not built.cache.view.is_cuda:
        return built  # a node on a CPU learns the costs of steps while it serves
    if supervisor is not None:
        supervisor.report("capturing graphs" if settings.cuda_graphs else "measuring steps")
    built.runner.prepare()
    if host_memory is not None:
        host_memory.wait(log=parallel.rank == 0)
    return calibrate(built, settings)


def _progress(supervisor: Supervisor | None) -> LoadingProgress | ReportedProgress:
    if supervisor is None:
        return LoadingProgress()
    return ReportedProgress(supervisor, None if supervisor.present else LoadingProgress())


def engine_limits(settings: NodeSettings, built: BuiltRunner, *, max_context_tokens: int) -> EngineLimits:
    """The engine's limits in a role."""
    limits = step_limits(built, settings)
    return EngineLimits(
        max_batch_tokens=limits.max_batch_tokens,
        max_batch_requests=limits.max_batch_requests,
        max_context_tokens=max_context_tokens,
        max_waiting=settings.max_waiting,
        prefix_cache=settings.prefix_cache,
        stream_share=_STREAM_SHARE if isinstance(settings, PrefillSettings) else 1.0,
    )


def node_description(settings: NodeSettings, built: BuiltRunner) -> NodeDescription:
    """The description by which peers decide whether they can pair with the node."""
    identity, own_requests = built.identity, built.parallel.num_owners > 1
    return NodeDescription(
        architecture=identity.architecture,
        config_digest=identity.config_digest,
        weights_digest=identity.weights_digest,
        content_digest=identity.content_digest,
        draft_digest=identity.draft_digest,
        spec=built.model_spec,
        shape=built.cache.shape,
        wire_oldest=wire_oldest(built.model_spec, attention_data_parallel=own_requests),
        wire_newest=WIRE_NEWEST,
        package_version=__version__,
        batch_invariant=settings.batch_invariant,
        tensor_parallel_size=built.parallel.size,
        converted_kv_dtypes=settings.converted_kv_dtypes,
        attention_data_parallel=own_requests,
        rows_in_order=settings.batch_invariant,
        expert_parallel=built.parallel.whole_experts,
    )

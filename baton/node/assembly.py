"""Assembles a node from its settings: model, engine, KV transfer, identity."""

import itertools
import logging
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from baton.core.kv_entries import NodeRanks, StoreChanges
from baton.engine.build import BuiltRunner
from baton.engine.cache_size import shortage
from baton.engine.device.device_thread import StepRunner
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.open_speculator import open_speculator
from baton.engine.step_meter import StepMeter
from baton.metrics.metric import ProcessRole as MeterRole
from baton.models.loading.kv_scales import kv_scales
from baton.models.loading.tokenizer_files.find import tokenizer_json
from baton.models.loading.tokenizer_files.vocabulary import vocabulary_digest
from baton.node.describe import to_info
from baton.node.expert_load import ExpertLoads
from baton.node.from_settings import engine_limits, node_description, open_transfer, transfer_settings
from baton.node.gpu_meter import GpuMeter, gpu_uuids
from baton.node.kv_stores import pull_namespace, shared_store, store_drops
from baton.node.meter import NodeMeter
from baton.node.pulls import Pulls
from baton.node.ranks.group import RankGroup
from baton.node.ranks.remote import RemoteTransfer
from baton.node.ranks.runner import RankedRunner
from baton.node.ranks.steps import StepWriter
from baton.node.starting import default_name
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import adapters_from_proto
from baton.security.tls import InternalTls
from baton.settings.model_source import hub_commit
from baton.settings.node_config import NodeSettings
from kvtransfer.leases import LeaseTotals
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.ranked import MakeTransfer, RankedTransfer
from kvtransfer.records import RefusedSegment
from kvtransfer.stores.entry import EntryLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listener:
    """A driver's callbacks, called on the event loop.

    Args:
        on_step: receives the steps of all requests; a driver ignores other drivers' requests.
        on_filled, on_refused: receive lease events; None if the driver grants no leases.
        on_room: called when copies of KV have given blocks back, which no step shows; None if the driver reserves none.
    """

    on_step: Callable[[StepEvents], None]
    on_filled: OnFilled | None = None
    on_refused: OnRefused | None = None
    on_room: Callable[[], None] | None = None


class Node:
    """One node's engine and transfer; an async context manager. Its drivers call `listen` before it is entered.

    Args:
        built: rank 0's loaded model with its cache, from `load`.
        group: the other ranks, which have loaded their parts or are about to; None if there are none.
        host_pages: rank 0's host memory for KV, if it is taken already.

    Attributes:
        experts: load of the model's experts.
        pulls: KV from and for other nodes; None: the node keeps none.
        gpus: memory, use and power of the node's GPUs on this host.
        shared_store: a digest of the store that it shares with others; empty: it shares none.
        numbers: unique numbers for calls and sessions in the engine; none is reused while the process runs.
        switches: number of role changes so far.
    """

    def __init__(
        self,
        settings: NodeSettings,
        built: BuiltRunner,
        *,
        role: node_status_pb2.Role.ValueType,
        address: str,
        group: RankGroup | None = None,
        host_pages: HostPages | None = None,
    ) -> None:
        self.built = built
        self.address = address
        self.numbers = itertools.count(1)
        self.switches = 0
        self.kv_scales = kv_scales(built.runner.model)
        self.vocabulary_digest = vocabulary_digest(tokenizer_json(settings.model))
        self._listeners: list[Listener] = []
        _warn_of_shortage(settings, built)
        self._take_role(settings, role)
        self._workers = group.workers if group is not None else ()
        self._ending_at_errors = group.ending_at_errors if group is not None else nullcontext
        runner = _runner_of_ranks(built, group)
        makers: list[MakeTransfer] = [
            partial(
                open_transfer,
                settings,
                built,
                self.incarnation,
                on_stores_changed=self._stores_changed,
                host_pages=host_pages,
            )
        ]
        makers += [partial(RemoteTransfer, worker.rank, worker.calls, self.incarnation) for worker in self._workers]
        transferred = transfer_settings(settings, built, self.incarnation)
        self.transfer = RankedTransfer(
            makers, message_bytes=transferred.message_bytes, has_stores=bool(transferred.stores)
        )
        self.transfer.leases.deliver_to(_no_lease_here, _no_lease_here)
        self.meter = StepMeter(built.costs)
        keeps = settings.host_cache_bytes > 0
        layout = EntryLayout(transferred.parts(built.cache.spec))
        self.shared_store = shared_store(settings, built, layout.namespace)
        self.pulls = self._open_pulls(settings, built, layout) if keeps else None
        self.engine = Engine(
            runner,
            self.limits,
            on_step=self._on_step,
            grammars=built.grammars,
            meter=self.meter,
            num_adapters=settings.adapter_slots,
            tier=self.transfer.entries if keeps else None,
            source=self.pulls,
            on_room=self._on_room,
            speculator=open_speculator(settings, built),
        )
        self.experts = ExpertLoads(
            built.parallel.placement,
            self.engine.expert_counts,
            model=built.identity.name,
            ranks=built.parallel.size,
        )
        self.gpus = GpuMeter(gpu_uuids(settings) if built.cache.view.is_cuda else ())

    def _take_role(self, settings: NodeSettings, role: node_status_pb2.Role.ValueType) -> None:
        """Takes a role's settings, limits and description, as a new incarnation.

        Raises:
            ConfigError: the settings contradict each other.
        """
        built = self.built
        self.max_context_tokens = min(
            settings.max_context_tokens or built.config.max_context_tokens,
            built.config.max_context_tokens,
            built.cache.shape.num_slots,
        )
        self.limits = engine_limits(settings, built, max_context_tokens=self.max_context_tokens)
        self.settings = settings
        self.role = role
        self.incarnation = secrets.randbits(63) + 1
        self.name = settings.name or default_name(role, self.address)
        self.meter_role = MeterRole.PREFILL if role == node_status_pb2.ROLE_PREFILL else MeterRole.DECODE
        self.counts = NodeMeter(self.meter_role)
        self.description = node_description(settings, built)
        self.info = to_info(
            self.description,
            name=self.name,
            address=self.address,
            role=role,
            incarnation=self.incarnation,
            model_name=built.identity.name,
            revision_name=settings.model_revision or hub_commit(settings.model),
            vocabulary_digest=self.vocabulary_digest,
            max_context_tokens=self.max_context_tokens,
            model_context_tokens=built.config.max_context_tokens,
            cache_identity=built.runner.facts.identity if settings.prefix_cache else "",
            also_decodes=role == node_status_pb2.ROLE_PREFILL and settings.decodes,
            topology=settings.topology_labels,
        )

    def _open_pulls(self, settings: NodeSettings, built: BuiltRunner, layout: EntryLayout) -> Pulls:
        own_requests = built.parallel.num_owners > 1
        return Pulls(
            self.transfer,
            lambda: self.info,
            namespace=pull_namespace(settings, built),
            entry_bytes=layout.entry_bytes * (1 if own_requests else built.parallel.size),
            spec=built.model_spec,
            ranks=NodeRanks(built.parallel.size, own_requests),
            costs=lambda: self.meter.costs,
            step_tokens=lambda: self.limits.max_batch_tokens,
            save_again=lambda wanted, owner: self.engine.save_again(wanted, owner),
            num_to_save=lambda wanted, owner: self.engine.num_to_save_again(wanted, owner),
            keepalive_s=settings.keepalive_s,
            tls=InternalTls.read(settings, None),
        )

    def check(self, settings: NodeSettings) -> None:
        """Checks that the node can take a role with these settings.

        Raises:
            ConfigError: the node cannot take a role with these settings.
        """
        engine_limits(settings, self.built, max_context_tokens=self.max_context_tokens)

    async def become(self, role: node_status_pb2.Role.ValueType, settings: NodeSettings) -> None:
        """Switches to another role, as a new incarnation, and keeps weights, cache and graphs.

        Before the call the old role's drivers and the pulls are closed, and no request, lease or pair is left. After
        it the new role's drivers call `listen`.

        Raises:
            ConfigError: the settings contradict each other; nothing has changed.
        """
        self._take_role(settings, role)
        self._listeners.clear()
        self.engine.set_limits(self.limits)
        self.transfer.leases.deliver_to(_no_lease_here, _no_lease_here)
        await self.transfer.reopen(incarnation=self.incarnation, receive_bytes_per_s=settings.receive_bytes_per_s)
        if self.pulls is not None:
            self.pulls.reopen()
        self.switches += 1

    def listen(self, listener: Listener) -> None:
        """Adds a driver, which receives steps and, if it grants leases, lease events.

        Call it before the node is entered, and again after `become`. No two drivers' requests have the same id.
        """
        self._listeners.append(listener)
        if listener.on_filled is not None and listener.on_refused is not None:
            self.transfer.leases.deliver_to(listener.on_filled, listener.on_refused)

    async def drop_kv(self, request: node_pb2.DropKvRequest) -> node_pb2.DropKvResponse:
        """Drops all KV of a cache salt from the cache and the stores.

        Raises:
            BatonError: the node ends.
        """
        blocks, dropped = await self.engine.drop_prefixes(request.cache_salt, adapters_from_proto(request.adapters))
        _log.info("dropped the KV of a cache salt: %d blocks, and of stores %s", blocks, dict(dropped.counts))
        for name, reason in dropped.left.items():
            _log.error("the store %s may still have KV that was to be dropped: %s", name, reason)
        return node_pb2.DropKvResponse(blocks=blocks, stores=store_drops(dropped))

    def _stores_changed(self, changes: StoreChanges) -> None:
        self.engine.stores_changed(changes)

    def _on_step(self, events: StepEvents) -> None:
        self.counts.step(events)
        for listener in self._listeners:
            listener.on_step(events)

    def _on_room(self) -> None:
        for listener in self._listeners:
            if listener.on_room is not None:
                listener.on_room()

    async def __aenter__(self) -> Self:
        with self._ending_at_errors():
            await self.transfer.start()
            try:
                with self._ending_at_errors():  # before the transfer closes, which may wait for ranks
                    await self.engine.__aenter__()
            except BaseException:
                await self.transfer.close()
                raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.pulls is not None:
            await self.pulls.close()
        await self.engine.__aexit__(exc_type, exc, traceback)
        await self.transfer.close()

    @property
    def summary(self) -> str:
        """One line for the log."""
        shape, spec = self.built.cache.shape, self.built.cache.spec
        owners = " on each rank for its own requests" if self.built.parallel.num_owners > 1 else ""
        ranks = f" with {len(self._workers)} more rank(s)" if self._workers else ""
        return (
            f"{self.name}, {self.built.identity.architecture} {self.built.dtype} on {self.built.cache.view.device}"
            f"{ranks}, "
            f"KV {spec.dtype} in layout {shape.layout.name} ({self.built.layout.source}), "
            f"{shape.num_blocks} blocks of {shape.block_size} tokens{owners}"
            + (f", {shape.state_slots} recurrent states" if shape.state_slots else "")
        )


def _warn_of_shortage(settings: NodeSettings, built: BuiltRunner) -> None:
    """Logs that the cache is too small for the longest request, if it is."""
    if short := shortage(
        settings,
        built.cache.spec,
        num_blocks=built.cache.shape.num_blocks,
        context_tokens=built.config.max_context_tokens,
        on_gpu=built.cache.view.device.type == "cuda",
    ):
        _log.warning(short)


def _runner_of_ranks(built: BuiltRunner, group: RankGroup | None) -> StepRunner:
    """Runs steps on all ranks of the node."""
    if group is None or not group.workers:
        return built.runner
    steps = StepWriter([worker.steps for worker in group.workers])
    return RankedRunner(built.runner, steps, wait_prepared=group.wait_prepared, on_failure=group.fail_unless_explained)


def _no_lease_here(event: LeaseTotals | RefusedSegment) -> None:
    raise AssertionError(f"this node gives no leases: {event}")

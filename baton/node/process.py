"""The life of a node process: build, serve, become ready, drain on SIGTERM, end.

What the process serves follows its role (`baton.node.role`), which may change (`baton.node.role_switch`).
"""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import uvloop

from baton.core.exits import ending_soon_if_it_fails, exit_at_once
from baton.core.file_limit import raise_file_limit
from baton.core.garbage import keep_collections_rare
from baton.core.interpreter_lock import pass_lock_sooner
from baton.core.logs import set_up_logging, show_name
from baton.core.ready_file import check_ready_file, write_ready_file
from baton.core.supervisor import Supervisor
from baton.engine.build import BuiltRunner
from baton.engine.expert_plan import plan_experts
from baton.metrics.port import MetricsPort
from baton.models.families.reader import read_config
from baton.models.layers.parallel import SINGLE
from baton.models.loading.gguf.view import model_directory
from baton.models.loading.local_config import local_config
from baton.node.adapters import Adapters, need_room_for_experts
from baton.node.assembly import Node
from baton.node.early_host_memory import EarlyHostMemory
from baton.node.fault import Fault
from baton.node.from_settings import load
from baton.node.kv_stores import check_stores
from baton.node.own_status import STUCK_AFTER_S
from baton.node.ranks.group import RankGroup, start_ranks
from baton.node.ranks.host import run_host
from baton.node.ranks.hosts import Hosts
from baton.node.ranks.join import as_rank, join, rank_device
from baton.node.role import RoleKind, ServedRole
from baton.node.role_services import DECODE, PREFILL
from baton.node.role_switch import RoleSwitch
from baton.node.service import SERVICE_NAME, NodeParts, NodeService
from baton.node.starting import Starting
from baton.node.waiting import until
from baton.protos.v1 import node_status_pb2
from baton.rpc.secure_server import protect_node
from baton.rpc.server import (
    GrpcServer,
    ListenAddress,
    check_advertised,
    listens_everywhere,
    stop_on_signals,
)
from baton.rpc.sockets import bind
from baton.security import roles as certified
from baton.security.peers import PeerTls
from baton.settings.node_config import NodeSettings
from kvtransfer.movers.host_pages import HostPages

log = logging.getLogger("baton")

_CERTIFIED = {node_status_pb2.ROLE_PREFILL: certified.Role.PREFILL, node_status_pb2.ROLE_DECODE: certified.Role.DECODE}
# Time for closing after serving, which may wait for a stopped rank.
_CLOSE_S = 30.0
# Time to fail all requests after a rank has ended.
_FAIL_REQUESTS_S = 1.0


def run_node(
    program: str,
    settings: NodeSettings,
    supervisor: Supervisor,
    role: node_status_pb2.Role.ValueType,
    kinds: Mapping[node_status_pb2.Role.ValueType, RoleKind],
) -> None:
    """Runs the whole process: model, server, role. It begins in `role`, and may switch to the other roles.

    Never returns. The exit code is 2 if a setting cannot work, 1 after another fault, else 0.
    """
    set_up_logging(settings.log_level, role=program, name=settings.name or "", form=settings.log_format)
    # NOTE: the first process of a container ignores signals without a handler, and loading takes long.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    fault = Fault("", 0)
    try:
        _run_process(program, settings, supervisor, role, kinds)
    except BaseException as error:  # noqa: BLE001  it is logged, and the process ends
        fault = Fault.of(error)
    fault.log(program, supervisor)
    exit_at_once(fault.exit_code)


def _run_process(
    program: str,
    settings: NodeSettings,
    supervisor: Supervisor,
    role: node_status_pb2.Role.ValueType,
    kinds: Mapping[node_status_pb2.Role.ValueType, RoleKind],
) -> None:
    raise_file_limit()
    pass_lock_sooner()
    check_ready_file(settings.ready_file)
    ListenAddress.parse(settings.listen, field="listen")
    check_advertised(settings.advertise)
    check_stores(settings)
    hosts = Hosts.of(settings)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ExitStack() as loading,
        ending_soon_if_it_fails(),
    ):
        # Bound first, so that a taken port is an error before the model is loaded.
        server = runner.run(_bind(settings, role))
        metrics = bind(settings.metrics_listen, field="metrics_listen") if hosts.rank == 0 else None
        starting = Starting(settings, role, server, supervisor)
        if hosts.rank == 0:
            loading.enter_context(starting.serving(runner))
        supervisor.report("looking for the model", address=server.address)
        directory = model_directory(settings.model, weights=settings.load_format != "dummy")
        experts = settings.adapter_experts or need_room_for_experts(settings)
        settings = settings.model_copy(update={"model": directory, "adapter_experts": experts})
        if settings.tensor_parallel_size > 1:  # an impossible split is an error before ranks take seconds and memory
            config = read_config(directory)
            local_config(config, plan_experts(as_rank(0, settings), config, settings))
        if hosts.count > 1:
            tls = PeerTls.read(settings, _CERTIFIED[role])
            if hosts.rank > 0:
                services = (SERVICE_NAME, PREFILL, DECODE)
                exit_at_once(runner.run(run_host(settings, directory, hosts, tls, server, services, supervisor)))
        with start_ranks(settings, program, _CERTIFIED[role], supervisor) as group:
            with ending_at_signals():
                parallel = SINGLE if group.size == 1 else join(0, settings, meeting=group.meeting_place())
                host_memory = EarlyHostMemory(settings, rank_device(settings, 0))
                built = load(settings, parallel, supervisor=supervisor, host_memory=host_memory)
            group.loaded()
            loading.close()  # from here on the loop runs on this thread
            runner.run(
                _run(settings, built, host_memory.pages, group, server, metrics, supervisor, role, kinds, starting)
            )


async def _bind(settings: NodeSettings, role: node_status_pb2.Role.ValueType) -> GrpcServer:
    protection = protect_node(settings, _CERTIFIED[role], ListenAddress.parse(settings.listen, field="listen"))
    return GrpcServer(
        settings.listen,
        advertise=settings.advertise,
        keepalive_s=settings.keepalive_s,
        protection=protection,
        health_listen=settings.health_listen,
    )


async def _run(
    settings: NodeSettings,
    built: BuiltRunner,
    host_pages: HostPages | None,
    group: RankGroup,
    server: GrpcServer,
    metrics: socket.socket | None,
    supervisor: Supervisor,
    role: node_status_pb2.Role.ValueType,
    kinds: Mapping[node_status_pb2.Role.ValueType, RoleKind],
    starting: Starting,
) -> None:
    # Until `serve` takes over, SIGTERM ends the process at once: the exception that it raises while the model loads
    # would tear the event loop down halfway.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end_at_once)
    async with server:
        node = Node(settings, built, role=role, address=server.address, group=group, host_pages=host_pages)
        show_name(node.name)
        stop = asyncio.Event()
        switch = RoleSwitch(
            node,
            kinds[role].make(node, settings),
            kinds,
            services=starting.roles,
            stop=stop,
            on_failure=group.fail,
            on_switched=lambda: show_name(node.name),
        )
        supervisor.report("starting engine")
        async with node:
            keep_collections_rare()
            serving = asyncio.create_task(
                serve(settings, node, server, metrics, switch, stop, supervisor, starting.service), name="serve"
            )
            with group.ending_at_errors():
                failure = await _first_of(serving, group, node)
                if failure is not None:
                    await _fail_requests(switch.role, server)
                    group.abandon(failure)
            closing = threading.Timer(_CLOSE_S, exit_at_once, [1])
            closing.daemon = True
            closing.start()


async def _first_of(serving: "asyncio.Task[None]", group: RankGroup, node: Node) -> str | None:
    """Returns why the ranks or the KV transfer cannot go on, once they cannot, or None once serving has ended."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[str] = loop.create_future()

    def fail(reason: str) -> None:
        if not failed.done():
            failed.set_result(reason)

    def on_failure(reason: str) -> None:
        loop.call_soon_threadsafe(fail, reason)

    group.on_failure(on_failure)
    node.transfer.on_failed(lambda error: fail(error.message))
    waits: list[asyncio.Future[Any]] = [serving, failed]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        return failed.result()
    await serving
    return None


async def _fail_requests(role: ServedRole, server: GrpcServer) -> None:
    """Fails all requests, so that gateways continue them elsewhere. Does not wait for the ranks."""
    role.stop_admission()
    await server.set_ready(ready=False)
    # Not cancelled at the timeout, and its errors do not matter: the process ends right after.
    await asyncio.wait([asyncio.create_task(role.close())], timeout=_FAIL_REQUESTS_S)
    await server.grpc.stop(grace=_FAIL_REQUESTS_S)


async def serve(
    settings: NodeSettings,
    node: Node,
    server: GrpcServer,
    metrics: socket.socket | None,
    switch: RoleSwitch,
    stop: asyncio.Event,
    supervisor: Supervisor,
    service: NodeService,
) -> None:
    """Serves until SIGTERM, SIGINT or a Drain call, drains within the grace, and returns.

    Args:
        stop: set by each of the three.
    """
    stop_on_signals(stop)
    grace_s = settings.drain_grace_s

    def drain(asked_s: float | None) -> None:
        nonlocal grace_s
        grace_s = settings.drain_grace_s if asked_s is None else asked_s
        stop.set()

    built = node.built
    adapters = Adapters(settings, node.engine, built.runner.adapters, model_name=built.identity.name)
    await adapters.start()
    parts = NodeParts(
        status=switch.status,
        drain=drain,
        switch=switch.switch,
        cache=switch.cache,
        load_adapter=adapters.load,
        unload_adapter=adapters.unload,
        expert_load=node.experts.message,
        owner=None if node.pulls is None else node.pulls.owner,
        drop_kv=node.drop_kv,
    )
    async with MetricsPort(metrics, switch.metrics_page) as port:
        service.serve(parts)
        await server.set_ready(ready=True)
        if not settings.advertise and listens_everywhere(settings.listen):
            log.warning(
                "only this machine reaches %s; set an address for other machines with --advertise", server.address
            )
        write_ready_file(settings.ready_file, address=server.address, metrics=port.url)
        log.info("ready on %s: %s", server.address, node.summary)
        if port.url is not None:
            log.info("metrics on %s", port.url)
        supervisor.report("ready", address=server.address, metrics=port.url)
        watch = asyncio.create_task(_watch_transfer(node, server), name="watch-transfer")
        watch_adapters = asyncio.create_task(adapters.watch(), name="watch-adapters")
        watch_experts = asyncio.create_task(node.experts.watch(), name="watch-experts")
        watch_gpus = asyncio.create_task(node.gpus.watch(), name="watch-gpus")
        try:
            await stop.wait()
            watch.cancel()
            await switch.settle()
            log.info("draining, for at most %.0f s", grace_s)
            switch.role.stop_admission()
            await server.set_ready(ready=False)
            await until(lambda: not switch.role.busy, timeout_s=grace_s)
        finally:
            watch_adapters.cancel()
            watch_experts.cancel()
            watch_gpus.cancel()
            await switch.role.close()
            service.close()
    log.info("drained")


async def _watch_transfer(node: Node, server: GrpcServer) -> None:
    """Makes a node not ready while its KV transfer is stuck, and logs where it is stuck."""
    ready = True
    while True:
        await asyncio.sleep(STUCK_AFTER_S / 4)
        stack = node.transfer.stuck(after_s=STUCK_AFTER_S)
        if stack and ready:
            log.error("the KV transfer makes no progress:", extra={"lines": stack})
        if ready != (not stack):
            ready = not stack
            await server.set_ready(ready=ready)


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGINT end this process at once, with exit code 0, inside the context. Main thread only.

    Nothing is served yet, and other ranks end with this process. Both signals must have Python handlers, which may not
    run. It also works while the main thread is in a call that runs no Python, such as torch.distributed's, in which
    ranks wait up to 20 minutes for each other.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    thread = threading.Thread(target=_end_at_signals, args=(ours,), name="signals", daemon=True)
    thread.start()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # else SIGINT is ignored, or has another handler
        signal.signal(signal.SIGINT, lambda *_: None)
    # NOTE: the C part of Python's handlers writes the signal's number to this socket, whatever the main thread does.
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, interrupt)
        theirs.close()
        thread.join()
        ours.close()


def end_at_once() -> None:
    exit_at_once(0)


def _end_at_signals(signals: socket.socket) -> None:
    while numbers := signals.recv(1):
        if numbers[0] == signal.SIGINT:
            logging.getLogger("baton").info("interrupted")
        if numbers[0] in (signal.SIGTERM, signal.SIGINT):
            exit_at_once(0)

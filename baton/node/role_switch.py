"""The present role of a node process, and the switch to another role while the process runs.

The engine stays, with its weights, cache and graphs. The role's part, which is everything that other processes know
about the node, ends after a drain and is rebuilt under a new incarnation. So no lease, pair, ticket or cached knowledge
of the old role is valid in the new one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping

from baton.core.errors import BatonError, ConfigError, Draining, InternalError, InvalidRequest, Overloaded
from baton.metrics.metric import SwitchOutcome
from baton.node.assembly import Node
from baton.node.cache_events import CacheEvents
from baton.node.metrics import NodeMetrics
from baton.node.own_status import own_status
from baton.node.role import RoleKind, ServedRole
from baton.node.role_services import RoleServices
from baton.node.waiting import until
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name
from baton.rpc.secure_server import check_certificate
from baton.security import roles as certified
from baton.settings.node_config import NodeSettings
from baton.settings.reader import in_role

log = logging.getLogger("baton")

GRACE_S = 2.0
_GRACE_S_MAX = 1e9
# Time for streams and links to end after the role has; they need milliseconds.
_END_S = 60.0
# The same once the process is to end. A pod has 15 s beyond the time for its drain.
_STOPPING_END_S = 10.0
_PROGRESS_EVERY_S = 0.1

_CERTIFIED = {node_status_pb2.ROLE_PREFILL: certified.Role.PREFILL, node_status_pb2.ROLE_DECODE: certified.Role.DECODE}
_DRAINING, _CHANGING, _DONE = (
    node_status_pb2.SWITCH_PHASE_DRAINING,
    node_status_pb2.SWITCH_PHASE_CHANGING,
    node_status_pb2.SWITCH_PHASE_DONE,
)


class RoleSwitch:
    """Holds a node's role, and switches it. Used on the event loop.

    Args:
        kinds: the roles that the node can have.
        services: of the node's server.
        stop: set when the process is to end. No switch begins then, and a switch that still drains is given up.
        on_failure: called with the reason when a switch has failed halfway; the process must then end.

    Attributes:
        role: the present role; during a switch, the old one.
    """

    def __init__(
        self,
        node: Node,
        role: ServedRole,
        kinds: Mapping[node_status_pb2.Role.ValueType, RoleKind],
        *,
        services: RoleServices,
        stop: asyncio.Event,
        on_failure: Callable[[str], None],
        on_switched: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.services = services
        self.cache = CacheEvents(node.engine.prefix_cache, incarnation=node.incarnation)
        self._node = node
        self._kinds = kinds
        self._stop = stop
        self._on_failure = on_failure
        self._on_switched = on_switched
        self._clock = clock
        self._changed_s = clock()
        self._began_s = 0.0
        self._phase: node_status_pb2.SwitchPhase.ValueType = node_status_pb2.SWITCH_PHASE_UNSPECIFIED
        self._next: node_status_pb2.Role.ValueType | None = None
        self._switching: asyncio.Task[None] | None = None
        self._settings: dict[node_status_pb2.Role.ValueType, NodeSettings] = {node.role: node.settings}
        self._outcomes = dict.fromkeys(SwitchOutcome, 0)
        self._serve()

    def status(self) -> node_status_pb2.NodeStatus:
        counters = self._node.transfer.counters()
        message = own_status(self._node, counters, draining=self._stop.is_set() or self._next is not None)
        self.role.fill_status(message, counters.peers)
        if self._next is not None:
            message.next_role = self._next
        return message

    async def metrics_page(self, names: frozenset[str] = frozenset()) -> bytes:
        return await self._metrics.page(names)

    async def settle(self) -> None:
        """Returns when no switch is under way, which is soon after `stop`."""
        if self._switching is not None:
            await asyncio.wait([self._switching])

    async def switch(self, request: pb.SwitchRoleRequest) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        """Begins a switch, or follows a running switch to the same role; yields its progress until it is done. The
        switch continues if the caller disconnects.

        Raises:
            InvalidRequest: the role does not exist, or this node's settings or certificate do not allow it.
            Overloaded: the node is switching to another role, or has had its role for less than `dwell_s`.
            Draining: the process is ending.
        """
        try:
            switching = self._begin(request)
        except BatonError as error:
            self._outcomes[SwitchOutcome.REFUSED] += 1
            log.warning("the switch to role %s is refused: %s", role_name(request.role), error)
            raise
        if switching is None:
            yield node_status_pb2.RoleSwitchProgress(phase=_DONE, info=self._node.info)
            return
        began_s = self._began_s
        while not switching.done():
            left = self._node.engine.load()
            yield node_status_pb2.RoleSwitchProgress(
                phase=self._phase,
                requests_left=left.requests_running + left.requests_waiting,
                elapsed_s=self._clock() - began_s,
            )
            await asyncio.wait([switching], timeout=_PROGRESS_EVERY_S)
        switching.result()  # or its error
        yield node_status_pb2.RoleSwitchProgress(phase=_DONE, elapsed_s=self._changed_s - began_s, info=self._node.info)

    # ---- whether it may

    def _begin(self, request: pb.SwitchRoleRequest) -> "asyncio.Task[None] | None":
        """The switch, which begins now or is under way. Returns None if the node has the role already."""
        grace_s = self._check(request)
        wanted = request.role
        if self._next is None:
            if wanted == self._node.role:
                return None
            self._refuse_early(request.dwell_s)
            settings = self._settings_for(wanted)
            self._began_s, self._phase, self._next = self._clock(), _DRAINING, wanted
            self._switching = asyncio.create_task(self._run(wanted, settings, grace_s), name="switch-role")
            # The switch logs its own error. Reading it here keeps asyncio from logging it again if no caller is left.
            self._switching.add_done_callback(lambda task: task.exception())
        elif wanted != self._next:
            raise Overloaded(
                f"{self._node.name} is switching to role {role_name(self._next)}", field="role",
                value=role_name(wanted), cure="wait until that switch is done", retry_after_s=GRACE_S,
            )  # fmt: skip
        return self._switching

    def _check(self, request: pb.SwitchRoleRequest) -> float:
        """Checks a request; returns its grace."""
        if request.role not in self._kinds:
            raise InvalidRequest(
                f"a node cannot have role {role_name(request.role)}", field="role", value=role_name(request.role),
                allowed=tuple(role_name(role) for role in self._kinds),
            )  # fmt: skip
        grace_s = request.grace_s if request.HasField("grace_s") else GRACE_S
        for field, value in (("grace_s", grace_s), ("dwell_s", request.dwell_s)):
            if not 0 <= value <= _GRACE_S_MAX:
                allowed = (f"seconds from 0 to {_GRACE_S_MAX:.0f}",)
                raise InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=allowed)
        if self._stop.is_set():
            raise Draining(f"{self._node.name} is draining and will exit", cure="use another node")
        return grace_s

    def _refuse_early(self, dwell_s: float) -> None:
        age_s = self._clock() - self._changed_s
        if age_s < dwell_s:
            raise Overloaded(
                f"{self._node.name} has had its role for only {age_s:.0f} s", field="dwell_s", value=dwell_s,
                retry_after_s=dwell_s - age_s,
            )  # fmt: skip

    def _settings_for(self, role: node_status_pb2.Role.ValueType) -> NodeSettings:
        """The settings of this process in a role.

        Raises:
            InvalidRequest: the settings or the certificate do not allow the role.
        """
        node = self._node
        try:
            check_certificate(node.settings, _CERTIFIED[role])
        except ConfigError as error:
            raise InvalidRequest(
                f"{node.name} cannot take role {role_name(role)}: {error.message}", field="role", value=role_name(role),
                cure="start the node with a certificate of role node, which is for both",
            ) from None  # fmt: skip
        try:
            settings = self._settings.setdefault(role, in_role(node.settings, self._kinds[role].settings))
            node.check(settings)
        except ConfigError as error:
            message = f"{node.name} cannot take role {role_name(role)}: {error.message}"
            raise InvalidRequest(message, field="role", value=role_name(role), cure=error.cure) from None
        return settings

    # ---- the switch

    async def _run(self, role: node_status_pb2.Role.ValueType, settings: NodeSettings, grace_s: float) -> None:
        try:
            await self._drain(role, grace_s)
            await self._change(role, settings)
        except Draining:
            self._outcomes[SwitchOutcome.GIVEN_UP] += 1
            log.info("the switch to role %s is given up: the process ends", role_name(role))
            raise
        except Exception as error:
            log.exception("the switch to role %s failed", role_name(role))
            self._on_failure(f"the switch to role {role_name(role)} failed: {error}")
            if isinstance(error, BatonError):
                raise
            raise InternalError(f"the switch failed: {type(error).__name__}", cure="see the node's log") from error
        finally:
            self._next = None

    async def _drain(self, role: node_status_pb2.Role.ValueType, grace_s: float) -> None:
        """Ends the present role's requests, within the grace.

        Raises:
            Draining: the process is to end, so the role stays.
        """
        log.info("switching to role %s, after at most %.3g s", role_name(role), grace_s)
        self.role.stop_admission()
        await until(lambda: not self.role.busy or self._stop.is_set(), timeout_s=grace_s)
        if self._stop.is_set():
            raise Draining(f"{self._node.name} is draining and will exit", cure="use another node")

    async def _change(self, role: node_status_pb2.Role.ValueType, settings: NodeSettings) -> None:
        node, transfer = self._node, self._node.transfer
        self._phase = _CHANGING
        self.services.refuse()  # first, because a call that came while the role closes would leave something open
        await self.role.close()
        await self.services.end()
        if node.pulls is not None:
            await node.pulls.close()
        if not await links_end(lambda: transfer.linked, self._stop):
            raise InternalError("links of the old role did not end", cure="see the node's log")
        await node.become(role, settings)
        self.role = self._kinds[role].make(node, settings)
        self.cache.renew(node.incarnation)
        self._serve()
        self._changed_s = self._clock()
        self._outcomes[SwitchOutcome.DONE] += 1
        self._on_switched()
        took_s = self._changed_s - self._began_s
        log.info("switched to role %s in %.2f s: %s", role_name(role), took_s, node.summary)

    def _serve(self) -> None:
        node, role = self._node, self.role
        self._metrics = NodeMetrics(
            node, status=self.status, leases=role.leases, knows=role.knows, switches=self._outcomes
        )
        self.services.serve(node.name, role.servicers)


async def links_end(linked: Callable[[], bool], stop: asyncio.Event) -> bool:
    """Waits until the node has no links, except those of a stalled peer. Returns whether it has none.

    Args:
        stop: set when the process is to end.
    """
    await until(lambda: stop.is_set() or not linked(), timeout_s=_END_S)
    return await until(lambda: not linked(), timeout_s=_STOPPING_END_S if stop.is_set() else 0.0)

"""The node's status for everyone who watches it. It is read once for each interval, however many gateways watch, and
watchers wake only when it has changed or must be repeated.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from baton.protos.v1 import node_status_pb2 as pb

# Large parts of a status, which change seldom: a watcher may do without those that it has already.
_PARTS = ("info", "peers", "step_costs", "step_profile", "adapters", "gpus", "expert_balance", "stores")
# Traffic of pairs changes with every request, and each time a status would have all pairs again.
_TRAFFIC_EACH_S = 1.0


class StatusLog:
    """The versions of one node's status, and what is new in each. Pure.

    Attributes:
        status: the latest one.
        version: its number, from 1.
        choice_version: of the last change of anything but figures for display.
    """

    def __init__(self) -> None:
        self.status = pb.NodeStatus()
        self.version = self.choice_version = 0
        self._for_choice = pb.NodeStatus()
        self._part_versions = dict.fromkeys(_PARTS, 0)
        self._traffic_at_s = -math.inf
        self._traffic_due = False  # whether the peers' traffic has changed without a new version of the peers
        self._trimmed: dict[int, pb.NodeStatus] = {}  # of this version, by the version that the watcher has

    def take(self, status: pb.NodeStatus, now_s: float) -> bool:
        """Records the present status; returns whether this is another version. The message must not change later."""
        traffic_may_go = now_s >= self._traffic_at_s + _TRAFFIC_EACH_S
        if status == self.status and not (self._traffic_due and traffic_may_go):
            return False
        for_choice = _without_display(status)
        self.version += 1
        for name in _PARTS:
            if getattr(status, name) == getattr(self.status, name):
                continue
            if name == "peers" and for_choice.peers == self._for_choice.peers:
                self._traffic_due = True
            else:
                self._part_versions[name] = self.version
        if self._traffic_due and traffic_may_go:
            self._part_versions["peers"], self._traffic_at_s, self._traffic_due = self.version, now_s, False
        if for_choice != self._for_choice:
            self.choice_version = self.version
        self.status, self._for_choice = status, for_choice
        self._trimmed.clear()
        return True

    def since(self, version: int) -> pb.NodeStatus:
        """The status for a watcher that has this version, without the parts that it has; 0: it has none."""
        if version == 0:
            return self.status
        if (message := self._trimmed.get(version)) is None:  # most watchers have the same version
            message = self._trimmed[version] = pb.NodeStatus()
            message.CopyFrom(self.status)
            for field, _ in message.ListFields():
                if self._part_versions.get(field.name, math.inf) <= version:
                    message.ClearField(field.name)  # type: ignore[arg-type]  # the stubs know literals only
                    message.unchanged_fields.append(field.number)
        return message


class StatusFeed:
    """The statuses of one node.

    Args:
        read: returns the present status, as a new message.
        clock: monotonic seconds.
    """

    def __init__(self, read: Callable[[], pb.NodeStatus], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._log = StatusLog()
        self._closed = asyncio.Event()
        self._woken = asyncio.Event()
        self._intervals: list[float] = []
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def close(self) -> None:
        """Ends every stream."""
        self._closed.set()
        self._wake()

    async def watch(
        self, *, interval_s: float, repeat_s: float, while_loading: bool, without_unchanged: bool
    ) -> AsyncIterator[pb.NodeStatus]:
        """The status now, and then whenever it has changed, at most once for each interval; unchanged after `repeat_s`.

        Args:
            while_loading: whether statuses of a node that loads are wanted, too.
            without_unchanged: parts that the watcher has are left out, and changes of figures for display alone wait
                for the next repetition.
        """
        log = self._log
        self._join(interval_s)
        try:
            self._look()
            sent, sent_at_s = 0, -math.inf
            while not self._closed.is_set():
                if self._failure is not None:
                    raise self._failure
                woken, repeat_at_s = self._woken, sent_at_s + repeat_s
                changed = (log.choice_version if without_unchanged else log.version) > sent
                wanted = while_loading or not log.status.HasField("loading")
                if wanted and (changed or self._clock() >= repeat_at_s):
                    message = log.since(sent) if without_unchanged else log.status
                    sent, sent_at_s = log.version, self._clock()
                    yield message
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), interval_s)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), repeat_at_s - self._clock() if wanted else None)
        finally:
            self._leave(interval_s)

    def _join(self, interval_s: float) -> None:
        fastest_s = min(self._intervals, default=math.inf)
        self._intervals.append(interval_s)
        if interval_s < fastest_s or self._failure is not None:
            self._failure = None
            self._read_each(min(interval_s, fastest_s))

    def _leave(self, interval_s: float) -> None:
        self._intervals.remove(interval_s)
        fastest_s = min(self._intervals, default=math.inf)
        if interval_s < fastest_s:
            self._read_each(fastest_s)

    def _read_each(self, interval_s: float) -> None:
        """Reads at this interval from now on; never, if it is infinite."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None
        if interval_s < math.inf:
            self._reading = asyncio.create_task(self._keep_reading(interval_s), name="status")

    async def _keep_reading(self, interval_s: float) -> None:
        while not self._closed.is_set():
            await asyncio.sleep(interval_s)
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  every watcher gets it
                self._failure = error
                self._wake()
                return

    def _look(self) -> None:
        if self._log.take(self._read(), self._clock()):
            self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()


def _without_display(status: pb.NodeStatus) -> pb.NodeStatus:
    """A copy without figures that change no gateway's choice: they change all the time, on idle nodes too."""
    copy = pb.NodeStatus()
    copy.CopyFrom(status)
    copy.ClearField("gpus")
    copy.ClearField("expert_balance")
    copy.ClearField("stores")
    for peer in copy.peers:
        peer.ClearField("bytes_total")
        peer.ClearField("segments_total")
    return copy

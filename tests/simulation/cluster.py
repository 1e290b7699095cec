"""One run: builds the cluster that a seed draws, injects its faults, and checks that nothing is left."""

from dataclasses import dataclass
from functools import partial
from random import Random

from baton.core.errors import Cancelled, DeadlineExceeded, Overloaded
from tests.simulation import scenario as scenarios
from tests.simulation.client import ClientCall
from tests.simulation.decode import DecodeProcess
from tests.simulation.faults import DECODES, GATEWAY, PREFILLS, USUAL, Fault, Storm
from tests.simulation.gateway import GatewayProcess
from tests.simulation.hostile import HostileClient, lie_about_leases
from tests.simulation.invariants import violated
from tests.simulation.network import Life
from tests.simulation.prefill import PrefillProcess
from tests.simulation.scenario import Client
from tests.simulation.world import World

EVENTS_MAX = 60_000
_ALL_STEPS = 1 << 30
# After the last fault and the last request, nodes notice silence and reconnect within some seconds. A lease that is
# never closed stays open for longer than that.
QUIET_WITHIN_S = 6.0


@dataclass(frozen=True)
class Outcome:
    """The result of one run: its requests' ends, the number and kinds of its events, and its trace.

    Attributes:
        hit_both: kinds of faults that hit a prefill node while it computed prompts for others and decoded itself.
    """

    ends: tuple[str, ...]
    hit_both: frozenset[str]
    events: int
    seconds: float
    kinds: frozenset[type]
    trace: tuple[str, ...]


class SeedFailed(AssertionError):
    """An invariant does not hold, or a machine raised, under this seed."""

    def __init__(self, seed: int, cause: Exception, trace: tuple[str, ...]) -> None:
        self.seed = seed
        self.cause = cause
        self.trace = trace
        last = "\n".join(trace[-40:])
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}\n{last}\nreplay: make simulate SEED={seed}")


class Cluster:
    """The processes of one run."""

    def __init__(self, seed: int, storm: Storm, *, traced: bool) -> None:
        random = Random(seed)
        self.world = World(scenarios.draw(random, storm), random, traced=traced)
        self.events = 0
        self._incarnations = 0
        self._nodes: dict[str, PrefillProcess | DecodeProcess] = {}
        self._calls: dict[ClientCall, float] = {}  # and when each began
        self._hit_both: set[str] = set()
        self._faults_over_s = 0.0
        self._busy_until_s = 0.0
        for address in PREFILLS + DECODES:
            self._start(address)
        self._gateway = self._start_gateway()

    def run(self) -> Outcome:
        """Waits until all nodes are known and paired, then starts requests and faults.

        Raises:
            Violation: an invariant does not hold.
        """
        world = self.world
        while self.events % 16 or self._stale():
            world.clock.step()
            self.events += 1
        for client in world.scenario.clients:
            world.clock.after(client.at_s, partial(self._call, client))
        for fault in world.scenario.faults:
            world.clock.after(fault.at_s, partial(self._inflict, fault))
        # Checking for the end costs more than an event.
        while self.events % 16 or not self._done():
            world.clock.step()
            self.events += 1
            world.check_touched()
            if self.events > EVENTS_MAX:
                violated("I5", f"no end after {EVENTS_MAX} events: {self._held()}")
            if self.events % 16 == 0 and world.clock.now_s > self._busy_until_s + QUIET_WITHIN_S:
                what = f"after {QUIET_WITHIN_S:g} s without requests and faults:"
                if held := self._held():
                    violated("I5", f"{what} {held}")
                violated("I6", f"{what} {self._stale()}")
        for node in self._nodes.values():
            node.check_idle()
        for call in self._calls:
            call.check_error(steps_fail=any(fault.kind in ("fail_step", "sick") for fault in world.scenario.faults))
        if world.scenario.calm:
            self._check_served()
        ends = tuple(call.outcome for call in self._calls)
        kinds, lines = frozenset(world.trace.kinds), tuple(world.trace.lines)
        return Outcome(ends, frozenset(self._hit_both), self.events, world.clock.now_s, kinds, lines)

    def _check_served(self) -> None:
        """I5 without faults: only the client, its deadline and a lack of room may end a request early."""
        for call in self._calls:
            stays = call.client.cancel_s is None and call.client.patient
            if stays and not call.finished and not isinstance(call.error, Overloaded):
                violated("I5", f"{call.name} ended with {call.error!r}, and nothing had failed")

    # ---- processes

    def _start(self, address: str) -> None:
        life = self._life(address)
        node = PrefillProcess(self.world, life) if address in PREFILLS else DecodeProcess(self.world, life)
        self._nodes[address] = self.world.network.servers[address] = node

    def _start_gateway(self) -> GatewayProcess:
        self._gateway = GatewayProcess(self.world, self._life(GATEWAY))
        for call, at_s in self._calls.items():
            if call.waits:
                self._resume(call, self.world.clock.now_s - at_s)
        return self._gateway

    def _life(self, address: str) -> Life:
        self._incarnations += 1
        return Life(self.world.clock, address, 1000 + self._incarnations)

    def _call(self, client: Client) -> None:
        call = ClientCall(len(self._calls) + 1, client, contexts=self.world.scenario.contexts)
        self._calls[call] = self.world.clock.now_s
        if not self._gateway.life.alive:
            call.lose_gateway()
            return
        gateway = self._gateway
        gateway.life.run(partial(gateway.start, call, timeout_s=client.timeout_s))
        if client.cancel_s is not None:
            gateway.life.after(client.cancel_s, partial(gateway.cancel, call))

    def _resume(self, call: ClientCall, passed_s: float) -> None:
        """The client asks the new gateway for the rest, unless it has given up meanwhile."""
        client, gateway = call.client, self._gateway
        if client.cancel_s is not None and client.cancel_s <= passed_s:
            call.end(Cancelled("the client cancelled"))
        elif client.timeout_s <= passed_s:
            call.end(DeadlineExceeded("its time was up before there was a gateway"))
        else:
            gateway.start(call, timeout_s=client.timeout_s - passed_s, output=call.resume())
            if client.cancel_s is not None:
                gateway.life.after(client.cancel_s - passed_s, partial(gateway.cancel, call))

    # ---- faults: one method for each row of `faults.KINDS`

    def _inflict(self, fault: Fault) -> None:
        self._faults_over_s = max(self._faults_over_s, self.world.clock.now_s + fault.seconds)
        self.world.trace.note("", f"**** {fault.kind} {' '.join(fault.target)} for {fault.seconds:.3f} s")
        for node in map(self._nodes.get, fault.target):
            if isinstance(node, PrefillProcess) and node.decodes and node.machine.busy:
                self._hit_both.add(fault.kind)
        getattr(self, fault.kind)(*fault.target, fault.seconds)

    def kill(self, address: str, seconds: float) -> None:
        node = self._nodes[address]
        if node.life.alive:
            self._end(node.life)
            self.world.clock.after(seconds, partial(self._start, address))

    def kill_gateway(self, _: str, seconds: float) -> None:
        if self._gateway.life.alive:
            for call in self._calls:
                call.lose_gateway()
            self._end(self._gateway.life)
            self.world.clock.after(seconds, self._start_gateway)

    def freeze(self, address: str, seconds: float) -> None:
        life = self._gateway.life if address == GATEWAY else self._nodes[address].life
        life.freeze()
        self.world.clock.after(seconds, life.thaw)

    def cut(self, one: str, other: str, _: float) -> None:
        self.world.network.cut(one, other)

    def stall(self, one: str, other: str, seconds: float) -> None:
        self.world.network.stall(one, other, seconds)

    def slow(self, address: str, seconds: float) -> None:
        device = self._nodes[address].device
        device.slow = 30.0
        self.world.clock.after(seconds, partial(setattr, device, "slow", 1.0))

    def fail_step(self, address: str, _: float) -> None:
        self._nodes[address].device.steps_to_fail += 1

    def sick(self, address: str, seconds: float) -> None:
        device = self._nodes[address].device
        device.steps_to_fail += _ALL_STEPS
        self.world.clock.after(seconds, partial(setattr, device, "steps_to_fail", 0))

    def hostile_client(self, address: str, seconds: float) -> None:
        HostileClient(self.world, address).stay(seconds)

    def liar(self, prefill: str, decode: str, seconds: float) -> None:
        lie_about_leases(self.world, partial(self._nodes.__getitem__, prefill), self._nodes[decode], seconds)

    def drain(self, address: str, grace_s: float) -> None:
        node = self._nodes[address]
        node.life.run(node.drain)
        self._drained(node, self.world.clock.now_s + grace_s)

    def _drained(self, node: PrefillProcess | DecodeProcess, close_at_s: float) -> None:
        if not node.life.alive:
            return
        now_s = self.world.clock.now_s
        if not node.busy or now_s >= close_at_s:
            node.life.run(node.close)
            self._faults_over_s = max(self._faults_over_s, now_s + 0.1)
            self.world.clock.after(0.05, partial(self._restart, node))
        else:
            self._faults_over_s = max(self._faults_over_s, now_s + 0.1)
            self.world.clock.after(0.02, partial(self._drained, node, close_at_s))

    def _restart(self, node: PrefillProcess | DecodeProcess) -> None:
        if node.life.alive:
            self._end(node.life)
            self.world.clock.after(0.05, partial(self._start, node.life.address))

    def _end(self, life: Life) -> None:
        life.alive = False
        self.world.network.died(life)

    # ---- the end

    def _done(self) -> bool:
        now_s = self.world.clock.now_s
        if len(self._calls) < len(self.world.scenario.clients) or not all(call.ended for call in self._calls):
            self._busy_until_s = now_s
            return False
        self._busy_until_s = max(self._busy_until_s, self._faults_over_s)
        return now_s > self._faults_over_s and not self._held() and not self._stale()

    def _held(self) -> list[str]:
        """Describes processes that are not up, and state that is still held for requests."""
        processes = [*self._nodes.values(), self._gateway]
        dead = [f"{process.life.address} is not up" for process in processes if not process.life.alive]
        if dead or self._gateway.life.frozen:
            return [*dead, "or the gateway is frozen"]
        busy = [f"{node.life.address} is busy" for node in self._nodes.values() if node.busy]
        return busy + self._gateway.held()

    def _stale(self) -> list[str]:
        """Describes wrong beliefs of processes about each other."""
        stale = []
        incarnations = {address: node.life.incarnation for address, node in self._nodes.items()}
        for node in self._nodes.values():
            others = DECODES if node.life.address in PREFILLS else PREFILLS
            if node.paired_with != {incarnations[other] for other in others}:
                stale.append(f"{node.life.address} is not paired with exactly the live nodes")
        return stale + self._gateway.stale(incarnations)


def run_seed(seed: int, storm: Storm = USUAL, *, traced: bool = False) -> Outcome:
    """Runs one seed to its end.

    Raises:
        SeedFailed: an invariant does not hold, or a machine raised.
    """
    cluster = Cluster(seed, storm, traced=traced)
    try:
        return cluster.run()
    except Exception as cause:
        if not traced:  # the same run again, for its trace
            return run_seed(seed, storm, traced=True)
        raise SeedFailed(seed, cause, tuple(cluster.world.trace.lines)) from cause

"""Large clusters: what they cost each process, and how soon they serve.

Ten prefill and ten decode nodes are real processes (`bench.fleet_processes`). A real gateway watches 1,000 idle nodes
without engines (`bench.light_nodes`). 500 prefill nodes, 500 decode nodes and 20 gateways are simulated
(`bench.fleet_simulation`). `python -m bench.fleet watch` runs one of the parts: processes, watch, simulation, zones.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean

import psutil

from baton.cli.processes import Processes
from baton.gateway.text.model import read_served_model
from baton.protos.v1 import node_status_pb2 as pb
from baton.settings.config import DEMO_MODELS
from bench import fleet_processes, light_nodes
from bench.fleet_simulation import SimulatedCluster
from bench.table import Row, print_rows

NODES_OF_A_ROLE = 500
GATEWAYS = 20
# Time of both nodes for one pair: the warm-up's budget of 0.2 s, and the handshake.
PAIR_S = 0.25
_MODEL = DEMO_MODELS / "llama"
_SETTLE_S, _SETTLED_WITHIN_S, _MEASURED_S = 10.0, 180.0, 30.0
_GATEWAY_LIMIT = 10.0  # % of a core

Progress = Callable[[str], None]


def run(progress: Progress) -> Iterator[Row]:
    """The rows of all parts."""
    for part in PARTS.values():
        yield from part(progress)


def watch(progress: Progress, nodes_of_a_role: int = NODES_OF_A_ROLE) -> Iterator[Row]:
    """The rows of a real gateway and idle nodes."""
    identity = read_served_model(_MODEL, None).identity
    identity.weights_digest = "a" * 64
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    serving = context.Process(
        target=light_nodes.serve, args=(identity.SerializeToString(), nodes_of_a_role, nodes_of_a_role, theirs)
    )
    serving.start()
    theirs.close()
    work = f"a real gateway, {nodes_of_a_role} + {nodes_of_a_role} idle nodes without engines"
    try:
        with tempfile.TemporaryDirectory() as folder, Processes(progress) as processes:
            lists = []
            for role, addresses in zip(("prefill", "decode"), ours.recv(), strict=True):
                path = Path(folder) / role
                path.write_text("\n".join(addresses))
                lists += [f"--{role}", f"file://{path}"]
            begun_s = time.monotonic()
            gateway = processes.start("gateway", ("--model", str(_MODEL), "--log-level", "error", *lists))
            processes.wait_ready([gateway])
            yield Row("from the gateway's start until it serves", work, time.monotonic() - begun_s, "s")
            _until_settled(ours)
            process = psutil.Process(gateway.pid)
            before_s, counts = sum(process.cpu_times()[:2]), _counts(ours)
            begun_s = time.monotonic()
            time.sleep(_MEASURED_S)
            passed_s = time.monotonic() - begun_s
            percent = 100 * (sum(process.cpu_times()[:2]) - before_s) / passed_s
            yield Row("CPU of the gateway", work, percent, "% of a core", limit=_GATEWAY_LIMIT)
            yield Row("memory of the gateway", work, process.memory_info().rss >> 20, "MiB")
            connects, messages = _counts(ours)
            yield Row("statuses that it receives", work, (messages - counts[1]) / passed_s, "/s")
            yield Row("Connect calls in all", work, connects, "")
    finally:
        ours.close()
        serving.join()


def _until_settled(ours: Connection) -> None:
    """Waits until the gateway asks for no more pairs."""
    deadline_s = time.monotonic() + _SETTLED_WITHIN_S
    connects, before = _counts(ours)[0], -1
    while connects != before and time.monotonic() < deadline_s:
        time.sleep(_SETTLE_S)
        connects, before = _counts(ours)[0], connects


def _counts(ours: Connection) -> tuple[int, int]:
    ours.send(None)
    connects, messages = ours.recv()
    return connects, messages


def simulation(
    progress: Progress, nodes_of_a_role: int = NODES_OF_A_ROLE, num_gateways: int = GATEWAYS
) -> Iterator[Row]:
    """The rows of the simulated cluster."""
    work = f"simulated: {nodes_of_a_role} + {nodes_of_a_role} nodes, {num_gateways} gateways"
    progress("simulation: cold start")
    cluster = SimulatedCluster(nodes_of_a_role, nodes_of_a_role, num_gateways, pair_s=PAIR_S)
    serve_s = cluster.until(lambda: all(each.all_serve for each in cluster.gateways), within_s=600.0)
    yield Row("cold start until each node has a partner", work, serve_s, "s")
    all_s = serve_s + cluster.until(lambda: all(each.settled for each in cluster.gateways), within_s=600.0)
    yield Row("cold start until all chosen pairs are ready", work, all_s, "s")
    yield from _totals("cold start", work, cluster)
    pairs = [len(node.status.peers) for node in cluster.nodes.values()]
    yield Row("pairs of a node, mean", work, mean(pairs), "")
    yield Row("pairs of a node, most", work, max(pairs), "")
    status = next(iter(cluster.nodes.values())).status
    yield Row("size of a node's whole status", work, status.ByteSize(), "B")
    full = pb.NodeStatus.FromString(status.SerializeToString())
    full.peers.extend([full.peers[0]] * (nodes_of_a_role - len(full.peers)))
    yield Row("size of a status with all nodes of the other role", work, full.ByteSize(), "B")
    progress("simulation: idle")
    cluster.clock.run(until_s=cluster.clock.now_s + 15.0)
    yield from _rates("idle", work, cluster, lambda: cluster.clock.run(until_s=cluster.clock.now_s + 20.0), 20.0)
    for rate in (20.0, 100.0):
        progress(f"simulation: {rate:g} requests a second")
        unplaced = cluster.unplaced
        serve = partial(cluster.serve, rate, 5.0, prefill_s=0.2, decode_s=2.0)
        yield from _rates(f"{rate:g} requests a second in all", work, cluster, serve, 5.0)
        yield Row(f"requests without a pair, {rate:g} a second", work, cluster.unplaced - unplaced, "")
    cluster.clock.run(until_s=cluster.clock.now_s + 10.0)
    progress("simulation: rolling update")
    yield from _rolling_update(work, cluster)
    progress("simulation: another gateway")
    gateway = cluster.add_gateway()
    settled_s = cluster.until(lambda: gateway.settled, within_s=600.0)
    yield Row("a further gateway, until all pairs are known to it", work, settled_s, "s")
    yield Row("its Connect calls", work, gateway.connects, "")
    yield Row("CPU that it needs for that", work, gateway.cpu_s, "s")


def zones(progress: Progress, nodes_of_a_role: int = 200, num_gateways: int = 4) -> Iterator[Row]:
    """The rows of the simulated cluster whose nodes report one of three zones."""
    work = f"simulated: {nodes_of_a_role} + {nodes_of_a_role} nodes in 3 zones, {num_gateways} gateways"
    progress("zones: cold start")
    cluster = SimulatedCluster(nodes_of_a_role, nodes_of_a_role, num_gateways, pair_s=PAIR_S, zones=3)
    serve_s = cluster.until(lambda: all(each.all_serve for each in cluster.gateways), within_s=600.0)
    yield Row("cold start until each node has a partner", work, serve_s, "s")
    all_s = serve_s + cluster.until(lambda: all(each.settled for each in cluster.gateways), within_s=600.0)
    yield Row("cold start until all chosen pairs are ready", work, all_s, "s")
    pairs = [len(node.status.peers) for node in cluster.nodes.values()]
    yield Row("pairs of a node, mean", work, mean(pairs), "")
    yield Row("pairs of a node, most", work, max(pairs), "")
    yield Row("pairs within a zone", work, 100 * cluster.share_within_zones(), "%")
    cluster.serve(100.0, 5.0, prefill_s=0.2, decode_s=2.0)
    yield Row("requests without a pair, 100 a second", work, cluster.unplaced, "")
    progress("zones: rolling update")
    yield from _rolling_update(work, cluster)
    yield Row("pairs within a zone after it", work, 100 * cluster.share_within_zones(), "%")


def _rolling_update(work: str, cluster: SimulatedCluster, share: int = 10, rounds: int = 3) -> Iterator[Row]:
    """Replaces a part of the nodes at a time, once the pairs of those before are ready."""
    addresses = list(cluster.nodes)
    before = sum(gateway.connects for gateway in cluster.gateways)
    times_s = []
    for first in range(rounds):
        cluster.restart(addresses[first::share], down_s=1.0)
        cluster.clock.run(until_s=cluster.clock.now_s + 1.2)
        times_s.append(cluster.until(lambda: all(each.settled for each in cluster.gateways), within_s=600.0))
    what = f"rolling update, 1/{share} of the nodes at a time"
    yield Row(f"{what}: from their return until all pairs are ready, mean", work, mean(times_s), "s")
    yield Row(f"{what}: the longest", work, max(times_s), "s")
    pairs = [len(node.status.peers) for node in cluster.nodes.values()]
    yield Row("pairs of a node after it, mean", work, mean(pairs), "")
    calls = sum(gateway.connects for gateway in cluster.gateways) - before
    yield Row("Connect calls of a gateway for it", work, calls / len(cluster.gateways), "")


def _totals(stage: str, work: str, cluster: SimulatedCluster) -> Iterator[Row]:
    gateways = cluster.gateways
    yield Row(f"{stage}: statuses that a gateway receives", work, mean(each.messages for each in gateways), "")
    yield Row(f"{stage}: their size together", work, mean(each.bytes for each in gateways) / (1 << 20), "MiB")
    yield Row(f"{stage}: Connect calls of a gateway", work, mean(each.connects for each in gateways), "")
    most = max(node.connects for node in cluster.nodes.values())
    yield Row(f"{stage}: Connect calls to a prefill node, most", work, most, "")
    yield Row(f"{stage}: CPU of a gateway without its sockets", work, mean(each.cpu_s for each in gateways), "s")


def _rates(
    stage: str, work: str, cluster: SimulatedCluster, pass_time: Callable[[], None], seconds: float
) -> Iterator[Row]:
    before = [(each.messages, each.bytes, each.cpu_s) for each in cluster.gateways]
    pass_time()
    rates = [
        (each.messages - messages, each.bytes - num_bytes, each.cpu_s - cpu_s)
        for each, (messages, num_bytes, cpu_s) in zip(cluster.gateways, before, strict=True)
    ]
    messages, num_bytes, cpu_s = (mean(values) / seconds for values in zip(*rates, strict=True))
    yield Row(f"{stage}: statuses that a gateway receives", work, messages, "/s")
    yield Row(f"{stage}: their size together", work, num_bytes / 1000, "kB/s")
    yield Row(f"{stage}: statuses that a node sends", work, messages * len(cluster.gateways) / len(cluster.nodes), "/s")
    yield Row(f"{stage}: CPU of a gateway without its sockets", work, 100 * cpu_s, "% of a core")


PARTS: dict[str, Callable[[Progress], Iterator[Row]]] = {
    "processes": fleet_processes.run,
    "watch": watch,
    "simulation": simulation,
    "zones": zones,
}


def main(arguments: Sequence[str]) -> None:
    rows: list[Row] = []
    try:
        for name in arguments or PARTS:
            rows.extend(PARTS[name](lambda line: print(line, file=sys.stderr, flush=True)))
    finally:
        print_rows("Fleets", rows)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A decode node on two hosts next to one on a single host: requests with prompts from a prefill node, then a lost host.

`python -m tests.integration.two_hosts` does it with the second host in a network namespace of its own; this process has
to be alone in another one, with the right to make more (`unshare --net`, or with `--map-root-user`).
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.security.certificates import write_set
from baton.security.pem import Files, read_pems
from baton.security.tls import Dial
from baton.security.watched import Watched
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, arguments, in_engine, machines
from tests.integration.generation import Result, generate
from tests.integration.proxy import free_address
from tests.integration.reference import Reference
from tests.warm import Forked, launch_warm

NODE: Flags = {"model": LLAMA, "num_blocks": 256, "max_batch_tokens": 16, "prefix_cache": False}
MAX_TOKENS = 60
# Enough for the prompts' ends and some tokens of each output, but not for all tokens of any output.
STEPS = 40
_CLONE_NEWNET = 0x40000000
_FIRST, _SECOND, _WIRE = "10.77.0.1", "10.77.0.2", "hosts"


@dataclass(frozen=True)
class Place:
    """Where the two hosts are.

    Attributes:
        first, second: their addresses.
        enter: makes a process one of the second host.
        lose: takes the second host, whose process this is, from the first.
    """

    first: str
    second: str
    enter: Callable[[], None] | None
    lose: Callable[[Forked], None]


def rank_of(host: Forked) -> int:
    """The process of the only rank of a host above 0."""
    (rank,) = psutil.Process(host.pid).children()
    return rank.pid


LOOPBACK = Place("127.0.0.1", "127.0.0.2", None, lambda host: os.kill(rank_of(host), signal.SIGKILL))


@dataclass(frozen=True)
class Ranked:
    """A node on two hosts."""

    node: Process
    second: Forked


def tls_of(folder: Path, role: str) -> dict[str, Any]:
    return {"tls_cert": folder / f"{role}.crt", "tls_key": folder / f"{role}.key", "tls_ca": folder / "ca.crt"}


@contextmanager
def second_host(place: Place, flags: Flags, outputs: Path | None = None) -> Iterator[Forked]:
    more = {**flags, "host_rank": 1, "device": "cpu", "name": "second", "listen": f"{place.second}:0"}
    host = launch_warm("decode_node", arguments(more), prepare=place.enter, outputs=outputs)
    try:
        yield host
    finally:
        host.kill()


def flags_of_both(folder: Path, place: Place) -> Flags:
    _, _, port = free_address().rpartition(":")
    # How soon a host that is cut off is lost, but also how long any process may stand still.
    shared = {"tensor_parallel_size": 2, "num_hosts": 2, "leader_address": f"{place.first}:{port}", "keepalive_s": 15.0}
    return {**NODE, **tls_of(folder, "decode"), **shared}


async def requests_go_on_after_a_lost_host(start: Machines, reference: Reference, place: Place, folder: Path) -> None:
    """The requests of both decode nodes give the tokens of one process; the node that lost a host ends on both."""
    write_set(folder, hosts=["127.0.0.1"], days=1)
    both = flags_of_both(folder, place)
    with second_host(place, both, folder) as second:
        prefill, ranked, single = start.nodes(
            ("prefill", {**NODE, **tls_of(folder, "prefill"), "listen": f"{place.first}:0"}),
            ("decode", {**both, "listen": f"{place.first}:0"}),
            ("decode", {**NODE, **tls_of(folder, "decode"), "listen": f"{place.first}:0"}),
            paused_engine=["decode"],
        )
        gateway = start.gateway(
            [prefill], [ranked, single], model=LLAMA, local_policy="strict", **tls_of(folder, "gateway")
        )
        prompts = reference.prompts([50, 60, 70, 80])
        results = [Result() for _ in prompts]
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        requests = [
            asyncio.create_task(generate(gateway, prompt, params, result=result))
            for prompt, result in zip(prompts, results, strict=True)
        ]
        nodes = Describe(folder, ranked, single)
        await nodes.until(lambda found: sum(map(in_engine, found)) == len(prompts))
        start.allow_steps(STEPS, ranked, single)
        for result in results:
            await result.until_tokens(5)
        assert (await nodes.now())[0].requests_running > 0
        place.lose(second)
        start.let_go(single)
        await asyncio.gather(*requests)
        assert await asyncio.to_thread(ranked.popen.wait, DEADLINE_S) == 1
        assert await asyncio.to_thread(second.wait, DEADLINE_S) == 1
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == reference.greedy(prompt, MAX_TOKENS).token_ids
        assert "this host's ranks end" in (folder / "stderr").read_text()


class Describe:
    """The status of nodes under TLS."""

    def __init__(self, folder: Path, *nodes: Process) -> None:
        files = Files(folder / "operator.crt", folder / "operator.key", folder / "ca.crt")
        self._dial = Dial(Watched(files.paths, lambda: read_pems(files)), server_name="node.baton")
        self._nodes = nodes

    async def now(self) -> list[node_status_pb2.NodeStatus]:
        found = []
        for node in self._nodes:
            async with connect(node.address, dial=self._dial) as channel:
                found.append(await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest()))
        return found

    async def until(self, condition: Callable[[list[node_status_pb2.NodeStatus]], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition(await self.now()):
            assert time.monotonic() < deadline


# ---- namespaces


def command() -> list[str] | None:
    """Runs this module alone in a network namespace; None: this machine lets us make none."""
    for unshare in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        probe = ["ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "other"]
        try:
            done = subprocess.run([*unshare, *probe], capture_output=True, timeout=60, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return [*unshare, sys.executable, "-m", "tests.integration.two_hosts"]
    return None


def _ip(*words: str, of: int | None = None) -> None:
    enter = [] if of is None else ["nsenter", f"--net=/proc/{of}/ns/net"]
    subprocess.run([*enter, "ip", *words], check=True, timeout=60)


@contextmanager
def _namespaces() -> Iterator[Place]:
    """This process's namespace is the first host. The wire is cut to lose the second one."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as keeper:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while _namespace(keeper.pid) == _namespace(os.getpid()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            _ip("link", "set", "lo", "up")
            _ip("link", "add", "name", _WIRE, "type", "veth", "peer", "name", _WIRE, "netns", str(keeper.pid))
            for address, of in ((_FIRST, None), (_SECOND, keeper.pid)):
                _ip("link", "set", "lo", "up", of=of)
                _ip("address", "add", f"{address}/24", "dev", _WIRE, of=of)
                _ip("link", "set", _WIRE, "up", of=of)
            cut = lambda host: _ip("link", "set", _WIRE, "down")  # noqa: E731
            yield Place(_FIRST, _SECOND, partial(_enter, keeper.pid), cut)
        finally:
            keeper.kill()


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _enter(pid: int) -> None:
    with open(f"/proc/{pid}/ns/net") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="baton-hosts-") as folder, _namespaces() as place, machines() as start:
        asyncio.run(requests_go_on_after_a_lost_host(start, Reference(LLAMA), place, Path(folder)))


if __name__ == "__main__":
    main()

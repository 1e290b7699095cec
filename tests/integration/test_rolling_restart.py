"""Every process of a cluster is restarted, one after the other, while clients ask without a pause: nothing is lost."""

import asyncio
from dataclasses import dataclass, field

import pytest

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.node.waiting import until
from baton.protos.v1 import node_status_pb2
from baton.protos.v1 import operations_pb2 as pb
from baton.protos.v1.operations_pb2_grpc import OperationsStub
from baton.rpc.channels import connect
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, until_status
from tests.integration.proxy import free_address
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "num_blocks": 256}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
CLIENTS = 4
PROMPTS = 8


@dataclass
class Load:
    """Clients that each send one request after the other, and compare every answer."""

    addresses: list[str]
    prompts: list[list[int]]
    answers: list[list[int]]
    sampling: SamplingParams = GREEDY
    served: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until `end`."""
        async with AsyncClient(addresses=self.addresses) as client, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(client, number))

    def end(self) -> None:
        self._over.set()

    async def until_served(self, more: int) -> None:
        wanted = self.served + more
        assert await until(lambda: self.served >= wanted, timeout_s=DEADLINE_S)

    async def _ask(self, client: AsyncClient, number: int) -> None:
        while not self._over.is_set():
            which = number % len(self.prompts)
            completion = await client.complete(self.prompts[which], self.sampling, timeout_s=DEADLINE_S)
            assert [token.token_id for token in completion.tokens] == self.answers[which]
            self.served += 1
            number += CLIENTS + 1


async def until_whole(gateway: str, *, pairs: int) -> None:
    """Returns when the gateway reaches all nodes, and so many pairs of them are ready."""
    async with asyncio.timeout(DEADLINE_S), connect(gateway) as channel:
        stub = OperationsStub(channel)
        while True:
            nodes = (await stub.ClusterStatus(pb.ClusterStatusRequest())).nodes
            present = {node.status.info.incarnation for node in nodes if node.reachable and not node.status.draining}
            ready = [
                (node.status.info.incarnation, peer.incarnation)
                for node in nodes
                for peer in node.status.peers
                if node.status.info.role == node_status_pb2.ROLE_PREFILL
                and peer.phase == node_status_pb2.PEER_PHASE_READY
                and {node.status.info.incarnation, peer.incarnation} <= present
            ]
            if len(present) == len(nodes) and len(ready) == pairs:
                return
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one gateway restarts, the other one may take as long to answer as a slow machine needs."""
    monkeypatch.setattr("baton.client.gateways.SHORT_ATTEMPT_S", DEADLINE_S)
    monkeypatch.setattr("baton.client.answer_stream._RESUME_S", DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "grace_s"), [("strict", 2 * DEADLINE_S), ("elastic", 0.05)])
async def test_a_rolling_restart_of_everything_under_load_loses_nothing(
    start: Machines, reference: Reference, policy: str, grace_s: float
) -> None:
    """With time to finish what runs, and without: then requests go on elsewhere."""
    node_flags: Flags = {**NODE, "drain_grace_s": grace_s}
    prompts = reference.prompts([40 + 17 * number for number in range(PROMPTS)])
    answers = [reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids for prompt in prompts]
    nodes = start.nodes(
        *((role, {**node_flags, "listen": free_address()}) for role in ("prefill", "prefill", "decode", "decode"))
    )
    prefills, decodes = nodes[:2], nodes[2:]

    def open_gateway(listen: str) -> Process:
        return start.gateway(prefills, decodes, model=LLAMA, local_policy=policy, listen=listen, drain_grace_s=grace_s)

    gateways = [open_gateway(free_address()) for _ in range(2)]
    load = Load([gateway.address for gateway in gateways], prompts, answers)
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load.run())
        await load.until_served(CLIENTS)
        for role, each in (("prefill", prefills), ("decode", decodes)):
            for place, node in enumerate(each):
                assert await asyncio.to_thread(start.end, node) == 0
                await load.until_served(CLIENTS)
                again: Flags = {**node_flags, "listen": node.address}
                (each[place],) = await asyncio.to_thread(start.nodes, (role, again))
                for gateway in gateways:
                    await until_whole(gateway.address, pairs=4)
                await load.until_served(CLIENTS)
        for place, gateway in enumerate(gateways):
            assert await asyncio.to_thread(start.end, gateway) == 0
            await load.until_served(CLIENTS)
            gateways[place] = await asyncio.to_thread(open_gateway, gateway.address)
            await load.until_served(CLIENTS)
        load.end()
        await loading
    for node in (*prefills, *decodes):
        await until_status(node, lambda last: last.requests_running == 0 and last.blocks_leased == 0)

"""A node that loads is neither lost nor unknown: gateways see what it does, and early requests wait for it."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.errors import Draining, NoNode
from baton.core.sampling import SamplingParams
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, until_answers
from tests.integration.generation import generate
from tests.integration.paused_start import PausedStart
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "max_batch_tokens": 16, "num_blocks": 256}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
KEEPALIVE_S = 2.0  # a peer that answers no ping is lost after twice that, on a busy machine also one that does
WAITS_S = 5.0
WHAT = {
    "looking for the model": "looking for the model",
    "loading weights": "loading weights, 40 %",
    "starting engine": "starting engine",
}


async def until_reported(client: OperatorClient, detail: str) -> operations_pb2.NodeReport:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            (report,) = (await client.cluster_status()).nodes
            if report.detail == detail:
                return report
            await asyncio.sleep(0.01)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
    status: int = answer.status
    return status


async def gateway_before_its_node(start: Machines, node: Process, *, waits_s: float) -> Process:
    """A gateway that answers, and is not ready."""
    gateway = start.gateway(
        [], [node], wait=False, model=LLAMA, local_policy="prefer", keepalive_s=KEEPALIVE_S, failover_wait_s=waits_s
    )
    await until_answers(gateway)
    return gateway


@pytest.mark.slow
@pytest.mark.parametrize("stage", WHAT)
async def test_a_node_whose_start_stops_its_interpreter_is_loading_and_early_requests_wait_for_it(
    start: Machines, reference: Reference, tmp_path: Path, stage: str
) -> None:
    paused = PausedStart(tmp_path, stage)
    flags: Flags = {**NODE, "name": "decode-0", "topology": "zone=a,host=h1"}
    (node,) = start.nodes(("decode", flags), prepare=paused.prepare, wait=False)
    patient = await gateway_before_its_node(start, node, waits_s=DEADLINE_S)
    hasty = await gateway_before_its_node(start, node, waits_s=WAITS_S)
    (prompt,) = reference.prompts([40])
    async with OperatorClient(patient.address) as client, OperatorClient(hasty.address) as of_hasty:
        report = await until_reported(client, WHAT[stage])
        await until_reported(of_hasty, WHAT[stage])  # it gets no status while the interpreter is paused
        assert not report.reachable
        assert report.status.loading.stage == stage
        assert report.status.info.topology == ["zone=a", "host=h1"]
        paused.pause_interpreter()
        early = asyncio.create_task(generate(patient, prompt, GREEDY))
        with pytest.raises(NoNode) as refused:
            await generate(hasty, prompt, GREEDY)
        assert refused.value.message == f"no node is ready: decode-0 is {WHAT[stage]}"
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s >= 1
        assert not early.done()
        (report,) = (await client.cluster_status()).nodes
        assert report.detail == WHAT[stage]
        paused.release()
        result = await early
        assert result.error is None
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
        (report,) = (await client.cluster_status()).nodes
        assert report.reachable
        assert report.status.info.topology == ["zone=a", "host=h1"]


@pytest.mark.slow
async def test_requests_wait_for_a_node_whose_interpreter_was_stopped_before_its_first_status(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    paused = PausedStart(tmp_path, "loading weights")
    (node,) = start.nodes(("decode", {**NODE, "name": "decode-0"}), prepare=paused.prepare, wait=False)
    paused.pause_interpreter()
    gateway = await gateway_before_its_node(start, node, waits_s=DEADLINE_S)
    (prompt,) = reference.prompts([40])
    early = asyncio.create_task(generate(gateway, prompt, GREEDY))
    async with OperatorClient(gateway.address) as client:
        await until_reported(client, "starting, it sends no status yet")
    paused.release()
    assert (await early).token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids


async def test_a_node_that_loads_is_live_and_not_ready_and_refuses_what_it_cannot_do_yet(
    start: Machines, tmp_path: Path
) -> None:
    paused = PausedStart(tmp_path, "loading weights")
    (node,) = start.nodes(("decode", {**NODE, "name": "decode-0"}), prepare=paused.prepare, wait=False)
    start.processes.wait_bound([node])
    async with connect(node.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(DEADLINE_S):
            live = await health_of(channel, "")
            ready = await health_of(channel, "baton.internal.v1.Decode")
            assert (live, ready) == (serving, not_serving)
            status = await stub.Describe(node_pb2.DescribeRequest())
            assert (status.info.name, status.info.address) == ("decode-0", node.address)
            assert status.HasField("loading")
            for call in (
                stub.Drain(node_pb2.DrainRequest()),
                stub.GetExpertLoad(node_pb2.GetExpertLoadRequest()),
                stub.UnloadAdapter(node_pb2.UnloadAdapterRequest(name="a")),
            ):
                with pytest.raises(Exception) as caught:
                    await call
                error = from_rpc_error(caught.value)  # type: ignore[arg-type]
                assert isinstance(error, Draining)
                assert error.message.startswith("decode-0 is ")
            # One of an older release asks without the flag, and gets a status once the node serves.
            older = stub.Watch(node_pb2.WatchRequest(interval_s=0.02))
            first = asyncio.create_task(older.read())
            newer = await stub.Watch(node_pb2.WatchRequest(interval_s=0.02, while_loading=True)).read()
            assert isinstance(newer, node_status_pb2.NodeStatus)
            assert newer.HasField("loading")
            assert not first.done()
            paused.pause_interpreter()
            paused.release()
            served = await first
            assert isinstance(served, node_status_pb2.NodeStatus)
            assert not served.HasField("loading")
            assert served.info.incarnation
            ready = await health_of(channel, "baton.internal.v1.Decode")
            while ready != serving:
                await asyncio.sleep(0.01)
                ready = await health_of(channel, "baton.internal.v1.Decode")
            older.cancel()


async def test_sigterm_ends_a_node_that_loads(start: Machines, tmp_path: Path) -> None:
    paused = PausedStart(tmp_path, "loading weights")
    (node,) = start.nodes(("decode", NODE), prepare=paused.prepare, wait=False)
    async with asyncio.timeout(DEADLINE_S):
        while node.stage != "loading weights":
            start.processes.take_reports()
            await asyncio.sleep(0.01)
    assert start.end(node) == 0

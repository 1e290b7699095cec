"""Targets: a real decode node and a real prefill node in this process, with all their services."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random

from google.protobuf.message import Message

from baton.node.adapters import Adapters
from baton.node.cache_events import CacheEvents
from baton.node.role_services import RoleServices
from baton.node.service import NodeParts, NodeService
from baton.node.waiting import until
from baton.protos.internal.v1 import decode_pb2, lease_pb2, node_pb2, node_pb2_grpc, prefill_pb2
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import connect
from baton.rpc.server import GrpcServer
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from prefill_node.service import PrefillService
from tests.fuzz import mutate
from tests.fuzz.calls import Method, ask, method_of, methods_of
from tests.fuzz.target import AsyncTarget, Case
from tests.unit.decode_node.nodes import decode_node, decode_settings, load_demo
from tests.unit.prefill_node.nodes import prefill_node, prefill_settings

BOUND_S = 300.0
_SAMPLING = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
_SUBMIT = decode_pb2.SubmitRequest(
    key=1, request_id="r", prompt_token_ids=range(3, 40), sampling=_SAMPLING, policy=decode_pb2.LOCAL_POLICY_LOCAL
)
_LONGER = decode_pb2.SubmitRequest(key=2, prompt_token_ids=range(3, 90), sampling=_SAMPLING)
_TICKET = lease_pb2.Ticket(lease=lease_pb2.Lease(number=1), token_stop=36)
_SAMPLES: tuple[Message, ...] = (
    decode_pb2.SessionRequest(submit=_SUBMIT),
    decode_pb2.SessionRequest(
        submit=decode_pb2.SubmitRequest(key=2, prompt_token_ids=range(3, 90), sampling=_SAMPLING)
    ),
    decode_pb2.SessionRequest(renew=decode_pb2.RenewTicket(key=1, failed_lease=1)),
    decode_pb2.SessionRequest(here=decode_pb2.PrefillHere(key=1, failed_lease=1)),
    decode_pb2.SessionRequest(cancel=decode_pb2.CancelRequest(key=1)),
    node_pb2.WatchRequest(interval_s=0.1),
    node_pb2.WatchCacheRequest(),
)
_REACHED = 0.99  # of addresses: a prefill node dials the others, which takes long
_ADDRESS = "127.0.0.1:00000"  # the decode node's takes its place, which has as many characters
_CONNECTS = "/baton.internal.v1.Prefill/Connect"


async def _switch(request: node_pb2.SwitchRoleRequest) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
    yield node_status_pb2.RoleSwitchProgress(phase=node_status_pb2.SWITCH_PHASE_DONE)


@asynccontextmanager
async def node_targets() -> AsyncIterator[Mapping[str, AsyncTarget]]:
    settings = decode_settings()
    decode = decode_node(load_demo(), settings)
    decodes = DecodeService(DecodeDriver(decode, settings))
    sends = prefill_settings(connect_timeout_s=0.3)
    prefill = prefill_node(sends)
    prefills = PrefillService(prefill, sends)
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, decode, prefill:
        status = node_status_pb2.NodeStatus(info=decode.info)
        cache = CacheEvents(decode.engine.prefix_cache, incarnation=decode.incarnation)
        adapters = Adapters(
            settings, decode.engine, decode.built.runner.adapters, model_name=decode.built.identity.name
        )
        about = NodeService(lambda: status)
        parts = NodeParts(
            status=lambda: status,
            drain=lambda grace_s: None,
            switch=_switch,
            cache=cache,
            load_adapter=adapters.load,
            unload_adapter=adapters.unload,
            expert_load=decode.experts.message,
            drop_kv=decode.drop_kv,
        )
        about.serve(parts)
        node_pb2_grpc.add_NodeServicer_to_server(about, server.grpc)
        services = RoleServices("node")
        services.serve("node", {**prefills.servicers, **decodes.servicers})
        services.add_to(server.grpc)
        await server.start(())
        known = methods_of(("baton.internal.v1.Decode", "baton.internal.v1.Node", "baton.internal.v1.Prefill"))
        prefill_sample = prefill_pb2.PrefillRequest(prompt_token_ids=range(3, 40), sampling=_SAMPLING, ticket=_TICKET)
        prefill_sample.ticket.lease.incarnation = decode.incarnation
        hello = decode_pb2.PairRequest(hello=decode_pb2.PairHello(info=prefill.info))
        samples = (*_SAMPLES, prefill_sample, hello)
        async with connect(server.address) as channel:

            def make(random: Random) -> Case:
                method = random.choice(known)
                if method.path == _CONNECTS and random.random() < _REACHED:
                    method = known[0]
                count = random.choice((0, 1, 1, 2, 5)) if method.streams_requests else 1
                requests = (_request(random, method, samples) for _ in range(count))
                return method.path.encode(), *requests

            async def node_grpc(case: Case) -> str | None:
                requests = [each.replace(_ADDRESS.encode(), server.address.encode()) for each in case[1:]]
                return await ask(channel, method_of(known, case[0]), requests)

            yield {"node_grpc": AsyncTarget(make, node_grpc)}
        assert await until(lambda: not decodes.busy and not prefills.busy, timeout_s=BOUND_S)
        load = decode.engine.load()
        assert (load.blocks_leased, load.requests_running) == (0, 0), load
        about.close()
        await decodes.close()
        await prefills.close()


def _request(random: Random, method: Method, samples: Sequence[Message]) -> bytes:
    fitting = [sample for sample in samples if isinstance(sample, method.request)]
    if fitting and random.random() < 0.8:
        made = mutate.changed_message(random, random.choice(fitting))
    else:
        made = mutate.message(random, method.request)
    if isinstance(made, prefill_pb2.PrefillRequest) and random.random() < _REACHED:
        made.ticket.decode_address = _ADDRESS
    encoded = made.SerializeToString()
    return mutate.data(random, encoded) if random.random() < 0.1 else encoded

"""Greedy tokens of a checkpoint from Baton: from one engine, from a prefill and a decode node, and from two ranks.

The two nodes are in this process, with everything between them that real ones have but for sockets of KV: gRPC, leases,
the loopback transport. Their blocks and layouts differ.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.core.errors import ConfigError
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import build_runner
from baton.engine.engine import Engine
from baton.engine.request import EngineRequest
from baton.kvcache.spec import KVKind
from baton.models.adapters.adapter import read_adapter
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.needs import kv_cache_spec
from baton.node.assembly import Node
from baton.node.from_settings import load
from baton.node.role_services import RoleServices
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import connect
from baton.rpc.server import GrpcServer
from baton.settings.node_config import DecodeSettings, NodeSettings, PrefillSettings
from decode_node import prefill_peer
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from prefill_node.service import PrefillService
from tests.conformance.families.models import Answer
from tests.unit.engine.driver import Driver
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder

STEP_TOKENS, NUM_BLOCKS = 16, 96
WAIT_S = 1200.0  # only what hangs takes that long

Prompt = tuple[int, ...]
Channel = grpc.aio.Channel


async def engine_answers(
    directory: Path, prompts: Sequence[Prompt], tokens: int, adapter: Path | None = None
) -> list[Answer]:
    """All prompts at once in chunks, and each again after it: the second time, from the prefix cache."""
    settings = NodeSettings(
        model=directory,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        device="cpu",
        max_adapters=None if adapter is None else 1,
        max_adapter_rank=16,
    )
    sampling = ResolvedSampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    built, events = build_runner(settings), EventRecorder()
    bounds = limits(max_batch_tokens=STEP_TOKENS)
    slots = settings.adapter_slots
    async with Engine(built.runner, bounds, on_step=events, grammars=built.grammars, num_adapters=slots) as engine:
        used = None
        if adapter is not None:
            assert built.runner.adapters is not None
            used = await engine.load_adapter("a", read_adapter(adapter, built.runner.adapters.layers, max_rank=16))
        for turn in ("first", "again"):
            for number, prompt in enumerate(prompts):
                engine.submit(EngineRequest(f"{turn}{number}", prompt, sampling, adapter=used))
            await events.finished(*(f"{turn}{number}" for number in range(len(prompts))))
    for error in events.errors.values():
        raise error
    numbers = range(len(prompts))
    assert all(events.ids(f"first{number}") == events.ids(f"again{number}") for number in numbers), "cached prefixes"
    return [_answer(events.tokens[f"again{number}"]) for number in numbers]


def _answer(tokens: Iterable[TokenOutput | common_pb2.Token]) -> Answer:
    ids, logprobs = zip(*((token.token_id, token.logprob or 0.0) for token in tokens), strict=True)
    return Answer(ids, logprobs)


async def pair_answers(
    directory: Path, prompts: Sequence[Prompt], tokens: int, *, at_once: bool = False
) -> list[Answer]:
    """Each prompt prefilled by one node and decoded by the other, which drafts tokens wherever it can.

    Args:
        at_once: all prompts but the first share steps of the nodes. Otherwise they come one after the other.
    """
    async with asyncio.timeout(WAIT_S), _pair(directory) as address, connect(address) as channel:
        if not at_once:
            return [await handed_over(channel, channel, prompt, tokens) for prompt in prompts]
        first = await handed_over(channel, channel, prompts[0], tokens)
        others = (
            handed_over(channel, channel, prompt, tokens, request_id=f"r{number}")
            for number, prompt in enumerate(prompts[1:])
        )
        return [first, *await asyncio.gather(*others)]


@asynccontextmanager
async def _pair(directory: Path) -> AsyncIterator[str]:
    mla = kv_cache_spec(read_config(directory), "float32").kind is KVKind.MLA
    layouts = ("LBNC", "BLNC") if mla else ("NHD", "HND")
    common: dict[str, Any] = {
        "model": directory,
        "device": "cpu",
        "transport": "loopback",
        "num_blocks": NUM_BLOCKS,
        "max_batch_tokens": STEP_TOKENS,
        "keepalive_s": 2 * WAIT_S,
    }
    own = {"name": "decode-0", "block_size": 4, "kv_cache_layout": layouts[0], "speculation": "always"}
    receives = DecodeSettings.model_validate({**common, **own, "lease_s": 2 * WAIT_S})
    sends = PrefillSettings.model_validate(
        {**common, "name": "prefill-0", "block_size": 8, "kv_cache_layout": layouts[1], "connect_timeout_s": WAIT_S}
    )
    # A busy machine may take long for the handshake, and here no gateway has it repeated.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefill_peer, "_HELLO_TIMEOUT_S", WAIT_S)
        patched.setattr(prefill_peer, "_WARM_UP_TIMEOUT_S", WAIT_S)
        async with _started(receives, sends) as address:
            yield address


@asynccontextmanager
async def _started(receives: DecodeSettings, sends: PrefillSettings) -> AsyncIterator[str]:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        decode = Node(receives, load(receives), role=node_status_pb2.ROLE_DECODE, address=server.address)
        decodes = DecodeService(DecodeDriver(decode, receives))
        prefill = Node(sends, load(sends), role=node_status_pb2.ROLE_PREFILL, address=server.address)
        prefills = PrefillService(prefill, sends)
        services = RoleServices("both")
        services.serve("both", {**prefills.servicers, **decodes.servicers})
        services.add_to(server.grpc)
        await server.start(())
        async with decode, prefill:
            try:
                yield server.address
            finally:
                await decodes.close()
                await prefills.close()
        assert decode.engine.load().blocks_leased == 0


async def handed_over(
    prefill: Channel, decode: Channel, prompt: Sequence[int], tokens: int, request_id: str = "r"
) -> Answer:
    """One request as a gateway runs it: the prefill node computes all of the prompt, the decode node the rest."""
    sampling = common_pb2.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    call = decode_pb2_grpc.DecodeStub(decode).Session()
    submit = decode_pb2.SubmitRequest(
        key=1,
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        policy=decode_pb2.LOCAL_POLICY_STRICT,
        prefill_available=True,
    )
    await call.write(decode_pb2.SessionRequest(submit=submit))
    response = await call.read()
    assert isinstance(response, decode_pb2.SessionResponse), "the session ended"
    assert response.WhichOneof("message") == "reserved", response
    found: list[common_pb2.Token] = []
    request = prefill_pb2.PrefillRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling, ticket=response.reserved.ticket
    )
    events = [event async for event in prefill_pb2_grpc.PrefillStub(prefill).Prefill(request)]
    assert events[-1].sent.tokens_sent == len(prompt), "the whole prompt's KV was sent"
    found += [event.first_token.token for event in events if event.WhichOneof("event") == "first_token"]
    while True:
        response = await call.read()
        assert isinstance(response, decode_pb2.SessionResponse), "the session ended"
        if response.HasField("step"):
            found += [item.token for item in response.step.tokens]
        if response.HasField("released"):
            await call.done_writing()
            return _answer(found)


def answers_of_rank(
    parallel: TensorParallel, directories: Mapping[str, Path], prompts: Mapping[str, Sequence[Prompt]], tokens: int
) -> dict[str, list[Answer] | str]:
    """One rank's part of every model, each of the same steps as the other rank's: the answers, or the refusal."""
    return {name: _of_rank(parallel, directory, prompts[name], tokens) for name, directory in directories.items()}


def _of_rank(parallel: TensorParallel, directory: Path, prompts: Sequence[Prompt], tokens: int) -> list[Answer] | str:
    settings = NodeSettings(model=directory, num_blocks=NUM_BLOCKS, block_size=4, device="cpu")
    try:
        built = build_runner(settings, parallel=parallel)
    except ConfigError as error:
        return str(error)
    driver = Driver(built.runner)
    names = [str(number) for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        driver.add(name, prompt, logprobs=0)
    for _ in range(-(-max(map(len, prompts)) // STEP_TOKENS) + tokens):
        driver.step(*names, chunk=STEP_TOKENS)
    return [_answer(driver.outputs(name)[:tokens]) for name in names]

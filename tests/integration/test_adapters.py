"""Adapters on a real pair: clients name them as models, prefill and decode node agree on the revision, and each request
has the tokens of its adapter merged into the weights."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.errors import BatonError, InvalidRequest, NoNode, UnknownModel
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, machines, status
from tests.integration.generation import Result, generate
from tests.integration.reference import References
from tests.unit.models.lora import merge, save_adapter

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


class Pair(NamedTuple):
    """`directories` has the adapters, `merged` the checkpoints of their weights; both by name, "" is the base."""

    start: Machines
    prefill: Process
    decode: Process
    gateway: Process
    watched: Path
    directories: dict[str, Path]
    merged: dict[str, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The decode node has two ranks."""
    root = tmp_path_factory.mktemp("adapters")
    directories, merged = {}, {"": LLAMA}
    for seed, name in enumerate(("one", "two", "late")):
        directories[name] = save_adapter(LLAMA, root / name, seed=seed, rank=4 + 4 * seed)
        merged[name] = merge(LLAMA, directories[name], root / f"merged-{name}")
    (root / "watched").mkdir()
    adapters = ",".join([*(f"{name}={directories[name]}" for name in ("one", "two")), str(root / "watched")])
    node: Flags = {"num_blocks": 256, "adapter": adapters, "max_adapters": 4}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", node), ("decode", {**node, "tensor_parallel_size": 2}))
        gateway = start.gateway([prefill], [decode], local_policy="strict")
        yield Pair(start, prefill, decode, gateway, root / "watched", directories, merged)


async def names(client: AsyncClient) -> dict[str, str]:
    """The served models, with their parents."""
    return {card.name: card.parent for card in await client.list_models()}


async def until_served(client: AsyncClient, wanted: set[str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while {name for name, parent in (await names(client)).items() if parent} != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def load(node: Process, name: str, directory: Path) -> None:
    async with connect(node.address) as channel:
        await node_pb2_grpc.NodeStub(channel).LoadAdapter(node_pb2.LoadAdapterRequest(name=name, path=str(directory)))


async def unload(node: Process, name: str) -> None:
    async with connect(node.address) as channel:
        await node_pb2_grpc.NodeStub(channel).UnloadAdapter(node_pb2.UnloadAdapterRequest(name=name))


async def test_each_model_of_a_mixed_batch_has_its_own_tokens_and_prefixes(pair: Pair, references: References) -> None:
    models = ("", "one", "two")
    prompts = references[LLAMA].prompts([40, 75])
    asked = [(model, prompt) for prompt in prompts for model in models]

    async def all_at_once() -> list[Result]:
        return await asyncio.gather(*(generate(pair.gateway, prompt, GREEDY, model=model) for model, prompt in asked))

    first = await all_at_once()
    again = await all_at_once()
    for (model, prompt), result, repeated in zip(asked, first, again, strict=True):
        expected = references[pair.merged[model]].greedy(prompt, TOKENS)
        assert result.token_ids == repeated.token_ids == expected.token_ids
        assert result.proof.path is RequestPath.REMOTE
        assert (result.cached_tokens, repeated.cached_tokens > 0) == (0, True)
    outputs = {tuple(result.token_ids) for result in first}
    assert len(outputs) == len(asked), "adapters that change nothing"


async def test_adapters_come_and_go_while_nodes_serve(pair: Pair, references: References) -> None:
    (prompt,) = references[LLAMA].prompts([33])
    async with AsyncClient(pair.gateway.address) as client:
        (base,) = (name for name, parent in (await names(client)).items() if not parent)
        await until_served(client, {"one", "two"})
        with pytest.raises(UnknownModel, match="'late' is not served") as unknown:
            await generate(pair.gateway, prompt, GREEDY, model="late")
        assert unknown.value.allowed == (base, "one", "two")

        await load(pair.decode, "late", pair.directories["late"])
        await until_served(client, {"one", "two", "late"})
        assert (await names(client))["late"] == base
        with pytest.raises(NoNode, match=r"the adapter late of revision .* is on decode-"):
            await generate(pair.gateway, prompt, GREEDY, model="late")
        await load(pair.prefill, "late", pair.directories["late"])

        async def served() -> Result | None:
            try:
                return await generate(pair.gateway, prompt, GREEDY, model="late")
            except NoNode:  # the gateway learns of it with the next status
                return None

        async with asyncio.timeout(DEADLINE_S):
            while (result := await served()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert result.token_ids == references[pair.merged["late"]].greedy(prompt, TOKENS).token_ids
        loaded = [{each.name: each.revision for each in (await status(node)).adapters} for node in pair[1:3]]
        assert loaded[0] == loaded[1]
        assert set(loaded[0]) == {"one", "two", "late"}

        for node in (pair.prefill, pair.decode):
            await unload(node, "late")
        await until_served(client, {"one", "two"})


async def test_a_watched_directory_is_followed(pair: Pair) -> None:
    async with AsyncClient(pair.gateway.address) as client:
        begun = pair.watched / ".begun"  # hidden: it would be loaded before its tensors are gone
        shutil.copytree(pair.directories["one"], begun)
        (begun / "adapter_model.safetensors").write_bytes(b"no tensors")
        begun.rename(pair.watched / "broken")
        shutil.copytree(pair.directories["late"], pair.watched / "found")
        await until_served(client, {"one", "two", "found"})
        shutil.rmtree(pair.watched / "found")
        await until_served(client, {"one", "two"})


async def test_what_cannot_be_loaded_is_refused(pair: Pair, tmp_path: Path) -> None:
    async def error_of(name: str, directory: Path) -> BatonError:
        try:
            await load(pair.prefill, name, directory)
        except Exception as error:  # noqa: BLE001  the type is checked below
            return from_rpc_error(error)  # type: ignore[arg-type]
        raise AssertionError("it was loaded")

    large = save_adapter(LLAMA, tmp_path / "large", seed=1, rank=17)
    refused = [
        await error_of("nothing", tmp_path),
        await error_of("large", large),
        await error_of("a name", pair.directories["one"]),
    ]
    assert all(isinstance(error, InvalidRequest) for error in refused)
    assert [error.field for error in refused] == ["adapter", "max_adapter_rank", "name"]

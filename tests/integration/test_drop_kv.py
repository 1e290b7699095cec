"""`baton drop-kv` against a real cluster: a tenant's KV is gone everywhere, and everybody else's stays."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.security.keys import entry, new_key
from tests.integration.cluster import LLAMA, Flags, Machines, machines
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_stores import GREEDY, HOST, SMALL, TOKENS, WHOLE_ENTRIES, answer, until_kept
from tests.unit.models.lora import save_adapter
from tests.warm import BATON, run_warm


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


async def baton(*arguments: str) -> tuple[int, str]:
    """A command's exit code and what it prints."""
    ended = await asyncio.to_thread(run_warm, BATON, *arguments)
    return ended.returncode, ended.stdout


async def dropped(gateway: Process, salt: str) -> list[dict[str, Any]]:
    code, printed = await baton("drop-kv", salt, "--json", "--target", gateway.address)
    assert code == 0
    return list(json.loads(printed)["nodes"])


async def test_a_tenants_kv_is_dropped_from_cache_host_memory_and_files_of_every_node(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    nodes = [
        (role, {"model": LLAMA, "num_blocks": 256, **HOST, "kv_store": f"file://{tmp_path / role}", "name": role})
        for role in ("prefill", "decode")
    ]
    prefill, decode = start.nodes(*nodes)
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    (prompt,) = reference.prompts([TOKENS])
    for salt in ("ours", "theirs"):
        await answer(gateway, reference, prompt, cache_salt=salt)
    for node in (prefill, decode):
        await until_kept(node, "file", 2 * WHOLE_ENTRIES // 64)
    answered = await dropped(gateway, "ours")
    assert {each["name"] for each in answered} == {"prefill", "decode"}
    for each in answered:
        assert not each["error"]
        assert int(each["blocks"]) >= TOKENS // 16
        assert {store["name"]: int(store["entries"]) for store in each["stores"]} == {"host": 4, "file": 4}
    again = await answer(gateway, reference, prompt, cache_salt="ours")
    assert again.proof.prefill_cached_tokens == again.proof.decode_cached_tokens == 0
    assert again.proof.prompt_tokens_sent == TOKENS
    other = await answer(gateway, reference, prompt, cache_salt="theirs")
    assert other.proof.prefill_cached_tokens > 0
    assert other.proof.decode_cached_tokens > 0
    later = await answer(gateway, reference, prompt, cache_salt="ours")
    assert later.proof.prefill_cached_tokens > 0, "what was computed after the drop stays"


async def test_what_a_node_kept_for_an_adapter_goes_too_also_after_it_was_unloaded(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    adapter = save_adapter(LLAMA, tmp_path / "sql", seed=1, rank=4)
    flags: Flags = {"model": LLAMA, "num_blocks": 256, **HOST, "max_adapters": 2, "adapter": f"sql={adapter}"}
    (decode,) = start.nodes(("decode", flags))
    gateway = start.gateway([], [decode], model=LLAMA)
    (prompt,) = reference.prompts([TOKENS])
    await generate(gateway, prompt, GREEDY, cache_salt="ours", model="sql")
    await until_kept(decode, "host", 4)
    assert (await baton("adapter", "unload", "sql", "--target", gateway.address))[0] == 0
    (node,) = await dropped(gateway, "ours")
    assert {store["name"]: int(store["entries"]) for store in node["stores"]} == {"host": 4}


async def test_requests_that_run_during_a_drop_get_their_own_tokens(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(
        ("prefill", {"model": LLAMA, **SMALL, **HOST}), ("decode", {"model": LLAMA, **SMALL, **HOST})
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, max_queue_s=600)
    prompts = reference.prompts([100, 160, 220, TOKENS])

    async def ask() -> None:
        for _ in range(3):
            for prompt in prompts:
                await answer(gateway, reference, prompt, cache_salt="ours")

    async with asyncio.TaskGroup() as group, OperatorClient(gateway.address) as client:
        asking = [group.create_task(ask()) for _ in range(3)]
        while not all(each.done() for each in asking):
            assert [node.error for node in (await client.drop_kv("ours")).nodes] == ["", ""]


async def test_a_node_that_does_not_answer_is_named_and_the_command_fails(
    start: Machines, reference: Reference
) -> None:
    gone, stays = start.nodes(
        ("decode", {"model": LLAMA, "name": "gone"}), ("decode", {"model": LLAMA, "name": "stays"})
    )
    gateway = start.gateway([], [gone, stays], model=LLAMA)
    gone.popen.send_signal(signal.SIGKILL)
    gone.popen.wait()
    code, printed = await baton("drop-kv", "ours", "--target", gateway.address)
    assert code == 1
    lines = dict(line.split(": ", 1) for line in printed.splitlines())
    assert lines["gone"].startswith("NOT DROPPED, ")
    assert lines["stays"] == "dropped cache 0 blocks"


async def test_with_api_keys_the_client_must_be_named_because_each_has_salts_of_its_own(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    keys = {name: new_key() for name in ("alice", "bob", "root")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(name, key, operator=name == "root") for name, key in keys.items()))
    (decode,) = start.nodes(("decode", {"model": LLAMA, "num_blocks": 256}))
    gateway = start.gateway([], [decode], model=LLAMA, api_keys=file)
    (prompt,) = reference.prompts([TOKENS])

    async def cached(name: str) -> int:
        async with OperatorClient(gateway.address, api_key=keys[name]) as client:
            result = await client.complete(prompt, SamplingParams(max_tokens=2))
            return result.receipt.decode_cached_tokens

    for name in ("alice", "bob"):
        assert await cached(name) == 0
    async with OperatorClient(gateway.address, api_key=keys["root"], retry_s=0.0) as operator:
        with pytest.raises(InvalidRequest, match="names no client") as refused:
            await operator.drop_kv("")
        assert refused.value.field == "client"
        (node,) = (await operator.drop_kv("", client="nobody")).nodes
        assert (node.blocks, node.error) == (0, "")
        (node,) = (await operator.drop_kv("", client="alice")).nodes
        assert node.blocks >= TOKENS // 16
    assert await cached("alice") == 0
    assert await cached("bob") > 0

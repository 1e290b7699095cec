"""KV outlives its place in a node's cache: it comes back from host memory and files, and every token stays the same."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.kv_entries import EntryBlocks
from baton.core.sampling import SamplingParams
from baton.core.types import LoadedTokens
from baton.node.waiting import until
from baton.protos.v1 import node_status_pb2
from kvtransfer.ranked_entries import RankedEntries
from kvtransfer.stores.file_format import EntryFileName
from tests.integration.cluster import DEADLINE_S, DEEPSEEK, LLAMA, Flags, Machines, machines, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# A cache for two prompts, so that a third one takes the blocks of the first.
TOKENS = 300
SMALL: Flags = {"num_blocks": 2 * TOKENS // 16 + 4, "max_batch_tokens": 128}
HOST: Flags = {"host_cache_gib": 0.02}
WHOLE_ENTRIES = (TOKENS - 1) // 64 * 64
ENTRY_BYTES = 97 * 4096  # of LLAMA
TWO: Flags = {"tensor_parallel_size": 2}
OWN: Flags = {"tensor_parallel_size": 2, "expert_parallel": True, "attention_data_parallel": True}


def store(status: node_status_pb2.NodeStatus, name: str) -> node_status_pb2.StoreState:
    return next((each for each in status.stores if each.name == name), node_status_pb2.StoreState())


async def until_kept(node: Process, name: str, entries: int) -> None:
    await until_status(node, lambda last: store(last, name).entries >= entries)


def entry_files(directory: Path) -> set[str]:
    """The names of the files that have an entry."""
    return {path.name for path in directory.rglob("*") if EntryFileName.parse(path.name) is not None}


async def until_written(directory: Path, seen: set[str], more: int) -> None:
    """Waits until that many entries are in files with new names, and adds these names. More than a few entries that
    wait for a slow disk would not all be written."""
    assert await until(lambda: len(entry_files(directory) - seen) >= more, timeout_s=DEADLINE_S)
    seen |= entry_files(directory)


async def answer(gateway: Process, reference: Reference, prompt: list[int], *, cache_salt: str = "") -> Result:
    """The answer to a prompt; its tokens are those of the reference."""
    result = await generate(gateway, prompt, GREEDY, cache_salt=cache_salt)
    assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    return result


def damage(directory: Path) -> None:
    """Flips a bit in the KV of each file."""
    for number, path in enumerate(sorted(path for path in directory.rglob("*") if path.stat().st_size > 8192)):
        content = bytearray(path.read_bytes())
        content[len(content) // 2 + number] ^= 1 << number % 8
        path.write_bytes(content)


@pytest.fixture(scope="module", params=[LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture
def reference(references: References) -> Reference:
    return references[LLAMA]


async def test_a_prompt_that_the_caches_have_lost_comes_back_from_host_memory(
    start: Machines, model: Path, references: References
) -> None:
    reference = references[model]
    prefill, decode = start.nodes(
        ("prefill", {"model": model, **SMALL, **HOST}), ("decode", {"model": model, **SMALL, **HOST})
    )
    gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
    first, *others = reference.prompts([TOKENS] * 4)
    fresh = await answer(gateway, reference, first)
    assert fresh.proof.prefill_loaded_tokens == fresh.proof.decode_loaded_tokens == 0
    for prompt in others:
        await answer(gateway, reference, prompt)
    await until_kept(prefill, "host", 4 * WHOLE_ENTRIES // 64)
    await until_kept(decode, "host", 4 * WHOLE_ENTRIES // 64)
    again = await answer(gateway, reference, first)
    assert again.proof.prefill_loaded_tokens == again.proof.prefill_cached_tokens == WHOLE_ENTRIES
    assert again.proof.decode_loaded_tokens == again.proof.decode_cached_tokens == WHOLE_ENTRIES
    assert again.proof.prefill_loaded == again.proof.decode_loaded == LoadedTokens(host=WHOLE_ENTRIES)
    assert again.proof.prompt_tokens_sent == TOKENS - WHOLE_ENTRIES


async def test_a_conversation_goes_on_from_its_decoded_tokens(start: Machines, reference: Reference) -> None:
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **HOST}))
    gateway = start.gateway([], [decode], model=LLAMA, local_policy="prefer")
    first, *others = reference.prompts([TOKENS - 45] * 4)
    said = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    turn = await generate(gateway, first, said)
    for prompt in others:
        await answer(gateway, reference, prompt)
    await until_kept(decode, "host", 5 + 3 * ((TOKENS - 45 + 11) // 64))
    longer = [*first, *turn.token_ids, *reference.prompts([30])[0]]
    again = await answer(gateway, reference, longer)
    assert again.proof.decode_loaded_tokens == (len(first) + 79) // 64 * 64


async def test_another_salt_finds_nothing(start: Machines, reference: Reference) -> None:
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **HOST}))
    gateway = start.gateway([], [decode], model=LLAMA)
    first, *others = reference.prompts([TOKENS] * 4)
    for prompt in (first, *others):
        await answer(gateway, reference, prompt, cache_salt="tenant a")
    await until_kept(decode, "host", 4 * WHOLE_ENTRIES // 64)
    other = await answer(gateway, reference, first, cache_salt="tenant b")
    assert other.proof.decode_loaded_tokens == 0
    own = await answer(gateway, reference, first, cache_salt="tenant a")
    assert own.proof.decode_loaded_tokens > 0


@pytest.mark.parametrize("keep_s", [600.0, None])
async def test_a_session_that_is_kept_outlives_a_flood_of_others(
    start: Machines, reference: Reference, keep_s: float | None
) -> None:
    """Host memory has room for 20 entries, a quarter of them for a client that wants them kept."""
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, "host_cache_gib": 20 * ENTRY_BYTES / (1 << 30)}))
    gateway = start.gateway([], [decode], model=LLAMA)
    first, *others = reference.prompts([TOKENS] * 9)
    async with AsyncClient(gateway.address) as client:
        await client.complete(first, GREEDY, kv_keep_s=keep_s)
        await until_kept(decode, "host", WHOLE_ENTRIES // 64)
        for prompt in others:
            await client.complete(prompt, GREEDY)
        again = await client.complete(first, GREEDY)
    assert again.receipt.decode_loaded_tokens == (0 if keep_s is None else WHOLE_ENTRIES)


@pytest.mark.parametrize("keep_s", [600.0, None])
async def test_a_session_that_is_kept_in_files_outlives_a_restart_and_a_flood_after_it(
    start: Machines, reference: Reference, tmp_path: Path, keep_s: float | None
) -> None:
    """Files have room for 20 entries, host memory for 10."""
    gib = ENTRY_BYTES / (1 << 30)
    files: Flags = {"host_cache_gib": 10 * gib, "file_cache_dir": tmp_path, "file_cache_gib": 21 * gib}
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=LLAMA)
    first, *others = reference.prompts([TOKENS] * 9)
    async with AsyncClient(gateway.address) as client:
        await client.complete(first, GREEDY, kv_keep_s=keep_s)
        await until_kept(decode, "file", WHOLE_ENTRIES // 64)
    assert start.end(gateway) == start.end(decode) == 0

    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=LLAMA)
    seen = entry_files(tmp_path)
    for prompt in others:
        await answer(gateway, reference, prompt)
        await until_written(tmp_path, seen, WHOLE_ENTRIES // 64)
    again = await answer(gateway, reference, first)
    assert again.proof.decode_loaded_tokens == (0 if keep_s is None else WHOLE_ENTRIES)


async def test_files_outlive_the_node_and_serve_another_layout_and_block_size(
    start: Machines, model: Path, references: References, tmp_path: Path
) -> None:
    reference = references[model]
    files: Flags = {**HOST, "file_cache_dir": tmp_path}
    (decode,) = start.nodes(("decode", {"model": model, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=model)
    prompts = reference.prompts([TOKENS] * 2)
    for prompt in prompts:
        await answer(gateway, reference, prompt)
    await until_kept(decode, "file", 2 * WHOLE_ENTRIES // 64)
    assert start.end(gateway) == start.end(decode) == 0

    layout = "BLHNC" if model is LLAMA else "BLNC"
    (decode,) = start.nodes(
        ("decode", {"model": model, **files, "num_blocks": 40, "block_size": 24, "kv_cache_layout": layout})
    )
    gateway = start.gateway([], [decode], model=model)
    for prompt in prompts:
        back = await answer(gateway, reference, prompt)
        assert back.proof.decode_loaded_tokens == WHOLE_ENTRIES // 24 * 24
        assert back.proof.decode_loaded == LoadedTokens(file=WHOLE_ENTRIES // 24 * 24)
    status = await until_status(decode, lambda last: store(last, "file").loaded_total >= 8)
    assert store(status, "file").damaged_total == 0


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param(LLAMA, TWO, {}, id="2-ranks-to-1"),
        pytest.param(LLAMA, {}, TWO, id="1-rank-to-2", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, OWN, TWO, id="own-requests-to-2-ranks", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, TWO, {}, id="latents-of-2-ranks-to-1", marks=pytest.mark.slow),
    ],
)
async def test_files_outlive_a_change_of_the_number_of_ranks(
    start: Machines, references: References, tmp_path: Path, model: Path, before: Flags, after: Flags
) -> None:
    """What was read of the files from before is written anew, so it is there when they are gone."""
    reference = references[model]
    prompts = reference.prompts([TOKENS] * 2)

    async def serve(flags: Flags, *, loaded: int) -> None:
        (decode,) = start.nodes(("decode", {"model": model, **SMALL, **HOST, "file_cache_dir": tmp_path, **flags}))
        gateway = start.gateway([], [decode], model=model)
        for prompt in prompts:
            result = await answer(gateway, reference, prompt)
            assert result.proof.decode_loaded == LoadedTokens(file=loaded)
        kept = (2 if flags is TWO else 1) * len(prompts) * WHOLE_ENTRIES // 64
        status = await until_status(decode, lambda last: store(last, "file").entries >= kept)
        assert store(status, "file").damaged_total == 0
        assert start.end(gateway) == start.end(decode) == 0

    await serve(before, loaded=0)
    old = await asyncio.to_thread(lambda: list(tmp_path.glob("v*")))
    await serve(after, loaded=WHOLE_ENTRIES)
    if model is LLAMA:
        for folder in old:
            shutil.rmtree(folder)
    await serve(after, loaded=WHOLE_ENTRIES)


async def test_damaged_files_cost_time_and_no_token(start: Machines, reference: Reference, tmp_path: Path) -> None:
    files: Flags = {**HOST, "file_cache_dir": tmp_path}
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=LLAMA)
    prompts = reference.prompts([TOKENS] * 2)
    for prompt in prompts:
        await answer(gateway, reference, prompt)
    await until_kept(decode, "file", 2 * WHOLE_ENTRIES // 64)
    assert start.end(gateway) == start.end(decode) == 0

    damage(tmp_path)
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=LLAMA)
    for prompt in prompts:
        assert (await answer(gateway, reference, prompt)).proof.decode_loaded_tokens == 0
    await until_status(decode, lambda last: store(last, "file").damaged_total >= 2)


async def test_files_of_another_revision_of_the_weights_are_not_used(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    """The node restarts with other weights of the same shapes, and then with the first ones."""
    other = tmp_path / "other"
    shutil.copytree(LLAMA, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, other / "model.safetensors")
    references = {LLAMA: reference, other: Reference(other)}
    (prompt,) = reference.prompts([TOKENS])
    loaded = []
    for model in (LLAMA, other, LLAMA, other):
        (decode,) = start.nodes(("decode", {"model": model, **SMALL, **HOST, "file_cache_dir": tmp_path / "kv"}))
        gateway = start.gateway([], [decode], model=model)
        loaded.append((await answer(gateway, references[model], prompt)).proof.decode_loaded_tokens)
        await until_kept(decode, "file", WHOLE_ENTRIES // 64)
        assert start.end(gateway) == start.end(decode) == 0
    assert loaded == [0, 0, WHOLE_ENTRIES, WHOLE_ENTRIES]


async def test_two_ranks_keep_their_shares(start: Machines, reference: Reference) -> None:
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **HOST, "tensor_parallel_size": 2}))
    gateway = start.gateway([], [decode], model=LLAMA)
    first, *others = reference.prompts([TOKENS] * 4)
    for prompt in (first, *others):
        await answer(gateway, reference, prompt)
    await until_kept(decode, "host", 2 * 4 * WHOLE_ENTRIES // 64)
    again = await answer(gateway, reference, first)
    assert again.proof.decode_loaded_tokens == WHOLE_ENTRIES


def _save_slowly() -> None:
    save = RankedEntries.save_entries

    async def save_late(self: RankedEntries, *saves: EntryBlocks) -> tuple[int, ...]:
        await asyncio.sleep(0.5)  # as a copy of many entries over a busy link takes
        return await save(self, *saves)

    RankedEntries.save_entries = save_late  # type: ignore[method-assign]


async def test_a_request_that_waits_for_the_blocks_of_a_save_gets_them_when_it_is_over(
    start: Machines, reference: Reference
) -> None:
    """Nothing else happens on the node that could remind it of the request."""
    node: Flags = {"model": LLAMA, "num_blocks": TOKENS // 16 + 4, **HOST}
    (decode,) = start.nodes(("decode", node), prepare=_save_slowly)
    gateway = start.gateway([], [decode], model=LLAMA)
    for prompt in reference.prompts([TOKENS] * 3):
        result = await generate(gateway, prompt, GREEDY, timeout_s=DEADLINE_S / 2)  # before other limits end
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids


async def test_many_conversations_at_once_that_do_not_fit_get_their_own_tokens(
    start: Machines, reference: Reference
) -> None:
    prefill, decode = start.nodes(
        ("prefill", {"model": LLAMA, **SMALL, "host_cache_gib": 0.004}),
        ("decode", {"model": LLAMA, **SMALL, "host_cache_gib": 0.004}),
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, max_queue_s=600)
    prompts = reference.prompts([100 + 20 * number for number in range(8)])
    for _ in range(2):
        await asyncio.gather(*(answer(gateway, reference, prompt) for prompt in prompts))
    status = await until_status(decode, lambda last: last.requests_running == 0)
    assert sum(each.damaged_total for each in status.stores) == 0

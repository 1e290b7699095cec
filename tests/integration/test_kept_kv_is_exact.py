"""KV that comes back from host memory, files and other nodes is the KV that would be computed, and belongs to its
weights. In batch-invariant mode that holds for decoded tokens too, bit for bit."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.sampling import SamplingParams
from baton.core.types import NOTHING_LOADED, LoadedTokens
from tests.integration.cluster import LLAMA, Flags, Machines, machines, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References
from tests.integration.test_prefix_routing import until_cache_is_known
from tests.integration.test_pulls import KEEPS, UNLIKE, WHOLE_ENTRIES, TwoTurns, always_pull
from tests.integration.test_stores import HOST, SMALL, TOKENS, store, until_kept
from tests.unit.models.lora import merge, save_adapter

EXACT: Flags = {"model": LLAMA, "batch_invariant": True}
SAID = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = 255  # so that the last whole entry of the first turn has decoded tokens only


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture
def reference(references: References) -> Reference:
    return references[LLAMA]


def entries(directory: Path) -> dict[str, bytes]:
    """The entries that files keep, by their names."""
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.stat().st_size > 8192}


async def computed_alone(start: Machines, prompt: list[int], directory: Path) -> Result:
    """The answer of a node that has never seen the prompt, which leaves its KV in files."""
    (node,) = start.nodes(("decode", {**EXACT, **KEEPS, "file_cache_dir": directory}))
    gateway = start.gateway([], [node], model=LLAMA)
    result = await generate(gateway, prompt, DRAWN)
    assert (result.cached_tokens, result.proof.decode_loaded) == (0, NOTHING_LOADED)
    await until_kept(node, "file", WHOLE_ENTRIES)
    assert start.end(gateway) == start.end(node) == 0
    return result


def same(one: Result, other: Result) -> bool:
    """Whether two answers have the same tokens and not a bit of their logprobs differs."""
    assert len(one.logprobs) == DRAWN.max_tokens
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


async def test_decoded_kv_from_host_memory_and_from_files_has_the_bits_of_a_computed_prompt(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    flags: Flags = {**EXACT, **SMALL, **HOST, "file_cache_dir": tmp_path / "decoded"}
    first, more, *others = reference.prompts([PROMPT, 20, *[TOKENS] * 3])
    (node,) = start.nodes(("decode", flags))
    gateway = start.gateway([], [node], model=LLAMA)
    turn = await generate(gateway, first, SAID)
    second = [*first, *turn.token_ids, *more]
    for prompt in others:
        await generate(gateway, prompt, GREEDY)
    kept = WHOLE_ENTRIES + 3 * ((TOKENS + GREEDY.resolved().max_tokens - 1) // 64)
    await until_kept(node, "file", kept)
    from_host = await generate(gateway, second, DRAWN)
    assert from_host.proof.decode_loaded == LoadedTokens(host=WHOLE_ENTRIES * 64)
    assert start.end(gateway) == start.end(node) == 0
    decoded = await asyncio.to_thread(entries, tmp_path / "decoded")

    (node,) = start.nodes(("decode", flags))
    gateway = start.gateway([], [node], model=LLAMA)
    from_files = await generate(gateway, second, DRAWN)
    assert from_files.proof.decode_loaded == LoadedTokens(file=WHOLE_ENTRIES * 64)
    assert start.end(gateway) == start.end(node) == 0

    alone = await computed_alone(start, second, tmp_path / "computed")
    assert same(from_host, alone)
    assert same(from_files, alone)
    computed = await asyncio.to_thread(entries, tmp_path / "computed")
    common = decoded.keys() & computed.keys()
    assert len(common) == WHOLE_ENTRIES
    assert all(decoded[name] == computed[name] for name in common)


async def test_decoded_kv_from_another_node_has_the_bits_of_a_computed_prompt(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    """The nodes have unlike layouts and block sizes."""
    owner, reader = start.nodes(
        ("decode", {**EXACT, **KEEPS}),
        ("decode", {**EXACT, **KEEPS, **UNLIKE}),
        paused_engine=["decode"],
        prepare=always_pull,
    )
    start.let_go(reader)
    turns = TwoTurns(start, reference, owner)
    second = await turns.first()
    gateway = start.gateway([], [owner, reader], model=LLAMA)
    await until_cache_is_known(gateway, owner)
    pulled = await generate(gateway, second, DRAWN)
    assert pulled.proof.decode_loaded == LoadedTokens(peer=WHOLE_ENTRIES * 64)
    await turns.close()
    assert same(pulled, await computed_alone(start, second, tmp_path))


async def test_files_of_another_adapter_with_the_same_name_are_not_used(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    """The node restarts with another adapter, and then with the first one again."""
    (prompt,) = reference.prompts([TOKENS])
    adapters = {name: save_adapter(LLAMA, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))}
    wanted = {
        name: Reference(merge(LLAMA, adapter, tmp_path / f"merged-{name}")).greedy(prompt, 12).token_ids
        for name, adapter in adapters.items()
    }
    assert wanted["one"] != wanted["two"]
    loaded = []
    for name in ("one", "two", "one"):
        flags: Flags = {**SMALL, **HOST, "file_cache_dir": tmp_path / "kv", "adapter": f"sql={adapters[name]}"}
        (node,) = start.nodes(("decode", {"model": LLAMA, **flags}))
        gateway = start.gateway([], [node], model=LLAMA)
        result = await generate(gateway, prompt, GREEDY, model="sql")
        assert result.token_ids == wanted[name]
        loaded.append(result.proof.decode_loaded)
        status = await until_status(node, lambda last: store(last, "file").entries >= (TOKENS - 1) // 64)
        assert store(status, "file").damaged_total == 0
        assert start.end(gateway) == start.end(node) == 0
    assert loaded == [NOTHING_LOADED, NOTHING_LOADED, LoadedTokens(file=(TOKENS - 1) // 64 * 64)]

"""A conversation with a model with recurrent layers on a prefill node and a decode node: each turn sends its new blocks
and one state."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.models.families.reader import read_config
from baton.models.loading.needs import kv_cache_spec
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.integration.test_pulls import WHOLE_ENTRIES, TwoTurns, always_pull
from tests.unit.models.tiny_hybrid import MODELS

GREEDY = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
PROMPT = [3 + token % 40 for token in range(0, 7 * 90, 7)]
NEW_TEXT = [5, 9, 4, 8] * 5
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the tokenizer of a demo model."""
    path: Path = tmp_path_factory.mktemp("hybrid")
    vocabulary = Tokenizer.from_file(str(LLAMA / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**{**MODELS["lfm2"][1], "vocab_size": vocabulary})
    transformers.Lfm2ForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path)
    return path


def node_of(directory: Path) -> Flags:
    return {"model": directory, "num_blocks": 64, "block_size": BLOCK_SIZE, "max_batch_tokens": 256}


async def test_a_turn_sends_its_new_blocks_and_one_state(start: Machines, directory: Path) -> None:
    reference, spec = Reference(directory), kv_cache_spec(read_config(directory), "float32")
    prefill, decode = start.nodes(("prefill", node_of(directory)), ("decode", node_of(directory)))
    gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")
    prompt, cached = PROMPT, 0
    for _ in range(3):
        result = await generate(gateway, prompt, GREEDY)
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
        proof = result.proof
        assert proof.path is RequestPath.REMOTE
        assert proof.transport != "loopback"
        assert proof.prompt_tokens_sent == len(prompt) - cached
        assert proof.bytes_sent == proof.prompt_tokens_sent * spec.bytes_per_token + spec.bytes_per_slot
        # The KV of an answer's last token is never computed.
        cached = (len(prompt) + GREEDY.resolved().max_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        prompt = [*prompt, *result.token_ids, *NEW_TEXT]
    for each in (prefill, decode):
        await until_status(each, nothing_held)


async def test_a_prompt_that_comes_again_is_computed_from_its_last_kept_state_on(
    start: Machines, directory: Path
) -> None:
    """Of 66 tokens the prefill node computes two, and sends these."""
    prefill, decode = start.nodes(("prefill", node_of(directory)), ("decode", node_of(directory)))
    gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")
    prompt = PROMPT[:66]
    results = [await generate(gateway, prompt, GREEDY) for _ in range(2)]
    expected = Reference(directory).greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    assert [result.token_ids for result in results] == [expected, expected]
    assert [result.proof.prefill_cached_tokens for result in results] == [0, 64]
    assert [result.proof.prompt_tokens_sent for result in results] == [66, 2]
    for each in (prefill, decode):
        await until_status(each, nothing_held)


@pytest.mark.parametrize(
    ("ranks", "ranks_after"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
async def test_a_conversation_comes_back_from_host_memory_and_from_files(
    start: Machines, directory: Path, tmp_path: Path, ranks: int, ranks_after: int
) -> None:
    """Other prompts take all blocks and states of both nodes' caches between its turns, and then both nodes restart,
    maybe with another number of ranks."""
    reference = Reference(directory)
    kept: Flags = {"num_blocks": 12, "host_cache_gib": 0.02, "file_cache_gib": 0.2}
    roles = ("prefill", "decode")

    def nodes(size: int) -> tuple[Process, Process, Process]:
        flags = {**node_of(directory), **kept, "tensor_parallel_size": size}
        prefill, decode = start.nodes(*((role, {**flags, "file_cache_dir": tmp_path / role}) for role in roles))
        return prefill, decode, start.gateway([prefill], [decode], model=directory, local_policy="strict")

    async def answer(gateway: Process, prompt: list[int]) -> Result:
        result = await generate(gateway, prompt, GREEDY)
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
        return result

    prefill, decode, gateway = nodes(ranks)
    first = await answer(gateway, PROMPT)
    turn = [*PROMPT, *first.token_ids, *NEW_TEXT]
    for number in range(1, 7):
        await answer(gateway, [number + token for token in PROMPT])
    for each in (prefill, decode):
        await until_status(each, lambda last: nothing_held(last) and bool(last.stores[1].entries))
    again = await answer(gateway, PROMPT)
    assert again.proof.prefill_loaded_tokens == again.proof.prefill_cached_tokens == 64
    second = await answer(gateway, turn)
    assert second.proof.decode_loaded_tokens + second.proof.decode_cached_tokens > 0
    for each in (prefill, decode):
        await until_status(each, nothing_held)  # all is saved, and is written to files before the node ends
    for process in (gateway, prefill, decode):
        assert start.end(process) == 0

    prefill, decode, gateway = nodes(ranks_after)
    back = await answer(gateway, turn)
    assert back.proof.prefill_loaded_tokens == back.proof.prefill_cached_tokens == 128
    assert back.proof.decode_loaded_tokens == back.proof.decode_cached_tokens == 128
    for each in (prefill, decode):
        status = await until_status(each, nothing_held)
        assert sum(store.damaged_total for store in status.stores) == 0


@pytest.mark.parametrize(
    ("of_owner", "of_reader"),
    [
        pytest.param({}, {"block_size": 16, "num_blocks": 120}, id="1-rank-to-1"),
        pytest.param({"tensor_parallel_size": 2}, {}, id="2-ranks-to-1"),
        pytest.param({}, {"tensor_parallel_size": 2}, id="1-rank-to-2", marks=pytest.mark.slow),
    ],
)
async def test_a_turn_goes_on_from_the_state_that_another_node_keeps(
    start: Machines, directory: Path, of_owner: Flags, of_reader: Flags
) -> None:
    kept: Flags = {**node_of(directory), "max_batch_tokens": 128, "host_cache_gib": 0.02}
    owner, reader = start.nodes(
        ("decode", {**kept, **of_owner}),
        ("decode", {**kept, **of_reader}),
        paused_engine=["decode"],
        prepare=always_pull,
    )
    start.let_go(reader)
    turns = TwoTurns(start, Reference(directory), owner, model=directory)
    second = await turns.first()
    gateway = start.gateway([], [owner, reader], model=directory)
    result = await turns.answer(gateway, second)
    assert result.proof.decode_loaded_tokens == WHOLE_ENTRIES * 64
    status = await until_status(reader, lambda last: last.kv_loaded_tokens_total > 0)
    (peer,) = (each for each in status.stores if each.name == "peer")
    assert peer.loaded_total > WHOLE_ENTRIES  # and the pieces of a state
    assert peer.failed_total == peer.damaged_total == 0
    await turns.close()


async def test_a_turn_whose_prefill_node_is_killed_is_computed_on_the_decode_node(
    start: Machines, directory: Path
) -> None:
    """The decode node has all blocks of the turn before, and begins at an earlier state."""
    reference = Reference(directory)
    prefill, decode = start.nodes(
        ("prefill", node_of(directory)), ("decode", node_of(directory)), paused_engine=["prefill"]
    )
    gateway = start.gateway([prefill], [decode], model=directory)
    start.allow_steps(1, prefill)
    first = await generate(gateway, PROMPT, GREEDY)
    turn = [*PROMPT, *first.token_ids, *NEW_TEXT, *PROMPT]
    result = Result()
    request = asyncio.create_task(generate(gateway, turn, GREEDY, result=result))
    await until_status(decode, lambda status: status.blocks_leased > 0)
    start.kill(prefill)
    await request
    assert result.proof.path is RequestPath.LOCAL
    assert result.token_ids == reference.greedy(turn, GREEDY.resolved().max_tokens).token_ids
    assert result.cached_tokens == 128
    await until_status(decode, nothing_held)

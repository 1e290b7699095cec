"""A node pulls KV from another node's host memory and files instead of computing it, and every token stays the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.node import pull_costs, pull_link, pulls
from tests.integration.cluster import DEADLINE_S, DEEPSEEK, LLAMA, Flags, Machines, machines, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References
from tests.integration.test_stores import store, until_kept

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TOKENS = 300
WHOLE_ENTRIES = (TOKENS - 1) // 64 * 64
KEEPS: Flags = {"num_blocks": 120, "max_batch_tokens": 128, "host_cache_gib": 0.02}


def _always_pull() -> None:
    """Pulls whatever is missing, however fast this machine computes, and waits for it without a limit."""
    pull_costs.UNMEASURED_TOKENS = 64
    pull_costs._SHARE = 1e9
    pulls.PULL_S_MIN = pulls.PULL_S_MAX = DEADLINE_S
    pull_link._OPEN_S = pull_link._ARRIVE_S = DEADLINE_S


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture
def reference(references: References) -> Reference:
    return references[LLAMA]


async def answer(gateway: Process, reference: Reference, prompt: list[int], *, session_id: str = "") -> Result:
    """The answer to a prompt; its tokens are those of the reference."""
    result = await generate(gateway, prompt, GREEDY)
    assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    return result


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
async def test_the_second_turn_on_another_node_computes_only_the_new_text(
    start: Machines, references: References, model: Path
) -> None:
    """The nodes have unlike layouts and block sizes, and the first turn's tokens were decoded."""
    reference = references[model]
    layout = "BLHNC" if model is LLAMA else "BLNC"
    first, other = start.nodes(
        ("decode", {"model": model, **KEEPS}),
        ("decode", {"model": model, **KEEPS, "block_size": 32, "num_blocks": 60, "kv_cache_layout": layout}),
        prepare=_always_pull,
    )
    gateway = start.gateway([], [first, other], model=model)
    prompt = reference.prompts([TOKENS - 45])[0]
    said = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    turn = await generate(gateway, prompt, said)
    print(turn.proof)

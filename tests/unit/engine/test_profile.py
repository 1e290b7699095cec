"""How a GPU's memory is divided: the arithmetic, with the numbers of a profile."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.engine.device.profile import (
    DeviceMemory,
    MemoryPlan,
    MemoryShare,
    Profile,
    decode_step,
    most_padded,
    plan_memory,
    prefill_step,
)
from baton.engine.request import ModelFacts
from baton.models.layers.token_exchange import TokenShares
from tests.unit.engine.tiny import build

GIB = 1 << 30
PROFILE = Profile(step_bytes=2 * GIB, decode_bytes=GIB // 4)
MEMORY = DeviceMemory(total=100 * GIB, used=15 * GIB, free=84 * GIB)


def planned(
    memory: DeviceMemory = MEMORY, *, fraction: float = 0.9, graphs: bool = True, least_bytes: int = GIB
) -> MemoryPlan:
    return plan_memory(memory, PROFILE, MemoryShare(fraction, GIB, graphs=graphs), least_bytes=least_bytes)


def test_the_parts_fill_the_fraction_exactly() -> None:
    plan = planned()
    assert plan.weights + plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 90 * GIB
    assert planned(graphs=False).kv_cache == plan.kv_cache + plan.graphs


def test_memory_of_other_processes_is_not_planned() -> None:
    crowded = DeviceMemory(total=100 * GIB, used=15 * GIB, free=30 * GIB)
    plan = planned(crowded)
    assert plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 30 * GIB


def test_two_nodes_with_half_a_fraction_each_fit_on_one_gpu() -> None:
    first = planned(fraction=0.45)
    second = planned(DeviceMemory(total=100 * GIB, used=15 * GIB, free=(100 - 45 - 15) * GIB), fraction=0.45)
    assert second == first


def test_too_little_memory_for_a_cache_is_an_error_with_a_cure() -> None:
    with pytest.raises(ConfigError, match="MiB are left for the KV cache") as raised:
        planned(fraction=0.2, least_bytes=2 * GIB)
    assert raised.value.field == "gpu_memory_fraction"
    assert "--max-batch-tokens" in raised.value.cure


def test_a_plan_reads_as_a_list_of_its_parts() -> None:
    assert str(planned()).startswith("weights 15.0 GiB, KV cache 70.8 GiB, steps 2.0 GiB")


def test_a_profile_fills_its_step_with_prompts_as_long_as_the_model_takes(llama: tuple[Path, Any]) -> None:
    runner = build(llama[0], num_blocks=32).runner
    facts = replace(runner.facts, max_context_tokens=16)
    steps = [prefill_step(tokens, facts, max_batch_requests=3) for tokens in (8, 40, 64)]
    lengths = [[len(row.token_ids) for row in batch.rows] for batch in steps]
    assert lengths == [[8], [16, 16, 8], [16, 16, 16]]  # 64 tokens would need a fourth request


def test_a_runner_can_run_every_step_of_a_profile(llama: tuple[Path, Any]) -> None:
    runner = build(llama[0], num_blocks=32).runner
    for batch in (prefill_step(64, runner.facts, max_batch_requests=3), decode_step(3)):
        blocks = [block for row in batch.rows for block in row.block_ids]
        assert len(set(blocks)) == len(blocks), "each request writes to blocks of its own"
        assert len(runner.run(batch)) == len(batch.rows)


@pytest.mark.parametrize("owners", [3, 4, 8])
def test_one_profiled_step_of_several_owners_has_as_much_padding_as_a_step_can_have(owners: int) -> None:
    facts = ModelFacts(64, 16, 100, 300, (), "")
    step = most_padded(prefill_step(960, facts, max_batch_requests=16), owners)
    counts = Counter[int]()
    for row in step.shared_rows:
        counts[row.owner] += len(row.token_ids)
    assert sorted(counts) == list(range(owners))
    shares = TokenShares.of([counts[owner] for owner in range(owners)])
    assert shares.width == counts[0]
    assert shares.num_places == pytest.approx(2 * 960, rel=0.01)


def test_profiled_decodes_are_of_all_owners() -> None:
    assert [row.owner for row in decode_step(5, num_owners=2).shared_rows] == [0, 1, 0, 1, 0]

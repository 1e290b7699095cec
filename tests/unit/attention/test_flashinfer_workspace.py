"""The workspaces hold every plan of a node's batches, as flashinfer's planners allocate; what cannot fit is refused."""

import random
from dataclasses import replace

import pytest

from attention.backend import AttentionNeeds
from attention.backends.flashinfer_workspace import (
    float_workspace_bytes,
    int_workspace_bytes,
    reasons_against_mla_plans,
    reasons_against_plans,
)
from attention.platform import Platform
from attention.selection import select_backend
from baton.core.errors import ConfigError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind

NUM_SMS = 132
H200 = Platform("cuda", compute_capability=(9, 0), num_sms=NUM_SMS, packages=frozenset({"flashinfer"}))
LLAMA_70B = AttentionNeeds(
    KVKind.GQA, "cuda", "bfloat16", 128, 16, KVCacheLayout.NHD, num_heads=64, num_kv_heads=8, max_num_reqs=200
)
DEEPSEEK = AttentionNeeds(KVKind.MLA, "cuda", "bfloat16", 576, 64, KVCacheLayout.BLNC, num_heads=128)
HEADS = [(64, 8), (32, 8), (64, 64), (64, 1), (128, 1), (96, 8), (8, 1)]


def tile_rows(packed_len: int, head_size: int) -> int:
    if packed_len > 64 and head_size < 256:
        return 128
    return 64 if packed_len > 16 else 16


def ampere_plan(query_lens: list[int], kv_lens: list[int], needs: AttentionNeeds, *, captured: bool) -> tuple[int, int]:
    """(float bytes, int bytes) of a plan of its portable kernels, in pages."""
    group, num_reqs = needs.num_heads // needs.num_kv_heads, len(query_lens)
    most = 2 * NUM_SMS // needs.num_kv_heads
    packed = [length * group for length in query_lens]
    rows = tile_rows(group if captured else sum(packed) // num_reqs, needs.head_size)
    tiles = [-(-length // rows) for length in packed]
    low, high = max(128 // needs.block_size, 1), max(1, *kv_lens)
    while low < high:
        middle = (low + high) // 2
        pieces = sum(count * -(-max(length, 1) // middle) for count, length in zip(tiles, kv_lens, strict=True))
        low, high = (middle + 1, high) if pieces > most else (low, middle)
    splits = captured or low < max(1, *kv_lens)
    pieces = sum(count * -(-max(length, 1) // low) for count, length in zip(tiles, kv_lens, strict=True))
    if captured:
        pieces = max(most, -(-sum(packed) // rows) + num_reqs - 1)
    lists = 13 * pieces + 4 * (num_reqs + sum(query_lens) + 4)
    return (needs.num_heads * pieces * rows * (needs.head_size + 1) * 4 if splits else 0), lists


def hopper_plan(query_lens: list[int], needs: AttentionNeeds) -> int:
    """Int bytes of a plan of its Hopper kernels."""
    tiles = sum(-(-length // 128) for length in query_lens)
    bound = -(-sum(query_lens) // 128) + len(query_lens) - 1
    return (tiles * (1 if bound > 4096 else needs.num_heads) * 7 + NUM_SMS + 1) * 4


def ragged_lens(generator: random.Random, num_reqs: int, most_tokens: int) -> list[int]:
    lens = [1] * num_reqs
    for _ in range(generator.randrange(1, num_reqs + 1)):
        lens[generator.randrange(num_reqs)] += generator.randrange(1 + (most_tokens - sum(lens)) // 2)
    return lens


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_plan_of_batches_within_the_limits_fits(heads: tuple[int, int], head_size: int) -> None:
    generator = random.Random(0)
    limits = replace(LLAMA_70B, num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, max_num_tokens=16384)
    room = float_workspace_bytes(limits, NUM_SMS), int_workspace_bytes(limits, NUM_SMS)
    for turn in range(60):
        num_reqs = 200 if turn % 2 else generator.randrange(1, 201)
        kv_lens = [generator.randrange(1, 1 << generator.randrange(1, 12)) for _ in range(num_reqs)]
        captured = turn % 3 == 0
        query_lens = [1] * num_reqs if captured else ragged_lens(generator, num_reqs, limits.max_num_tokens)
        taken = ampere_plan(query_lens, kv_lens, limits, captured=captured)
        assert taken[0] <= room[0]
        assert max(taken[1], hopper_plan(query_lens, limits)) <= room[1]


def test_the_workspace_is_no_larger_than_its_largest_plan_by_more_than_a_page() -> None:
    taken, _ = ampere_plan([1] * 200, [40] * 200, LLAMA_70B, captured=True)
    assert taken <= float_workspace_bytes(LLAMA_70B, NUM_SMS) <= taken + 4096


def test_two_hundred_captured_requests_of_64_heads_need_more_than_the_recommended_workspace() -> None:
    # One tile of 16 rows per request would be 135 MB; flashinfer plans for half as many tiles more.
    assert float_workspace_bytes(LLAMA_70B, NUM_SMS) == 64 * 16 * (100 + 199) * 129 * 4 + 4096


def test_lists_of_many_heads_need_more_than_a_wrapper_allocates_by_itself() -> None:
    needs = replace(LLAMA_70B, num_heads=128, num_kv_heads=8, max_num_tokens=1 << 19)
    assert int_workspace_bytes(needs, NUM_SMS) > 8 << 20


def test_a_workspace_beyond_the_limit_is_a_reason_with_the_numbers() -> None:
    needs = replace(LLAMA_70B, max_num_reqs=8192)
    (reason,) = reasons_against_plans(needs, H200)
    assert reason.startswith(
        "its plans need 6.1 GiB of workspace for 64 query heads on 8 of 128, 8192 requests and 8192 tokens in a batch"
    )
    with pytest.raises(ConfigError, match=r"FLASHINFER: its plans need 6\.1 GiB"):
        select_backend(needs, platform=H200, forced="FLASHINFER")
    assert reasons_against_plans(LLAMA_70B, H200) == ()


def test_more_pieces_of_work_than_the_mla_planner_lists_are_a_reason() -> None:
    assert reasons_against_mla_plans(replace(DEEPSEEK, max_num_reqs=16_252), H200) == ()
    needs = replace(DEEPSEEK, max_num_reqs=16_253)
    with pytest.raises(ConfigError, match="FLASHINFER_MLA: its plans hold 16384 pieces of work, and 16253 requests"):
        select_backend(needs, platform=H200, forced="FLASHINFER_MLA")

"""The gated delta rule on a GPU at the widths of Qwen3-Next and Kimi-Linear: equal to its twin, the same bits for every
cut of a prompt between sub-chunks, no wait for the device, and captured once and replayed with other requests.

Legend: T token, S slot, H key head, R value head of a key head, K key channel, V value channel.
"""

import pytest
import torch
from torch import Tensor

from baton.models.kernels.recurrent import gated_delta as kernels
from baton.models.layers.recurrent.gated_delta import gated_delta, in_torch
from tests.conformance.attention.oracle import relative_error
from tests.gpu.waiting import no_waiting
from tests.unit.models.recurrent_steps import state_rows

pytestmark = pytest.mark.gpu

CHANNELS, SLOTS = 128, 6
# Key heads, value heads of each, decays by channel.
QWEN3_NEXT, KIMI = (16, 2, False), (32, 1, True)
by_family = pytest.mark.parametrize("family", [QWEN3_NEXT, KIMI], ids=["qwen3-next", "kimi-linear"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

Family = tuple[int, int, bool]
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def tokens_of(count: int, family: Family, dtype: torch.dtype, seed: int = 0) -> Five:
    heads, per_head, by_channel = family
    generator = torch.Generator("cuda").manual_seed(seed)
    mixed = torch.randn(count, heads, (2 + per_head) * CHANNELS, generator=generator, device="cuda").to(dtype)
    q, k, v = mixed.split([CHANNELS, CHANNELS, per_head * CHANNELS], dim=-1)
    shape = (count, heads, per_head, *([CHANNELS] if by_channel else []))
    log_decay = -(torch.rand(shape, generator=generator, device="cuda") ** 4) * 2
    beta = torch.rand(count, heads, per_head, generator=generator, device="cuda")
    return q, k, v.unflatten(-1, (per_head, CHANNELS)), log_decay, beta


def states(family: Family) -> Tensor:
    """[S, H, R, K, V], after other numbers of each head."""
    heads, per_head, _ = family
    generator = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn(SLOTS, heads, 384 + per_head * CHANNELS**2, generator=generator, device="cuda") / 8
    return torch.unflatten(wide[..., 384:], -1, (per_head, CHANNELS, CHANNELS))


@by_dtype
@by_family
def test_kernels_equal_their_twin(family: Family, dtype: torch.dtype) -> None:
    lens, contexts = [1, 1, 1, 300, 63, 700], [5, 0, 700, 0, 100, 1000]
    tokens, kept = tokens_of(sum(lens), family, dtype), states(family)
    kept[1] = torch.nan  # that of the decode whose sequence begins
    ours, rows = kept.clone(), state_rows(range(SLOTS), lens, contexts, device="cuda")
    expected = in_torch(*tokens, kept, rows)
    out = gated_delta(*tokens, ours, rows)
    most = 1e-4 if dtype is torch.float32 else 1e-2
    assert relative_error(out, expected) < most
    for slot in range(SLOTS):
        assert relative_error(ours[slot], kept[slot]) < most, slot


@by_dtype
@by_family
def test_prompts_equal_their_tokens_one_by_one_for_any_decay(family: Family, dtype: torch.dtype) -> None:
    """Some decays leave nothing, most are weak; the first and the last sub-chunk are parts."""
    count, context = 150, 37
    q, k, v, log_decay, beta = tokens_of(count, family, dtype)
    tokens = q, k, v, torch.where(log_decay < -1.5, -1e4, log_decay), beta
    ours, kept = states(family), states(family)
    out = gated_delta(*tokens, ours, state_rows([2], [count], [context], device="cuda"))
    most = 1e-4 if dtype is torch.float32 else 1e-2
    for token in range(count):
        row = state_rows([2], [1], [context + token], device="cuda")
        q, k, v, log_decay, beta = (each[token : token + 1] for each in tokens)
        expected = in_torch(q, k, v, log_decay, beta, kept, row)
        assert relative_error(out[token : token + 1], expected) < most, token
    assert relative_error(ours[2], kept[2]) < most


@by_dtype
@by_family
def test_cuts_between_sub_chunks_change_no_bit(family: Family, dtype: torch.dtype) -> None:
    tokens, whole, cut = tokens_of(640, family, dtype), states(family), states(family)
    expected = gated_delta(*tokens, whole, state_rows([2], [640], [0], device="cuda"))
    q, k, v, log_decay, beta = tokens
    parts = []
    for start, stop in ((0, 64), (64, 320), (320, 640)):
        rows = state_rows([2], [stop - start], [start], device="cuda")
        parts.append(
            gated_delta(q[start:stop], k[start:stop], v[start:stop], log_decay[start:stop], beta[start:stop], cut, rows)
        )
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut, whole)


@by_dtype
@by_family
def test_a_captured_prompt_leaves_snapshots_with_the_bits_of_cuts(family: Family, dtype: torch.dtype) -> None:
    """Captured without snapshots and replayed with some, then without again."""
    tokens, kept = tokens_of(300, family, dtype), states(family)
    rows = state_rows([2], [300], [0], device="cuda")
    gated_delta(*tokens, kept.clone(), rows)  # compiles
    ours, graph = kept.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta(*tokens, ours, rows)
    given = state_rows([2], [300], [0], snapshots={2: [(64, 4), (256, 1)]}, device="cuda")
    rows.snapshot_slots_PM.copy_(given.snapshot_slots_PM)
    rows.snapshot_lens_PM.copy_(given.snapshot_lens_PM)
    ours.copy_(kept)
    graph.replay()
    cut = kept.clone()
    assert torch.equal(out, gated_delta(*tokens, cut, state_rows([2], [300], [0], device="cuda")))
    assert torch.equal(ours[2], cut[2])
    assert torch.equal(ours[[0, 3, 5]], kept[[0, 3, 5]])
    for length, slot in ((64, 4), (256, 1)):
        q, k, v, log_decay, beta = (each[:length] for each in tokens)
        gated_delta(q, k, v, log_decay, beta, cut, state_rows([2], [length], [0], device="cuda"))
        assert torch.equal(ours[slot], cut[2]), length
    rows.snapshot_slots_PM.fill_(-1)
    ours.copy_(kept)
    graph.replay()
    assert torch.equal(ours[[0, 1, 3, 4, 5]], kept[[0, 1, 3, 4, 5]])


@by_family
def test_a_captured_decode_serves_other_requests(family: Family) -> None:
    tokens, kept = tokens_of(4, family, torch.bfloat16), states(family)
    rows = state_rows([0, 1], [1, 1], [3, 3], device="cuda")
    gated_delta(*tokens, kept.clone(), rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    ours = kept.clone()
    with torch.cuda.graph(graph):
        out = gated_delta(*tokens, ours, rows)
    ours.copy_(kept)
    rows.decode_slots_N.copy_(torch.tensor([4, 2, 5, -1], dtype=torch.int32))
    rows.decode_lens_N.copy_(torch.tensor([9, 1, 2, 0], dtype=torch.int32))
    graph.replay()
    expected = in_torch(*tokens, kept, rows)
    assert relative_error(out[:3], expected[:3]) < 1e-2
    assert relative_error(ours, kept) < 1e-4


@by_family
def test_launching_waits_for_nothing(family: Family) -> None:
    lens, contexts = [1, 1, 200], [5, 0, 64]
    tokens, kept = tokens_of(sum(lens), family, torch.bfloat16), states(family)
    rows = state_rows([0, 1, 2], lens, contexts, device="cuda")
    gated_delta(*tokens, kept, rows)
    with no_waiting():
        kernels.gated_delta(*tokens, kept, rows)

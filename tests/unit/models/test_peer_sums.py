"""Sums over ranks through each other's memory: one rank at a time, after what its peers send has arrived.

`test_peer_ranks.py` has ranks that run at the same time. Legend: T tokens, D channels.
"""

import pytest
import torch
from torch import Tensor

from baton.models.families.dense.gemma import GemmaRMSNorm
from baton.models.kernels import norms, peer_sums
from baton.models.kernels.peer_sums import EMPTY, TURNS, PeerMemory
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat
from baton.models.kernels.rank_sums import sum_parts_in_torch
from baton.models.layers.norms import RMSNorm
from tests.device import DEVICE
from tests.unit.models.test_quantized_rows import FORMATS, norm_of

ROWS, PROGRAMS = 12, 3
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
by_size = pytest.mark.parametrize("size", [2, 4, 8])


@pytest.fixture(params=["one shot", "two shots"])
def two_shots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    chosen: bool = request.param == "two shots"
    monkeypatch.setattr(peer_sums, "_TWO_SHOT_BYTES", 0 if chosen else 1 << 30)
    return chosen


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


class World:
    """All ranks' memory in one process, which runs one of the ranks."""

    def __init__(self, size: int, width: int, dtype: torch.dtype) -> None:
        shape = (TURNS, ROWS, size, width)
        self.places = [bits_of(torch.empty(shape, dtype=dtype, device=DEVICE)).fill_(EMPTY) for _ in range(size)]
        self.size, self.width, self.dtype = size, width, dtype
        self.arrived = [0] * ROWS

    def memory(self, rank: int) -> PeerMemory:
        return PeerMemory(
            rank,
            self.size,
            torch.tensor([places.data_ptr() for places in self.places], device=DEVICE),
            torch.zeros(ROWS, dtype=torch.int32, device=DEVICE),
            self.dtype,
            self.width,
            PROGRAMS,
        )

    def arrive(self, rank: int, parts: list[Tensor], *, two_shots: bool) -> None:
        """Fills the places of a rank with what its peers send for its next sum of so many rows."""
        for row in range(len(parts[0])):
            for peer, sent in sent_to(rank, row, parts, two_shots=two_shots).items():
                self.places[rank][self.arrived[row] % TURNS, row, peer] = bits_of(sent)
            self.arrived[row] += 1

    def assert_empty(self, rank: int) -> None:
        assert torch.all(self.places[rank] == EMPTY)

    def assert_sent(self, rank: int, parts: list[Tensor], *, two_shots: bool) -> None:
        """In its first sum, the rank has sent what its peers wait for, and nothing else."""
        for peer in set(range(self.size)) - {rank}:
            expected = torch.full_like(self.places[peer], EMPTY)
            for row in range(len(parts[0])):
                sent = sent_to(peer, row, parts, two_shots=two_shots).get(rank)
                if sent is not None:
                    expected[0, row, rank] = bits_of(sent)
            assert torch.equal(self.places[peer], expected)


def sent_to(rank: int, row: int, parts: list[Tensor], *, two_shots: bool) -> dict[int, Tensor]:
    """What a rank receives for a row, by sender."""
    own_parts = {peer: parts[peer][row] for peer in range(len(parts)) if peer != rank}
    owner = row % len(parts)
    if len(parts) == 2 or not two_shots or owner == rank:
        return own_parts
    return {owner: sum_parts_in_torch(torch.stack(parts))[row]}


def drawn(size: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Each rank's part, of numbers whose sum depends on their order."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(size, tokens, width, generator=generator)
    parts *= 10 ** torch.randn(size, tokens, width, generator=generator)
    return [part.clamp(-6e3, 6e3).to(dtype).to(DEVICE) for part in parts]


@by_dtype
@by_size
@pytest.mark.parametrize(("tokens", "width"), [(10, 40), (1, 13)])
def test_each_rank_adds_all_parts_in_their_order_and_sends_what_the_others_need(
    tokens: int, width: int, size: int, dtype: torch.dtype, two_shots: bool
) -> None:
    parts = drawn(size, tokens, width, dtype)
    expected = sum_parts_in_torch(torch.stack(parts))
    if size > 2 and dtype is torch.float32:
        assert not torch.equal(expected, sum_parts_in_torch(torch.stack(parts[::-1]))), "another order must show"
    for rank in {0, 1, size - 1}:
        world = World(size, width, dtype)
        world.arrive(rank, parts, two_shots=two_shots)
        memory = world.memory(rank)
        assert torch.equal(peer_sums.sum_parts(memory, parts[rank]), expected)
        world.assert_empty(rank)
        world.assert_sent(rank, parts, two_shots=two_shots)
        assert memory.turns_T.tolist() == [1] * tokens + [0] * (ROWS - tokens)


@by_size
def test_what_a_peer_sends_early_waits_for_its_turn(size: int, two_shots: bool) -> None:
    """A peer can be one launch ahead."""
    world = World(size, 24, torch.bfloat16)
    memory = world.memory(1)
    sums = [drawn(size, tokens, 24, torch.bfloat16, seed) for seed, tokens in enumerate((4, 9, 6, 12))]
    world.arrive(1, sums[0], two_shots=two_shots)
    for parts, early in zip(sums, [*sums[1:], None], strict=True):
        if early is not None:
            world.arrive(1, early, two_shots=two_shots)
        assert torch.equal(peer_sums.sum_parts(memory, parts[1]), sum_parts_in_torch(torch.stack(parts)))
    world.assert_empty(1)


@by_dtype
def test_a_rank_can_send_any_number(dtype: torch.dtype, two_shots: bool) -> None:
    """Also the NaN that marks an empty place. No arithmetic gives it, but memory that nobody wrote may hold it."""
    parts = [torch.full((1, 6), -0.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    parts[0][0] = torch.tensor([-0.0, 0.0, 1e-7, torch.inf, torch.nan, 1.0])
    bits_of(parts[0])[0, 5] = EMPTY
    world = World(4, 6, dtype)
    world.arrive(0, parts, two_shots=two_shots)  # in two shots, rank 0 owns the row and sends the sum
    total = peer_sums.sum_parts(world.memory(0), parts[0])
    expected = sum_parts_in_torch(torch.stack(parts))
    assert total[0].isnan().tolist() == [False] * 4 + [True] * 2
    assert torch.equal(bits_of(total)[0, :4], bits_of(expected)[0, :4])
    for peer in (1, 2, 3):
        sent = world.places[peer][0, 0, 0].view(dtype)
        assert not torch.any(bits_of(sent) == EMPTY)
        assert torch.equal(bits_of(sent)[:4], bits_of(total if two_shots else parts[0])[0, :4])
        assert sent[4:].isnan().all()


def test_rows_of_a_part_may_have_any_stride(two_shots: bool) -> None:
    parts = drawn(4, 5, 24, torch.float32)
    world = World(4, 24, torch.float32)
    world.arrive(3, parts, two_shots=two_shots)
    wide = torch.full((5, 40), torch.nan, device=DEVICE)
    wide[:, 3:27] = parts[3]
    assert torch.equal(peer_sums.sum_parts(world.memory(3), wide[:, 3:27]), sum_parts_in_torch(torch.stack(parts)))


@by_dtype
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("with_update_norm", [False, True])
def test_a_sum_with_the_norm_has_the_bits_of_separate_launches(
    with_update_norm: bool, kind: type[RMSNorm], dtype: torch.dtype, two_shots: bool
) -> None:
    norm, update_norm = norm_of(kind, 40, dtype), norm_of(kind, 40, dtype) if with_update_norm else None
    parts, stream_TD = drawn(4, 5, 40, dtype), drawn(1, 5, 40, dtype, seed=1)[0]
    world = World(4, 40, dtype)
    world.arrive(2, parts, two_shots=two_shots)
    ours_TD = stream_TD.clone()
    normed_TD = peer_sums.add_sum_and_norm(world.memory(2), parts[2], ours_TD, norm, update_norm=update_norm)
    sum_TD = sum_parts_in_torch(torch.stack(parts))
    expected_TD = norms.add_rms_norm(stream_TD, sum_TD, norm, update_norm=update_norm)
    assert isinstance(normed_TD, Tensor)
    assert torch.equal(ours_TD, stream_TD)
    assert torch.equal(normed_TD, expected_TD)
    world.assert_empty(2)


@pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)
def test_a_sum_with_the_norm_is_quantized_as_by_separate_launches(row_format: RowFormat, two_shots: bool) -> None:
    """Some formats have rows of padding, for which no rank sends anything."""
    norm = norm_of(RMSNorm, 300, torch.bfloat16)
    parts, stream_TD = drawn(4, 5, 300, torch.bfloat16), drawn(1, 5, 300, torch.bfloat16, seed=1)[0]
    world = World(4, 300, torch.bfloat16)
    world.arrive(0, parts, two_shots=two_shots)
    ours_TD = stream_TD.clone()
    ours = peer_sums.add_sum_and_norm(world.memory(0), parts[0], ours_TD, norm, row_format=row_format)
    expected = norms.norm_and_quantize(stream_TD, sum_parts_in_torch(torch.stack(parts)), norm, row_format)
    assert isinstance(ours, QuantizedRows)
    assert torch.equal(ours_TD, stream_TD)
    assert torch.equal(ours.stored_PK.view(torch.uint8), expected.stored_PK.view(torch.uint8))
    assert torch.equal(ours.scale_PC, expected.scale_PC)
    assert (ours.num_tokens, ours.dtype) == (5, torch.bfloat16)
    world.assert_empty(0)


def test_only_rows_of_the_model_s_width_and_dtype_fit_and_not_too_many() -> None:
    memory = World(2, 24, torch.bfloat16).memory(0)

    def fits(*shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return peer_sums.takes(memory, torch.empty(shape, dtype=dtype))

    assert all(fits(rows, 24) for rows in (1, ROWS))
    assert not any(fits(*shape) for shape in ((ROWS + 1, 24), (2, 23), (24,), (2, 1, 24)))
    assert not fits(2, 24, dtype=torch.float16)


def test_no_rows_need_no_peers() -> None:
    assert peer_sums.sum_parts(World(2, 24, torch.float32).memory(0), torch.empty(0, 24, device=DEVICE)).shape == (
        0,
        24,
    )

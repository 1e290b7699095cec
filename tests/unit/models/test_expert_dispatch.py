"""Tokens sent to the ranks of their experts and back: all ranks in one process, step by step, against a gather.

`test_dispatch_ranks.py` has ranks that run at the same time. Legend: R rank, T token of a rank, A row of any rank, D
channel, K choice, E expert, C copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.models.kernels.moe import expert_dispatch as dispatch
from baton.models.kernels.moe.expert_dispatch import DispatchMemory, ExpertRanks, Received
from baton.models.kernels.peer_sums import EMPTY
from baton.models.kernels.rank_sums import sum_parts_in_torch
from tests.device import DEVICE

ROWS, EXPERTS, CHOICES = 4, 24, 3
by_size = pytest.mark.parametrize("size", [2, 4, 8])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Step:
    """What the ranks send in one step.

    Attributes:
        x, weights, experts, slots: of each rank; slots below 0 are padding.
        width: the most rows of a rank.
    """

    x: list[Tensor]
    weights: list[Tensor]
    experts: list[Tensor]
    slots: list[Tensor]
    width: int

    def gathered(self, parts: Sequence[Tensor], padding: float = 0) -> Tensor:
        """All ranks' rows as after a gather."""
        out = parts[0].new_full((len(parts), self.width, *parts[0].shape[1:]), padding)
        for rank, part in enumerate(parts):
            out[rank, : len(part)] = part
        return out.flatten(0, 1)

    @property
    def is_row(self) -> Tensor:
        return self.gathered(self.slots, -1) >= 0


def drawn(counts: Sequence[int], size: int, dtype: torch.dtype, *, seed: int = 0, choose: range | None = None) -> Step:
    """Rows whose sums depend on the order of additions.

    Args:
        choose: the experts from which the routers choose; None: all.
    """
    generator = torch.Generator().manual_seed(seed)
    among = choose or range(EXPERTS)
    x, weights, experts, slots = [], [], [], []
    for count in counts:
        numbers = torch.randn(count, size, generator=generator) * 10 ** torch.randn(count, size, generator=generator)
        x.append(numbers.clamp(-500, 500).to(dtype).to(DEVICE))
        weights.append(torch.rand(count, CHOICES, generator=generator).to(DEVICE))
        chosen = [torch.randperm(len(among), generator=generator)[:CHOICES] + among.start for _ in range(count)]
        experts.append(torch.stack(chosen).to(DEVICE) if chosen else torch.empty(0, CHOICES, dtype=torch.int64))
        slots.append(torch.arange(count, device=DEVICE))
    return Step(x, weights, experts, slots, max(counts))


class World:
    """All ranks' memory in one process. Each rank holds consecutive experts, unless `ranks` say otherwise."""

    def __init__(self, size: int, width: int, dtype: torch.dtype, *, ranks: ExpertRanks | None = None) -> None:
        self.size, self.width, self.dtype = size, width, dtype
        count = dispatch.num_bytes(size, ROWS, width=width, choices=CHOICES, dtype=dtype)
        self.bytes = [torch.full((count,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        addresses = [each.data_ptr() for each in self.bytes]
        self.memories = [
            DispatchMemory(
                rank,
                size,
                torch.tensor(addresses, device=DEVICE),
                torch.zeros(ROWS, dtype=torch.int32, device=DEVICE),
                dtype,
                width,
                CHOICES,
            )
            for rank in range(size)
        ]
        in_order = torch.arange(EXPERTS, device=DEVICE).unsqueeze(1) * size // EXPERTS
        ones = torch.ones(EXPERTS, dtype=torch.int32, device=DEVICE)
        self.ranks = ranks or ExpertRanks(in_order.to(torch.int32), ones)

    def send(self, rank: int, step: Step) -> Tensor:
        return dispatch.send(
            self.memories[rank],
            step.x[rank],
            step.weights[rank],
            step.experts[rank],
            self.ranks,
            width=step.width,
            slots_T=step.slots[rank],
        )

    def receive(self, rank: int, step: Step) -> Received:
        return dispatch.receive(self.memories[rank], self.ranks, width=step.width, experts_dtype=torch.int64)

    def compute_and_return(self, rank: int, step: Step, received: Received) -> None:
        part_AD = self.part(rank, received.x_AD, received.weights_AK, received.experts_AK)
        part_AD[received.is_own_A == 0] = torch.nan  # nobody reads them
        dispatch.send_back(self.memories[rank], part_AD, received, width=step.width)

    def add_up(self, rank: int, step: Step, asked_T: Tensor, plus_TD: Tensor | None = None) -> Tensor:
        return dispatch.add_up(self.memories[rank], asked_T, width=step.width, plus_TD=plus_TD)

    def part(self, rank: int, x_AD: Tensor, weights_AK: Tensor, experts_AK: Tensor) -> Tensor:
        """Stands for a rank's experts: each multiplies a row by a number of its own."""
        rows_A1 = torch.arange(len(x_AD), device=DEVICE)[:, None]
        owners_AK = self.ranks.ranks_EC[experts_AK, rows_A1 % self.ranks.copies_E[experts_AK]]
        factors_A = torch.where(owners_AK == rank, weights_AK * (experts_AK + 1), 0).sum(1)
        return (x_AD.float() * factors_A[:, None]).to(self.dtype)

    def expected(self, step: Step) -> list[Tensor]:
        """Each rank's sums, by a gather and a sum in order. Rows of padding are 0."""
        rows = [step.gathered(each) for each in (step.x, step.weights, step.experts)]
        parts = torch.stack([self.part(rank, *rows) for rank in range(self.size)])
        total_RWD = (sum_parts_in_torch(parts) * step.is_row[:, None]).unflatten(0, (self.size, -1))
        return [total_WD[: len(x_TD)] for total_WD, x_TD in zip(total_RWD, step.x, strict=True)]

    def run(self, step: Step) -> list[Tensor]:
        everyone = range(self.size)
        asked = [self.send(rank, step) for rank in everyone]
        self.assert_asked(step, asked)  # a rank would wait forever for one that does not know it
        for rank in everyone:
            received = self.receive(rank, step)
            self.assert_received(rank, step, received)
            self.compute_and_return(rank, step, received)
        return [self.add_up(rank, step, asked[rank]) for rank in everyone]

    def owners(self, step: Step) -> Tensor:
        """The rank of each row's experts; -1 for rows that no expert computes."""
        experts_AK = step.gathered(step.experts)
        rows_A1 = torch.arange(len(experts_AK), device=DEVICE).unsqueeze(1)
        owners_AK = self.ranks.ranks_EC[experts_AK, rows_A1 % self.ranks.copies_E[experts_AK]]
        return owners_AK.masked_fill(~step.is_row.unsqueeze(1), -1)

    def assert_asked(self, step: Step, asked: Sequence[Tensor]) -> None:
        owners_AK = self.owners(step)
        bits_A = sum((owners_AK == rank).any(1).int() << rank for rank in range(self.size))
        assert isinstance(bits_A, Tensor)
        assert_equal(asked, [each[: len(own)] for each, own in zip(bits_A.split(step.width), asked, strict=True)])

    def assert_received(self, rank: int, step: Step, received: Received) -> None:
        """A rank knows all tokens' experts, and has the rows of its own experts' tokens."""
        exists_A, experts_AK = step.is_row, step.gathered(step.experts)
        is_own_A = (self.owners(step) == rank).any(1)
        assert torch.equal(received.experts_AK[exists_A], experts_AK[exists_A])
        assert torch.equal(received.weights_AK[exists_A], step.gathered(step.weights)[exists_A])
        assert not received.weights_AK[~exists_A].any()
        assert torch.equal(received.is_own_A > 0, is_own_A)
        assert torch.equal(received.x_AD[is_own_A], step.gathered(step.x)[is_own_A])

    def assert_empty(self) -> None:
        assert all(torch.all(each == 255) for each in self.bytes)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.float16), (4, torch.bfloat16), (8, torch.float32)], ids=str
)
def test_steps_of_any_rows_give_the_bits_of_a_gather_and_a_sum_in_order(size: int, dtype: torch.dtype) -> None:
    """Equal and unequal numbers of rows, in turns, so that rows differ in their turns."""
    world = World(size, 40, dtype)
    for seed, counts in enumerate(([1, 4] * (size // 2), [2] * size, [3, 1] * (size // 2))):
        step = drawn(counts, 40, dtype, seed=seed)
        expected = world.expected(step)
        assert all(each.any() for each in expected)
        assert_equal(world.run(step), expected)
        world.assert_empty()


@by_size
def test_all_tokens_may_choose_one_rank_s_experts(size: int) -> None:
    world = World(size, 40, torch.bfloat16)
    for seed, busy in enumerate((0, size - 1)):
        own = (world.ranks.ranks_EC[:, 0] == busy).nonzero().flatten().tolist()
        step = drawn([2] * size, 40, torch.bfloat16, seed=seed, choose=range(own[0], own[-1] + 1))
        assert_equal(world.run(step), world.expected(step))
    world.assert_empty()


def test_a_row_goes_only_to_ranks_with_its_experts_and_once_to_each() -> None:
    world = World(4, 16, torch.float32)
    step = drawn([2] * 4, 16, torch.float32)
    step.experts[0][:] = torch.tensor([[0, 1, 23], [12, 13, 14]], device=DEVICE)  # of ranks 0 and 3, and of rank 2
    assert world.send(0, step).tolist() == [0b1001, 0b0100]
    codes = dispatch.TURNS * ROWS * 4 * 2 * CHOICES * 4
    for rank, sent in enumerate(([0], [], [1], [0])):
        rows = world.bytes[rank][codes:].view(torch.float32).unflatten(0, (-1, ROWS, 4, 16))[0]
        for row in range(ROWS):
            if row in sent:
                assert torch.equal(rows[row, 0], step.x[0][row])
            else:
                assert torch.all(rows[row, 0].view(torch.int32) == EMPTY)


def test_padding_of_a_captured_step_is_not_sent() -> None:
    """Nor are the rows of a rank without requests, which are all padding."""
    world = World(4, 40, torch.float16)
    for seed in range(3):
        step = drawn([4] * 4, 40, torch.float16, seed=seed)
        step.slots[1][2:], step.slots[2][:] = -1, -1
        assert world.send(2, step).tolist() == [0] * 4
        asked = {rank: world.send(rank, step) for rank in (0, 1, 3)} | {2: torch.zeros(4, dtype=torch.int32).to(DEVICE)}
        for rank in range(4):
            received = world.receive(rank, step)
            world.assert_received(rank, step, received)
            world.compute_and_return(rank, step, received)
        assert_equal([world.add_up(rank, step, asked[rank]) for rank in range(4)], world.expected(step))
    world.assert_empty()


@by_size
def test_a_rank_may_be_a_step_ahead_of_one_that_it_waits_for_in_nothing(size: int) -> None:
    """Rank 0's tokens have experts of its own only, so it ends its step and sends the next one's tokens before others
    receive this one's. They must take each step's own tokens."""
    world = World(size, 24, torch.float32)
    everyone = range(size)
    steps = [drawn([2] * size, 24, torch.float32, seed=seed) for seed in range(4)]
    for step in steps:
        step.experts[0][:] = torch.arange(CHOICES)
    asked = {rank: world.send(rank, steps[0]) for rank in everyone}
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        world.compute_and_return(0, step, world.receive(0, step))
        found = {0: world.add_up(0, step, asked[0])}
        early = None if following is None else world.send(0, following)
        for rank in everyone[1:]:
            received = world.receive(rank, step)
            world.assert_received(rank, step, received)
            world.compute_and_return(rank, step, received)
        found |= {rank: world.add_up(rank, step, asked[rank]) for rank in everyone[1:]}
        assert_equal([found[rank] for rank in everyone], world.expected(step))
        if following is not None and early is not None:
            asked = {0: early} | {rank: world.send(rank, following) for rank in everyone[1:]}
    world.assert_empty()


def test_copies_take_tokens_in_turn_and_may_move_between_steps() -> None:
    """The tables are tensors, so the launches of captured steps follow them."""
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randint(4, (EXPERTS, 1), generator=generator, dtype=torch.int32) for _ in range(2))
    ranks = ExpertRanks(torch.cat([first, (first + 1) % 4], 1).to(DEVICE), torch.full((EXPERTS,), 2).int().to(DEVICE))
    world = World(4, 40, torch.bfloat16, ranks=ranks)
    for seed, copies in enumerate((2, 1, 2)):
        step = drawn([3, 2, 3, 1], 40, torch.bfloat16, seed=seed)
        assert_equal(world.run(step), world.expected(step))
        ranks.ranks_EC.copy_(torch.cat([second, (second + 2) % 4], 1))
        ranks.copies_E.fill_(copies)
    world.assert_empty()


@by_dtype
def test_any_number_can_be_sent_and_returned(dtype: torch.dtype) -> None:
    """Also the NaN that marks an empty place."""
    world = World(2, 6, dtype)
    step = drawn([1, 1], 6, dtype)
    step.x[0][0] = torch.tensor([-0.0, 0.0, 1e-7, torch.inf, torch.nan, 1.0])
    step.x[0].view(torch.int32 if dtype.itemsize == 4 else torch.int16)[0, 5] = EMPTY
    step.experts[0][0] = torch.tensor([1, 2, 23])
    asked = [world.send(rank, step) for rank in range(2)]
    for rank in range(2):
        received = world.receive(rank, step)
        sent_D, were_D = received.x_AD[0], step.x[0][0]
        assert sent_D.isnan().tolist() == [False] * 4 + [True] * 2
        assert torch.equal(sent_D[:4], were_D[:4])
        world.compute_and_return(rank, step, received)
    total_D = world.add_up(0, step, asked[0])[0]
    assert torch.equal(total_D[:4], world.expected(step)[0][0, :4])
    assert total_D[4:].isnan().all()


@by_dtype
def test_shared_experts_are_added_to_the_rounded_sum(dtype: torch.dtype) -> None:
    world = World(4, 40, dtype)
    step = drawn([2] * 4, 40, dtype)
    plus = drawn([2] * 4, 40, dtype, seed=1).x
    asked = [world.send(rank, step) for rank in range(4)]
    for rank in range(4):
        world.compute_and_return(rank, step, world.receive(rank, step))
    expected = [sum_TD + plus_TD for sum_TD, plus_TD in zip(world.expected(step), plus, strict=True)]
    assert_equal([world.add_up(rank, step, asked[rank], plus[rank]) for rank in range(4)], expected)

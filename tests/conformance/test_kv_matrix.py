"""Every node's KV to every other's: planted bytes, a real transfer over UCX from another process, every byte compared.

A usual run takes so many cases that any two values of any two parameters of `kv_matrix` meet: 82, in 20-40 s. The
whole product is 81,249,480 cases between 1,053,000 pairs of nodes, three months at the 0.1 s per case that two busy
cores took; `--kv-matrix 3/20000` runs its third share of 20,000: 53 pairs of nodes from all over it, 4,100 cases, 7
minutes.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVCacheSpec
from baton.kvcache.wire.digest import digest_on_device
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from kvtransfer.parts import Part, PartPlace
from kvtransfer.segments import Segment, SegmentPiece, cut
from tests.conformance.covering import pairs_of
from tests.conformance.kv_child import Child, child
from tests.conformance.kv_matrix import (
    BLOCK_SIZES,
    KINDS,
    LENGTHS,
    LONGEST,
    MATRIX,
    PARAMETERS,
    UNTOUCHED_D,
    UNTOUCHED_P,
    Case,
    Length,
    Nodes,
    Request,
    Trial,
    case_of,
    count_nodes,
    heads_of_rank,
    pairwise_trials,
    planted,
    requests_of,
    share_of_all,
    spread,
    untouched,
)
from tests.conformance.kv_ranks import Prefill, run_trial

# Two senders into one cache, blocks of one side in the other's middle, layers with windows that do not lie together.
NODES = Nodes(
    kind="gqa",
    dtype="bfloat16",
    windows="every-second",
    layout_p=KVCacheLayout.HND,
    layout_d=KVCacheLayout.BLNHC,
    block_p=16,
    block_d=8,
    ranks_p=2,
    ranks_d=1,
    segments="layers",
    digests=True,
)
REQUEST = Request(Length(3, "P", 3), prefix_p="partial", prefix_d="partial", chunks="several")

# The functions that move a cache's bytes, which the tests patch.
GATHER, SCATTER = "kvtransfer.movers.cpu.gather_to_wire", "kvtransfer.movers.cpu.scatter_from_wire"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" not in metafunc.fixturenames:
        return
    share, _, shares = metafunc.config.getoption("--kv-matrix").partition("/")
    trials = share_of_all(int(share), int(shares)) if share else pairwise_trials()
    metafunc.parametrize("trial", list(trials), ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill() -> AsyncIterator[Child]:
    async with child(Prefill) as process:
        yield process


@pytest.mark.timeout(600)  # for the many requests of a share; every wait has a deadline of its own
@pytest.mark.asyncio(loop_scope="module")
async def test_every_byte_lands_where_it_belongs_and_nowhere_else(trial: Trial, prefill: Child) -> None:
    await run_trial(trial, prefill.call)


# ---- faults that the check finds


async def in_this_process(trial: Trial) -> None:
    async with Prefill() as side:

        async def call(method: str, *arguments: Any) -> Any:
            return await getattr(side, method)(*arguments)

        await run_trial(trial, call)


def forget_the_rank(patch: pytest.MonkeyPatch) -> None:
    """Every sender's heads go to the cache's first heads."""
    place = Part.place

    def mutated(part: Part, segment: Segment) -> PartPlace:
        right = place(part, segment)
        return right._replace(heads=range(len(right.heads)))

    patch.setattr(Part, "place", mutated)


def shorten_windows(patch: pytest.MonkeyPatch) -> None:
    first_read = KVCacheSpec.first_read

    def mutated(spec: KVCacheSpec, layer: int, token: int) -> int:
        return first_read(spec, layer, token) + bool(spec.windows and spec.windows[layer])

    patch.setattr(KVCacheSpec, "first_read", mutated)


def lengthen_windows(patch: pytest.MonkeyPatch) -> None:
    first_read = KVCacheSpec.first_read
    patch.setattr(KVCacheSpec, "first_read", lambda spec, layer, token: max(0, first_read(spec, layer, token) - 1))


def change_scatter(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    def mutated(cache: PagedKVCache, **arguments: Any) -> None:
        change(arguments)
        scatter_from_wire(cache, **arguments)

    patch.setattr(SCATTER, mutated)


def swap_last_blocks(patch: pytest.MonkeyPatch) -> None:
    def change(arguments: dict[str, Any]) -> None:
        *first, one, other = arguments["block_ids"].tolist()
        arguments["block_ids"] = torch.tensor([*first, other, one])

    change_scatter(patch, change)


def forget_gaps_of_layers(patch: pytest.MonkeyPatch) -> None:
    def change(arguments: dict[str, Any]) -> None:
        layers = arguments["layers"]
        arguments["layers"] = range(layers.start, layers.start + len(layers))

    change_scatter(patch, change)


def swap_keys_and_values(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        cache: PagedKVCache, *, out: torch.Tensor, layers: range, digest_out: torch.Tensor, **arguments: Any
    ) -> None:
        gather_to_wire(cache, out=out, layers=layers, **arguments)
        out.copy_(out.clone().view(len(layers), 2, -1).flip(1).view(-1))
        digest_on_device(out, out=digest_out)

    patch.setattr(GATHER, mutated)


def write_beside(patch: pytest.MonkeyPatch) -> None:
    """A slot of the last block that belongs to tokens decoded later."""

    def mutated(cache: PagedKVCache, *, block_ids: torch.Tensor, **arguments: Any) -> None:
        scatter_from_wire(cache, block_ids=block_ids, **arguments)
        cache.view[0, 0, int(block_ids[-1]), -1] = 0

    patch.setattr(SCATTER, mutated)


MUTATIONS = (
    forget_the_rank,
    shorten_windows,
    lengthen_windows,
    swap_last_blocks,
    forget_gaps_of_layers,
    swap_keys_and_values,
    write_beside,
)


async def test_without_a_mutation_nothing_is_found() -> None:
    await in_this_process(Trial(NODES, (REQUEST, replace(REQUEST, prefix_d="none"))))


@pytest.mark.parametrize("mutate", MUTATIONS)
async def test_every_mutation_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="bytes are wrong"):
        await in_this_process(Trial(NODES, (REQUEST,)))


async def test_a_segment_that_is_sent_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are right; only refusals show the fault."""

    def mutated(*arguments: Any, **named: Any) -> Iterator[SegmentPiece]:
        pieces = list(cut(*arguments, **named))
        yield from (*pieces[:1], *pieces)

    monkeypatch.setattr("kvtransfer.cutting.cut", mutated)
    with pytest.raises(AssertionError, match=r"OVERLAP|LATE"):
        await in_this_process(Trial(NODES, (REQUEST,)))


# ---- the cases


def test_any_two_values_meet_in_a_case() -> None:
    met = set()
    for trial in pairwise_trials():
        (request,) = trial.requests
        row = vars(trial.nodes) | vars(request)
        assert MATRIX.allows(row)
        items = [(number, PARAMETERS[name].index(row[name])) for number, name in enumerate(PARAMETERS)]
        met |= {(one, other) for one in items for other in items if one < other}
    assert met == set(pairs_of(MATRIX))
    # Rules forbid few of them: what a layout is for, and prefixes and chunks of prompts that are too short.
    numbers = list(map(len, PARAMETERS.values()))
    all_pairs = sum(one * other for place, one in enumerate(numbers) for other in numbers[:place])
    layouts = len(GQA_LAYOUTS), len(MLA_LAYOUTS)
    wrong_layouts = 2 * (len(KINDS) - 1) * layouts[1] + 2 * layouts[0] + 2 * layouts[0] * layouts[1]
    assert all_pairs - wrong_layouts - 30 < len(met) < all_pairs - wrong_layouts


def test_the_whole_product_is_every_pair_of_nodes_with_every_request() -> None:
    layouts = len(GQA_LAYOUTS) ** 2 * (len(KINDS) - 1) + len(MLA_LAYOUTS) ** 2
    others = ("block_p", "block_d", "ranks_p", "ranks_d", "dtype", "windows", "segments", "digests")
    assert count_nodes() == layouts * np.prod([len(PARAMETERS[name]) for name in others])
    assert sorted(spread(place, 90) for place in range(90)) == list(range(90))
    shares = [list(share_of_all(share, 100_000)) for share in (1, 2, 100_000)]
    assert [len(trials) for trials in shares] == [11, 11, 10]
    nodes = [trial.nodes for trials in shares for trial in trials]
    assert len(set(nodes)) == len(nodes)
    assert {each.kind for each in nodes} == set(KINDS)
    for trials in shares:
        assert all(trial.requests == tuple(requests_of(trial.nodes)) for trial in trials)
    requests = set(requests_of(NODES))
    assert REQUEST in requests
    assert {request.length for request in requests} == set(LENGTHS)


@pytest.mark.parametrize(
    ("request_", "case"),
    [
        (Request(Length(0, "P", 1), "none", "none", "one"), Case(1, 0, 0, 0, "one")),
        (Request(Length(1, "P", 1), "partial", "whole", "one"), Case(17, 16, 16, 16, "one")),
        (Request(Length(2, "P", 0), "partial", "whole", "several"), Case(32, 16, 24, 25, "several")),
        (Request(Length(3, "D", 3), "partial", "partial", "several"), Case(27, 16, 8, 17, "several")),
        (Request(Length(2, "lcm", -1), "none", "none", "several"), Case(31, 0, 0, 17, "several")),
    ],
    ids=str,
)
def test_a_request_in_figures(request_: Request, case: Case) -> None:
    assert case_of(request_, block_p=16, block_d=8) == case


def test_jobs_are_the_parts_of_each_chunk_that_the_other_node_lacks() -> None:
    assert Case(27, 0, 8, 17, "one").jobs == ((8, 27),)
    # P computes from token 8 on, or from 16 on, in steps of two fifths.
    assert Case(27, 0, 8, 17, "several").jobs == ((8, 15), (15, 22), (22, 27))
    assert Case(27, 16, 8, 17, "several").jobs == ((8, 20), (20, 24), (24, 27))


def test_the_window_of_the_first_computed_token_is_read() -> None:
    spec = NODES.spec
    reads = Case(27, 0, 8, 17, "one").reads(spec)
    assert [np.flatnonzero(row).tolist() for row in reads] == [
        list(range(17 - window + 1 if window else 8, 27)) for window in spec.windows
    ]


# ---- the planted bytes


@pytest.mark.parametrize("dtype", PARAMETERS["dtype"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_bytes_of_its_own(kind: str, dtype: str) -> None:
    spec = replace(NODES, kind=kind, dtype=dtype).spec
    rows = np.concatenate([planted(spec, LONGEST, salt=salt)[..., :8].reshape(-1, 8) for salt in (1, 2)])
    others = np.concatenate([untouched(800_000, salt=salt).reshape(-1, 8) for salt in (UNTOUCHED_P, UNTOUCHED_D)])
    words = np.concatenate([rows, others]).view(np.uint64)
    assert len(np.unique(words)) == len(rows) + len(others)


def test_a_token_has_the_same_bytes_in_every_prompt() -> None:
    assert np.array_equal(planted(NODES.spec, 9, salt=1), planted(NODES.spec, 20, salt=1)[:, :, :9])


def test_ranks_have_an_equal_share_of_the_heads_or_the_same_ones() -> None:
    assert [heads_of_rank(rank, ranks=2, heads=4) for rank in range(2)] == [(0, 1), (2, 3)]
    assert [heads_of_rank(rank, ranks=4, heads=2) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [heads_of_rank(rank, ranks=4, heads=1) for rank in range(4)] == [(0,)] * 4


def test_lengths_lie_around_the_edges_of_either_sides_blocks() -> None:
    lengths = {length.tokens(32, 8) for length in LENGTHS}
    assert lengths == {1, 7, 8, 9, 16, 27, 31, 32, 33, 63, 64, 65, 99}
    assert max(length.tokens(max(BLOCK_SIZES), 8) for length in LENGTHS) == LONGEST

"""Selection and attention to selected tokens: the twin in torch and the kernels, each against the definition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention.backends import torch_mla
from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import make_mla_decode_plan
from attention.kernels.sparse import scores, select
from attention.kernels.sparse.select import select_slots
from attention.metadata import build_common_metadata
from attention.sparse import SparseQueries, best_keys, sparse_decodes, sparse_prefills
from tests.device import DEVICE
from tests.unit.attention.sparse_case import SparseCase, expected_slots, make_case

SIZES = [(1, 0), (2, 40), (1, 69), (3, 0)]
SELECT = {"kernels": (select_slots, DEVICE), "torch": (torch_mla.select, "cpu")}

Select = Callable[[Tensor, Tensor, Tensor, SparseQueries], Tensor]


def slots_of(case: SparseCase, chosen: Select) -> list[list[int]]:
    slots_TK = chosen(case.q_THD, case.weights_TH, case.index_layer, case.queries)
    assert slots_TK.shape == (len(case.q_THD), case.queries.width)
    return [slots[:count] for slots, count in zip(slots_TK.tolist(), case.queries.counts_T.tolist(), strict=True)]


@pytest.mark.parametrize(("chosen", "device"), SELECT.values(), ids=SELECT)
@pytest.mark.parametrize("top_k", [7, 100])
def test_the_best_tokens_that_each_query_sees(chosen: Select, device: str, top_k: int) -> None:
    case = make_case(SIZES, top_k=top_k, device=device)
    assert slots_of(case, chosen) == expected_slots(case)


@pytest.mark.parametrize(("chosen", "device"), SELECT.values(), ids=SELECT)
def test_of_equal_scores_the_first_are_taken(chosen: Select, device: str) -> None:
    case = make_case(SIZES, top_k=9, head_dim=16, num_heads=2, whole_numbers=True, device=device)
    assert slots_of(case, chosen) == expected_slots(case)


def test_selection_in_pieces_of_keys_and_of_queries_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, several programs of one query, and scores that do not fit into memory at once."""
    monkeypatch.setattr(select, "_TILE", 32)
    monkeypatch.setattr(select, "_TILES", 2)
    monkeypatch.setattr(select, "_MAX_SCORES", 400)
    monkeypatch.setattr(scores, "_KEYS_FEW", 64)
    case = make_case([(1, 30), (2, 180)], top_k=50, whole_numbers=True)
    assert slots_of(case, select_slots) == expected_slots(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_queries_read_keys_together_where_their_request_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(3, 70), (6, 20), (1, 100), (1, 5)], top_k=9, whole_numbers=True, dtype=dtype)
    monkeypatch.setattr(scores, "_MANY_QUERIES", 2)
    assert slots_of(case, select_slots) == expected_slots(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_selection_is_the_same_in_half_precision(dtype: torch.dtype) -> None:
    case = make_case([(1, 40)], top_k=11, dtype=dtype)
    assert slots_of(case, select_slots) == expected_slots(case)


def test_with_a_fixed_split_a_query_of_a_decode_or_a_prompt_is_the_same_alone_and_in_a_batch() -> None:
    case = make_case([(1, 180), (5, 70)], top_k=100)
    plan = make_mla_decode_plan(
        num_heads=5, latent_channels=12, max_num_reqs=6, max_model_len=128, num_sms=3, device=DEVICE, split_tokens=64
    )

    def attend(q_THC: Tensor, queries: SparseQueries, slots_TK: Tensor) -> Tensor:
        out = torch.full((*q_THC.shape[:2], 12), torch.nan, device=DEVICE)
        mla_decode_attention(
            q_THC, case.kv_layer, seq_lens=queries.counts_T, block_table=slots_TK, plan=plan, scale=0.3, selected=True,
            out=out,
        )  # fmt: skip
        return out

    slots_TK = select_slots(case.q_THD, case.weights_TH, case.index_layer, case.queries)
    together = attend(case.q_THC, case.queries, slots_TK)
    assert together.isfinite().all()
    for row, queries in case.queries.pieces(1):
        rows = slice(row, row + 1)
        slots_1K = select_slots(case.q_THD[rows], case.weights_TH[rows], case.index_layer, queries)
        assert torch.equal(attend(case.q_THC[rows], queries, slots_1K), together[rows])


def test_padding_selects_nothing() -> None:
    scores_TS = torch.randn(2, 6)
    assert (best_keys(scores_TS, torch.tensor([0, 2]), 3)[0] == -1).all()
    assert best_keys(scores_TS, torch.tensor([0, 2]), 3)[1].tolist() == [0, 1, -1]


@pytest.mark.parametrize("top_k", [7, 100])
@pytest.mark.parametrize("split_tokens", [None, 64])
def test_the_kernel_attends_to_the_selected_tokens_only(top_k: int, split_tokens: int | None) -> None:
    case = make_case(SIZES, top_k=top_k)
    plan = make_mla_decode_plan(
        num_heads=5, latent_channels=12, max_num_reqs=32, max_model_len=128, num_sms=3, device=DEVICE,
        split_tokens=split_tokens,
    )  # fmt: skip
    slots_TK = torch.zeros(len(case.q_THC), case.queries.width, dtype=torch.int32)
    for row, slots in zip(slots_TK, expected_slots(case), strict=True):
        row[: len(slots)] = torch.tensor(slots)
    out = torch.full((len(case.q_THC), 5, 12), torch.nan, device=DEVICE)
    mla_decode_attention(
        case.q_THC,
        case.kv_layer,
        seq_lens=case.queries.counts_T,
        block_table=slots_TK.to(DEVICE),
        plan=plan,
        scale=0.3,
        selected=True,
        out=out,
    )
    torch.testing.assert_close(out.cpu(), attended(case), atol=1e-5, rtol=1e-4)


def test_the_twin_attends_to_the_selected_tokens_only() -> None:
    case = make_case([*SIZES, (40, 3)], top_k=7, device="cpu")
    slots_TK = torch_mla.select(case.q_THD, case.weights_TH, case.index_layer, case.queries)
    out = torch.full((len(case.q_THC), 5, 12), torch.nan)
    torch_mla.attend_selected(case.q_THC, case.kv_layer, slots_TK, case.queries, scale=0.3, k_scale=None, out=out)
    torch.testing.assert_close(out, attended(case), atol=1e-5, rtol=1e-4)


def attended(case: SparseCase) -> Tensor:
    rows = []
    for row, (request, slots) in enumerate(zip(case.requests(), expected_slots(case), strict=True)):
        places = {int(slot): place for place, slot in enumerate(case.slots[request])}
        latents = case.latents[request][[places[slot] for slot in slots]]
        weights_HK = (case.q_THC[row].float().cpu() @ latents.T * 0.3).softmax(-1)
        rows.append(weights_HK @ latents[:, :12])
    return torch.stack(rows)


def test_batches_whose_queries_see_no_more_than_top_k_tokens_are_dense() -> None:
    common, _ = build_common_metadata(
        query_lens=[1, 1, 6], context_lens=[3, 7, 2], block_tables=[[0], [1, 2], [3, 4]], block_size=4, device=DEVICE
    )

    def decodes(top_k: int, *, always: bool = False) -> SparseQueries | None:
        return sparse_decodes(common, 2, block_size=4, top_k=top_k, always=always, on_host=False)

    assert decodes(8) is None
    assert decodes(0, always=True) is None
    assert decodes(8, always=True) is not None
    few = decodes(7)
    assert few is not None
    assert (few.counts_T.tolist(), few.width, few.max_keys) == ([4, 7], 7, 8)
    assert sparse_prefills(common, 2, top_k=8, always=False) is None
    prefills = sparse_prefills(common, 2, top_k=7, always=False)
    assert prefills is not None
    assert prefills.seq_lens_T.tolist() == [3, 4, 5, 6, 7, 8]
    assert prefills.ranges == ((0, 6, 8),)


def test_pieces_of_queries_keep_their_requests() -> None:
    queries = make_case([(3, 4), (5, 0)], top_k=3).queries
    pieces = [(start, piece.ranges, piece.counts_T.tolist()) for start, piece in queries.pieces(4)]
    assert pieces == [(0, ((0, 3, 7), (3, 4, 1)), [3, 3, 3, 1]), (4, ((0, 0, 0), (0, 4, 5)), [2, 3, 3, 3])]

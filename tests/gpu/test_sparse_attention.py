"""Sparse attention at DeepSeek-V3.2's widths on a GPU: selection and attention against the definition in float64, and
captured decode steps that are replayed with other lengths."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, MLADims
from attention.backends.triton_mla import TritonMLA
from attention.kernels.sparse.scores import paged_index_scores
from attention.parameters import AttentionParameters
from attention.platform import probe_platform
from attention.sparse import best_keys, index_scores, slots_of
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.unit.attention.sparse_case import SparseCase, expected_slots, make_case

pytestmark = pytest.mark.gpu

HEADS, LATENT, ROTARY, TOP_K, SCALE = 128, 512, 64, 2048, 192**-0.5
LAYER = AttentionParameters(scale=SCALE)


def backend(*, batch_invariant: bool = False) -> TritonMLA:
    needs = AttentionNeeds(
        KVKind.MLA, "cuda", "bfloat16", LATENT + ROTARY, 64, KVCacheLayout.BLNC, num_heads=HEADS, max_num_reqs=64,
        max_model_len=65536, features=frozenset({AttentionFeature.SPARSE}), batch_invariant=batch_invariant,
        mla=MLADims(128, ROTARY, 128, LATENT, TOP_K),
    )  # fmt: skip
    return TritonMLA(needs, probe_platform("cuda"), context_workspace_tokens=64)


def case_of(sizes: list[tuple[int, int]], **options: bool) -> SparseCase:
    return make_case(
        sizes, top_k=TOP_K, num_heads=64, head_dim=128, query_heads=HEADS, latent=LATENT, rotary=ROTARY,
        block_size=64, dtype=torch.bfloat16, device="cuda", **options,
    )  # fmt: skip


def chosen(case: SparseCase) -> Tensor:
    return backend().select(case.q_THD, case.weights_TH, case.index_layer, case.queries)


def position_of(case: SparseCase, request: int) -> dict[int, int]:
    return {slot: position for position, slot in enumerate(case.slots[request].tolist())}


def check_selection(case: SparseCase, slots_TK: Tensor) -> None:
    """The selected tokens are different ones, in order, and none that is better by more than rounding is left out."""
    for row, request in enumerate(case.requests()):
        count, seen = int(case.queries.counts_T[row]), int(case.queries.seq_lens_T[row])
        places = position_of(case, request)
        positions = [places[slot] for slot in slots_TK[row, :count].tolist()]
        assert positions == sorted(set(positions))
        assert not positions or positions[-1] < seen
        keys = case.index_keys[request][:seen].double()
        dots_HS = (case.q_THD[row].double().cpu() @ keys.T).relu()
        scores_S = (case.weights_TH[row].double().cpu()[:, None] * dots_HS).sum(0)
        left_out = scores_S.clone()
        left_out[positions] = -torch.inf
        assert left_out.max() <= scores_S[positions].min() + 1e-3 * scores_S.abs().max()


def attended(case: SparseCase, slots_TK: Tensor) -> Tensor:
    rows = []
    for row, request in enumerate(case.requests()):
        places = position_of(case, request)
        count = int(case.queries.counts_T[row])
        latents = case.latents[request][[places[slot] for slot in slots_TK[row, :count].tolist()]].double()
        weights_HK = (case.q_THC[row].double().cpu() @ latents.T * SCALE).softmax(-1)
        rows.append(weights_HK @ latents[:, :LATENT])
    return torch.stack(rows)


def check_attention(case: SparseCase, slots_TK: Tensor, out: Tensor) -> None:
    expected = attended(case, slots_TK)
    assert float((out.double().cpu() - expected).norm() / expected.norm()) < 1e-2


DECODES = [(1, 0), (1, 100), (1, 2047), (1, 2048), (1, 5000), (1, 20000)]


@pytest.mark.parametrize(
    "sizes", [DECODES, [(1, 40000)], [(70, 3000), (5, 0), (3, 9000)]], ids=["decodes", "one long", "prefills"]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_selection_and_attention_equal_the_definition(sizes: list[tuple[int, int]], batch_invariant: bool) -> None:
    case, made = case_of(sizes), backend(batch_invariant=batch_invariant)
    slots_TK = made.select(case.q_THD, case.weights_TH, case.index_layer, case.queries)
    check_selection(case, slots_TK)
    out = torch.full((len(case.q_THC), HEADS, LATENT), torch.nan, dtype=torch.bfloat16, device="cuda")
    made.attend_selected(case.q_THC, case.kv_layer, slots_TK, case.queries, layer=LAYER, out=out)
    check_attention(case, slots_TK, out)


def test_of_equal_scores_the_first_are_taken() -> None:
    """Whole numbers have exact sums, so the kernels' selection is the definition's."""
    case = case_of([(1, 5000), (1, 20000), (4, 3000)], whole_numbers=True)
    slots_TK = chosen(case)
    counts = case.queries.counts_T.tolist()
    assert [row[:count] for row, count in zip(slots_TK.tolist(), counts, strict=True)] == expected_slots(case)


def test_the_twin_selects_the_same_on_the_gpu() -> None:
    case = case_of([(1, 5000)], whole_numbers=True)
    k_SD = case.index_keys[0].cuda()
    positions_TK = best_keys(index_scores(case.q_THD, case.weights_TH, k_SD), case.queries.seq_lens_T, TOP_K)
    assert torch.equal(slots_of(positions_TK, case.queries.block_table, 64), chosen(case))


def test_a_query_of_a_decode_or_a_prompt_has_the_same_result_alone_and_in_a_batch() -> None:
    made, case = backend(batch_invariant=True), case_of([*DECODES, (70, 3000), (5, 0)])
    together = torch.empty(len(case.q_THC), HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
    slots_TK = made.select(case.q_THD, case.weights_TH, case.index_layer, case.queries)
    made.attend_selected(case.q_THC, case.kv_layer, slots_TK, case.queries, layer=LAYER, out=together)
    for row in (*range(len(DECODES) + 2), len(case.q_THC) - 6, len(case.q_THC) - 1):
        ((_, queries),) = [each for each in case.queries.pieces(1) if each[0] == row]
        rows, alone = slice(row, row + 1), torch.empty_like(together[:1])
        slots_1K = made.select(case.q_THD[rows], case.weights_TH[rows], case.index_layer, queries)
        count = int(queries.counts_T[0])
        assert torch.equal(slots_1K[0, :count], slots_TK[row, :count])
        made.attend_selected(case.q_THC[rows], case.kv_layer, slots_1K, queries, layer=LAYER, out=alone)
        assert torch.equal(alone, together[rows])


def test_a_score_has_the_same_bits_for_any_number_of_queries() -> None:
    """Many queries of a request share products; 70 and 5 are no multiples of the queries that do."""
    case = case_of([(70, 3000), (5, 0), (3, 9000)])
    num_keys = case.queries.max_keys
    of_all_TS = torch.zeros(len(case.q_THD), num_keys, device="cuda")
    paged_index_scores(
        case.q_THD, case.weights_TH, case.index_layer, case.queries, range(len(of_all_TS)), out_TS=of_all_TS
    )
    for row in range(len(of_all_TS)):
        alone_1S = torch.zeros(1, num_keys, device="cuda")
        rows = range(row, row + 1)
        paged_index_scores(case.q_THD, case.weights_TH, case.index_layer, case.queries, rows, out_TS=alone_1S)
        assert torch.equal(alone_1S[0], of_all_TS[row])


def test_a_captured_step_is_right_for_other_lengths() -> None:
    made, case = backend(), case_of(DECODES)
    lens_T, counts_T = case.queries.seq_lens_T.clone(), case.queries.counts_T.clone()
    queries = replace(case.queries, seq_lens_T=lens_T, counts_T=counts_T, ranges=())
    out = torch.empty(len(case.q_THC), HEADS, LATENT, dtype=torch.bfloat16, device="cuda")

    def step() -> Tensor:
        slots_TK = made.select(case.q_THD, case.weights_TH, case.index_layer, queries)
        made.attend_selected(case.q_THC, case.kv_layer, slots_TK, queries, layer=LAYER, out=out)
        return slots_TK

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots_TK = step()
    for seen in ([1, 101, 2048, 2049, 5001, 20001], [1, 7, 64, 2000, 4000, 2049]):
        lens_T.copy_(torch.tensor(seen, dtype=torch.int32))
        counts_T.copy_(lens_T.clamp(max=TOP_K))
        graph.replay()
        torch.cuda.synchronize()
        replayed = replace(case, queries=queries)
        check_selection(replayed, slots_TK)
        check_attention(replayed, slots_TK, out)


def test_padding_reads_nothing() -> None:
    case = case_of([(1, 3000), (1, 100)])
    queries = replace(
        case.queries,
        seq_lens_T=torch.zeros_like(case.queries.seq_lens_T),
        counts_T=torch.zeros_like(case.queries.counts_T),
    )
    made = backend()
    slots_TK = made.select(case.q_THD, case.weights_TH, case.index_layer, queries)
    out = torch.full((2, HEADS, LATENT), torch.nan, dtype=torch.bfloat16, device="cuda")
    made.attend_selected(case.q_THC, case.kv_layer, slots_TK, queries, layer=LAYER, out=out)
    assert not out.any()

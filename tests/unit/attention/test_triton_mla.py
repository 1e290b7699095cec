"""TRITON_MLA's builder and memory. Its numbers are those of `tests.conformance.attention`."""

from dataclasses import replace

import pytest
import torch

from attention.backend import AttentionNeeds, MLADims, RaggedLens
from attention.backends.triton_mla import TritonMLA, TritonMLAMetadata
from attention.metadata import build_common_metadata
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.device import DEVICE

DIMS = MLADims(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, kv_lora_rank=32)


def backend(
    *, context_workspace_tokens: int = 8, kv_dtype: str = "", batch_invariant: bool = False, top_k: int = 0
) -> TritonMLA:
    needs = AttentionNeeds(
        KVKind.MLA, DEVICE, "bfloat16", 48, 4, KVCacheLayout.LBNC, kv_dtype=kv_dtype, num_heads=3, max_num_reqs=8,
        max_model_len=64, mla=replace(DIMS, top_k=top_k), batch_invariant=batch_invariant,
    )  # fmt: skip
    platform = Platform("cuda", num_sms=2)
    return TritonMLA(needs, platform, context_workspace_tokens=context_workspace_tokens)


def test_a_decode_steps_metadata_are_the_common_tensors_themselves() -> None:
    made = backend()
    step = build_common_metadata(
        query_lens=[1, 1], context_lens=[3, 9], block_tables=[[0], [1, 2, 3]], block_size=4, device=DEVICE
    )[0]
    metadata = made.builder.build_for_cudagraph_capture(step)
    assert made.builder.can_run_in_cudagraph(step)
    assert metadata.seq_lens.data_ptr() == step.seq_lens.data_ptr()
    assert metadata.block_table.data_ptr() == step.block_table_tensor.data_ptr()
    assert metadata.new_tokens.slot_mapping.data_ptr() == step.slot_mapping.data_ptr()
    assert metadata.num_decode_tokens == metadata.num_actual_tokens == 2
    assert metadata.prefill is None
    assert metadata.context_chunks == ()


def test_a_batch_with_prefills_runs_outside_of_graphs_and_decodes_come_first() -> None:
    made = backend()
    step = build_common_metadata(
        query_lens=[1, 3], context_lens=[3, 9], block_tables=[[0], [1, 2, 3]], block_size=4, device=DEVICE
    )[0]
    metadata = made.builder.build(0, step)
    assert not made.builder.can_run_in_cudagraph(step)
    assert metadata.num_decode_tokens == 1
    assert metadata.prefill is not None
    assert [chunk.num_tokens for chunk in metadata.context_chunks] == [8, 1]
    swaps: list[tuple[int, int]] = []
    assert made.builder.reorder_batch([3, 1], lambda first, second: swaps.append((first, second)))
    assert swaps == [(0, 1)]


def test_in_batch_invariant_mode_prompts_attend_to_latents_in_runs_of_query_tiles() -> None:
    step = build_common_metadata(
        query_lens=[1, 3, 1], context_lens=[3, 9, 0], block_tables=[[0], [1, 2, 3], [4]], block_size=4, device=DEVICE
    )[0]
    metadata = backend(batch_invariant=True).builder.build(0, step)
    assert metadata.context_chunks == ()
    (run,) = metadata.absorbed_prefills
    assert (run.start, run.stop) == (0, 4)
    assert isinstance(run.metadata, TritonMLAMetadata)
    assert run.metadata.block_table.data_ptr() == step.block_table_tensor.data_ptr()
    assert run.metadata.tiles is not None
    assert sorted(run.metadata.tiles.tolist()) == [[2, 3, 1], [3, 1, 2]]
    selected = backend(batch_invariant=True, top_k=4).builder.build(0, step)
    assert selected.absorbed_prefills == ()
    assert selected.sparse_prefills is not None
    assert backend().builder.build(0, step).absorbed_prefills == ()


def test_the_workspace_holds_latents_in_the_models_dtype_for_any_cache_dtype() -> None:
    for kv_dtype in ("", "float8_e4m3fn"):
        workspace = backend(kv_dtype=kv_dtype).workspace
        assert workspace.shape == (8, 48)
        assert workspace.dtype == torch.bfloat16
        assert workspace.device.type == DEVICE


def test_a_workspace_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_workspace_tokens is 0"):
        backend(context_workspace_tokens=0)


def test_a_layer_with_other_heads_than_the_backend_was_made_for_is_refused() -> None:
    made = backend()
    step = build_common_metadata(query_lens=[1], context_lens=[3], block_tables=[[0]], block_size=4, device=DEVICE)[0]
    with pytest.raises(InternalError, match="has 5 heads, the backend was made for 3"):
        made.forward(
            torch.zeros(1, 5, 48, dtype=torch.bfloat16, device=DEVICE),
            None,
            None,
            torch.zeros(1, 1, 4, 1, 48, dtype=torch.bfloat16, device=DEVICE),
            made.builder.build(0, step),
            layer=AttentionParameters(scale=1.0),
            out=torch.zeros(1, 5, 32, dtype=torch.bfloat16, device=DEVICE),
        )


def test_attention_to_decompressed_keys_is_written_where_the_caller_wants_it() -> None:
    starts = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    lens = RaggedLens(starts, starts, (0, 2), (0, 2))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, device=DEVICE) for size in (32, 32, 16))
    out = torch.full((2, 3, 16), torch.nan, device=DEVICE)
    attended, lse_HT = backend().attend(q, k, v, lens=lens, causal=True, scale=0.2, out=out)
    assert attended is out
    scores_HTS = torch.einsum("thd,shd->hts", q.double(), k.double()) * 0.2
    scores_HTS.masked_fill_(torch.ones(2, 2, device=DEVICE).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,shv->thv", scores_HTS.softmax(-1), v.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse_HT.double(), scores_HTS.logsumexp(-1), atol=1e-5, rtol=1e-4)

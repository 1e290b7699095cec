"""XFORMERS divides a batch between xformers' decodes and the unified kernel, layer by layer. xformers itself, which is
on GPU machines only, is written out in torch here."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionFeature
from attention.backends.xformers import XFormers
from tests.conformance.attention.gqa import Shape, gqa_case, needs_of
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import PLATFORM
from tests.conformance.attention.settings import Setting

BATCH = [(1, 0), (1, 40), (1, 129), (9, 0), (5, 70)]
PLAIN = Setting("plain")
WINDOW = Setting("window", frozenset({AttentionFeature.SLIDING_WINDOW}), sliding_window=7)
SOFT_CAP = Setting("soft cap", frozenset({AttentionFeature.SOFT_CAP}), logits_soft_cap=2.0)
SPLIT_K = object()


@dataclass
class PagedBias:
    block_tables: Tensor
    page_size: int
    k_seqinfo: SimpleNamespace

    @classmethod
    def from_seqlens(
        cls, *, q_seqlen: list[int], kv_seqlen: list[int], block_tables: Tensor, page_size: int, device: object
    ) -> "PagedBias":
        return cls(block_tables, page_size, SimpleNamespace(seqlen=torch.tensor(kv_seqlen)))


class XFormersInTorch:
    """`rows`: how many decodes each call had."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def memory_efficient_attention_forward(
        self, q_1RHGD: Tensor, k_1SHGD: Tensor, v_1SHGD: Tensor, *, attn_bias: PagedBias, scale: float, op: object
    ) -> Tensor:
        assert op is SPLIT_K
        assert attn_bias.page_size % 64 == 0
        self.rows.append(q_1RHGD.shape[1])
        out = torch.empty_like(q_1RHGD)
        for request, seq_len in enumerate(attn_bias.k_seqinfo.seqlen.tolist()):
            positions = torch.arange(seq_len, device=q_1RHGD.device)
            blocks = attn_bias.block_tables[request][positions // attn_bias.page_size].long()
            slots = blocks * attn_bias.page_size + positions % attn_bias.page_size
            scores_HGS = torch.einsum("hgd,shgd->hgs", q_1RHGD[0, request], k_1SHGD[0, slots]) * scale
            out[0, request] = torch.einsum("hgs,shgd->hgd", scores_HGS.softmax(-1), v_1SHGD[0, slots])
        return out


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> XFormersInTorch:
    written_out = XFormersInTorch()
    attn_bias: Any = ModuleType("xformers.ops.fmha.attn_bias")
    attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask = PagedBias
    fmha: Any = ModuleType("xformers.ops.fmha")
    fmha.attn_bias = attn_bias
    fmha.flash = SimpleNamespace(FwOp=SimpleNamespace(SUPPORTED_ATTN_BIAS_TYPES=()))
    fmha.triton_splitk = SimpleNamespace(FwOp=SPLIT_K)
    fmha.memory_efficient_attention_forward = written_out.memory_efficient_attention_forward
    for module in (fmha, attn_bias):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return written_out


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("setting", [PLAIN, WINDOW, SOFT_CAP], ids=lambda setting: setting.name)
def test_every_layer_equals_the_definition_and_xformers_decodes_what_it_can(
    xformers: XFormersInTorch, setting: Setting, block_size: int
) -> None:
    shape = Shape(block_size=block_size, head_dim=32)
    backend = XFormers(needs_of(setting, shape), PLATFORM, context_workspace_tokens=1)
    case = gqa_case(backend, BATCH, setting, shape)
    assert relative_error(case.run(), case.expected()) < 2e-5
    assert xformers.rows == ([3] if setting is PLAIN and block_size % 64 == 0 else [])


def test_layers_with_and_without_a_window_share_a_batch(xformers: XFormersInTorch) -> None:
    shape = Shape(block_size=64, head_dim=32)
    backend = XFormers(needs_of(PLAIN, shape), PLATFORM, context_workspace_tokens=1)
    for setting in (PLAIN, WINDOW):
        case = gqa_case(backend, BATCH, setting, shape)
        assert relative_error(case.run(), case.expected()) < 2e-5
    assert xformers.rows == [3]


def test_blocks_of_multiples_of_16_are_declared() -> None:
    assert XFormers.capabilities.block_sizes == frozenset(range(16, 513, 16))

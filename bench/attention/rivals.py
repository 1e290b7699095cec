"""Other libraries' attention kernels that no backend of ours calls, called as their documentation shows."""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.attention.batches import Lengths
from bench.attention.measure import microseconds

CUDNN = "torch with cuDNN"
FLASHINFER_RAGGED = "flashinfer"
_WORKSPACE_BYTES = 128 << 20


def cudnn_us(
    lengths: Lengths, *, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, scale: float
) -> float:
    """Microseconds of a causal prefill of requests of one length."""
    q, k, v = (
        torch.randn(
            lengths.num_reqs, lengths.query_len, heads, channels, dtype=torch.bfloat16, device="cuda"
        ).transpose(1, 2)
        for heads, channels in ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return microseconds(
            [
                lambda: scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=num_heads != num_kv_heads
                )
            ]
        )


def flashinfer_prefill(
    q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, lengths: Lengths, *, scale: float
) -> Callable[[], Tensor]:
    """A planned call of its causal prefill over adjacent keys and values."""
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(lengths.num_reqs + 1, dtype=torch.int32) * lengths.query_len
    wrapper.plan(
        starts,
        starts,
        num_qo_heads=q_THD.shape[1],
        num_kv_heads=k_SHD.shape[1],
        head_dim_qk=k_SHD.shape[2],
        head_dim_vo=v_SHV.shape[2],
        causal=True,
        sm_scale=scale,
        q_data_type=q_THD.dtype,
    )

    def call() -> Tensor:
        out: Tensor = wrapper.run(q_THD, k_SHD, v_SHV)
        return out

    return call

"""Cascade attention over a latent cache: decodes that share keys attend to them in tiles of several rows, and each row
attends to its other keys as usual.

All heads of all rows read the same latents, so the kernels compute a tile as one request with more heads. Legend: R
rows, T tiles of rows, M members of a tile (its rows' heads), H heads, L latent channels, C latent plus rotary channels,
B blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.backend import AttentionNeeds
from attention.kernels.merge import merge_attn_states
from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import TILE, MLADecodePlan, tile_tokens_of
from attention.metadata import CommonAttentionMetadata
from attention.prefix_group import PrefixGroup
from baton.kvcache.spec import KV_DTYPE_BYTES

# Nanoseconds on an H200, derived from other measurements. A multiprocessor's time for a byte of a row that reads alone,
# if the L2 cache has it and all read 5.5 TB/s; for a key of a tile of 64 members, from 64 rows of 64 heads (see
# `attention.kernels.mla.hopper`); for a head's results, which are written twice and read twice in float32; and the
# further launches with a margin, as for GQA.
_BYTE_NS, _TILE_KEY_NS, _HEAD_NS, _LAUNCH_NS = 0.024, 50.0, 2.7, 30_000.0


class LatentGroupCosts(NamedTuple):
    """Estimates what a group of decodes over latents saves in each layer.

    Args:
        tile_rows: rows of a tile; with 1, nothing is saved.
        key_bytes: of a token's latent and rotary key.
    """

    num_heads: int
    tile_rows: int
    key_bytes: int
    num_sms: int

    @classmethod
    def of(cls, needs: AttentionNeeds, *, num_sms: int) -> "LatentGroupCosts":
        key_bytes = needs.head_size * KV_DTYPE_BYTES[needs.cache_dtype]
        return cls(needs.num_heads, tile_tokens_of(needs.num_heads), key_bytes, num_sms)

    def saved(self, *, num_rows: int, span: int, num_keys: int) -> float:
        """As in `attention.prefix_group.GroupSavings`, in nanoseconds."""
        alone = _BYTE_NS * self.key_bytes * num_rows * num_keys / self.num_sms
        # A tile begins at a multiple of its rows. Without a row of the group it has no keys.
        num_tiles = min(num_rows, (span + self.tile_rows - 2) // self.tile_rows + 1)
        together = _TILE_KEY_NS * TILE * -(-num_tiles * -(-num_keys // TILE) // self.num_sms)
        return alone - together - span * self.num_heads * _HEAD_NS - _LAUNCH_NS


@dataclass(frozen=True)
class SharedLatents:
    """The keys that a group of decodes shares, and each row's other keys.

    Attributes:
        tile_lens_T: int32, the shared keys of each tile of rows; 0: no row of the tile is in the group.
        table_1B: int32, the blocks of the shared keys.
        lens_R: int32, the shared keys of each row; 0: the row is not in the group.
        own_lens_R: int32, each row's other keys.
        own_table_RB: int32, their blocks.
    """

    tile_lens_T: Tensor
    table_1B: Tensor
    lens_R: Tensor
    own_lens_R: Tensor
    own_table_RB: Tensor


def share_latents(
    common: CommonAttentionMetadata, group: PrefixGroup, *, block_size: int, tile_rows: int
) -> SharedLatents:
    """Splits the rows' keys at the start of a step. Reads no memory of the host."""
    num_rows = common.num_reqs
    group.split(common, block_size)
    lens_R = group.lens_N[:num_rows]
    return SharedLatents(
        tile_lens_T=pad(lens_R, (0, -num_rows % tile_rows)).view(-1, tile_rows).amax(1),
        table_1B=group.tables[:1],
        lens_R=lens_R,
        own_lens_R=group.own_lens_N[:num_rows],
        own_table_RB=group.tables[1 : num_rows + 1],
    )


def attend_to_shared_latents(
    q_RHC: Tensor,
    kv_layer: Tensor,
    shared: SharedLatents,
    *,
    tile_plan: MLADecodePlan,
    plan: MLADecodePlan,
    scale: float,
    kv_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Attends to the shared keys and to the others, and merges the results.

    Args:
        tile_plan: for as many heads as a tile has members.
        plan: for a row's heads.
        kv_scale: as in `attention.kernels.mla.decode`.
    """
    (num_rows, num_heads), num_tiles = q_RHC.shape[:2], len(shared.tile_lens_T)
    num_members = tile_plan.partial_lse.shape[1]
    missing = num_tiles * num_members // num_heads - num_rows
    q_TMC = (pad(q_RHC, (0, 0, 0, 0, 0, missing)) if missing else q_RHC).reshape(num_tiles, num_members, -1)
    shared_RHL, shared_lse_RH = _new_results(num_rows + missing, num_heads, out)
    mla_decode_attention(
        q_TMC,
        kv_layer,
        seq_lens=shared.tile_lens_T,
        block_table=shared.table_1B.expand(num_tiles, -1),
        plan=tile_plan,
        scale=scale,
        kv_scale=kv_scale,
        out=shared_RHL.view(num_tiles, num_members, -1),
        lse_HR=shared_lse_RH.view(num_tiles, num_members).T,
    )
    own_RHL, own_lse_RH = _new_results(num_rows, num_heads, out)
    mla_decode_attention(
        q_RHC,
        kv_layer,
        seq_lens=shared.own_lens_R,
        block_table=shared.own_table_RB,
        plan=plan,
        scale=scale,
        kv_scale=kv_scale,
        out=own_RHL,
        lse_HR=own_lse_RH.T,
    )
    merge_attn_states(shared_RHL, shared_lse_RH.T, own_RHL, own_lse_RH.T, out=out, prefix_lens_T=shared.lens_R)


def _new_results(num_rows: int, num_heads: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates float32 results [R, H, L] and their log-sum-exps [R, H]."""
    results_RHL = torch.empty(num_rows, num_heads, out.shape[-1], dtype=torch.float32, device=out.device)
    return results_RHL, results_RHL.new_empty(num_rows, num_heads)

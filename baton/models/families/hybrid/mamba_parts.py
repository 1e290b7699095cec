"""The parts that families with Mamba-2 layers share.

Shapes: T token, D hidden channel, S slot, H head, G group of heads that share B and C, P channel of a head, N number of
the state of one channel, X channel of the convolution, W its width.
"""

import torch
from torch import Tensor, nn

from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.recurrent import RecurrentConfig
from baton.models.families.dense.llama import LlamaAttention
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.elementwise import silu
from baton.models.layers.linear import Linear
from baton.models.layers.recurrent.gated_group_norm import GatedGroupNorm
from baton.models.layers.recurrent.selective_scan import ScanWeights, selective_scan, share_inputs
from baton.models.layers.recurrent.short_conv import DepthwiseWeights, short_conv


class Mamba2Mixer(nn.Module):
    """A Mamba-2 mixer. It projects a gate z, inputs x and a step in time of each head, and B and C of each group; x, B
    and C pass a short convolution, then the scan.

    Args:
        layer_index: index among the recurrent layers.
    """

    def __init__(
        self,
        hidden_size: int,
        switches: MambaSwitches,
        recurrent: RecurrentConfig,
        *,
        layer_index: int,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.switches, self.layer_index = switches, layer_index
        self.num_heads, self.num_groups = recurrent.num_heads, recurrent.num_groups
        self.inner = self.num_heads * switches.head_dim
        self.shared = self.num_groups * switches.state_size
        bias = switches.projection_bias
        self.in_proj = Linear(hidden_size, 2 * (self.inner + self.shared) + self.num_heads, dtype=dtype, bias=bias)
        conv_channels = self.inner + 2 * self.shared
        self.conv1d = DepthwiseWeights(conv_channels, switches.conv_width, dtype=dtype, bias=switches.conv_bias)
        # float32 for every model dtype, because the scan is in float32.
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32)) for _ in range(3)
        )
        self.norm: GatedGroupNorm | None = None
        if switches.gated_norm:
            self.norm = GatedGroupNorm(
                self.inner,
                num_groups=self.num_groups,
                ranks_per_group=recurrent.ranks_per_group,
                eps=norm_eps,
                dtype=dtype,
            )
        self.multipliers_X: Tensor | None
        self.register_buffer("multipliers_X", self._multipliers(), persistent=False)
        self.out_proj = Linear(self.inner, hidden_size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, rows: StateRows) -> Tensor:
        switches, sizes = self.switches, [self.inner, self.inner + 2 * self.shared, self.num_heads]
        z_TX, xbc_TX, dt_TH = self._projected(x_TD).split(sizes, dim=-1)
        conv_SHXW, states_SHPN = self._states(kv_cache)
        x_TX, b_TX, c_TX = self._convolved(xbc_TX, conv_SHXW, rows)
        y_THP = selective_scan(
            x_TX.unflatten(-1, (self.num_heads, -1)),
            dt_TH,
            b_TX.unflatten(-1, (self.num_groups, -1)),
            c_TX.unflatten(-1, (self.num_groups, -1)),
            ScanWeights(self.A_log, self.D, self.dt_bias, switches.dt_min, switches.dt_max),
            states_SHPN,
            rows,
        )
        y_TX = y_THP.flatten(1)
        out_TD: Tensor = self.out_proj(y_TX * silu(z_TX) if self.norm is None else self.norm(y_TX, z_TX))
        return out_TD

    def _multipliers(self) -> Tensor | None:
        """Returns the factor of each channel of the projection, float32 for every model dtype, because few factors are
        exact in bfloat16."""
        if not self.switches.part_multipliers:
            return None
        sizes = (self.inner, self.inner, self.shared, self.shared, self.num_heads)
        parts = zip(sizes, self.switches.part_multipliers, strict=True)
        return torch.cat([torch.full((size,), multiplier, dtype=torch.float32) for size, multiplier in parts])

    def _projected(self, x_TD: Tensor) -> Tensor:
        if self.switches.input_multiplier != 1.0:
            x_TD = x_TD * self.switches.input_multiplier
        out_TX: Tensor = self.in_proj(x_TD)
        return out_TX if self.multipliers_X is None else out_TX.mul_(self.multipliers_X)

    def _convolved(self, xbc_TX: Tensor, conv_SHXW: Tensor, rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, B and C after the convolution. The first head of a group keeps the inputs of B and C for the whole
        group."""
        head_dim, state_size = self.switches.head_dim, self.switches.state_size
        firsts_SGXW = conv_SHXW[:, :: self.num_heads // self.num_groups]
        parts = [(self.inner, conv_SHXW[:, :, :head_dim])]
        if self.num_groups == 1:  # B and C lie one after the other in both places
            parts.append((2 * state_size, firsts_SGXW[:, :, head_dim:]))
        else:
            parts += ((self.shared, each) for each in firsts_SGXW[:, :, head_dim:].split(state_size, dim=2))
        out, start = [], 0
        for size, states in parts:
            part = slice(start, start + size)
            bias = None if self.conv1d.bias is None else self.conv1d.bias[part]
            weight = self.conv1d.weight[part, 0]
            x_THC = xbc_TX[:, part].unflatten(-1, states.shape[1:3])
            out.append(short_conv(x_THC, weight, bias, states, rows, activation="silu"))
            start += size
        share_inputs(conv_SHXW[:, :, head_dim:], rows, num_groups=self.num_groups)
        b_TX, c_TX = out[1].chunk(2, dim=-1) if self.num_groups == 1 else out[1:]
        return out[0], b_TX, c_TX

    def _states(self, kv_cache: PagedKVCache) -> tuple[Tensor, Tensor]:
        """Returns the convolution's inputs [S,H,X,W-1], X of one head, and the matrices [S,H,P,N], as views of the
        cache."""
        assert kv_cache.state is not None
        switches = self.switches
        state_SHC = kv_cache.state.layer(self.layer_index)[0, :, 0]
        conv_SHC, matrices_SHC = state_SHC.tensor_split([switches.conv_numbers], dim=-1)
        shape = (switches.head_dim, switches.state_size)
        return conv_SHC.unflatten(-1, (switches.conv_channels, -1)), matrices_SHC.unflatten(-1, shape)


class HybridAttention(LlamaAttention):
    """Llama's attention, without positions if there is no rotation."""

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        out_THC = self._attended(self.qkv_proj(x_TD), rotation, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD

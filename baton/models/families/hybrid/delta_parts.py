"""The parts that families with a delta rule share: queries, keys and values pass a short convolution, then the rule.

Shapes: T token, S slot, H key head, R value head of a key head, K key channel, V value channel, X channel of the
convolution, head by head, W its width.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton.kvcache.cache import PagedKVCache
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.recurrent.gated_delta import gated_delta
from baton.models.layers.recurrent.short_conv import short_conv


class DeltaMixer(nn.Module):
    """Base of layers with a delta rule.

    Args:
        num_heads: key heads.
        layer_index: index among the recurrent layers.
    """

    conv_weight_XW: Tensor

    def __init__(self, switches: DeltaSwitches, *, num_heads: int, layer_index: int) -> None:
        super().__init__()
        self.switches, self.num_heads, self.layer_index = switches, num_heads, layer_index
        self.key_size = num_heads * switches.key_dim
        self.num_value_heads = num_heads * switches.values_per_key
        self.value_size = self.num_value_heads * switches.value_dim

    @abstractmethod
    def conv_weights(self) -> Sequence[Tensor]:
        """Returns the convolution's weights of queries, keys and values, [channels, 1, W] each, head by head."""

    def process_weights_after_loading(self) -> None:
        """Orders the convolution's weights by head, and has the channels of each tap side by side."""
        parts = [part.detach().squeeze(1).unflatten(0, (self.num_heads, -1)) for part in self.conv_weights()]
        self.conv_weight_XW = torch.cat(parts, dim=1).flatten(0, 1).t().contiguous().t()

    def mix(
        self, qkv_THX: Tensor, log_decay: Tensor, beta_THR: Tensor, kv_cache: PagedKVCache, rows: StateRows
    ) -> Tensor:
        """Returns [T, H, R, V], and updates the states.

        Args:
            qkv_THX: each head's query, key and values.
        """
        switches = self.switches
        conv_SHXW, states_SHRKV = self._states(kv_cache)
        mixed_TX = short_conv(qkv_THX, self.conv_weight_XW, None, conv_SHXW, rows, activation="silu")
        values = switches.values_per_key * switches.value_dim
        heads_THX = mixed_TX.unflatten(-1, (self.num_heads, -1))
        q_THK, k_THK, v_THX = heads_THX.split([switches.key_dim, switches.key_dim, values], dim=-1)
        v_THRV = v_THX.unflatten(-1, (-1, switches.value_dim))
        return gated_delta(q_THK, k_THK, v_THRV, log_decay, beta_THR, states_SHRKV, rows)

    def _states(self, kv_cache: PagedKVCache) -> tuple[Tensor, Tensor]:
        """Returns the convolution's inputs [S,H,X,W-1], X of one head, and the matrices [S,H,R,K,V], as views of the
        cache."""
        assert kv_cache.state is not None
        switches = self.switches
        state_SHC = kv_cache.state.layer(self.layer_index)[0, :, 0]
        conv_SHC, matrices_SHC = state_SHC.tensor_split([switches.conv_numbers], dim=-1)
        sizes = (switches.values_per_key, switches.key_dim, switches.value_dim)
        return conv_SHC.unflatten(-1, (switches.conv_channels, -1)), matrices_SHC.unflatten(-1, sizes)


def by_head(parts: Sequence[Tensor], *, num_heads: int) -> Tensor:
    """Joins the parts head by head; returns [T, H, all parts' channels].

    Args:
        parts: [T, H * channels] each.
    """
    return torch.cat([part.unflatten(-1, (num_heads, -1)) for part in parts], dim=-1)

"""The configuration of layers that keep a state instead of KV. Pure values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that keep a state instead of KV. The family's `switches` define their computation.

    Attributes:
        layers: whether each layer keeps a state.
        num_heads: number of equal parts by which ranks split the state.
        head_channels: number of float32 values of one part in one layer.
        has_kv: whether each layer has KV, for models with layers that have neither a state nor KV (an MLP alone) or
            both. () if exactly the layers without a state have KV.
        num_groups: groups of neighbouring heads that share some of their inputs; 0: heads share none.
        ranks_per_group: number of ranks that have parts of one group of heads.
    """

    layers: tuple[bool, ...]
    num_heads: int
    head_channels: int
    has_kv: tuple[bool, ...] = ()
    num_groups: int = 0
    ranks_per_group: int = 1

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def kv_layers(self) -> tuple[bool, ...]:
        """Whether each layer has KV."""
        return self.has_kv or tuple(not keeps for keeps in self.layers)

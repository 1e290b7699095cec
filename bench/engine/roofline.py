"""Lower bound of what a step reads and computes. Pure arithmetic over a model's parameters and configuration."""

from dataclasses import dataclass

from torch import nn

from baton.kvcache.spec import KVCacheSpec
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from bench.attention.measure import Ceilings

_EXPERTS = ".experts."
_EMBEDDING = "embed_tokens."


@dataclass(frozen=True)
class Work:
    """The bytes that one step reads, and its floating-point operations."""

    num_bytes: float
    flops: float

    def milliseconds(self, machine: Ceilings) -> float:
        """The larger of the two bounds. `copy_gigabytes_per_s` counts bytes read and bytes written alike."""
        reading_ms = self.num_bytes / machine.copy_gigabytes_per_s / 1e6
        return max(reading_ms, self.flops / machine.matmul_teraflops / 1e9)


@dataclass(frozen=True)
class Weights:
    """A model's parameters in bytes and in number: `dense` for every token, `experts` for the tokens routed to them."""

    dense_bytes: int
    dense_numbers: int
    experts_bytes: int
    experts_numbers: int


def count_weights(model: nn.Module, *, tied: bool) -> Weights:
    """Counts the embedding only if it is also the head: a lookup reads only one row per token."""
    dense, experts = [], []
    for name, parameter in model.named_parameters():
        if _EXPERTS in name:
            experts.append(parameter)
        elif tied or _EMBEDDING not in name:
            dense.append(parameter)
    return Weights(
        sum(parameter.nbytes for parameter in dense),
        sum(parameter.numel() for parameter in dense),
        sum(parameter.nbytes for parameter in experts),
        sum(parameter.numel() for parameter in experts),
    )


def decode_work(config: ModelConfig, weights: Weights, spec: KVCacheSpec, *, requests: int, context: int) -> Work:
    """One token of each request. Every expert with a token is read once, assuming even routing."""
    read, used = _expert_shares(config, requests)
    seen = _seen_tokens(config, context)
    return Work(
        weights.dense_bytes + read * weights.experts_bytes + requests * seen * spec.bytes_per_token_layer,
        2 * requests * (weights.dense_numbers + used * weights.experts_numbers)
        + requests * seen * _decode_flops_per_token_layer(config),
    )


def state_bytes(spec: KVCacheSpec, *, requests: int) -> int:
    """What a decode step reads and writes of the recurrent states of its requests."""
    return 2 * requests * spec.bytes_per_slot


def prefill_flops(config: ModelConfig, weights: Weights, *, tokens: int, prompts: int = 1) -> float:
    """Operations of causal prompts of equal length, without the head, which computes one row per prompt."""
    _, used = _expert_shares(config, tokens)
    head = config.vocab_size * config.hidden_size
    numbers = weights.dense_numbers - head + used * weights.experts_numbers
    length = tokens // prompts
    pairs = prompts * sum(_seen_pairs(length, window) for window in _windows(config))
    return 2 * tokens * numbers + pairs * _prefill_flops_per_pair(config)


def _expert_shares(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """(share of the experts that is read, share that one token uses)."""
    if config.moe is None:
        return 0.0, 0.0
    used = config.moe.experts_per_token / config.moe.num_experts
    return 1 - (1 - used) ** tokens, used


def _windows(config: ModelConfig) -> list[int | None]:
    """One entry for each layer with attention."""
    windows: list[int | None] = [None] * config.num_layers
    if isinstance(config.attention, GQAConfig):
        windows = list(config.attention.sliding_windows)
    if config.recurrent is None:
        return windows
    return [window for window, keeps in zip(windows, config.recurrent.kv_layers, strict=True) if keeps]


def _seen_tokens(config: ModelConfig, context: int) -> int:
    """Tokens that attention reads, summed over the layers."""
    return sum(min(context, window or context) for window in _windows(config))


def _seen_pairs(length: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees."""
    if window is None or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def _decode_flops_per_token_layer(config: ModelConfig) -> int:
    attention = config.attention
    if isinstance(attention, MLAConfig):
        return 2 * attention.num_heads * (2 * attention.kv_lora_rank + attention.qk_rope_head_dim)
    return 4 * attention.num_heads * attention.head_dim


def _prefill_flops_per_pair(config: ModelConfig) -> int:
    attention = config.attention
    if isinstance(attention, MLAConfig):
        channels = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return 2 * attention.num_heads * channels
    return 4 * attention.num_heads * attention.head_dim

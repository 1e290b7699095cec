"""Gemma 3n's text model. It has several residual streams; a layer predicts all, computes one and corrects all (AltUp).
It adds a low-rank residual next to the attention (Laurel), and its MLPs' gates are mostly zero.

The last layers read earlier layers' keys and values, and each layer has its own extra input. Shapes: T token, D hidden
channel, S stream, I intermediate channel, L layer, P channel of a layer's input.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.gemma3n_config import Gemma3nSwitches
from baton.models.families.dense.gemma_parts import LayerInputs, LayerWithInput, SharingAttention, rounded
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear, Multiply
from baton.models.layers.mlp import GatedMLP, gelu_tanh_and_multiply
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.rotary import Rotary
from baton.models.layers.step_context import StepContext

_LEAST_SQUARE = 1e-5  # lower bound of a projected stream's mean square when it is scaled to the first stream's size


class RowMean(nn.Module):
    """The mean of each row [T, 1], in float32.

    Attributes:
        multiply: as in `baton.models.layers.linear.Linear`. torch's own mean may sum in another order for other numbers
            of rows.
    """

    share_1D: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.multiply: Multiply = linear
        self.register_buffer("share_1D", torch.full((1, size), 1 / size, dtype=torch.float32), persistent=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.multiply(x_TD.float(), self.share_1D, None)


class SparseMLP(GatedMLP, ParallelModule):
    """A gated MLP that uses only gates far above the token's mean.

    Args:
        sparsity: share of the gates that would be 0 if they were normally distributed; 0: all gates are used.
    """

    def __init__(self, size: int, intermediate_size: int, *, sparsity: float, dtype: torch.dtype) -> None:
        super().__init__(size, intermediate_size, dtype=dtype, activate=gelu_tanh_and_multiply)
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self.mean = RowMean(intermediate_size) if sparsity else None

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up_TI = self.gate_up_proj(x_TD)
        if self.deviations is not None:
            gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
            gate_TI = relu(gate_TI - self._cutoff(gate_TI.float())).to(up_TI.dtype)
            gate_up_TI = torch.cat((gate_TI, up_TI), dim=-1)
        out_TD: Tensor = self.down_proj(self.activate(gate_up_TI))
        return out_TD

    def _cutoff(self, gate_TI: Tensor) -> Tensor:
        """Returns the cutoff [T, 1] in float32, mean plus a number of deviations of the gates of all ranks."""
        assert self.deviations is not None
        assert self.mean is not None
        ranks = self.parallel.size
        mean_T1 = self.parallel.all_reduce(self.mean(gate_TI)) / ranks
        variance_T1 = self.parallel.all_reduce(self.mean((gate_TI - mean_T1).square())) / ranks
        return mean_T1 + self.deviations * variance_T1.sqrt()


class Laurel(nn.Module):
    """Adds to x the norm of a low-rank product of x."""

    def __init__(self, size: int, rank: int, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_left = Linear(size, rank, dtype=dtype)
        self.linear_right = Linear(rank, size, dtype=dtype)
        self.post_laurel_norm = RMSNorm(size, eps=norm_eps, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = x_TD + self.post_laurel_norm(self.linear_right(self.linear_left(x_TD)))
        return out_TD


class AltUp(nn.Module):
    """Alternating updates (arXiv 2301.13310), which derive a layer's streams from the previous streams and the computed
    one."""

    def __init__(self, size: int, switches: Gemma3nSwitches, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        streams = switches.streams
        self.streams, self.active, self.scale = streams, switches.active_stream, 1 / size
        self.correct_output_scale = nn.Parameter(torch.empty(size, dtype=dtype))
        self.correction_coefs = Linear(streams, streams, dtype=dtype)
        self.prediction_coefs = Linear(streams, streams**2, dtype=dtype)
        self.modality_router = Linear(size, streams, dtype=dtype)
        self.router_norm = RMSNorm(size, eps=norm_eps, dtype=dtype)

    def predict(self, streams_STD: Tensor) -> Tensor:
        """Returns [S, T, D], each stream plus a sum of all streams with weights computed from the active stream."""
        weights_TSS = self.prediction_coefs(self._modes(streams_STD[self.active])).unflatten(-1, (-1, self.streams))
        before_STD = streams_STD.float()
        predicted_STD = before_STD
        # Added one by one, so that the order of the sum does not depend on the number of tokens.
        for weights_ST1, before_TD in zip(weights_TSS.float().permute(2, 1, 0).unsqueeze(-1), before_STD, strict=True):
            predicted_STD = torch.addcmul(predicted_STD, weights_ST1, before_TD)
        return predicted_STD.to(streams_STD.dtype)

    def correct(self, predicted_STD: Tensor, computed_TD: Tensor) -> Tensor:
        """Returns [S, T, D], each prediction plus its share of the difference between the computed stream and its
        prediction."""
        weights_TS = self.correction_coefs(self._modes(computed_TD)) + 1.0
        difference_TD = computed_TD - predicted_STD[self.active]
        corrected_STD: Tensor = predicted_STD + difference_TD * weights_TS.t().unsqueeze(-1)
        return corrected_STD

    def _modes(self, stream_TD: Tensor) -> Tensor:
        modes_TS: Tensor = self.modality_router(self.router_norm(stream_TD) * self.scale)
        return modes_TS.float().tanh().to(stream_TD.dtype)


class Gemma3nLayer(LayerWithInput):
    """One layer of Gemma 3n.

    Args:
        before: the attentions of the layers before this one.
    """

    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        switches: Gemma3nSwitches,
        *,
        layer_index: int,
        before: Sequence[SharingAttention],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        super().__init__(size, switches.input_size, norm_eps=eps, dtype=dtype)
        self.slides = gqa.sliding_windows[layer_index] is not None
        self.scales_output = switches.scales_output
        self.altup = AltUp(size, switches, norm_eps=eps, dtype=dtype)
        self.laurel = Laurel(size, switches.laurel_rank, norm_eps=eps, dtype=dtype)
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = SharingAttention(
            size, gqa, layer_index=layer_index, before=before, norm_eps=eps, backend=backend, dtype=dtype
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        sparsity = switches.sparsities[layer_index]
        self.mlp = SparseMLP(size, config.mlp_size(layer_index), sparsity=sparsity, dtype=dtype)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps, dtype=dtype)

    def forward(
        self,
        streams_STD: Tensor,
        input_TP: Tensor,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Returns the streams after this layer [S, T, D]."""
        predicted_STD = self.altup.predict(streams_STD)
        active_TD = predicted_STD[self.altup.active]
        normed_TD = self.input_layernorm(active_TD)
        attended_TD = self.parallel.all_reduce(self.self_attn(normed_TD, rotation, kv_cache, metadata))
        attended_TD = active_TD + self.post_attention_layernorm(attended_TD)
        stream_TD = (attended_TD + self.laurel(normed_TD)) / math.sqrt(2)
        out_TD = self.parallel.all_reduce(self.mlp(self.pre_feedforward_layernorm(stream_TD)))
        corrected_STD = self.altup.correct(predicted_STD, stream_TD + self.post_feedforward_layernorm(out_TD))
        active_TD = corrected_STD[self.altup.active]
        if self.scales_output:
            active_TD = active_TD * self.altup.correct_output_scale
        corrected_STD[1:] += self.of_input(active_TD, input_TP)
        return corrected_STD


class ResidualStreams(nn.Module):
    """Makes the streams before the first layer from the embedding, and one stream from those after the last layer.
    Module paths equal those in checkpoints after `model.`."""

    def __init__(self, size: int, streams: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.altup_projections = nn.ModuleList([Linear(size, size, dtype=dtype) for _ in range(1, streams)])
        self.altup_unembed_projections = nn.ModuleList([Linear(size, size, dtype=dtype) for _ in range(1, streams)])
        self.row_mean = RowMean(size)

    def forward(self, embedded_TD: Tensor) -> Tensor:
        """Returns the streams [S, T, D]."""
        others = [self._as_large_as(embedded_TD, project(embedded_TD)) for project in self.altup_projections]
        return torch.stack([embedded_TD, *others])

    def mean(self, streams_STD: Tensor) -> Tensor:
        """Returns the mean of the streams [T, D]."""
        first_TD = sum_TD = streams_STD[0]
        for project, stream_TD in zip(self.altup_unembed_projections, streams_STD[1:], strict=True):
            sum_TD = sum_TD + self._as_large_as(first_TD, project(stream_TD))
        mean_TD: Tensor = sum_TD / len(streams_STD)
        return mean_TD

    def _as_large_as(self, first_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Scales each row of `x_TD` to the mean square of the first stream's row."""
        wanted_T1 = self.row_mean(first_TD.float().square()).sqrt()
        present_T1 = self.row_mean(x_TD.float().square()).clamp(min=_LEAST_SQUARE).sqrt()
        scaled_TD: Tensor = x_TD * wanted_T1 / present_T1
        return scaled_TD.to(x_TD.dtype)


class Gemma3nForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"inputs.": "model.", "streams.": "model."})

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, Gemma3nSwitches)
        assert config.local_rope is not None
        layers: list[Any] = []
        for index in range(config.num_layers):
            before = [layer.self_attn for layer in layers]
            layers.append(
                Gemma3nLayer(config, gqa, switches, layer_index=index, before=before, backend=backend, dtype=dtype)
            )
        super().__init__(config, layers, dtype=dtype)
        self.local_rotary = Rotary(config.local_rope)
        self.embedding_scale = rounded(config.hidden_size**0.5, dtype)
        self.streams = ResidualStreams(config.hidden_size, switches.streams, dtype=dtype)
        self.inputs = LayerInputs(
            config.hidden_size,
            config.num_layers,
            switches.input_size,
            vocab_size=switches.input_vocab_size,
            norm_eps=config.norm_eps,
            dtype=dtype,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotations = {False: self.rotary(positions_T), True: self.local_rotary(positions_T)}
        embedded_TD: Tensor = self.model.embed_tokens(token_ids_T) * self.embedding_scale
        inputs_TLP = self.inputs(token_ids_T, embedded_TD)
        streams_STD = self.streams(embedded_TD)
        for index, layer in enumerate(self.model.layers):
            rotation = rotations[bool(layer.slides)]
            streams_STD = layer(streams_STD, inputs_TLP[:, index], rotation, kv_cache, context.metadata)
        hidden_TD: Tensor = self.model.norm(self.streams.mean(streams_STD))
        return hidden_TD

"""Attention of one layer over the paged cache: writes the new keys and values, then attends.

It holds no weights, cache or batch; each call passes cache and metadata. Legend: T tokens, H query heads, K kv heads, D
head_dim.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, AttentionFeature, QuantizingBackend
from attention.blocksparse import BlocksparseParams
from attention.kernels.rotary.heads import rotate_qkv
from attention.layer_checks import check_backend, check_out, check_parameters, refused
from attention.metadata import AttentionMetadata
from attention.parameters import AttentionParameters, AttentionType
from attention.quantized_output import QuantizedOutput
from attention.rotation import HeadNorms, Rotation, rotate_heads, split_heads
from baton.core.errors import InternalError
from baton.kvcache.access import store_kv
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.fp8 import quantize
from baton.kvcache.scales import KVScales


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, depending on the numbers of heads.

    A layer may have fewer kv heads than the cache, or smaller ones. It then fills the first channels of each place and
    stores each head several times, side by side, so that ranks split heads alike in all layers. One shape for all of a
    cache's layers keeps layouts, transfers and digests simple, at the cost of unused memory.

    Args:
        scale: factor of the scores.
        sliding_window, attention_chunk_size, logits_soft_cap, blocksparse: as `AttentionParameters` defines them.
        alibi_slopes: one per query head.
        sinks: one per query head. It is the model's own parameter, read at each call, so it may be loaded later.
        kv_sharing_target: an earlier layer whose keys and values this one reads, with that layer's scales. This layer
            then stores no KV and ignores a call's keys and values.
        scales: of an fp8 cache; None: 1. Calculated scales (`KVScales.calculate`) come from a node's first batch and
            differ between nodes, so a disaggregated pair must be given its scales.

    Raises:
        ConfigError: a value is out of its range, the backend does not declare a required feature, or the layer cannot
            share the target's KV.
    """

    alibi_slopes_H: Tensor | None

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        layer_index: int,
        backend: AttentionBackend,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        attention_chunk_size: int | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Tensor | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target: "Attention | None" = None,
        blocksparse: BlocksparseParams | None = None,
        scales: KVScales | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_index = layer_index
        self.attn_type = attn_type
        self.uses_cache = attn_type not in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self.backend = backend
        slopes_H = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        self.register_buffer("alibi_slopes_H", slopes_H, persistent=False)
        # The tuple keeps torch from registering it with this module too, and from moving, loading or counting it twice.
        self._sinks = (sinks,)
        self.scales = scales
        self.kv_layer_index = layer_index
        self.shares_kv = kv_sharing_target is not None
        self._parameters_without_tensors = AttentionParameters(
            scale=scale,
            sliding_window=sliding_window,
            attention_chunk_size=attention_chunk_size,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            blocksparse=blocksparse,
            scales=scales,
        )
        check_parameters(self.parameters_now, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_backend(backend.capabilities, self.parameters_now, layer_index=layer_index)
        if kv_sharing_target is not None:
            self._share(kv_sharing_target)
        self._quantizing = backend if isinstance(backend, QuantizingBackend) else None
        self._quantizes_query = AttentionFeature.QUANTIZED_QUERY in backend.capabilities.features

    @property
    def parameters_now(self) -> AttentionParameters:
        """Returns the layer's parameters for the backend, with the current values of its tensors."""
        sinks = self._sinks[0]
        if sinks is None and self.alibi_slopes_H is None:
            return self._parameters_without_tensors
        sinks_H = None if sinks is None else sinks.detach().float()
        return replace(self._parameters_without_tensors, alibi_slopes_H=self.alibi_slopes_H, sinks_H=sinks_H)

    def forward(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, H, D]; rows past the batch's actual tokens are undefined.

        Args:
            k_TKD, v_TKD: the new tokens' keys and values, written to `metadata.new_tokens` except for an encoder. None
                if the layer shares another layer's KV. For ENCODER_DECODER they belong to the encoder's tokens, not the
                queries', and go to that call's `new_tokens`; None once they are in the cache.
            out: contiguous memory for the result, of the queries' shape and dtype; None: new memory.
            output_scale: float32 scalar, the input scale of the fp8 layer that follows; the result is divided by it and
                returned in e4m3. Every backend supports it, as a step after its kernels. Library API.

        Raises:
            InternalError: keys or values are missing, or `out` cannot take the result.
        """
        if output_scale is not None:
            return self._quantized_output(q_THD, k_TKD, v_TKD, kv_cache, metadata, out=out, scale=output_scale)
        if out is not None:
            check_out(out, q_THD)
        return self._store_and_attend(q_THD, k_TKD, v_TKD, kv_cache, metadata, out=out)

    def _store_and_attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        out: Tensor | QuantizedOutput | None,
    ) -> Tensor:
        kv_layer, *copies = self._own_heads(kv_cache.layer(self.kv_layer_index))
        if self.shares_kv:
            k_TKD = v_TKD = None
        elif k_TKD is not None and v_TKD is not None:
            if self.uses_cache:
                self._calculate_scales(q_THD, k_TKD, v_TKD, metadata)
                k_scale, v_scale = (None, None) if self.scales is None else self.scales.tensors[1:]
                for stored in (kv_layer, *copies):
                    store_kv(stored, k_TKD, v_TKD, metadata.new_tokens, k_scale=k_scale, v_scale=v_scale)
        elif self.attn_type is not AttentionType.ENCODER_DECODER or k_TKD is not v_TKD:
            raise InternalError(f"attention layer {self.layer_index} got no keys or no values", field="k_TKD")
        return self._attend_stored(q_THD, k_TKD, v_TKD, kv_layer, metadata, out=out)

    def quantizes(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        """Whether the backend's kernels can quantize the output of this batch. `num_tokens` counts padding too."""
        backend = self._quantizing
        return backend is not None and backend.quantizes(metadata, num_tokens=num_tokens, head_size=self.head_dim)

    def _quantized_output(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        out: Tensor | None,
        scale: Tensor,
    ) -> Tensor:
        if out is not None:
            check_out(out, q_THD, dtype=torch.float8_e4m3fn)
        attended_THD = self.forward(q_THD, k_TKD, v_TKD, kv_cache, metadata)
        quantized_THD = quantize(attended_THD, scale, torch.float8_e4m3fn)
        return quantized_THD if out is None else out.copy_(quantized_THD)

    def rotate_and_attend(
        self,
        qkv_TX: Tensor,
        rotation: Rotation | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        norms: HeadNorms | None = None,
        gated: bool = False,
        out: QuantizedOutput | None = None,
    ) -> Tensor:
        """Norms and turns the batch's queries and keys, writes keys and values to the cache, and attends. On a GPU one
        kernel does everything before the attention.

        Args:
            qkv_TX: the heads of queries, keys and values, one after another. Overwritten.
            rotation: angles for the first channels of each head, or for all; None: nothing turns.
            norms: the norms of each head of queries and keys.
            gated: a gate follows each head of queries. It is not read.
            out: memory for a quantized result, for batches that the layer `quantizes`; None: the result is in the
                queries' dtype.
        """
        in_torch = rotation is None or (norms is not None and norms.turned)  # the kernel supports neither case
        if in_torch or not qkv_TX.is_cuda:
            heads = rotate_heads(qkv_TX, rotation, norms, self.num_heads, self.num_kv_heads, gated=gated)
            return self._store_and_attend(*heads, kv_cache, metadata, out=out)
        assert rotation is not None
        calculates = self.scales is not None and self.scales.calculate  # from turned, unstored keys
        writes = self.uses_cache and not self.shares_kv and not calculates
        kv_layer, *copies = self._own_heads(kv_cache.layer(self.kv_layer_index))
        writes = writes and not copies
        rotate_qkv(
            qkv_TX,
            rotation,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            norms=norms,
            gated=gated,
            kv_layer=kv_layer if writes else None,
            slot_mapping=metadata.new_tokens.slot_mapping if writes else None,
            k_scale=None if self.scales is None else self.scales.k_scale,
            v_scale=None if self.scales is None else self.scales.v_scale,
        )
        heads = split_heads(qkv_TX, self.num_heads, self.num_kv_heads, gated=gated)
        if not writes:
            return self._store_and_attend(*heads, kv_cache, metadata, out=out)
        return self._attend_stored(*heads, kv_layer, metadata, out=out)

    def _own_heads(self, kv_layer: Tensor) -> tuple[Tensor, ...]:
        """Returns one view of [K, B, N, H, C] for each copy of this layer's heads in the cache."""
        if kv_layer.shape[3:] == (self.num_kv_heads, self.head_dim):
            return (kv_layer,)
        times = kv_layer.shape[3] // self.num_kv_heads
        return tuple(kv_layer[:, :, :, first::times, : self.head_dim] for first in range(times))

    def _attend_stored(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        out: Tensor | QuantizedOutput | None,
    ) -> Tensor:
        """Attends after the batch's keys and values are in the cache."""
        if out is None:
            out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        q_THD = self._quantized(q_THD, kv_layer)
        if isinstance(out, QuantizedOutput):
            assert self._quantizing is not None
            self._quantizing.forward_quantized(q_THD, kv_layer, metadata, layer=self.parameters_now, out=out)
            return out.stored_THD
        self.backend.forward(q_THD, k_TKD, v_TKD, kv_layer, metadata, layer=self.parameters_now, out=out)
        return out

    def use_scales(self, scales: KVScales) -> None:
        """Sets the scales of an fp8 cache, for a model that is built before its cache's dtype is known.

        Raises:
            ConfigError: the layer shares another layer's KV; set that layer's scales before the two are joined.
        """
        if self.shares_kv:
            raise refused("scales", "given", "none: shared KV is read with the scales of the layer that wrote it")
        self.scales = scales
        self._parameters_without_tensors = replace(self._parameters_without_tensors, scales=scales)

    def _share(self, target: "Attention") -> None:
        if not self.uses_cache:
            raise refused("kv_sharing_target", f"layer {target.layer_index}", f"none, for type {self.attn_type}")
        if target.layer_index >= self.layer_index:
            allowed = f"a layer before layer {self.layer_index}"
            raise refused("kv_sharing_target", f"layer {target.layer_index}", allowed)
        for name in ("num_kv_heads", "head_dim", "attn_type"):
            own, others = getattr(self, name), getattr(target, name)
            if own != others:
                value = f"layer {target.layer_index} with {name} {others}"
                raise refused("kv_sharing_target", value, f"a layer with {name} {own}")
        if self.scales not in (None, target.scales):
            raise refused("scales", "given", "none: shared KV is read with the scales of the layer that wrote it")
        self.kv_layer_index = target.kv_layer_index
        self.use_scales_of(target)

    def use_scales_of(self, target: "Attention") -> None:
        """Takes over the current scales of the layer that wrote the shared KV."""
        self.scales = target.scales
        self._parameters_without_tensors = replace(self._parameters_without_tensors, scales=target.scales)

    def _calculate_scales(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, metadata: AttentionMetadata) -> None:
        """Calculates scales from the first batch if requested. Undefined padding does not count."""
        if self.scales is None or not self.scales.calculate:
            return
        actual = slice(0, metadata.num_actual_tokens)
        own = slice(None) if self.attn_type is AttentionType.ENCODER_DECODER else actual
        self.scales.calc_kv_scales(q_THD[actual], k_TKD[own], v_TKD[own])

    def _quantized(self, q_THD: Tensor, kv_layer: Tensor) -> Tensor:
        """Returns the query in the cache's fp8 format if the backend multiplies in it, except for e5m2: its two bits of
        mantissa would lose accuracy and save nothing."""
        if not (self._quantizes_query and self.uses_cache and kv_layer.dtype == torch.float8_e4m3fn):
            return q_THD
        return quantize(q_THD, None if self.scales is None else self.scales.q_scale, kv_layer.dtype)

    def extra_repr(self) -> str:
        asked = self._parameters_without_tensors
        shown = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "layer_index": self.layer_index,
            "kv_layer_index": self.kv_layer_index if self.shares_kv else None,
            "sliding_window": asked.sliding_window,
            "attention_chunk_size": asked.attention_chunk_size,
            "logits_soft_cap": asked.logits_soft_cap,
            "blocksparse": asked.blocksparse,
            "attn_type": None if asked.attn_type is AttentionType.DECODER else asked.attn_type,
            "backend": self.backend.capabilities.name,
        }
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)

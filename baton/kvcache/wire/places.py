"""Locates a payload's runs in a cache, and checks the payload's ranges and blocks."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheSpec
from baton.tritonlib.launch import PreparedKernel


@dataclass(frozen=True)
class WirePlaces:
    """The places of a payload's runs in a cache; all sizes and strides in bytes.

    Attributes:
        first: first byte of the first layer, head and block.
        run: bytes that are adjacent on both sides: one head of a token, or all of its heads where `num_heads` is 1.
        stride_L, stride_K, stride_B, stride_N, stride_H: bytes from one index to the next in the cache.
        num_parts, kv_factor: layers times keys and values, and how many of these a layer has.
        num_tokens, num_heads: runs of a part.
        token_start: the request's first token.
        block_size, num_blocks: those of the cache.
    """

    first: int
    run: int
    stride_L: int
    stride_K: int
    stride_B: int
    stride_N: int
    stride_H: int
    num_parts: int
    kv_factor: int
    num_tokens: int
    num_heads: int
    token_start: int
    block_size: int
    num_blocks: int

    @property
    def unit_bytes(self) -> int:
        """The unit in which kernels count sizes, so that they know a common divisor. At most what a thread loads."""
        sizes = (self.first, self.run, self.stride_L, self.stride_K, self.stride_B, self.stride_N, self.stride_H)
        return gcd(PreparedKernel.ALIGN_BYTES, *sizes)

    def word_bytes(self, *memories: Tensor) -> int:
        """The widest word, of at most 4 bytes, in which sizes and addresses can be counted."""
        return gcd(4, self.unit_bytes, *(memory.data_ptr() for memory in memories))

    def can_be_digested(self, *memories: Tensor) -> bool:
        """Whether `gather_and_digest` takes them: all count in words of 4 bytes, and runs have an even number of words.

        NOTE: rows of one word are excluded because the compiler of Triton 3.6 aborts the process for some of them (an
        assertion in LLVM's SLPVectorizer).
        """
        return self.word_bytes(*memories) == 4 and self.run % 8 == 0


def places_of(cache: PagedKVCache, token_start: int, token_stop: int, layers: range, heads: range) -> WirePlaces:
    """Locates a request's runs in its blocks, for ranges that were checked before."""
    spec, shape = cache.spec, cache.shape
    stride_L, stride_K, stride_B, stride_N, stride_H, _ = (stride * spec.itemsize for stride in cache.view.stride())
    run = spec.head_dim * spec.itemsize
    heads_adjacent = len(heads) == 1 or stride_H == run
    return WirePlaces(
        first=layers.start * stride_L + heads.start * stride_H,
        run=run * len(heads) if heads_adjacent else run,
        stride_L=stride_L * layers.step,
        stride_K=stride_K,
        stride_B=stride_B,
        stride_N=stride_N,
        stride_H=stride_H,
        num_parts=len(layers) * spec.kv_factor,
        kv_factor=spec.kv_factor,
        num_tokens=token_stop - token_start,
        num_heads=1 if heads_adjacent else len(heads),
        token_start=token_start,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
    )


def check_places(
    cache: PagedKVCache,
    block_ids: Tensor,
    block_ids_cpu: Tensor | None,
    token_start: int,
    token_stop: int,
    layers: range,
    heads: range,
    payload_bytes: int,
    *,
    spec: KVCacheSpec | None = None,
) -> WirePlaces:
    """Checks the arguments, then locates the runs like `places_of`. A wrong reference ends in an error, never in a read
    or write elsewhere.

    Args:
        spec: the payload's spec; the cache's if not given.

    Raises:
        InternalError: a range or a block is wrong, or the payload has another size.
    """
    spec, shape = spec or cache.spec, cache.shape
    tokens_held = block_ids.numel() * shape.block_size
    if not 0 <= token_start < token_stop <= tokens_held:
        raise InternalError(
            f"tokens [{token_start}, {token_stop}) of a request whose blocks hold {tokens_held}", field="token_stop"
        )
    for name, chosen, size in (("layers", layers, spec.num_layers), ("heads", heads, spec.num_kv_heads)):
        if (chosen.step != 1 and name == "heads") or not 0 <= chosen.start < chosen.stop or chosen[-1] >= size:
            raise InternalError(f"{name} are {chosen} of {size}", field=name, value=chosen)
    _check_blocks(block_ids, block_ids_cpu, shape.num_blocks)
    per_token = len(layers) * spec.kv_factor * len(heads) * spec.head_dim * spec.itemsize
    expected_bytes = (token_stop - token_start) * per_token
    if payload_bytes != expected_bytes:
        raise InternalError(f"the payload has {payload_bytes} bytes and not {expected_bytes}", field="payload")
    return places_of(cache, token_start, token_stop, layers, heads)


def _check_blocks(block_ids: Tensor, block_ids_cpu: Tensor | None, num_blocks: int) -> None:
    known = block_ids if block_ids_cpu is None else block_ids_cpu
    if known.numel() != block_ids.numel():
        raise InternalError(f"{block_ids.numel()} block ids, {known.numel()} on the CPU", field="block_ids_cpu")
    if known.is_cuda:
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(known))
    if lowest < 0 or highest >= num_blocks:
        raise InternalError(f"block ids from {lowest} to {highest} of {num_blocks}", field="block_ids")

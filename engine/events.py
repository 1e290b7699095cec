"""What one engine step tells its owner. Plain values; one `StepEvents` per step.

Tokens come in every step for every request, so they are named tuples: those are made several times faster than frozen
dataclasses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from baton.errors import BatonError
from baton.types import FinishReason, TokenOutput


@dataclass(frozen=True)
class RequestStarted:
    """The first chunk of a request's prompt was in this step; told once, also when it is recomputed later.

    Args:
        cached_tokens: leading tokens whose KV was in the cache; no `ChunkComputed` will tell of them.
        queue_s: from submit (or from `prefill_here`) to this step.
    """

    request_id: str
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True)
class ChunkComputed:
    """The KV of positions `token_start` to `token_stop` (exclusive) is now in the cache, in the request's blocks."""

    request_id: str
    token_start: int
    token_stop: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class LayersComputed:
    """The same, as yet only in the first `layer_stop` layers: the step still computes. `ChunkComputed` will follow."""

    request_id: str
    token_start: int
    token_stop: int
    layer_stop: int
    block_ids: tuple[int, ...]


class TokenSampled(NamedTuple):
    """A token of the request; its last one when `finish_reason` is set.

    Args:
        stop_reason: the stop token's id as text when one of `stop_token_ids` ended the request, else empty.
    """

    request_id: str
    token: TokenOutput
    finish_reason: FinishReason | None
    stop_reason: str


# From a tuple of its fields, in half of the time that a call of the class takes: 0.4 us instead of 0.8.
token_sampled: Callable[[tuple[str, TokenOutput, FinishReason | None, str]], TokenSampled] = partial(
    tuple.__new__, TokenSampled
)


@dataclass(frozen=True)
class RequestFailed:
    """The request is over and its blocks are free."""

    request_id: str
    error: BatonError


@dataclass(frozen=True)
class StepEvents:
    """One step, or what is known of it while it runs: then there are only `layers`, and no seconds yet.

    `seconds` is the forward and the sampling, without scheduling.
    """

    step: int
    seconds: float
    started: tuple[RequestStarted, ...] = ()
    chunks: tuple[ChunkComputed, ...] = ()
    tokens: tuple[TokenSampled, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    layers: tuple[LayersComputed, ...] = ()

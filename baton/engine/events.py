"""The events of one engine step. Plain values; one `StepEvents` per step.

Every step has a token for every request, so tokens are named tuples, which are several times faster to make than
frozen dataclasses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.types import FinishReason, PromptLogprob, TokenOutput
from baton.engine.pooling import Vector


@dataclass(frozen=True)
class RequestStarted:
    """The first chunk of a request's prompt was in this step. Sent once, also when the prompt is recomputed later.

    Args:
        cached_tokens: leading tokens whose KV was in the cache. No `ChunkComputed` covers them, nor the tokens whose KV
            came from elsewhere.
        queue_s: time from submit (or from `prefill_here`) to when this step was scheduled, with any wait for a seat.
            The rest of the TTFT is computation.
    """

    request_id: str
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True)
class ChunkComputed:
    """The KV of positions `token_start` to `token_stop` (exclusive) is in the request's blocks of the cache.

    Args:
        state_slot: where the recurrent state after `token_stop` tokens is, until the request's next step; -1: the model
            has none.
        owner: the rank with the blocks; None: every rank has blocks of these numbers.
    """

    request_id: str
    token_start: int
    token_stop: int
    block_ids: tuple[int, ...]
    state_slot: int = -1
    owner: int | None = None


@dataclass(frozen=True)
class LayersComputed:
    """A chunk's KV is in the cache for the first `layer_stop` layers, and for the first `index_stop` layers of an
    index. The step still runs; `ChunkComputed` follows."""

    request_id: str
    token_start: int
    token_stop: int
    layer_stop: int
    block_ids: tuple[int, ...]
    owner: int | None = None
    index_stop: int = 0


@dataclass(frozen=True)
class PromptScored:
    """The logprobs of all tokens of a prompt. They come once, in the step that samples the output's first token."""

    request_id: str
    logprobs: tuple[PromptLogprob, ...]


@dataclass(frozen=True)
class PromptPooled:
    """The pooled values of a prompt. The request has ended, and its blocks are free."""

    request_id: str
    values: Vector


class TokenSampled(NamedTuple):
    """A token of the request; the last one when `finish_reason` is set.

    Args:
        stop_reason: the id of the stop token as text when one of `stop_token_ids` ended the request, else empty.
    """

    request_id: str
    token: TokenOutput
    finish_reason: FinishReason | None
    stop_reason: str


# Makes a TokenSampled from a tuple of its fields in half the time of a call of the class: 0.4 us instead of 0.8.
token_sampled: Callable[[tuple[str, TokenOutput, FinishReason | None, str]], TokenSampled] = partial(
    tuple.__new__, TokenSampled
)


class DraftsChecked(NamedTuple):
    """A step has computed draft tokens of a request after its newest one.

    Args:
        drafted: draft tokens.
        accepted: those that were kept. The step brings as many more tokens of the request.
    """

    request_id: str
    drafted: int
    accepted: int


class TokensDrafted(NamedTuple):
    """The drafts of the model's own layer after the first token of a prefill-only request, for the node that decodes
    it. They come with that token."""

    request_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RequestFailed:
    """The request has ended, or was refused. Its blocks are free; those of a prefill-only request that has run are held
    until it is aborted, unless its hidden states are pooled."""

    request_id: str
    error: BatonError


@dataclass(frozen=True)
class StepEvents:
    """The events of a step that has ended, or those of a running step, which has only `layers` and 0 seconds.

    `seconds` is the time of the forward and the sampling, without scheduling.
    """

    step: int
    seconds: float
    started: tuple[RequestStarted, ...] = ()
    chunks: tuple[ChunkComputed, ...] = ()
    tokens: tuple[TokenSampled, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    layers: tuple[LayersComputed, ...] = ()
    scored: tuple[PromptScored, ...] = ()
    pooled: tuple[PromptPooled, ...] = ()
    drafts: tuple[DraftsChecked, ...] = ()
    drafted: tuple[TokensDrafted, ...] = ()

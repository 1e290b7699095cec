"""The input and status of an engine: requests, reservations, limits, load. Plain values."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Self, TypeAlias

from baton.core.block_keys import KeyChains
from baton.core.decode_pace import DecodePace
from baton.core.errors import ConfigError
from baton.core.kv_entries import KeepTime, KeptPrefix
from baton.core.sampling import ResolvedSampling
from baton.core.types import DEFAULT_OBJECTIVE, AdapterRef
from baton.engine.pooling import PoolSpan
from baton.engine.scheduling.slices import DEFAULT_TTFT_S

# NOTE: token and block ids are in `array` and not in lists: slices are memory copies, and the runner reads them through
# the buffer protocol. The alias is quoted because `array` cannot be subscripted at run time before Python 3.12.
IntArray: TypeAlias = "array[int]"


def int_array(values: Sequence[int] = ()) -> IntArray:
    return array("i", values)


class QueuePlace(NamedTuple):
    """A request's place in a queue: lower places run first and are preempted last.

    All queues of a node sort by this alone.

    Args:
        due_s: when the request's first token is due; minus infinity: its client has tokens, so its stream stalls
            while it waits.
        arrival: number in order of arrival.
    """

    priority: int
    due_s: float
    arrival: int

    @classmethod
    def of(cls, request: "EngineRequest", *, arrival: int, now: float) -> Self:
        """The place of a request that arrives now."""
        if request.output:
            return cls(request.priority, -inf, arrival)
        since_s = now if request.since_s is None else request.since_s
        due_s = since_s + DEFAULT_TTFT_S if request.due_s is None else request.due_s
        return cls(request.priority, due_s, arrival)

    @property
    def begun(self) -> bool:
        """Whether the request has begun: nothing of its priority that arrived later goes before it."""
        return self.due_s == -inf

    def as_begun(self) -> Self:
        return self._replace(due_s=-inf)


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to compute.

    Args:
        prompt: an `IntArray` where it is long, because that is copied and checked as a whole.
        output: tokens that the client already has. They are prefilled after the prompt, and the next token's index is
            `len(output)`.
        cache_salt: only requests with the same salt share cached blocks.
        keep: how long stores outside of the cache keep its KV; None: as long as it is worth more than other KV.
        prefill_only: the request ends with its first sampled token; its blocks stay held until it is aborted.
        layers_per_group: a chunk of the prompt causes an event after about this many layers each, while the step
            computes the next layers; 0: only when the chunk is complete. Events may come more often when another
            request of the step asks for smaller groups.
        decode_context_tokens: longest prompt plus output on the node that decodes the request; None: this engine.
        priority: among waiting requests lower values go first, and equal ones by `due_s`, then in order of arrival.
        due_s: when its first token is due, on the engine's clock. Late requests go after those that can still be in
            time; None: see `baton.engine.scheduling.prompts`.
        refuse_late: fail the request as soon as it cannot meet `due_s`, wherever possible before anything is computed.
        tpot_s: the mean time per further token that is expected; bounds the prompts in steps with this request. None:
            see `baton.engine.scheduling.slices`.
        gap_factor, ttft_factor: what it gets without a TPOT and a TTFT, see `Objective`.
        stop_tokens: compute only this many tokens and sample nothing; the request ends with its last `ChunkComputed`,
            and its blocks stay held. Only for `prefill_only`, without prompt logprobs.
        pool: pool these hidden states and sample nothing; the request ends with its prompt, and its blocks are free
            then. Only for `prefill_only`, without output and prompt logprobs.
        since_s: since when its client waits for it, on the engine's clock; None: now.
        waited_s: for how long its client had waited for its first token when it came.
        kept_elsewhere: a node that has more of the sequence than this one; None: none is known.
        adapter: the node must have it; None: the base model.
        adapter_slot: where the device has the adapter; set by the engine.
        chains: the keys of its blocks.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: ResolvedSampling
    output: tuple[int, ...] = ()
    cache_salt: str = ""
    keep: KeepTime | None = None
    prefill_only: bool = False
    layers_per_group: int = 0
    decode_context_tokens: int | None = None
    priority: int = 0
    due_s: float | None = None
    refuse_late: bool = False
    tpot_s: float | None = None
    gap_factor: float = DEFAULT_OBJECTIVE.gap_factor
    ttft_factor: float = DEFAULT_OBJECTIVE.ttft_factor
    stop_tokens: int | None = None
    pool: PoolSpan | None = None
    since_s: float | None = None
    waited_s: float = 0.0
    kept_elsewhere: KeptPrefix | None = None
    adapter: AdapterRef | None = None
    adapter_slot: int = -1
    # NOTE: not an argument, so that `replace` gives a request with other tokens other chains.
    chains: KeyChains = field(default_factory=KeyChains, init=False, compare=False, repr=False)

    @property
    def tokens(self) -> IntArray:
        """Prompt and output, as a new array."""
        return int_array(self.prompt) + int_array(self.output)

    @property
    def scores_prompt(self) -> bool:
        """Whether the logprobs of its prompt are wanted. They come with the output's first token, so a client that
        has output tokens has them."""
        return self.sampling.prompt_logprobs is not None and not self.output


@dataclass(frozen=True)
class Reservation:
    """Blocks held for a request whose KV comes from elsewhere.

    Args:
        block_ids: all blocks of the sequence in order, including the first decode slot.
        cached_tokens: leading tokens whose KV is in these blocks already; a multiple of the block size, and less than
            the sequence.
        resume_at: first position that may still be computed. KV older than the sliding window is not sent.
        state_slot: where the recurrent state after the sequence's last token belongs; -1: the model has none.
        owner: the rank with the blocks; None: every rank has blocks of these numbers.
        restart_at: first token to compute if the prompt is computed here after all; less than `cached_tokens` if the
            recurrent state after these is not kept. None: `cached_tokens`.
    """

    request_id: str
    block_ids: tuple[int, ...]
    cached_tokens: int
    resume_at: int
    state_slot: int = -1
    owner: int | None = None
    restart_at: int | None = None

    @property
    def skipped_tokens(self) -> int:
        """Leading tokens that need not be computed if the prompt is computed here."""
        return self.cached_tokens if self.restart_at is None else self.restart_at


@dataclass(frozen=True)
class EngineLimits:
    """The limits of one engine, set by its operator.

    Args:
        max_batch_tokens: tokens of one step; prompts are cut to what the decodes leave.
        max_batch_requests: requests of one step. See `seats`.
        max_waiting: requests that may wait for room.
        max_context_tokens: longest prompt plus output; None: the limit of the model and the cache.
        stream_share: largest share of seats and blocks for requests that decode here, so that `prefill_only` requests
            find room. The first request that decodes is admitted at its turn in any case.

    Raises:
        ConfigError: a limit is too small.
    """

    max_batch_tokens: int
    max_batch_requests: int
    max_waiting: int
    prefix_cache: bool
    max_context_tokens: int | None = None
    stream_share: float = 1.0

    def __post_init__(self) -> None:
        _at_least("max_batch_tokens", self.max_batch_tokens, 1)
        _at_least("max_batch_requests", self.max_batch_requests, 1)
        _at_least("max_waiting", self.max_waiting, 0)
        if self.max_context_tokens is not None:
            _at_least("max_context_tokens", self.max_context_tokens, 2)

    @property
    def seats(self) -> int:
        """Most requests that run at a time: each must find a token in every step. A request takes a seat when it can be
        computed, not while its KV is on the way; as many more may be on the way."""
        return min(self.max_batch_requests, self.max_batch_tokens)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and its cache that scheduling needs.

    Args:
        max_context_tokens: longest sequence that the model supports.
        identity: a text that differs between models whose KV differs; part of every prefix key.
        window_tokens: the widest sliding window of any layer; 0 where no layer has one.
        state_slots: places for recurrent states; 0: the model has none.
        scan_tokens: recurrent layers compute prompts in pieces of this many tokens; unless `rows_in_order`, a chunk
            that does not end at a multiple changes last bits.
        num_owners: pools of `num_blocks` each; every request has its blocks in one of them. More than 1 with attention
            data parallelism: a pool for each rank.
        drafts: the model has a layer of its own that drafts tokens.
        rows_in_order: a token has the same bits as a decode and in any chunk of a prompt, so recurrent layers compute
            prompts token by token.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    identity: str
    window_tokens: int = 0
    state_slots: int = 0
    scan_tokens: int = 64
    num_owners: int = 1
    drafts: bool = False
    rows_in_order: bool = False


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine.

    Args:
        blocks_free: blocks that no request holds, including cached ones.
        blocks_open: blocks of each pool that one more decoding request may take.
        blocks_leased: blocks of requests that wait for their KV, or that were prefilled and wait for release.
        tokens_waiting: tokens of waiting and running requests that are not prefilled yet.
        requests_total: number of all requests so far.
        preemptions: how often a request gave its blocks back to be recomputed later.
        backlog_s: predicted time to compute `tokens_waiting` if nothing else ran; 0 while step costs are unknown.
        decode_rows: requests that decode.
        context_tokens: sum of their contexts: keys that one token of each reads.
        refused_late: how many requests were refused because they could not meet their deadline.
        cache_queries, cache_hits: tokens looked up in the prefix cache so far, and tokens found there.
        pace: what speculation makes of decode steps, that of plain steps while no request decodes; None: no drafts.
    """

    blocks_total: int
    blocks_free: int
    blocks_open: tuple[int, ...]
    blocks_leased: int
    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    requests_total: int
    preemptions: int
    backlog_s: float = 0.0
    decode_rows: int = 0
    context_tokens: int = 0
    refused_late: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    pace: DecodePace | None = None


def context_limit(limits: EngineLimits, facts: ModelFacts) -> int:
    """Longest prompt plus output that an engine can hold."""
    limit = min(facts.max_context_tokens, facts.num_blocks * facts.block_size)
    return limit if limits.max_context_tokens is None else min(limit, limits.max_context_tokens)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}", field=name, value=value, allowed=(f"an integer of at least {least}",))

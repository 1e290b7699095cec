"""What goes into an engine and what it says of itself: requests, reservations, limits, load. Plain values."""

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from baton.errors import ConfigError, InvalidRequest
from baton.types import SamplingParams, TokenOutput

# NOTE: token and block ids lie in `array` rather than in lists: slices are memory copies, and the runner reads them
# through the buffer protocol. A quoted alias, because `array` cannot be subscripted at run time before Python 3.12.
IntArray: TypeAlias = "array[int]"


def int_array(values: tuple[int, ...] | list[int] = ()) -> IntArray:
    return array("i", values)


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to compute.

    Args:
        output: tokens already given to the client. They are prefilled behind the prompt, and the next token's index
            is `len(output)`.
        cache_salt: only requests of equal salt share cached blocks.
        prefill_only: ends with its first sampled token; its blocks stay held until it is aborted.
        layers_per_group: a chunk of the prompt is told of after about so many layers each, while the step computes the
            next ones, and not only when all are done; 0: only then. May come finer, where others want that.
        decode_context_tokens: longest prompt plus output where it is decoded; None: that is here.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    output: tuple[int, ...] = ()
    cache_salt: str = ""
    prefill_only: bool = False
    layers_per_group: int = 0
    decode_context_tokens: int | None = None


@dataclass(frozen=True)
class Reservation:
    """Blocks held for a request whose KV comes from elsewhere.

    Args:
        block_ids: all blocks of the sequence, in order, the first decode slot included.
        cached_tokens: leading tokens whose KV is in these blocks already; a multiple of the block size, and at least
            one token of the sequence stays out of it.
        resume_at: the earliest token that may ever be computed on top of these blocks: what neither it nor a later one
            reads, because of a sliding window, need not come.
    """

    request_id: str
    block_ids: tuple[int, ...]
    cached_tokens: int
    resume_at: int


@dataclass(frozen=True)
class EngineLimits:
    """What an operator allows one engine.

    Args:
        max_batch_tokens: tokens of one step; prompts are cut to what decodes leave of it.
        max_batch_requests: requests of one step. Reserved requests count, so that one whose KV has arrived decodes in
            the next step.
        max_waiting: requests that may wait for room.
        max_context_tokens: longest prompt plus output; None leaves the model's and the cache's own limit.
        chunk_align_tokens: a chunk ends at the next multiple of it or at the end of what is known, and a prefix is
            reused up to one, so that how a prompt is cut does not depend on what else runs; None cuts where the budget
            ends. A chunk that the rest of a step's budget does not hold waits for the next step.
        retry_after_s: hint to whoever is refused for lack of room.

    Raises:
        ConfigError: a limit is too small.
    """

    max_batch_tokens: int
    max_batch_requests: int
    max_waiting: int
    prefix_cache: bool
    max_context_tokens: int | None = None
    chunk_align_tokens: int | None = None
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        _at_least("max_batch_tokens", self.max_batch_tokens, 1)
        _at_least("max_batch_requests", self.max_batch_requests, 1)
        _at_least("max_waiting", self.max_waiting, 0)
        if self.max_context_tokens is not None:
            _at_least("max_context_tokens", self.max_context_tokens, 2)
        if self.chunk_align_tokens is not None:
            _at_least("chunk_align_tokens", self.chunk_align_tokens, 1)
            self._check_room_for_a_chunk(self.chunk_align_tokens)

    def chunk_tokens(self, start: int, stop: int, budget: int) -> int:
        """How much of a prompt from `start` to `stop` goes into a step with that budget left; 0: it waits for more."""
        if self.chunk_align_tokens is None:
            return min(budget, stop - start)
        whole = min(stop, (start // self.chunk_align_tokens + 1) * self.chunk_align_tokens) - start
        return whole if whole <= budget else 0

    def _check_room_for_a_chunk(self, chunk_tokens: int) -> None:
        """Beside decodes of all others a whole chunk must fit, or its prompt might wait for ever."""
        least = chunk_tokens + self.max_batch_requests - 1
        if self.max_batch_tokens < least:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, which leaves no room for a chunk of {chunk_tokens} "
                f"tokens beside the decodes of {self.max_batch_requests - 1} other requests",
                field="max_batch_tokens",
                value=self.max_batch_tokens,
                allowed=(f"an integer of at least {least}",),
                cure="raise max_batch_tokens, or lower max_batch_requests",
            )


@dataclass(frozen=True)
class ModelFacts:
    """What scheduling must know of the model and its cache.

    Args:
        max_context_tokens: longest sequence that the model was made for.
        identity: text that differs between any two models whose KV differs; part of every prefix key.
        window_tokens: the widest sliding window of any layer; 0 where no layer has one.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    identity: str
    window_tokens: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """How full an engine is.

    Args:
        blocks_free: blocks that no request holds; cached ones among them.
        blocks_leased: blocks of requests that wait for their KV, or that were prefilled and wait for release.
        tokens_waiting: known tokens of waiting and running requests whose KV is still to be computed here.
        requests_total: requests ever taken in.
        preemptions: how often a request gave its blocks back to be recomputed later.
    """

    blocks_total: int
    blocks_free: int
    blocks_leased: int
    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    requests_total: int
    preemptions: int


def context_limit(limits: EngineLimits, facts: ModelFacts) -> int:
    """Longest prompt plus output that an engine can hold."""
    limit = min(facts.max_context_tokens, facts.num_blocks * facts.block_size)
    return limit if limits.max_context_tokens is None else min(limit, limits.max_context_tokens)


def check_request(request: EngineRequest, *, vocab_size: int, max_context_tokens: int) -> None:
    """Raises InvalidRequest when the request could never run; names what is wrong and what would be right."""
    if not request.prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt", allowed=("at least 1 token",))
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(request.sampling.logit_bias), vocab_size)
    check_output(request, request.output, vocab_size=vocab_size, max_context_tokens=max_context_tokens)


def check_output(request: EngineRequest, output: tuple[int, ...], *, vocab_size: int, max_context_tokens: int) -> None:
    """Raises InvalidRequest when `request` cannot go on behind `output`."""
    _check_ids("output", output, vocab_size)
    if len(output) >= request.sampling.max_tokens:
        raise InvalidRequest(
            f"{len(output)} tokens were given already and max_tokens is {request.sampling.max_tokens}",
            field="output",
            value=len(output),
            allowed=(f"at most {request.sampling.max_tokens - 1} tokens",),
        )
    length = len(request.prompt) + len(output)
    if length >= max_context_tokens:
        raise InvalidRequest(
            f"prompt and given output have {length} tokens, which leaves no room for more",
            field="prompt",
            value=length,
            allowed=(f"at most {max_context_tokens - 1} tokens",),
            cure="shorten the prompt",
        )


def check_continuation(had: tuple[int, ...], output: tuple[int, ...]) -> None:
    """Raises InvalidRequest when `output` does not begin with the tokens that the request had."""
    if output[: len(had)] != had:
        raise InvalidRequest(
            f"the output does not begin with the {len(had)} tokens that the request had",
            field="output",
            value=output,
            cure="give all output tokens so far",
        )


def check_first_token(first: TokenOutput, *, index: int, vocab_size: int) -> None:
    """Raises InvalidRequest when `first` is not the token at `index` of a request's output."""
    _check_ids("first_token", (first.token_id,), vocab_size)
    if first.index != index:
        raise InvalidRequest(
            f"the first token has index {first.index}",
            field="first_token.index",
            value=first.index,
            allowed=(str(index),),
        )


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{name} has token id {wrong}", field=name, value=wrong, allowed=(f"0 to {vocab_size - 1}",)
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}", field=name, value=value, allowed=(f"an integer of at least {least}",))

"""Checks requests, and other nodes' messages about them: ids, lengths, and continued outputs. Pure."""

from collections.abc import Sequence

from baton.core.errors import InvalidRequest
from baton.core.token_ids import first_outside
from baton.core.types import TokenOutput
from baton.engine.request import EngineRequest


def check_request(request: EngineRequest, *, vocab_size: int, max_context_tokens: int) -> None:
    """Checks that the request can run; raises InvalidRequest otherwise."""
    if not request.prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt", allowed=("at least 1 token",))
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(request.sampling.logit_bias), vocab_size)
    check_output(request, request.output, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
    if request.pool is not None:
        request.pool.check(len(request.prompt), vocab_size=vocab_size)
        assert request.prefill_only, "the Pool service makes such requests"
        assert not request.output, "as above"
        assert not request.scores_prompt, "as above"
    if request.stop_tokens is not None:
        _check_stop(request, request.stop_tokens)


def _check_stop(request: EngineRequest, stop_tokens: int) -> None:
    length = len(request.prompt) + len(request.output)
    if not 0 < stop_tokens < length:
        raise InvalidRequest(
            f"stop_tokens is {stop_tokens} of {length} tokens",
            field="stop_tokens",
            value=stop_tokens,
            allowed=(f"1 to {length - 1}",),
        )
    if not request.prefill_only:
        raise InvalidRequest(
            "a request that stops within its prompt must be prefill_only", field="stop_tokens", value=stop_tokens
        )
    if request.scores_prompt:
        raise _split_scores("stop_tokens", stop_tokens)


def check_received(request: EngineRequest, tokens: int, *, stop: int, multiple: int) -> None:
    """Checks that the KV of the first `tokens` tokens can have been received; raises InvalidRequest otherwise.

    Args:
        stop: length of the sequence, whose last token is always computed here.
        multiple: a sequence may be split at multiples of this many tokens.
    """
    if tokens % multiple or not 0 <= tokens < stop:
        raise InvalidRequest(
            f"the KV of {tokens} of {stop} tokens cannot have arrived",
            field="received_tokens",
            value=tokens,
            allowed=(f"a multiple of {multiple} from 0 to {stop - 1}",),
        )
    if tokens and request.scores_prompt:
        raise _split_scores("received_tokens", tokens)


def _split_scores(field: str, tokens: int) -> InvalidRequest:
    return InvalidRequest(
        "a prompt whose logprobs are wanted cannot be split",
        field=field,
        value=tokens,
        cure="prefill it on one node",
    )


def check_output(request: EngineRequest, output: tuple[int, ...], *, vocab_size: int, max_context_tokens: int) -> None:
    """Checks that `request` can continue after `output`; raises InvalidRequest otherwise."""
    _check_ids("output", output, vocab_size)
    if len(output) >= request.sampling.max_tokens:
        raise InvalidRequest(
            f"the output has {len(output)} tokens already, and max_tokens is {request.sampling.max_tokens}",
            field="output",
            value=len(output),
            allowed=(f"at most {request.sampling.max_tokens - 1} tokens",),
        )
    length = len(request.prompt) + len(output)
    if length >= max_context_tokens:
        raise InvalidRequest(
            f"prompt and output have {length} tokens, which leaves no room for another one",
            field="prompt",
            value=length,
            allowed=(f"at most {max_context_tokens - 1} tokens",),
            cure="shorten the prompt",
        )


def check_continuation(known: tuple[int, ...], output: tuple[int, ...]) -> None:
    """Checks that `output` begins with `known`, the request's output so far; raises InvalidRequest otherwise."""
    if output[: len(known)] != known:
        raise InvalidRequest(
            f"the output does not begin with the {len(known)} tokens that the request has",
            field="output",
            value=output,
            cure="pass all output tokens so far",
        )


def check_first_token(first: TokenOutput, *, index: int, vocab_size: int) -> None:
    """Checks that `first` is the token at `index` of a request's output; raises InvalidRequest otherwise."""
    _check_ids("first_token", (first.token_id,), vocab_size)
    if first.index != index:
        raise InvalidRequest(
            f"the first token has index {first.index}",
            field="first_token.index",
            value=first.index,
            allowed=(str(index),),
        )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if (wrong := first_outside(ids, vocab_size)) is not None:
        raise InvalidRequest(
            f"{name} has token id {wrong}", field=name, value=wrong, allowed=(f"0 to {vocab_size - 1}",)
        )

"""Checks everything that a client can get wrong in a request, before any node receives it."""

import secrets
from dataclasses import replace

from baton.convert import sampling_from_proto
from baton.errors import InvalidRequest
from baton.types import SamplingParams
from gateway.model import ServedModel
from protos.baton.v1 import generation_pb2 as pb

_STOP_STRINGS_MAX = 16
_STOP_STRING_CHARACTERS_MAX = 256


def check_sampling(request: pb.GenerateRequest, model: ServedModel) -> SamplingParams:
    """The sampling parameters, with a random seed where the client gave none, so that any node can continue.

    Raises:
        InvalidRequest: names the field, its value, and what is allowed.
    """
    sampling = sampling_from_proto(request.sampling)
    model.check_token_ids("sampling.stop_token_ids", list(sampling.stop_token_ids))
    model.check_token_ids("sampling.logit_bias", list(sampling.logit_bias))
    _check_stops(sampling.stop)
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(64))


def check_prompt(prompt: list[int], model: ServedModel, *, max_context_tokens: int) -> None:
    """Raises:
    InvalidRequest: the prompt is empty, too long, or has token ids that the model does not know.
    """
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt", allowed=("1 token or more",))
    if len(prompt) >= max_context_tokens:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens",
            field="prompt",
            value=len(prompt),
            allowed=(f"1 to {max_context_tokens - 1} tokens",),
            cure="shorten it",
        )
    model.check_token_ids("prompt", prompt)


def check_prompt_given(request: pb.GenerateRequest) -> None:
    """Raises:
    InvalidRequest: the request has neither text nor token ids, or they are empty.
    """
    given = request.WhichOneof("prompt")
    if given is None:
        cure = "set `text` or `token_ids`"
        raise InvalidRequest("the prompt is missing", field="prompt", allowed=("text", "token_ids"), cure=cure)
    # NOTE: a tokenizer may turn no text into a token; a client that sends no text has made a mistake all the same.
    if not (request.text if given == "text" else request.token_ids.ids):
        raise InvalidRequest("the prompt is empty", field="prompt", allowed=("1 token or more",), cure="give some text")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > _STOP_STRINGS_MAX:
        raise InvalidRequest(
            f"{len(stops)} stop strings", field="stop", value=len(stops), allowed=(f"up to {_STOP_STRINGS_MAX}",)
        )
    for stop in stops:
        if len(stop) > _STOP_STRING_CHARACTERS_MAX:
            allowed = (f"up to {_STOP_STRING_CHARACTERS_MAX} characters",)
            raise InvalidRequest(f"a stop string has {len(stop)} characters", field="stop", value=stop, allowed=allowed)

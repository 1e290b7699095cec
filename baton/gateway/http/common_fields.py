"""Parameters that Baton adds to the Responses and the Messages API, named as in vLLM and SGLang, and
what those that all APIs share become in a request."""

from typing import Annotated

from pydantic import Field

from baton.gateway.http.baton_options import BatonOptions
from baton.gateway.http.bodies import GenerationBody
from baton.gateway.http.checking import U32, Biases, Items, JsonObject, Model
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

# Sampling numbers with the same name in the request and on the wire.
_SAME_NAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip


class CommonFields(Model):
    """Sampling numbers have their ranges in `baton.core.types.SamplingParams`; absent ones are the model's defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None  # -1 and 0: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    logit_bias: Biases | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[U32] | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    baton: BatonOptions = BatonOptions()


def fill(message: pb.GenerateRequest, given: CommonFields | GenerationBody) -> common_pb2.SamplingParams:
    """Writes to the message what all APIs have under the same names; returns its sampling parameters."""
    sampling = message.sampling
    for name in _SAME_NAME:
        value = getattr(given, name)
        if value is not None:
            setattr(sampling, name, value)
    if given.seed is not None:
        sampling.seed = given.seed % 2**64
    if given.top_k is not None:
        sampling.top_k = max(given.top_k, 0)
    if given.include_stop_str_in_output is not None:
        sampling.include_stop = given.include_stop_str_in_output
    for token_id, bias in (given.logit_bias or {}).items():
        sampling.logit_bias[int(token_id)] = bias
    sampling.stop_token_ids.extend(given.stop_token_ids or ())
    given.baton.write(message)
    message.cache_salt = given.cache_salt or ""
    message.priority = given.priority or 0
    return sampling


def reasoning_variables(*, effort: str | None, thinking: bool | None = None) -> dict[str, object]:
    """Variables of the chat template for an effort and for reasoning at all; None: as the template does by default.

    `reasoning_effort` is gpt-oss' name, `enable_thinking` Qwen's and GLM's, `thinking` DeepSeek's and Granite's. A
    template ignores variables that it does not know.
    """
    if effort == "none":
        thinking = False
    variables: dict[str, object] = {}
    if effort not in (None, "none"):
        thinking = True if thinking is None else thinking
        variables["reasoning_effort"] = effort
    if thinking is not None:
        variables |= {"enable_thinking": thinking, "thinking": thinking}
    return variables

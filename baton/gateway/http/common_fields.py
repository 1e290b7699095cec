"""Parameters that Baton adds to the Responses and the Messages API, named as in vLLM and SGLang, and
what those that all APIs share become in a request."""

from typing import Annotated

from pydantic import Field

from baton.core.sampling_field import Door
from baton.gateway.http.baton_options import BatonOptions
from baton.gateway.http.bodies import GenerationBody
from baton.gateway.http.checking import JsonObject, Model
from baton.gateway.http.sampling import fill_sampling
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


class CommonFields(Model):
    """What these APIs take besides their own parameters and those of sampling."""

    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    baton: BatonOptions = BatonOptions()


def fill(message: pb.GenerateRequest, given: CommonFields | GenerationBody, door: Door) -> common_pb2.SamplingParams:
    """Writes to the message what all APIs have; returns its sampling parameters."""
    fill_sampling(message.sampling, given, door)
    given.baton.write(message)
    message.cache_salt = given.cache_salt or ""
    message.priority = given.priority or 0
    return message.sampling


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

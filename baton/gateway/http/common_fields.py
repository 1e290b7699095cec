"""Parameters that Baton adds to the Responses and Messages APIs, named as in vLLM and SGLang, and the translation of
the parameters that all APIs share."""

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
    """Baton's additional parameters of the Responses and Messages APIs."""

    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    baton: BatonOptions = BatonOptions()


def fill(message: pb.GenerateRequest, given: CommonFields | GenerationBody, door: Door) -> common_pb2.SamplingParams:
    """Copies the parameters that all APIs share to the message. Returns the message's sampling parameters."""
    fill_sampling(message.sampling, given, door)
    given.baton.write(message)
    message.cache_salt = given.cache_salt or ""
    message.priority = given.priority or 0
    return message.sampling


def reasoning_variables(*, effort: str | None, thinking: bool | None = None) -> dict[str, object]:
    """Returns chat-template variables that set the reasoning effort, and whether the model reasons.

    gpt-oss uses `reasoning_effort`, Qwen and GLM `enable_thinking`, DeepSeek and Granite `thinking`. Templates ignore
    variables that they do not know.

    Args:
        effort: "none" turns reasoning off; None: the template's default.
        thinking: whether the model reasons; None: the template's default.
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

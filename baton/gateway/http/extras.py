"""Parameters that Baton adds to the Responses and the Messages API, named as in vLLM and SGLang, and
what those that all APIs share become in a request."""

from typing import Annotated

from pydantic import Field

from baton.core.sampling_field import Door
from baton.gateway.http.bodies import GenerationBody
from baton.gateway.http.checking import U32, Items, JsonObject, Model
from baton.gateway.http.sampling import fill_sampling
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


class Extras(Model):
    """What these APIs take besides their own parameters and those of sampling."""

    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    output_token_ids: Items[U32] | None = None
    revision: str | None = None
    chat_template_kwargs: JsonObject | None = None


def fill(message: pb.GenerateRequest, given: Extras | GenerationBody, door: Door) -> common_pb2.SamplingParams:
    """Writes to the message what all APIs have; returns its sampling parameters."""
    fill_sampling(message.sampling, given, door)
    message.output_token_ids.extend(given.output_token_ids or ())
    message.revision = given.revision or ""
    message.cache_salt = given.cache_salt or ""
    message.priority = given.priority or 0
    message.session_id = given.session_id or ""
    set_slo(message.slo, ttft_ms=given.ttft_ms, tpot_ms=given.tpot_ms)
    return message.sampling


def set_slo(slo: common_pb2.Slo, *, ttft_ms: float | None, tpot_ms: float | None) -> None:
    """Sets the bounds that the message does not have yet."""
    if ttft_ms is not None and not slo.HasField("ttft_s"):
        slo.ttft_s = ttft_ms / 1e3
    if tpot_ms is not None and not slo.HasField("tpot_s"):
        slo.tpot_s = tpot_ms / 1e3


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

"""The object `baton` in the bodies of all APIs, with Baton's own options. Answers may have a `baton` object too."""

from typing import Annotated

from pydantic import Field

from baton.core.kv_entries import KEEP_S_MAX
from baton.gateway.http.checking import U32, Items, Model
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


class BatonOptions(Model):
    """Baton's own options, all of them optional. With OpenAI's library, send `extra_body={"baton": {...}}`."""

    ttft_s: float | None = Field(None, gt=0, description="target time to the first token; default: the gateway's")
    tpot_s: float | None = Field(None, gt=0, description="target mean time per further token; default: the gateway's")
    session_id: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="requests of one session go to the same nodes if that costs nothing"
    )
    kv_keep_s: float | None = Field(
        None,
        ge=0,
        le=KEEP_S_MAX,
        description="seconds for which [stores outside of the caches](kept-kv.md#keep-times) keep the request's KV, as "
        "far as the client's share goes; 0: the session is over",
    )
    output_token_ids: Items[U32] = Field(
        [],
        description="tokens of the output that the client already has from a lost gateway; the answer continues after "
        "them. Needs the same x-request-id, and a seed unless sampling is greedy",
    )
    revision: str = Field(
        "",
        description="`system_fingerprint` or `revision` of the part of the answer that the client already has; the "
        "answer continues with the same weights and adapter, or fails",
    )
    receipt: bool = Field(False, description="add the receipt, as the header x-baton-receipt does")

    def write(self, message: pb.GenerateRequest) -> None:
        message.output_token_ids.extend(self.output_token_ids)
        message.revision = self.revision
        message.session_id = self.session_id or ""
        if self.kv_keep_s is not None:
            message.kv_keep_s = self.kv_keep_s
        set_slo(message.slo, ttft_s=self.ttft_s, tpot_s=self.tpot_s)


def set_slo(slo: common_pb2.Slo, *, ttft_s: float | None, tpot_s: float | None) -> None:
    """Sets those targets that the message does not have yet."""
    if ttft_s is not None and not slo.HasField("ttft_s"):
        slo.ttft_s = ttft_s
    if tpot_s is not None and not slo.HasField("tpot_s"):
        slo.tpot_s = tpot_s

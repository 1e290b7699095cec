"""The settings of gateways and of their endpoint picker, with their defaults, bounds and meanings.
`baton.settings.config` has the tree of all settings.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from baton.core.limits import COUNT_MAX, DURATION_S_MIN, SECONDS_MAX, TOKENS_MAX
from baton.core.types import DEFAULT_OBJECTIVE, LocalPolicy, Objective, Slo
from baton.settings.config import CommonSettings, ProcessSettings, check_printable
from baton.settings.internal import internal

GATEWAY_KEEPALIVE_S = 0.9  # twice that is at most 2 s
_RESOLVE_S = 5.0


class GatewaySettings(CommonSettings):
    """Settings of a gateway."""

    prefill: str = Field(
        "",
        description="prefill nodes, comma-separated: host:port, where names are resolved again every 5 s; "
        "file:///path, a list in a file; k8s://namespace/service:port, the endpoints of a Service of Kubernetes",
    )
    decode: str = Field("", description="decode nodes, in the same form")
    local_policy: LocalPolicy = Field(
        LocalPolicy.ELASTIC,
        description="where prompts are prefilled. strict: on prefill nodes only; prefer: on prefill nodes, except "
        "for short prompts and when no prefill node is available; local: on decode nodes; elastic: as "
        "prefer, but wherever the request's TTFT and TPOT are met at the lowest cost: on a prefill node, "
        "a decode node, or in two parts",
    )
    model_name: str | None = Field(
        None, description="name of the model for clients; default: the model directory's name"
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        le=TOKENS_MAX,
        description="longest prompt plus output; default: the model's limit. With LongRoPE, a number above the model's "
        "original context must be given to every node and gateway",
    )
    http_listen: str = Field(
        "127.0.0.1:0",
        description="host:port of the HTTP server (OpenAI, Anthropic); port 0 picks a free one; off: none",
    )
    cors_origins: str = Field(
        "",
        description="origins of web pages that may call the HTTP server from a browser, comma-separated: "
        "https://chat.example, http://localhost:5173; *: any page, only with API keys or tokens; default: none",
    )
    unknown_fields: Literal["refuse", "warn"] = Field(
        "refuse",
        description="what to do with unknown fields of HTTP bodies. refuse: the request is refused; "
        "warn: it is served without them, and headers x-baton-warning name them",
    )
    client_tls_cert: Path | None = Field(
        None, description="PEM file with the certificate that clients see, on both ports"
    )
    client_tls_key: Path | None = Field(None, description="PEM file with the key of client_tls_cert")
    api_keys: Path | None = Field(
        None, description="TOML file with the hashes, rights and limits of API keys; default: clients need no key"
    )
    jwt_keys: Path | None = Field(
        None,
        description="file that checks clients' tokens (JWT): a key set (JWKS), a PEM public key, or a secret, one word "
        "of at least 32 letters and digits",
    )
    jwt_audience: str | None = Field(None, description="audience that tokens must be for; default: any")
    jwt_issuer: str | None = Field(None, description="issuer that tokens must be from; default: any")
    kv_events: bool = Field(
        False,
        description="serve vLLM's SubscribeKvEvents to operators; it reveals the prompts of all clients",
    )
    chat_template: Path | None = Field(
        None, description="file with a jinja chat template to use in place of the checkpoint's"
    )
    user_special_tokens: Literal["allow", "text"] = Field(
        "allow",
        description="special tokens in clients' texts, such as the one that ends a text; allow: they are tokens, as in "
        "other servers; text: they are encoded as ordinary text, and only the chat template writes special tokens",
    )
    balance_roles: bool = Field(
        False,
        description="let nodes switch between prefill and decode, when one role has needed nodes for half a "
        "minute while the other could spare one; the last node of a role never switches",
    )
    request_timeout_s: float = Field(
        600.0, ge=DURATION_S_MIN, le=SECONDS_MAX, description="deadline of requests that state none"
    )
    max_queue_s: float = Field(
        10.0,
        ge=0,
        le=SECONDS_MAX,
        description="how long a request may wait for its turn at the gateway, and for room on a decode node",
    )
    ttft_ms: float | None = Field(
        None,
        ge=DURATION_S_MIN,
        le=1e3 * SECONDS_MAX,
        description="time to first token that requests expect if they state none; default: no bound",
    )
    tpot_ms: float | None = Field(
        None,
        ge=DURATION_S_MIN,
        le=1e3 * SECONDS_MAX,
        description="TPOT (mean time per token after the first) that requests expect if they state none; default: no "
        "bound",
    )
    gap_factor: float = Field(
        DEFAULT_OBJECTIVE.gap_factor,
        ge=1.05,
        le=100,
        description="how many times as long prompts may make a decode step, for requests without a TPOT",
    )
    ttft_factor: float = Field(
        DEFAULT_OBJECTIVE.ttft_factor,
        ge=1,
        le=1000,
        description="time to first token that requests without a TTFT expect, in multiples of the time to compute "
        "their prompt alone, but at least 0.2 s; when prompts wait longer, steps exceed gap_factor more and more",
    )
    refuse_late: bool = Field(
        False,
        description="refuse a request at once if its first token cannot arrive in time, instead of serving it late",
    )
    response_store_mib: float = Field(
        64.0,
        ge=0,
        le=COUNT_MAX,
        description="memory for answers of /v1/responses, so that previous_response_id continues them; all workers "
        "together; 0: none is stored",
    )
    access_log: bool = Field(False, description="log one line with measurements for each finished request")
    workers: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processes that serve the same ports as one gateway; auto, the default: one for every two cores "
        "and 512 MiB that its affinity and its container's limits allow, from 1 to 8. Where nodes of prefill and "
        "decode are on the same host, each of them or each GPU keeps four cores, and two processes for each GPU "
        "suffice, so 1 without GPUs",
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, le=COUNT_MAX, description="maximum concurrent requests; further ones are refused with a retry hint"
    )

    http_body_mib: float = internal(32.0, "largest body of an HTTP request, and largest gRPC message")
    resolve_s: float = internal(_RESOLVE_S, "interval at which names of nodes are resolved and their files read again")
    keepalive_s: float = internal(
        GATEWAY_KEEPALIVE_S,
        "a node is pinged that often, and counts as lost if it answers no ping for that long; a node with busy Python "
        "still answers",
    )
    failover_wait_s: float = internal(
        30.0,
        "how long a request waits for a node: one that has begun when its own was lost, a new one while nodes load or "
        "drain, or were lost no longer ago",
    )
    prefill_stall_s: float = internal(10.0, "a prefill that reports no progress for that long is started again")
    decode_stall_s: float = internal(30.0, "a decode node that sends nothing for that long counts as lost")
    max_attempts: int = internal(
        3,
        "most prefill attempts per request; the last one runs on the decode node. Under policy strict: most nodes that "
        "may fail or end with a request; broken links do not count",
    )
    link_retry_s: float = internal(
        60.0, "interval at which a pair that was refused for its slow link is measured again"
    )
    balance_backlog_s: float = internal(
        2.0,
        "prefill needs nodes when prompts of more seconds wait on the average prefill node; decode, when its nodes use "
        "more than 80 % of their blocks or seats",
    )
    balance_hold_s: float = internal(30.0, "how long a role has needed nodes before balance_roles moves one")
    balance_cool_down_s: float = internal(
        120.0, "how long balance_roles moves no node after one has changed its role, or nodes came or went"
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _is_chosen(cls, given: object) -> object:
        return None if given == "auto" else given

    @field_validator("model_name")
    @classmethod
    def _is_model_name(cls, name: str | None) -> str | None:
        return check_printable(name)

    @property
    def processes(self) -> int:
        """The number of workers; a gateway that has not chosen it yet counts as one process."""
        return self.workers or 1

    @property
    def locked(self) -> bool:
        """Whether callers need a key or a token."""
        return self.api_keys is not None or self.jwt_keys is not None

    @property
    def slo(self) -> Slo:
        """The bounds of requests that state none."""
        return Slo(*(None if limit is None else limit / 1e3 for limit in (self.ttft_ms, self.tpot_ms)))

    @property
    def objective(self) -> Objective:
        """What requests get where no SLO bounds them."""
        return Objective(self.gap_factor, self.ttft_factor)


class PickerSettings(ProcessSettings):
    """Settings of the endpoint picker."""

    pool: str = Field(
        "",
        description="HTTP addresses of the gateways, comma-separated: host:port, where names are resolved again every "
        "5 s; file:///path, a list in a file; k8s://namespace/service:port, the endpoints of a Service of "
        "Kubernetes",
    )
    pool_metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of each gateway's host where /metrics is read, its --metrics-listen; default: its own HTTP "
        "port, which works without TLS and keys only",
    )
    sheddable: str = Field(
        "",
        description="names of the InferenceObjectives, comma-separated, whose requests are refused with 429 while at "
        "least eight requests wait on every gateway",
    )
    client_tls_cert: Path | None = Field(None, description="PEM file with the certificate that the proxy sees")
    client_tls_key: Path | None = Field(None, description="PEM file with the key of client_tls_cert")

    resolve_s: float = internal(_RESOLVE_S, "interval at which names of gateways are resolved and files read again")
    fallbacks: int = internal(1, "further gateways that each answer names for retries")
    poll_s: float = internal(0.25, "interval between polls of one gateway's load and readiness")
    stale_s: float = internal(3.0, "a gateway that has not answered for that long gets no requests")
    shed_waiting: int = internal(
        8, "sheddable requests are refused while at least this many requests wait on each gateway"
    )

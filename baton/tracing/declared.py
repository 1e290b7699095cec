"""Every span of a request's trace, and every attribute: one table, from which docs/tracing.md is written. Pure.

Names are those of OpenTelemetry's conventions for generative AI where there is one, else begin with `baton.`.
"""

from dataclasses import dataclass
from enum import StrEnum

from baton.metrics.metric import ProcessRole


class Attribute(StrEnum):
    """The name of an attribute."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_MODEL = "gen_ai.response.model"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    CHOICES = "gen_ai.request.choice.count"
    RESPONSE_ID = "gen_ai.response.id"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    FIRST_TOKEN_S = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    ERROR_TYPE = "error.type"
    REQUEST_ID = "baton.request.id"
    CLIENT = "baton.client"
    OUTCOME = "baton.outcome"
    KEPT = "baton.trace.kept_for"
    CUT = "baton.trace.events_dropped"
    PATH = "baton.path"
    WHY = "baton.path_why"
    ATTEMPTS = "baton.attempts"
    OUTPUT = "baton.output.index"
    ATTEMPT = "baton.attempt.number"
    NODE = "baton.node"
    ADDRESS = "server.address"
    REASON = "baton.retry.reason"
    STAGE = "baton.retry.stage"
    QUEUE_S = "baton.queue_s"
    TOKEN_START = "baton.token.start"
    TOKEN_STOP = "baton.token.stop"
    NODE_CACHED = "baton.prefix_cache.hit_tokens"
    BYTES = "baton.transfer.bytes"
    SEGMENTS = "baton.transfer.segments"
    TRANSPORT = "baton.transfer.transport"
    CONVERTED = "baton.transfer.kv_converted"
    EXPOSED_S = "baton.transfer.exposed_s"
    MERGED = "baton.merged"


MEANINGS = {
    Attribute.OPERATION: "`chat`, `text_completion` or `embeddings`",
    Attribute.PROVIDER: "`baton`",
    Attribute.REQUEST_MODEL: "the model's name that the client gave, or the served model's",
    Attribute.RESPONSE_MODEL: "the name of the served model",
    Attribute.MAX_TOKENS: "most tokens of each output",
    Attribute.CHOICES: "number of outputs, if there are several",
    Attribute.RESPONSE_ID: "the answer's id over HTTP, else the request's",
    Attribute.FINISH_REASONS: "why each output ended",
    Attribute.FIRST_TOKEN_S: "seconds from arrival to the first token",
    Attribute.INPUT_TOKENS: "tokens of the prompt, or of all prompts of a `pool`",
    Attribute.OUTPUT_TOKENS: "tokens of all outputs; of a `decode`: of this attempt",
    Attribute.CACHED_TOKENS: "tokens of the prompt that no node computed, because prefix caches had their KV",
    Attribute.ERROR_TYPE: "the error's reason, as in metrics; only on spans that failed",
    Attribute.REQUEST_ID: "the request's id, as in headers, receipts and log lines",
    Attribute.CLIENT: "name of the client, where clients have keys",
    Attribute.OUTCOME: "how the request ended, as in `baton_requests_total`",
    Attribute.KEPT: "why the trace is exported: `head`, `failed`, `slow` or `retried`",
    Attribute.CUT: "number of events that the trace lacks, because the request had too many",
    Attribute.PATH: "where the prompt was prefilled: `remote`, `local` or `split`",
    Attribute.WHY: "why it was prefilled there, and after which failures: one sentence, as in the receipt",
    Attribute.ATTEMPTS: "number of attempts to prefill the prompt, as in the receipt",
    Attribute.OUTPUT: "index of the output in the request, if there are several",
    Attribute.ATTEMPT: "number of the attempt, from 1",
    Attribute.NODE: "name of the node",
    Attribute.ADDRESS: "address of the node",
    Attribute.REASON: "why the attempt was lost",
    Attribute.STAGE: "which node failed: `prefill` or `decode`",
    Attribute.QUEUE_S: "seconds of waiting on the node",
    Attribute.TOKEN_START: "first token, counted from the beginning of the prompt",
    Attribute.TOKEN_STOP: "the token after the last one",
    Attribute.NODE_CACHED: "tokens that this node's prefix cache had",
    Attribute.BYTES: "bytes of KV on the wire",
    Attribute.SEGMENTS: "number of messages with KV",
    Attribute.TRANSPORT: "what carried the KV, such as `rc` or `tcp`",
    Attribute.CONVERTED: "how KV was converted, such as `bfloat16 to fp8`",
    Attribute.EXPOSED_S: "seconds from the first token's sampling to admission: what the hand-over adds to the request",
    Attribute.MERGED: "number of chunks or sends that this span merges, if a prompt has too many for one span each",
}


@dataclass(frozen=True)
class SpanType:
    """One kind of span.

    Args:
        name: name of the span; `{}` encloses attributes.
        role: the process that does the work; the span's resource names it.
        parent: name of the parent span; empty: it is the root.
    """

    name: str
    role: ProcessRole
    parent: str
    meaning: str
    attributes: tuple[Attribute, ...] = ()


A = Attribute

REQUEST = SpanType(
    "{gen_ai.operation.name} {gen_ai.request.model}",
    ProcessRole.GATEWAY,
    "",
    "the request, from its arrival at the gateway to its last message",
    (
        A.OPERATION, A.PROVIDER, A.REQUEST_MODEL, A.RESPONSE_MODEL, A.MAX_TOKENS, A.CHOICES, A.RESPONSE_ID,
        A.FINISH_REASONS, A.FIRST_TOKEN_S, A.INPUT_TOKENS, A.OUTPUT_TOKENS, A.CACHED_TOKENS, A.ERROR_TYPE,
        A.REQUEST_ID, A.CLIENT, A.OUTCOME, A.KEPT, A.CUT, A.PATH, A.WHY, A.ATTEMPTS,
    ),
)  # fmt: skip
PREPARE = SpanType("prepare", ProcessRole.GATEWAY, "request", "template, tokenizer and all checks")
QUEUE = SpanType("queue", ProcessRole.GATEWAY, "request", "the wait for the request's turn at the gateway")
ATTEMPT = SpanType(
    "attempt",
    ProcessRole.GATEWAY,
    "request",
    "one node decodes the request, from the submission until the gateway leaves it; after a lost attempt, with a "
    "link to it",
    (A.ATTEMPT, A.OUTPUT, A.NODE, A.ADDRESS, A.ERROR_TYPE),
)
RESERVE = SpanType(
    "decode.reserve",
    ProcessRole.DECODE,
    "attempt",
    "the node that decodes reserves blocks, and opens a lease where KV will come",
    (A.QUEUE_S, A.NODE_CACHED),
)
PREFILL = SpanType(
    "prefill",
    ProcessRole.PREFILL,
    "attempt",
    "one prefill node computes the prompt and sends all KV; or the decode node computes it itself",
    (A.NODE, A.ADDRESS, A.TOKEN_START, A.TOKEN_STOP, A.NODE_CACHED, A.QUEUE_S, A.ERROR_TYPE),
)
PREFILL_QUEUE = SpanType(
    "prefill.queue", ProcessRole.PREFILL, "prefill", "the wait for the first step that computes it"
)
CHUNK = SpanType(
    "prefill.chunk",
    ProcessRole.PREFILL,
    "prefill",
    "one chunk of the prompt, from the end of the one before it; where the decode node computes it, on that node",
    (A.TOKEN_START, A.TOKEN_STOP, A.MERGED),
)
SEND = SpanType(
    "kv.send",
    ProcessRole.PREFILL,
    "prefill",
    "KV that was sent together, while the next chunk may compute",
    (A.TOKEN_START, A.TOKEN_STOP, A.SEGMENTS, A.BYTES, A.MERGED),
)
TRANSFER = SpanType(
    "kv.transfer",
    ProcessRole.DECODE,
    "attempt",
    "from the first KV that is sent until all of it lies in the decode node's blocks",
    (A.BYTES, A.SEGMENTS, A.TRANSPORT, A.CONVERTED, A.EXPOSED_S),
)
ADMIT = SpanType(
    "decode.admit",
    ProcessRole.DECODE,
    "attempt",
    "from the arrival of all KV and of the hand-over until the request joins the batch",
)
DECODE = SpanType(
    "decode",
    ProcessRole.DECODE,
    "attempt",
    "from admission, or from the end of the prefill there, until the node is left",
    (A.OUTPUT_TOKENS,),
)
POOL = SpanType(
    "pool",
    ProcessRole.PREFILL,
    "request",
    "one prefill node computes a batch of prompts for embeddings or scores",
    (A.NODE, A.ADDRESS, A.QUEUE_S, A.INPUT_TOKENS, A.NODE_CACHED, A.ATTEMPTS),
)

SPANS = (REQUEST, PREPARE, QUEUE, ATTEMPT, RESERVE, PREFILL, PREFILL_QUEUE, CHUNK, SEND, TRANSFER, ADMIT, DECODE, POOL)

RETRY_EVENT = "retry"
FIRST_TOKEN_EVENT = "first token"
LEFT_EVENT = "lost node"
EVENTS = {
    RETRY_EVENT: "on the request: an attempt was lost and another one began, or another prefill node was asked",
    FIRST_TOKEN_EVENT: "on the request: the client's first token was passed on",
    LEFT_EVENT: "on the request: a node stopped answering and counts as lost",
}
